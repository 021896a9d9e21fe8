//! The power is cut at each point of a mirror's use, and its map is opened again.
//!
//! The test program starts itself under a recorder. From the recording it makes the files that a
//! power cut could leave (`crash_images` has the model). Writes are torn by words here, and not by
//! sectors. Wherever the tear is, a torn header leaves the header before it, and a torn page has
//! some of its bits.
//!
//! `CAIRN_SEED` repeats a run, and `CAIRN_SOAK_SECONDS` runs further ones for that long.

use std::collections::BTreeSet;
use std::env;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use cairn_store::{Geometry, Root};
use crash_images::{
    Draw, Recording, cut_the_power, kill_and_cut_the_power, leave_out_syncs, mark, record,
    recorded_root,
};

use super::tests::{identity, load};
use super::{Identity, MapError, MapFile, MapState};
use crate::flush::MapWriter;
use crate::mapping::Buffer;
use crate::mirror::Mirror;
use crate::mirror::cow::CowSpace;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::cow::spill_space::SpillSpace;
use crate::mirror::epoch::manager::EpochManager;
use crate::mirror::epoch::recovery::{Recovered, recover};
use crate::mirror::events::Events;
use crate::mirror::files::data_sync::DataSync;
use crate::mirror::files::disk_file::{DiskFile, make_directory};
use crate::mirror::files::layer_table::LayerDir;
use crate::mirror::files::live_dir::LiveDir;
use crate::mirror::layout::{BLOCK_BYTES, Blocks, Layout, SECTOR_BYTES, Span};

const WORD_BYTES: usize = 8;

fn command(workload: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    let name = format!("mirror::files::map::power_cut_tests::{workload}");
    command.args(["--exact", &name, "--test-threads=1"]);
    command
}

fn recorded(workload: &str) -> Recording {
    record(&command(workload))
}

/// A few images, for checks that must find a bug.
const FEW_IMAGES: Draw = Draw { seed: 1, images: 8, atom: WORD_BYTES };

fn has(marks: &[String], text: &str) -> bool {
    marks.iter().any(|mark| mark == text)
}

/// The numbers of the marks with this word.
fn all(marks: &[String], word: &str) -> BTreeSet<u64> {
    let number = |mark: &String| mark.strip_prefix(word)?.strip_prefix(' ')?.parse().ok();
    marks.iter().filter_map(number).collect()
}

// The map alone, with flushes of few and of many pages, and with clean stops.

const SESSIONS: u64 = 3;
const STEPS: u64 = 4;
/// The number of blocks whose bits are in one page.
const PER_PAGE: u64 = 32768;

/// The blocks that become present before a flush: in one page, in two, or in more.
fn blocks_of(step: u64) -> Vec<Blocks> {
    let pages = [1, 2, 5][step as usize % 3];
    let in_page = |page| Blocks { first: page * PER_PAGE + 500 * step, count: 60 + 7 * step };
    (0..pages).map(in_page).collect()
}

/// The chunks that have changed at a stop.
fn changed_at(session: u64) -> Vec<u64> {
    vec![session, 100 * session, 4095]
}

/// The workload that is recorded. Without a recorder it does nothing.
#[test]
fn map_workload() {
    let Some(root) = recorded_root() else { return };
    let path = root.join("map");
    let layout = identity().layout();
    for number in 0..SESSIONS {
        let map = match number {
            0 => MapFile::create(&path, identity(), Root::default()).unwrap(),
            _ => MapFile::open(&path).unwrap(),
        };
        mark("created");
        session(map, &layout, number);
    }
    mark("done");
}

/// One use of the map, from its begin to a clean stop.
fn session(mut map: MapFile, layout: &Layout, number: u64) {
    let (presence, _) = load(&map, layout).unwrap();
    mark("beginning");
    map.begin([1; 16]).unwrap();
    mark("begun");
    let intent = map.intent().unwrap();
    mark(&format!("found {}", presence.local_bytes() / BLOCK_BYTES));
    for step in number * STEPS..(number + 1) * STEPS {
        for blocks in blocks_of(step) {
            // Write intent is durable before the write.
            let regions = intent.regions_of(blocks.span());
            map.write_intent(&intent.bytes_with(&regions)).unwrap();
            intent.set(&regions);
            presence.set(blocks);
        }
        mark(&format!("set {step}"));
        map.write_pages(&presence.take_changed()).unwrap();
        presence.are_durable();
        mark(&format!("durable {step}"));
    }
    mark(&format!("ending {number}"));
    map.end(&presence, changed_at(number).into_iter(), true).unwrap();
    mark(&format!("ended {number}"));
}

