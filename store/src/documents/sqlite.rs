//! Documents in an SQLite database of this host, which several processes use at once.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

use super::{Change, Document, Documents, Put, Query, View, folder};
use crate::clock::now_ms;
use crate::durable::database;
use crate::error::{Error, Result};

/// The version of the tables, kept as `user_version`.
const VERSION: u64 = 2;

/// How often a wait polls the database.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long the token of a change is remembered: longer than any client retries.
const TOKEN_LIFETIME_MS: i64 = 600_000;

/// `docs/formats.md` explains every column.
const TABLES: &str = "
CREATE TABLE documents (
    key     TEXT    NOT NULL PRIMARY KEY,
    value   BLOB    NOT NULL,
    version INTEGER NOT NULL,
    expires INTEGER
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

INSERT INTO revision VALUES (1, 0);

CREATE TABLE tokens (
    token   BLOB    NOT NULL PRIMARY KEY,
    expires INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX expiring_tokens ON tokens (expires);
";

/// Documents in one database file.
pub struct SqliteDocuments {
    writer: Mutex<Connection>,
    /// A connection of its own, so that a read does not wait for the writer's sync.
    reader: Mutex<Connection>,
}

impl SqliteDocuments {
    /// Creates the file, unless it exists.
    pub fn create(path: &Path) -> Result<()> {
        database::make(path, VERSION, |transaction| Ok(transaction.execute_batch(TABLES)?))
    }

    /// Opens an existing file.
    pub fn open(path: &Path) -> Result<SqliteDocuments> {
        let (writer, reader) = database::open(path, VERSION)?;
        Ok(SqliteDocuments { writer: Mutex::new(writer), reader: Mutex::new(reader) })
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

    fn commit_as(&self, token: Option<&[u8; 16]>, change: &Change) -> Result<bool> {
        let mut connection =
            self.writer.lock().expect("no thread panics while it writes documents");
        if change.relaxed {
            connection.pragma_update(None, "synchronous", "NORMAL")?;
        }
        let result = commit(&mut connection, token, change);
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
        let mut reader = self.reader();
        let tx = reader.transaction_with_behavior(TransactionBehavior::Deferred)?;
        let mut view = View { revision: current_revision(&tx)?, ..View::default() };
        let now = now_ms();
        let mut by_key = tx.prepare_cached(
            "SELECT key, value, version FROM documents
             WHERE key = ?1 AND (expires IS NULL OR expires > ?2)",
        )?;
        let mut by_prefix = tx.prepare_cached(
            "SELECT key, value, version FROM documents
             WHERE key >= ?1 AND key < ?3 AND (expires IS NULL OR expires > ?2)",
        )?;
        for query in queries {
            let mut rows = match query {
                Query::Key(key) => by_key.query(params![key, now])?,
                Query::Prefix(prefix) => {
                    by_prefix.query(params![prefix, now, prefix_end(prefix)])?
                }
            };
            while let Some(row) = rows.next()? {
                let document = Document { value: row.get(1)?, version: row.get(2)? };
                view.documents.insert(row.get(0)?, document);
            }
        }
        Ok(view)
    }

    fn commit(&self, change: &Change) -> Result<bool> {
        self.commit_as(None, change)
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        loop {
            let changed = self
                .reader()
                .prepare_cached("SELECT 1 FROM folders WHERE name = ?1 AND revision > ?2")?
                .exists(params![folder, revision])?;
            let left = end.saturating_duration_since(Instant::now());
            if changed || left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(POLL_INTERVAL));
        }
    }
}

fn commit(connection: &mut Connection, token: Option<&[u8; 16]>, change: &Change) -> Result<bool> {
    // The transaction begins with the write lock, so no version changes after it is compared.
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let now = now_ms();
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
            tx.prepare_cached("INSERT OR REPLACE INTO documents VALUES (?1, ?2, ?3, ?4)")?;
        for Put { key, value, seconds } in &change.puts {
            let expires = seconds.map(|seconds| now + i64::from(seconds) * 1000);
            put.execute(params![key, value, revision, expires])?;
            touch.execute(params![folder(key), revision])?;
        }
    }
    tx.commit()?;
    Ok(true)
}

/// The revision of the last change.
fn current_revision(tx: &Transaction<'_>) -> Result<u64> {
    let mut query = tx.prepare_cached("SELECT current FROM revision")?;
    query
        .query_row([], |row| row.get(0))
        .optional()?
        .ok_or_else(|| Error::corrupt("the catalog", "it has no revision"))
}

/// The end of the range of keys that begin with `prefix`. No key contains this character.
fn prefix_end(prefix: &str) -> String {
    format!("{prefix}\u{10ffff}")
}
