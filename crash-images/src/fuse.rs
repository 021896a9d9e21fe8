//! Records the operations on a directory with a mounted file system.
//!
//! In contrast to a trace of system calls, it sees operations of io_uring, and it survives the
//! death of the programs that use it, because the kernel owns their open files and locks.
//!
//! The kernel caches nothing (`FOPEN_DIRECT_IO`), so every write arrives as the program made it.
//! Operations are executed one after the other, and the recording has the order of their execution.
//! So an operation that was answered before another one was requested comes before it. An operation
//! that was never answered may be the last one of the recording, or may be missing. A sync takes
//! some time, as on a disk: it covers writes before the request, and not those between the request
//! and its answer.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use tempfile::TempDir;

use crate::memory::{Kind, Memory};
use crate::recording::Recording;

/// How long the kernel may cache attributes and names.
const TTL: Duration = Duration::ZERO;

const FLAGS: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// The free space that the file system reports, in bytes.
const FREE_BYTES: u64 = 1 << 30;
const BLOCK: u32 = 4096;

/// How long a sync takes.
const SYNC_TIME: Duration = Duration::from_millis(2);

/// An empty directory in which all operations are recorded. Dropping this value removes it.
pub struct Mounted {
    root: TempDir,
    memory: Arc<Mutex<Memory>>,
    session: Option<BackgroundSession>,
}

impl Mounted {
    /// Mounts the directory.
    ///
    /// # Panics
    ///
    /// If the mount fails. It needs `/dev/fuse` and the permission to mount.
    #[expect(clippy::new_without_default, reason = "it mounts a file system")]
    pub fn new() -> Mounted {
        let root = TempDir::new().expect("creating a directory to mount on");
        let memory = Arc::new(Mutex::new(Memory::default()));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("recorded".into())];
        let session = fuser::spawn_mount(Served(Arc::clone(&memory)), root.path(), &config)
            .unwrap_or_else(|error| panic!("this test needs /dev/fuse and root: {error}"));
        Mounted { root, memory, session: Some(session) }
    }

    /// The path of the directory.
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// Adds a mark to the recording: the workload has reached this point.
    pub fn mark(&self, text: &str) {
        lock(&self.memory).mark(text);
    }

    /// Makes the next `times` syncs of a file fail. As in Linux, each failure is reported once, and
    /// what was written since the last sync never becomes durable, although it can be read and later
    /// syncs succeed. `path` is relative to the root.
    pub fn fail_syncs(&self, path: &str, times: u32) {
        lock(&self.memory).fail_syncs(Path::new(path), times);
    }

    /// Makes all writes to a file fail, or lets them succeed again. `path` is relative to the root.
    pub fn fail_writes(&self, path: &str, fail: bool) {
        lock(&self.memory).fail_writes(Path::new(path), fail);
    }

    /// The operations so far.
    pub fn recording(&self) -> Recording {
        Recording::new(lock(&self.memory).operations().to_vec())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A lazy unmount, because a process that ends may still have a file open.
        let _ = Command::new("umount").arg("--lazy").arg(self.root.path()).output();
        drop(self.session.take());
    }
}

fn lock(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().expect("no thread panics with the files locked")
}

/// Answers the requests of the kernel.
struct Served(Arc<Mutex<Memory>>);

impl Served {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.0)
    }
}

fn attributes(memory: &Memory, number: u64) -> Result<FileAttr, Errno> {
    let (kind, size) = match memory.kind(number)? {
        Kind::File(bytes) => (FileType::RegularFile, bytes.len() as u64),
        Kind::Directory(_) => (FileType::Directory, 0),
        Kind::Link(target) => (FileType::Symlink, target.as_os_str().len() as u64),
    };
    let time = SystemTime::UNIX_EPOCH;
    Ok(FileAttr {
        ino: INodeNo(number),
        size,
        blocks: size.div_ceil(512),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK,
        flags: 0,
    })
}

fn answer(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn answer_attributes(reply: ReplyAttr, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attributes) => reply.attr(&TTL, &attributes),
        Err(error) => reply.error(error),
    }
}

fn answer_entry(reply: ReplyEntry, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let memory = self.memory();
        let found = memory.find(parent.0, name).and_then(|number| attributes(&memory, number));
        answer_entry(reply, found);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        answer_attributes(reply, attributes(&self.memory(), ino.0));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut memory = self.memory();
        let changed = size.map_or(Ok(()), |len| memory.set_len(ino.0, len as usize));
        answer_attributes(reply, changed.and_then(|()| attributes(&memory, ino.0)));
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.memory().kind(ino.0) {
            Ok(Kind::Link(target)) => reply.data(target.as_os_str().as_encoded_bytes()),
            Ok(_) => reply.error(Errno::EINVAL),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        answer_entry(reply, self.make(parent, name, Kind::Directory(Default::default())));
    }

    fn symlink(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        answer_entry(reply, self.make(parent, name, Kind::Link(target.to_owned())));
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        match self.make(parent, name, Kind::File(Default::default())) {
            Ok(made) => reply.created(&TTL, &made, Generation(0), FileHandle(0), FLAGS),
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.memory().remove(parent.0, name));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let result = match parent == new_parent && flags.is_empty() {
            true => self.memory().rename(parent.0, name, new_name),
            false => Err(Errno::EXDEV),
        };
        answer(reply, result);
    }

    fn open(&self, _: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FLAGS);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.memory().file(ino.0) {
            Ok(bytes) => reply.data(&bytes.read(offset as usize, size as usize)),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut memory = self.memory();
        let result = memory.write(ino.0, offset as usize, data);
        if result.is_ok() && flags.0 & libc::O_DSYNC != 0 {
            memory.sync_write(ino.0);
        }
        match result {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(
        &self,
        _: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // The kernel calls this when a descriptor is closed.
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _data: bool, reply: ReplyEmpty) {
        self.sync(ino, reply);
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _data: bool, reply: ReplyEmpty) {
        self.sync(ino, reply);
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let memory = self.memory();
        let Ok(Kind::Directory(names)) = memory.kind(ino.0) else {
            return reply.error(Errno::ENOTDIR);
        };
        for (at, (name, number)) in names.iter().enumerate().skip(offset as usize) {
            let kind = attributes(&memory, *number).map_or(FileType::RegularFile, |one| one.kind);
            if reply.add(INodeNo(*number), at as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let blocks = FREE_BYTES / u64::from(BLOCK);
        reply.statfs(blocks, blocks, blocks, FREE_BYTES, FREE_BYTES, BLOCK, 255, BLOCK);
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (offset, length) = (offset as usize, length as usize);
        let result = match mode {
            0 => self.memory().extend(ino.0, offset + length),
            PUNCH => self.memory().punch(ino.0, offset, length),
            _ => Err(Errno::EOPNOTSUPP),
        };
        answer(reply, result);
    }

    fn lseek(
        &self,
        _: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let found = match whence {
            libc::SEEK_DATA => self.memory().next_data(ino.0, offset as usize),
            _ => Err(Errno::EINVAL),
        };
        match found {
            Ok(at) => reply.offset(at as i64),
            Err(error) => reply.error(error),
        }
    }
}

impl Served {
    fn sync(&self, ino: INodeNo, reply: ReplyEmpty) {
        let result = self.memory().sync(ino.0);
        thread::spawn(move || {
            thread::sleep(SYNC_TIME);
            answer(reply, result);
        });
    }

    fn make(&self, parent: INodeNo, name: &OsStr, kind: Kind) -> Result<FileAttr, Errno> {
        let mut memory = self.memory();
        let number = memory.make(parent.0, name, kind)?;
        attributes(&memory, number)
    }
}