/// One more use, after a process that was killed.
#[test]
fn next_map_workload() {
    let Some(root) = recorded_root() else { return };
    mark("killed");
    let map = MapFile::open(&root.join("map")).unwrap();
    session(map, &identity().layout(), SESSIONS);
    mark("done");
}

fn check_map(root: &Path, marks: &[String]) {
    let path = root.join("map");
    let mut map = match MapFile::open(&path) {
        Ok(map) => map,
        Err(MapError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            assert!(!has(marks, "created"), "the map is gone");
            return;
        }
        Err(error) => panic!("the map does not open: {error}"),
    };
    assert_eq!(map.identity(), &identity());
    let stages = ["created", "beginning", "begun", "ending", "ended", "killed"];
    let stage = |mark: &&String| stages.contains(&first_word(mark));
    match marks.iter().rfind(stage).map(|mark| first_word(mark)) {
        Some("begun") => assert_eq!(map.header.state, MapState::InUse),
        Some("ended") => assert_eq!(map.header.state, MapState::Clean),
        None => assert_eq!(map.header.state, MapState::Fresh),
        _ => {}
    }
    assert!(!has(marks, "begun") || map.header.state != MapState::Fresh, "a used map is fresh");

    let layout = identity().layout();
    let (presence, record) = load(&map, &layout).unwrap();
    for step in all(marks, "durable") {
        let present = blocks_of(step).into_iter().all(|blocks| presence.all(blocks));
        assert!(present, "blocks of flush {step} are absent");
    }
    let set: BTreeSet<u64> = all(marks, "set")
        .into_iter()
        .flat_map(blocks_of)
        .flat_map(|blocks| blocks.first..blocks.end())
        .collect();
    let present = set.iter().filter(|block| presence.get(**block)).count() as u64;
    assert_eq!(presence.local_bytes(), present * BLOCK_BYTES, "a block is present that never was");
    assert!(present >= all(marks, "found").pop_last().unwrap_or(0), "blocks that were found");
    let dirty: Vec<_> = record.chunks.dirty().iter().collect();
    match map.header.state {
        MapState::Fresh => assert!(present == 0 && dirty.is_empty()),
        MapState::InUse => {
            assert!(presence.touched_chunks(layout.blocks_per_chunk()).eq(dirty.iter().copied()));
        }
        MapState::Clean | MapState::GuestsUnknown => {
            let exact = present == set.len() as u64;
            assert!(exact || has(marks, "killed"), "at rest the map is exact");
            let session = all(marks, "ending").pop_last().expect("a stop was begun");
            assert_eq!(
                dirty,
                BTreeSet::from_iter(changed_at(session)).into_iter().collect::<Vec<_>>()
            );
        }
    }

    // The next use goes on from there.
    map.begin([1; 16]).unwrap();
    let added = Blocks { first: 7 * PER_PAGE + 9, count: 1 };
    presence.set(added);
    map.write_pages(&presence.take_changed()).unwrap();
    let map = MapFile::open(&path).unwrap();
    assert!(!map.is_clean());
    let (presence, _) = load(&map, &layout).unwrap();
    assert!(presence.all(added));
    assert_eq!(presence.local_bytes(), (present + 1) * BLOCK_BYTES);
}

fn first_word(mark: &str) -> &str {
    mark.split(' ').next().unwrap_or_default()
}

#[test]
fn a_power_cut_at_any_point_leaves_every_flushed_page_and_no_other_bit() {
    cut_the_power(&recorded("map_workload"), 32, WORD_BYTES, check_map);
}

#[test]
fn a_power_cut_after_a_kill_leaves_what_the_next_process_found() {
    let (during, draw) = (("created", "done"), Draw { seed: 1, images: 16, atom: WORD_BYTES });
    let next = command("next_map_workload");
    kill_and_cut_the_power(&recorded("map_workload"), during, &next, draw, check_map);
}

#[test]
fn a_sync_of_the_map_that_is_left_out_is_found() {
    leave_out_syncs(&recorded("map_workload"), "map", FEW_IMAGES, check_map);
}

// Map and data together, as flushes keep them consistent.

const FLUSHES: u64 = 8;
const DISK_BYTES: u64 = 512 << 10;
/// The mirror's path below the recorded directory. Its directory and the one above it are created,
/// too.
const MIRROR: &str = "mirrors/vm1";

fn small() -> Identity {
    Identity {
        geometry: Geometry::new(DISK_BYTES, 64 * 1024).unwrap(),
        capacity: 64 * DISK_BYTES,
        ..identity()
    }
}

