//! `import`: creates an image from a disk: a raw one, or one that `qemu-img` converts first.
//!
//! | file | holds |
//! |---|---|
//! | `source` | what is imported: a file, a stream, or the result of a conversion |
//! | `qemu_img` | the conversion |
//!
//! One thread reads the file and hands out chunks. Several threads hash and store them. The main
//! thread builds the tree from their results. The image is published last, so an interrupted import
//! leaves no image.

mod qemu_img;
mod source;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use cairn_store::{
    ChunkId, ChunkIndex, Error as StoreError, ErrorKind, Geometry, ImageName, MAX_SIZE, PutChunk,
    Repository, ReservedSpace, Root, SECTOR_SIZE, is_zero,
};

use self::source::Source;
use crate::args::Style;
use crate::buffer::AlignedBuffer;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::image_format::Format;
use crate::images::{geometry, print_name, print_note};
use crate::progress::Progress;
use crate::sparse::next_data;

/// How many changes are collected before they go into the tree. It bounds the memory.
const TREE_BATCH: usize = 1 << 16;

/// A chunk to store.
enum Job {
    /// A chunk that the worker reads from the file.
    At(ChunkIndex),
    /// A chunk that has been read.
    Read(ChunkIndex, Vec<u8>),
}

type Stored = Outcome<Option<(ChunkIndex, PutChunk)>>;

pub(crate) struct Options {
    pub(crate) chunk_size: u64,
    /// The format of the source; `None` to recognise it.
    pub(crate) format: Option<Format>,
    /// What is printed when the source is known to be usable.
    pub(crate) note: Option<String>,
    pub(crate) style: Style,
}

pub(crate) fn import(
    repository: &Repository,
    path: &Path,
    image: &ImageName,
    options: &Options,
) -> Outcome {
    let &Options { chunk_size, style, .. } = options;
    let doing = || format!("importing {} to image '{image}'", path.display());
    let start = Instant::now();
    match repository.catalog().image(image) {
        Ok(_) => {
            let name = image.to_string();
            return Err(StoreError::ImageExists { name }).doing(doing);
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).doing(doing),
    }
    // Whether the chunk size is valid does not depend on the size of the disk, which a stream tells
    // last.
    geometry(SECTOR_SIZE, chunk_size)?;

    let mut source = Source::open(path, options, &doing)?;
    let commit = repository.begin_commit().doing(doing)?;
    let mut import =
        Import { repository, chunk_size, options, doing: &doing, tree: Tree::default() };
    let geometry = match &mut source {
        Source::Stream(stream) => import.stream(stream)?,
        Source::File(file) => import.file(file)?,
    };
    let Tree { root, data_bytes, stored_bytes, tree_bytes, .. } = import.tree;
    let snapshot = commit
        .publish_image(image, geometry, &root, stored_bytes + tree_bytes, data_bytes)
        .doing(doing)?;

    let size = |bytes| style.size(bytes);
    if !style.json {
        eprintln!(
            "size {}, data {}, stored {}, deduplicated {}, sent {}, {:.1} s",
            size(geometry.size()),
            size(data_bytes),
            size(stored_bytes + tree_bytes),
            // In a cluster this is known only after the flush.
            size(snapshot.saved_bytes.max(data_bytes - stored_bytes)),
            size(snapshot.sent_bytes),
            start.elapsed().as_secs_f64()
        );
    }
    print_name(&snapshot, style)
}

struct Import<'a, F> {
    repository: &'a Repository,
    chunk_size: u64,
    options: &'a Options,
    doing: &'a F,
    tree: Tree,
}

/// The tree built so far.
#[derive(Default)]
struct Tree {
    root: Root,
    changes: BTreeMap<ChunkIndex, Option<ChunkId>>,
    /// Bytes of the chunks that are not all zeros.
    data_bytes: u64,
    /// The part of `data_bytes` that the repository did not have.
    stored_bytes: u64,
    tree_bytes: u64,
}

