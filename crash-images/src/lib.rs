//! Builds the directories that a power cut could leave, for tests.
//!
//! ```text
//! workload under strace ──┬─► Recording ──► for each point: images ──► opened and checked
//! workload on a mount ────┘   the operations     all synced changes,
//!     writes, syncs,          in their order     and some of the others
//!     names, marks
//! ```
//!
//! # The model of a power cut
//!
//! - The data and the length of a file are durable after `fsync` or `fdatasync` of the file has
//!   returned. A single write through a descriptor with `O_DSYNC` is durable after it has returned.
//! - Changes that are not durable may survive in part. Each write survives, is lost, or survives by
//!   *atoms*: aligned pieces of a given size. The length that it gave the file survives or not. If
//!   a write is lost and a later one survives, the range of the lost write reads as zeros or as its
//!   earlier content.
//! - The creation, change or removal of a name is durable after `fsync` of its directory has
//!   returned. A sync of the file is not enough. Until then each such change survives or not,
//!   independent of the others. A rename never survives by half.
//!
//! This is weaker than the guarantees of journaling file systems. Durable data stays as it was
//! written: the images contain no bit errors.
//!
//! # Two recorders
//!
//! [`record`] runs a workload under `strace`, on any file system. The workload must use one thread
//! and system calls that `strace` shows: no shared mappings and no io_uring. The `-shm` file of an
//! SQLite database is an exception. It holds no persistent data and is not part of the images.
//!
//! [`Mounted`] is a file system that records. Any number of processes and threads may use it, with
//! io_uring and direct I/O too. They may be killed and started again during the recording. Only
//! shared mappings are refused. It needs `/dev/fuse`.

mod disk;
mod fuse;
mod memory;
mod operation;
mod recording;
mod sparse;
mod trace;

use std::any::Any;
use std::collections::HashSet;
use std::env;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use seeded_rng::Rng;
use tempfile::TempDir;

use self::disk::{Disk, Image, Losses};
pub use self::fuse::Mounted;
pub use self::recording::{Recording, record};
pub use self::trace::{mark, recorded_root};

/// How images are drawn.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// The seed of the random choices.
    pub seed: u64,
    /// The number of random images for each point. Two more images keep and lose all changes that
    /// are not durable.
    pub images: u32,
    /// The number of bytes that are written completely or not at all.
    pub atom: usize,
}

/// Checks the images of a power cut at each point of a recording. `CAIRN_SEED` repeats the random
/// choices of a run. With `CAIRN_SOAK_SECONDS` the check is repeated with other seeds for that
/// long.
///
/// # Panics
///
/// If `check` refuses an image.
pub fn cut_the_power(
    recording: &Recording,
    images: u32,
    atom: usize,
    check: impl Fn(&Path, &[String]) + Sync,
) {
    let number = |name: &str| env::var(name).ok().map(|text| text.parse().expect("a number"));
    let soak = Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let start = Instant::now();
    for seed in number("CAIRN_SEED").unwrap_or(1).. {
        println!("CAIRN_SEED={seed}");
        match check_all(recording, Draw { seed, images, atom }, &check) {
            Ok(images) => println!("{} points, {images} images", recording.points()),
            Err(violation) => panic!("CAIRN_SEED={seed}: {violation}"),
        }
        if start.elapsed() >= soak {
            break;
        }
    }
}

/// For each sync between two marks: kills the recorded process before the sync, runs `next` on the
/// files that it left, and checks the images of a power cut at each point of `next`.
///
/// # Panics
///
/// If `check` refuses an image.
pub fn kill_and_cut_the_power(
    recording: &Recording,
    (from, to): (&str, &str),
    next: &Command,
    draw: Draw,
    check: impl Fn(&Path, &[String]) + Sync,
) {
    for point in recording.before_syncs(from, to) {
        let both = recording.killed(point, next);
        match check_all(&both, draw, &check) {
            Ok(images) => println!("killed at {point}: {} points, {images} images", both.points()),
            Err(violation) => panic!("killed at {point}: {violation}"),
        }
    }
}

/// Checks that `check` finds a planted mistake: the syncs of the file `name` are left out. A check
/// that never refuses an image proves nothing.
///
/// # Panics
///
/// If `check` refuses no image.
pub fn leave_out_syncs(
    recording: &Recording,
    name: &str,
    draw: Draw,
    check: impl Fn(&Path, &[String]) + Sync,
) {
    let without = recording.without_syncs(|path| path == Path::new(name));
    match check_all(&without, draw, check) {
        Ok(images) => {
            panic!("{images} images without syncs of '{name}', and the check refuses none")
        }
        Err(violation) => println!("without syncs of '{name}': {violation}"),
    }
}

