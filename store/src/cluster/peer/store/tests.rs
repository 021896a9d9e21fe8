use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use tempfile::TempDir;

use crate::cluster::peer::PeerStore;
use crate::cluster::protocol::Held;
use crate::collection::CollectionNumber;
use crate::encoding::Redundancy;
use crate::encoding::fragment::{Fragment, Kind, encode, encode_record};
use crate::error::ErrorKind;
use crate::id::BlobId;

pub(crate) const CODE: Redundancy = Redundancy::ReedSolomon { data: 4, parity: 4 };

fn content(number: u64) -> Vec<u8> {
    let mut content = vec![0; 64 << 10];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut content);
    content
}

/// A fragment of a blob of 64 KiB.
/// Renews with the stamp that fragments have from the start.
pub(super) const RENEW: Option<CollectionNumber> = Some(CollectionNumber::FIRST);

pub(crate) fn fragment(number: u64, redundancy: Redundancy, index: u8) -> Fragment {
    let content = content(number);
    let (description, blocks) = encode(&BlobId::of(&content), &content, redundancy);
    let block = blocks.share(index.into());
    Fragment { description, index, block }
}

/// A copy of the block with one bit of this byte flipped.
pub(crate) fn flip(block: &[u8], at: usize) -> Bytes {
    let mut block = block.to_vec();
    block[at] ^= 1;
    block.into()
}

fn put(store: &PeerStore, fragments: &[Fragment]) {
    store.put(fragments).unwrap().into_iter().for_each(Result::unwrap);
}

fn open(dir: &Path) -> PeerStore {
    PeerStore::open(dir, None).unwrap()
}

#[test]
fn flushed_fragments_are_present_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let id = store.id();
    let all: Vec<_> = (0..20).map(|number| fragment(number, CODE, number as u8 % 8)).collect();
    put(&store, &all);
    store.flush().unwrap();
    let usage = store.usage().unwrap();
    assert_eq!((usage.used, usage.fragments), (20 * 16 * 1024, 20));
    drop(store);
    let store = open(dir.path());
    assert_eq!(store.id(), id);
    assert_eq!(store.usage().unwrap().used, usage.used);
    for one in &all {
        assert_eq!(store.get(&one.description.blob).unwrap(), std::slice::from_ref(one));
    }
    assert_eq!(store.get(&BlobId::of(b"another")).unwrap(), []);
}

#[test]
fn the_filter_of_a_large_table_is_loaded_in_steps() {
    let dir = TempDir::new().unwrap();
    let all: Vec<_> = (0..20).map(|number| fragment(number, CODE, 0)).collect();
    let store = open(dir.path());
    put(&store, &all[..10]);
    store.flush().unwrap();
    drop(store);
    let store = open(dir.path());
    let mut steps = 0;
    let is_denied = |store: &PeerStore| !store.state().filter.may_have(&BlobId::of(b"another"));
    assert!(!is_denied(&store), "only the first names are loaded");
    put(&store, &all[10..]);
    store.flush().unwrap();
    // What is put meanwhile gets into the table before and after the names that were loaded.
    for part in all.chunks(4) {
        assert!(part.iter().all(|one| !store.get(&one.description.blob).unwrap().is_empty()));
        store.settle(false).unwrap();
        steps += usize::from(store.read_names().unwrap());
    }
    while store.read_names().unwrap() {
        steps += 1;
    }
    assert!(steps > 1 && is_denied(&store), "{steps} steps");
    assert!(all.iter().all(|one| !store.get(&one.description.blob).unwrap().is_empty()));
}

#[test]
fn encodings_and_blocks_of_one_blob_are_kept_apart() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let copy = fragment(1, Redundancy::Replicas(3), 0);
    let (first, second) = (fragment(1, CODE, 0), fragment(1, CODE, 5));
    put(&store, &[copy.clone(), first.clone(), second.clone(), first.clone()]);
    store.flush().unwrap();
    let blob = copy.description.blob;
    let mut found = store.get(&blob).unwrap();
    found.sort_by_key(|one| (one.description.width(), one.index));
    assert_eq!(found, [copy, first.clone(), second]);
    assert_eq!(store.usage().unwrap().fragments, 3, "each fragment is counted once");
    let held = store.have(&[BlobId::of(b"another"), blob], RENEW).unwrap();
    assert_eq!((held[0].len(), held[1].len()), (0, 3));
    let (encoding, kind, len) = (first.description.id(), Kind::Content, 16 << 10);
    let seal = first.description.seal;
    let wanted = Held { encoding, data: 4, parity: 4, index: 5, kind, len, seal };
    assert!(held[1].contains(&wanted), "{held:?}");
}

#[test]
fn a_fragment_that_does_not_match_its_description_is_refused() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let good = fragment(1, CODE, 2);
    let mut flipped = good.clone();
    flipped.block = flip(&good.block, 7);
    let short = Fragment { block: good.block.slice(1..), ..good.clone() };
    for wrong in
        [flipped, short, Fragment { index: 8, ..good.clone() }, Fragment { index: 3, ..good }]
    {
        let refused = store.put(&[wrong]).unwrap().remove(0).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
    }
    store.flush().unwrap();
    assert_eq!(store.usage().unwrap().fragments, 0);
}

