//! Checkpoints: requested, accepted, persisted, published.
//!
//! [`Commits::checkpoint`] is BlobCR's CHECKPOINT and COMMIT. It ends the epoch, and answers with a
//! number that was reserved before. So its duration depends neither on the size of the disk, nor on
//! the amount of changes, nor on the repository. Accepted checkpoints are queued for [`persist`],
//! which makes them stable in the background, in order.
//!
//! A snapshot number that was given out is never given to another checkpoint. Before anybody can
//! learn of a number, the live directory records it as used. After a kill, the next process
//! continues with the first number that is not recorded as used. Without a live directory, nobody
//! knows which of the reserved numbers were used, so the next process skips all of them.

#[cfg(test)]
mod failure_tests;
#[cfg(test)]
mod label_tests;
mod layer_changes;
pub(crate) mod persist;
pub(crate) mod stall;
mod store_layer;
pub(crate) mod throttle;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cairn_agent::{Checkpoint, Failed, PendingCommit, Refusal, RefusalKind, is_valid_label};
use cairn_store::{Consistency, ErrorKind, Metadata, NewSnapshot, now};
use tokio::sync::watch;

use crate::counters::Counters;
use crate::image::Image;
use crate::local_disk::LocalDisk;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::manager::MAX_LAYERS;
use crate::mirror::files::live_dir::UnusedNumbers;

/// The number of snapshot numbers to hold. With eight more than [`MIN_NUMBERS`], the catalog is asked
/// for numbers at every eighth checkpoint. At most this many numbers are skipped when the live
/// directory is lost.
const RESERVED_NUMBERS: u64 = MIN_NUMBERS + 8;

/// With fewer numbers, more are reserved. There is one for each checkpoint that can wait to become
/// stable, so that none is refused for lack of a number while the catalog is away. With one more, the
/// record of each snapshot has a `next_number` above all numbers that were given out, so that a catalog
/// that is rebuilt from records gives none of them out again.
const MIN_NUMBERS: u64 = MAX_LAYERS as u64 + 1;

/// The state of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CommitState {
    Pending,
    Stable { stored_bytes: u64, elapsed: Duration },
    Failed(String),
}

/// A checkpoint that was accepted.
pub(crate) struct Commit {
    pub(crate) new: NewSnapshot,
    layer: Arc<Layer>,
    asked: Instant,
    state: watch::Sender<CommitState>,
    /// Why the last try to store the checkpoint failed, if it did.
    last_error: Mutex<Option<String>>,
}

impl Commit {
    fn new(new: NewSnapshot, layer: Arc<Layer>, asked: Instant) -> Arc<Commit> {
        let state = watch::Sender::new(CommitState::Pending);
        Arc::new(Commit { new, layer, asked, state, last_error: Mutex::default() })
    }

    fn last_error(&self) -> MutexGuard<'_, Option<String>> {
        self.last_error.lock().expect("no code panics with this lock held")
    }

    fn set_last_error(&self, error: String) {
        *self.last_error() = Some(error);
    }

    /// Returns a receiver that follows the checkpoint's state.
    pub(crate) fn watch(&self) -> watch::Receiver<CommitState> {
        self.state.subscribe()
    }
}

/// What the catalog has of a checkpoint when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// The snapshot is published, or may be: its label is in use. A label that is in use here and
    /// not in the catalog is freed when it is requested again.
    Published,
    /// The snapshot will never be published, so its label is free.
    Failed,
    /// The snapshot has failed, and the catalog does not know that yet. Its label stays in use until
    /// it does.
    Unrecorded,
}

impl Ending {
    /// The ending of a checkpoint after the catalog was told that it failed.
    fn of_failure(told: &cairn_store::Result<()>) -> Ending {
        match told {
            Ok(()) => Ending::Failed,
            // The catalog has never heard of the snapshot, or the snapshot was removed.
            Err(error) if error.kind() == ErrorKind::NotFound => Ending::Failed,
            Err(error) if error.kind() == ErrorKind::Unavailable => Ending::Unrecorded,
            // The publication was carried out although its answer was lost. Or the catalog refuses
            // this process, and does not say what it has.
            Err(_) => Ending::Published,
        }
    }
}

/// What [`persist`] does next.
enum NextCommit {
    Commit(Arc<Commit>),
    Nothing,
    Closed,
}

struct CommitQueue {
    /// Checkpoints that are accepted and have not ended, oldest first. The first one is being
    /// persisted.
    commits: VecDeque<Arc<Commit>>,
    numbers: Range<u64>,
    /// The labels in use, each with the number of the checkpoint or snapshot that has it.
    labels: HashMap<String, u64>,
    /// Failed checkpoints whose failure is not recorded in the catalog yet, with the reason.
    unrecorded: Vec<(NewSnapshot, String)>,
    /// The number of the last checkpoint that failed in this process, and the reason.
    last_failed: Option<(u64, String)>,
    /// Set when the process stops. Then nothing more is accepted.
    closed: bool,
}

