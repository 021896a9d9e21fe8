//! Making, listing and removing images and snapshots.

use rusqlite::{Transaction, params};

use super::rows::{self, ImageRow};
use super::{Catalog, now};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::name::{ImageName, SnapshotRef};
use crate::process::Process;
use crate::snapshot::{Consistency, Image, Snapshot, SnapshotState};
use crate::tree::Root;

/// The first snapshot of an image that is being made.
pub(crate) struct FirstSnapshot {
    pub(crate) root: Root,
    pub(crate) consistency: Consistency,
    pub(crate) dirty_bytes: u64,
    pub(crate) stored_bytes: u64,
}

impl Catalog {
    pub(crate) fn images(&self) -> Result<Vec<Image>> {
        self.read(rows::images)
    }

    pub(crate) fn image(&self, name: &ImageName) -> Result<Image> {
        self.read(|tx| Ok(rows::image(tx, name)?.image))
    }

    pub(crate) fn snapshots(&self, name: &ImageName) -> Result<Vec<Snapshot>> {
        self.read(|tx| rows::snapshots(tx, rows::image(tx, name)?.id))
    }

    pub(crate) fn resolve(&self, name: &SnapshotRef) -> Result<Snapshot> {
        self.read(|tx| rows::resolve(tx, name))
    }

    pub(crate) fn create_image(
        &self,
        name: &ImageName,
        geometry: Geometry,
        first: &FirstSnapshot,
    ) -> Result<Snapshot> {
        self.write(|tx| insert_image(tx, name, geometry, None, first))
    }

    pub(crate) fn clone_snapshot(
        &self,
        source: &SnapshotRef,
        name: &ImageName,
    ) -> Result<Snapshot> {
        self.write(|tx| {
            let source = rows::resolve(tx, source)?;
            source.require_stable()?;
            let first = FirstSnapshot {
                root: source.root,
                consistency: source.consistency,
                dirty_bytes: 0,
                stored_bytes: 0,
            };
            insert_image(tx, name, source.geometry, Some(source.name().to_string()), &first)
        })
    }

    pub(crate) fn remove_snapshot(&self, name: &SnapshotRef) -> Result<Snapshot> {
        let observer = Process::current()?;
        self.write(|tx| {
            let ImageRow { id, .. } = rows::image(tx, &name.image)?;
            let snapshot = rows::resolve(tx, name)?;
            match snapshot.state {
                SnapshotState::Pending => {
                    // A live writer is about to publish it.
                    let lease = rows::lease(tx, id)?;
                    if let Some(lease) = lease.filter(|lease| lease.is_live(now(), &observer)) {
                        return Err(lease.conflict(&name.image));
                    }
                }
                SnapshotState::Stable => {
                    let stable: u64 = tx.query_row(
                        "SELECT count(*) FROM snapshots WHERE image = ?1 AND state = 'stable'",
                        [id],
                        |row| row.get(0),
                    )?;
                    if stable == 1 {
                        return Err(Error::OnlyStable { name: snapshot.name().to_string() });
                    }
                }
                SnapshotState::Failed => {}
            }
            tx.execute(
                "DELETE FROM snapshots WHERE image = ?1 AND number = ?2",
                params![id, snapshot.number],
            )?;
            Ok(snapshot)
        })
    }

    pub(crate) fn remove_image(&self, name: &ImageName, force: bool) -> Result<()> {
        let observer = Process::current()?;
        self.write(|tx| {
            let ImageRow { id, .. } = rows::image(tx, name)?;
            let lease = rows::lease(tx, id)?;
            if let Some(lease) = lease.filter(|lease| lease.is_live(now(), &observer)) {
                return Err(lease.conflict(name));
            }
            let user = super::mirrors::mirrors_of(tx, Some(name))?.into_iter().next();
            if let Some(mirror) = user.filter(|_| !force) {
                return Err(Error::Referenced {
                    image: name.to_string(),
                    mirror: mirror.id.to_string(),
                    host: mirror.host,
                    path: mirror.path,
                });
            }
            tx.execute("DELETE FROM images WHERE id = ?1", [id])?;
            Ok(())
        })
    }
}

fn insert_image(
    tx: &Transaction<'_>,
    name: &ImageName,
    geometry: Geometry,
    origin: Option<String>,
    first: &FirstSnapshot,
) -> Result<Snapshot> {
    const NUMBER: u64 = 1;
    let time = now();
    let inserted = tx.execute(
        "INSERT INTO images (name, size, chunk_size, created, origin, next_number)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (name) DO NOTHING",
        params![name.as_str(), geometry.size(), geometry.chunk_size(), time, origin, NUMBER + 1],
    )?;
    if inserted == 0 {
        return Err(Error::ImageExists { name: name.to_string() });
    }
    tx.execute(
        "INSERT INTO snapshots (image, number, root, time, state, consistency, dirty_bytes,
                                stored_bytes, pause_us)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, 0)",
        params![
            tx.last_insert_rowid(),
            NUMBER,
            first.root.0.as_ref().map(|id| id.as_bytes()),
            time,
            SnapshotState::Stable.as_str(),
            first.consistency.as_str(),
            first.dirty_bytes,
            first.stored_bytes
        ],
    )?;
    rows::resolve(tx, &SnapshotRef::number(name, NUMBER))
}
