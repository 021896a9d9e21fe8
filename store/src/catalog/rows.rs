//! From rows to values. A row that no program of ours can have written is corrupt.

use rusqlite::{OptionalExtension, Row, ToSql, Transaction};

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::{MirrorId, NodeId};
use crate::name::{ImageName, Selector, SnapshotRef};
use crate::process::Process;
use crate::snapshot::{Consistency, Image, Mode, Snapshot, SnapshotState};
use crate::tree::Root;

/// An image with what only the catalog needs.
pub(super) struct ImageRow {
    pub(super) id: i64,
    pub(super) image: Image,
    pub(super) next_number: u64,
}

/// The lease on an image and the mirror that holds it.
pub(super) struct LeaseRow {
    pub(super) mirror: MirrorId,
    pub(super) expires: u64,
    pub(super) host: String,
    pub(super) path: String,
    pub(super) process: Process,
}

impl LeaseRow {
    /// Whether its holder may still write, as seen by `observer`.
    pub(super) fn is_live(&self, now: u64, observer: &Process) -> bool {
        self.expires > now && !self.process.is_dead(observer)
    }

    /// The error for everybody else.
    pub(super) fn conflict(&self, image: &ImageName) -> Error {
        Error::Leased {
            image: image.to_string(),
            host: self.host.clone(),
            path: self.path.clone(),
            pid: self.process.pid,
            seconds: super::LEASE_SECONDS,
        }
    }
}

const IMAGE: &str = "
    SELECT i.id, i.name, i.size, i.chunk_size, i.created, i.origin, i.next_number,
           (SELECT count(*) FROM snapshots s WHERE s.image = i.id) AS snapshots,
           (SELECT max(number) FROM snapshots s WHERE s.image = i.id AND s.state = 'stable') AS newest
    FROM images i";

const SNAPSHOT: &str = "
    SELECT i.name, i.size, i.chunk_size, s.number, s.parent, s.root, s.time, s.label, s.state,
           s.consistency, s.dirty_bytes, s.stored_bytes, s.pause_us, s.reason, s.mirror
    FROM snapshots s JOIN images i ON i.id = s.image";

pub(super) fn images(tx: &Transaction<'_>) -> Result<Vec<Image>> {
    let mut query = tx.prepare_cached(&format!("{IMAGE} ORDER BY i.name"))?;
    query.query_and_then([], |row| Ok(read_image(row)?.image))?.collect()
}

pub(super) fn image(tx: &Transaction<'_>, name: &ImageName) -> Result<ImageRow> {
    let mut query = tx.prepare_cached(&format!("{IMAGE} WHERE i.name = ?1"))?;
    let row = query.query_and_then([name.as_str()], read_image)?.next();
    row.unwrap_or_else(|| Err(Error::NoImage { name: name.to_string() }))
}

pub(super) fn snapshots(tx: &Transaction<'_>, image: i64) -> Result<Vec<Snapshot>> {
    let mut query =
        tx.prepare_cached(&format!("{SNAPSHOT} WHERE s.image = ?1 ORDER BY s.number"))?;
    query.query_and_then([image], read_snapshot)?.collect()
}

/// The snapshot with this number, if there is one.
pub(super) fn snapshot(tx: &Transaction<'_>, image: i64, number: u64) -> Result<Option<Snapshot>> {
    find_snapshot(tx, "s.image = ?1 AND s.number = ?2", &[&image, &number])
}

/// The snapshot that people call this.
pub(super) fn resolve(tx: &Transaction<'_>, name: &SnapshotRef) -> Result<Snapshot> {
    let ImageRow { id, image, .. } = self::image(tx, &name.image)?;
    let found = match &name.selector {
        Selector::Number(number) => snapshot(tx, id, *number)?,
        Selector::Newest => image.newest.map_or(Ok(None), |number| snapshot(tx, id, number))?,
        // Several failed snapshots can have had the label: one that did not fail is meant, if any.
        Selector::Label(label) => find_snapshot(
            tx,
            "s.image = ?1 AND s.label = ?2 ORDER BY s.state = 'failed', s.number DESC LIMIT 1",
            &[&id, label],
        )?,
    };
    found.ok_or_else(|| Error::NoSnapshot { name: name.to_string() })
}

