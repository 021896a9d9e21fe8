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
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior};

pub(crate) use self::attachments::Holder;
pub(crate) use self::images::FirstSnapshot;
pub use self::mirrors::LEASE_SECONDS;

use crate::database::{connect, sync_log, use_write_ahead_log};
use crate::error::Result;

const FILE: &str = "catalog.db";

pub(crate) struct Catalog {
    connection: Mutex<Connection>,
}

impl Catalog {
    /// Makes the database, unless another process has made it.
    pub(crate) fn create(repository: &Path) -> Result<()> {
        let mut connection = connect(&repository.join(FILE), OpenFlags::SQLITE_OPEN_CREATE)?;
        use_write_ahead_log(&connection)?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        schema::create(&transaction)?;
        Ok(transaction.commit()?)
    }

    pub(crate) fn open(repository: &Path) -> Result<Self> {
        let path = repository.join(FILE);
        let connection = connect(&path, OpenFlags::empty())?;
        schema::check(&connection)?;
        use_write_ahead_log(&connection)?;
        sync_log(&path)?;
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

/// Seconds since 1970, UTC.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
