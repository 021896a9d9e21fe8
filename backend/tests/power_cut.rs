//! The power is cut while the real process serves a guest, and the mirror that is left is served
//! again.
//!
//! ```text
//! guest ──► cairn-blk, killed now and then ──► mirror, recorded ──► for some points: images
//!                     │                                                     │
//!                     └──► repository, copied now and then ─────────► cairn-blk ──► read, checkpoint, export
//! ```
//!
//! The mirror is in a file system that records its operations (`crash_images` has the model). So
//! the recording also has the writes of the rings, and the operations of a process that takes over
//! the mirror of a killed one. An image is opened as after the death of the host: without the live
//! directory.
//!
//! The repository is on another machine, so to say: it does not die with the host, and a cut at
//! some point leaves there what was published until then, be the mirror ever so far behind. It is
//! looked at every few milliseconds, and copied when something was published since. A point between
//! two looks with the same result has that. If one snapshot was published between them, it may have
//! been there or not, and the image must go with one of the two. If there were more, nobody knows
//! what to ask for, and nothing is asked.
//!
//! `CAIRN_SEED` repeats the choices of a run, but not its timing. `CAIRN_SOAK_SECONDS` runs further
//! ones for that long.

mod outage;
mod support;
mod survivor;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use crash_images::{Draw, Recording, check_all, leave_out_syncs};
use outage::{
    FIRST, Look, MIRROR, Run, SECTORS, START, WINDOW, address, check_window, copy, export, run,
};
use support::backend::{Backend, IMAGE, Options};
use support::device::{Device, Shape};
use support::rng::{Repeat, number_from_env};
use survivor::{BLOCK, SECTOR};

/// How an image's disk is used.
const SHAPE: Shape = Shape { queues: 1, depth: 1, longest: WINDOW, read_only: false };

/// What the guest knew when the power was cut.
struct Known {
    /// For each sector the version that was sent last, the one that was answered last, and the
    /// oldest one that must be durable.
    sent: Vec<u32>,
    acked: Vec<u32>,
    durable: Vec<u32>,
    stable: BTreeSet<u64>,
    /// How often the repository had been observed.
    looks: usize,
}

impl Known {
    fn from(marks: &[String]) -> Known {
        let all = || vec![FIRST; SECTORS];
        let mut known =
            Known { sent: all(), acked: all(), durable: all(), stable: BTreeSet::new(), looks: 0 };
        // What was answered when each flush was sent.
        let mut flushing = HashMap::new();
        for mark in marks {
            let (word, numbers) = mark.split_once(' ').unwrap_or((mark, ""));
            let numbers: Vec<u64> =
                numbers.split(' ').filter_map(|text| text.parse().ok()).collect();
            let sectors = |numbers: &[u64]| numbers[0] as usize..numbers[1] as usize;
            match word {
                "writing" => known.sent[sectors(&numbers)].fill(numbers[2] as u32),
                "written" => known.acked[sectors(&numbers)].fill(numbers[2] as u32),
                "flushing" => drop(flushing.insert(numbers[0], known.acked.clone())),
                "flushed" => {
                    let flushed: &Vec<u32> = &flushing[&numbers[0]];
                    for (durable, flushed) in known.durable.iter_mut().zip(flushed) {
                        *durable = *flushed.max(durable);
                    }
                }
                "stable" => drop(known.stable.insert(numbers[0])),
                "looked" => known.looks += 1,
                "stopped" => known.durable.clone_from(&known.acked),
                "serving" | "killed" | "taken" => {}
                _ => panic!("'{mark}' was said"),
            }
        }
        known
    }
}

/// Checks an image with each state that the repository may have had.
fn check(run: &Run, root: &Path, marks: &[String]) {
    let known = Known::from(marks);
    let before = &run.looks[known.looks.saturating_sub(1)];
    let after = &run.looks[known.looks];
    match after.stable.len() - before.stable.len() {
        0 => return check_with(run, &known, after, root),
        1 => {}
        _ => return,
    }
    let (mirror, spare) = (root.join(MIRROR), root.join("spare"));
    copy(&mirror, &spare);
    if catch_unwind(AssertUnwindSafe(|| check_with(run, &known, before, root))).is_err() {
        println!("not with what was published before");
        for used in [&mirror, &root.join("repository"), &root.join("live")] {
            let _ = fs::remove_dir_all(used);
        }
        fs::rename(spare, mirror).expect("take the image again");
        check_with(run, &known, after, root);
    }
}

