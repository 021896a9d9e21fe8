//! [`ClusterBlobs`]: blobs on the peers of a cluster, for blocking threads.
//!
//! Blobs on their way to the peers are in a *window* of bounded size:
//!
//! ```text
//! put ─► window ─► known to the peers? ─► encode ─► to many peers at once ─► durable: leaves it
//!          ▲               │ yes: leaves the window                │
//!          │                                                       └─► failed: stays
//!          └─────────────────────── flush tries again ◄────────────────────┘
//! ```
//!
//! What the window promises:
//!
//! - **Put** copies a blob into the window and returns. It waits when the window is full.
//! - **Get** can read every blob that is in the window.
//! - **Flush** returns when every blob that was put before it is durable with its full redundancy.
//!   It fails if a blob cannot be stored. That blob stays in the window, and the next flush tries
//!   again.
//! - **Eviction.** If the window is full of failed blobs, the blobs that can already be read from
//!   the peers leave it. The next flush reads them from the peers and sends their missing
//!   fragments.
//!
//! How threads share the work:
//!
//! - One thread of this object owns all connections.
//! - Other threads, one for each processor, encode: they cut blobs into blocks and compute parity
//!   and checksums.
//! - No thread waits for another thread while it holds a lock.
//! - The window makes progress without further calls of its users.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::cluster::{Cluster, Progress};
use super::recent_set::RecentSet;
use super::records::FoundRecords;
use super::reservation::Reservation;
use super::window::{Content, Entry, Status, Window};
use crate::blobs::{Blobs, NewBlob};
use crate::collection::CollectionNumber;
use crate::encoding::fragment::{Kind, MAX_CONTENT, Plain, cut};
use crate::encoding::redundancy::{Redundancy, StoragePolicy};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};

/// The most bytes of blocks in the window.
const WINDOW_BYTES: usize = 64 << 20;

/// The most blobs in one query to the peers.
const QUERY_BATCH: usize = 256;

/// The most queries at a time.
const PARALLEL_QUERIES: usize = 4;

/// The most blobs that one thread encodes and that are then sent together. A peer gets its
/// fragments of all of them with one request.
const SEND_BATCH: usize = 16;

/// Threads that wait for room are woken when one part in this many of the window is free.
const WAKE_FRACTION: usize = 8;

/// How long the names of stored blobs are remembered. Afterwards the peers are asked again, which
/// resets the idle timers of the fragments. A fragment that nothing refers to is deleted only after
/// a longer idle time.
const KNOWN_TTL: Duration = Duration::from_secs(600);

/// Byte counters of a [`ClusterBlobs`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of content that were put.
    pub dirty: u64,
    /// Bytes of blocks that were sent, including redundancy.
    pub sent: u64,
    /// Bytes of content that were not sent because the peers already had them.
    pub saved: u64,
}

/// A blob store on the peers of a cluster. Its calls block, so asynchronous code must not use it.
pub struct ClusterBlobs {
    shared: Arc<Shared>,
    runtime: Handle,
    /// Sends the numbers of blobs in the window that are to be stored.
    queue: Option<mpsc::UnboundedSender<Vec<u64>>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
    /// Locked by the thread that raises the stamp.
    raising: Mutex<()>,
}

struct Shared {
    cluster: Cluster,
    limit: usize,
    window: Mutex<Window>,
    /// Signals that a blob was copied into the window, left it, failed, or became available.
    changed: Condvar,
    known: Mutex<KnownBlobs>,
    /// Limits the number of threads that encode at a time.
    encoders: Semaphore,
    dirty: AtomicU64,
    sent: AtomicU64,
    saved: AtomicU64,
}

/// A cache of the blobs that are stored with their full redundancy. It is cleared when a peer goes
/// away, because some of the blobs may then lack redundancy, and after [`KNOWN_TTL`].
struct KnownBlobs {
    blobs: RecentSet<(BlobId, Redundancy)>,
    /// The value of [`Cluster::losses`] when the cache was last cleared.
    losses: u64,
    /// The time when the cache was last cleared.
    since: Instant,
}

