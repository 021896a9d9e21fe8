//! The files of a mirror: data and spill file, map, journal, and the live directory.

pub(crate) mod data_sync;
pub(crate) mod disk_file;
pub(crate) mod journal;
pub(crate) mod live_dir;
pub(crate) mod map;