/// The blocks that are written before a flush. Some of them were written before.
fn written_before(flush: u64) -> [u64; 4] {
    [flush, flush / 2, 100 + flush, 100 + flush / 3]
}

/// The content of a sector.
fn stamp(block: u64, version: u64) -> [u8; 16] {
    ((u128::from(block) << 64) | u128::from(version)).to_le_bytes()
}

/// Creates a mirror at `path`, with its live directory and its journal below `elsewhere`.
pub(crate) fn create_mirror(path: &Path, elsewhere: &Path) -> (Mirror, MapWriter, DiskFile) {
    create_mirror_of(&small(), 1, path, elsewhere)
}

/// Creates a mirror with this identity, for this many workers.
pub(super) fn create_mirror_of(
    identity: &Identity,
    workers: usize,
    path: &Path,
    elsewhere: &Path,
) -> (Mirror, MapWriter, DiskFile) {
    make_directory(path).unwrap();
    let layout = identity.layout();
    let disk = DiskFile::open(&path.join("disk")).unwrap();
    disk.set_len(layout.file_len()).unwrap();
    disk.punch(Span { offset: 0, len: layout.file_len() }).unwrap();
    disk.sync_name(path).unwrap();
    let mut map = MapFile::create(&path.join("map"), identity.clone(), Root::default()).unwrap();
    mark("created");
    let live =
        LiveDir::open(&elsewhere.join("live"), elsewhere, &map, &[1; 16], &layout, BLOCK_BYTES);
    let live = live.unwrap();
    map.begin([1; 16]).unwrap();
    let space = CowSpace {
        memory: live.cow_memory,
        spill_buffers: BufferPool::new(BLOCK_BYTES as usize),
        spill: SpillSpace::new(0),
    };
    let layer_dir = Arc::new(LayerDir::new(elsewhere, &layout));
    let Recovered { current, layers, .. } =
        recover(live.epochs, &layer_dir, &layout, &space, |_| None).unwrap();
    let epochs = EpochManager::new(live.epoch_files, layer_dir, workers, current, layers);
    let intent = map.intent().unwrap();
    let mirror = Mirror::new(layout, live.presence, intent, epochs, space, Events::new(Vec::new()));
    (mirror, MapWriter::new(map, DataSync::new(live.validity)), disk)
}

/// The workload that is recorded. Without a recorder it does nothing.
#[test]
fn flush_workload() {
    let Some(root) = recorded_root() else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let (mirror, writer, disk) = create_mirror(&root.join(MIRROR), elsewhere.path());
    for flush in 0..FLUSHES {
        for block in written_before(flush) {
            mark(&format!("writing {flush}"));
            let mut buffer = Buffer::zeroed(BLOCK_BYTES as usize);
            for sector in buffer.chunks_exact_mut(SECTOR_BYTES as usize) {
                sector[..16].copy_from_slice(&stamp(block, flush));
            }
            disk.write(&buffer, block * BLOCK_BYTES).unwrap();
            mirror.presence().set(Blocks { first: block, count: 1 });
        }
        writer.flush(&mirror, &disk).unwrap();
        mark(&format!("flushed {flush}"));
    }
    mark("done");
}

fn check_flush(root: &Path, marks: &[String]) {
    let (flushed, writing) = (all(marks, "flushed"), all(marks, "writing"));
    let path = root.join(MIRROR);
    let map = match MapFile::open(&path.join("map")) {
        Ok(map) => map,
        Err(MapError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            assert!(!has(marks, "created"), "the map is gone");
            return;
        }
        Err(error) => panic!("the map does not open: {error}"),
    };
    let (presence, _) = load(&map, &small().layout()).unwrap();
    let disk = std::fs::read(path.join("disk")).unwrap();
    assert_eq!(disk.len() as u64, DISK_BYTES);
    for block in 0..DISK_BYTES / BLOCK_BYTES {
        let last = |flushes: &BTreeSet<u64>| {
            flushes.iter().rev().copied().find(|flush| written_before(*flush).contains(&block))
        };
        let (oldest, newest) = (last(&flushed), last(&writing));
        if !presence.get(block) {
            assert_eq!(oldest, None, "block {block} was flushed and is absent");
            continue;
        }
        let newest = newest.unwrap_or_else(|| panic!("block {block} was never written"));
        let start = (block * BLOCK_BYTES) as usize;
        for sector in disk[start..start + BLOCK_BYTES as usize].chunks_exact(SECTOR_BYTES as usize)
        {
            let mut versions = oldest.unwrap_or(0)..=newest;
            let found = versions.any(|version| sector[..16] == stamp(block, version));
            assert!(found, "block {block} is present and holds {:?}", &sector[..16]);
        }
    }
}

