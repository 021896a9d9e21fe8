//! What an attached mirror does. Each operation checks the fence in its own transaction.

use std::ops::Range;

use rusqlite::{Connection, Transaction, params};

use super::mirrors::{LEASE_SECONDS, find_mirror};
use super::{Catalog, now, rows};
use crate::error::{Error, Result};
use crate::id::MirrorId;
use crate::name::{ImageName, SnapshotRef};
use crate::snapshot::{NewSnapshot, Snapshot, SnapshotState};
use crate::tree::Root;

/// Who an attached mirror is to the catalog.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub(super) image: i64,
    pub(super) image_name: ImageName,
    pub(super) mirror: MirrorId,
    /// Of a mirror that may write.
    pub(super) fence: Option<u64>,
}

impl Holder {
    pub(crate) fn image_name(&self) -> &ImageName {
        &self.image_name
    }

    pub(crate) fn may_write(&self) -> bool {
        self.fence.is_some()
    }

    /// The fence, if the lease still has it.
    fn check(&self, tx: &Connection) -> Result<u64> {
        let Some(fence) = self.fence else {
            let mirror = self.mirror;
            return Err(Error::BadArgument(format!(
                "mirror {mirror} is attached for reading only"
            )));
        };
        let mut query = tx.prepare_cached(
            "SELECT 1 FROM leases WHERE image = ?1 AND mirror = ?2 AND fence = ?3",
        )?;
        if query.exists(params![self.image, self.mirror.as_bytes(), fence])? {
            return Ok(fence);
        }
        let (image, mirror) = (self.image_name.to_string(), self.mirror.to_string());
        Err(Error::Fenced { image, mirror })
    }

    fn snapshot(&self, tx: &Transaction<'_>, number: u64) -> Result<Snapshot> {
        let name = || SnapshotRef::number(&self.image_name, number).to_string();
        let snapshot = rows::snapshot(tx, self.image, number)?;
        let snapshot = snapshot.ok_or_else(|| Error::NoSnapshot { name: name() })?;
        if snapshot.mirror != Some(self.mirror) {
            let (image, selector) = (self.image_name.to_string(), number.to_string());
            return Err(Error::SnapshotExists { image, selector });
        }
        Ok(snapshot)
    }

    fn parent(&self, tx: &Transaction<'_>) -> Result<u64> {
        let mirror = find_mirror(tx, &self.mirror)?;
        mirror.map(|m| m.parent).ok_or_else(|| Error::NoMirror { id: self.mirror.to_string() })
    }
}

impl Catalog {
    pub(crate) fn reserve(&self, holder: &Holder, count: u64) -> Result<Range<u64>> {
        self.write(|tx| {
            holder.check(tx)?;
            let end: u64 = tx.query_row(
                "UPDATE images SET next_number = next_number + ?2 WHERE id = ?1
                 RETURNING next_number",
                params![holder.image, count],
                |row| row.get(0),
            )?;
            Ok(end - count..end)
        })
    }

    pub(crate) fn renew(&self, holder: &Holder) -> Result<()> {
        self.write(|tx| {
            let fence = holder.check(tx)?;
            tx.execute(
                "UPDATE leases SET expires = ?3 WHERE image = ?1 AND fence = ?2",
                params![holder.image, fence, now() + LEASE_SECONDS],
            )?;
            Ok(())
        })
    }