impl ClusterBlobs {
    /// Creates a blob store on the peers of a cluster, with the default window.
    pub fn new(cluster: Cluster) -> Result<ClusterBlobs> {
        ClusterBlobs::with_window(cluster, WINDOW_BYTES)
    }

    /// Creates a blob store whose window holds at most `limit` bytes of blocks. A blob that is
    /// larger enters only an empty window.
    pub fn with_window(cluster: Cluster, limit: usize) -> Result<ClusterBlobs> {
        let failed = |error| Error::io("starting a thread for", "the cluster".as_ref(), error);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            cluster,
            limit,
            window: Mutex::default(),
            changed: Condvar::new(),
            known: Mutex::new(KnownBlobs {
                blobs: RecentSet::default(),
                losses: 0,
                since: Instant::now(),
            }),
            encoders: Semaphore::new(processors),
            dirty: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            saved: AtomicU64::new(0),
        });
        let handle = runtime.handle().clone();
        let (queue, waiting) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread_shared = shared.clone();
        let run = move || {
            runtime.spawn(drive(thread_shared, waiting));
            // The result is always an error: `ClusterBlobs` drops the sender and never sends.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("cluster".into()).spawn(run).map_err(failed)?;
        let (queue, stop, thread) = (Some(queue), Some(stop), Some(thread));
        let raising = Mutex::default();
        Ok(ClusterBlobs { shared, runtime: handle, queue, stop, thread, raising })
    }

    /// Returns the client of the cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.shared.cluster
    }

    /// Returns the runtime that owns the cluster's connections, for other requests to the peers.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Returns the byte counts since this object was created.
    pub fn counters(&self) -> Counters {
        let Shared { dirty, sent, saved, .. } = &*self.shared;
        let [dirty, sent, saved] = [dirty, sent, saved].map(|one| one.load(Ordering::Relaxed));
        Counters { dirty, sent, saved }
    }

    /// Sends again the failed blobs whose numbers are below `before`.
    fn retry_failed(&self, window: &mut Window, before: u64) {
        let mut again = Vec::new();
        for (number, entry) in window.entries.range_mut(..before) {
            if let Some(entry) = entry
                && matches!(entry.status, Status::Failed(_))
            {
                entry.status = Status::UnderWay;
                entry.losses = self.shared.cluster.losses();
                again.push(*number);
            }
        }
        self.send(&mut again);
    }

    /// Queues blobs of the window to be stored. One message carries many numbers, because each
    /// message wakes a thread.
    fn send(&self, numbers: &mut Vec<u64>) {
        // The receiver lives as long as the thread, which outlives the queue. So the send succeeds.
        if let Some(queue) = &self.queue
            && !numbers.is_empty()
        {
            let _ = queue.send(std::mem::take(numbers));
        }
    }

    /// Reserves room in the window for a blob and returns the number of its entry. Returns `None`
    /// if the blob is already in the window. Sends the `unsent` blobs before it waits.
    fn enter_window(
        &self,
        name: (BlobId, Redundancy),
        bytes: usize,
        unsent: &mut Vec<u64>,
    ) -> Result<Option<u64>> {
        let mut window = self.shared.window();
        let mut tried = false;
        loop {
            if let Some(number) = window.names.get(&name) {
                if matches!(window.entries.get(number), Some(Some(_))) {
                    return Ok(None);
                }
                // Another thread is copying the blob into the window. A put must not return before
                // that is done, because its caller may read the blob at once.
                self.send(unsent);
                window.copying += 1;
                window = self.shared.wait(window);
                window.copying -= 1;
                continue;
            }
            if window.bytes == 0 || window.bytes + bytes <= self.shared.limit {
                break;
            }
            self.send(unsent);
            let next = window.next;
            match window.failure(next, |_| true) {
                Some(Err(failure)) if tried => {
                    if !window.evict_degraded() {
                        return Err(failure);
                    }
                }
                // Only failed blobs occupy the window. The peers may be back, so they are sent
                // again.
                Some(_) => {
                    tried = true;
                    self.retry_failed(&mut window, next);
                }
                None => window = self.shared.wait(window),
            }
        }
        let number = window.next;
        window.next += 1;
        window.bytes += bytes;
        window.entries.insert(number, None);
        window.names.insert(name, number);
        Ok(Some(number))
    }

    /// Waits for every blob that was put before this call and for which `counts` is true: until it
    /// is durable or no longer counts. Fails if such a blob has failed and none is in flight.
    fn flush_while(&self, counts: impl Fn(&Entry) -> bool) -> Result<()> {
        let mut window = self.shared.window();
        let before = window.next;
        self.retry_failed(&mut window, before);
        window.flushing += 1;
        let flushed = loop {
            match window.failure(before, &counts) {
                Some(result) => break result,
                None => window = self.shared.wait(window),
            }
        };
        window.flushing -= 1;
        flushed
    }
}

