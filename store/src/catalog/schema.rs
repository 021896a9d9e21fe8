//! The catalog's tables.

use rusqlite::Connection;

use crate::database::version;
use crate::error::{Error, Result};

/// The version of these tables, kept in the database's `user_version`.
const VERSION: u64 = 1;

/// `docs/formats.md` explains every column.
const TABLES: &str = "
CREATE TABLE images (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    name        TEXT    NOT NULL UNIQUE,
    size        INTEGER NOT NULL,
    chunk_size  INTEGER NOT NULL,
    created     INTEGER NOT NULL,
    origin      TEXT,
    next_number INTEGER NOT NULL,
    fence       INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE snapshots (
    image        INTEGER NOT NULL REFERENCES images (id) ON DELETE CASCADE,
    number       INTEGER NOT NULL,
    parent       INTEGER,
    root         BLOB    CHECK (length(root) = 32),
    time         INTEGER NOT NULL,
    label        TEXT,
    state        TEXT    NOT NULL CHECK (state IN ('pending', 'stable', 'failed')),
    consistency  TEXT    NOT NULL CHECK (consistency IN ('crash', 'filesystem', 'application')),
    dirty_bytes  INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    pause_us     INTEGER NOT NULL,
    reason       TEXT,
    mirror       BLOB    CHECK (length(mirror) = 16),
    PRIMARY KEY (image, number)
) STRICT, WITHOUT ROWID;

-- A failed snapshot gives its label free for the next attempt.
CREATE UNIQUE INDEX snapshot_labels ON snapshots (image, label)
    WHERE label IS NOT NULL AND state <> 'failed';

CREATE TABLE mirrors (
    id       BLOB    NOT NULL PRIMARY KEY CHECK (length(id) = 16),
    image    INTEGER NOT NULL REFERENCES images (id) ON DELETE CASCADE,
    host     TEXT    NOT NULL,
    path     TEXT    NOT NULL,
    mode     TEXT    NOT NULL CHECK (mode IN ('rw', 'ro')),
    parent   INTEGER NOT NULL,
    root     BLOB    CHECK (length(root) = 32),
    attached INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX mirrors_of_image ON mirrors (image);

CREATE TABLE leases (
    image         INTEGER PRIMARY KEY REFERENCES images (id) ON DELETE CASCADE,
    mirror        BLOB    NOT NULL REFERENCES mirrors (id) ON DELETE CASCADE,
    fence         INTEGER NOT NULL,
    expires       INTEGER NOT NULL,
    boot_id       TEXT    NOT NULL,
    pid_namespace INTEGER NOT NULL,
    pid           INTEGER NOT NULL,
    start_time    INTEGER NOT NULL
) STRICT;

CREATE INDEX lease_of_mirror ON leases (mirror);
";

/// Makes the tables, unless another process has made them.
pub(super) fn create(connection: &Connection) -> Result<()> {
    if version(connection)? == 0 {
        connection.execute_batch(TABLES)?;
        connection.pragma_update(None, "user_version", VERSION)?;
    }
    Ok(())
}

/// Fails unless the tables are of a version that this program understands.
pub(super) fn check(connection: &Connection) -> Result<()> {
    match version(connection)? {
        VERSION => Ok(()),
        0 => Err(Error::corrupt("the catalog", "it has no tables")),
        found => {
            let object = "the catalog".into();
            Err(Error::NewerFormat { object, found, supported: VERSION })
        }
    }
}
