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
//! The first page of the state file has the header (`header.rs`), and words that change while the
//! guest runs (`header_words.rs`).
//!
//! A clean stop removes the directory, unless it holds work that the next process must finish. Even
//! then the map is exact, so the next process can go on without the live directory.

mod header;
mod header_words;
#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use self::header::{HEADER_BYTES, NEXT_USE_ID_RANGE, boot_id, has_header, header};
use self::header_words::header_page;
pub(crate) use self::header_words::{GuestFlags, LiveValidity, UnusedNumbers};
use crate::mapping::PAGE_BYTES;
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
        let flags = GuestFlags(header_page(&file)?);
        let unused_numbers = UnusedNumbers(header_page(&file)?);
        let validity = LiveValidity(header_page(&file)?);
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
        let flags = GuestFlags(header_page(&file)?);
        let unused_numbers = UnusedNumbers(header_page(&file)?);
        let validity = LiveValidity(header_page(&file)?);
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

fn take_lock(dir: &Path) -> io::Result<File> {
    let file = options().create(true).truncate(false).open(dir.join(LOCK_FILE))?;
    lock(&file)?;
    Ok(file)
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
