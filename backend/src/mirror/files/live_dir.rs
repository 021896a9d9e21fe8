//! The live directory: state that must outlive the process, but not the host.
//!
//! ```text
//! state        a header, then presence: which blocks are local
//! epoch-N      the record of an epoch
//! cow-memory   copies of old blocks
//! ledger       requests in flight, for hypervisors that keep no record of them
//! lock         held by the process that uses the directory
//! ```
//!
//! The directory belongs on a tmpfs. It is valid only for one boot of the host and for one use of
//! the mirror; the header names both. A process holds its lock as long as it runs. A mirror that is
//! in use and has no live directory was left by a host that died. A link in the mirror's directory
//! points to the live directory, so the next process finds it whatever its arguments are.
//!
//! A failed sync of the data file makes the directory invalid: the next process goes on as after the
//! death of the host (see [`data_sync`](super::data_sync)).
//!
//! A clean stop removes the directory, unless it holds work that the next process must finish. Even
//! then the map is exact, so the next process can go on without the live directory.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mapping::{PAGE_BYTES, Words};
use crate::mirror::cow::memory::CowMemory;
use crate::mirror::epoch::Epoch;
use crate::mirror::epoch::layer_state::LayerState;
use crate::mirror::epoch::record::{ChunkCounts, EpochFiles, EpochRecord};
use crate::mirror::files::disk_file::allocate_more;
use crate::mirror::files::lock::lock;
use crate::mirror::files::map::{MapFile, UseId};
use crate::mirror::layout::Layout;
use crate::mirror::presence::Presence;
use crate::sys;

const MAGIC: &[u8; 8] = b"CRNLIVE\0";
/// Instead of [`MAGIC`] after a sync of the data file has failed. No release adopts such a directory.
const INVALID_MAGIC: &[u8; 8] = b"CRNLOST\0";
const VERSION: u32 = 3;

/// The size of the header.
const HEADER_BYTES: usize = 128;

/// The live directory of a mirror.
pub(crate) struct LiveDir {
    dir: PathBuf,
    pub(crate) presence: Presence,
    pub(crate) epoch_files: EpochFiles,
    /// The records of epochs, oldest first. The last one belongs to the current epoch.
    pub(crate) epochs: Vec<EpochRecord>,
    pub(crate) cow_memory: CowMemory,
    pub(crate) flags: GuestFlags,
    pub(crate) unused_numbers: UnusedNumbers,
    pub(crate) validity: LiveValidity,
    /// Whether the directory was left by an earlier process. Otherwise it is empty.
    pub(crate) is_adopted: bool,
    /// The file with the header.
    file: File,
    /// The lock, which is held as long as the process runs.
    pub(crate) lock: File,
}

/// What is known of the guest, in the page of the header.
pub(crate) struct GuestFlags(Words);

impl GuestFlags {
    /// The virtqueues, one bit each, that may be in use when they are started. These are the queues
    /// that were started in this use of the mirror, or all queues if nothing that a guest wrote
    /// before can be lost.
    pub(crate) fn known_rings(&self) -> &AtomicU64 {
        &self.0[FLAGS_WORD]
    }

    /// Not 0 if a write is answered only when it is durable. The numbers are those of `CachingMode`.
    pub(crate) fn write_through(&self) -> &AtomicU64 {
        &self.0[FLAGS_WORD + 1]
    }
}

/// Whether the live directory counts, in the first word of the header.
pub(crate) struct LiveValidity(Words);

impl LiveValidity {
    /// The validity of no directory, in this process's own memory.
    #[cfg(test)]
    pub(crate) fn private() -> LiveValidity {
        let words = Words::zeroed(1).expect("memory");
        words[0].store(u64::from_ne_bytes(*MAGIC), Ordering::SeqCst);
        LiveValidity(words)
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.0[0].load(Ordering::SeqCst) != u64::from_ne_bytes(*INVALID_MAGIC)
    }

    /// Makes the directory invalid, for this process and for all later ones.
    pub(crate) fn invalidate(&self) {
        self.0[0].store(u64::from_ne_bytes(*INVALID_MAGIC), Ordering::SeqCst);
    }
}

