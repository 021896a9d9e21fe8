//! Assembles a disk from its mirror's directory and the repository, serves it, and closes it again.

mod error;
mod former_writer;
mod local_state;
mod sockets;

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cairn_store::net::identity::Access;
use cairn_store::{
    Attachment, ErrorKind, MirrorOwner, Mode, NewSnapshot, Repository, Snapshot, SnapshotRef,
    SnapshotState,
};

use self::error::serving;
use self::local_state::LocalState;
use self::sockets::Sockets;
use crate::args::Args;
use crate::commit::persist::{Abort, Persister};
use crate::commit::throttle::CommitThrottle;
use crate::commit::{Commits, stall};
use crate::control::catalog_lane::CatalogLanes;
use crate::control::{self, CHECKPOINT_BURST, ControlContext};
use crate::counters::Counters;
use crate::fetch::Fetcher;
use crate::flush::{Flusher, INTENT_TIMEOUT};
use crate::grow::Grower;
use crate::guest::GuestState;
use crate::guest::ledger::LedgerFile;
use crate::image::Image;
use crate::lease;
use crate::local_disk::LocalDisk;
use crate::mirror::Mirror;
use crate::mirror::cow::CowSpace;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::cow::spill_space::SpillSpace;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::manager::EpochManager;
use crate::mirror::epoch::recovery::{Recovered, recover};
use crate::mirror::events::Events;
use crate::mirror::files::data_sync::DataSync;
use crate::mirror::files::live_dir::{self, UnusedNumbers};
use crate::mirror::layout::SECTOR_BYTES;
use crate::rate_limit::RateLimit;
use crate::vhost::server::{self, StopHandle};
use crate::worker::{self, Command, RequestContext};

pub use self::error::StartError;

/// How long a stop waits for checkpoints that are almost stable.
const COMMIT_GRACE_PERIOD: Duration = Duration::from_secs(2);

/// How long a stop then waits for the requests to the repository that storing them has sent.
const PERSIST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a stop waits until the catalog has the lease back.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a stop looks whether a thread has ended.
const THREAD_POLL: Duration = Duration::from_millis(5);

/// The memory for copies on their way from the data file to the spill file.
const SPILL_BUFFER_BYTES: usize = 8 << 20;

/// The memory for bounce buffers.
const BOUNCE_BUFFER_BYTES: usize = 64 << 20;

/// Serves the disk that the arguments name, until a signal or the end of the only connection.
pub fn run(args: &Args) -> Result<(), StartError> {
    let sockets = Sockets::open(args)?;
    let repository = |source| StartError::Repository { image: args.image.clone(), source };
    let wanted: SnapshotRef = args.image.parse().map_err(repository)?;
    let access = Access::new(args.keys.as_deref(), args.insecure);
    let store = Repository::open_anywhere(&args.store, &access).map_err(repository)?;
    let snapshot = store.catalog().resolve(&wanted).map_err(repository)?;
    snapshot.require_content().map_err(repository)?;
    let store = store.with_policy(snapshot.policy).with_durability(args.durability);
    // A writer has the size of its image, and a reader that of its snapshot.
    let geometry = match args.read_only {
        true => snapshot.geometry,
        false => store.catalog().image(&snapshot.image).map_err(repository)?.geometry,
    };
    let local = LocalState::open(args, &snapshot, geometry)?;
    let record = store.catalog().mirror(&local.map.identity().mirror).map_err(repository)?;
    local
        .check(&args.mirror, &wanted, &snapshot, record.as_ref())
        .map_err(|reason| StartError::Mismatch { path: args.mirror.clone(), reason })?;
    let mode = if args.read_only { Mode::ReadOnly } else { Mode::ReadWrite };
    let path = fs::canonicalize(&args.mirror).unwrap_or(args.mirror.clone());
    let owner = MirrorOwner::this_process(local.map.identity().mirror, path.display().to_string())
        .map_err(repository)?;
    let lock = local.data.locked_file();
    let lock = lock.map_err(|source| StartError::Mirror { path: args.mirror.clone(), source })?;
    let owner = owner.with_lock(lock).with_ephemeral(args.ephemeral);
    let attachment = match local.is_used() {
        true => store.attach_again(&owner, &snapshot, mode, &local.map.parent()),
        false => store.attach(&owner, &snapshot, mode),
    };
    let attachment = attachment.map_err(repository)?;
    if mode == Mode::ReadWrite && record.is_none() {
        former_writer::warn(&store, &owner, &snapshot.image);
    }
    attachment.grow(local.layout.size()).map_err(repository)?;
    serve(args, sockets, local, store, attachment, geometry.size())
}

