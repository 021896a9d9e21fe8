//! The mirrors that refer to images, and the lease that makes one of them an image's writer.
//!
//! A lease is live until it expires, unless its process is certainly dead. Every acquisition raises the
//! image's fence, and every operation of a writer checks in its own transaction that the lease still
//! has the writer's fence: a writer that was away for too long finds out before it changes anything.

use rusqlite::{OptionalExtension, Row, Transaction, params};

use super::attachments::Holder;
use super::rows::{self, ImageRow};
use super::{Catalog, now};
use crate::error::{Error, Result};
use crate::id::MirrorId;
use crate::name::ImageName;
use crate::process::Process;
use crate::snapshot::{MirrorOwner, MirrorRecord, Mode, Snapshot};
use crate::tree::Root;

/// How long a lease lasts without a renewal.
pub const LEASE_SECONDS: u64 = 60;

impl Catalog {
    pub(crate) fn mirrors(&self) -> Result<Vec<MirrorRecord>> {
        self.read(|tx| mirrors_of(tx, None))
    }

    pub(crate) fn mirror(&self, id: &MirrorId) -> Result<Option<MirrorRecord>> {
        self.read(|tx| find_mirror(tx, id))
    }

    /// Drops a mirror's reference, and its lease if that is dead.
    pub(crate) fn forget_mirror(&self, id: &MirrorId) -> Result<()> {
        let observer = Process::current()?;
        self.write(|tx| {
            let Some(mirror) = find_mirror(tx, id)? else {
                return Err(Error::NoMirror { id: id.to_string() });
            };
            let ImageRow { id: image, .. } = rows::image(tx, &mirror.image)?;
            let lease = rows::lease(tx, image)?.filter(|lease| lease.mirror == *id);
            if let Some(lease) = lease.filter(|lease| lease.is_live(now(), &observer)) {
                return Err(lease.conflict(&mirror.image));
            }
            tx.execute("DELETE FROM mirrors WHERE id = ?1", [id.as_bytes()])?;
            Ok(())
        })
    }

    /// Records the mirror, takes the lease if it is to write, and returns the mirror's parent.
    pub(crate) fn attach(
        &self,
        owner: &MirrorOwner,
        snapshot: &Snapshot,
        mode: Mode,
    ) -> Result<(Holder, u64, Root)> {
        let process = Process::on_this_host(owner.pid)?;
        if process.boot_id != owner.boot_id {
            return Err(Error::BadArgument("a mirror is attached on the host it is on".into()));
        }
        self.write(|tx| {
            let ImageRow { id: image, .. } = rows::image(tx, &snapshot.image)?;
            let lease = rows::lease(tx, image)?;
            let ours = |mirror, holder: &Process| mirror == owner.id && *holder == process;
            if let Some(lease) = lease.filter(|lease| lease.is_live(now(), &process))
                && (mode == Mode::ReadWrite || lease.mirror == owner.id)
                && !ours(lease.mirror, &lease.process)
            {
                return Err(lease.conflict(&snapshot.image));
            }
            let (parent, root) = record_mirror(tx, owner, image, snapshot, mode)?;
            tx.execute("DELETE FROM leases WHERE mirror = ?1", [owner.id.as_bytes()])?;
            let fence = match mode {
                Mode::ReadWrite => Some(take_lease(tx, owner, image, &process)?),
                Mode::ReadOnly => None,
            };
            let image_name = snapshot.image.clone();
            Ok((Holder { image, image_name, mirror: owner.id, fence }, parent, root))
        })
    }
}

/// The mirrors of one image, or of all.
pub(super) fn mirrors_of(
    tx: &Transaction<'_>,
    image: Option<&ImageName>,
) -> Result<Vec<MirrorRecord>> {
    let observer = Process::current()?;
    let mut query = tx.prepare_cached(&format!("{MIRROR} ORDER BY i.name, m.attached, m.id"))?;
    let mirrors = query.query_and_then([], |row| read_mirror(tx, row, &observer))?;
    let wanted = |mirror: &MirrorRecord| image.is_none_or(|image| mirror.image == *image);
    mirrors.filter(|mirror| mirror.as_ref().map_or(true, wanted)).collect()
}