/// The snapshot numbers that this use of the mirror has reserved and that no checkpoint has had, in the
/// page of the header.
pub(crate) struct UnusedNumbers(Words);

impl UnusedNumbers {
    pub(crate) fn load(&self) -> Range<u64> {
        let [start, end] = [2, 3].map(|word| self.0[FLAGS_WORD + word].load(Ordering::SeqCst));
        start..end.max(start)
    }

    /// The id of the numbers' reservation, if it is recorded.
    pub(crate) fn reservation(&self) -> Option<u64> {
        let id = self.0[FLAGS_WORD + 4].load(Ordering::SeqCst);
        (id != 0).then_some(id)
    }

    /// Records the numbers that are unused from here on.
    pub(crate) fn record(&self, unused: &Range<u64>) {
        // In this order: if the process ends in between, no used number counts as unused.
        self.0[FLAGS_WORD + 2].store(unused.start, Ordering::SeqCst);
        self.0[FLAGS_WORD + 3].store(unused.end, Ordering::SeqCst);
    }

    /// Records the id of the reservation to which the numbers belong.
    pub(crate) fn record_reservation(&self, id: u64) {
        self.0[FLAGS_WORD + 4].store(id, Ordering::SeqCst);
    }
}

/// The index of the first word of the flags in the header's page.
const FLAGS_WORD: usize = 2 * HEADER_BYTES / 8;

impl LiveDir {
    /// Adopts the live directory of an earlier process, or creates one under `base` for the use
    /// `next`. The mirror at `mirror` must be locked. Returns `WouldBlock` if another process holds
    /// the live directory.
    pub(crate) fn open(
        base: &Path,
        mirror: &Path,
        map: &MapFile,
        next: &UseId,
        layout: &Layout,
        cow_memory_bytes: u64,
    ) -> io::Result<LiveDir> {
        let boot = boot_id()?;
        let link = mirror.join("live-state");
        let dir = base.join(map.identity().mirror.to_string());
        let current = header(&boot, map, map.use_id());
        for dir in [Ok(dir.clone()), fs::read_link(&link)].into_iter().flatten() {
            if let Some(live) = LiveDir::adopt(&dir, &current, layout, cow_memory_bytes)? {
                return Ok(live);
            }
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let dir = fs::canonicalize(dir)?;
        if !sys::is_in_memory(&dir)? {
            tracing::warn!(
                dir = %dir.display(),
                "the live directory is not on a tmpfs, which makes everything slower; choose another one \
                 with --live"
            );
        }
        let lock = take_lock(&dir)?;
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            if entry.file_name() != LOCK_FILE {
                fs::remove_file(entry.path())?;
            }
        }
        let file = options().create_new(true).open(dir.join("state"))?;
        file.set_len(state_len(layout))?;
        allocate_state(&file, layout)?;
        let presence = Presence::shared(&file, PAGE_BYTES as u64, layout)?;
        let (epoch_files, _) = EpochFiles::open(&dir, ChunkCounts::of(layout))?;
        let first = epoch_files.allocate()?;
        first.begin(Epoch(1));
        let file_of_copies = options().create_new(true).open(dir.join("cow-memory"))?;
        let owners = options().create_new(true).open(dir.join("cow-owners"))?;
        let cow_memory = CowMemory::new(file_of_copies, &owners, cow_memory_bytes)?;
        let flags = GuestFlags(Words::shared(&file, 0, PAGE_BYTES / 8)?);
        let unused_numbers = UnusedNumbers(Words::shared(&file, 0, PAGE_BYTES / 8)?);
        let validity = LiveValidity(Words::shared(&file, 0, PAGE_BYTES / 8)?);
        let known = if map.is_clean() && map.knows_guests() { u64::MAX } else { 0 };
        flags.known_rings().store(known, Ordering::SeqCst);
        // The header becomes valid when the map says that this use has begun.
        file.write_all_at(&header(&boot, map, next), 0)?;
        let fresh = mirror.join("live-state.new");
        let _ = fs::remove_file(&fresh);
        std::os::unix::fs::symlink(&dir, &fresh)?;
        fs::rename(fresh, link)?;
        let (epochs, is_adopted) = (vec![first], false);
        Ok(LiveDir {
            dir,
            presence,
            epoch_files,
            epochs,
            cow_memory,
            flags,
            unused_numbers,
            validity,
            is_adopted,
            file,
            lock,
        })
    }

