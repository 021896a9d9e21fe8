//! Tests of deletion, lists, renewal and reservations.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use tempfile::TempDir;

use super::PutOrder;
use super::tests::RENEW;
use super::tests::{CODE, fragment};
use crate::cluster::peer::{PeerStore, Room};
use crate::cluster::protocol::FragmentId;
use crate::collection::CollectionNumber;
use crate::encoding::Redundancy;
use crate::encoding::fragment::{Fragment, Kind, encode, encode_record};
use crate::error::ErrorKind;
use crate::id::BlobId;

const NO_BLOB: BlobId = BlobId::from_bytes([0; 32]);

fn id(fragment: &Fragment) -> FragmentId {
    let Fragment { description, index, .. } = fragment;
    FragmentId { blob: description.blob, encoding: description.id(), index: *index }
}

fn put(store: &PeerStore, fragments: &[Fragment]) {
    store.put(fragments).unwrap().into_iter().for_each(Result::unwrap);
    store.flush().unwrap();
}

fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut content = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut content);
    content
}

fn record(seed: u64, len: usize) -> Fragment {
    let content = random(seed, len);
    let (description, blocks) = encode_record(&BlobId::of(&content), &content, Redundancy::NONE);
    let block = blocks.share(0);
    Fragment { description, index: 0, block }
}

/// The bytes that the segments take on the disk.
fn taken(dir: &Path) -> u64 {
    let segments = fs::read_dir(dir.join("segments")).unwrap();
    segments.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn the_space_of_deleted_fragments_is_given_back() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), Some(2 << 20)).unwrap();
    // 1.5 MiB in each round, of a capacity of 2 MiB.
    for round in 0..4 {
        let all: Vec<_> = (0..96).map(|n| fragment(100 * round + n, CODE, 2)).collect();
        put(&store, &all);
        let (before, space) = (taken(dir.path()), 96 * (16 << 10));
        let usage = store.usage().unwrap();
        assert_eq!((usage.used, usage.fragments), (space, 96));
        let ids: Vec<_> = all.iter().map(id).collect();
        assert_eq!(store.delete(&ids, 0).unwrap(), space);
        assert!(taken(dir.path()) <= 8192, "{before}, {}", taken(dir.path()));
        let usage = store.usage().unwrap();
        assert_eq!((usage.used, usage.fragments), (0, 0));
        assert_eq!(store.get(&all[0].description.blob).unwrap(), []);
        assert_eq!(store.delete(&ids, 0).unwrap(), 0, "they are deleted already");
    }
    drop(store);
    let store = PeerStore::open(dir.path(), None).unwrap();
    assert_eq!(store.usage().unwrap().used, 0);
}

#[test]
fn a_fragment_that_a_put_relies_on_is_not_deleted_before_the_put_ends() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let one = fragment(1, CODE, 0);
    put(&store, std::slice::from_ref(&one));
    for round in 0..2 {
        // The fragment is present, so nothing is written.
        store.put(std::slice::from_ref(&one)).unwrap();
        assert_eq!(store.delete(&[id(&one)], 0).unwrap(), 0, "{round}");
        store.flush().unwrap();
        assert_eq!(store.get(&one.description.blob).unwrap(), std::slice::from_ref(&one));
    }
    assert_eq!(store.usage().unwrap().used, 16 << 10);
    assert_eq!(store.delete(&[id(&one)], 0).unwrap(), 16 << 10);
    assert_eq!(store.get(&one.description.blob).unwrap(), []);
}

#[test]
fn many_threads_put_and_delete_at_once() {
    const THREADS: u64 = 4;
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    // All threads put this fragment, and delete it only if it is old.
    let shared = fragment(9999, CODE, 0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (store, shared) = (&store, &shared);
            scope.spawn(move || {
                for round in 0..60 {
                    let own = fragment(1000 * thread + round, CODE, 0);
                    put(store, &[own.clone(), shared.clone()]);
                    for one in [&own, shared] {
                        let found = store.get(&one.description.blob).unwrap();
                        let right = found.iter().filter(|found| *found == one).count();
                        assert_eq!((found.len(), right), (1, 1));
                    }
                    assert_eq!(store.delete(&[id(shared)], 3600).unwrap(), 0);
                    assert_eq!(store.delete(&[id(&own)], 0).unwrap(), 16 << 10);
                    assert_eq!(store.get(&own.description.blob).unwrap(), []);
                }
            });
        }
    });
    let usage = store.usage().unwrap();
    assert_eq!((usage.fragments, usage.used), (1, 16 << 10));
}

