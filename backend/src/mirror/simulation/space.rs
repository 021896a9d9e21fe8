//! The free space for the mirror's own files. It may run out, and come back.
//!
//! A simulation runs in a thread of its own, so its space is a thread-local.

use std::cell::Cell;
use std::io;

#[derive(Clone, Copy, Default)]
pub(super) struct Space {
    /// The number of bytes that are left; `None` if there is no limit.
    left: Option<usize>,
    /// How often there was too little space for entries of a layer's table.
    pub(super) records: u64,
    /// How often there was too little space for a file to grow.
    pub(super) files: u64,
}

thread_local! {
    static SPACE: Cell<Space> = Cell::default();
}

/// Starts without a limit, and with nothing refused.
pub(super) fn begin() {
    SPACE.set(Space::default());
}

/// Sets the number of bytes that are left.
pub(super) fn set(left: Option<usize>) {
    SPACE.set(Space { left, ..SPACE.get() });
}

/// Returns what was refused so far.
pub(super) fn look() -> Space {
    SPACE.get()
}

/// Takes space for records of `len` bytes.
pub(in crate::mirror) fn take_for_records(len: usize) -> io::Result<()> {
    let space = SPACE.get();
    match space.left {
        None => Ok(()),
        Some(left) if left >= len => {
            SPACE.set(Space { left: Some(left - len), ..space });
            Ok(())
        }
        Some(_) => {
            SPACE.set(Space { records: space.records + 1, ..space });
            Err(io::ErrorKind::StorageFull.into())
        }
    }
}

/// Checks whether a file can grow by `len` bytes.
pub(in crate::mirror) fn take_for_file(len: u64) -> io::Result<()> {
    let space = SPACE.get();
    if space.left.is_none_or(|left| left as u64 >= len) {
        return Ok(());
    }
    SPACE.set(Space { files: space.files + 1, ..space });
    Err(io::ErrorKind::StorageFull.into())
}
