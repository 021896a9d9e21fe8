//! The journal of the layers, for the next process if this one is killed: which blocks were
//! preserved and where, and which chunks are durable under which id.
//!
//! It is a file of 64-byte records next to the mirror. Records are written with a system call and
//! not synced: the journal has to outlive the process, not the host. A record is written before the
//! guest's write that depends on it is submitted. Records of epochs that have ended, and of chunks
//! that are Idle, have no meaning. When no layer is left, the journal is emptied. While there is
//! always a layer, as with checkpoints that overlap, the journal is compacted from time to time.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use cairn_store::{ChunkId, ChunkIndex};

use crate::mirror::epoch::Epoch;
use crate::mirror::layout::Blocks;
#[cfg(test)]
use crate::mirror::simulation::space;

/// The size of a record.
const RECORD_BYTES: usize = 64;

/// Kinds of records.
const IN_MEMORY: u32 = 1;
const IN_FILE: u32 = 2;
const ABSENT: u32 = 3;
const STORED: u32 = 4;
const HOLE: u32 = 5;

/// The location of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyLocation {
    /// An offset in the copy-on-write memory.
    Memory(u64),
    /// An offset in the spill file.
    File(u64),
}

/// What happened to a chunk of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkEvent {
    /// The old content of these blocks was copied.
    Copied(Blocks, CopyLocation),
    /// These blocks were absent when a write first changed them.
    Absent(Blocks),
    /// The chunk is durable, or a hole.
    Stored(Option<ChunkId>),
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) epoch: Epoch,
    pub(crate) chunk: ChunkIndex,
    pub(crate) event: ChunkEvent,
}