#[test]
fn a_renewed_fragment_is_not_idle() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let all: Vec<_> = (0..3).map(|n| fragment(n, CODE, 0)).collect();
    put(&store, &all);
    let ids: Vec<_> = all.iter().map(id).collect();
    assert_eq!(store.delete(&ids, 3600).unwrap(), 0, "the fragments are new");
    store.settle(false).unwrap();
    let database = rusqlite::Connection::open(dir.path().join("fragments.db")).unwrap();
    let touched = |blob: &BlobId| -> i64 {
        let query = "SELECT touched FROM fragments WHERE blob = ?";
        database.query_row(query, [blob.as_bytes()], |row| row.get(0)).unwrap()
    };
    database.execute("UPDATE fragments SET touched = touched - 7200", []).unwrap();
    let (asked, renewed) = (all[0].description.blob, all[1].description.blob);
    let old = touched(&asked);
    assert_eq!(store.have(&[asked], None).unwrap()[0].len(), 1);
    assert_eq!(touched(&asked), old, "a request without renewal writes nothing");
    assert_eq!(store.have(&[renewed], RENEW).unwrap()[0].len(), 1);
    assert!(touched(&renewed) >= old + 7200);
    put(&store, &all[2..]);
    assert_eq!(store.delete(&ids, 3600).unwrap(), 16 << 10);
    let left: Vec<_> =
        all.iter().map(|one| store.get(&one.description.blob).unwrap().len()).collect();
    assert_eq!(left, [0, 1, 1]);
}

#[test]
fn a_have_request_without_renewal_does_not_wait_for_a_writer() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let one = fragment(1, CODE, 0);
    put(&store, std::slice::from_ref(&one));
    store.settle(false).unwrap();
    let writer = rusqlite::Connection::open(dir.path().join("fragments.db")).unwrap();
    writer.execute_batch("BEGIN IMMEDIATE; UPDATE fragments SET touched = 1").unwrap();
    assert_eq!(store.have(&[one.description.blob], None).unwrap()[0].len(), 1);
    assert_eq!(store.list(&NO_BLOB, 4096).unwrap().len(), 1);
}

#[test]
fn an_invalid_row_is_left_out() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let (one, other) = (fragment(1, CODE, 0), fragment(1, CODE, 1));
    put(&store, &[one.clone(), other.clone(), fragment(2, CODE, 0)]);
    store.settle(false).unwrap();
    let database = rusqlite::Connection::open(dir.path().join("fragments.db")).unwrap();
    database.execute("UPDATE fragments SET description = x'00' WHERE number = 1", []).unwrap();
    let blob = one.description.blob;
    for renew in [None, RENEW] {
        let held = store.have(&[blob, fragment(2, CODE, 0).description.blob], renew).unwrap();
        assert_eq!((held[0].len(), held[1].len()), (1, 1));
    }
    assert_eq!(store.list(&NO_BLOB, 4096).unwrap().len(), 2);
    assert_eq!(store.get(&blob).unwrap(), [one]);
}

#[test]
fn a_list_has_every_fragment_once_in_the_order_of_the_blobs() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    // More than one page, and blobs with several fragments at any position.
    let small = |n: u64| {
        let content = random(n, 40);
        let code = Redundancy::ReedSolomon { data: 2, parity: 1 };
        let (description, blocks) = encode(&BlobId::of(&content), &content, code);
        (0..3)
            .map(move |index| Fragment {
                description: description.clone(),
                index,
                block: blocks.share(index.into()),
            })
            .collect::<Vec<_>>()
    };
    let all: Vec<_> = (0..2000).flat_map(small).collect();
    // Some are pending and others are in the table: the list is the same.
    all.chunks(500).enumerate().for_each(|(at, some)| {
        put(&store, some);
        if at % 5 == 3 {
            store.settle(false).unwrap();
        }
    });
    let mut wanted: Vec<_> = all.iter().map(|one| (one.description.blob, one.index)).collect();
    wanted.sort();
    let (mut found, mut after, mut pages) = (Vec::new(), NO_BLOB, 0);
    loop {
        let page = store.list(&after, 4096).unwrap();
        let Some((last, _)) = page.last() else { break };
        (after, pages) = (*last, pages + 1);
        assert!(page.iter().all(|(_, held)| held.len == 20 && held.kind == Kind::Content));
        found.extend(page.into_iter().map(|(blob, held)| (blob, held.index)));
    }
    assert_eq!(pages, 2);
    assert!(found == wanted);
}

