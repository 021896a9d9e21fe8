//! Memory obtained from the kernel: lazily zeroed words and page-aligned buffers.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Alignment of buffers for direct I/O.
const PAGE: usize = 4096;

/// An array of atomic words, zero at first. Pages that are never touched cost nothing, so a bitmap
/// over a huge disk is created in constant time.
pub(crate) struct Words {
    start: NonNull<AtomicU64>,
    len: usize,
}

impl Words {
    /// `len` words, all zero.
    pub(crate) fn zeroed(len: usize) -> io::Result<Words> {
        let bytes = len.max(1) * size_of::<AtomicU64>();
        // SAFETY: a fresh anonymous private mapping aliases nothing; the result is checked.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Words { start, len })
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping holds `len` words, is page aligned, zeroed by the kernel (a valid
        // AtomicU64), and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        let bytes = self.len.max(1) * size_of::<AtomicU64>();
        // SAFETY: exactly the mapping made in `zeroed`; nothing borrows from it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), bytes) };
    }
}

// SAFETY: the words are atomics in memory owned by this value; sharing them is what atomics are for.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

/// A page-aligned buffer for direct I/O. Its address does not change when the value moves.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

impl Buffer {
    /// `len` bytes of zeros; `len` is not 0.
    pub(crate) fn zeroed(len: usize) -> Buffer {
        assert!(len > 0, "a buffer holds at least one byte");
        let layout = Buffer::layout(len);
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Buffer { start, len }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, PAGE).expect("buffers are far smaller than the address space")
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
    fn a_bitmap_over_petabytes_is_created_at_once() {
        let words = Words::zeroed(1 << 30).unwrap();
        words[(1 << 30) - 1].store(7, Ordering::Relaxed);
        assert_eq!(words[(1 << 30) - 1].load(Ordering::Relaxed), 7);
        assert_eq!(words[12345].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn buffers_are_page_aligned_and_zero() {
        let mut buffer = Buffer::zeroed(8192);
        assert_eq!(buffer.as_mut_ptr() as usize % 4096, 0);
        assert!(buffer.iter().all(|byte| *byte == 0));
    }
}
