use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use cairn_store::{Geometry, ImageId, MirrorId, MirrorParent, NodeId, Root};
use tempfile::TempDir;

use super::{
    Header, Identity, MapError, MapFile, MapState, PRESENCE_OFFSET, SLOT_BYTES, decode, encode,
};
use crate::mirror::epoch::record::EpochRecord;
use crate::mirror::layout::{Blocks, Layout, Span};
use crate::mirror::presence::Presence;

pub(super) fn identity() -> Identity {
    Identity {
        mirror: MirrorId::from_bytes([7; 16]),
        image: "vm1".parse().unwrap(),
        image_id: ImageId::from_bytes([9; 16]),
        geometry: Geometry::new(1 << 30, 256 * 1024).unwrap(),
        capacity: 8 << 30,
        origin: 3,
    }
}

pub(super) fn load(map: &MapFile, layout: &Layout) -> Result<(Presence, EpochRecord), MapError> {
    let presence = Presence::absent(layout.block_count()).unwrap();
    let record = EpochRecord::private(layout.chunk_count()).unwrap();
    map.load(&presence, record.chunks.dirty())?;
    Ok((presence, record))
}

/// A fresh map that is in use.
fn in_use() -> (TempDir, PathBuf, Layout, MapFile) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("map");
    let mut map = MapFile::create(&path, identity(), Root::default()).unwrap();
    map.begin([1; 16]).unwrap();
    (dir, path, identity().layout(), map)
}

#[test]
fn presence_and_changes_survive_a_clean_stop() {
    let (_dir, path, layout, mut map) = in_use();
    let (presence, record) = load(&map, &layout).unwrap();
    assert_eq!(record.chunks.dirty().len(), 0);
    presence.set(Blocks { first: 100, count: 50 });
    map.write_pages(&presence.take_changed()).unwrap();
    map.end(&presence, [0, 9, 4095].into_iter(), true).unwrap();
    let map = MapFile::open(&path).unwrap();
    assert_eq!(map.identity(), &identity());
    assert!(map.is_clean() && map.knows_guests());
    assert_eq!(map.use_id(), &[1; 16]);
    let (presence, record) = load(&map, &layout).unwrap();
    let dirty = record.chunks.dirty();
    assert!(presence.all(Blocks { first: 100, count: 50 }));
    assert!(!presence.get(99));
    assert_eq!(presence.local_bytes(), 50 * 4096);
    assert_eq!(dirty.iter().collect::<Vec<_>>(), [0, 9, 4095]);
}

#[test]
fn after_an_unclean_stop_local_chunks_of_regions_in_use_count_as_changed() {
    let (_dir, path, layout, map) = in_use();
    let (presence, _) = load(&map, &layout).unwrap();
    presence.set(Blocks { first: 64, count: 1 });
    presence.set(Blocks { first: 640, count: 64 });
    // A fetch in another region.
    presence.set(Blocks { first: 100_000, count: 64 });
    let intent = map.intent().unwrap();
    let bytes = intent.bytes_with(&intent.regions_of(Span { offset: 0, len: 512 }));
    map.write_intent(&bytes).unwrap();
    map.write_pages(&presence.take_changed()).unwrap();
    drop(map);
    let map = MapFile::open(&path).unwrap();
    assert!(!map.is_clean());
    let (_, record) = load(&map, &layout).unwrap();
    let dirty = record.chunks.dirty();
    assert_eq!(dirty.iter().collect::<Vec<_>>(), [1, 10]);
}

/// The host dies while a header is written, and the slot holds half of it.
#[test]
fn a_torn_header_leaves_the_one_before_it() {
    let (_dir, path, _, map) = in_use();
    assert!(!MapFile::open(&path).unwrap().is_clean());
    map.file.write_all_at(&[0xff; 100], SLOT_BYTES + 50).unwrap();
    assert!(MapFile::open(&path).unwrap().is_clean(), "the older header counts again");
    map.file.write_all_at(&[0xff; 100], 50).unwrap();
    assert!(matches!(MapFile::open(&path), Err(MapError::Damaged(_))));
}

#[test]
fn a_flipped_bit_or_a_missing_end_is_found_after_a_clean_stop() {
    let (_dir, path, layout, mut map) = in_use();
    let (presence, _) = load(&map, &layout).unwrap();
    map.end(&presence, std::iter::empty(), false).unwrap();
    let stopped = MapFile::open(&path).unwrap();
    assert!(stopped.is_clean() && !stopped.knows_guests());
    assert!(load(&stopped, &layout).is_ok());
    map.file.write_all_at(&[1], PRESENCE_OFFSET + 77).unwrap();
    assert!(matches!(load(&MapFile::open(&path).unwrap(), &layout), Err(MapError::Damaged(_))));
    map.file.set_len(PRESENCE_OFFSET + 4096).unwrap();
    assert!(matches!(MapFile::open(&path), Err(MapError::Damaged(_))));
}

#[test]
fn what_is_beyond_the_disks_end_is_refused_whatever_the_checksum_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("map");
    let geometry = Geometry::new((1 << 30) - 256 * 1024, 256 * 1024).unwrap();
    let smaller = Identity { geometry, ..identity() }.layout();
    let end = |presence: Option<u64>, dirty: Option<u64>| {
        let mut map =
            MapFile::create(&path, Identity { geometry, ..identity() }, Root::default()).unwrap();
        let (written, _) = load(&map, &smaller).unwrap();
        presence.iter().for_each(|first| written.set(Blocks { first: *first, count: 1 }));
        map.write_pages(&written.take_changed()).unwrap();
        map.end(&written, dirty.into_iter(), true).unwrap();
        load(&MapFile::open(&path).unwrap(), &smaller).map(|_| ())
    };
    let (blocks, chunks) = (smaller.block_count(), smaller.chunk_count());
    assert!(end(Some(blocks - 1), Some(chunks - 1)).is_ok());
    assert!(matches!(end(Some(blocks), None), Err(MapError::Damaged(_))));
    assert!(matches!(end(None, Some(chunks)), Err(MapError::Damaged(_))));
}