    /// Records in the map that the mirror is in use, and that this is the live directory of that
    /// use.
    ///
    /// A use that goes on after a stop gets an id of its own, so that a copy of the mirror's
    /// directory that was made in between does not find later state. Until the map has the id,
    /// either id is valid.
    pub(crate) fn begin(&self, map: &mut MapFile, next: UseId) -> io::Result<()> {
        match (self.is_adopted, map.is_clean()) {
            (true, false) => return Ok(()),
            (true, true) => self.file.write_all_at(&next, NEXT_USE_ID_RANGE.start as u64)?,
            (false, _) => {}
        }
        map.begin(next)?;
        self.file.write_all_at(&header(&boot_id()?, map, &next), 0)
    }

    /// Adopts the directory `dir` if its header is `current`.
    fn adopt(
        dir: &Path,
        current: &[u8; HEADER_BYTES],
        layout: &Layout,
        cow_memory_bytes: u64,
    ) -> io::Result<Option<LiveDir>> {
        let state = dir.join("state");
        if !has_header(&state, current)? {
            return Ok(None);
        }
        let lock = take_lock(dir)?;
        let file = options().open(state)?;
        if file.metadata()?.len() != state_len(layout) {
            return Err(io::Error::other("the live state has the wrong length"));
        }
        allocate_state(&file, layout)?;
        let presence = Presence::shared(&file, PAGE_BYTES as u64, layout)?;
        presence.recount();
        let flags = GuestFlags(Words::shared(&file, 0, PAGE_BYTES / 8)?);
        let unused_numbers = UnusedNumbers(Words::shared(&file, 0, PAGE_BYTES / 8)?);
        let validity = LiveValidity(Words::shared(&file, 0, PAGE_BYTES / 8)?);
        let (epoch_files, epochs) = EpochFiles::open(dir, ChunkCounts::of(layout))?;
        // The next epoch begins before the last one ends, so there is always an open one. Without it,
        // nobody knows which chunks the guest has changed.
        if epochs.last().is_none_or(|last| last.state() != LayerState::Open) {
            return Err(io::Error::other(format!(
                "{} is damaged: it has no open epoch; remove it to go on as after a crash of the \
                 host, without the writes since the last flush",
                dir.display()
            )));
        }
        let copies = options().open(dir.join("cow-memory"))?;
        let owners = options().open(dir.join("cow-owners"))?;
        let cow_memory = CowMemory::new(copies, &owners, cow_memory_bytes)?;
        let (dir, is_adopted) = (dir.to_owned(), true);
        Ok(Some(LiveDir {
            dir,
            presence,
            epoch_files,
            epochs,
            cow_memory,
            flags,
            unused_numbers,
            validity,
            is_adopted,
            file,
            lock,
        }))
    }

    /// The file with the state, which has to grow with the disk: see [`LiveState::make_room`].
    pub(crate) fn state(&self) -> io::Result<LiveState> {
        self.file.try_clone().map(LiveState)
    }