#[test]
fn a_damaged_block_counts_as_lost_until_it_is_put_again() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let (one, other) = (fragment(1, CODE, 2), fragment(2, CODE, 2));
    put(&store, &[one.clone(), other.clone()]);
    store.flush().unwrap();
    drop(store);
    let segment =
        fs::read_dir(dir.path().join("segments")).unwrap().next().unwrap().unwrap().path();
    let bytes = fs::read(&segment).unwrap();
    let at = bytes.windows(64).position(|window| window == &one.block[..64]).unwrap();
    let file = fs::File::options().write(true).open(&segment).unwrap();
    file.write_all_at(&[one.block[9] ^ 4], at as u64 + 9).unwrap();
    let store = open(dir.path());
    let damaged = store.get(&one.description.blob).unwrap();
    assert!(
        damaged.len() == 1 && !damaged[0].is_of(&one.description.blob),
        "a reader recognises the damage"
    );
    assert_eq!(damaged[0].description, one.description, "a reader knows what it should be");
    assert_eq!(store.get(&other.description.blob).unwrap().len(), 1);
    // A put of the fragment, or of another one with the same block, does not rely on the damaged
    // block.
    let (description, _) = encode_record(&one.description.blob, &content(1), CODE);
    let record = Fragment { description, ..one.clone() };
    put(&store, std::slice::from_ref(&record));
    store.flush().unwrap();
    assert_eq!(store.get(&one.description.blob).unwrap().len(), 2);
    put(&store, std::slice::from_ref(&one));
    store.flush().unwrap();
    let found = store.get(&one.description.blob).unwrap();
    assert!(found.len() == 2 && found.contains(&one) && found.contains(&record));
}

#[test]
fn a_peer_takes_no_more_than_its_capacity() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), Some(3 * 16 * 1024)).unwrap();
    let all: Vec<_> = (0..4).map(|number| fragment(number, CODE, 0)).collect();
    let mut results = store.put(&all).unwrap();
    let refused = results.pop().unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(results.iter().all(Result::is_ok));
    store.flush().unwrap();
    assert_eq!(store.usage().unwrap().used, 3 * 16 * 1024);
}

#[test]
fn a_data_directory_is_used_by_one_process_and_its_marker_is_checked() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    assert!(PeerStore::open(dir.path(), None).is_err(), "the directory is in use");
    drop(store);
    fs::write(dir.path().join("peer.json"), r#"{"format":"cairn-peer","version":9,"id":""}"#)
        .unwrap();
    assert!(PeerStore::open(dir.path(), None).is_err(), "the directory has a newer version");
    fs::write(dir.path().join("peer.json"), "{}").unwrap();
    assert_eq!(PeerStore::open(dir.path(), None).map(drop).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn the_number_of_fragments_of_a_blob_is_bounded() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let content = [7; 5000];
    let blob = BlobId::of(&content);
    let mut all = Vec::new();
    for data in 2..6 {
        let code = Redundancy::ReedSolomon { data, parity: 32 - data };
        let (description, blocks) = encode(&blob, &content, code);
        all.extend((0..32u8).map(|index| {
            let (description, block) = (description.clone(), blocks.share(index.into()));
            Fragment { description, index, block }
        }));
    }
    // In one put, before the same sync, and after it.
    let taken =
        |some: &[Fragment]| store.put(some).unwrap().iter().filter(|one| one.is_ok()).count();
    assert_eq!(taken(&all[..40]), 40);
    assert_eq!(taken(&all[30..80]), 34, "ten of them were put already");
    store.flush().unwrap();
    assert_eq!(taken(&all[80..]), 0);
    assert_eq!(taken(&all[..64]), 64, "they are present");
    assert_eq!(store.usage().unwrap().fragments, 64);
    let held = store.have(&[blob, blob], RENEW).unwrap();
    assert_eq!((held[0].len(), held[1].len()), (64, 64));
    assert!(store.get(&blob).unwrap().len() < 64, "an answer is bounded");
}

/// A disk that cannot be read now may be readable later, and its fragments were acknowledged.
#[test]
fn a_segment_that_cannot_be_read_at_the_start_is_not_overwritten() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    store.put(&[fragment(1, CODE, 0), fragment(2, CODE, 1)]).unwrap();
    store.flush().unwrap();
    let path = crate::durable::segment::path_of(&dir.path().join("segments"), 1);
    let key = super::group::Key::of(&store.id());
    let scan = |file: &fs::File| super::log::scan_file(file, &key, 1, 0).unwrap();
    let (found, end) = scan(&fs::File::open(&path).unwrap());
    assert_eq!(found.len(), 2);
    // Every read of a file that is open only for writing fails.
    let (found, blind) = scan(&fs::File::options().write(true).open(&path).unwrap());
    assert!(found.is_empty() && blind >= end, "{blind} of {end}");
}