/// An image that a check refused.
#[derive(Debug)]
pub struct Violation {
    /// The number of operations before the power cut.
    pub point: usize,
    /// The last operation before the power cut.
    pub after: String,
    /// Which changes survived the power cut.
    pub losses: String,
    /// The panic message of the check.
    pub reason: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { point, after, losses, reason } = self;
        write!(f, "a power cut at point {point}, after {after}, that left {losses}: {reason}")
    }
}

/// An image, and the number of marks before it.
struct Case {
    image: Image,
    marks: usize,
    violation: Violation,
}

/// Checks the images of every point. Returns the number of different images.
///
/// `check` gets the directory of an image, which it may change, and the marks before the power cut.
/// It refuses the image with a panic, for example of a failed assertion. A panic of the code under
/// test counts too.
pub fn check_all(
    recording: &Recording,
    draw: Draw,
    check: impl Fn(&Path, &[String]) + Sync,
) -> Result<u64, Violation> {
    let (sender, receiver) = sync_channel::<Case>(4);
    let receiver = Mutex::new(receiver);
    let (found, images) = (Mutex::new(None), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    let marks = recording.marks();
    let work = || {
        let scratch = scratch().expect("creating a directory for images");
        for number in 0.. {
            let received = receiver.lock().expect("no thread panics with the queue locked").recv();
            let Ok(Case { image, marks: count, violation }) = received else { break };
            if stop.load(Ordering::Relaxed) {
                continue;
            }
            let root = scratch.path().join(number.to_string());
            image.write_to(&root).expect("writing an image");
            let checked = catch_unwind(AssertUnwindSafe(|| check(&root, &marks[..count])));
            images.fetch_add(1, Ordering::Relaxed);
            if let Err(panic) = checked {
                let reason = message(&*panic);
                stop.store(true, Ordering::Relaxed);
                let mut found = found.lock().expect("no thread panics with the result locked");
                found.get_or_insert(Violation { reason, ..violation });
            }
            let _ = fs::remove_dir_all(&root);
        }
    };
    thread::scope(|scope| {
        let workers = thread::available_parallelism().map_or(1, |count| count.get().min(8));
        for _ in 0..workers {
            scope.spawn(work);
        }
        for case in cases(recording, draw) {
            if stop.load(Ordering::Relaxed) || sender.send(case).is_err() {
                break;
            }
        }
        drop(sender);
    });
    match found.into_inner().expect("no worker panics") {
        Some(violation) => Err(violation),
        None => Ok(images.into_inner()),
    }
}

/// The images of every point. Equal images with the same number of marks occur once.
fn cases(recording: &Recording, draw: Draw) -> impl Iterator<Item = Case> {
    let mut disk = Disk::default();
    let mut marks = 0;
    let mut seen = HashSet::new();
    let mut rng = Rng::new(draw.seed);
    let selected = recording.select_points(&mut rng);
    let points = recording.operations().iter().zip(selected).enumerate();
    points.flat_map(move |(point, (operation, is_selected))| {
        marks += usize::from(operation.is_mark());
        disk.apply(operation);
        let draws = if is_selected { draw.images + 2 } else { 0 };
        // The kinds of losses depend on the point, so that all of them occur even with few images
        // for each point.
        let random = (point..).take(draw.images as usize).map(|n| {
            let share = [20, 50, 80, 95][n / 2 % 4];
            if n % 2 == 0 { Losses::Torn(share) } else { Losses::Whole(share) }
        });
        let mut cases = Vec::new();
        let all = [Losses::Nothing, Losses::Everything].into_iter().chain(random);
        for losses in all.take(draws as usize) {
            let image = disk.image(losses, draw.atom, &mut rng);
            if seen.insert((image.fingerprint(), marks)) {
                let (after, losses) = (operation.to_string(), losses.to_string());
                let violation =
                    Violation { point: point + 1, after, losses, reason: String::new() };
                cases.push(Case { image, marks, violation });
            }
        }
        cases
    })
}

/// A directory for many images. It is in memory if direct I/O works there.
fn scratch() -> io::Result<TempDir> {
    let memory = TempDir::new_in("/dev/shm").and_then(|dir| {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).custom_flags(libc::O_DIRECT);
        options.open(dir.path().join("probe")).map(|_| dir)
    });
    memory.or_else(|_| TempDir::new())
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}
