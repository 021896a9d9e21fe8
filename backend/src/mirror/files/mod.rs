//! The files of a mirror: data file, map, the files of layers, and the live directory.

pub(crate) mod data_sync;
pub(crate) mod disk_file;
pub(crate) mod layer_table;
pub(crate) mod live_dir;
mod lock;
pub(crate) mod map;