const MIRROR: &str = "
    SELECT m.id, i.id AS image, i.name, m.host, m.path, m.mode, m.parent, m.root, m.attached
    FROM mirrors m JOIN images i ON i.id = m.image";

pub(super) fn find_mirror(tx: &Transaction<'_>, id: &MirrorId) -> Result<Option<MirrorRecord>> {
    let observer = Process::current()?;
    let mut query = tx.prepare_cached(&format!("{MIRROR} WHERE m.id = ?1"))?;
    let mut found = query.query_and_then([id.as_bytes()], |row| read_mirror(tx, row, &observer))?;
    found.next().transpose()
}

fn read_mirror(tx: &Transaction<'_>, row: &Row<'_>, observer: &Process) -> Result<MirrorRecord> {
    let id = MirrorId::from_bytes(row.get("id")?);
    let lease = rows::lease(tx, row.get("image")?)?;
    let lease = lease.filter(|lease| lease.mirror == id && lease.is_live(now(), observer));
    Ok(MirrorRecord {
        id,
        image: rows::read_name(row)?,
        host: row.get("host")?,
        path: row.get("path")?,
        mode: rows::read_mode(row)?,
        parent: row.get("parent")?,
        root: rows::read_root(row)?,
        attached: row.get("attached")?,
        writer: lease.map(|lease| lease.process.pid),
    })
}

/// Makes or renews the mirror's record. A mirror that was attached before has its own parent: what it
/// holds locally was derived from that, whatever is asked for.
fn record_mirror(
    tx: &Transaction<'_>,
    owner: &MirrorOwner,
    image: i64,
    snapshot: &Snapshot,
    mode: Mode,
) -> Result<(u64, Root)> {
    if let Some(known) = find_mirror(tx, &owner.id)? {
        if known.image != snapshot.image {
            return Err(Error::BadArgument(format!(
                "mirror {} belongs to image '{}', not to '{}'; use another directory",
                owner.id, known.image, snapshot.image
            )));
        }
        tx.execute(
            "UPDATE mirrors SET host = ?2, path = ?3, mode = ?4, attached = ?5 WHERE id = ?1",
            params![owner.id.as_bytes(), owner.host, owner.path, mode.as_str(), now()],
        )?;
        return Ok((known.parent, known.root));
    }
    // The snapshot may have been removed since it was looked up, and only what the catalog holds is
    // safe from garbage collection.
    let Some(snapshot) = rows::snapshot(tx, image, snapshot.number)? else {
        return Err(Error::NoSnapshot { name: snapshot.name().to_string() });
    };
    snapshot.require_stable()?;
    tx.execute(
        "INSERT INTO mirrors (id, image, host, path, mode, parent, root, attached)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        params![
            owner.id.as_bytes(),
            image,
            owner.host,
            owner.path,
            mode.as_str(),
            snapshot.number,
            snapshot.root.0.as_ref().map(|id| id.as_bytes()),
            now()
        ],
    )?;
    Ok((snapshot.number, snapshot.root))
}

/// Takes the lease and returns its fence.
fn take_lease(
    tx: &Transaction<'_>,
    owner: &MirrorOwner,
    image: i64,
    process: &Process,
) -> Result<u64> {
    let fence = tx
        .query_row(
            "UPDATE images SET fence = fence + 1 WHERE id = ?1 RETURNING fence",
            [image],
            |row| row.get(0),
        )
        .optional()?
        .ok_or_else(|| Error::corrupt("the catalog", "an image vanished in a transaction"))?;
    tx.execute(
        "INSERT OR REPLACE INTO leases (image, mirror, fence, expires, boot_id, pid_namespace, pid,
                                        start_time)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        params![
            image,
            owner.id.as_bytes(),
            fence,
            now() + LEASE_SECONDS,
            process.boot_id,
            process.pid_namespace,
            process.pid,
            process.start_time
        ],
    )?;
    Ok(fence)
}
