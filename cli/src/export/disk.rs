//! The file or device that gets the content of a disk.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use cairn_store::is_zero;

use crate::buffer::ALIGNMENT;
use crate::sparse;

/// The unit in which zeros become holes, in bytes: a block of most file systems.
const BLOCK: usize = 4096;

/// The shortest run of zeros for which a device is told that there are zeros. Shorter ones are
/// written, which is faster.
const LEAST_ZEROED: usize = 64 << 10;

/// The most zeros that are written at a time, in bytes.
const ZEROS: usize = 1 << 20;

/// What is where this export writes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unwritten {
    /// Zeros: the file is new.
    Zeros,
    /// Other data in a file, which may have holes.
    Data,
    /// Other data on a device.
    DeviceData,
}

/// A disk that is written by several threads. Data goes to it with direct I/O if possible: the page
/// cache would only copy it, and keep it instead of something that is read again.
pub(crate) struct Disk {
    file: File,
    /// The same file for direct I/O; `None` if the file system does not support it.
    direct: Option<File>,
    unwritten: Unwritten,
}

impl Disk {
    pub(crate) fn new(file: File, unwritten: Unwritten) -> Disk {
        // The path leads to the file that is open, whatever its name has become.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).ok();
        Disk { file, direct, unwritten }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Makes everything durable that was written.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Allocates space in a new file for data that will be written. Returns whether it did. If the file
    /// system is full, the write says so.
    pub(crate) fn allocate(&self, range: Range<u64>) -> bool {
        self.unwritten == Unwritten::Zeros
            && self.direct.is_some()
            && sparse::allocate(&self.file, range).is_ok()
    }

    /// Writes data, whose blocks of zeros become holes or zeros. In a new file that is already the case,
    /// unless space was allocated.
    pub(crate) fn write(&self, data: &[u8], offset: u64, is_allocated: bool) -> io::Result<()> {
        let least_zeros = match self.unwritten {
            Unwritten::DeviceData => LEAST_ZEROED,
            Unwritten::Zeros | Unwritten::Data => BLOCK,
        };
        for run in runs(data, least_zeros) {
            let start = offset + run.bytes.start as u64;
            let range = start..start + run.bytes.len() as u64;
            if run.is_zero && is_allocated {
                // What cannot be a hole reads as zeros, too.
                sparse::zero(&self.file, range)?;
            } else if run.is_zero {
                self.zero(range)?;
            } else {
                self.write_run(&data[run.bytes], start)?;
            }
        }
        Ok(())
    }

    fn write_run(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let is_aligned = data.as_ptr().addr().is_multiple_of(ALIGNMENT)
            && data.len().is_multiple_of(ALIGNMENT)
            && offset.is_multiple_of(ALIGNMENT as u64);
        if let Some(direct) = self.direct.as_ref().filter(|_| is_aligned) {
            match direct.write_all_at(data, offset) {
                // A larger alignment is needed, or a part was written.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                written => return written,
            }
        }
        self.file.write_all_at(data, offset)
    }

    /// Makes a range zeros, and a hole if possible.
    pub(crate) fn zero(&self, range: Range<u64>) -> io::Result<()> {
        if self.unwritten == Unwritten::Zeros || sparse::zero(&self.file, range.clone())? {
            return Ok(());
        }
        let zeros = vec![0; ZEROS.min((range.end - range.start) as usize)];
        let mut at = range.start;
        while at < range.end {
            let len = zeros.len().min((range.end - at) as usize);
            self.file.write_all_at(&zeros[..len], at)?;
            at += len as u64;
        }
        Ok(())
    }
}

/// A run of blocks that all are, or are not, zeros.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    bytes: Range<usize>,
    is_zero: bool,
}

/// Cuts data into runs. Runs of zeros with fewer than `least_zeros` bytes count as data, except at the
/// end.
fn runs(data: &[u8], least_zeros: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut push = |bytes: Range<usize>, is_zero: bool| match runs.last_mut() {
        Some(last) if last.is_zero == is_zero => last.bytes.end = bytes.end,
        _ => runs.push(Run { bytes, is_zero }),
    };
    let mut at = 0;
    while at < data.len() {
        let is_zero_at = |at: usize| is_zero(&data[at..data.len().min(at + BLOCK)]);
        let is_zero = is_zero_at(at);
        let ends = (at..data.len()).step_by(BLOCK).skip(1);
        let end = ends.into_iter().find(|next| is_zero_at(*next) != is_zero);
        let end = end.unwrap_or(data.len());
        push(at..end, is_zero && (end - at >= least_zeros || end == data.len()));
        at = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::{fs, ops::Range};

    use super::{BLOCK, Disk, Run, Unwritten, runs};
    use crate::buffer::AlignedBuffer;

    fn pattern(blocks: &[u8]) -> Vec<u8> {
        blocks.iter().flat_map(|byte| [*byte; BLOCK]).collect()
    }

    fn run(blocks: Range<usize>, is_zero: bool) -> Run {
        Run { bytes: blocks.start * BLOCK..blocks.end * BLOCK, is_zero }
    }

    #[test]
    fn data_is_cut_where_zeros_begin_and_end() {
        let data = pattern(&[0, 1, 2, 0, 0, 3]);
        let expected = [run(0..1, true), run(1..3, false), run(3..5, true), run(5..6, false)];
        assert_eq!(runs(&data, BLOCK), expected);
        assert_eq!(runs(&data, 2 * BLOCK), [run(0..3, false), run(3..5, true), run(5..6, false)]);
        assert_eq!(runs(&data, 3 * BLOCK), [run(0..6, false)]);
        assert_eq!(runs(&data[..100], BLOCK), [Run { bytes: 0..100, is_zero: true }]);
        assert_eq!(runs(&[], BLOCK), []);
    }

    #[test]
    fn old_data_is_overwritten_and_zeros_become_holes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, pattern(&[9; 64])).unwrap();
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let disk = Disk::new(file, Unwritten::Data);
        let mut buffer = AlignedBuffer::new(16 * BLOCK + 512);
        buffer.bytes()[2 * BLOCK..3 * BLOCK].fill(7);
        buffer.bytes()[16 * BLOCK..].fill(8);
        disk.write(buffer.bytes(), 16 * BLOCK as u64, false).unwrap();
        disk.zero(0..8 * BLOCK as u64).unwrap();
        disk.sync().unwrap();
        let mut expected = pattern(&[9; 64]);
        expected[..8 * BLOCK].fill(0);
        expected[16 * BLOCK..][..buffer.bytes().len()].copy_from_slice(buffer.bytes());
        assert!(fs::read(&path).unwrap() == expected);
        // The file system of the test has holes, or frees nothing.
        assert!(fs::metadata(&path).unwrap().blocks() <= 64 * 8);
    }
}