    /// Announces a snapshot. Announcing one again that is still pending is fine: a writer that was
    /// restarted cannot know how far it had come.
    pub(crate) fn begin(&self, holder: &Holder, new: &NewSnapshot) -> Result<()> {
        self.write(|tx| {
            holder.check(tx)?;
            let row = rows::image(tx, &holder.image_name)?;
            if new.number == 0 || new.number >= row.next_number {
                let number = new.number;
                return Err(Error::BadArgument(format!(
                    "snapshot number {number} is not reserved"
                )));
            }
            if rows::snapshot(tx, holder.image, new.number)?.is_some() {
                return match holder.snapshot(tx, new.number)?.state {
                    SnapshotState::Pending => Ok(()),
                    state => Err(wrong_state(holder, new.number, state, None)),
                };
            }
            let inserted = tx.execute(
                "INSERT INTO snapshots (image, number, parent, time, label, state, consistency,
                                        dirty_bytes, stored_bytes, pause_us, mirror)
                 VALUES (?1, ?2, ?3, ?4, ?5, 'pending', ?6, ?7, 0, ?8, ?9)
                 ON CONFLICT (image, label) WHERE label IS NOT NULL AND state <> 'failed'
                 DO NOTHING",
                params![
                    holder.image,
                    new.number,
                    holder.parent(tx)?,
                    new.time,
                    new.label,
                    new.consistency.as_str(),
                    new.dirty_bytes,
                    new.pause_us,
                    holder.mirror.as_bytes()
                ],
            )?;
            if inserted == 0 {
                let image = holder.image_name.to_string();
                let selector = new.label.clone().unwrap_or_default();
                return Err(Error::SnapshotExists { image, selector });
            }
            Ok(())
        })
    }

    /// Publishes an announced snapshot and makes it the mirror's parent. Publishing the same content
    /// again is fine, for the same reason as in [`Catalog::begin`].
    pub(crate) fn publish(
        &self,
        holder: &Holder,
        number: u64,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
    ) -> Result<Snapshot> {
        self.write(|tx| {
            holder.check(tx)?;
            let snapshot = holder.snapshot(tx, number)?;
            match snapshot.state {
                SnapshotState::Pending => {}
                SnapshotState::Stable if snapshot.root == *root => return Ok(snapshot),
                state => return Err(wrong_state(holder, number, state, snapshot.reason)),
            }
            let root = root.0.as_ref().map(|id| id.as_bytes());
            tx.execute(
                "UPDATE snapshots SET state = 'stable', parent = ?3, root = ?4, stored_bytes = ?5,
                                      dirty_bytes = ?6
                 WHERE image = ?1 AND number = ?2",
                params![holder.image, number, holder.parent(tx)?, root, stored_bytes, dirty_bytes],
            )?;
            tx.execute(
                "UPDATE mirrors SET parent = ?2, root = ?3 WHERE id = ?1",
                params![holder.mirror.as_bytes(), number, root],
            )?;
            holder.snapshot(tx, number)
        })
    }

    /// Gives up an announced snapshot. It may be one of a mirror that is lost: who has the lease is
    /// the image's only writer.
    pub(crate) fn fail(&self, holder: &Holder, number: u64, reason: &str) -> Result<()> {
        self.write(|tx| {
            holder.check(tx)?;
            let snapshot =
                rows::snapshot(tx, holder.image, number)?.ok_or_else(|| Error::NoSnapshot {
                    name: SnapshotRef::number(&holder.image_name, number).to_string(),
                })?;
            let state = snapshot.state;
            if state == SnapshotState::Stable {
                return Err(wrong_state(holder, number, state, None));
            }
            tx.execute(
                "UPDATE snapshots SET state = 'failed', reason = ?3
                 WHERE image = ?1 AND number = ?2",
                params![holder.image, number, reason],
            )?;
            Ok(())
        })
    }

    /// Frees the lease. Numbers that nobody has used go back if nothing was reserved after them, so
    /// that an orderly stop leaves no gap.
    pub(crate) fn release(&self, holder: &Holder, unused: Option<Range<u64>>) -> Result<()> {
        self.write(|tx| {
            let fence = holder.check(tx)?;
            if let Some(unused) = unused.filter(|range| range.start < range.end && range.start > 0)
            {
                tx.execute(
                    "UPDATE images SET next_number = ?2 WHERE id = ?1 AND next_number = ?3
                     AND NOT EXISTS (SELECT 1 FROM snapshots WHERE image = ?1 AND number >= ?2)",
                    params![holder.image, unused.start, unused.end],
                )?;
            }
            tx.execute(
                "DELETE FROM leases WHERE image = ?1 AND fence = ?2",
                params![holder.image, fence],
            )?;
            Ok(())
        })
    }

    /// Drops the mirror's reference, and with it its lease.
    pub(crate) fn detach(&self, holder: &Holder) -> Result<()> {
        self.write(|tx| {
            if holder.may_write() {
                holder.check(tx)?;
            }
            tx.execute("DELETE FROM mirrors WHERE id = ?1", [holder.mirror.as_bytes()])?;
            Ok(())
        })
    }
}

fn wrong_state(
    holder: &Holder,
    number: u64,
    state: SnapshotState,
    reason: Option<String>,
) -> Error {
    let name = SnapshotRef::number(&holder.image_name, number).to_string();
    Error::WrongState { name, state: state.as_str(), reason }
}
