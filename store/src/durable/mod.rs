//! Files on a local disk.
//!
//! | file | holds |
//! |---|---|
//! | `segment` | files that groups of blobs or fragments are appended to |
//! | `data_directory` | the directory of a server: its lock, its marker, its id |
//! | `database` | opening and creating SQLite databases that several processes share |
//! | `reserve` | space for a repository whose file system is full |
//! | `sorted_runs` | an external sort, in temporary files |
//!
//! ```text
//! repository directory:  segments  + index.db     + catalog.db
//! peer directory:        segments  + table        + marker and lock
//! catalog directory:                 catalog.db   + marker and lock
//! ```

pub(crate) mod data_directory;
pub(crate) mod database;
pub(crate) mod reserve;
pub(crate) mod segment;
pub(crate) mod sorted_runs;
pub(crate) mod sync;
