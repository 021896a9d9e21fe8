//! What the repository's databases have in common: several processes use each of them at once, with a
//! write-ahead log, and a commit is durable when it returns.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use crate::error::{Error, Result};

/// How long to wait for another process's transaction.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a database; `more` may ask to make it.
pub(crate) fn connect(path: &Path, more: OpenFlags) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | more;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

/// Opens a database whose tables have the version `supported`: a connection to write, and one to read, which
/// need not wait for a sync.
pub(crate) fn open(path: &Path, supported: u64) -> Result<(Connection, Connection)> {
    let writer = connect(path, OpenFlags::empty())?;
    use_write_ahead_log(&writer)?;
    let found = version(&writer)?;
    if found != supported {
        let object = path.display().to_string();
        return Err(Error::NewerFormat { object, found, supported });
    }
    sync_log(path)?;
    Ok((writer, connect(path, OpenFlags::empty())?))
}

/// Makes a database with this version, unless it is there; `fill` makes its tables. Another process may do the
/// same at the same time.
pub(crate) fn make(
    path: &Path,
    wanted: u64,
    fill: impl FnOnce(&Transaction<'_>) -> Result<()>,
) -> Result<()> {
    let mut connection = connect(path, OpenFlags::SQLITE_OPEN_CREATE)?;
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

/// Switches to the write-ahead log, which readers and a writer can use at once, and to commits that are
/// durable when they return. The database does not wait for its locks in this switch, so that is done
/// here.
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

/// Makes durable what a connection has found in the write-ahead log when it first read the database.
///
/// A process that was killed in the middle of a commit may have left all of it there, but in the kernel's
/// hands only. Who opens the database next takes it for a commit, and the database itself does not sync it
/// before the next one. The locks are on other files, so that to close this one releases none.
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