impl ClusterBlobs {
    /// Reads a blob from the peers and puts it again.
    fn put_again(&self, blob: BlobId, policy: &StoragePolicy, buf: &mut [u8]) -> Result<()> {
        let len = self.runtime.block_on(self.shared.cluster.get(&blob, buf))?;
        self.shared.known().blobs.clear();
        self.put(&[NewBlob::new(&buf[..len])], policy).map(drop)
    }

    /// Completes the redundancy of the blobs that left the window without it, unless a repair
    /// already has. Fails once if such a blob is lost: what was put before this call must be put
    /// again then, and later flushes do not depend on it.
    fn complete_degraded(&self) -> Result<()> {
        let mut lost = 0;
        let result = self.put_degraded_again(&mut lost);
        // Before any other error: nobody hears of these blobs again.
        if lost > 0 { Err(Error::ContentLost { blobs: lost }) } else { result }
    }

    /// Does the work of [`Self::complete_degraded`], and counts the blobs that are lost.
    fn put_degraded_again(&self, lost: &mut usize) -> Result<()> {
        let mut groups: HashMap<StoragePolicy, Vec<BlobId>> = HashMap::new();
        for (blob, policy) in &self.shared.window().degraded {
            groups.entry(*policy).or_default().push(*blob);
        }
        if groups.is_empty() {
            return Ok(());
        }
        let mut buf = vec![0; MAX_CONTENT];
        for (policy, blobs) in groups {
            let known = self.runtime.block_on(self.shared.cluster.known(&blobs, &policy));
            for (blob, is_known) in blobs.into_iter().zip(known) {
                // Before the put: if the blob must leave the window again, it is added here again.
                self.shared.window().degraded.remove(&(blob, policy));
                if is_known {
                    continue;
                }
                match self.put_again(blob, &policy, &mut buf) {
                    Ok(()) => {}
                    // All peers have answered, and it cannot be read.
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::error!(%blob, %error, "a blob is lost that had little redundancy");
                        self.shared.known().blobs.clear();
                        *lost += 1;
                    }
                    Err(error) => {
                        self.shared.window().degraded.insert((blob, policy));
                        return Err(error);
                    }
                }
            }
        }
        self.flush_while(|_| true)?;
        match self.shared.window().degraded.len() {
            0 => Ok(()),
            blobs => {
                let reason = "they can be read but lack redundancy".into();
                Err(Error::NotStored { blobs, reason })
            }
        }
    }
}

/// Blobs of the window that wait to be sent together. They are sent on drop, however the put ends.
struct Unsent<'a> {
    blobs: &'a ClusterBlobs,
    numbers: Vec<u64>,
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        self.blobs.send(&mut self.numbers);
    }
}