impl<F: Fn() -> String + Sync> Import<'_, F> {
    /// Imports a file of known size. Reads only the ranges that have data.
    fn file(&mut self, mut file: &File) -> Outcome<Geometry> {
        // Seeking finds the size of a block device, too.
        let len = file.seek(SeekFrom::End(0)).doing(self.doing)?;
        let geometry = self.geometry(len)?;
        self.print_note();
        self.print_rounding(len);
        let progress = Progress::new(len);
        let doing = self.doing;
        let _space = self.reserve(file, len, geometry)?;
        self.store(Some((file, len)), Some(geometry), |jobs| {
            let mut next = ChunkIndex(0);
            while let Some(chunks) = next_chunks(file, len, geometry, next).doing(doing)? {
                next = ChunkIndex(chunks.end);
                for index in chunks {
                    progress.set(geometry.offset_of(ChunkIndex(index)));
                    if jobs.send(Job::At(ChunkIndex(index))).is_err() {
                        return Ok(());
                    }
                }
            }
            Ok(())
        })?;
        Ok(geometry)
    }

    /// Reserves space for everything that the file may need. The import needs less if the
    /// repository already has some of the data. So it continues without a reservation too, and may
    /// then fail late.
    fn reserve(&self, file: &File, len: u64, geometry: Geometry) -> Outcome<Option<ReservedSpace>> {
        let (mut next, mut chunks) = (ChunkIndex(0), 0);
        while let Some(found) = next_chunks(file, len, geometry, next).doing(self.doing)? {
            chunks += found.end - found.start;
            next = ChunkIndex(found.end);
        }
        match self.repository.reserve_space(chunks * self.chunk_size) {
            Ok(space) => Ok(Some(space)),
            Err(error @ StoreError::NoRoom { .. }) => {
                eprintln!(
                    "warning: {error}; continuing, because the repository may already have much \
                     of the data"
                );
                Ok(None)
            }
            Err(error) => Err(error).doing(self.doing),
        }
    }

    /// Imports a stream, whose size is known only at its end.
    fn stream(&mut self, mut stream: impl Read + Send) -> Outcome<Geometry> {
        self.print_note();
        let mut len = 0;
        let (doing, chunk_size) = (self.doing, self.chunk_size);
        let progress = Progress::new(0);
        self.store(None, None, |jobs| {
            for index in 0.. {
                let mut chunk = Vec::with_capacity(chunk_size as usize);
                let read = stream.by_ref().take(chunk_size).read_to_end(&mut chunk).doing(doing)?;
                len += read as u64;
                progress.set(len);
                // A stream that is larger than any disk is refused without reading it to its end.
                let end = (read as u64) < chunk_size || len > MAX_SIZE;
                chunk.resize(chunk_size as usize, 0);
                if (read > 0 && jobs.send(Job::Read(ChunkIndex(index), chunk)).is_err()) || end {
                    break;
                }
            }
            Ok(())
        })?;
        drop(progress);
        let geometry = self.geometry(len)?;
        self.print_rounding(len);
        self.grow(geometry)?;
        Ok(geometry)
    }

    fn geometry(&self, len: u64) -> Outcome<Geometry> {
        if len == 0 {
            return Err(Failure::new(Exit::Usage, (self.doing)(), "there is nothing to import"));
        }
        geometry(len.next_multiple_of(SECTOR_SIZE), self.chunk_size)
    }

    fn print_note(&self) {
        print_note(self.options.note.as_deref(), self.options.style);
    }

    /// Says that the image is larger than its source, if it is.
    fn print_rounding(&self, len: u64) {
        let size = len.next_multiple_of(SECTOR_SIZE);
        let note = format!(
            "note: the source has {len} bytes, and the image {size}: its size is rounded up to a \
             whole number of sectors of {SECTOR_SIZE} bytes"
        );
        print_note((size > len).then_some(&*note), self.options.style);
    }

    /// Stores the chunks that `feed` sends, on all cores. If the geometry is known, the tree grows
    /// in the meantime.
    fn store(
        &mut self,
        file: Option<(&File, u64)>,
        geometry: Option<Geometry>,
        feed: impl FnOnce(SyncSender<Job>) -> Outcome + Send,
    ) -> Outcome {
        // More workers than cores: a worker waits for the disk about as long as it hashes, and
        // longer while a group of chunks is synced.
        let workers = 4 * thread::available_parallelism().map_or(1, usize::from);
        let (repository, chunk_size, doing) =
            (self.repository, self.chunk_size as usize, self.doing);
        let (jobs, queue) = sync_channel(workers);
        let (reports, stored) = sync_channel(workers);
        let queue = Arc::new(Mutex::new(queue));
        thread::scope(|scope| {
            for _ in 0..workers {
                let (queue, reports) = (Arc::clone(&queue), reports.clone());
                scope.spawn(move || {
                    let mut buf = AlignedBuffer::new(chunk_size);
                    while let Some(job) = next_job(&queue) {
                        let done = store_chunk(repository, job, file, buf.bytes(), doing);
                        let failed = done.is_err();
                        if reports.send(done).is_err() || failed {
                            break;
                        }
                    }
                });
            }
            drop((queue, reports));
            let feeder = scope.spawn(move || feed(jobs));
            let collected = self.collect(stored, geometry);
            let fed = feeder.join().expect("the feeder does not panic");
            collected.and(fed)
        })
    }

    /// Receives the results of the workers. If it returns early, the workers find their channel
    /// closed and end.
    fn collect(&mut self, stored: Receiver<Stored>, geometry: Option<Geometry>) -> Outcome {
        for report in stored {
            let Some((index, put)) = report? else { continue };
            self.tree.data_bytes += self.chunk_size;
            self.tree.stored_bytes += put.new_bytes;
            self.tree.changes.insert(index, Some(put.id));
            if let Some(geometry) = geometry.filter(|_| self.tree.changes.len() >= TREE_BATCH) {
                self.grow(geometry)?;
            }
        }
        geometry.map_or(Ok(()), |geometry| self.grow(geometry))
    }

    fn grow(&mut self, geometry: Geometry) -> Outcome {
        let Tree { root, changes, tree_bytes, .. } = &mut self.tree;
        let update = self.repository.commit_tree(root, geometry, changes).doing(self.doing)?;
        *root = update.root;
        *tree_bytes += update.new_bytes;
        changes.clear();
        Ok(())
    }
}

