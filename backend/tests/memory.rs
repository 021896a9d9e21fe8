//! The memory of a disk of which everything is changed while many checkpoints wait.
//!
//! `CAIRN_MEMORY_CHUNKS` sets the number of chunks of 256 KiB; a disk of 1 TiB has 4194304. The
//! copies of old blocks need 64 KiB of disk space for each chunk.

mod support;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use support::backend::{Backend, IMAGE, Options, Site};
use support::device::{BLOCK, Device, Io, Shape};
use support::repository;
use support::rng::number_from_env;

const CHUNK: u64 = 256 << 10;

/// The checkpoints that may wait at the same time.
const LAYERS: u64 = 16;

/// The memory that a disk may have for each TiB.
const PER_TIB: u64 = 64 << 20;

/// Buffers, stacks and caches of fixed size that a disk with pending checkpoints uses.
const POOLS: u64 = 32 << 20;

/// The memory of files in a directory, which may be on a tmpfs.
fn allocated(dir: &Path) -> u64 {
    let files = std::fs::read_dir(dir).expect("the live directory");
    files.map(|file| file.expect("a file").metadata().expect("a file").blocks() * 512).sum()
}

#[test]
fn sixteen_waiting_checkpoints_of_a_fully_changed_disk_need_bounded_memory() {
    let chunks = number_from_env("CAIRN_MEMORY_CHUNKS").unwrap_or(2048);
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK as u32, chunks * CHUNK);
    // Storing makes no progress, and all copies but the first are spilled.
    let options = ["--commit-rate", "1", "--cow-memory", "1", "--cow-disk", "10000000"];
    let backend = Backend::start(&Options::new(&site).with(&options));
    let shape = Shape { depth: 64, longest: BLOCK, ..Shape::default() };
    let mut device = Device::connect(&backend.options.socket, shape);
    let begin = Instant::now();
    let longest = device.max_write_zeroes();
    for offset in (0..chunks * CHUNK).step_by(longest as usize) {
        let len = longest.min(chunks * CHUNK - offset);
        let zero = Io::WriteZeroes { offset, len, unmap: true };
        device.queues[0].run(zero, &[]).expect("change everything");
    }
    let mut control = backend.control();
    for round in 1..=LAYERS {
        control.checkpoint().expect("a checkpoint");
        device.write_blocks(CHUNK, round as u8);
    }
    let stats = control.stats();
    assert!(stats.spilled > chunks * LAYERS / 2, "old blocks are preserved: {stats:?}");
    let live = allocated(&site.path("disk").join("live-state"));
    let own = backend.memory("RssAnon:");
    let bound = PER_TIB * chunks * CHUNK / (1 << 40) + POOLS;
    println!(
        "{chunks} chunks, {LAYERS} layers, {} copies in {:?}: {} KiB of its own memory and {} KiB of \
         shared memory; the bound is {} KiB",
        stats.spilled,
        begin.elapsed(),
        own >> 10,
        live >> 10,
        bound >> 10,
    );
    assert!(own + live <= bound, "{own} + {live} bytes are more than {bound}");
}
