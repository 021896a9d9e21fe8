//! What a peer keeps, in its data directory.
//!
//! ```text
//! DIR/peer.json      the marker: who this peer is
//! DIR/segments/      blocks, appended to a log
//! DIR/index.db       where each block is
//! DIR/fragments.db   of which blob it is a block, and what the others are
//! ```
//!
//! A put is staged; a flush makes everything durable that was put before it, with one sync for all blocks and one
//! for all descriptions. A fragment is known when both are durable, in this order, so whoever finds one may rely
//! on it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, TransactionBehavior, params};
use serde::{Deserialize, Serialize};

use super::super::fragment::{Description, Fragment, MAX_CONTENT};
use crate::blobs::{Blobs, LocalBlobs};
use crate::cluster::Keep;
use crate::database;
use crate::error::{Error, Result};
use crate::id::{BlobId, PeerId};
use crate::sys;

const MARKER: &str = "peer.json";
const DATABASE: &str = "fragments.db";
const FORMAT: &str = "cairn-peer";
const VERSION: u64 = 1;

/// What the names in the directory of a peer that is half made begin with.
const PARTS: [&str; 5] = ["lock", "segments", "index.db", DATABASE, "peer.json.new"];

/// The most fragments of one blob: of all ways to encode it that anybody may try.
const MAX_FRAGMENTS: usize = 64;

/// `docs/formats.md` explains every column.
const TABLES: &str = "
CREATE TABLE fragments (
    blob        BLOB    NOT NULL CHECK (length(blob) = 32),
    encoding    BLOB    NOT NULL CHECK (length(encoding) = 32),
    number      INTEGER NOT NULL,
    description BLOB    NOT NULL,
    length      INTEGER NOT NULL,
    touched     INTEGER NOT NULL,
    PRIMARY KEY (blob, encoding, number)
) STRICT, WITHOUT ROWID;
";

#[derive(Serialize, Deserialize)]
struct Marker {
    format: String,
    version: u64,
    id: String,
}

/// One fragment that a peer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The name of its description.
    pub encoding: BlobId,
    /// Blocks that are enough.
    pub data: u8,
    /// Blocks beside them.
    pub parity: u8,
    /// Which block it is.
    pub index: u8,
}

/// How much a peer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that it may hold.
    pub capacity: u64,
    /// Bytes of blocks that it holds.
    pub used: u64,
    /// How many fragments.
    pub fragments: u64,
}

/// A fragment whose block is written, and that is not known yet.
struct Staged {
    description: Description,
    index: u8,
    /// The space that was taken for it: none if it was there already.
    bytes: u64,
}

#[derive(Default)]
struct State {
    staged: Vec<Staged>,
    /// Space that was taken for fragments that are not known yet.
    taken: u64,
    /// Of all fragments that are durable.
    used: u64,
    fragments: u64,
}

/// The fragments of one peer.
pub struct PeerStore {
    id: PeerId,
    capacity: Option<u64>,
    directory: PathBuf,
    /// It may be used by one process only.
    _lock: File,
    blocks: LocalBlobs,
    /// Apart from the writer: to find a fragment must not wait for a sync.
    reader: Mutex<Connection>,
    writer: Mutex<Connection>,
    state: Mutex<State>,
}