impl CommitQueue {
    /// Whether the label belongs to a checkpoint that the catalog may not know yet.
    fn is_pending(&self, label: &str) -> bool {
        let commits = self.commits.iter().map(|commit| &commit.new);
        let mut pending = commits.chain(self.unrecorded.iter().map(|(new, _)| new));
        pending.any(|new| new.label.as_deref() == Some(label))
    }

    /// Enters a label that is in use. One that another checkpoint or snapshot has stays with it.
    fn add_label(&mut self, new: &NewSnapshot) {
        if let Some(label) = &new.label {
            self.labels.entry(label.clone()).or_insert(new.number);
        }
    }

    /// Removes a label if `holder` has it. Returns whether the label is free.
    fn remove_label(&mut self, label: &str, holder: u64) -> bool {
        if self.labels.get(label) == Some(&holder) {
            self.labels.remove(label);
        }
        !self.labels.contains_key(label)
    }

    /// Keeps what a failed checkpoint leaves: its label, or its failure that has to be recorded.
    fn failed(&mut self, new: &NewSnapshot, reason: &str, ending: Ending) {
        self.unrecorded.retain(|(other, _)| other.number != new.number);
        match (ending, &new.label) {
            (Ending::Unrecorded, _) => self.unrecorded.push((new.clone(), reason.into())),
            (Ending::Failed, Some(label)) => {
                self.remove_label(label, new.number);
            }
            (Ending::Failed | Ending::Published, _) => {}
        }
    }
}

/// Does [`Commits::free_label`].
fn free_label(
    queue: &Mutex<CommitQueue>,
    label: &str,
    is_in_catalog: impl FnOnce() -> bool,
) -> bool {
    let lock = || queue.lock().expect("no code panics with the commits locked");
    let holder = {
        let queue = lock();
        let Some(holder) = queue.labels.get(label) else { return true };
        // Before the query: the catalog knows every checkpoint that has left the queue by now.
        if queue.is_pending(label) {
            return false;
        }
        *holder
    };
    // Another checkpoint may get the label during the query, and may even end.
    !is_in_catalog() && lock().remove_label(label, holder)
}

/// Does [`Commits::record_failures`].
fn record_failures(
    queue: &Mutex<CommitQueue>,
    record: impl Fn(&NewSnapshot, &str) -> Ending,
    is_stopping: impl Fn() -> bool,
) {
    let lock = || queue.lock().expect("no code panics with the commits locked");
    let failures = lock().unrecorded.clone();
    for (new, reason) in failures {
        if is_stopping() {
            return;
        }
        let ending = record(&new, &reason);
        // A failure that stays unrecorded goes to the end of the list.
        lock().failed(&new, &reason, ending);
        if ending == Ending::Unrecorded {
            return;
        }
    }
}

/// The checkpoints of a disk.
pub(crate) struct Commits {
    disk: Arc<LocalDisk>,
    image: Arc<Image>,
    counters: Arc<Counters>,
    unused_numbers: UnusedNumbers,
    queue: Mutex<CommitQueue>,
    changed: Condvar,
}

impl Commits {
    /// `numbers` are reserved and unused, as `unused_numbers` has recorded. `labels` are in use in the
    /// image. `layers` belong to checkpoints that an earlier process accepted.
    pub(crate) fn new(
        (disk, image, counters): (Arc<LocalDisk>, Arc<Image>, Arc<Counters>),
        unused_numbers: UnusedNumbers,
        numbers: Range<u64>,
        labels: HashMap<String, u64>,
        layers: impl IntoIterator<Item = Arc<Layer>>,
    ) -> Commits {
        let commit = |layer: Arc<Layer>| {
            let new = layer.accepted()?;
            Some(Commit::new(new, layer, Instant::now()))
        };
        let commits: VecDeque<_> = layers.into_iter().filter_map(commit).collect();
        let accepted: Vec<_> = commits.iter().map(|commit| commit.new.clone()).collect();
        let mut queue = CommitQueue {
            commits,
            numbers,
            labels,
            unrecorded: Vec::new(),
            last_failed: None,
            closed: false,
        };
        accepted.iter().for_each(|new| queue.add_label(new));
        let (queue, changed) = (Mutex::new(queue), Condvar::new());
        Commits { disk, image, counters, unused_numbers, queue, changed }
    }

