//! What all files on a local disk have in common: segments, data directories and databases.

pub(crate) mod data_directory;
pub(crate) mod database;
pub(crate) mod segment;
pub(crate) mod sync;
