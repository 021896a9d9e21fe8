//! `export`: writes a snapshot to a raw disk file.
//!
//! The file gets its name only when it is complete. Every chunk is verified against its id.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::thread;

use cairn_store::{
    ChunkId, ChunkIndex, Chunks, Geometry, Repository, Result, Snapshot, SnapshotRef, is_zero,
};

use crate::args::Style;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::images::print_name;
use crate::progress::Progress;

/// The unit in which zeros become holes, in bytes: a block of the file system.
const BLOCK: usize = 4096;

pub(crate) fn export(
    repository: &Repository,
    name: &SnapshotRef,
    path: &Path,
    force: bool,
    style: Style,
) -> Outcome {
    let doing = || format!("exporting {name} to {}", path.display());
    let snapshot = repository.catalog().resolve(name).doing(doing)?;
    snapshot.require_content().doing(doing)?;
    if path == Path::new("-") {
        return to_stdout(repository, &snapshot, doing);
    }
    check_target(path, force, doing)?;
    let temp = TempFile::beside(path).doing(doing)?;
    to_file(repository, &snapshot, &temp.file, doing)?;
    temp.file.sync_all().doing(doing)?;
    temp.place(path, force).doing(doing)?;
    if style.json { print_name(&snapshot, style) } else { Ok(()) }
}

/// Refuses a target that cannot work, before hours of copying.
fn check_target(path: &Path, force: bool, doing: impl Fn() -> String) -> Outcome {
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => {
            let why = "it is not a regular file; export to - and redirect standard output to it";
            Err(Failure::new(Exit::Usage, doing(), why))
        }
        Ok(_) if !force => {
            let why = "the file exists; use --force to replace it";
            Err(Failure::new(Exit::Conflict, doing(), why))
        }
        _ => Ok(()),
    }
}

/// Writes the chunks to the file, with one thread for each core. Blocks of zeros become holes.
fn to_file(
    repository: &Repository,
    snapshot: &Snapshot,
    file: &File,
    doing: impl Fn() -> String + Sync,
) -> Outcome {
    let geometry = snapshot.geometry;
    file.set_len(geometry.size()).doing(&doing)?;
    let progress = Progress::new(geometry.size());
    let chunks = Mutex::new(Some(repository.chunks(&snapshot.root, geometry)));
    let work = || -> Outcome {
        let mut buf = vec![0; geometry.chunk_size() as usize];
        while let Some(chunk) = next(&chunks) {
            let (index, id) = chunk.doing(&doing)?;
            repository.read_chunk(&id, &mut buf).doing(&doing)?;
            write_data(file, geometry, index, &buf).doing(&doing)?;
            progress.set(geometry.offset_of(index));
        }
        Ok(())
    };
    // When a worker fails, the others find an empty queue and end.
    let work = || work().inspect_err(|_| *lock(&chunks) = None);
    thread::scope(|scope| {
        let workers = thread::available_parallelism().map_or(1, usize::from);
        let workers = (0..workers).map(|_| scope.spawn(work)).collect::<Vec<_>>();
        let mut outcomes =
            workers.into_iter().map(|worker| worker.join().expect("no worker panics"));
        outcomes.try_for_each(|outcome| outcome)
    })
}

/// The remaining chunks, or `None` after a worker has failed.
type Queue = Mutex<Option<Chunks>>;

fn lock(queue: &Queue) -> MutexGuard<'_, Option<Chunks>> {
    queue.lock().expect("no worker panics while it takes a chunk")
}

fn next(queue: &Queue) -> Option<Result<(ChunkIndex, ChunkId)>> {
    lock(queue).as_mut()?.next()
}

/// Writes the blocks of a chunk that are not all zeros.
fn write_data(file: &File, geometry: Geometry, index: ChunkIndex, chunk: &[u8]) -> io::Result<()> {
    let inside = &chunk[..geometry.len_of(index)];
    let base = geometry.offset_of(index);
    let mut at = 0;
    for run in inside.chunks(BLOCK).collect::<Vec<_>>().chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let len = run.iter().map(|block| block.len()).sum::<usize>();
        if !is_zero(run[0]) {
            file.write_all_at(&inside[at..at + len], base + at as u64)?;
        }
        at += len;
    }
    Ok(())
}

/// Writes the whole disk in order, including zeros.
fn to_stdout(repository: &Repository, snapshot: &Snapshot, doing: impl Fn() -> String) -> Outcome {
    let geometry = snapshot.geometry;
    // The handle of the standard library would search the data for line ends.
    let mut out = File::from(io::stdout().as_fd().try_clone_to_owned().doing(&doing)?);
    let mut buf = vec![0; geometry.chunk_size() as usize];
    let zeros = buf.clone();
    let mut next = ChunkIndex(0);
    for chunk in repository.chunks(&snapshot.root, geometry) {
        let (index, id) = chunk.doing(&doing)?;
        write_zeros(&mut out, geometry, next..index, &zeros).doing(&doing)?;
        repository.read_chunk(&id, &mut buf).doing(&doing)?;
        out.write_all(&buf[..geometry.len_of(index)]).doing(&doing)?;
        next = ChunkIndex(index.0 + 1);
    }
    let end = ChunkIndex(geometry.chunk_count());
    write_zeros(&mut out, geometry, next..end, &zeros).doing(&doing)
}

fn write_zeros(
    out: &mut impl Write,
    geometry: Geometry,
    holes: std::ops::Range<ChunkIndex>,
    zeros: &[u8],
) -> io::Result<()> {
    (holes.start.0..holes.end.0)
        .try_for_each(|index| out.write_all(&zeros[..geometry.len_of(ChunkIndex(index))]))
}

/// A temporary file in the directory of the target. It is removed when this value is dropped.
struct TempFile {
    file: File,
    path: PathBuf,
}

impl TempFile {
    fn beside(target: &Path) -> io::Result<Self> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
        let mut number = std::process::id();
        loop {
            let path = target.with_file_name(format!(".{name}.cairn-{number}"));
            match File::create_new(&path) {
                // In a container the ids of processes recur, and a killed export leaves its file.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    number = number.wrapping_add(1);
                }
                file => return Ok(Self { file: file?, path }),
            }
        }
    }

    /// Gives the file the name of the target, durably. Without `force` it does not replace a file that
    /// has appeared in the meantime.
    fn place(&self, target: &Path, force: bool) -> io::Result<()> {
        match force {
            true => fs::rename(&self.path, target)?,
            false => match fs::hard_link(&self.path, target) {
                // Some file systems do not support hard links.
                Err(_) if !fs::exists(target)? => fs::rename(&self.path, target)?,
                linked => linked?,
            },
        }
        let directory = target.parent().filter(|path| !path.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::TempFile;

    /// The ids of processes recur in containers.
    #[test]
    fn the_temporary_file_of_a_killed_export_does_not_prevent_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("disk.raw");
        let left = dir.path().join(format!(".disk.raw.cairn-{}", std::process::id()));
        fs::write(&left, "a part").unwrap();
        let temp = TempFile::beside(&target).unwrap();
        temp.place(&target, false).unwrap();
        drop(temp);
        assert!(target.exists() && left.exists());
    }
}
