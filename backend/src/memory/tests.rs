use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress};

use super::{DirtyLog, GuestMap, Region, UserRange, map_region};
use crate::request::Segment;
use crate::sys;

const REGION: u64 = 1 << 20;
const SECOND: u64 = 4 << 20;

fn region(guest: u64) -> Region {
    let range = UserRange { user: guest + (1 << 40), guest, len: REGION };
    map_region(range, &sys::shared_memory(REGION).unwrap(), 0).unwrap()
}

fn log() -> (File, Arc<DirtyLog>) {
    let file = sys::shared_memory(4096).unwrap();
    let log = DirtyLog::new(&file, 0, 4096).unwrap();
    (file, Arc::new(log))
}

/// The pages that are marked, which are unmarked then.
fn take(file: &File) -> Vec<u64> {
    let mut bits = vec![0; 4096];
    file.read_exact_at(&mut bits, 0).unwrap();
    file.write_all_at(&[0; 4096], 0).unwrap();
    (0..4096 * 8).filter(|page| bits[*page as usize / 8] & 1 << (page % 8) != 0).collect()
}

#[test]
fn every_way_to_write_marks_exactly_the_pages_that_it_has_written() {
    let (file, log) = log();
    let map = GuestMap::new(vec![region(0), region(SECOND)], Some(log)).unwrap();
    let memory = map.memory();
    memory.write_slice(&[1; 8192], GuestAddress(0x1800)).unwrap();
    assert_eq!(take(&file), [1, 2, 3]);
    memory.write_obj(7u8, GuestAddress(SECOND)).unwrap();
    assert_eq!(take(&file), [SECOND / 4096]);
    memory.store(7u16, GuestAddress(SECOND + 0x5ffe), Ordering::Release).unwrap();
    assert_eq!(take(&file), [SECOND / 4096 + 5]);
    memory.write_slice(&[], GuestAddress(0x1000)).unwrap();
    memory.read_obj::<u64>(GuestAddress(0x1000)).unwrap();
    assert!(take(&file).is_empty(), "reading marks nothing");
    map.mark_filled(&[Segment { address: SECOND + 0xfff, len: 2 }]);
    assert_eq!(take(&file), [SECOND / 4096, SECOND / 4096 + 1]);
}

#[test]
fn maps_with_and_without_a_log_share_their_memory_and_it_outlives_each_of_them() {
    let (file, log) = log();
    let plain = GuestMap::new(vec![region(0)], None).unwrap();
    let logged = GuestMap::new(plain.regions(), Some(log)).unwrap();
    plain.memory().write_obj(5u8, GuestAddress(10)).unwrap();
    assert!(take(&file).is_empty());
    drop(plain);
    assert_eq!(logged.memory().read_obj::<u8>(GuestAddress(10)).unwrap(), 5);
    // The memory alone keeps its mappings.
    let memory = logged.memory().clone();
    drop(logged);
    memory.write_obj(6u8, GuestAddress(10)).unwrap();
    assert_eq!(memory.read_obj::<u8>(GuestAddress(10)).unwrap(), 6);
    assert_eq!(take(&file), [0]);
}

#[test]
fn a_region_can_be_added_and_removed_once() {
    let map = GuestMap::new(vec![region(0)], None).unwrap();
    let both = GuestMap::new(map.regions_with(region(SECOND)), None).unwrap();
    assert_eq!(both.len(), 2 * REGION);
    assert_eq!(both.guest_address(SECOND + (1 << 40) + 5), Some(GuestAddress(SECOND + 5)));
    assert!(GuestMap::new(both.regions_with(region(SECOND)), None).is_err(), "they overlap");
    assert!(both.regions_without(SECOND, 4096).is_err());
    let one = GuestMap::new(both.regions_without(SECOND, REGION).unwrap(), None).unwrap();
    assert_eq!(one.guest_address(SECOND + (1 << 40)), None);
    assert!(one.regions_without(SECOND, REGION).is_err());
}

/// The kernel ends a process that touches mapped memory behind the end of a file.
#[test]
fn memory_that_is_longer_than_its_file_is_refused() {
    let range = UserRange { user: 1 << 40, guest: 0, len: REGION };
    let file = || sys::shared_memory(REGION).unwrap();
    let is_mapped = |len, offset| map_region(UserRange { len, ..range }, &file(), offset).is_ok();
    assert!(is_mapped(REGION, 0) && is_mapped(REGION / 2, REGION / 2));
    assert!(!is_mapped(2 * REGION, 0) && !is_mapped(REGION, 4096));
    assert!(!is_mapped(REGION, u64::MAX - 4095) && !is_mapped(REGION + 4096, 0));
    assert!(DirtyLog::new(&file(), 0, REGION).is_ok());
    assert!(DirtyLog::new(&file(), 4096, REGION).is_err());
    assert!(DirtyLog::new(&file(), 0, REGION + 1).is_err());
}