impl Record {
    pub(crate) fn encode(&self) -> [u8; RECORD_BYTES] {
        let none = Blocks { first: 0, count: 0 };
        let (kind, run, offset, id) = match self.event {
            ChunkEvent::Copied(run, CopyLocation::Memory(offset)) => (IN_MEMORY, run, offset, None),
            ChunkEvent::Copied(run, CopyLocation::File(offset)) => (IN_FILE, run, offset, None),
            ChunkEvent::Absent(run) => (ABSENT, run, 0, None),
            ChunkEvent::Stored(Some(id)) => (STORED, none, 0, Some(id)),
            ChunkEvent::Stored(None) => (HOLE, none, 0, None),
        };
        let mut bytes = [0; RECORD_BYTES];
        bytes[0..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..6].copy_from_slice(&(run.first as u16).to_le_bytes());
        bytes[6..8].copy_from_slice(&(run.count as u16).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.chunk.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&offset.to_le_bytes());
        if let Some(id) = id {
            bytes[32..64].copy_from_slice(id.as_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Record> {
        let u16_at = |at: usize| u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let u64_at =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("a slice of eight"));
        let run = Blocks { first: u16_at(4), count: u16_at(6) };
        let event = match u32::from_le_bytes(bytes[0..4].try_into().expect("a slice of four")) {
            IN_MEMORY => ChunkEvent::Copied(run, CopyLocation::Memory(u64_at(24))),
            IN_FILE => ChunkEvent::Copied(run, CopyLocation::File(u64_at(24))),
            ABSENT => ChunkEvent::Absent(run),
            STORED => {
                let id: [u8; 32] = bytes[32..64].try_into().expect("a slice of 32");
                ChunkEvent::Stored(Some(ChunkId::from_bytes(id)))
            }
            HOLE => ChunkEvent::Stored(None),
            _ => return None,
        };
        Some(Record { epoch: Epoch(u64_at(8)), chunk: ChunkIndex(u64_at(16)), event })
    }
}

/// Parses a journal. A partial record at the end was being written when the process ended, and is
/// ignored. Returns `None` if a record is invalid.
pub(crate) fn parse(bytes: &[u8]) -> Option<Vec<Record>> {
    let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
    records.iter().map(Record::decode).collect()
}

/// The open journal.
pub(crate) struct Journal {
    path: PathBuf,
    content: Mutex<JournalFile>,
}

struct JournalFile {
    file: File,
    len: u64,
    /// The length from which on compaction is worthwhile.
    compact_at: u64,
}

/// A journal that is shorter than this is not compacted.
const COMPACT_MIN_BYTES: u64 = 4 << 20;

impl Journal {
    /// Opens or creates the journal, and keeps its content.
    pub(crate) fn open(path: &Path) -> io::Result<Journal> {
        let file = options().create(true).truncate(false).open(path)?;
        let len = file.metadata()?.len() / RECORD_BYTES as u64 * RECORD_BYTES as u64;
        let content = Mutex::new(JournalFile { file, len, compact_at: COMPACT_MIN_BYTES });
        Ok(Journal { path: path.into(), content })
    }

    fn content(&self) -> MutexGuard<'_, JournalFile> {
        self.content.lock().expect("no code panics with the journal locked")
    }

    /// Returns the records, or `None` if one is invalid.
    pub(crate) fn read(&self) -> io::Result<Option<Vec<Record>>> {
        Ok(parse(&self.content().read()?))
    }

    /// Adds records. When this returns, the next process finds them.
    pub(crate) fn write(&self, records: impl IntoIterator<Item = Record>) -> io::Result<()> {
        let bytes: Vec<u8> = records.into_iter().flat_map(|record| record.encode()).collect();
        let mut content = self.content();
        #[cfg(test)]
        if let Err(fits) = space::take_for_records(bytes.len()) {
            content.file.write_all_at(&bytes[..fits], content.len)?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        // The next write overwrites a record that was written only partly.
        content.file.write_all_at(&bytes, content.len)?;
        content.len += bytes.len() as u64;
        Ok(())
    }

    /// Removes all records.
    pub(crate) fn clear(&self) -> io::Result<()> {
        let mut content = self.content();
        if content.len > 0 {
            content.file.set_len(0)?;
            (content.len, content.compact_at) = (0, COMPACT_MIN_BYTES);
        }
        Ok(())
    }

    /// Removes the records of epochs that are not needed, if that is worthwhile.
    pub(crate) fn compact(&self, is_needed: impl Fn(Epoch) -> bool) -> io::Result<()> {
        let mut content = self.content();
        if content.len < content.compact_at {
            return Ok(());
        }
        let Some(records) = parse(&content.read()?) else { return Ok(()) };
        let needed = records.iter().filter(|record| is_needed(record.epoch));
        let bytes: Vec<u8> = needed.flat_map(|record| record.encode()).collect();
        let fresh = self.path.with_extension("new");
        let file = options().create(true).truncate(true).open(&fresh)?;
        file.write_all_at(&bytes, 0)?;
        // One of the two files is there at any time, and both have all records that are needed.
        std::fs::rename(fresh, &self.path)?;
        let len = bytes.len() as u64;
        *content = JournalFile { file, len, compact_at: COMPACT_MIN_BYTES.max(2 * len) };
        Ok(())
    }
}

impl JournalFile {
    fn read(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.len as usize];
        self.file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use cairn_store::{ChunkId, ChunkIndex};

    use super::{
        Blocks, COMPACT_MIN_BYTES, ChunkEvent, CopyLocation, Epoch, Journal, Record, parse,
    };

    fn records() -> Vec<Record> {
        let run = Blocks { first: 1000, count: 24 };
        let events = [
            ChunkEvent::Copied(run, CopyLocation::Memory(1 << 40)),
            ChunkEvent::Copied(run, CopyLocation::File(4096)),
            ChunkEvent::Absent(Blocks { first: 0, count: 1024 }),
            ChunkEvent::Stored(Some(ChunkId::of(b"content"))),
            ChunkEvent::Stored(None),
        ];
        let record = |event| Record { epoch: Epoch(u64::MAX), chunk: ChunkIndex(77), event };
        events.into_iter().map(record).collect()
    }

    fn journal() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(&dir.path().join("journal")).unwrap();
        (dir, journal)
    }

    #[test]
    fn records_are_read_back_as_they_were_written() {
        let (_dir, journal) = journal();
        journal.write(records()).unwrap();
        journal.write(records()).unwrap();
        assert_eq!(journal.read().unwrap(), Some([records(), records()].concat()));
        journal.clear().unwrap();
        journal.write(records()).unwrap();
        assert_eq!(journal.read().unwrap(), Some(records()));
    }

    #[test]
    fn a_record_that_was_being_written_is_not_there() {
        let (_dir, journal) = journal();
        journal.write(records()).unwrap();
        journal.content().file.write_all_at(&[1; 63], 5 * 64).unwrap();
        let again = Journal::open(&journal.path).unwrap();
        assert_eq!(again.read().unwrap(), Some(records()));
    }

    #[test]
    fn a_long_journal_is_compacted_to_what_is_needed() {
        let (_dir, journal) = journal();
        let of = |epoch| Record { epoch: Epoch(epoch), ..records()[0] };
        journal.write((0..100).map(|_| of(1))).unwrap();
        journal.compact(|_| false).unwrap();
        assert_eq!(journal.read().unwrap().unwrap().len(), 100, "it is short");
        let many = COMPACT_MIN_BYTES / 64;
        journal.write((0..many).map(|at| of(1 + u64::from(at % 1000 == 0)))).unwrap();
        journal.compact(|epoch| epoch == Epoch(2)).unwrap();
        let left = many.div_ceil(1000) as usize;
        assert_eq!(journal.read().unwrap(), Some(vec![of(2); left]));
        journal.write([of(3)]).unwrap();
        let again = Journal::open(&journal.path).unwrap();
        assert_eq!(again.read().unwrap().unwrap().len(), left + 1);
    }

    #[test]
    fn what_is_no_record_is_not_taken_for_one() {
        assert_eq!(parse(&[0; 64]), None);
        assert_eq!(parse(&[0xff; 640]), None);
        assert_eq!(parse(b""), Some(Vec::new()));
    }
}
