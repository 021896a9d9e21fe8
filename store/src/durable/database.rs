//! SQLite databases. Several processes use one at once, with a write-ahead log. A commit is durable
//! when it returns.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use crate::error::{Error, Result};

/// How long to wait for a transaction of another process.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a database. `more` has additional flags, for example to create the file.
pub(crate) fn connect(path: &Path, more: OpenFlags) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | more;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

/// Opens a database whose tables have the version `supported`. Returns a connection for writing and
/// one for reading, so that reads do not wait for a sync.
pub(crate) fn open(path: &Path, supported: u64) -> Result<(Connection, Connection)> {
    let writer = connect(path, OpenFlags::empty())?;
    use_write_ahead_log(&writer)?;
    Error::check_format(path, version(&writer)?, supported)?;
    sync_log(path)?;
    Ok((writer, connect(path, OpenFlags::empty())?))
}

/// Creates a database with the version `wanted`, unless it exists. `fill` creates the tables. Fails
/// if the database has another version. Several processes may call this at the same time.
pub(crate) fn make(
    path: &Path,
    wanted: u64,
    fill: impl FnOnce(&Transaction<'_>) -> Result<()>,
) -> Result<()> {
    let mut connection = connect(path, OpenFlags::SQLITE_OPEN_CREATE)?;
    let found = version(&connection)?;
    if found != 0 {
        Error::check_format(path, found, wanted)?;
    }
    use_write_ahead_log(&connection)?;
    if version(&connection)? == 0 {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if version(&transaction)? == 0 {
            fill(&transaction)?;
            transaction.pragma_update(None, "user_version", wanted)?;
            transaction.commit()?;
        }
    }
    Ok(())
}

/// The version of the tables; 0 if there are none.
pub(crate) fn version(connection: &Connection) -> Result<u64> {
    Ok(connection.pragma_query_value(None, "user_version", |row| row.get(0))?)
}

/// Switches to the write-ahead log, which readers and a writer can use at once, and to commits that
/// are durable when they return. SQLite does not wait for locks during this switch, so this
/// function does.
pub(crate) fn use_write_ahead_log(connection: &Connection) -> Result<()> {
    let start = Instant::now();
    loop {
        let mode: rusqlite::Result<String> =
            connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0));
        match mode {
            Ok(mode) if mode.eq_ignore_ascii_case("wal") => break,
            Ok(mode) => {
                let reason = format!("it cannot use a write-ahead log, only '{mode}'");
                return Err(Error::corrupt("the database", reason));
            }
            Err(error)
                if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)
                    && start.elapsed() < BUSY_TIMEOUT =>
            {
                thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(connection.pragma_update(None, "synchronous", "FULL")?)
}

/// Makes the transactions durable that are in the write-ahead log. Every process calls this after
/// it opened a database and before it relies on what it read.
///
/// A process that was killed during a commit may have left the whole transaction in the log, but
/// only in the kernel's page cache. The next process that opens the database treats it as
/// committed, and SQLite does not sync it before the next commit. SQLite's locks are on other
/// files, so closing the log here releases none of them.
pub(crate) fn sync_log(database: &Path) -> Result<()> {
    let mut path = database.as_os_str().to_owned();
    path.push("-wal");
    let path = PathBuf::from(path);
    match File::open(&path).and_then(|log| log.sync_data()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("syncing", &path, error))
        }
        _ => Ok(()),
    }
}
