//! What outlives the process of a layer's chunks, in files on the local disk.
//!
//! A layer can have as many chunks as the disk, so nothing of this is in memory. Each layer has two
//! sparse files next to the mirror, which are created when they are needed:
//!
//! | file | holds |
//! |---|---|
//! | `layer-<epoch>.table` | an entry for each chunk: its name once it is durable, and two sets of blocks |
//! | `layer-<epoch>.spill` | old blocks for which there was no memory, each at the offset that it has on the disk |
//!
//! Entries are written with a system call and not synced: they have to outlive the process, not the
//! host. An entry never crosses a page, so a kill leaves the old entry or the new one. `docs/formats.md`
//! describes the bytes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use cairn_store::{ChunkId, ChunkIndex};

use super::disk_file::DiskFile;
use crate::mapping::PAGE_BYTES;
use crate::mirror::block_set::BlockSet;
use crate::mirror::epoch::Epoch;
use crate::mirror::layout::Layout;
#[cfg(test)]
use crate::mirror::simulation::space;
use crate::sys;

const MAGIC: &[u8; 8] = b"CRNLAYER";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 24;

/// The bytes of an entry before the sets of blocks: a chunk's name and the kind of the entry.
const NAME_BYTES: usize = 40;

/// The names of files that are to be removed begin with this.
const ENDED_PREFIX: &str = "ended-layer-";

/// Kinds of entries.
const NOT_STORED: u64 = 0;
const STORED: u64 = 1;
const HOLE: u64 = 2;

/// The number of entries that are read at once when all of them are read.
const READ_ENTRIES: u64 = 1024;

/// What the table has of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChunkEntry {
    /// The chunk's name, if its content is durable; the inner `None` is a hole.
    pub(crate) stored: Option<Option<ChunkId>>,
    /// Blocks whose old content does not depend on the mirror: those that were absent, and those of
    /// `spilled`. Blocks that are preserved in memory are not here.
    pub(crate) decided: BlockSet,
    /// Blocks whose old content is in the spill file.
    pub(crate) spilled: BlockSet,
}

/// The sizes of a table, which follow from the chunk size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EntryLayout {
    /// The number of words of a set of blocks.
    words: usize,
    bytes: usize,
}

impl EntryLayout {
    fn new(layout: &Layout) -> EntryLayout {
        let words = layout.blocks_per_chunk().div_ceil(64) as usize;
        EntryLayout { words, bytes: (NAME_BYTES + 2 * 8 * words).next_power_of_two() }
    }

    fn offset(&self, chunk: ChunkIndex) -> u64 {
        PAGE_BYTES as u64 + chunk.0 * self.bytes as u64
    }

    /// Decodes an entry. `None` if no process can have written it.
    fn decode(&self, bytes: &[u8]) -> Option<ChunkEntry> {
        let u64_at =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let words = |at: usize| (0..self.words).map(move |word| u64_at(at + 8 * word));
        let id: [u8; 32] = bytes[..32].try_into().expect("32 bytes");
        let stored = match u64_at(32) {
            NOT_STORED => None,
            STORED => Some(Some(ChunkId::from_bytes(id))),
            HOLE => Some(None),
            _ => return None,
        };
        let decided = BlockSet::from_words(words(NAME_BYTES));
        let spilled = BlockSet::from_words(words(NAME_BYTES + 8 * self.words));
        spilled.without(&decided).is_empty().then_some(ChunkEntry { stored, decided, spilled })
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a layer's table is damaged: {what}"))
}

/// The table of one layer.
pub(crate) struct LayerTable {
    file: File,
    layout: EntryLayout,
}

impl LayerTable {
    /// An entry's bytes, read with `read_exact_at` semantics but with zeros behind the file's end.
    fn read_bytes(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }

    fn decode(&self, chunk: ChunkIndex, bytes: &[u8]) -> io::Result<ChunkEntry> {
        self.layout.decode(bytes).ok_or_else(|| damaged(&format!("chunk {}", chunk.0)))
    }

