//! The power is cut while several threads write to a disk of many regions, checkpoints are published,
//! and the intent of regions without changes is cleared.
//!
//! ```text
//! writers ──► plan, record intent, write ──┐
//! flusher ──► flush ───────────────────────┼──► mirror, recorded ──► images ──► map and data agree
//! persist ──► freeze, publish, clear ──────┘
//! ```
//!
//! After a power cut, a chunk that differs from the parent snapshot must count as changed, and a block
//! that is present must have data that was written to it. The parent is the last snapshot that was
//! published: the repository does not die with the host.
//!
//! The threads are real, so a seed repeats the choices of a run, but not its timing. `CAIRN_SEED` and
//! `CAIRN_SOAK_SECONDS` work as in the other tests of power cuts.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::Geometry;
use crash_images::{Draw, Mounted, check_all};
use seeded_rng::Rng;

use super::power_cut_tests::create_mirror_of;
use super::tests::{identity, load};
use super::{Identity, MapFile};
use crate::flush::MapWriter;
use crate::mapping::Buffer;
use crate::mirror::files::disk_file::DiskFile;
use crate::mirror::layout::{BLOCK_BYTES, Blocks};
use crate::mirror::{Mirror, Plan};

const REGION_BYTES: u64 = 64 << 20;
const REGIONS: u64 = 130;
const CHUNK_BYTES: u32 = 4 << 20;
const WRITERS: usize = 3;
const WRITES: u64 = 60;
/// The chunks in the first regions are written again and again, and others once in a while.
const HOT_REGIONS: u64 = 4;

fn many_regions() -> Identity {
    let geometry = Geometry::new(REGIONS * REGION_BYTES, CHUNK_BYTES).unwrap();
    Identity { geometry, capacity: 2 * geometry.size(), ..identity() }
}

/// The block of a region that a writer writes to. Each is in a chunk of its own.
fn block_of(region: u64, writer: usize) -> u64 {
    (region * REGION_BYTES + writer as u64 * u64::from(CHUNK_BYTES)) / BLOCK_BYTES
}

struct Scene {
    mounted: Mounted,
    mirror: Mirror,
    map: MapWriter,
    disk: DiskFile,
    writers_left: std::sync::atomic::AtomicUsize,
    failed: AtomicBool,
}

impl Scene {
    fn is_over(&self) -> bool {
        self.failed.load(Ordering::SeqCst) || self.writers_left.load(Ordering::SeqCst) == 0
    }

    /// Writes to blocks that no other writer writes to.
    fn write(&self, writer: usize, mut rng: Rng) {
        let mut handle = self.mirror.epoch_handle(writer);
        let mut buffer = Buffer::zeroed(BLOCK_BYTES as usize);
        for version in 1..=WRITES {
            let hot = rng.chance(70);
            let region = rng.below(if hot { HOT_REGIONS } else { REGIONS });
            let block = block_of(region, writer);
            let span = Blocks { first: block, count: 1 }.span();
            let permit = loop {
                match self.mirror.plan_write(&mut handle, writer, span) {
                    Plan::Direct(permit) => break permit,
                    Plan::RecordIntent(span) => {
                        let regions = self.mirror.intent().regions_of(span);
                        self.map.write_intent(&self.mirror, &regions).unwrap();
                    }
                    // The content of snapshots does not matter here.
                    Plan::Copy(copies) => {
                        for (copy, buffer) in copies {
                            self.mirror.finish_copy(copy, buffer, Ok(()));
                        }
                    }
                    Plan::Wait => thread::sleep(Duration::from_micros(200)),
                    Plan::Fill(_) => unreachable!("whole blocks are written"),
                }
            };
            self.mounted.mark(&format!("writing {block} {version} {}", permit.epoch.0));
            buffer
                .chunks_exact_mut(8)
                .for_each(|word| word.copy_from_slice(&version.to_le_bytes()));
            self.disk.write(&buffer, span.offset).unwrap();
            self.mirror.complete(permit, true);
            thread::sleep(Duration::from_micros(rng.below(2000)));
        }
        self.writers_left.fetch_sub(1, Ordering::SeqCst);
    }

    fn flush(&self, mut rng: Rng) {
        while !self.is_over() {
            self.map.flush(&self.mirror, &self.disk).unwrap();
            thread::sleep(Duration::from_micros(rng.below(20_000)));
        }
    }