    /// Adds failures of an earlier process that are not recorded in the catalog yet.
    pub(crate) fn with_unrecorded(self, failures: Vec<(NewSnapshot, String)>) -> Commits {
        let mut queue = self.queue();
        failures.iter().for_each(|(new, _)| queue.add_label(new));
        queue.unrecorded.extend(failures);
        drop(queue);
        self
    }

    fn queue(&self) -> MutexGuard<'_, CommitQueue> {
        self.queue.lock().expect("no code panics with the commits locked")
    }

    /// Takes a checkpoint. It holds every write that completed before this call, and no write that
    /// is submitted after the call returns. `asked` is the time when the request was read.
    ///
    /// A guest leaves room for a checkpoint of the operator: it is refused unless one further checkpoint
    /// can be taken after its own.
    pub(crate) fn checkpoint(
        &self,
        request: &Checkpoint,
        is_from_guest: bool,
        asked: Instant,
    ) -> Result<Arc<Commit>, Refusal> {
        let refuse = |kind, message: &str| Err(Refusal { kind, message: message.into() });
        if self.disk.read_only {
            return refuse(
                RefusalKind::Denied,
                "the disk is read-only, so there is nothing to checkpoint",
            );
        }
        if let Some(reason) = self.image.poison_reason() {
            return Err(Refusal { kind: RefusalKind::Unavailable, message: reason });
        }
        // What is read from the data file may be older than what the guest has written.
        if let Some(reason) = self.disk.data_sync.failure() {
            return refuse(RefusalKind::Unavailable, reason);
        }
        if request.label.as_deref().is_some_and(|label| !is_valid_label(label)) {
            return refuse(
                RefusalKind::Invalid,
                "a label is 1 to 64 letters, digits, '.', '_' or '-', not only digits, and does \
                 not start with '-' or '.'",
            );
        }
        let metadata = match Metadata::try_from(request.metadata.clone()) {
            Ok(metadata) => metadata,
            Err(error) => {
                return Err(Refusal { kind: RefusalKind::Invalid, message: error.to_string() });
            }
        };
        let spare = usize::from(is_from_guest);
        let mut queue = self.queue();
        if queue.closed {
            return refuse(RefusalKind::Busy, "the disk's process is stopping; try again later");
        }
        if request.label.as_ref().is_some_and(|label| queue.labels.contains_key(label)) {
            return refuse(
                RefusalKind::Conflict,
                "the label is in use in this image; choose another",
            );
        }
        if queue.numbers.end - queue.numbers.start <= spare as u64 {
            return refuse(
                RefusalKind::Busy,
                "no snapshot number is reserved; try again in a moment",
            );
        }
        let too_many = "too many checkpoints wait to become stable; try again later";
        // Only this function adds layers, with the queue locked.
        if self.disk.mirror.epoch_view().layers.len() + spare >= MAX_LAYERS {
            return refuse(RefusalKind::Busy, too_many);
        }
        let layer = match self.disk.mirror.freeze() {
            Ok(Some(layer)) => layer,
            Ok(None) => return refuse(RefusalKind::Busy, too_many),
            Err(error) => {
                return Err(Refusal { kind: RefusalKind::Unavailable, message: error.to_string() });
            }
        };
        let number = queue.numbers.start;
        queue.numbers.start += 1;
        // Before anybody can learn of the number: no other checkpoint may get it.
        self.unused_numbers.record(&queue.numbers);
        queue.labels.extend(request.label.clone().map(|label| (label, number)));
        let new = NewSnapshot {
            number,
            label: request.label.clone(),
            metadata,
            is_from_guest,
            size: layer.size(),
            consistency: match request.consistency {
                cairn_agent::Consistency::Crash => Consistency::Crash,
                cairn_agent::Consistency::Filesystem => Consistency::Filesystem,
                cairn_agent::Consistency::Application => Consistency::Application,
            },
            time: now(),
            dirty_bytes: layer.dirty().len() * self.disk.mirror.layout().chunk_size() as u64,
            pause_us: asked.elapsed().as_micros() as u64,
        };
        // From here on the checkpoint survives the death of this process.
        layer.accept(&new);
        let commit = Commit::new(new, layer, asked);
        queue.commits.push_back(commit.clone());
        self.changed.notify_all();
        self.counters.checkpoints(1);
        Ok(commit)
    }

    /// Frees a label that neither an accepted checkpoint nor the catalog has. `is_in_catalog` asks the
    /// catalog. Returns whether the label is free.
    pub(crate) fn free_label(&self, label: &str, is_in_catalog: impl FnOnce() -> bool) -> bool {
        free_label(&self.queue, label, is_in_catalog)
    }

    /// The checkpoints that are accepted and have not ended, oldest first.
    pub(crate) fn accepted(&self) -> Vec<NewSnapshot> {
        self.queue().commits.iter().map(|commit| commit.new.clone()).collect()
    }

    /// The checkpoint with this number, if it has not ended.
    pub(crate) fn find(&self, number: u64) -> Option<Arc<Commit>> {
        self.queue().commits.iter().find(|commit| commit.new.number == number).cloned()
    }

    /// Why the checkpoint with this number failed, if the failure is not in the catalog yet.
    pub(crate) fn unrecorded_failure(&self, number: u64) -> Option<String> {
        let queue = self.queue();
        let found = queue.unrecorded.iter().find(|(new, _)| new.number == number);
        found.map(|(_, reason)| reason.clone())
    }

    /// Checkpoints that are not stable yet, oldest first.
    pub(crate) fn pending(&self) -> Vec<PendingCommit> {
        let commits: Vec<_> = self.queue().commits.iter().cloned().collect();
        commits
            .iter()
            .map(|commit| PendingCommit {
                snapshot: self.image.snapshot_name(commit.new.number),
                chunks: commit.layer.dirty().len(),
                done: commit.layer.stored_count(),
                last_error: commit.last_error().clone(),
            })
            .collect()
    }

    /// The last checkpoint that failed since the process started, if one did.
    pub(crate) fn last_failed(&self) -> Option<Failed> {
        let (number, reason) = self.queue().last_failed.clone()?;
        Some(Failed { snapshot: self.image.snapshot_name(number), number, reason })
    }

    /// Waits at most `limit` for a checkpoint to persist.
    fn next(&self, limit: Duration) -> NextCommit {
        let queue = self.queue();
        let idle = |queue: &mut CommitQueue| queue.commits.is_empty() && !queue.closed;
        let (queue, _) =
            self.changed.wait_timeout_while(queue, limit, idle).expect("as in `queue`");
        match queue.commits.front() {
            Some(commit) => NextCommit::Commit(commit.clone()),
            None if queue.closed => NextCommit::Closed,
            None => NextCommit::Nothing,
        }
    }

    /// Removes the first checkpoint, which has ended.
    fn ended(&self, commit: &Commit, state: CommitState, ending: Ending) {
        let mut queue = self.queue();
        match &state {
            CommitState::Failed(reason) => {
                queue.failed(&commit.new, reason, ending);
                queue.last_failed = Some((commit.new.number, reason.clone()));
            }
            CommitState::Stable { .. } | CommitState::Pending => {}
        }
        queue.commits.pop_front();
        drop(queue);
        commit.state.send_replace(state);
        self.changed.notify_all();
    }

    /// Tries again to record failures in the catalog. Ends at the first one that the catalog cannot
    /// record, and when `is_stopping`.
    fn record_failures(
        &self,
        record: impl Fn(&NewSnapshot, &str) -> Ending,
        is_stopping: impl Fn() -> bool,
    ) {
        record_failures(&self.queue, record, is_stopping);
    }

    /// Reserves snapshot numbers if too few are left.
    pub(crate) fn reserve_numbers(&self) -> cairn_store::Result<()> {
        let wanted = {
            let numbers = &self.queue().numbers;
            let left = numbers.end - numbers.start;
            if left < MIN_NUMBERS { RESERVED_NUMBERS - left } else { 0 }
        };
        if wanted > 0 {
            self.add_numbers(self.image.attachment.reserve(wanted)?);
        }
        Ok(())
    }

    /// Adds reserved numbers, and records in the live directory that they are unused.
    fn add_numbers(&self, more: Range<u64>) {
        let numbers = &mut self.queue().numbers;
        if numbers.end == more.start {
            numbers.end = more.end;
        } else {
            *numbers = more;
        }
        self.unused_numbers.record(numbers);
        self.unused_numbers.record_reservation(self.image.attachment.reservation());
    }

    /// Stops accepting checkpoints, and waits at most `limit` for the end of those that were accepted.
    pub(crate) fn close(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut queue = self.queue();
        queue.closed = true;
        self.changed.notify_all();
        while !queue.commits.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = self.changed.wait_timeout(queue, left).expect("as in `queue`").0;
        }
    }

    /// Takes all unused numbers, which the caller gives back to the catalog. First the live directory
    /// records that this process has none, because other processes may get them from then on. The
    /// record ends at the first number that is given back, and keeps the id of their reservation: if the
    /// process is killed before the catalog has them, the next process finds them there, and if it is
    /// killed after that, they are free.
    pub(crate) fn take_unused_numbers(&self) -> Range<u64> {
        let numbers = &mut self.queue().numbers;
        let unused = numbers.clone();
        numbers.end = numbers.start;
        self.unused_numbers.record(numbers);
        unused
    }

    /// The reserved numbers that were not used.
    pub(crate) fn unused_numbers(&self) -> Range<u64> {
        self.queue().numbers.clone()
    }
}