    /// The entry of a chunk.
    pub(crate) fn read(&self, chunk: ChunkIndex) -> io::Result<ChunkEntry> {
        let mut bytes = [0; 512];
        let bytes = &mut bytes[..self.layout.bytes];
        self.read_bytes(bytes, self.layout.offset(chunk))?;
        self.decode(chunk, bytes)
    }

    /// Calls `each` with the entry of each of `chunks`, which are in ascending order.
    pub(crate) fn read_all(
        &self,
        chunks: impl Iterator<Item = ChunkIndex>,
        mut each: impl FnMut(ChunkIndex, ChunkEntry) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut buffer = vec![0; READ_ENTRIES as usize * self.layout.bytes];
        let mut first = None;
        for chunk in chunks {
            let start = chunk.0 / READ_ENTRIES * READ_ENTRIES;
            if first != Some(start) {
                self.read_bytes(&mut buffer, self.layout.offset(ChunkIndex(start)))?;
                first = Some(start);
            }
            let at = (chunk.0 - start) as usize * self.layout.bytes;
            each(chunk, self.decode(chunk, &buffer[at..at + self.layout.bytes])?)?;
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        space::take_for_records(bytes.len())?;
        self.file.write_all_at(bytes, offset)
    }

    /// Fails if the kernel could not write entries to the disk: it may have dropped them. What was
    /// read from the table before counts only if this succeeds.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Writes the sets of blocks of a chunk's entry.
    pub(crate) fn write_blocks(&self, chunk: ChunkIndex, entry: &ChunkEntry) -> io::Result<()> {
        let words = |set: &BlockSet| set.words()[..self.layout.words].to_vec();
        let words = [words(&entry.decided), words(&entry.spilled)].concat();
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        self.write(&bytes, self.layout.offset(chunk) + NAME_BYTES as u64)
    }

    /// Writes that a chunk is durable under this name, or is a hole.
    pub(crate) fn write_stored(&self, chunk: ChunkIndex, id: Option<ChunkId>) -> io::Result<()> {
        let mut bytes = [0; NAME_BYTES];
        let kind = match id {
            Some(id) => {
                bytes[..32].copy_from_slice(id.as_bytes());
                STORED
            }
            None => HOLE,
        };
        bytes[32..].copy_from_slice(&kind.to_le_bytes());
        self.write(&bytes, self.layout.offset(chunk))
    }
}

/// The directory with the files of all layers.
///
/// Freeing the space of a large sparse file takes seconds. So a thread does that, and nobody waits
/// for it. What is left when the process ends is freed by the next one.
pub(crate) struct LayerDir {
    path: PathBuf,
    layout: EntryLayout,
    garbage: Mutex<Option<mpsc::Sender<Garbage>>>,
}

/// Space that nobody needs.
enum Garbage {
    /// The content of an open file.
    Content(Arc<DiskFile>),
    File(PathBuf),
}

impl Garbage {
    fn free(&self) {
        let freed = match self {
            Garbage::Content(file) => file.set_len(0),
            Garbage::File(path) => match fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                result => result,
            },
        };
        if let Err(error) = freed {
            tracing::error!(%error, "cannot free the space of a layer that has ended");
        }
    }
}

impl LayerDir {
    pub(crate) fn new(path: &Path, layout: &Layout) -> LayerDir {
        let (path, layout) = (path.into(), EntryLayout::new(layout));
        LayerDir { path, layout, garbage: Mutex::default() }
    }

    /// Frees space soon.
    fn discard(&self, garbage: Garbage) {
        let mut sender = self.garbage.lock().expect("no code panics with this lock held");
        let sender = sender.get_or_insert_with(|| {
            let (sender, receiver) = mpsc::channel::<Garbage>();
            let free = move || receiver.iter().for_each(|garbage| garbage.free());
            let spawned = thread::Builder::new().name("layer-files".into()).spawn(free);
            if let Err(error) = spawned {
                tracing::error!(%error, "cannot free the space of layers that have ended");
            }
            sender
        });
        // Fails without the thread. Then the next process frees it.
        let _ = sender.send(garbage);
    }

