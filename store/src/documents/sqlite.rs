//! Documents in an SQLite database of this host, which several processes use at once.
//!
//! **Lifetimes.** The time at which a document expires is a time of the host's boot clock
//! ([`BootClock`]), which nobody can set. It means nothing after another boot, or on another host.
//! So a process that opens the database looks for documents that do not fit its clock:
//!
//! | users of the database | a document does not fit if | then |
//! |---|---|---|
//! | processes of this host | it would live longer than its own time to live: the clock began anew after it was written | it has expired: no process that could renew it outlived the boot |
//! | clients of a server, on any host | as above, or if the server's host has booted since | it gets its full time once more: its client may be alive |

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{
    Connection, OpenFlags, OptionalExtension, Row, Transaction, TransactionBehavior, params,
};

use super::ranges::{KeyRange, prefix_end, ranges};
use super::{Change, Changed, Document, Documents, Each, Put, Query, View, folder, prefix_queries};
use crate::clock::{BootClock, now};
use crate::durable::database;
use crate::error::{Error, Result};
use crate::sys;

/// The version of the tables, kept as `user_version`.
const VERSION: u64 = 3;

/// How often a wait polls the database.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long the token of a change is remembered: longer than any client retries.
const TOKEN_LIFETIME_MS: i64 = 600_000;

/// `docs/formats.md` explains every column.
const TABLES: &str = "
CREATE TABLE documents (
    key      TEXT    NOT NULL PRIMARY KEY,
    value    BLOB    NOT NULL,
    version  INTEGER NOT NULL,
    lifetime INTEGER,
    expires  INTEGER
) STRICT, WITHOUT ROWID;

CREATE INDEX expiring ON documents (expires) WHERE expires IS NOT NULL;

