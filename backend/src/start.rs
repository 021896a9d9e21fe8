//! Puts a disk together from its mirror's directory and the repository, serves it, and puts it to
//! rest again.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cairn_store::cluster::identity::Access;
use cairn_store::{
    Attachment, MirrorId, MirrorOwner, MirrorRecord, Mode, Repository, Selector, Snapshot,
    SnapshotRef, SnapshotState,
};

use crate::args::Args;
use crate::commit::throttle::CommitThrottle;
use crate::commit::{Commits, RESERVED_NUMBERS, persist, stall};
use crate::control::{self, Listeners};
use crate::counters::Counters;
use crate::device::{BOUNCE_BYTES, Device, serial};
use crate::fetch::Fetcher;
use crate::flush::Flusher;
use crate::mirror::Mirror;
use crate::mirror::cow::CowSpace;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::cow::range_allocator::RangeAllocator;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::manager::EpochManager;
use crate::mirror::epoch::recovery::{Recovered, recover};
use crate::mirror::events::Events;
use crate::mirror::files::disk_file::{DiskFile, make_directory};
use crate::mirror::files::journal::Journal;
use crate::mirror::files::live_dir::{self, LiveDir};
use crate::mirror::files::map::{Identity, MapError, MapFile, UseId};
use crate::mirror::layout::{Layout, SECTOR_BYTES, Span};
use crate::vhost::ring_ownership::RingOwnership;
use crate::vhost::server::{self, Source, StopHandle};
use crate::worker::ledger::LedgerFile;
use crate::worker::{self, Command};
use crate::{fetch, flush, lease, sys};

/// How long a stop waits for checkpoints that are almost stable.
const COMMIT_GRACE_PERIOD: Duration = Duration::from_secs(2);

/// Bytes of copies on their way from the disk to the spill file.
const SPILL_BUFFER_BYTES: usize = 8 << 20;

