//! The live directory: what must outlive the process, but not the host.
//!
//! ```text
//! state     a header, then presence: which blocks are local
//! epoch-N   what is known of an epoch (see `epoch`)
//! shelf     copies of old blocks
//! ledger    requests in flight, for hypervisors that keep no record of them
//! ```
//!
//! It belongs on a tmpfs. It counts only for the host's boot and for the use of the mirror that it was
//! made in: the header names both. A mirror that is in use and has no live directory was left by a host
//! that died.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::copies::Shelf;
use super::disk::allocate;
use super::epoch::{EpochState, Epochs};
use super::layer::Epoch;
use super::layout::Layout;
use super::map::MapFile;
use super::presence::Presence;
use crate::mapping::PAGE;
use crate::sys;

const MAGIC: &[u8; 8] = b"CRNLIVE\0";
const VERSION: u32 = 1;

/// Bytes of the header that mean something.
const HEADER: usize = 128;

/// The live directory of a mirror.
pub(crate) struct Live {
    dir: PathBuf,
    pub(crate) presence: Presence,
    pub(crate) epochs: Epochs,
    /// The states of epochs, oldest first; the last one is the current epoch's.
    pub(crate) states: Vec<EpochState>,
    pub(crate) shelf: Shelf,
    /// Whether it is that of a process that was killed. Otherwise it is empty.
    pub(crate) is_adopted: bool,
}

impl Live {
    /// Takes up what a killed process left under `base`, or begins anew. The mirror is locked.
    pub(crate) fn open(
        base: &Path,
        map: &MapFile,
        layout: &Layout,
        shelf: u64,
    ) -> io::Result<Live> {
        let dir = base.join(map.identity().mirror.to_string());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        if !sys::is_in_memory(&dir)? {
            tracing::warn!(
                dir = %dir.display(),
                "the live directory is not on a tmpfs: everything is slower; choose another with --live"
            );
        }
        let boot = boot_id()?;
        let len = PAGE as u64 + Presence::shared_len(layout.block_count());
        let state = dir.join("state");
        let options = || {
            let mut options = OpenOptions::new();
            options.read(true).write(true).mode(0o600);
            options
        };
        if !map.is_clean()
            && let Ok(file) = options().open(&state)
            && file.metadata()?.len() == len
            && read_header(&file)? == header(&boot, map, map.sequence())
        {
            let presence = Presence::shared(&file, PAGE as u64, layout.block_count())?;
            presence.recount();
            let (epochs, mut states) = Epochs::open(&dir, layout.chunk_count())?;
            if states.last().is_none_or(|last| last.accepted().is_some()) {
                // Cannot be: the next epoch is there before the last one ends.
                let last = states.last().map_or(0, |last| last.epoch().0);
                states.push(epochs.take()?);
                states.last().expect("just pushed").begin(Epoch(last + 1));
            }
            let file = options().create(true).truncate(false).open(dir.join("shelf"))?;
            let shelf = Shelf::new(file.try_clone()?, shelf.max(file.metadata()?.len()))?;
            return Ok(Live { dir, presence, epochs, states, shelf, is_adopted: true });
        }
        // Somebody else's, or of another time.
        for entry in fs::read_dir(&dir)? {
            fs::remove_file(entry?.path())?;
        }
        let file = options().create_new(true).open(&state)?;
        allocate(&file, len)?;
        let presence = Presence::shared(&file, PAGE as u64, layout.block_count())?;
        let (epochs, _) = Epochs::open(&dir, layout.chunk_count())?;
        let first = epochs.take()?;
        first.begin(Epoch(1));
        let shelf = Shelf::new(options().create_new(true).open(dir.join("shelf"))?, shelf)?;
        // It begins to count when the mirror's map says that it is in use: with the next sequence.
        file.write_all_at(&header(&boot, map, map.sequence() + 1), 0)?;
        Ok(Live { dir, presence, epochs, states: vec![first], shelf, is_adopted: false })
    }

    /// The directory's path.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Removes a live directory: the mirror is at rest.
pub(crate) fn remove(dir: &Path) {
    if let Err(error) = fs::remove_dir_all(dir) {
        tracing::warn!(%error, dir = %dir.display(), "the live directory cannot be removed");
    }
}

/// What differs from one boot of the host to the next.
fn boot_id() -> io::Result<[u8; 36]> {
    let text = fs::read("/proc/sys/kernel/random/boot_id")?;
    text.get(..36)
        .and_then(|id| id.try_into().ok())
        .ok_or_else(|| io::Error::other("the host's boot id is not to be had"))
}

fn header(boot: &[u8; 36], map: &MapFile, sequence: u64) -> [u8; HEADER] {
    let identity = map.identity();
    let mut bytes = [0; HEADER];
    bytes[0..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..48].copy_from_slice(boot);
    bytes[48..64].copy_from_slice(identity.mirror.as_bytes());
    bytes[64..72].copy_from_slice(&identity.geometry.size().to_le_bytes());
    bytes[72..76].copy_from_slice(&identity.geometry.chunk_size().to_le_bytes());
    bytes[80..88].copy_from_slice(&sequence.to_le_bytes());
    bytes
}

fn read_header(file: &File) -> io::Result<[u8; HEADER]> {
    let mut bytes = [0; HEADER];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use cairn_store::{Geometry, MirrorId};

    use super::Live;
    use crate::mirror::layout::{Blocks, Layout};
    use crate::mirror::map::{Identity, MapFile};

    fn open(base: &Path, map: &MapFile) -> Live {
        Live::open(base, map, &Layout::new(map.identity().geometry), 1 << 20).unwrap()
    }

    #[test]
    fn it_counts_for_one_use_of_the_mirror_alone() {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity {
            mirror: MirrorId::from_bytes([7; 16]),
            image: "vm1".parse().unwrap(),
            geometry: Geometry::new(1 << 30, 256 * 1024).unwrap(),
            origin: 3,
        };
        let mut map = MapFile::create(&dir.path().join("map"), identity).unwrap();
        let base = dir.path().join("live");
        let live = open(&base, &map);
        assert!(!live.is_adopted);
        live.presence.set(Blocks { first: 9, count: 1 });
        drop(live);
        assert!(!open(&base, &map).is_adopted, "the mirror is not in use");
        map.begin().unwrap();
        let live = open(&base, &map);
        assert!(live.is_adopted && !live.presence.get(9));
        live.presence.set(Blocks { first: 9, count: 1 });
        live.states[0].dirty.insert(5);
        drop(live);
        let live = open(&base, &map);
        assert!(live.is_adopted && live.presence.get(9));
        assert_eq!(live.states.len(), 1);
        assert!(live.states[0].dirty.contains(5));
        drop(live);
        map.begin().unwrap();
        let live = open(&base, &map);
        assert!(!live.is_adopted && !live.presence.get(9), "of the use before");
    }
}