impl PeerStore {
    /// Opens a data directory, and makes it first if it is empty or not there. Without a capacity the file system
    /// is the limit.
    pub fn open(directory: &Path, capacity: Option<u64>) -> Result<PeerStore> {
        let failed = |error| Error::io("making", directory, error);
        fs::create_dir_all(directory).map_err(failed)?;
        let lock = lock(directory)?;
        let id = match read_marker(directory)? {
            Some(id) => id,
            None => make(directory)?,
        };
        let blocks = LocalBlobs::open(directory)?;
        let (writer, reader) = database::open(&directory.join(DATABASE), VERSION)?;
        let (used, fragments) = reader.query_row(
            "SELECT coalesce(sum(length), 0), count(*) FROM fragments",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?;
        let state = State { used, fragments, ..State::default() };
        Ok(PeerStore {
            id,
            capacity,
            directory: directory.to_owned(),
            _lock: lock,
            blocks,
            reader: Mutex::new(reader),
            writer: Mutex::new(writer),
            state: Mutex::new(state),
        })
    }

    /// Who this peer is.
    pub fn id(&self) -> PeerId {
        self.id
    }

    /// Takes fragments: many at once take less space and time. They are durable, and others find them, after the
    /// next [`PeerStore::flush`]. Tells for each whether it was taken; fails if the disk does.
    pub fn put(&self, fragments: &[Fragment]) -> Result<Vec<Result<()>>> {
        let capacity = self.usage()?.capacity;
        let mut results = Vec::with_capacity(fragments.len());
        let mut blocks = Vec::new();
        let mut staged = Vec::new();
        for fragment in fragments {
            let result = self.admit(fragment, capacity);
            if let Ok((name, bytes)) = result {
                blocks.push((name, &fragment.block[..]));
                let (description, index) = (fragment.description.clone(), fragment.index);
                staged.push(Staged { description, index, bytes });
            }
            results.push(result.map(drop));
        }
        let put = self.blocks.put(&blocks, &Keep::default());
        let mut state = self.state();
        match put {
            Ok(_) => {
                state.staged.extend(staged);
                Ok(results)
            }
            Err(error) => {
                state.taken -= staged.iter().map(|one| one.bytes).sum::<u64>();
                Err(error)
            }
        }
    }

    /// Verifies a fragment and takes space for it, if it is new. Returns its block's name, and that space.
    fn admit(&self, fragment: &Fragment, capacity: u64) -> Result<(BlobId, u64)> {
        let Fragment { description, index, block } = fragment;
        let name = description.block((*index).into());
        let name =
            name.filter(|_| description.matches((*index).into(), block)).ok_or_else(|| {
                let reason = "it is not the block that its description names";
                Error::corrupt(format!("a fragment of {}", description.blob), reason)
            })?;
        let known = self.descriptions(&description.blob)?;
        if known.iter().any(|(other, at)| at == index && other == description) {
            // One that turns out to be damaged is replaced.
            let _ = self.blocks.get(&name, &mut vec![0; block.len()]);
            return Ok((name, 0));
        }
        if known.len() >= MAX_FRAGMENTS {
            let reason = "there are too many encodings of it";
            return Err(Error::corrupt(format!("blob {}", description.blob), reason));
        }
        let mut state = self.state();
        let bytes = block.len() as u64;
        if state.used + state.taken + bytes > capacity {
            return Err(Error::PeerFull { path: self.directory.clone(), capacity });
        }
        state.taken += bytes;
        Ok((name, bytes))
    }

    /// Returns when everything put before this call is durable.
    pub fn flush(&self) -> Result<()> {
        // Who waits here finds its fragments durable, or staged again.
        let mut writer = self.writer.lock().expect("no thread panics while it flushes");
        let staged = std::mem::take(&mut self.state().staged);
        if staged.is_empty() {
            return Ok(());
        }
        let result = self.blocks.flush().and_then(|()| insert(&mut writer, &staged));
        let mut state = self.state();
        match result {
            Ok(new) => {
                state.taken -= staged.iter().map(|one| one.bytes).sum::<u64>();
                state.used += new.iter().sum::<u64>();
                state.fragments += new.len() as u64;
                Ok(())
            }
            Err(error) => {
                state.staged.extend(staged);
                Err(error)
            }
        }
    }

    /// All fragments of a blob. One that is damaged is left out, and told in the log: it is as good as lost, and
    /// whoever puts it again replaces it.
    pub fn get(&self, blob: &BlobId) -> Result<Vec<Fragment>> {
        let mut found = Vec::new();
        for (description, index) in self.descriptions(blob)? {
            let Some(name) = description.block(index.into()) else { continue };
            let mut block = vec![0; description.block_len().min(MAX_CONTENT)];
            match self.blocks.get(&name, &mut block) {
                Ok(len) if len == block.len() => {
                    found.push(Fragment { description, index, block: block.into() });
                }
                Ok(_) => tracing::error!(%blob, index, "a block has the wrong length"),
                Err(error) => tracing::error!(%blob, index, %error, "a fragment cannot be read"),
            }
        }
        Ok(found)
    }

    /// What there is of each of these blobs. To ask renews the age of what is there.
    pub fn have(&self, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        // What nobody has needs no writer, who may be busy with a sync. Most questions are about such.
        let mut found = Vec::with_capacity(blobs.len());
        for blob in blobs {
            found.push(!self.descriptions(blob)?.is_empty());
        }
        if !found.contains(&true) {
            return Ok(vec![Vec::new(); blobs.len()]);
        }
        let mut writer = self.writer.lock().expect("no thread panics while it flushes");
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut answers = Vec::with_capacity(blobs.len());
        {
            let mut touch = transaction.prepare_cached(
                "UPDATE fragments SET touched = ?2 WHERE blob = ?1 RETURNING description, number",
            )?;
            for blob in blobs {
                let rows = touch.query_map(params![blob.as_bytes(), now()], row)?;
                let held = rows.map(|row| held(&row?)).collect::<Result<_>>()?;
                answers.push(held);
            }
        }
        transaction.commit()?;
        Ok(answers)
    }

    /// How much there is.
    pub fn usage(&self) -> Result<Usage> {
        let (used, fragments) = {
            let state = self.state();
            (state.used + state.taken, state.fragments)
        };
        let capacity = match self.capacity {
            Some(capacity) => capacity,
            None => used + sys::free_space(&self.directory)?,
        };
        Ok(Usage { capacity, used, fragments })
    }

    fn descriptions(&self, blob: &BlobId) -> Result<Vec<(Description, u8)>> {
        let reader = self.reader.lock().expect("no thread panics while it reads");
        let mut query =
            reader.prepare_cached("SELECT description, number FROM fragments WHERE blob = ?")?;
        let rows = query.query_map([blob.as_bytes()], row)?;
        rows.map(|row| {
            let (bytes, index) = row?;
            Ok((Description::from_bytes(&bytes)?.0, index))
        })
        .collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the state")
    }
}

fn row(row: &rusqlite::Row<'_>) -> rusqlite::Result<(Vec<u8>, u8)> {
    Ok((row.get(0)?, row.get(1)?))
}

fn held((bytes, index): &(Vec<u8>, u8)) -> Result<Held> {
    let (description, _) = Description::from_bytes(bytes)?;
    let (data, width) = (description.needed() as u8, description.width() as u8);
    Ok(Held { encoding: description.id(), data, parity: width - data, index: *index })
}

/// Makes fragments known. Returns the lengths of those that were not.
fn insert(writer: &mut Connection, staged: &[Staged]) -> Result<Vec<u64>> {
    let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut new = Vec::new();
    {
        let mut touch = transaction.prepare_cached(
            "UPDATE fragments SET touched = ?4 WHERE blob = ?1 AND encoding = ?2 AND number = ?3",
        )?;
        let mut insert =
            transaction.prepare_cached("INSERT INTO fragments VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?;
        for Staged { description, index, .. } in staged {
            let (blob, encoding) = (description.blob, description.id());
            if touch.execute(params![blob.as_bytes(), encoding.as_bytes(), index, now()])? == 0 {
                let len = description.block_len() as u64;
                insert.execute(params![
                    blob.as_bytes(),
                    encoding.as_bytes(),
                    index,
                    description.to_bytes(),
                    len,
                    now(),
                ])?;
                new.push(len);
            }
        }
    }
    transaction.commit()?;
    Ok(new)
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Locks a data directory for this process.
fn lock(directory: &Path) -> Result<File> {
    let path = directory.join("lock");
    let failed = |error| Error::io("locking", &path, error);
    let file =
        File::options().write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    file.try_lock().map_err(|error| failed(error.into()))?;
    Ok(file)
}

/// Who the peer of a data directory is; nothing if it is none yet.
fn read_marker(directory: &Path) -> Result<Option<PeerId>> {
    let path = directory.join(MARKER);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("reading", &path, error)),
    };
    let corrupt = |reason: String| Error::corrupt(path.display().to_string(), reason);
    let marker: Marker =
        serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
    if marker.format != FORMAT {
        return Err(corrupt("it is not the marker of a peer".into()));
    }
    if marker.version != VERSION {
        let (object, found) = (path.display().to_string(), marker.version);
        return Err(Error::NewerFormat { object, found, supported: VERSION });
    }
    marker.id.parse().map(Some)
}

/// Makes a new peer. The marker comes last: without it, what is there is half made, and is made again.
fn make(directory: &Path) -> Result<PeerId> {
    let path = directory.join(MARKER);
    let failed = |error| Error::io("writing", &path, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if !PARTS.iter().any(|part| name.to_string_lossy().starts_with(part)) {
            let reason = "is not empty and not a peer's; name another directory";
            return Err(Error::BadArgument(format!("{} {reason}", directory.display())));
        }
    }
    LocalBlobs::create(directory)?;
    database::make(&directory.join(DATABASE), VERSION, |transaction| {
        Ok(transaction.execute_batch(TABLES)?)
    })?;
    let id = PeerId::from_bytes(sys::random().map_err(failed)?);
    let marker = Marker { format: FORMAT.into(), version: VERSION, id: id.to_string() };
    let text = serde_json::to_string_pretty(&marker).expect("a marker is plain") + "\n";
    let new = directory.join("peer.json.new");
    let mut file = File::create(&new).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&new, &path).map_err(failed)?;
    sys::sync_dir(directory)?;
    if let Some(parent) = directory.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        sys::sync_dir(parent)?;
    }
    Ok(id)
}