#[test]
fn a_sequence_number_that_has_none_behind_it_is_refused() {
    let header = |sequence| Header {
        sequence,
        state: MapState::InUse,
        use_id: [0; 16],
        bitmaps: [0; 32],
        parent: (1, Root::default()),
        announced: 0,
    };
    assert!(decode(&encode(&identity(), header(u64::MAX / 2))).is_ok());
    let last = decode(&encode(&identity(), header(u64::MAX)));
    assert!(matches!(last, Err(MapError::Damaged(_))));
}

#[test]
fn an_empty_or_foreign_file_is_damaged_not_fresh() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("map");
    std::fs::write(&path, b"").unwrap();
    assert!(matches!(MapFile::open(&path), Err(MapError::Damaged(_))));
    std::fs::write(&path, vec![1; 10_000]).unwrap();
    assert!(matches!(MapFile::open(&path), Err(MapError::Damaged(_))));
}

#[test]
fn the_parent_survives_a_clean_stop_and_a_kill() {
    let (_dir, path, layout, mut map) = in_use();
    assert_eq!((map.parent().number, map.parent().root), (3, Root::default()));
    let root = Root(Some(NodeId::from_bytes([5; 32])));
    map.set_parent(4, root).unwrap();
    drop(map);
    let parent = MirrorParent { image: identity().image_id, number: 4, root, announced: 4 };
    let mut map = MapFile::open(&path).unwrap();
    assert_eq!((map.parent(), map.is_clean(), map.use_id()), (parent, false, &[1; 16]));
    let (presence, _) = load(&map, &layout).unwrap();
    map.end(&presence, std::iter::empty(), true).unwrap();
    // A change of the parent does not make a clean map unclean.
    map.set_parent(5, Root::default()).unwrap();
    let map = MapFile::open(&path).unwrap();
    assert_eq!((map.parent().number, map.is_clean()), (5, true));
    load(&map, &layout).unwrap();
}

#[test]
fn the_highest_number_that_was_announced_survives_a_clean_stop_and_a_kill() {
    let (_dir, path, layout, mut map) = in_use();
    assert_eq!(map.parent().announced, 3, "the snapshot that the mirror started from");
    for number in [7, 5] {
        map.announce(number).unwrap();
    }
    drop(map);
    let mut map = MapFile::open(&path).unwrap();
    assert_eq!((map.parent().number, map.parent().announced), (3, 7));
    map.set_parent(7, Root::default()).unwrap();
    map.begin([2; 16]).unwrap();
    let (presence, _) = load(&map, &layout).unwrap();
    map.end(&presence, std::iter::empty(), true).unwrap();
    let map = MapFile::open(&path).unwrap();
    assert_eq!((map.parent().number, map.parent().announced), (7, 7));
    load(&map, &layout).unwrap();
}

/// Maps that this version has written, kept as files: after a clean stop, and in use. Every later
/// version must read them, or have another version of the format and refuse them by it.
/// `cargo test -p cairn-backend --lib make_the_maps -- --ignored` writes them anew.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn fixture_identity() -> Identity {
    Identity {
        geometry: Geometry::new(1 << 20, 64 * 1024).unwrap(),
        capacity: 8 << 20,
        ..identity()
    }
}

#[test]
#[ignore = "it writes into the source tree"]
fn make_the_maps() {
    let layout = fixture_identity().layout();
    fs::create_dir_all(fixture("")).unwrap();
    for name in ["map-clean", "map-in-use"] {
        let _ = fs::remove_file(fixture(name));
        let mut map = MapFile::create(&fixture(name), fixture_identity(), Root::default()).unwrap();
        map.begin([1; 16]).unwrap();
        map.set_parent(5, Root(Some(NodeId::from_bytes([3; 32])))).unwrap();
        let (presence, _) = load(&map, &layout).unwrap();
        let written = Blocks { first: 40, count: 3 };
        let intent = map.intent().unwrap();
        let bytes = intent.bytes_with(&intent.regions_of(written.span()));
        map.write_intent(&bytes).unwrap();
        presence.set(written);
        map.write_pages(&presence.take_changed()).unwrap();
        if name == "map-clean" {
            map.end(&presence, [2, 15].into_iter(), true).unwrap();
        }
    }
}

#[test]
fn maps_of_this_version_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let layout = fixture_identity().layout();
    for (name, dirty) in [("map-clean", vec![2, 15]), ("map-in-use", vec![2])] {
        let path = dir.path().join(name);
        fs::copy(fixture(name), &path).unwrap();
        let map = MapFile::open(&path).unwrap();
        assert_eq!(map.identity(), &fixture_identity());
        let root = Root(Some(NodeId::from_bytes([3; 32])));
        let (image, announced) = (identity().image_id, 5);
        assert_eq!(map.parent(), MirrorParent { image, number: 5, root, announced });
        assert_eq!((map.is_clean(), map.use_id()), (name == "map-clean", &[1; 16]));
        let (presence, record) = load(&map, &layout).unwrap();
        assert_eq!(presence.local_bytes(), 3 * 4096);
        assert!(presence.all(Blocks { first: 40, count: 3 }));
        assert_eq!(record.chunks.dirty().iter().collect::<Vec<_>>(), dirty, "{name}");
    }
}
