//! The names: images, snapshots, mirrors and leases, in an embedded database that several processes
//! use at once.
//!
//! Every change is one transaction that takes the write lock first, so what it reads is what it
//! changes. A crash leaves the state before or after it.

mod attachments;
mod images;
mod mirrors;
mod rows;
mod schema;

use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

pub(crate) use self::attachments::Holder;
pub(crate) use self::images::FirstSnapshot;
pub use self::mirrors::LEASE_SECONDS;

use crate::error::{Error, Result};

const FILE: &str = "catalog.db";

/// How long to wait for another process's transaction.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Catalog {
    connection: Mutex<Connection>,
}

impl Catalog {
    /// Makes the database, unless another process has made it.
    pub(crate) fn create(repository: &Path) -> Result<()> {
        let mut connection = connect(repository, OpenFlags::SQLITE_OPEN_CREATE)?;
        use_write_ahead_log(&connection)?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        schema::create(&transaction)?;
        Ok(transaction.commit()?)
    }

    pub(crate) fn open(repository: &Path) -> Result<Self> {
        let connection = connect(repository, OpenFlags::empty())?;
        schema::check(&connection)?;
        use_write_ahead_log(&connection)?;
        // In this mode a commit is durable when it returns.
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        Ok(Self { connection: Mutex::new(connection) })
    }

    /// Runs a change, all of it or nothing.
    fn write<T>(&self, change: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut connection = self.connection();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let value = change(&transaction)?;
        transaction.commit()?;
        Ok(value)
    }

    /// Runs queries on one state of the database.
    fn read<T>(&self, query: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut connection = self.connection();
        query(&connection.transaction_with_behavior(TransactionBehavior::Deferred)?)
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().expect("no thread panics while it uses the catalog")
    }
}

fn connect(repository: &Path, more: OpenFlags) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | more;
    let connection = Connection::open_with_flags(repository.join(FILE), flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

/// Switches to the write-ahead log, which readers and a writer can use at once. The database does not
/// wait for its locks in this switch, so that is done here.
fn use_write_ahead_log(connection: &Connection) -> Result<()> {
    let start = Instant::now();
    loop {
        let mode: rusqlite::Result<String> =
            connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0));
        match mode {
            Ok(mode) if mode.eq_ignore_ascii_case("wal") => return Ok(()),
            Ok(mode) => {
                let reason = format!("it cannot use a write-ahead log, only '{mode}'");
                return Err(Error::corrupt("the catalog", reason));
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
}

/// Seconds since 1970, UTC.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
