//! Blobs as files of one directory.
//!
//! A blob's file holds its plain content and is named by it, `blobs/ab/ab…`, so that any BLAKE3 tool
//! can check it. A visible name implies durable content: see [`stage`](super::stage).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::Blobs;
use super::stage::{Stage, path_of};
use super::temp::{TempDir, sync_dir};
use crate::error::{Error, Result};
use crate::id::BlobId;

pub(crate) struct DirBlobs {
    blobs: PathBuf,
    temp: TempDir,
    stage: Stage,
}

impl DirBlobs {
    /// Makes the directories. Another process may do the same at the same time.
    pub(crate) fn create(repository: &Path) -> Result<()> {
        let blobs = blobs_in(repository);
        for path in [&temp_in(repository), &blobs] {
            make_dir(path)?;
        }
        for prefix in 0..=u8::MAX {
            make_dir(&blobs.join(format!("{prefix:02x}")))?;
        }
        sync_dir(&blobs)
    }

    pub(crate) fn open(repository: &Path) -> Result<Self> {
        let temp = TempDir::new(temp_in(repository))?;
        temp.remove_stale();
        let blobs = blobs_in(repository);
        Ok(Self { stage: Stage::new(blobs.clone()), blobs, temp })
    }

    fn read(&self, file: &File, path: &Path, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
        let corrupt = |reason: String| Error::corrupt(path.display().to_string(), reason);
        let len = file.metadata().map_err(|e| Error::io("reading", path, e))?.len();
        let Some(content) = usize::try_from(len).ok().and_then(|len| buf.get_mut(..len)) else {
            return Err(corrupt(format!("it has {len} bytes, at most {} are expected", buf.len())));
        };
        file.read_exact_at(content, 0).map_err(|e| Error::io("reading", path, e))?;
        if BlobId::of(content) != *id {
            return Err(corrupt("its content does not match its name".into()));
        }
        Ok(content.len())
    }

    /// The length of the blob's file, if it has one.
    fn stored_len(&self, id: &BlobId) -> Result<Option<u64>> {
        let path = path_of(&self.blobs, id);
        match fs::metadata(&path) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("examining", &path, error)),
        }
    }
}

impl Blobs for DirBlobs {
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
        let path = path_of(&self.blobs, id);
        // The stage comes first: what has left it has its name.
        let staged = self.stage.with_staged(id, |temp| self.read(temp.file(), &path, id, buf));
        if let Some(result) = staged {
            return result;
        }
        match File::open(&path) {
            Ok(file) => self.read(&file, &path, id, buf),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::MissingBlob { path })
            }
            Err(error) => Err(Error::io("opening", &path, error)),
        }
    }

    fn put(&self, id: &BlobId, content: &[u8]) -> Result<u64> {
        self.stage.check()?;
        let len = content.len() as u64;
        if self.stage.with_staged(id, |_| ()).is_some() {
            return Ok(0);
        }
        // A file of another length is a damaged one: the content at hand replaces it.
        if self.stored_len(id)? == Some(len) {
            self.stage.rely_on(id);
            return Ok(0);
        }
        let added = self.stage.add(*id, self.temp.write(content)?)?;
        Ok(if added { len } else { 0 })
    }

    fn contains(&self, id: &BlobId) -> Result<bool> {
        if self.stage.with_staged(id, |_| ()).is_some() {
            return Ok(true);
        }
        // No blob is empty, so an empty file is a damaged one.
        let found = self.stored_len(id)?.is_some_and(|len| len > 0);
        if found {
            self.stage.rely_on(id);
        }
        Ok(found)
    }

    fn settle(&self) -> Result<()> {
        self.stage.settle_all()
    }

    fn flush(&self) -> Result<()> {
        self.stage.flush()
    }
}

fn blobs_in(repository: &Path) -> PathBuf {
    repository.join("blobs")
}

fn temp_in(repository: &Path) -> PathBuf {
    repository.join("tmp")
}

fn make_dir(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::io("creating", path, error))
        }
        _ => Ok(()),
    }
}
