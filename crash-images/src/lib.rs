//! The directories that a power cut could leave behind a program, for tests.
//!
//! ```text
//! workload under strace ──┬─► Recording ──► for each point: images ──► opened and checked
//! workload on a mount ────┘   what was asked     what was synced, and
//!     writes, syncs,          of the kernel      some of what was not
//!     names, marks
//! ```
//!
//! # What a power cut is taken to leave
//!
//! - A file's data and length are durable when `fsync` or `fdatasync` of it has returned, or, for a
//!   single write, when it was made through a descriptor with `O_DSYNC` and has returned.
//! - Of what is not durable, any part may be there: each write is there, not there, or there by *atoms*,
//!   aligned pieces of a given size, with or without the length that it gave the file. A write that is
//!   missing where a later one is there reads as zeros or as what was there before.
//! - A name that was made, changed or removed is durable when `fsync` of its directory has returned, and
//!   not with a sync of the file alone. Until then each such change is there or not, whatever its
//!   neighbours are; a rename is never there by half.
//!
//! This is weaker than what journaling file systems promise. What is durable stays as it was written:
//! rotten disks are not tried here.
//!
//! # Two recorders
//!
//! [`record`] runs a workload under `strace`, on a file system of its choice. It asks the kernel from one
//! thread, through calls that `strace` shows: no shared mappings and no rings. The one exception is the `-shm`
//! file of an SQLite database, which holds nothing that is meant to last and is left out of the images.
//!
//! [`Mounted`] is a file system that records. Any number of processes and threads use it, with rings and
//! direct I/O too, and they may be killed and started again meanwhile. Only shared mappings are refused. It needs
//! `/dev/fuse`.

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

/// How images are made.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// What the random choices follow from.
    pub seed: u64,
    /// Random images for each point, beside the two that keep or lose all that is not durable.
    pub images: u32,
    /// Bytes that are written all or not at all.
    pub atom: usize,
}

/// Cuts the power at each point of a recording. `CAIRN_SEED` repeats the random choices of a run,
/// `CAIRN_SOAK_SECONDS` goes on with others for that long.
///
/// # Panics
///
/// If an image is refused.
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

/// Kills the recorded process before each sync between two marks, lets `next` take up, and cuts the power at
/// each point of that.
///
/// # Panics
///
/// If an image is refused.
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

/// A checker that finds nothing proves nothing: it must miss the syncs of a file that are left out.
///
/// # Panics
///
/// If it does not.
pub fn leave_out_syncs(
    recording: &Recording,
    name: &str,
    draw: Draw,
    check: impl Fn(&Path, &[String]) + Sync,
) {
    let without = recording.without_syncs(|path| path == Path::new(name));
    match check_all(&without, draw, check) {
        Ok(images) => panic!("{images} images without syncs of '{name}', and nothing is wrong"),
        Err(violation) => println!("without syncs of '{name}': {violation}"),
    }
}

/// An image that a check refused.
#[derive(Debug)]
pub struct Violation {
    /// The operations before the power cut.
    pub point: usize,
    /// The last of them.
    pub after: String,
    /// What became of that which was not durable.
    pub losses: String,
    /// What the check said.
    pub reason: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { point, after, losses, reason } = self;
        write!(f, "a power cut at {point}, after {after}, that left {losses}: {reason}")
    }
}

/// An image, and what the workload had said before it.
struct Case {
    image: Image,
    marks: usize,
    violation: Violation,
}

/// Checks the images of every point. Returns how many there were, without those that are equal.
///
/// `check` gets the directory of an image, in which it may do anything, and the marks before the power
/// cut. It refuses the image by a panic, which is what assertions do and what a program must not.
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
        let place = scratch().expect("a directory for images");
        for number in 0.. {
            let received = receiver.lock().expect("nobody panics with the queue locked").recv();
            let Ok(Case { image, marks: told, violation }) = received else { break };
            if stop.load(Ordering::Relaxed) {
                continue;
            }
            let root = place.path().join(number.to_string());
            image.write_to(&root).expect("writing an image");
            let checked = catch_unwind(AssertUnwindSafe(|| check(&root, &marks[..told])));
            images.fetch_add(1, Ordering::Relaxed);
            if let Err(panic) = checked {
                let reason = message(&*panic);
                stop.store(true, Ordering::Relaxed);
                let mut found = found.lock().expect("nobody panics with the result locked");
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
    match found.into_inner().expect("the workers are gone") {
        Some(violation) => Err(violation),
        None => Ok(images.into_inner()),
    }
}

/// The images of every point, each once for what had been said before it.
fn cases(recording: &Recording, draw: Draw) -> impl Iterator<Item = Case> {
    let mut disk = Disk::default();
    let mut marks = 0;
    let mut seen = HashSet::new();
    let mut rng = Rng::new(draw.seed);
    let tried = recording.is_tried(&mut rng);
    let points = recording.operations().iter().zip(tried).enumerate();
    points.flat_map(move |(point, (operation, is_tried))| {
        marks += usize::from(operation.is_mark());
        disk.apply(operation);
        let draws = if is_tried { draw.images + 2 } else { 0 };
        // Where there are few, the next point has others.
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

/// A directory for many images: in memory, if direct I/O works there.
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
    text.unwrap_or("it panics").to_owned()
}
