//! A file system in memory that records its operations in the order of their execution.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use fuser::Errno;

use crate::operation::Operation;
use crate::sparse::Sparse;

/// The inode number of the root.
const ROOT: u64 = 1;

pub(crate) struct Memory {
    /// The inodes by number, from [`ROOT`] on. Removed ones stay, because a process may have them
    /// open.
    nodes: Vec<Node>,
    operations: Vec<Operation>,
    /// How many of the next syncs of a file fail.
    failing_syncs: BTreeMap<PathBuf, u32>,
    /// The files that cannot be written.
    failing_writes: BTreeSet<PathBuf>,
}

struct Node {
    /// The path relative to the root, or `None` if the name was removed.
    path: Option<PathBuf>,
    kind: Kind,
}

pub(crate) enum Kind {
    File(Sparse),
    Directory(BTreeMap<OsString, u64>),
    Link(PathBuf),
}

impl Default for Memory {
    fn default() -> Self {
        let root = Node { path: Some(PathBuf::new()), kind: Kind::Directory(BTreeMap::new()) };
        Self {
            nodes: vec![root],
            operations: Vec::new(),
            failing_syncs: BTreeMap::new(),
            failing_writes: BTreeSet::new(),
        }
    }
}

impl Memory {
    pub(crate) fn operations(&self) -> &[Operation] {
        &self.operations
    }

    pub(crate) fn mark(&mut self, text: &str) {
        self.operations.push(Operation::Mark(text.to_owned()));
    }

    /// Makes the next syncs of a file fail. What was written since its last sync is then readable,
    /// and never becomes durable.
    pub(crate) fn fail_syncs(&mut self, path: &Path, times: u32) {
        self.failing_syncs.insert(path.to_owned(), times);
    }

    /// Makes all writes to a file fail, or lets them succeed again.
    pub(crate) fn fail_writes(&mut self, path: &Path, fail: bool) {
        match fail {
            true => drop(self.failing_writes.insert(path.to_owned())),
            false => drop(self.failing_writes.remove(path)),
        }
    }

    pub(crate) fn kind(&self, number: u64) -> Result<&Kind, Errno> {
        Ok(&self.nodes.get((number - ROOT) as usize).ok_or(Errno::ENOENT)?.kind)
    }

    pub(crate) fn find(&self, parent: u64, name: &OsStr) -> Result<u64, Errno> {
        match self.kind(parent)? {
            Kind::Directory(names) => names.get(name).copied().ok_or(Errno::ENOENT),
            _ => Err(Errno::ENOTDIR),
        }
    }

    pub(crate) fn file(&self, number: u64) -> Result<&Sparse, Errno> {
        match self.kind(number)? {
            Kind::File(bytes) => Ok(bytes),
            _ => Err(Errno::EISDIR),
        }
    }

    /// Creates a file, a directory or a link, and returns its number.
    pub(crate) fn make(&mut self, parent: u64, name: &OsStr, kind: Kind) -> Result<u64, Errno> {
        let path = self.path(parent).ok_or(Errno::ENOENT)?.join(name);
        let number = self.nodes.len() as u64 + ROOT;
        let names = self.names(parent)?;
        if names.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        names.insert(name.to_owned(), number);
        self.operations.push(match &kind {
            Kind::File(_) => Operation::Create(path.clone()),
            Kind::Directory(_) => Operation::MakeDirectory(path.clone()),
            Kind::Link(target) => Operation::Link { path: path.clone(), target: target.clone() },
        });
        self.nodes.push(Node { path: Some(path), kind });
        Ok(number)
    }

    pub(crate) fn remove(&mut self, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let number = self.find(parent, name)?;
        if let Kind::Directory(_) = self.kind(number)? {
            return Err(Errno::EISDIR);
        }
        self.names(parent)?.remove(name);
        if let Some(path) = self.node(number)?.path.take() {
            self.operations.push(Operation::Remove(path));
        }
        Ok(())
    }