/// Serves an image with a repository, and checks what the guest would find.
fn check_with(run: &Run, known: &Known, look: &Look, root: &Path) {
    let store = root.join("repository");
    copy(&look.copy, &store);
    let options = Options {
        store: address(&store),
        image: IMAGE.into(),
        mirror: root.join(MIRROR),
        live: root.join("live"),
        socket: root.join("s"),
        control: root.join("c"),
        vsock: root.join("v"),
        queues: 1,
        extra: Vec::new(),
        without_socket_path: false,
    };
    let backend = Backend::start(&options);
    let mut device = backend.device(SHAPE);
    let window = device.queues[0].read(START as u64, WINDOW).expect("read");
    check_window(&window, &known.durable, &known.sent);
    // Everything that differs from the parent is in the next checkpoint.
    let number = backend.control().stable_checkpoint();
    assert!(export(&options.store, number) == window, "@{number} is not what the guest reads");
    for number in &known.stable {
        assert!(export(&options.store, *number) == run.snapshots[number], "@{number} has changed");
    }
    goes_on(backend, device, window);
}

/// The guest writes, and the power is cut again.
fn goes_on(backend: Backend, mut device: Device, mut window: Vec<u8>) {
    let at = WINDOW / 2 - BLOCK / 2;
    window[at..at + BLOCK].fill(0xee);
    device.queues[0].write((START + at) as u64, &[0xee; BLOCK]).expect("write");
    device.queues[0].flush().expect("flush");
    drop(device);
    let options = backend.options.clone();
    backend.kill_with_host();
    let backend = Backend::start(&options);
    let mut device = backend.device(SHAPE);
    let found = device.queues[0].read(START as u64, WINDOW).expect("read");
    assert!(found == window, "the disk after one more power cut");
    drop(device);
    backend.kill();
}

/// The unit in which a disk writes.
const ATOM: usize = SECTOR;

fn draw(seed: u64) -> Draw {
    Draw { seed, images: 2, atom: ATOM }
}

/// Opens images of a part of a run. Returns their number.
fn cut_the_power(run: &Run, recording: Recording, seed: u64) -> u64 {
    check_all(&recording, draw(seed), |root, marks| check(run, root, marks))
        .unwrap_or_else(|violation| panic!("{violation}"))
}

#[test]
fn a_power_cut_leaves_what_was_flushed_and_a_mirror_that_goes_on() {
    const ROUNDS: usize = 4;
    let start = Instant::now();
    let soak = Duration::from_secs(number_from_env("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let first = number_from_env("CAIRN_SEED").unwrap_or(1);
    for seed in first.. {
        if seed >= first + 2 && start.elapsed() >= soak {
            break;
        }
        println!("CAIRN_SEED={seed}");
        let _repeat = Repeat(seed);
        let run = run(seed, ROUNDS);
        let mut images = cut_the_power(&run, run.recording.clone().sampled(40), seed);
        // A process that takes over does few operations, which are rarely drawn.
        for kill in 1..ROUNDS {
            let recording = run.recording.clone().until(&format!("taken up {kill}"));
            let recording = recording.after(&format!("killed {kill}"));
            images += cut_the_power(&run, recording.sampled(10), seed);
        }
        println!("{} points, {images} images, {:?}", run.recording.points(), start.elapsed());
    }
}

#[test]
fn a_power_cut_while_a_mirror_is_made_leaves_one_that_can_be_used() {
    let run = run(1, 0);
    // Then the whole disk is read.
    let recording = run.recording.clone().until("serving");
    let images = cut_the_power(&run, recording.clone(), 1);
    println!("{} points, {images} images", recording.points());
}

#[test]
fn a_sync_of_data_or_map_that_is_left_out_is_found() {
    let run = run(1, 1);
    // Not those of a mirror that is being created: their absence is noticed at once.
    let recording = run.recording.clone().after("serving").sampled(400);
    for name in ["vm1/disk", "vm1/map"] {
        leave_out_syncs(&recording, name, draw(1), |root, marks| check(&run, root, marks));
    }
}
