//! The space of the host's disk, for the mirror's own files: it may run out, and come back.
//!
//! A simulation has its thread to itself, so its space is the thread's.

use std::cell::Cell;
use std::io;

#[derive(Clone, Copy, Default)]
pub(super) struct Space {
    /// Bytes that are left; nothing if there are enough for everything.
    room: Option<usize>,
    /// How often there was too little for records of the journal,
    pub(super) records: u64,
    /// and for a file that was to grow.
    pub(super) files: u64,
}

thread_local! {
    static SPACE: Cell<Space> = Cell::default();
}

/// Enough space, of which nothing was refused yet.
pub(super) fn begin() {
    SPACE.set(Space::default());
}

/// From here on there are so many bytes.
pub(super) fn set(room: Option<usize>) {
    SPACE.set(Space { room, ..SPACE.get() });
}

/// What became of it so far.
pub(super) fn look() -> Space {
    SPACE.get()
}

/// Takes space for records of so many bytes. If there is less, it is taken all the same, and told.
pub(in crate::mirror) fn take_for_records(len: usize) -> Result<(), usize> {
    let space = SPACE.get();
    let Some(room) = space.room else { return Ok(()) };
    let fits = room.min(len);
    let records = space.records + u64::from(fits < len);
    SPACE.set(Space { room: Some(room - fits), records, ..space });
    if fits < len { Err(fits) } else { Ok(()) }
}

/// Whether a file can grow by so many bytes.
pub(in crate::mirror) fn take_for_file(len: u64) -> io::Result<()> {
    let space = SPACE.get();
    if space.room.is_none_or(|room| room as u64 >= len) {
        return Ok(());
    }
    SPACE.set(Space { files: space.files + 1, ..space });
    Err(io::ErrorKind::StorageFull.into())
}