    /// Renames a file or a link within one directory, and replaces an existing one.
    pub(crate) fn rename(&mut self, parent: u64, from: &OsStr, to: &OsStr) -> Result<(), Errno> {
        let number = self.find(parent, from)?;
        let path = self.path(parent).ok_or(Errno::ENOENT)?;
        let (from_path, to_path) = (path.join(from), path.join(to));
        if let Kind::Directory(_) = self.kind(number)? {
            return Err(Errno::EXDEV);
        }
        let names = self.names(parent)?;
        names.remove(from);
        if let Some(replaced) = names.insert(to.to_owned(), number) {
            self.node(replaced)?.path = None;
        }
        self.node(number)?.path = Some(to_path.clone());
        self.operations.push(Operation::Rename { from: from_path, to: to_path });
        Ok(())
    }

    pub(crate) fn write(&mut self, number: u64, offset: usize, data: &[u8]) -> Result<(), Errno> {
        if self.path(number).is_some_and(|path| self.failing_writes.contains(path)) {
            return Err(Errno::EIO);
        }
        self.bytes(number)?.write(offset, data);
        self.record(number, |path| Operation::Write { path, offset, data: data.into() });
        Ok(())
    }

    pub(crate) fn set_len(&mut self, number: u64, len: usize) -> Result<(), Errno> {
        self.bytes(number)?.set_len(len);
        self.record(number, |path| Operation::SetLen { path, len });
        Ok(())
    }

    /// Extends a file to at least this length.
    pub(crate) fn extend(&mut self, number: u64, len: usize) -> Result<(), Errno> {
        self.bytes(number)?.extend(len);
        self.record(number, |path| Operation::Extend { path, len });
        Ok(())
    }

    pub(crate) fn punch(&mut self, number: u64, offset: usize, len: usize) -> Result<(), Errno> {
        self.bytes(number)?.punch(offset, len);
        self.record(number, |path| Operation::Punch { path, offset, len });
        Ok(())
    }

    /// Records a sync of a file or a directory.
    pub(crate) fn sync(&mut self, number: u64) -> Result<(), Errno> {
        let path = self.path(number).map(Path::to_owned);
        let failures = path.and_then(|path| self.failing_syncs.get_mut(&path));
        match failures {
            Some(left) if *left > 0 => {
                *left -= 1;
                self.record(number, Operation::FailedSync);
                Err(Errno::EIO)
            }
            _ => {
                self.record(number, Operation::Sync);
                Ok(())
            }
        }
    }

    /// Records that the last write to a file is durable.
    pub(crate) fn sync_write(&mut self, number: u64) {
        self.record(number, Operation::SyncWrite);
    }

    /// The offset of the next data at or after `offset`.
    pub(crate) fn next_data(&self, number: u64, offset: usize) -> Result<usize, Errno> {
        let mut data = self.file(number)?.data();
        let found = data.find(|(at, bytes)| at + bytes.len() > offset);
        found.map(|(at, _)| at.max(offset)).ok_or(Errno::ENXIO)
    }

    fn record(&mut self, number: u64, operation: impl FnOnce(PathBuf) -> Operation) {
        // A file without a name cannot be found after a power cut, so its operations are not
        // recorded.
        let path = self.path(number).map(Path::to_owned);
        self.operations.extend(path.map(operation));
    }

    fn path(&self, number: u64) -> Option<&Path> {
        self.nodes.get((number - ROOT) as usize)?.path.as_deref()
    }

    fn node(&mut self, number: u64) -> Result<&mut Node, Errno> {
        self.nodes.get_mut((number - ROOT) as usize).ok_or(Errno::ENOENT)
    }

    fn names(&mut self, number: u64) -> Result<&mut BTreeMap<OsString, u64>, Errno> {
        match &mut self.node(number)?.kind {
            Kind::Directory(names) => Ok(names),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn bytes(&mut self, number: u64) -> Result<&mut Sparse, Errno> {
        match &mut self.node(number)?.kind {
            Kind::File(bytes) => Ok(bytes),
            _ => Err(Errno::EISDIR),
        }
    }
}