    /// The directory's path.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}

/// The file with the header and the presence.
pub(crate) struct LiveState(File);

impl LiveState {
    /// Makes room for a disk that is going to grow. After an error, the disk keeps its size and
    /// everything goes on.
    pub(crate) fn make_room(&self, layout: &Layout) -> io::Result<()> {
        allocate_state(&self.0, layout)
    }
}

/// Allocates the space that a disk needs in the state file.
fn allocate_state(file: &File, layout: &Layout) -> io::Result<()> {
    allocate_more(file, 0, PAGE_BYTES as u64)?;
    Presence::allocate(file, PAGE_BYTES as u64, layout)
}

const LOCK_FILE: &str = "lock";
pub(crate) const LEDGER_FILE: &str = "ledger";

/// The position of the version in the header.
const VERSION_RANGE: Range<usize> = 8..12;

/// The positions in the header of the id of the use, and of the id of a use that may have begun.
const USE_ID_RANGE: Range<usize> = 80..96;
const NEXT_USE_ID_RANGE: Range<usize> = 96..112;

fn take_lock(dir: &Path) -> io::Result<File> {
    let file = options().create(true).truncate(false).open(dir.join(LOCK_FILE))?;
    lock(&file)?;
    Ok(file)
}

/// Whether a state file has this header. An error is not the same as `false`: the file may be all
/// that is left. The live directory of another version of this program is such an error: it holds
/// writes and checkpoints that are nowhere else.
fn has_header(state: &Path, wanted: &[u8; HEADER_BYTES]) -> io::Result<bool> {
    match options().open(state) {
        Ok(file) if file.metadata()?.len() < PAGE_BYTES as u64 => Ok(false),
        Ok(file) => {
            let mut found = read_header(&file)?;
            if found.starts_with(INVALID_MAGIC) {
                tracing::warn!(
                    state = %state.display(),
                    "a sync of the mirror's data failed: only what was durable before is used"
                );
                return Ok(false);
            }
            let version = u32::from_le_bytes(found[VERSION_RANGE].try_into().expect("4 bytes"));
            found[VERSION_RANGE].copy_from_slice(&wanted[VERSION_RANGE]);
            let promised: UseId = found[NEXT_USE_ID_RANGE].try_into().expect("16 bytes");
            found[NEXT_USE_ID_RANGE].fill(0);
            let is_it = found == *wanted;
            found[USE_ID_RANGE].copy_from_slice(&promised);
            let is_it = is_it || (promised != UseId::default() && found == *wanted);
            if is_it && version != VERSION {
                return Err(io::Error::other(format!(
                    "{} has version {version}, this program uses {VERSION}; run the cairn-blk that \
                     made it until its checkpoints are stable, and stop it there",
                    state.display()
                )));
            }
            Ok(is_it)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// The length of the state file.
fn state_len(layout: &Layout) -> u64 {
    PAGE_BYTES as u64 + Presence::shared_len(layout)
}

/// Removes the live directory of a mirror that was stopped cleanly.
pub(crate) fn remove(dir: &Path) {
    if let Err(error) = fs::remove_dir_all(dir) {
        tracing::warn!(%error, dir = %dir.display(), "cannot remove the live directory");
    }
}

/// An id that differs from one boot of the host to the next.
fn boot_id() -> io::Result<[u8; 36]> {
    let text = fs::read("/proc/sys/kernel/random/boot_id")?;
    text.get(..36)
        .and_then(|id| id.try_into().ok())
        .ok_or_else(|| io::Error::other("cannot read the host's boot id"))
}

fn header(boot: &[u8; 36], map: &MapFile, use_id: &UseId) -> [u8; HEADER_BYTES] {
    let identity = map.identity();
    let mut bytes = [0; HEADER_BYTES];
    bytes[0..8].copy_from_slice(MAGIC);
    bytes[VERSION_RANGE].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..48].copy_from_slice(boot);
    bytes[48..64].copy_from_slice(identity.mirror.as_bytes());
    bytes[64..72].copy_from_slice(&identity.capacity.to_le_bytes());
    bytes[72..76].copy_from_slice(&identity.geometry.chunk_size().to_le_bytes());
    bytes[USE_ID_RANGE].copy_from_slice(use_id);
    bytes
}

fn read_header(file: &File) -> io::Result<[u8; HEADER_BYTES]> {
    let mut bytes = [0; HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::atomic::Ordering;

    use cairn_store::{Geometry, ImageId, MirrorId, Root};

    use super::{LiveDir, NEXT_USE_ID_RANGE};
    use crate::mirror::files::map::{Identity, MapFile, UseId};
    use crate::mirror::layout::Blocks;

    const NEXT: UseId = [9; 16];

    fn try_open(base: &Path, map: &MapFile) -> std::io::Result<LiveDir> {
        let mirror = base.parent().unwrap();
        LiveDir::open(base, mirror, map, &NEXT, &map.identity().layout(), 1 << 20)
    }

    fn open(base: &Path, map: &MapFile) -> LiveDir {
        try_open(base, map).unwrap()
    }

    fn map(dir: &Path) -> MapFile {
        let identity = Identity {
            mirror: MirrorId::from_bytes([7; 16]),
            image: "vm1".parse().unwrap(),
            image_id: ImageId::from_bytes([9; 16]),
            geometry: Geometry::new(1 << 30, 256 * 1024).unwrap(),
            capacity: 8 << 30,
            origin: 3,
        };
        MapFile::create(&dir.join("map"), identity, Root::default()).unwrap()
    }

    #[test]
    fn it_counts_for_one_use_of_the_mirror_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut map = map(dir.path());
        let base = dir.path().join("run");
        let live = open(&base, &map);
        assert!(!live.is_adopted);
        live.presence.set(Blocks { first: 9, count: 1 });
        drop(live);
        assert!(!open(&base, &map).is_adopted, "the mirror is not in use");
        map.begin(NEXT).unwrap();
        let live = open(&base, &map);
        assert!(live.is_adopted && !live.presence.get(9));
        live.presence.set(Blocks { first: 9, count: 1 });
        live.epochs[0].chunks.schedule(5);
        drop(live);
        let live = open(&base, &map);
        assert!(live.is_adopted && live.presence.get(9));
        assert_eq!(live.epochs.len(), 1);
        assert!(live.epochs[0].chunks.dirty().contains(5));
        drop(live);
        let elsewhere = open(&dir.path().join("elsewhere"), &map);
        assert!(elsewhere.is_adopted && elsewhere.presence.get(9), "it is found all the same");
        drop(elsewhere);
        map.begin([8; 16]).unwrap();
        let live = open(&base, &map);
        assert!(!live.is_adopted && !live.presence.get(9), "of the use before");
    }

    #[test]
    fn unused_numbers_outlive_the_process_and_end_with_the_use() {
        let dir = tempfile::tempdir().unwrap();
        let mut map = map(dir.path());
        let base = dir.path().join("run");
        let live = open(&base, &map);
        live.begin(&mut map, NEXT).unwrap();
        assert!(live.unused_numbers.load().is_empty());
        // Reserved, used, all used, and reserved again with others between.
        let steps = [2..10, 3..10, 10..10, 40..50, 41..60];
        for (before, after) in steps.iter().zip(&steps[1..]) {
            live.unused_numbers.record(before);
            assert_eq!(open_again(&base, &map), *before);
            // The process ends after the first of the two words.
            live.unused_numbers.0[super::FLAGS_WORD + 2].store(after.start, Ordering::SeqCst);
            let unused = open_again(&base, &map);
            assert!(unused.is_empty() || (unused.start == after.start && unused.end <= after.end));
        }
        drop(live);
        map.begin([8; 16]).unwrap();
        assert!(open(&base, &map).unused_numbers.load().is_empty());
    }

    /// The unused numbers that another process would find.
    fn open_again(base: &Path, map: &MapFile) -> std::ops::Range<u64> {
        let dir = base.join(map.identity().mirror.to_string());
        let file = super::options().open(dir.join("state")).unwrap();
        let words = crate::mapping::Words::shared(&file, 0, super::PAGE_BYTES / 8).unwrap();
        super::UnusedNumbers(words).load()
    }

    #[test]
    fn a_live_directory_of_another_version_or_without_an_open_epoch_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut map = map(dir.path());
        let base = dir.path().join("run");
        let live = open(&base, &map);
        live.begin(&mut map, NEXT).unwrap();
        live.presence.set(Blocks { first: 9, count: 1 });
        let (live_dir, file) = (live.dir().to_owned(), live.file.try_clone().unwrap());
        drop(live);
        let files = || std::fs::read_dir(&live_dir).unwrap().count();
        let before = files();
        let version = super::VERSION_RANGE.start as u64;
        file.write_all_at(&[1], version).unwrap();
        let refused = try_open(&base, &map).map(drop).unwrap_err().to_string();
        assert!(refused.contains("version 1"), "{refused}");
        assert_eq!(files(), before, "nothing is deleted");
        file.write_all_at(&super::VERSION.to_le_bytes(), version).unwrap();
        let live = open(&base, &map);
        assert!(live.is_adopted && live.presence.get(9));
        drop(live);
        for entry in std::fs::read_dir(&live_dir).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str().unwrap().starts_with("epoch-") {
                std::fs::remove_file(path).unwrap();
            }
        }
        let refused = try_open(&base, &map).map(drop).unwrap_err().to_string();
        assert!(refused.contains("no open epoch"), "{refused}");
    }

    #[test]
    fn it_has_one_process_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let map = map(dir.path());
        let base = dir.path().join("run");
        let _live = open(&base, &map);
        let error = try_open(&base, &map).map(drop).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_guest_from_before_stays_unknown_when_its_data_may_be_lost() {
        let dir = tempfile::tempdir().unwrap();
        let mut map = map(dir.path());
        let base = dir.path().join("run");
        let live = open(&base, &map);
        assert_eq!(live.flags.known_rings().load(Ordering::SeqCst), u64::MAX);
        drop(live);
        map.begin([8; 16]).unwrap();
        let live = open(&base, &map);
        assert!(!live.is_adopted, "the live state of this use is gone");
        assert_eq!(live.flags.known_rings().load(Ordering::SeqCst), 0);
        map.begin(NEXT).unwrap();
        drop(live);
        let live = open(&base, &map);
        assert!(live.is_adopted);
        assert_eq!(live.flags.known_rings().load(Ordering::SeqCst), 0, "and after a kill");
    }

    #[test]
    fn after_a_failed_sync_no_process_adopts_it_and_no_guest_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let mut map = map(dir.path());
        let base = dir.path().join("run");
        let live = open(&base, &map);
        live.begin(&mut map, NEXT).unwrap();
        live.flags.known_rings().store(1, Ordering::SeqCst);
        live.presence.set(Blocks { first: 9, count: 1 });
        assert!(live.validity.is_valid());
        live.validity.invalidate();
        assert!(!live.validity.is_valid());
        drop(live);
        let live = open(&base, &map);
        assert!(!live.is_adopted && !live.presence.get(9) && live.validity.is_valid());
        assert_eq!(live.flags.known_rings().load(Ordering::SeqCst), 0);
    }