/// The snapshot numbers and labels that checkpoints need, and the checkpoints that are resumed.
///
/// Snapshots that an earlier process left pending are marked as failed, unless they are resumed.
struct CommitSetup {
    numbers: std::ops::Range<u64>,
    labels: HashMap<String, u64>,
    resumed: Vec<Arc<Layer>>,
    /// Failed snapshots whose failure could not be recorded completely, with the reason.
    unrecorded: Vec<(NewSnapshot, String)>,
}

impl CommitSetup {
    fn new(
        image: &Image,
        mode: Mode,
        snapshots: Vec<Snapshot>,
        resumed: Vec<Arc<Layer>>,
        unused: &UnusedNumbers,
    ) -> cairn_store::Result<CommitSetup> {
        if mode == Mode::ReadOnly {
            let (numbers, labels, unrecorded) = (0..0, HashMap::new(), Vec::new());
            return Ok(CommitSetup { numbers, labels, resumed, unrecorded });
        }
        let mut unrecorded = Vec::new();
        let is_resumed = |one: &&Snapshot| {
            resumed.iter().any(|layer| layer.accepted().is_some_and(|new| new.number == one.number))
        };
        let pending = snapshots.iter().filter(|one| one.state == SnapshotState::Pending);
        for snapshot in pending.filter(|one| !is_resumed(one)) {
            let reason = "the disk's process died before the snapshot was stable";
            match image.attachment.fail(snapshot.number, reason) {
                // The disk can be served all the same, and the record follows. If the catalog is
                // unavailable, what follows here fails.
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    tracing::warn!(%error, "cannot record completely that a snapshot failed");
                    unrecorded.push((announced(snapshot), reason.into()));
                }
                result => result?,
            }
        }
        let labels = snapshots
            .into_iter()
            .filter(|one| one.state.has_content())
            .flat_map(|one| one.labels.into_iter().map(move |label| (label, one.number)))
            .collect();
        let numbers = image.attachment.resume(&unused.load(), unused.reservation())?;
        // Before this process reserves numbers: it may be killed before it has recorded them.
        unused.record_reservation(image.attachment.reservation());
        Ok(CommitSetup { numbers, labels, resumed, unrecorded })
    }
}

/// The snapshot as it was announced. Its label is free again.
fn announced(snapshot: &Snapshot) -> NewSnapshot {
    NewSnapshot {
        number: snapshot.number,
        label: None,
        metadata: cairn_store::Metadata::default(),
        is_from_guest: false,
        size: snapshot.geometry.size(),
        consistency: snapshot.consistency,
        time: snapshot.time,
        dirty_bytes: snapshot.dirty_bytes,
        pause_us: snapshot.pause_us,
    }
}