#[test]
fn records_are_found_among_content_in_pages() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let records: Vec<_> = (0..9).map(|n| record(n, 1_500_000)).collect();
    // A blob with the bytes of a record is content when it is stored as content.
    let forged = {
        let content = random(5, 1_500_000);
        let (description, blocks) = encode(&BlobId::of(&content), &content, Redundancy::NONE);
        Fragment { description, index: 0, block: blocks.share(0) }
    };
    assert_eq!(forged.block, records[5].block);
    put(&store, &[forged, fragment(77, CODE, 1)]);
    assert_eq!(store.records(&NO_BLOB).unwrap(), []);
    put(&store, &records[..4]);
    store.settle(false).unwrap();
    put(&store, &records[4..]);
    let collect = || {
        let (mut found, mut after, mut pages) = (Vec::new(), NO_BLOB, 0);
        loop {
            let page = store.records(&after).unwrap();
            let Some(last) = page.last() else { break };
            (after, pages) = (last.description.blob, pages + 1);
            found.extend(page);
        }
        (found, pages)
    };
    let (found, pages) = collect();
    assert_eq!((found.len(), pages), (9, 5), "two records fit into an answer");
    assert!(found.is_sorted_by_key(|one| one.description.blob));
    let names = |all: &[Fragment]| all.iter().map(id).map(|id| id.blob).collect::<BTreeSet<_>>();
    assert_eq!(names(&found), names(&records));
    // A record whose block is damaged does not end the list.
    let segment = dir.path().join("segments/00000001");
    let bytes = fs::read(&segment).unwrap();
    let at = bytes.windows(64).rposition(|window| window == &found[0].block[..64]).unwrap();
    let file = fs::File::options().write(true).open(&segment).unwrap();
    file.write_all_at(&[found[0].block[9] ^ 4], at as u64 + 9).unwrap();
    assert_eq!(collect().0.len(), 8);
}

#[test]
fn reserved_space_is_kept_for_its_connection() {
    let dir = TempDir::new().unwrap();
    let block = 16 << 10;
    let store = Arc::new(PeerStore::open(dir.path(), Some(4 * block)).unwrap());
    let (room, other) = (Room::new(store.clone()), Room::new(store.clone()));
    let give = |n, room: Option<&Room>| {
        let result = store
            .put_in(&[fragment(n, CODE, 0)], |_| PutOrder { stamp: CollectionNumber::FIRST, room })
            .unwrap()
            .remove(0);
        store.flush().unwrap();
        result.map_err(|error| error.kind())
    };
    let full = Err(ErrorKind::Unavailable);
    room.reserve(3 * block).unwrap();
    assert_eq!(other.reserve(2 * block).unwrap_err().kind(), ErrorKind::Unavailable);
    other.reserve(block).unwrap();
    assert_eq!(store.usage().unwrap().reserved, 4 * block);
    assert_eq!(give(1, None), full, "all space is reserved");
    assert_eq!(give(1, Some(&room)), Ok(()));
    assert_eq!(give(1, Some(&room)), Ok(()), "a fragment that is present needs no space");
    let usage = store.usage().unwrap();
    assert_eq!((usage.used, usage.reserved), (block, 3 * block));
    room.reserve(block).unwrap();
    assert_eq!(give(2, Some(&other)), Ok(()), "it uses its reservation");
    assert_eq!(give(3, Some(&other)), Ok(()), "it uses space that nobody has reserved");
    assert_eq!(give(4, Some(&other)), full);
    drop(room);
    assert_eq!(store.usage().unwrap().reserved, 0);
    assert_eq!(give(4, Some(&other)), Ok(()));
    assert_eq!(other.reserve(u64::MAX).unwrap_err().kind(), ErrorKind::Unavailable);
    other.reserve(0).unwrap();
}

#[test]
fn the_number_of_pending_fragments_is_bounded_while_the_table_fails() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let database = rusqlite::Connection::open(dir.path().join("fragments.db")).unwrap();
    database
        .execute_batch(
            "CREATE TRIGGER full BEFORE INSERT ON fragments BEGIN SELECT RAISE(FAIL, 'no'); END",
        )
        .unwrap();
    let batch = |at: u64| (0..1024).map(|n| record(1024 * at + n, 10)).collect::<Vec<_>>();
    let mut taken = 0;
    let refused = loop {
        let all = batch(taken);
        match store.put(&all) {
            Ok(_) => taken += 1,
            Err(error) => break error,
        }
        store.flush().unwrap();
        store.settle(true).unwrap_err();
        // They are durable, so they can be read.
        assert_eq!(store.get(&all[7].description.blob).unwrap(), std::slice::from_ref(&all[7]));
        assert!(taken <= 20, "the pending fragments are not bounded");
    };
    assert_eq!((taken, refused.kind()), (16, ErrorKind::Unavailable), "{refused}");
    database.execute_batch("DROP TRIGGER full").unwrap();
    put(&store, &batch(taken));
    let usage = store.usage().unwrap();
    assert_eq!((usage.fragments, usage.used), (17 * 1024, 17 * 1024 * 4096));
    drop(store);
    assert_eq!(PeerStore::open(dir.path(), None).unwrap().usage().unwrap().fragments, 17 * 1024);
}