/// Why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The repository refused.
    #[error("opening image '{image}': {source}")]
    Repository {
        /// What was asked for.
        image: String,
        /// The repository's answer.
        source: cairn_store::Error,
    },
    /// The mirror's directory cannot be used.
    #[error("opening mirror {}: {source}", path.display())]
    Mirror {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The mirror's map cannot be used.
    #[error("opening {}: {source}", path.display())]
    Map {
        /// The map file.
        path: PathBuf,
        /// What is wrong with it.
        source: MapError,
    },
    /// The live directory cannot be used.
    #[error(
        "keeping live state under {}: {source}; choose a directory on a tmpfs with --live", path.display()
    )]
    LiveDir {
        /// The directory of live directories.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Another process serves the mirror.
    #[error("mirror {} is in use by another process; stop that one or choose another directory", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// The mirror belongs to something else.
    #[error("mirror {} {reason}", path.display())]
    Mismatch {
        /// The directory.
        path: PathBuf,
        /// How it does not fit, and what to do.
        reason: String,
    },
    /// A socket cannot be had.
    #[error("listening on {path}: {source}")]
    Socket {
        /// The path or number.
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Serving or stopping failed.
    #[error("{doing}: {source}")]
    Serve {
        /// What was being done.
        doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

fn serving(doing: &'static str) -> impl Fn(io::Error) -> StartError {
    move |source| StartError::Serve { doing, source }
}

/// Serves the disk that the arguments name until a signal or the end of the only connection.
pub fn run(args: &Args) -> Result<(), StartError> {
    let sockets = Sockets::open(args)?;
    let repository = |source| StartError::Repository { image: args.image.clone(), source };
    let wanted: SnapshotRef = args.image.parse().map_err(repository)?;
    let access = Access::new(args.keys.as_deref(), args.insecure);
    let store = Repository::open_anywhere(&args.store, &access).map_err(repository)?;
    let snapshot = store.resolve(&wanted).map_err(repository)?;
    snapshot.require_content().map_err(repository)?;
    let store = store.keeping(snapshot.keep).with_durability(args.durability);
    let local = LocalState::open(args, &snapshot)?;
    let record = store.mirror(&local.map.identity().mirror).map_err(repository)?;
    local
        .check(&args.mirror, &wanted, &snapshot, record.as_ref(), &store)
        .map_err(|reason| StartError::Mismatch { path: args.mirror.clone(), reason })?;
    let mode = if args.read_only { Mode::ReadOnly } else { Mode::ReadWrite };
    let path = fs::canonicalize(&args.mirror).unwrap_or(args.mirror.clone());
    let owner = MirrorOwner::this_process(local.map.identity().mirror, path.display().to_string())
        .map_err(repository)?;
    let attachment = store.attach(&owner, &snapshot, mode).map_err(repository)?;
    serve(args, sockets, local, store, attachment)
}

/// The sockets, bound first so that a wrong path is told before anything is touched.
struct Sockets {
    source: Source,
    listeners: Listeners,
    paths: Vec<BoundSocket>,
}

/// A socket's path, as it was when it was bound.
struct BoundSocket {
    path: PathBuf,
    inode: Option<u64>,
}

impl BoundSocket {
    fn new(path: PathBuf) -> BoundSocket {
        let inode = fs::symlink_metadata(&path).map(|file| file.ino()).ok();
        BoundSocket { path, inode }
    }

    /// Removes it, unless somebody has done that already, or the next process has bound its own there.
    fn remove(&self) {
        let found = fs::symlink_metadata(&self.path).map(|file| file.ino()).ok();
        if found.is_some() && found == self.inode {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Sockets {
    fn open(args: &Args) -> Result<Sockets, StartError> {
        let error = |path: String| move |source| StartError::Socket { path, source };
        let mut paths = Vec::new();
        let mut listen = |path: PathBuf, private| {
            let listener =
                sys::listen(&path, private).map_err(error(path.display().to_string()))?;
            paths.push(BoundSocket::new(path));
            Ok(listener)
        };
        let control = args.control.clone().map(|path| listen(path, true)).transpose()?;
        let proxy = args.vsock.as_ref().map(|path| {
            let mut path = path.clone().into_os_string();
            path.push(format!("_{}", args.vsock_port));
            listen(path.into(), false)
        });
        let proxy = proxy.transpose()?;
        let source = match (&args.socket_path, args.fd) {
            (Some(path), _) => Source::Listener(listen(path.clone(), false)?),
            (None, Some(fd)) => sys::inherited(fd).map_err(error(format!("descriptor {fd}")))?,
            (None, None) => unreachable!("the arguments demand one of them"),
        };
        let vsock = args.guest_cid.map(|guest| {
            let bound = sys::VsockListener::bind(args.vsock_port);
            bound
                .map(|listener| (listener, guest))
                .map_err(error(format!("vsock port {}", args.vsock_port)))
        });
        let listeners = Listeners { control, proxy, vsock: vsock.transpose()? };
        Ok(Sockets { source, listeners, paths })
    }
}

/// A mirror's directory: locked, and fitting the image.
struct LocalState {
    disk: DiskFile,
    spill_file: DiskFile,
    map: MapFile,
    journal: Arc<Journal>,
    layout: Layout,
    live: LiveDir,
    /// The use of the mirror that begins, unless one is taken up.
    next_use: UseId,
}

impl LocalState {
    /// Opens the directory, or makes it the mirror of `snapshot`.
    fn open(args: &Args, snapshot: &Snapshot) -> Result<LocalState, StartError> {
        let path = &args.mirror;
        let failed = |source| StartError::Mirror { path: path.clone(), source };
        let mismatch =
            |reason: &str| StartError::Mismatch { path: path.clone(), reason: reason.into() };
        let map_path = path.join("map");
        let map_failed = |source| StartError::Map { path: map_path.clone(), source };
        make_directory(path).map_err(failed)?;
        let disk = DiskFile::open(&path.join("disk")).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => StartError::Locked { path: path.clone() },
            io::ErrorKind::InvalidInput => {
                mismatch("is on a file system without direct I/O; use ext4, xfs or btrfs")
            }
            _ => failed(source),
        })?;
        if disk.alignment().offset > SECTOR_BYTES {
            return Err(mismatch(
                "is on a disk whose sectors are larger than 512 bytes, which is not supported",
            ));
        }
        let spill_file = DiskFile::open(&path.join("preserve")).map_err(failed)?;
        let layout = Layout::new(snapshot.geometry);
        let len = disk.len().map_err(failed)?;
        let map = match MapFile::open(&map_path) {
            Ok(map) => map,
            Err(MapError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                if len > 0 && !disk.is_hole(Span { offset: 0, len }) {
                    return Err(mismatch("has data but no map; choose an empty directory"));
                }
                let identity = Identity {
                    mirror: MirrorId::from_bytes(sys::random_id().map_err(failed)?),
                    image: snapshot.image.clone(),
                    geometry: snapshot.geometry,
                    origin: snapshot.number,
                };
                disk.set_len(layout.file_len()).map_err(failed)?;
                disk.punch(Span { offset: 0, len: layout.file_len() }).map_err(|error| {
                    mismatch(&format!("is on a file system that cannot punch holes ({error})"))
                })?;
                // Whoever finds a map finds the file that it describes.
                disk.sync_name(path).map_err(failed)?;
                MapFile::create(&map_path, identity).map_err(map_failed)?
            }
            Err(error) => return Err(map_failed(error)),
        };
        let identity = map.identity();
        if identity.image != snapshot.image || identity.geometry != snapshot.geometry {
            return Err(mismatch(&format!(
                "belongs to image '{}' of {} bytes in chunks of {}, not to '{}' of {} bytes in chunks \
                 of {}; choose another directory",
                identity.image,
                identity.geometry.size(),
                identity.geometry.chunk_size(),
                snapshot.image,
                snapshot.geometry.size(),
                snapshot.geometry.chunk_size(),
            )));
        }
        if disk.len().map_err(failed)? != layout.file_len() {
            return Err(mismatch("has a data file of the wrong length; delete the directory"));
        }
        let journal = Journal::open(&path.join("journal")).map_err(failed)?;
        let next_use = sys::random_id().map_err(failed)?;
        let (base, cow_memory_bytes) = (args.live(), u64::from(args.cow_memory) << 20);
        let live = LiveDir::open(&base, path, &map, &next_use, &layout, cow_memory_bytes).map_err(
            |source| match source.kind() {
                io::ErrorKind::WouldBlock => StartError::Locked { path: path.clone() },
                _ => StartError::LiveDir { path: base, source },
            },
        )?;
        if !live.is_adopted {
            map.load(&layout, &live.presence, live.epochs[0].chunks.dirty()).map_err(map_failed)?;
        }
        Ok(LocalState { disk, spill_file, map, journal: Arc::new(journal), layout, live, next_use })
    }

    /// Whether the mirror continues what was asked for.
    fn check(
        &self,
        path: &Path,
        wanted: &SnapshotRef,
        snapshot: &Snapshot,
        record: Option<&MirrorRecord>,
        store: &Repository,
    ) -> Result<(), String> {
        let changed = self.live.epochs.iter().any(|record| record.chunks.dirty().len() > 0);
        let untouched = self.live.presence.local_bytes() == 0 && !changed;
        let Some(record) = record else {
            let reason = "is not known to the repository: it belongs to another one, or was forgotten; \
                          delete the directory to start again from a snapshot";
            return if untouched { Ok(()) } else { Err(reason.into()) };
        };
        let identity = self.map.identity();
        // The same arguments as at its creation take it up where it is.
        let same = record.parent == snapshot.number
            || (wanted.selector != Selector::Newest && identity.origin == snapshot.number);
        // The newest snapshot may be one that this mirror published just before it died.
        let own = store
            .snapshots(&snapshot.image)
            .map_err(|error| error.to_string())?
            .iter()
            .any(|other| other.number == snapshot.number && other.mirror == Some(record.id));
        if same || own {
            return Ok(());
        }
        Err(format!(
            "holds {image}@{parent} and what was written since, but {asked} was asked for; start it with \
             --image {image}@{parent} to go on from there, or delete {path} to start from {asked}",
            image = identity.image,
            parent = record.parent,
            asked = snapshot.name(),
            path = path.display(),
        ))
    }
}

/// What is needed to take checkpoints. Those that a dead process left pending are lost, unless they were
/// taken up.
fn commits(
    store: &Repository,
    attachment: &Attachment,
    mode: Mode,
    resumed: Vec<Arc<Layer>>,
) -> cairn_store::Result<Commits> {
    if mode == Mode::ReadOnly {
        return Ok(Commits::new(0..0, HashSet::new(), resumed));
    }
    let snapshots = store.snapshots(attachment.image())?;
    let is_resumed = |one: &&Snapshot| {
        resumed.iter().any(|layer| layer.accepted().is_some_and(|new| new.number == one.number))
    };
    let pending = snapshots.iter().filter(|one| one.state == SnapshotState::Pending);
    for snapshot in pending.filter(|one| !is_resumed(one)) {
        attachment
            .fail(snapshot.number, "the disk's process died before the snapshot was stable")?;
    }
    let labels = snapshots
        .into_iter()
        .filter(|one| one.state.has_content())
        .filter_map(|one| one.label)
        .collect();
    Ok(Commits::new(attachment.reserve(RESERVED_NUMBERS)?, labels, resumed))
}

/// Runs the threads of the disk until it is told to stop.
fn serve(
    args: &Args,
    sockets: Sockets,
    local: LocalState,
    repository: Repository,
    attachment: Attachment,
) -> Result<(), StartError> {
    let LocalState { disk, spill_file, mut map, journal, layout, live, next_use } = local;
    let live_dir = live.dir().to_owned();
    let geometry = map.identity().geometry;
    match (live.is_adopted, map.is_clean()) {
        (true, true) => tracing::info!("taking up what the last process left"),
        (true, false) => tracing::info!("taking up the mirror from a process that was killed"),
        (false, true) => {}
        (false, false) => tracing::warn!(
            "the mirror was not stopped cleanly: everything local near what was written counts as \
             changed at the next checkpoint"
        ),
    }
    live.begin(&mut map, next_use).map_err(serving("marking the mirror as in use"))?;
    let _lock = live.lock;
    if !live.is_adopted {
        // Not before: until here the next process may still need it.
        let cleared = journal.clear().and_then(|()| spill_file.set_len(0));
        cleared.map_err(serving("removing copies of old checkpoints"))?;
    }
    let mut mailboxes = Vec::new();
    let mut inboxes = Vec::new();
    for _ in 0..args.num_queues {
        let (mailbox, inbox) = worker::mailbox().map_err(serving("making a worker's mailbox"))?;
        mailboxes.push(mailbox);
        inboxes.push(inbox);
    }
    let wakes = mailboxes.iter().cloned().map(|mailbox| Box::new(move || mailbox.wake()) as _);
    // One frozen epoch needs at most the whole disk, and the guest's own data must find room too.
    let free = spill_file.free_space().map_err(serving("looking for free space"))?;
    let spill = match args.cow_disk {
        Some(mib) => mib.saturating_mul(1 << 20),
        None => layout.file_len().min(free / 2),
    };
    // Copies that are there already stay where they are.
    let spill = spill.max(spill_file.len().map_err(serving("looking for copies"))?);
    let cow_space = CowSpace {
        memory: live.cow_memory,
        spill_buffers: BufferPool::new(SPILL_BUFFER_BYTES),
        spill: RangeAllocator::new(spill),
    };
    let unavailable = |source| StartError::Repository { image: args.image.clone(), source };
    let snapshots = repository.snapshots(attachment.image()).map_err(unavailable)?;
    let state_of = |number| snapshots.iter().find(|one| one.number == number).map(|one| one.state);
    let Recovered { current, layers, resumed } =
        recover(live.epochs, &journal, &layout, &cow_space, state_of)
            .map_err(serving("taking up checkpoints"))?;
    if args.read_only && !resumed.is_empty() {
        let reason = "has checkpoints that are not stored yet; start it without --read-only first";
        let path = args.mirror.clone();
        return Err(StartError::Mismatch { path, reason: reason.into() });
    }
    if !resumed.is_empty() {
        tracing::info!(checkpoints = resumed.len(), "going on with checkpoints that were accepted");
    }
    let mode = if args.read_only { Mode::ReadOnly } else { Mode::ReadWrite };
    let commits = commits(&repository, &attachment, mode, resumed).map_err(unavailable)?;
    let epochs = EpochManager::new(live.epoch_files, journal, mailboxes.len(), current, layers);
    epochs.prepare().map_err(serving("preparing checkpoints"))?;
    let ledgers =
        LedgerFile::open(&live_dir.join(live_dir::LEDGER_FILE), mailboxes.len(), args.queue_size)
            .map_err(serving("making the ledger of requests"))?;
    let events = Events::new(wakes.collect());
    let intent = map.intent(&layout).map_err(serving("reading the map"))?;
    let mirror = Mirror::new(layout, live.presence, intent, epochs, cow_space, events);
    let device = Arc::new(Device {
        mirror,
        disk,
        spill: spill_file,
        serial: serial(attachment.image()),
        repository,
        attachment,
        geometry,
        read_only: args.read_only,
        bounce: BufferPool::new(BOUNCE_BYTES),
        fetcher: Fetcher::new(Duration::from_secs(args.fetch_retry.into())),
        flusher: Flusher::new(map),
        commits,
        throttle: CommitThrottle::new(args.commit_rate),
        stats: Counters::new(mailboxes.len()),
        connected: AtomicUsize::new(0),
        owner: RingOwnership::default(),
        running: AtomicUsize::new(0),
        flags: live.flags,
        ledgers,
        poison: Mutex::new(None),
    });
    let spawning = serving("starting a thread");
    let mut workers = Vec::new();
    for (index, (mailbox, inbox)) in mailboxes.iter().cloned().zip(inboxes).enumerate() {
        let (size, poll) = (args.queue_size, args.poll());
        let thread = worker::spawn(index, size, poll, device.clone(), mailbox, inbox);
        workers.push(thread.map_err(&spawning)?);
    }
    flush::spawn(device.clone()).map_err(&spawning)?;
    fetch::spawn(&device).map_err(&spawning)?;
    lease::spawn(device.clone()).map_err(&spawning)?;
    let stall = Duration::from_secs(args.cow_stall.into());
    stall::spawn(device.clone(), stall).map_err(&spawning)?;
    let abort = persist::Abort::default();
    let retry_timeout = Duration::from_secs(args.commit_retry.into());
    let persist =
        persist::spawn(device.clone(), abort.clone(), retry_timeout).map_err(&spawning)?;
    let stop = StopHandle::default();
    control::spawn(sockets.listeners, device.clone(), stop.clone()).map_err(&spawning)?;
    tracing::info!(image = %device.attachment.image(), parent = device.attachment.parent().0, "serving");
    let served = server::serve(sockets.source, &device, &mailboxes, args.queue_size, &stop);

    // The order matters: no guest I/O, then no checkpoint, then a durable map, then the lease.
    for mailbox in &mailboxes {
        mailbox.send(Command::Exit);
    }
    for worker in workers {
        let _ = worker.join();
    }
    if !device.commits.close(COMMIT_GRACE_PERIOD) {
        abort.set();
    }
    let _ = persist.join();
    let left = device.commits.accepted().len();
    if left > 0 {
        tracing::info!(
            checkpoints = left,
            "left to the next start: checkpoints that are not stable"
        );
    }
    let rested = close_mirror(&device);
    // The next process has to know of them, and of requests for a hypervisor that is away, too.
    let is_needed = left > 0
        || device.ledgers.is_in_use()
        || device.flags.write_through().load(Ordering::SeqCst) != 0;
    if rested.is_ok() && !is_needed {
        live_dir::remove(&live_dir);
    }
    sockets.paths.iter().for_each(BoundSocket::remove);
    served.map_err(serving("serving the hypervisor"))?;
    rested
}

/// Leaves the mirror so that the next start continues exactly here, with the live directory or without it.
fn close_mirror(device: &Device) -> Result<(), StartError> {
    let failed = serving("putting the mirror to rest");
    device.flusher.flush(&device.mirror, &device.disk).map_err(&failed)?;
    let view = device.mirror.epoch_view();
    // Without the live directory, checkpoints that are not stable are lost: then this is what has changed.
    let sets = view.dirty_sets();
    let (presence, layout) = (&device.mirror.presence(), device.mirror.layout());
    let known = device.flags.known_rings().load(Ordering::SeqCst) != 0;
    let dirty = sets.flat_map(|dirty| dirty.iter());
    device.flusher.map().end(presence, layout, dirty, known).map_err(&failed)?;
    let unused = device.commits.unused_numbers();
    let unused = (!unused.is_empty()).then_some(unused);
    if let Err(error) = device.attachment.release(unused) {
        tracing::warn!(%error, "the image's lease could not be given back; it ends by itself");
    }
    Ok(())
}