    /// Frees the content of a spill file.
    pub(crate) fn discard_content(&self, file: Arc<DiskFile>) {
        self.discard(Garbage::Content(file));
    }

    fn file(&self, epoch: Epoch, kind: &str) -> PathBuf {
        self.path.join(format!("layer-{}.{kind}", epoch.0))
    }

    pub(crate) fn table_path(&self, epoch: Epoch) -> PathBuf {
        self.file(epoch, "table")
    }

    fn header(&self, epoch: Epoch) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.layout.bytes as u32).to_le_bytes());
        bytes[16..].copy_from_slice(&epoch.0.to_le_bytes());
        bytes
    }

    fn table(&self, file: File) -> LayerTable {
        LayerTable { file, layout: self.layout }
    }

    /// Creates the table of an epoch. A file that is there already is of no use.
    pub(crate) fn create_table(&self, epoch: Epoch) -> io::Result<LayerTable> {
        let file = options().create(true).truncate(true).open(self.table_path(epoch))?;
        let table = self.table(file);
        table.write(&self.header(epoch), 0)?;
        Ok(table)
    }

    /// Opens the table that an earlier process left.
    pub(crate) fn open_table(&self, epoch: Epoch) -> io::Result<LayerTable> {
        let table = self.table(options().open(self.table_path(epoch))?);
        let mut header = [0; HEADER_BYTES];
        table.read_bytes(&mut header, 0)?;
        if header != self.header(epoch) {
            return Err(damaged("its header"));
        }
        Ok(table)
    }

    /// Opens or creates the spill file of an epoch. It needs no lock: what the kernel still writes for
    /// a process that was killed is the same old content that the next process would write there.
    pub(crate) fn open_spill(&self, epoch: Epoch) -> io::Result<DiskFile> {
        DiskFile::open_unlocked(&self.file(epoch, "spill"))
    }

    /// Opens the spill file that an earlier process left, which must have `len` bytes at least.
    pub(crate) fn reopen_spill(&self, epoch: Epoch, len: u64) -> io::Result<DiskFile> {
        let path = self.file(epoch, "spill");
        if fs::metadata(&path)?.len() < len {
            return Err(damaged("blocks are missing in the spill file"));
        }
        DiskFile::open_unlocked(&path)
    }

    /// Removes the files of an epoch soon. Whoever has opened them can use them further.
    pub(crate) fn remove(&self, epoch: Epoch) {
        for kind in ["table", "spill"] {
            self.discard(Garbage::File(self.file(epoch, kind)));
        }
    }

    /// Removes the files of all epochs but those that are needed. Their names are free at once,
    /// because the numbers of epochs may begin again.
    pub(crate) fn retain(&self, is_needed: impl Fn(Epoch) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(ENDED_PREFIX) {
                self.discard(Garbage::File(entry.path()));
            }
            let epoch = name.strip_prefix("layer-").and_then(|name| {
                let (epoch, kind) = name.split_once('.')?;
                let is_ours = ["table", "spill"].contains(&kind);
                epoch.parse().ok().filter(|_| is_ours).map(Epoch)
            });
            if epoch.is_some_and(|epoch| !is_needed(epoch)) {
                let id = u128::from_le_bytes(sys::random_id()?);
                let ended = self.path.join(format!("{ENDED_PREFIX}{id:032x}"));
                match fs::rename(entry.path(), &ended) {
                    // It was removed meanwhile.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    result => result?,
                }
                self.discard(Garbage::File(ended));
            }
        }
        Ok(())
    }

    /// Waits until what was discarded is free.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn wait_until_free(&self, is_free: impl Fn() -> bool) {
        let begin = std::time::Instant::now();
        while !is_free() {
            assert!(begin.elapsed().as_secs() < 20, "space of layers is not freed");
            thread::yield_now();
        }
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

    use cairn_store::{ChunkId, ChunkIndex, Geometry};

    use super::{BlockSet, ChunkEntry, Epoch, LayerDir, Layout};
    use crate::mirror::layout::Blocks;

    fn dir(chunk_size: u32) -> (tempfile::TempDir, LayerDir) {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(Geometry::new(1 << 40, chunk_size).unwrap());
        let layers = LayerDir::new(dir.path(), &layout);
        (dir, layers)
    }

    fn set(first: u64, count: u64) -> BlockSet {
        BlockSet::run(Blocks { first, count })
    }

    #[test]
    fn entries_are_read_back_as_they_were_written_for_all_chunk_sizes() {
        for chunk_size in (16..=22).map(|bits| 1 << bits) {
            let (_dir, layers) = dir(chunk_size);
            let table = layers.create_table(Epoch(7)).unwrap();
            let blocks = u64::from(chunk_size) / 4096;
            let last = ChunkIndex((1 << 40) / u64::from(chunk_size) - 1);
            let entry = ChunkEntry {
                stored: Some(Some(ChunkId::of(b"content"))),
                decided: set(0, blocks),
                spilled: set(blocks - 2, 2),
            };
            assert_eq!(table.read(last).unwrap(), ChunkEntry::default());
            table.write_blocks(last, &entry).unwrap();
            assert_eq!(table.read(last).unwrap(), ChunkEntry { stored: None, ..entry });
            table.write_stored(last, entry.stored.unwrap()).unwrap();
            table.write_stored(ChunkIndex(1), None).unwrap();
            let again = layers.open_table(Epoch(7)).unwrap();
            let mut found = Vec::new();
            let chunks = [0, 1, 2, last.0 - 1, last.0].map(ChunkIndex);
            again
                .read_all(chunks.into_iter(), |chunk, entry| {
                    assert_eq!(table.read(chunk).unwrap(), entry);
                    found.push(entry);
                    Ok(())
                })
                .unwrap();
            let hole = ChunkEntry { stored: Some(None), ..ChunkEntry::default() };
            let none = ChunkEntry::default();
            assert_eq!(found, [none, hole, none, none, entry]);
            assert_eq!(4096 % table.layout.bytes, 0, "no entry crosses a page");
        }
    }

    #[test]
    fn what_no_process_has_written_is_refused() {
        let (dir, layers) = dir(256 << 10);
        let table = layers.create_table(Epoch(7)).unwrap();
        table.file.write_all_at(&9u64.to_le_bytes(), 4096 + 32).unwrap();
        table.file.write_all_at(&1u64.to_le_bytes(), 4096 + 64 + 48).unwrap();
        table.read(ChunkIndex(0)).expect_err("an unknown kind");
        table.read(ChunkIndex(1)).expect_err("spilled, but not decided");
        table.read(ChunkIndex(2)).unwrap();
        std::fs::rename(dir.path().join("layer-7.table"), dir.path().join("layer-8.table"))
            .unwrap();
        assert!(layers.open_table(Epoch(8)).is_err(), "the table of another epoch");
        assert!(layers.open_table(Epoch(9)).is_err(), "there is none");
    }

    #[test]
    fn files_of_layers_that_have_ended_are_removed_and_no_others() {
        let (dir, layers) = dir(64 << 10);
        for epoch in 1..=3 {
            layers.create_table(Epoch(epoch)).unwrap();
            layers.open_spill(Epoch(epoch)).unwrap();
        }
        for name in ["disk", "map", "layer-x.table", "layer-9.other"] {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        layers.remove(Epoch(1));
        layers.remove(Epoch(1));
        std::fs::write(dir.path().join("ended-layer-0123"), b"").unwrap();
        layers.retain(|epoch| epoch == Epoch(3)).unwrap();
        layers.create_table(Epoch(2)).unwrap();
        let names = || {
            let files = std::fs::read_dir(dir.path()).unwrap();
            let mut names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
            names.sort();
            names
        };
        layers.wait_until_free(|| names().len() == 7);
        let expected = [
            "disk",
            "layer-2.table",
            "layer-3.spill",
            "layer-3.table",
            "layer-9.other",
            "layer-x.table",
            "map",
        ];
        assert_eq!(names(), expected);
    }
}