CREATE TABLE folders (
    name     TEXT    NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE revision (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    current INTEGER NOT NULL
) STRICT;

CREATE TABLE tokens (
    token   BLOB    NOT NULL PRIMARY KEY,
    expires INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX expiring_tokens ON tokens (expires);

CREATE TABLE clock (
    id   INTEGER PRIMARY KEY CHECK (id = 1),
    boot TEXT    NOT NULL
) STRICT;

INSERT INTO clock VALUES (1, '');
";

/// The documents in a range of keys that have not expired, in the order of their keys. A prefix is
/// such a range.
const IN_RANGE: &str = "SELECT key, value, version FROM documents
    WHERE key >= ?1 AND key < ?3 AND (expires IS NULL OR expires > ?2) ORDER BY key";

/// The last documents of a range, the last one first.
const LAST_IN_RANGE: &str = "SELECT key, value, version FROM documents
    WHERE key >= ?1 AND key < ?3 AND (expires IS NULL OR expires > ?2) ORDER BY key DESC LIMIT ?4";

/// Who renews the documents that expire.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Users {
    /// Processes of this host.
    ThisHost,
    /// Clients of the process that opens the database.
    AnyHost,
}

/// Documents in one database file.
pub struct SqliteDocuments {
    path: PathBuf,
    clock: BootClock,
    writer: Mutex<Connection>,
    /// A connection of its own, so that a read does not wait for the writer's sync.
    reader: Mutex<Connection>,
}

impl SqliteDocuments {
    /// Creates the file, unless it exists.
    pub fn create(path: &Path) -> Result<()> {
        database::make(path, VERSION, |transaction| {
            transaction.execute_batch(TABLES)?;
            let first = first_revision()?;
            transaction.execute("INSERT INTO revision VALUES (1, ?1)", [first])?;
            Ok(())
        })
    }

    /// Opens an existing file, which only processes of this host use.
    pub fn open(path: &Path) -> Result<SqliteDocuments> {
        SqliteDocuments::open_with(path, BootClock::of_this_host()?, Users::ThisHost)
    }

    /// Opens an existing file that this process serves to clients on any host.
    pub(super) fn open_served(path: &Path) -> Result<SqliteDocuments> {
        SqliteDocuments::open_with(path, BootClock::of_this_host()?, Users::AnyHost)
    }

    fn open_with(path: &Path, clock: BootClock, users: Users) -> Result<SqliteDocuments> {
        let (mut writer, reader) = database::open(path, VERSION)?;
        adopt_lifetimes(&mut writer, &clock, users)?;
        let (path, writer, reader) = (path.into(), Mutex::new(writer), Mutex::new(reader));
        Ok(SqliteDocuments { path, clock, writer, reader })
    }

    /// Carries out a change like [`Documents::commit`], but once: if a change with this token was
    /// carried out before, returns `true` and does nothing. A token is remembered for ten minutes.
    pub fn commit_once(&self, token: &[u8; 16], change: &Change) -> Result<bool> {
        self.commit_as(Some(token), change)
    }

    /// The revision of the last change in each folder.
    pub fn folders(&self) -> Result<HashMap<String, u64>> {
        let reader = self.reader();
        let mut query = reader.prepare_cached("SELECT name, revision FROM folders")?;
        let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// Reads like [`Documents::read`]. Returns `None` if the keys and the contents of the documents
    /// have more than `max` bytes.
    pub(super) fn read_within(&self, queries: &[Query], max: usize) -> Result<Option<View>> {
        let mut reader = self.reader();
        let tx = reader.transaction_with_behavior(TransactionBehavior::Deferred)?;
        let mut view = View { revision: current_revision(&tx)?, ..View::default() };
        let now = self.clock.now_ms();
        let mut by_key = tx.prepare_cached(
            "SELECT key, value, version FROM documents
             WHERE key = ?1 AND (expires IS NULL OR expires > ?2)",
        )?;
        let mut by_prefix = tx.prepare_cached(IN_RANGE)?;
        let mut bytes = 0;
        for query in queries {
            let mut rows = match query {
                Query::Key(key) => by_key.query(params![key, now])?,
                Query::Prefix(prefix) => {
                    by_prefix.query(params![prefix, now, prefix_end(prefix)])?
                }
            };
            while let Some(row) = rows.next()? {
                let (key, document) = document(row)?;
                bytes += key.len() + document.value.len();
                if bytes > max {
                    return Ok(None);
                }
                view.documents.insert(key, document);
            }
        }
        Ok(Some(view))
    }

    /// Reads like [`Documents::last`], at least one document, and no more than fit into `max` bytes.
    pub(super) fn last_within(
        &self,
        prefix: &str,
        before: &str,
        limit: usize,
        max: usize,
    ) -> Result<View> {
        let mut reader = self.reader();
        let tx = reader.transaction_with_behavior(TransactionBehavior::Deferred)?;
        let mut view = View { revision: current_revision(&tx)?, ..View::default() };
        let end = before.min(&prefix_end(prefix)).to_owned();
        let mut query = tx.prepare_cached(LAST_IN_RANGE)?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut rows = query.query(params![prefix, self.clock.now_ms(), end, limit])?;
        let mut bytes = 0;
        while let Some(row) = rows.next()? {
            let (key, document) = document(row)?;
            bytes += key.len() + document.value.len();
            if bytes > max && !view.documents.is_empty() {
                break;
            }
            view.documents.insert(key, document);
        }
        Ok(view)
    }

    /// Reads like [`Documents::changed`]. Returns `None` if the keys and the contents of the
    /// documents have more than `max` bytes.
    pub(super) fn changed_within(
        &self,
        prefix: &str,
        revision: u64,
        max: usize,
    ) -> Result<Option<Changed>> {
        let mut reader = self.reader();
        let tx = reader.transaction_with_behavior(TransactionBehavior::Deferred)?;
        let mut view = View { revision: current_revision(&tx)?, ..View::default() };
        let mut query = tx.prepare_cached(IN_RANGE)?;
        let mut rows = query.query(params![prefix, self.clock.now_ms(), prefix_end(prefix)])?;
        let (mut total, mut bytes) = (0, 0);
        while let Some(row) = rows.next()? {
            total += 1;
            if row.get::<_, u64>(2)? <= revision {
                continue;
            }
            let (key, document) = document(row)?;
            bytes += key.len() + document.value.len();
            if bytes > max {
                return Ok(None);
            }
            view.documents.insert(key, document);
        }
        Ok(Some(Changed { view, total }))
    }

    /// Passes the documents that match a query to `each`, like [`Documents::scan`].
    pub(super) fn scan_queries(&self, queries: &[Query], each: Each<'_>) -> Result<u64> {
        // `each` may take long, and may read or write documents. So the scan has a connection of
        // its own.
        let mut connection = database::connect(&self.path, OpenFlags::empty())?;
        let tx = connection.transaction_with_behavior(TransactionBehavior::Deferred)?;
        let revision = current_revision(&tx)?;
        // Documents that have expired count until a change has removed them: see `Documents::scan`.
        let now = i64::MIN;
        let mut in_range = tx.prepare(IN_RANGE)?;
        for KeyRange { begin, end } in ranges(queries) {
            let mut rows = in_range.query(params![begin, now, end])?;
            while let Some(row) = rows.next()? {
                let (key, document) = document(row)?;
                each(&key, document)?;
            }
        }
        Ok(revision)
    }

    fn commit_as(&self, token: Option<&[u8; 16]>, change: &Change) -> Result<bool> {
        let mut connection =
            self.writer.lock().expect("no thread panics while it writes documents");
        if change.relaxed {
            connection.pragma_update(None, "synchronous", "NORMAL")?;
        }
        let result = commit(&mut connection, &self.clock, token, change);
        if change.relaxed {
            connection.pragma_update(None, "synchronous", "FULL")?;
        }
        result
    }

    fn reader(&self) -> MutexGuard<'_, Connection> {
        self.reader.lock().expect("no thread panics while it reads documents")
    }
}

impl Documents for SqliteDocuments {
    fn read(&self, queries: &[Query]) -> Result<View> {
        let view = self.read_within(queries, usize::MAX)?;
        Ok(view.expect("documents in memory have fewer bytes than addresses"))
    }

    fn scan(&self, prefixes: &[&str], each: Each<'_>) -> Result<u64> {
        self.scan_queries(&prefix_queries(prefixes), each)
    }

    fn last(&self, prefix: &str, before: &str, limit: usize) -> Result<View> {
        self.last_within(prefix, before, limit, usize::MAX)
    }

    fn changed(&self, prefix: &str, revision: u64) -> Result<Changed> {
        let changed = self.changed_within(prefix, revision, usize::MAX)?;
        Ok(changed.expect("documents in memory have fewer bytes than addresses"))
    }

    fn commit(&self, change: &Change) -> Result<bool> {
        self.commit_as(None, change)
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool> {
        let end = Instant::now() + limit;
        loop {
            let changed = self
                .reader()
                .prepare_cached("SELECT 1 FROM folders WHERE name = ?1 AND revision > ?2")?
                .exists(params![folder, revision])?;
            let left = end.saturating_duration_since(Instant::now());
            if changed || left.is_zero() {
                return Ok(changed);
            }
            thread::sleep(left.min(POLL_INTERVAL));
        }
    }
}

/// Finds documents that do not fit this clock, and ends them or makes them fit.
fn adopt_lifetimes(writer: &mut Connection, clock: &BootClock, users: Users) -> Result<()> {
    // Most processes find nothing to do, and do not wait for the write lock.
    if are_lifetimes_valid(writer, clock, users)? {
        return Ok(());
    }
    // The clock is read with the lock held, so no other process writes a later time meanwhile.
    let tx = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let now = clock.now_ms();
    match users {
        Users::ThisHost => {
            tx.execute("DELETE FROM documents WHERE expires > ?1 + lifetime", [now])?;
        }
        Users::AnyHost => {
            let boot: String = tx.query_row("SELECT boot FROM clock", [], |row| row.get(0))?;
            let is_other = boot != clock.boot();
            tx.execute(
                "UPDATE documents SET expires = ?1 + lifetime
                 WHERE expires IS NOT NULL AND (?2 OR expires > ?1 + lifetime)",
                params![now, is_other],
            )?;
            tx.execute(
                "UPDATE tokens SET expires = ?1 WHERE ?2 OR expires > ?1",
                params![now + TOKEN_LIFETIME_MS, is_other],
            )?;
            tx.execute("UPDATE clock SET boot = ?1", [clock.boot()])?;
        }
    }
    Ok(tx.commit()?)
}

/// Whether all documents that expire, and all tokens, fit this clock.
fn are_lifetimes_valid(reader: &Connection, clock: &BootClock, users: Users) -> Result<bool> {
    let query = "SELECT (?1 OR boot = ?2)
         AND NOT EXISTS (SELECT 1 FROM documents WHERE expires > ?3 + lifetime)
         AND (?1 OR NOT EXISTS (SELECT 1 FROM tokens WHERE expires > ?3 + ?4))
         FROM clock";
    let values = params![users == Users::ThisHost, clock.boot(), clock.now_ms(), TOKEN_LIFETIME_MS];
    Ok(reader.query_row(query, values, |row| row.get(0))?)
}

/// The document in a row of key, value and version.
fn document(row: &Row<'_>) -> rusqlite::Result<(String, Document)> {
    Ok((row.get(0)?, Document { value: row.get(1)?, version: row.get(2)? }))
}

fn commit(
    connection: &mut Connection,
    clock: &BootClock,
    token: Option<&[u8; 16]>,
    change: &Change,
) -> Result<bool> {
    // The transaction begins with the write lock, so no version changes after it is compared.
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let now = clock.now_ms();
    tx.prepare_cached("DELETE FROM documents WHERE expires <= ?1")?.execute([now])?;
    if let Some(token) = token {
        tx.prepare_cached("DELETE FROM tokens WHERE expires <= ?1")?.execute([now])?;
        if tx.prepare_cached("SELECT 1 FROM tokens WHERE token = ?1")?.exists([token])? {
            return Ok(true);
        }
        tx.prepare_cached("INSERT INTO tokens VALUES (?1, ?2)")?
            .execute(params![token, now + TOKEN_LIFETIME_MS])?;
    }
    {
        let mut version = tx.prepare_cached("SELECT version FROM documents WHERE key = ?1")?;
        for (key, expected) in &change.relies_on {
            let found: Option<u64> = version.query_row([key], |row| row.get(0)).optional()?;
            if found.unwrap_or(0) != *expected {
                return Ok(false);
            }
        }
    }
    let revision = current_revision(&tx)? + 1;
    tx.prepare_cached("UPDATE revision SET current = ?1")?.execute([revision])?;
    {
        let mut touch = tx.prepare_cached("INSERT OR REPLACE INTO folders VALUES (?1, ?2)")?;
        for query in &change.removes {
            let key = match query {
                Query::Key(key) => {
                    tx.prepare_cached("DELETE FROM documents WHERE key = ?1")?.execute([key])?;
                    key
                }
                Query::Prefix(prefix) => {
                    tx.prepare_cached("DELETE FROM documents WHERE key >= ?1 AND key < ?2")?
                        .execute(params![prefix, prefix_end(prefix)])?;
                    prefix
                }
            };
            touch.execute(params![folder(key), revision])?;
        }
        let mut put =
            tx.prepare_cached("INSERT OR REPLACE INTO documents VALUES (?1, ?2, ?3, ?4, ?5)")?;
        for Put { key, value, seconds } in &change.puts {
            let lifetime = seconds.map(|seconds| i64::from(seconds) * 1000);
            let expires = lifetime.map(|lifetime| now + lifetime);
            put.execute(params![key, value, revision, lifetime, expires])?;
            touch.execute(params![folder(key), revision])?;
        }
    }
    tx.commit()?;
    Ok(true)
}

/// The revision before the first change. It differs for each catalog, so that a client whose
/// catalog was replaced does not mistake a document's version for that of the old catalog.
fn first_revision() -> Result<u64> {
    let random = sys::random().map_err(|e| Error::io("reading", "/dev/urandom".as_ref(), e))?;
    let random = u64::from(u16::from_le_bytes(random));
    Ok((now() << 24) | (random << 8))
}

/// The revision of the last change.
fn current_revision(tx: &Transaction<'_>) -> Result<u64> {
    let mut query = tx.prepare_cached("SELECT current FROM revision")?;
    query
        .query_row([], |row| row.get(0))
        .optional()?
        .ok_or_else(|| Error::corrupt("the catalog", "it has no revision"))
}