    /// State that a stop has left goes on in a use of its own. The process can end at each step of
    /// that.
    #[test]
    fn what_a_stop_left_is_found_wherever_the_next_begin_ends() {
        for step in 0..4 {
            let dir = tempfile::tempdir().unwrap();
            let mut map = map(dir.path());
            let base = dir.path().join("run");
            let live = open(&base, &map);
            live.begin(&mut map, NEXT).unwrap();
            live.presence.set(Blocks { first: 9, count: 1 });
            map.write_pages(&live.presence.take_changed()).unwrap();
            map.end(&live.presence, [].into_iter(), true).unwrap();
            let at_rest = std::fs::read(dir.path().join("map")).unwrap();
            drop(live);

            let live = open(&base, &map);
            assert!(live.is_adopted && live.presence.get(9), "at rest");
            let other: UseId = [5; 16];
            if step == 3 {
                live.begin(&mut map, other).unwrap();
            }
            if (1..3).contains(&step) {
                live.file.write_all_at(&other, NEXT_USE_ID_RANGE.start as u64).unwrap();
            }
            if step == 2 {
                map.begin(other).unwrap();
            }
            drop(live);
            let live = open(&base, &map);
            assert!(live.is_adopted && live.presence.get(9), "after step {step}");
            drop(live);
            // A copy of the mirror that was made after the stop.
            std::fs::write(dir.path().join("map"), &at_rest).unwrap();
            let copy = MapFile::open(&dir.path().join("map")).unwrap();
            assert_eq!(open(&base, &copy).is_adopted, step < 3, "the copy after step {step}");
        }
    }
}
