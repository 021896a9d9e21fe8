//! The record of an export that has not ended. It is a small file beside the exported one.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cairn_store::Snapshot;
use serde::{Deserialize, Serialize};

/// The version of the format.
const VERSION: u32 = 1;

/// The most bytes of a record.
const MAX_LEN: u64 = 16 << 10;

/// The content that a file is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Content {
    /// The snapshot's name, for messages.
    pub(crate) snapshot: String,
    /// The name of its tree's top node; `None` if the disk has no data.
    root: Option<String>,
    pub(crate) size: u64,
    chunk_size: u32,
}

impl Content {
    pub(crate) fn of(snapshot: &Snapshot) -> Content {
        Content {
            snapshot: snapshot.name().to_string(),
            root: snapshot.root.0.map(|root| root.to_string()),
            size: snapshot.geometry.size(),
            chunk_size: snapshot.geometry.chunk_size(),
        }
    }

    /// Whether both have the same bytes, and are made of the same chunks.
    pub(crate) fn is_equal(&self, other: &Content) -> bool {
        let of = |one: &Content| (one.root.clone(), one.size, one.chunk_size);
        of(self) == of(other)
    }
}

/// The identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(file: &File) -> io::Result<FileId> {
        let metadata = file.metadata()?;
        Ok(FileId { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// An export that has not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    #[serde(rename = "cairn_export")]
    version: u32,
    /// What the file is to have at the end.
    pub(crate) content: Content,
    /// What the file had before, if it is changed in place.
    pub(crate) base: Option<Content>,
    /// The file that is written.
    pub(crate) file: FileId,
    /// The chunks below this one are durable.
    pub(crate) durable_chunks: u64,
}

impl Record {
    pub(crate) fn new(content: Content, base: Option<Content>, file: FileId) -> Record {
        Record { version: VERSION, content, base, file, durable_chunks: 0 }
    }

    /// Reads a record. `None` if there is none. Fails if it is damaged, or of another version.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Record>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(MAX_LEN + 1).read_to_end(&mut bytes)?;
        let record = Record::parse(&bytes)
            .map_err(|why| io::Error::other(format!("{}: {why}", path.display())))?;
        Ok(Some(record))
    }

    fn parse(bytes: &[u8]) -> Result<Record, &'static str> {
        if bytes.len() as u64 > MAX_LEN {
            return Err("it is too long for the record of an export");
        }
        match serde_json::from_slice::<Record>(bytes) {
            Ok(record) if record.version == VERSION => Ok(record),
            Ok(_) => Err("it is the record of an export by another version of cairn"),
            Err(_) => Err("it is not the record of an export, or is damaged"),
        }
    }

    /// Replaces the record durably.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let new = with_suffix(path, ".new");
        let mut file = File::create(&new)?;
        let mut bytes = serde_json::to_vec(self).map_err(io::Error::other)?;
        bytes.push(b'\n');
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        sync_directory(path)
    }

    /// Removes the record, if there is one.
    pub(crate) fn remove(path: &Path) -> io::Result<()> {
        for path in [&*with_suffix(path, ".new"), path] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The path with a suffix to its last part.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes changes of names in the directory of this path durable.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|path| !path.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Content, FileId, MAX_LEN, Record};

    fn record() -> Record {
        let content = |snapshot: &str, root: Option<&str>| Content {
            snapshot: snapshot.into(),
            root: root.map(Into::into),
            size: 1 << 30,
            chunk_size: 1 << 18,
        };
        let file = FileId { device: 1, inode: 2 };
        Record {
            durable_chunks: 7,
            ..Record::new(content("vm1@2", Some("ab")), Some(content("vm1@1", None)), file)
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.cairn-state");
        assert_eq!(Record::read(&path).unwrap(), None);
        record().write(&path).unwrap();
        let next = Record { durable_chunks: 8, base: None, ..record() };
        next.write(&path).unwrap();
        assert_eq!(Record::read(&path).unwrap(), Some(next));
        Record::remove(&path).unwrap();
        Record::remove(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn no_part_of_a_record_and_no_other_file_is_a_record() {
        let bytes = serde_json::to_vec(&record()).unwrap();
        assert_eq!(Record::parse(&bytes), Ok(record()));
        for len in 0..bytes.len() {
            assert!(Record::parse(&bytes[..len]).is_err(), "{len}");
        }
        let other = String::from_utf8(bytes).unwrap();
        let other = other.replacen("\"cairn_export\":1", "\"cairn_export\":2", 1);
        assert!(Record::parse(other.as_bytes()).unwrap_err().contains("another version"));
        assert!(Record::parse(&vec![b' '; MAX_LEN as usize + 1]).unwrap_err().contains("too long"));
    }

    #[test]
    fn the_name_of_a_snapshot_is_no_part_of_its_content() {
        let one = record().content;
        assert!(one.is_equal(&Content { snapshot: "clone@1".into(), ..one.clone() }));
        assert!(!one.is_equal(&Content { size: 512, ..one.clone() }));
        assert!(!one.is_equal(&Content { root: None, ..one.clone() }));
    }
}