/// The next range of chunks with data in the file, at or after `from`.
fn next_chunks(
    file: &File,
    len: u64,
    geometry: Geometry,
    from: ChunkIndex,
) -> io::Result<Option<Range<u64>>> {
    let data = next_data(file, geometry.offset_of(from), len)?;
    Ok(data.map(|data| {
        let (first, last) = (geometry.chunk_of(data.start), geometry.chunk_of(data.end - 1));
        first.max(from).0..last.0 + 1
    }))
}

fn next_job(queue: &Mutex<Receiver<Job>>) -> Option<Job> {
    queue.lock().expect("no worker panics while it takes a job").recv().ok()
}

/// Stores a chunk, unless it is all zeros.
fn store_chunk(
    repository: &Repository,
    job: Job,
    file: Option<(&File, u64)>,
    buf: &mut [u8],
    doing: impl Fn() -> String,
) -> Stored {
    let index = match job {
        Job::Read(index, chunk) => {
            buf.copy_from_slice(&chunk);
            index
        }
        Job::At(index) => {
            let (file, len) = file.expect("only a file is read by offset");
            let offset = index.0 * buf.len() as u64;
            let inside =
                usize::try_from(len - offset).map_or(buf.len(), |rest| rest.min(buf.len()));
            file.read_exact_at(&mut buf[..inside], offset).doing(&doing)?;
            buf[inside..].fill(0);
            index
        }
    };
    if is_zero(buf) {
        return Ok(None);
    }
    Ok(Some((index, repository.put_chunk(buf).doing(&doing)?)))
}