    /// Publishes checkpoints, and clears the intent of regions without changes.
    fn checkpoint(&self, mut rng: Rng) {
        while !self.is_over() {
            let layer = self.mirror.freeze().unwrap().expect("one layer at a time");
            while !self.mirror.settle(&layer) {
                thread::yield_now();
            }
            self.mounted.mark(&format!("published {}", layer.epoch.0));
            self.mirror.publish(&layer);
            self.map.clear_unchanged_intent(&self.mirror, &self.disk).unwrap();
            thread::sleep(Duration::from_micros(rng.below(4000)));
        }
    }
}

/// Sets the flag if the thread panics, so that the others end.
struct OnPanic<'a>(&'a AtomicBool);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

/// The versions that were written to each block so far, each with its epoch, and the last epoch
/// that was published.
fn history(marks: &[String]) -> (HashMap<u64, Vec<(u64, u64)>>, u64) {
    let mut written: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    let mut published = 0;
    for mark in marks {
        let (word, numbers) = mark.split_once(' ').unwrap();
        let numbers: Vec<u64> = numbers.split(' ').map(|text| text.parse().unwrap()).collect();
        match word {
            "writing" => written.entry(numbers[0]).or_default().push((numbers[1], numbers[2])),
            _ => published = numbers[0],
        }
    }
    (written, published)
}

fn check(root: &Path, marks: &[String]) {
    let layout = many_regions().layout();
    let map = MapFile::open(&root.join("vm1/map")).unwrap();
    let disk = File::open(root.join("vm1/disk")).unwrap();
    let (presence, record) = load(&map, &layout).unwrap();
    let (written, published) = history(marks);
    let mut present = 0;
    for (block, versions) in written {
        if !presence.get(block) {
            continue;
        }
        present += 1;
        let mut bytes = [0; BLOCK_BYTES as usize];
        disk.read_exact_at(&mut bytes, block * BLOCK_BYTES).unwrap();
        let in_epochs = versions.iter().rev().find(|(_, epoch)| *epoch <= published);
        let parent = in_epochs.map_or(0, |(version, _)| *version);
        let is_dirty = record.chunks.dirty().contains(layout.chunk_of(block).0);
        for sector in bytes.chunks_exact(512) {
            let found = u64::from_le_bytes(sector[..8].try_into().unwrap());
            let is_written = versions.iter().any(|(version, _)| *version == found);
            assert!(is_written, "block {block} is present, and holds {found} of {versions:?}");
            assert!(
                found == parent || is_dirty,
                "block {block} holds {found}, the parent {parent}, and its chunk is not changed"
            );
        }
    }
    assert_eq!(presence.local_bytes(), present * BLOCK_BYTES, "a block is present that never was");
}

fn run(seed: u64) -> u64 {
    let (mounted, elsewhere) = (Mounted::new(), tempfile::tempdir().unwrap());
    let path = mounted.root().join("vm1");
    let (mirror, map, disk) = create_mirror_of(&many_regions(), WRITERS, &path, elsewhere.path());
    // The directory above it is not durable by the mirror's own doing.
    File::open(mounted.root()).unwrap().sync_all().unwrap();
    mounted.mark("published 0");
    let (writers_left, failed) = (WRITERS.into(), AtomicBool::new(false));
    let scene = Scene { mounted, mirror, map, disk, writers_left, failed };
    let mut rng = Rng::new(seed);
    thread::scope(|scope| {
        let scene = &scene;
        let mut rng = || Rng::new(rng.next_u64());
        for writer in 0..WRITERS {
            let rng = rng();
            scope.spawn(move || {
                let _failed = OnPanic(&scene.failed);
                scene.write(writer, rng);
            });
        }
        let (of_flush, of_checkpoint) = (rng(), rng());
        scope.spawn(move || {
            let _failed = OnPanic(&scene.failed);
            scene.flush(of_flush);
        });
        scope.spawn(move || {
            let _failed = OnPanic(&scene.failed);
            scene.checkpoint(of_checkpoint);
        });
    });
    let Scene { mounted, mirror, map, disk, .. } = scene;
    // They have files open that `mounted` serves.
    drop((mirror, map, disk));
    let recording = mounted.recording().after("published 0").sampled(250);
    let draw = Draw { seed, images: 3, atom: 512 };
    check_all(&recording, draw, check).unwrap_or_else(|violation| panic!("{violation}"))
}

#[test]
fn a_power_cut_leaves_every_changed_chunk_of_many_regions_as_changed() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let soak = Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let first = number("CAIRN_SEED").unwrap_or(1);
    let start = Instant::now();
    for seed in first.. {
        if seed >= first + 2 && start.elapsed() >= soak {
            break;
        }
        println!("CAIRN_SEED={seed}");
        println!("{} images, {:?}", run(seed), start.elapsed());
    }
}