/// Runs the threads of the disk until it is told to stop.
fn serve(
    args: &Args,
    sockets: Sockets,
    local: LocalState,
    repository: Repository,
    attachment: Attachment,
    size: u64,
) -> Result<(), StartError> {
    let LocalState { data, mut map, layer_dir, layout, live, next_use } = local;
    let live_path = live.dir().to_owned();
    let live_state = live.state().map_err(serving("opening the live directory"))?;
    match (live.is_adopted, map.is_clean()) {
        (true, true) => tracing::info!("resuming what the last process left"),
        (true, false) => tracing::info!("taking over the mirror from a process that was killed"),
        (false, true) => {}
        (false, false) => tracing::warn!(
            "the mirror was not stopped cleanly: at the next checkpoint, all local data near what \
             was written counts as changed"
        ),
    }
    live.begin(&mut map, next_use).map_err(serving("marking the mirror as in use"))?;
    let (number, root) = attachment.parent();
    map.set_parent(number, root).map_err(serving("recording the mirror's parent"))?;
    let _lock = live.lock;
    let mut mailboxes = Vec::new();
    let mut inboxes = Vec::new();
    for _ in 0..args.num_queues {
        let (mailbox, inbox) = worker::mailbox().map_err(serving("making a worker's mailbox"))?;
        mailboxes.push(mailbox);
        inboxes.push(inbox);
    }
    let wakes = mailboxes.iter().cloned().map(|mailbox| Box::new(move || mailbox.wake()) as _);
    // One layer needs at most the size of the disk, and the guest's own data needs space too.
    let free = data.free_space().map_err(serving("looking for free space"))?;
    let spill_bytes = match args.cow_disk {
        Some(mib) => mib.saturating_mul(1 << 20),
        None => layout.file_len().min(free / 2),
    };
    let cow_space = CowSpace {
        memory: live.cow_memory,
        spill_buffers: BufferPool::new(SPILL_BUFFER_BYTES),
        spill: SpillSpace::new(spill_bytes),
    };
    let unavailable = |source| StartError::Repository { image: args.image.clone(), source };
    let image = Arc::new(Image::new(repository, attachment));
    let snapshots = image.snapshots().map_err(unavailable)?;
    let state_of = |number| snapshots.iter().find(|one| one.number == number).map(|one| one.state);
    let Recovered { current, layers, resumed } =
        recover(live.epochs, &layer_dir, &layout, &cow_space, state_of)
            .map_err(serving("recovering checkpoints"))?;
    if args.read_only && !resumed.is_empty() {
        let reason = "has checkpoints that are not stored yet; start it without --read-only first";
        let path = args.mirror.clone();
        return Err(StartError::Mismatch { path, reason: reason.into() });
    }
    if !resumed.is_empty() {
        tracing::info!(checkpoints = resumed.len(), "resuming checkpoints that were accepted");
    }
    let mode = if args.read_only { Mode::ReadOnly } else { Mode::ReadWrite };
    let setup = CommitSetup::new(&image, mode, snapshots, resumed, &live.unused_numbers)
        .map_err(unavailable)?;
    let epochs = EpochManager::new(live.epoch_files, layer_dir, mailboxes.len(), current, layers);
    epochs.prepare().map_err(serving("preparing checkpoints"))?;
    let ledger_path = live_path.join(live_dir::LEDGER_FILE);
    let ledgers = LedgerFile::open(&ledger_path, mailboxes.len(), args.queue_size)
        .map_err(serving("making the ledger of requests"))?;
    let events = Events::new(wakes.collect());
    let intent = map.intent().map_err(serving("reading the map"))?;
    let mirror = Mirror::new(layout, live.presence, intent, epochs, cow_space, events)
        .with_whole_blocks(data.alignment().offset > SECTOR_BYTES);

    let disk = Arc::new(LocalDisk {
        mirror,
        data,
        data_sync: DataSync::new(live.validity),
        read_only: args.read_only,
    });
    disk.trim_copies();
    let guest = Arc::new(GuestState::new(live.flags, ledgers));
    let counters = Arc::new(Counters::new(mailboxes.len()));
    let flusher = Arc::new(Flusher::new(disk.clone(), map, INTENT_TIMEOUT));
    let fetch_retry = Duration::from_secs(args.fetch_retry.into());
    let fetcher =
        Arc::new(Fetcher::new(disk.clone(), image.clone(), counters.clone(), fetch_retry));
    let shared = (disk.clone(), image.clone(), guest.clone());
    let grower = Arc::new(Grower::new(shared, (flusher.clone(), fetcher.clone()), live_state));
    let shared = (disk.clone(), image.clone(), counters.clone());
    let CommitSetup { numbers, labels, resumed, unrecorded } = setup;
    let commits = Commits::new(shared, live.unused_numbers, numbers, labels, resumed);
    let commits = Arc::new(commits.with_unrecorded(unrecorded));
    if mode == Mode::ReadWrite {
        commits.reserve_numbers().map_err(unavailable)?;
    }
    let requests = Arc::new(RequestContext {
        disk: disk.clone(),
        fetcher: fetcher.clone(),
        flusher: flusher.clone(),
        counters: counters.clone(),
        guest: guest.clone(),
        bounce_buffers: BufferPool::new(BOUNCE_BUFFER_BYTES),
        serial: image.serial(),
    });
    let abort = Abort::default();
    let persister = Persister {
        commits: commits.clone(),
        disk: disk.clone(),
        image: image.clone(),
        flusher: flusher.clone(),
        counters: counters.clone(),
        throttle: CommitThrottle::new(args.commit_rate),
        abort: abort.clone(),
        retry_timeout: Duration::from_secs(args.commit_retry.into()),
    };
    let control = Arc::new(ControlContext {
        commits: commits.clone(),
        image: image.clone(),
        disk: disk.clone(),
        guest: guest.clone(),
        counters: counters.clone(),
        grower: grower.clone(),
        catalog: CatalogLanes::start().map_err(serving("starting a thread"))?,
        guest_may_remove: args.guest_may_remove,
        guest_checkpoints: Mutex::new(RateLimit::new(
            CHECKPOINT_BURST,
            Duration::from_millis(args.guest_checkpoint_interval.into()),
            Instant::now(),
        )),
    });

    let spawning = serving("starting a thread");
    let mut workers = Vec::new();
    for (index, (mailbox, inbox)) in mailboxes.iter().cloned().zip(inboxes).enumerate() {
        let (size, poll) = (args.queue_size, args.poll());
        let thread = worker::spawn(index, size, poll, requests.clone(), mailbox, inbox);
        workers.push(thread.map_err(&spawning)?);
    }
    flusher.spawn().map_err(&spawning)?;
    fetcher.spawn().map_err(&spawning)?;
    lease::spawn(image.clone(), grower.clone(), mode).map_err(&spawning)?;
    let stall = Duration::from_secs(args.cow_stall.into());
    stall::spawn(disk.clone(), counters, stall).map_err(&spawning)?;
    let persist = persister.spawn().map_err(&spawning)?;
    if !args.read_only
        && let Err(error) = grower.grow(size)
    {
        // A guest that runs goes on with the disk that it has.
        tracing::error!(%error, "the disk cannot grow with its image");
    }
    let stop = StopHandle::default();
    control::spawn(sockets.listeners, control, stop.clone()).map_err(&spawning)?;
    tracing::info!(image = %image.name(), parent = image.attachment.parent().0, "serving");
    let shared = (&disk, &guest);
    let served = server::serve(sockets.hypervisor, shared, &mailboxes, args.queue_size, &stop);

    // The order matters: no guest I/O, then no checkpoint, then a durable map, then the lease.
    for mailbox in &mailboxes {
        mailbox.send(Command::Exit);
    }
    for worker in workers {
        let _ = worker.join();
    }
    commits.close(COMMIT_GRACE_PERIOD);
    abort.set();
    // A request that the repository does not answer must not keep the map from being closed. If the
    // thread goes on, it leaves what a process leaves that is killed later. It publishes only until
    // the lease is given back. The map has announced the snapshot, and the live directory keeps the
    // layer until the map has the new parent.
    let is_idle = ends_within(&persist, PERSIST_TIMEOUT);
    if !is_idle {
        tracing::warn!("the repository does not answer: stopping without its answer");
    }
    let left = commits.accepted().len();
    if left > 0 {
        tracing::info!(
            checkpoints = left,
            "the next start resumes checkpoints that are not stable"
        );
    }
    grower.close();
    let closed = flusher.close_map(guest.knows_any_ring(), image.attachment.parent());
    let closed = closed.map_err(serving("closing the mirror"));
    if closed.is_ok() {
        let unused = commits.take_unused_numbers();
        let unused = (!unused.is_empty()).then_some(unused);
        release(image, unused);
        if is_idle && left == 0 && !guest.needs_live_dir() {
            live_dir::remove(&live_path);
        }
    }
    sockets.paths.remove();
    served.map_err(serving("serving the hypervisor"))?;
    closed
}

/// Waits for the end of a thread. Returns whether it ended in time.
fn ends_within(thread: &JoinHandle<()>, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(THREAD_POLL);
    }
    true
}

/// Gives the lease and the unused numbers back. Does not wait long for a catalog that does not answer:
/// the lease expires by itself.
fn release(image: Arc<Image>, unused: Option<Range<u64>>) {
    let work = move || {
        if let Err(error) = image.attachment.release(unused) {
            tracing::warn!(%error, "cannot release the image's lease; it expires by itself");
        }
    };
    match thread::Builder::new().name("release".into()).spawn(work) {
        Ok(thread) if ends_within(&thread, RELEASE_TIMEOUT) => {}
        Ok(_) => tracing::warn!("the catalog does not answer; the image's lease expires by itself"),
        Err(error) => tracing::warn!(%error, "cannot release the image's lease"),
    }
}
