use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use cairn_store::{Geometry, ImageId, MirrorId, Root};

use super::{LiveDir, NEXT_USE_ID_RANGE};
use crate::mirror::files::map::{Identity, MapFile, UseId};
use crate::mirror::layout::Blocks;

const NEXT: UseId = [9; 16];

fn try_open(base: &Path, map: &MapFile) -> std::io::Result<LiveDir> {
    let mirror = base.parent().unwrap();
    LiveDir::open(base, mirror, map, &NEXT, &map.identity().layout(), 1 << 20)
}

fn open(base: &Path, map: &MapFile) -> LiveDir {
    try_open(base, map).unwrap()
}

fn map(dir: &Path) -> MapFile {
    let identity = Identity {
        mirror: MirrorId::from_bytes([7; 16]),
        image: "vm1".parse().unwrap(),
        image_id: ImageId::from_bytes([9; 16]),
        geometry: Geometry::new(1 << 30, 256 * 1024).unwrap(),
        capacity: 8 << 30,
        origin: 3,
    };
    MapFile::create(&dir.join("map"), identity, Root::default()).unwrap()
}

#[test]
fn it_counts_for_one_use_of_the_mirror_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut map = map(dir.path());
    let base = dir.path().join("run");
    let live = open(&base, &map);
    assert!(!live.is_adopted);
    live.presence.set(Blocks { first: 9, count: 1 });
    drop(live);
    assert!(!open(&base, &map).is_adopted, "the mirror is not in use");
    map.begin(NEXT).unwrap();
    let live = open(&base, &map);
    assert!(live.is_adopted && !live.presence.get(9));
    live.presence.set(Blocks { first: 9, count: 1 });
    live.epochs[0].chunks.schedule(5);
    drop(live);
    let live = open(&base, &map);
    assert!(live.is_adopted && live.presence.get(9));
    assert_eq!(live.epochs.len(), 1);
    assert!(live.epochs[0].chunks.dirty().contains(5));
    drop(live);
    let elsewhere = open(&dir.path().join("elsewhere"), &map);
    assert!(elsewhere.is_adopted && elsewhere.presence.get(9), "it is found all the same");
    drop(elsewhere);
    map.begin([8; 16]).unwrap();
    let live = open(&base, &map);
    assert!(!live.is_adopted && !live.presence.get(9), "of the use before");
}

#[test]
fn unused_numbers_outlive_the_process_and_end_with_the_use() {
    let dir = tempfile::tempdir().unwrap();
    let mut map = map(dir.path());
    let base = dir.path().join("run");
    let live = open(&base, &map);
    live.begin(&mut map, NEXT).unwrap();
    assert!(live.unused_numbers.load().is_empty());
    // Reserved, used, all used, and reserved again with others between.
    let steps = [2..10, 3..10, 10..10, 40..50, 41..60];
    for (before, after) in steps.iter().zip(&steps[1..]) {
        live.unused_numbers.record(before);
        assert_eq!(open_again(&base, &map), *before);
        // The process ends after the first of the two words.
        live.unused_numbers.0[super::header_words::FLAGS_WORD + 2]
            .store(after.start, Ordering::SeqCst);
        let unused = open_again(&base, &map);
        assert!(unused.is_empty() || (unused.start == after.start && unused.end <= after.end));
    }
    drop(live);
    map.begin([8; 16]).unwrap();
    assert!(open(&base, &map).unused_numbers.load().is_empty());
}

/// The unused numbers that another process would find.
fn open_again(base: &Path, map: &MapFile) -> std::ops::Range<u64> {
    let dir = base.join(map.identity().mirror.to_string());
    let file = super::options().open(dir.join("state")).unwrap();
    super::UnusedNumbers(super::header_page(&file).unwrap()).load()
}

