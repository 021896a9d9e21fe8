//! The mirror's directory and the live directory, as the process finds them.

use std::io;
use std::path::Path;
use std::sync::Arc;

use cairn_store::{Geometry, MirrorId, MirrorRecord, Selector, Snapshot, SnapshotRef};

use super::error::StartError;
use crate::args::Args;
use crate::mirror::files::disk_file::{DiskFile, make_directory};
use crate::mirror::files::layer_table::LayerDir;
use crate::mirror::files::live_dir::LiveDir;
use crate::mirror::files::map::{Identity, MapError, MapFile, UseId};
use crate::mirror::layout::{BLOCK_BYTES, Layout, Span, default_capacity};
use crate::sys;

/// The mirror's directory, which is locked and fits the image.
pub(super) struct LocalState {
    pub(super) data: DiskFile,
    pub(super) map: MapFile,
    pub(super) layer_dir: Arc<LayerDir>,
    pub(super) layout: Layout,
    pub(super) live: LiveDir,
    /// The id of the use of the mirror that begins, unless an earlier use goes on.
    pub(super) next_use: UseId,
}

impl LocalState {
    /// Opens the directory, or creates a mirror of `snapshot` in it.
    /// The mirror gets this geometry if it is created; otherwise it keeps its size.
    pub(super) fn open(
        args: &Args,
        snapshot: &Snapshot,
        geometry: Geometry,
    ) -> Result<LocalState, StartError> {
        let path = &args.mirror;
        let failed = |source| StartError::Mirror { path: path.clone(), source };
        let mismatch =
            |reason: &str| StartError::Mismatch { path: path.clone(), reason: reason.into() };
        let map_path = path.join("map");
        let map_failed = |source| StartError::Map { path: map_path.clone(), source };
        make_directory(path).map_err(failed)?;
        let data = DiskFile::open(&path.join("disk")).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => StartError::Locked { path: path.clone() },
            io::ErrorKind::InvalidInput => {
                mismatch("is on a file system without direct I/O; use ext4 or xfs")
            }
            _ => failed(source),
        })?;
        if data.alignment().offset > BLOCK_BYTES {
            return Err(mismatch(
                "is on a disk whose sectors are larger than 4 KiB, which is not supported",
            ));
        }
        let len = data.len().map_err(failed)?;
        let map = match MapFile::open(&map_path) {
            Ok(map) => map,
            Err(MapError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                if len > 0 && !data.is_hole(Span { offset: 0, len }) {
                    return Err(mismatch("has data but no map; choose an empty directory"));
                }
                let identity = Identity {
                    mirror: MirrorId::from_bytes(sys::random_id().map_err(failed)?),
                    image: snapshot.image.clone(),
                    image_id: snapshot.image_id,
                    geometry,
                    capacity: default_capacity(geometry.size()),
                    origin: snapshot.number,
                };
                let len = identity.layout().file_len();
                data.set_len(len).map_err(failed)?;
                data.punch(Span { offset: 0, len }).map_err(|error| {
                    mismatch(&format!("is on a file system that cannot punch holes ({error})"))
                })?;
                // A process that finds a map also finds the file that it describes.
                data.sync_name(path).map_err(failed)?;
                MapFile::create(&map_path, identity, snapshot.root).map_err(map_failed)?
            }
            Err(error) => return Err(map_failed(error)),
        };
        let identity = map.identity();
        if identity.image != snapshot.image
            || identity.geometry.chunk_size() != snapshot.geometry.chunk_size()
        {
            return Err(mismatch(&format!(
                "belongs to image '{}' in chunks of {} bytes, not to '{}' in chunks of {}; choose \
                 another directory",
                identity.image,
                identity.geometry.chunk_size(),
                snapshot.image,
                snapshot.geometry.chunk_size(),
            )));
        }
        if identity.image_id != snapshot.image_id {
            return Err(mismatch(&format!(
                "belongs to an earlier image '{}', which was removed; choose another directory",
                identity.image
            )));
        }
        let layout = identity.layout();
        // It may be longer: the process may have ended while the disk grew.
        if data.len().map_err(failed)? < layout.file_len() {
            return Err(mismatch("has a data file of the wrong length; delete the directory"));
        }
        let layer_dir = Arc::new(LayerDir::new(path, &layout));
        let next_use = sys::random_id().map_err(failed)?;
        let (base, cow_memory_bytes) = (args.live(), u64::from(args.cow_memory) << 20);
        let live = LiveDir::open(&base, path, &map, &next_use, &layout, cow_memory_bytes).map_err(
            |source| match source.kind() {
                io::ErrorKind::WouldBlock => StartError::Locked { path: path.clone() },
                _ => StartError::LiveDir { path: base, source },
            },
        )?;
        if !live.is_adopted {
            map.load(&live.presence, live.epochs[0].chunks.dirty()).map_err(map_failed)?;
        }
        Ok(LocalState { data, map, layer_dir, layout, live, next_use })
    }

    /// Whether the mirror has data, or changes that are not in its parent.
    pub(super) fn is_used(&self) -> bool {
        let changed = self.live.epochs.iter().any(|record| record.chunks.dirty().len() > 0);
        changed || self.live.presence.local_bytes() > 0
    }

    /// Checks that the mirror continues the snapshot that was requested.
    pub(super) fn check(
        &self,
        path: &Path,
        wanted: &SnapshotRef,
        snapshot: &Snapshot,
        record: Option<&MirrorRecord>,
    ) -> Result<(), String> {
        let identity = self.map.identity();
        let parent = match record {
            Some(record) => record.parent,
            // The catalog was rebuilt, or the mirror was forgotten: see `Repository::attach_again`.
            None if self.is_used() => self.map.parent().number,
            None => return Ok(()),
        };
        // With the same arguments as at its creation, the mirror goes on where it is.
        let same = parent == snapshot.number
            || (wanted.selector != Selector::Newest && identity.origin == snapshot.number);
        // The newest snapshot may be one that this mirror published just before its process died.
        let own = snapshot.mirror == Some(identity.mirror);
        if same || own {
            return Ok(());
        }
        Err(format!(
            "holds {image}@{parent} and later writes, but {asked} was requested; start it with --image \
             {image}@{parent} to go on from there, or delete {path} to start from {asked}",
            image = identity.image,
            asked = snapshot.name(),
            path = path.display(),
        ))
    }
}
