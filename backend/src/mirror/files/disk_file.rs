//! The data file of a mirror: sparse, raw, and exactly what the guest sees. The spill file is of
//! the same kind.
//!
//! All I/O goes through the one open file description that holds the lock. The kernel releases the
//! lock only when the last write through that description has landed, even after the process has
//! died.
#![allow(unsafe_code)]

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use cairn_store::LockedFile;

use super::lock::lock;
use crate::mapping::Buffer;
use crate::mirror::layout::Span;

/// File systems whose inodes only this kernel changes.
const LOCAL_FILE_SYSTEMS: [libc::__fsword_t; 4] =
    [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC, libc::TMPFS_MAGIC];

/// The alignment of addresses, offsets and lengths that direct I/O on a file needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectAlignment {
    pub(crate) memory: usize,
    pub(crate) offset: u64,
}

/// Creates a mirror's directory and the directories above it, if they are missing, and makes them
/// durable: data that a guest has flushed must not be lost with the name of its directory.
pub(crate) fn make_directory(path: &Path) -> io::Result<()> {
    let path = std::path::absolute(path)?;
    let missing: Vec<_> = path.ancestors().take_while(|dir| !dir.exists()).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    missing.into_iter().filter_map(Path::parent).try_for_each(sync_directory)
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// An open data file, which is locked, or the spill file of a layer.
pub(crate) struct DiskFile {
    file: File,
    alignment: DirectAlignment,
}

impl DiskFile {
    /// Opens or creates the file, and locks it. Returns `WouldBlock` if another process holds the
    /// lock. A process that was killed holds it until the kernel has finished its last writes, so
    /// this waits for that.
    pub(crate) fn open(path: &Path) -> io::Result<DiskFile> {
        let data = DiskFile::open_unlocked(path)?;
        lock(&data.file)?;
        Ok(data)
    }

    /// Opens or creates a file that nobody locks.
    pub(crate) fn open_unlocked(path: &Path) -> io::Result<DiskFile> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_DIRECT | libc::O_CLOEXEC)
            .open(path)?;
        let alignment = direct_alignment(&file);
        Ok(DiskFile { file, alignment })
    }

    pub(crate) fn alignment(&self) -> DirectAlignment {
        self.alignment
    }

    pub(crate) fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Sets the length. New bytes are holes.
    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    /// Reads a span. `buffer` is page aligned and as long as the span.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    /// Reads a span into several buffers, at most 1024, one after the other. Each buffer is page
    /// aligned.
    pub(crate) fn read_vectored(&self, buffers: &mut [&mut [u8]], offset: u64) -> io::Result<()> {
        let mut vectors: Vec<_> = buffers.iter_mut().map(|one| io::IoSliceMut::new(one)).collect();
        let (address, count) = (vectors.as_mut_ptr(), vectors.len() as libc::c_int);
        // SAFETY: `IoSliceMut` has the layout of `iovec`, and each one is memory that is borrowed
        // mutably.
        let read = unsafe { libc::preadv(self.raw_fd(), address.cast(), count, offset as i64) };
        let mut done = match usize::try_from(read) {
            Ok(done) => done,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => 0,
                error => return Err(error),
            },
        };
        // Reads what the vectored read did not return.
        let mut at = offset;
        for buffer in buffers {
            let skip = done.min(buffer.len());
            self.file.read_exact_at(&mut buffer[skip..], at + skip as u64)?;
            done -= skip;
            at += buffer.len() as u64;
        }
        Ok(())
    }

    /// Reads whole blocks into a buffer of any alignment.
    pub(crate) fn read_any(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut aligned = Buffer::zeroed(buffer.len());
        self.read(&mut aligned, offset)?;
        buffer.copy_from_slice(&aligned);
        Ok(())
    }

    /// Writes a span. `buffer` is page aligned.
    pub(crate) fn write(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(buffer, offset)
    }

    /// Turns a span into a hole that reads as zeros.
    pub(crate) fn punch(&self, span: Span) -> io::Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: no memory is passed. The descriptor is open as long as `self`.
        let result =
            unsafe { libc::fallocate(self.raw_fd(), mode, span.offset as i64, span.len as i64) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Whether no byte of the span is allocated.
    pub(crate) fn is_hole(&self, span: Span) -> bool {
        // SAFETY: no memory is passed. Nobody uses the file position that this moves.
        let data = unsafe { libc::lseek(self.raw_fd(), span.offset as i64, libc::SEEK_DATA) };
        if data < 0 {
            return io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO);
        }
        data as u64 >= span.end()
    }

    /// The free space of the file system, in bytes.
    pub(crate) fn free_space(&self) -> io::Result<u64> {
        // SAFETY: an all-zero statvfs is a valid value of that plain struct.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is writable and large enough. The descriptor is open as long as `self`.
        match unsafe { libc::fstatvfs(self.raw_fd(), &raw mut stat) } {
            0 => Ok(stat.f_bavail.saturating_mul(stat.f_frsize)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The file that this process has locked, as a proof that an earlier process has ended. `None`
    /// on a file system whose numbers prove nothing: see [`LockedFile`].
    pub(crate) fn locked_file(&self) -> io::Result<Option<LockedFile>> {
        // SAFETY: an all-zero statfs is a valid value of that plain struct.
        let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is writable and large enough. The descriptor is open as long as `self`.
        if unsafe { libc::fstatfs(self.raw_fd(), &raw mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let metadata = self.file.metadata()?;
        let locked = LockedFile { device: metadata.dev(), inode: metadata.ino() };
        Ok(LOCAL_FILE_SYSTEMS.contains(&stat.f_type).then_some(locked))
    }

    /// Makes the file's length durable, and its name in `directory`.
    pub(crate) fn sync_name(&self, directory: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        sync_directory(directory)
    }

    /// Makes completed writes and the file's length durable.
    pub(crate) fn sync_length(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Makes completed writes durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// The descriptor, for rings.
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Gives a file this length, and allocates all its space.
pub(crate) fn allocate(file: &File, len: u64) -> io::Result<()> {
    allocate_more(file, 0, len)
}

/// Makes a file at least `offset + len` bytes long, and allocates its last `len` bytes.
pub(crate) fn allocate_more(file: &File, offset: u64, len: u64) -> io::Result<()> {
    #[cfg(test)]
    crate::mirror::simulation::space::take_for_file(len)?;
    // SAFETY: no memory is passed. The descriptor is open as long as `file`.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), 0, offset as i64, len as i64) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a read failed because the disk cannot return the data.
pub(crate) fn is_medium_error(error: &io::Error) -> bool {
    // What the block layer reports for an error of a device, an error of a medium, and two kinds of
    // wrong checksums.
    let codes = [libc::EIO, libc::ENODATA, libc::EILSEQ, libc::EBADMSG];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Asks the kernel for the alignment. If it does not know, assumes a page for memory and a sector
/// for offsets.
fn direct_alignment(file: &File) -> DirectAlignment {
    let fallback = DirectAlignment { memory: 4096, offset: 512 };
    // SAFETY: an all-zero statx is a valid value of that plain struct.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string, and `stat` is writable and large enough.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    if result != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 || stat.stx_dio_offset_align == 0 {
        return fallback;
    }
    DirectAlignment {
        memory: (stat.stx_dio_mem_align as usize).max(1),
        offset: u64::from(stat.stx_dio_offset_align),
    }
}