#[test]
fn a_power_cut_at_any_point_leaves_the_data_of_every_present_block() {
    cut_the_power(&recorded("flush_workload"), 32, WORD_BYTES, check_flush);
}

#[test]
fn a_sync_of_data_map_or_directories_that_is_left_out_is_found() {
    let recording = recorded("flush_workload");
    for name in ["mirrors/vm1/disk", "mirrors/vm1/map", "mirrors/vm1", "mirrors", ""] {
        leave_out_syncs(&recording, name, FEW_IMAGES, check_flush);
    }
}

// A disk that grows while it is in use.

/// The sizes of the disk. The first end is in the middle of a chunk.
const SIZES: [u64; 3] = [DISK_BYTES - 3 * BLOCK_BYTES, DISK_BYTES + SECTOR_BYTES, 40 * DISK_BYTES];

fn growing() -> Identity {
    Identity { geometry: Geometry::new(SIZES[0], 64 * 1024).unwrap(), ..small() }
}

/// The last whole block of the disk with this size.
fn last_block(size: u64) -> u64 {
    size / BLOCK_BYTES - 1
}

/// The workload that is recorded. Without a recorder it does nothing.
#[test]
fn growth_workload() {
    let Some(root) = recorded_root() else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let path = root.join(MIRROR);
    let (mirror, writer, disk) = create_mirror_of(&growing(), 1, &path, elsewhere.path());
    for (index, size) in SIZES.into_iter().enumerate() {
        if index > 0 {
            let layout = mirror.layout().with_size(size);
            // The block that the old end cuts off must be present.
            mirror.presence().set(Blocks { first: mirror.layout().size() / BLOCK_BYTES, count: 1 });
            mark(&format!("growing {index}"));
            writer.record_growth(&disk, &layout).unwrap();
            mark(&format!("grown {index}"));
            mirror.make_room(&layout).unwrap();
            // The state file of the live directory is sparse here, and gets space by itself.
            mirror.grow(&layout);
        }
        let span = Blocks { first: last_block(size), count: 1 }.span();
        writer.write_intent(&mirror, &mirror.intent().regions_of(span)).unwrap();
        let mut buffer = Buffer::zeroed(BLOCK_BYTES as usize);
        buffer.fill(index as u8 + 1);
        disk.write(&buffer, span.offset).unwrap();
        mirror.presence().set(Blocks { first: last_block(size), count: 1 });
        writer.flush(&mirror, &disk).unwrap();
        mark(&format!("flushed {index}"));
    }
    mark("done");
}

fn check_growth(root: &Path, marks: &[String]) {
    let path = root.join(MIRROR);
    let map = match MapFile::open(&path.join("map")) {
        Ok(map) => map,
        Err(MapError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            assert!(!has(marks, "created"), "the map is gone");
            return;
        }
        Err(error) => panic!("the map does not open: {error}"),
    };
    let layout = map.identity().layout();
    let reached = SIZES.iter().position(|size| *size == layout.size()).expect("one of the sizes");
    let newest = |word| all(marks, word).last().map_or(0, |index| *index as usize);
    assert!(reached >= newest("grown"), "a growth that was recorded is gone");
    assert!(reached <= newest("growing"), "a growth that did not begin");
    let disk = std::fs::read(path.join("disk")).unwrap();
    assert!(disk.len() as u64 >= layout.file_len(), "the map came before the data file");
    let (presence, record) = load(&map, &layout).unwrap();
    for index in all(marks, "flushed") {
        let block = last_block(SIZES[index as usize]);
        assert!(presence.get(block), "block {block} was flushed and is absent");
        let start = (block * BLOCK_BYTES) as usize;
        assert_eq!(disk[start..start + BLOCK_BYTES as usize], [index as u8 + 1; 4096]);
        assert!(record.chunks.dirty().contains(layout.chunk_of(block).0), "it counts as changed");
    }
    // What lies behind the flushed blocks is zeros, also if the disk is going to grow.
    let end = SIZES[newest("growing")] / BLOCK_BYTES * BLOCK_BYTES;
    assert!(disk[(end as usize).min(disk.len())..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_power_cut_while_a_disk_grows_leaves_a_whole_disk_of_the_old_or_the_new_size() {
    cut_the_power(&recorded("growth_workload"), 32, WORD_BYTES, check_growth);
}

#[test]
fn a_sync_of_a_growth_that_is_left_out_is_found() {
    let recording = recorded("growth_workload");
    for name in ["mirrors/vm1/disk", "mirrors/vm1/map"] {
        leave_out_syncs(&recording, name, FEW_IMAGES, check_growth);
    }
}