impl Drop for ClusterBlobs {
    fn drop(&mut self) {
        drop((self.queue.take(), self.stop.take()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Blobs for ClusterBlobs {
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
        let content = {
            let window = self.shared.window();
            let entry = window.contents.get(id).and_then(|number| window.entries.get(number));
            entry.and_then(|entry| Some(entry.as_ref()?.content.clone()))
        };
        match content {
            None => self.runtime.block_on(self.shared.cluster.get(id, buf)),
            Some(content) => content.read(buf),
        }
    }

    fn put(&self, blobs: &[NewBlob<'_>], policy: &StoragePolicy) -> Result<u64> {
        let (mut accepted, mut unsent) = (0, Unsent { blobs: self, numbers: Vec::new() });
        for new in blobs {
            let (blob, content) = (new.id(), new.content);
            let len = content.len() as u64;
            if content.is_empty() || content.len() > MAX_CONTENT {
                return Err(Error::BadArgument(format!("a blob cannot have {len} bytes")));
            }
            self.shared.dirty.fetch_add(len, Ordering::Relaxed);
            let (name, policy) = ((blob, policy.redundancy), *policy);
            let bytes = match policy.redundancy {
                Redundancy::Replicas(_) => content.len(),
                code => content.len().div_ceil(code.needed().max(1)) * code.width(),
            };
            let is_known = self.shared.known().blobs.contains(&name);
            let number = match is_known {
                true => None,
                false => self.enter_window(name, bytes, &mut unsent.numbers)?,
            };
            let Some(number) = number else {
                self.shared.saved.fetch_add(len, Ordering::Relaxed);
                continue;
            };
            let plain = Plain::new(new.hash.clone(), content, policy.redundancy);
            let content = Content::Plain(plain);
            let (status, available) = (Status::UnderWay, false);
            let losses = self.shared.cluster.losses();
            let entry = Entry { blob, policy, bytes, content, status, losses, available };
            {
                let mut window = self.shared.window();
                window.entries.insert(number, Some(entry));
                window.contents.insert(blob, number);
                if window.copying > 0 {
                    self.shared.changed.notify_all();
                }
            }
            unsent.numbers.push(number);
            accepted += len;
        }
        Ok(accepted)
    }

    fn flush(&self) -> Result<()> {
        self.flush_while(|_| true)?;
        self.complete_degraded()
    }

    fn raise_stamp(&self, number: CollectionNumber) {
        let _raising = self.raising.lock().unwrap_or_else(PoisonError::into_inner);
        // What is under way may be stored with the older stamp. What fails is sent again later, with
        // the new one.
        if self.shared.cluster.raise_stamp(number)
            && let Err(error) = self.flush_while(|_| true)
        {
            tracing::debug!(%error, "some blobs are stored later, with the new stamp");
        }
    }

    fn known(&self, ids: &[BlobId], policy: &StoragePolicy) -> Result<Vec<bool>> {
        Ok(self.runtime.block_on(self.shared.cluster.known(ids, policy)))
    }
}

impl ClusterBlobs {
    /// Returns when every process can read every blob that was put before this call. Blobs may
    /// still lack redundancy.
    pub fn flush_available(&self) -> Result<()> {
        self.shared.window().availability_waiters += 1;
        let flushed = self.flush_while(|entry| !entry.available);
        self.shared.window().availability_waiters -= 1;
        flushed
    }

    /// Stores a snapshot's record durably and returns its name. With `lenient`, the record may have
    /// fewer copies than the policy asks for.
    pub(crate) fn put_record(
        &self,
        record: &[u8],
        policy: &StoragePolicy,
        lenient: bool,
    ) -> Result<BlobId> {
        // The record bypasses the window, because the publication waits for this one blob.
        self.runtime.block_on(self.shared.cluster.put_record(record, policy, lenient))
    }

    /// Reads all records that the peers have.
    pub(crate) fn records(&self) -> FoundRecords {
        self.runtime.block_on(self.shared.cluster.records())
    }

    /// Reserves space for `bytes` of content that is stored with this policy. Returns how much each
    /// peer reserves. Fails if the peers do not have enough free space.
    pub(crate) fn reserve(&self, bytes: u64, policy: &StoragePolicy) -> Result<Reservation> {
        let (width, needed) = (policy.redundancy.width() as u64, policy.redundancy.needed() as u64);
        let bytes = bytes.saturating_mul(width).div_ceil(needed.max(1));
        self.runtime.block_on(self.shared.cluster.reserve(bytes))
    }

    /// Releases space that was [reserved](ClusterBlobs::reserve).
    pub(crate) fn release(&self, reserved: &[(PeerId, u64)]) {
        self.runtime.block_on(self.shared.cluster.release(reserved));
    }

    /// Clears the cache of stored blobs. After the loss of a peer, blobs that no snapshot refers to
    /// may be gone.
    pub(crate) fn forget_known(&self) {
        self.shared.known().blobs.clear();
    }
}

impl Shared {
    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the cache of stored blobs. Clears it first if a peer went away or the cache is too
    /// old.
    fn known(&self) -> MutexGuard<'_, KnownBlobs> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let losses = self.cluster.losses();
        if known.losses != losses || known.since.elapsed() >= KNOWN_TTL {
            *known = KnownBlobs { blobs: RecentSet::default(), losses, since: Instant::now() };
        }
        known
    }

    fn wait<'a>(&self, window: MutexGuard<'a, Window>) -> MutexGuard<'a, Window> {
        self.changed.wait(window).unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the results of blobs, and wakes the threads that wait for them.
    fn record_results(&self, all: impl IntoIterator<Item = (u64, Result<(), String>)>) {
        let mut window = self.window();
        for (number, result) in all {
            match result {
                Ok(()) => {
                    if let Some(entry) = window.remove(number) {
                        let name = (entry.blob, entry.policy.redundancy);
                        // If a peer went away in the meantime, it may be one that holds the blob.
                        let mut known = self.known();
                        if known.losses == entry.losses {
                            known.blobs.insert(name);
                        }
                    }
                }
                Err(reason) => {
                    if let Some(Some(entry)) = window.entries.get_mut(&number) {
                        entry.status = Status::Failed(reason);
                    }
                }
            }
        }
        // Waking a thread costs as much as copying a chunk, so threads that wait for room are woken
        // only when enough is free. Failed blobs keep their room, and then that may never be the
        // case.
        let has_room = window.bytes <= self.limit - self.limit / WAKE_FRACTION;
        let should_wake = has_room || window.flushing > 0 || window.has_failed();
        drop(window);
        if should_wake {
            self.changed.notify_all();
        }
    }

    /// Marks blobs as available: they can be read from the peers.
    fn set_available(&self, numbers: impl Iterator<Item = u64>) {
        let mut window = self.window();
        for number in numbers {
            if let Some(Some(entry)) = window.entries.get_mut(&number) {
                entry.available = true;
            }
        }
        if window.availability_waiters > 0 {
            self.changed.notify_all();
        }
    }
}

/// A blob that is being stored. If this is dropped without a result, the blob is recorded as
/// failed, so that no thread waits for it forever.
struct InFlight {
    shared: Arc<Shared>,
    number: u64,
    done: bool,
}

impl InFlight {
    fn end_all(shared: &Shared, all: Vec<(InFlight, Result<(), String>)>) {
        shared.record_results(all.into_iter().map(|(mut one, result)| {
            one.done = true;
            (one.number, result)
        }));
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.done {
            self.shared.record_results([(self.number, Err("its transfer was aborted".into()))]);
        }
    }
}

/// Receives the numbers of blobs to store, and starts a query to the peers for each batch of them.
async fn drive(shared: Arc<Shared>, mut queue: mpsc::UnboundedReceiver<Vec<u64>>) {
    let query_permits = Arc::new(Semaphore::new(PARALLEL_QUERIES));
    let mut waiting = Vec::new();
    while let Some(first) = queue.recv().await {
        waiting.extend(first);
        while !waiting.is_empty() {
            let permit = query_permits.clone().acquire_owned().await;
            // Add the blobs that arrived while the previous queries ran.
            while waiting.len() < QUERY_BATCH
                && let Ok(more) = queue.try_recv()
            {
                waiting.extend(more);
            }
            let begin = |number| InFlight { shared: shared.clone(), number, done: false };
            let batch = waiting.drain(..waiting.len().min(QUERY_BATCH)).map(begin).collect();
            let shared = shared.clone();
            tokio::spawn(async move {
                let _permit = permit;
                query_and_store(&shared, batch).await;
            });
        }
    }
}

/// Asks the peers which blobs of a batch they have, and starts to store the others.
async fn query_and_store(shared: &Arc<Shared>, batch: Vec<InFlight>) {
    let mut groups: HashMap<StoragePolicy, Vec<(BlobId, Content, InFlight)>> = HashMap::new();
    {
        let window = shared.window();
        for one in batch {
            if let Some(Some(entry)) = window.entries.get(&one.number) {
                let content = entry.content.clone();
                groups.entry(entry.policy).or_default().push((entry.blob, content, one));
            }
        }
    }
    for (policy, blobs) in groups {
        let names: Vec<_> = blobs.iter().map(|(blob, ..)| *blob).collect();
        let known = shared.cluster.known(&names, &policy).await;
        let (mut unknown, mut ended) = (Vec::new(), Vec::new());
        for ((_, content, one), is_known) in blobs.into_iter().zip(known) {
            if is_known {
                shared.saved.fetch_add(content.len() as u64, Ordering::Relaxed);
                ended.push((one, Ok(())));
            } else {
                unknown.push((content, one));
            }
        }
        InFlight::end_all(shared, ended);
        while !unknown.is_empty() {
            let rest = unknown.split_off(unknown.len().min(SEND_BATCH));
            tokio::spawn(encode_and_store(shared.clone(), policy, unknown));
            unknown = rest;
        }
    }
}

/// Encodes blobs and sends the fragments to their peers.
async fn encode_and_store(
    shared: Arc<Shared>,
    policy: StoragePolicy,
    blobs: Vec<(Content, InFlight)>,
) {
    let permit = shared.encoders.acquire().await;
    let encoding = tokio::task::spawn_blocking(move || {
        let cut = |(content, one)| match content {
            Content::Cut(encoded) => (encoded, one),
            Content::Plain(plain) => (Arc::new(cut(Kind::Content, &plain, &policy)), one),
        };
        blobs.into_iter().map(cut).collect::<Vec<_>>()
    });
    // If the task panics or is cancelled, the blobs have been dropped and are recorded as failed.
    let Ok(all) = encoding.await else { return };
    drop(permit);
    let (mut encoded_blobs, mut in_flight) = (Vec::new(), Vec::new());
    {
        let mut window = shared.window();
        for (encoded, one) in all {
            if let Some(Some(entry)) = window.entries.get_mut(&one.number) {
                entry.content = Content::Cut(encoded.clone());
            }
            encoded_blobs.push(encoded);
            in_flight.push(Some(one));
        }
    }
    let on_progress = |updates: Vec<(usize, Progress)>| {
        let (mut available, mut ended) = (Vec::new(), Vec::new());
        for (blob, progress) in updates {
            match progress {
                Progress::Available => {
                    available.extend(in_flight[blob].as_ref().map(|one| one.number));
                }
                Progress::Ended(stored) => {
                    let sent = stored.as_ref().map_or(0, |stored| stored.sent);
                    shared.sent.fetch_add(sent, Ordering::Relaxed);
                    let result = stored.map(drop).map_err(|error| error.to_string());
                    ended.extend(in_flight[blob].take().map(|one| (one, result)));
                }
            }
        }
        shared.set_available(available.into_iter());
        InFlight::end_all(&shared, ended);
    };
    shared.cluster.store(encoded_blobs, policy.redundancy, on_progress).await;
}