#[test]
fn a_live_directory_of_another_version_or_without_an_open_epoch_is_refused_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let mut map = map(dir.path());
    let base = dir.path().join("run");
    let live = open(&base, &map);
    live.begin(&mut map, NEXT).unwrap();
    live.presence.set(Blocks { first: 9, count: 1 });
    let (live_dir, file) = (live.dir().to_owned(), live.file.try_clone().unwrap());
    drop(live);
    let files = || std::fs::read_dir(&live_dir).unwrap().count();
    let before = files();
    let version = super::header::VERSION_RANGE.start as u64;
    file.write_all_at(&[1], version).unwrap();
    let refused = try_open(&base, &map).map(drop).unwrap_err().to_string();
    assert!(refused.contains("version 1"), "{refused}");
    assert_eq!(files(), before, "nothing is deleted");
    file.write_all_at(&super::header::VERSION.to_le_bytes(), version).unwrap();
    let live = open(&base, &map);
    assert!(live.is_adopted && live.presence.get(9));
    drop(live);
    for entry in std::fs::read_dir(&live_dir).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("epoch-") {
            std::fs::remove_file(path).unwrap();
        }
    }
    let refused = try_open(&base, &map).map(drop).unwrap_err().to_string();
    assert!(refused.contains("no open epoch"), "{refused}");
}

#[test]
fn it_has_one_process_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let map = map(dir.path());
    let base = dir.path().join("run");
    let _live = open(&base, &map);
    let error = try_open(&base, &map).map(drop).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_guest_from_before_stays_unknown_when_its_data_may_be_lost() {
    let dir = tempfile::tempdir().unwrap();
    let mut map = map(dir.path());
    let base = dir.path().join("run");
    let live = open(&base, &map);
    assert_eq!(live.flags.known_rings().load(Ordering::SeqCst), u64::MAX);
    drop(live);
    map.begin([8; 16]).unwrap();
    let live = open(&base, &map);
    assert!(!live.is_adopted, "the live state of this use is gone");
    assert_eq!(live.flags.known_rings().load(Ordering::SeqCst), 0);
    map.begin(NEXT).unwrap();
    drop(live);
    let live = open(&base, &map);
    assert!(live.is_adopted);
    assert_eq!(live.flags.known_rings().load(Ordering::SeqCst), 0, "and after a kill");
}

#[test]
fn after_a_failed_sync_no_process_adopts_it_and_no_guest_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut map = map(dir.path());
    let base = dir.path().join("run");
    let live = open(&base, &map);
    live.begin(&mut map, NEXT).unwrap();
    live.flags.known_rings().store(1, Ordering::SeqCst);
    live.presence.set(Blocks { first: 9, count: 1 });
    assert!(live.validity.is_valid());
    live.validity.invalidate();
    assert!(!live.validity.is_valid());
    drop(live);
    let live = open(&base, &map);
    assert!(!live.is_adopted && !live.presence.get(9) && live.validity.is_valid());
    assert_eq!(live.flags.known_rings().load(Ordering::SeqCst), 0);
}

/// State that a stop has left goes on in a use of its own. The process can end at each step of
/// that.
#[test]
fn what_a_stop_left_is_found_wherever_the_next_begin_ends() {
    for step in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let mut map = map(dir.path());
        let base = dir.path().join("run");
        let live = open(&base, &map);
        live.begin(&mut map, NEXT).unwrap();
        live.presence.set(Blocks { first: 9, count: 1 });
        map.write_pages(&live.presence.take_changed()).unwrap();
        map.end(&live.presence, [].into_iter(), true).unwrap();
        let at_rest = std::fs::read(dir.path().join("map")).unwrap();
        drop(live);

        let live = open(&base, &map);
        assert!(live.is_adopted && live.presence.get(9), "at rest");
        let other: UseId = [5; 16];
        if step == 3 {
            live.begin(&mut map, other).unwrap();
        }
        if (1..3).contains(&step) {
            live.file.write_all_at(&other, NEXT_USE_ID_RANGE.start as u64).unwrap();
        }
        if step == 2 {
            map.begin(other).unwrap();
        }
        drop(live);
        let live = open(&base, &map);
        assert!(live.is_adopted && live.presence.get(9), "after step {step}");
        drop(live);
        // A copy of the mirror that was made after the stop.
        std::fs::write(dir.path().join("map"), &at_rest).unwrap();
        let copy = MapFile::open(&dir.path().join("map")).unwrap();
        assert_eq!(open(&base, &copy).is_adopted, step < 3, "the copy after step {step}");
    }
}
