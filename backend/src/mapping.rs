//! Memory from the kernel: page-aligned buffers, and memory that is shared through a file and so
//! outlives the process.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The size of a page, and the alignment of buffers for direct I/O.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Checks a part of a file that somebody else shares, before it is mapped.
///
/// The kernel ends a process that touches memory behind the end of a file. Devices, such as
/// persistent memory, do not tell their length. Of huge pages, the kernel always maps whole ones, and
/// it refuses to unmap a part of one. So a mapping of such a part would stay for ever.
pub(crate) fn check_part(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let metadata = file.metadata()?;
    let has_all = offset.checked_add(len).is_some_and(|end| end <= metadata.len());
    if metadata.is_file() && !has_all {
        return wrong("shared memory is longer than its file");
    }
    match crate::sys::huge_page_bytes(file)? {
        Some(page) if !offset.is_multiple_of(page) || !len.is_multiple_of(page) => {
            wrong("shared memory in huge pages consists of whole ones")
        }
        _ => Ok(()),
    }
}

/// Maps `bytes` bytes of a file.
fn map(bytes: usize, file: &File, offset: u64) -> io::Result<NonNull<u8>> {
    let (flags, fd) = (libc::MAP_SHARED, file.as_raw_fd());
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses does not affect any existing
    // memory. The result is checked.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, fd, offset as i64) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// An array of atomic words, shared through a file. It can grow up to the capacity for which it was
/// mapped.
pub(crate) struct Words {
    start: NonNull<AtomicU64>,
    len: AtomicUsize,
    capacity: usize,
}

impl Words {
    /// `len` zero words in this process's own memory.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn zeroed(len: usize) -> io::Result<Words> {
        let file = crate::sys::shared_memory(Words::bytes(len) as u64)?;
        Words::shared(&file, 0, len)
    }

    /// `len` words of a file, starting at `offset`, which is a multiple of the page size. The file
    /// must be long enough and have all its space allocated; otherwise access to the words is
    /// fatal.
    pub(crate) fn shared(file: &File, offset: u64, len: usize) -> io::Result<Words> {
        Words::shared_with_capacity(file, offset, len, len)
    }

    /// Does [`Words::shared`], for words that may later be `capacity`. Only the first `len` words
    /// need space in the file until they [`grow`](Words::grow).
    pub(crate) fn shared_with_capacity(
        file: &File,
        offset: u64,
        len: usize,
        capacity: usize,
    ) -> io::Result<Words> {
        let capacity = capacity.max(len);
        let start = map(Words::bytes(capacity), file, offset)?.cast();
        Ok(Words { start, len: AtomicUsize::new(len), capacity })
    }

    /// Makes the array `len` words long, if it is shorter. The file must have space for them.
    pub(crate) fn grow(&self, len: usize) {
        assert!(len <= self.capacity, "words beyond what is mapped");
        self.len.fetch_max(len, Ordering::SeqCst);
    }

    fn bytes(len: usize) -> usize {
        len.max(1) * size_of::<AtomicU64>()
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping holds `capacity` words, which are never fewer than `len`, is page
        // aligned, and lives as long as `self`. Any bits are a valid AtomicU64.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len.load(Ordering::SeqCst)) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that was made. Nothing borrows from it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), Words::bytes(self.capacity)) };
    }
}

// SAFETY: the words are atomics in memory that this value owns, and atomics may be shared.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

/// Memory that is shared through a file. Its owner decides who uses which part.
pub(crate) struct SharedBytes {
    start: NonNull<u8>,
    len: usize,
}

impl SharedBytes {
    /// Maps the first `len` bytes of a file. A part may be used only if the file has space for it.
    pub(crate) fn new(file: &File, len: usize) -> io::Result<SharedBytes> {
        Ok(SharedBytes { start: map(len, file, 0)?, len })
    }

    /// The address of the byte at `offset`, which must be inside the mapping or at its end.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "an offset outside of shared memory");
        // SAFETY: inside the mapping, or at its end.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl Drop for SharedBytes {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that was made. Users of its parts keep `self` alive.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

// SAFETY: an address and a length. All access is through raw pointers.
unsafe impl Send for SharedBytes {}
// SAFETY: as above.
unsafe impl Sync for SharedBytes {}

/// A page-aligned buffer for direct I/O. Its address does not change when the value moves.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

impl Buffer {
    /// `len` zero bytes. `len` must not be 0.
    pub(crate) fn zeroed(len: usize) -> Buffer {
        assert!(len > 0, "a buffer holds at least one byte");
        let layout = Buffer::layout(len);
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Buffer { start, len }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, PAGE_BYTES)
            .expect("buffers are far smaller than the address space")
    }

    /// The address, for an operation that owns this buffer until it completes.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes owned by `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.start.as_ptr(), Buffer::layout(self.len)) };
    }
}

// SAFETY: plain memory owned by this value.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::{Buffer, Words};

    #[test]
    fn words_are_the_files() {
        let file = crate::sys::shared_memory(8192).unwrap();
        let words = Words::shared(&file, 4096, 512).unwrap();
        words[511].store(7, Ordering::Relaxed);
        drop(words);
        let words = Words::shared(&file, 0, 1024).unwrap();
        assert_eq!(words[1023].load(Ordering::Relaxed), 7);
        assert_eq!(words[0].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn buffers_are_page_aligned_and_zero() {
        let mut buffer = Buffer::zeroed(8192);
        assert_eq!(buffer.as_mut_ptr() as usize % 4096, 0);
        assert!(buffer.iter().all(|byte| *byte == 0));
    }
}