pub(super) fn lease(tx: &Transaction<'_>, image: i64) -> Result<Option<LeaseRow>> {
    let mut query = tx.prepare_cached(
        "SELECT l.mirror, l.expires, m.host, m.path, l.boot_id, l.pid_namespace, l.pid, l.start_time
         FROM leases l JOIN mirrors m ON m.id = l.mirror WHERE l.image = ?1",
    )?;
    let lease = query.query_row([image], |row| {
        Ok(LeaseRow {
            mirror: MirrorId::from_bytes(row.get("mirror")?),
            expires: row.get("expires")?,
            host: row.get("host")?,
            path: row.get("path")?,
            process: Process {
                boot_id: row.get("boot_id")?,
                pid_namespace: row.get("pid_namespace")?,
                pid: row.get("pid")?,
                start_time: row.get("start_time")?,
            },
        })
    });
    Ok(lease.optional()?)
}

pub(super) fn read_root(row: &Row<'_>) -> Result<Root> {
    Ok(Root(row.get::<_, Option<[u8; 32]>>("root")?.map(NodeId::from_bytes)))
}

pub(super) fn read_name(row: &Row<'_>) -> Result<ImageName> {
    let name: String = row.get("name")?;
    name.parse().map_err(|_| bad_value("name", &name))
}

pub(super) fn read_mode(row: &Row<'_>) -> Result<Mode> {
    read_word(row, "mode", Mode::from_word)
}

fn find_snapshot(
    tx: &Transaction<'_>,
    condition: &str,
    values: &[&dyn ToSql],
) -> Result<Option<Snapshot>> {
    let mut query = tx.prepare_cached(&format!("{SNAPSHOT} WHERE {condition}"))?;
    query.query_and_then(values, read_snapshot)?.next().transpose()
}

fn read_image(row: &Row<'_>) -> Result<ImageRow> {
    let image = Image {
        name: read_name(row)?,
        geometry: read_geometry(row)?,
        created: row.get("created")?,
        snapshots: row.get("snapshots")?,
        newest: row.get("newest")?,
        origin: row.get("origin")?,
    };
    Ok(ImageRow { id: row.get("id")?, image, next_number: row.get("next_number")? })
}

fn read_snapshot(row: &Row<'_>) -> Result<Snapshot> {
    Ok(Snapshot {
        image: read_name(row)?,
        number: row.get("number")?,
        parent: row.get("parent")?,
        root: read_root(row)?,
        time: row.get("time")?,
        geometry: read_geometry(row)?,
        label: row.get("label")?,
        state: read_word(row, "state", SnapshotState::from_word)?,
        consistency: read_word(row, "consistency", Consistency::from_word)?,
        dirty_bytes: row.get("dirty_bytes")?,
        stored_bytes: row.get("stored_bytes")?,
        pause_us: row.get("pause_us")?,
        reason: row.get("reason")?,
        mirror: row.get::<_, Option<[u8; 16]>>("mirror")?.map(MirrorId::from_bytes),
    })
}

fn read_geometry(row: &Row<'_>) -> Result<Geometry> {
    let (size, chunk_size) = (row.get("size")?, row.get("chunk_size")?);
    Geometry::new(size, chunk_size)
        .map_err(|error| Error::corrupt("a row of the catalog", error.to_string()))
}

fn read_word<T>(row: &Row<'_>, column: &str, parse: fn(&str) -> Option<T>) -> Result<T> {
    let word: String = row.get(column)?;
    parse(&word).ok_or_else(|| bad_value(column, &word))
}

fn bad_value(column: &str, value: &str) -> Error {
    Error::corrupt("a row of the catalog", format!("its {column} is '{value}'"))
}
