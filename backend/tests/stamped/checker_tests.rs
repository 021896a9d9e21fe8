//! The checker must find violations: invented histories with one fault each.
//!
//! The disk has four blocks; block 3 is a hole in the imported image. Moments are written by hand.

use super::checker::{Snapshot, Verdict, Violation, check};
use super::history::{Base, History, Kind, Moment, NEVER, Write};
use super::stamp::{self, SECTOR};

const SEED: u64 = 77;
const BLOCK: u64 = 8;

fn block(id: u64, block: u64, submitted: Moment, acknowledged: Moment) -> Write {
    let sectors = block * BLOCK..(block + 1) * BLOCK;
    Write { id, kind: Kind::Stamp, sectors, submitted, acknowledged }
}

fn zeros(id: u64, at: u64, submitted: Moment, acknowledged: Moment) -> Write {
    Write { kind: Kind::Zeros, ..block(id, at, submitted, acknowledged) }
}

fn history(writes: Vec<Write>) -> History {
    let mut base = vec![Base::Stamped; 4 * BLOCK as usize];
    base[3 * BLOCK as usize..].fill(Base::Hole);
    History::new(SEED, BLOCK, base, writes)
}

/// A disk with these writes in its sectors; `None` is zeros.
fn disk(sectors: &[Option<u64>]) -> Vec<u8> {
    let mut disk = vec![0; sectors.len() * SECTOR];
    for (sector, bytes) in disk.chunks_exact_mut(SECTOR).enumerate() {
        if let Some(write) = sectors[sector] {
            stamp::stamp(bytes, sector as u64, write, SEED);
        }
    }
    disk
}

/// A disk with these writes in its blocks.
fn blocks(writes: [Option<u64>; 4]) -> Vec<u8> {
    disk(&writes.map(|write| [write; BLOCK as usize]).concat())
}

fn judge(history: &History, cut: (Moment, Moment), disk: &[u8]) -> Result<Verdict, Vec<Violation>> {
    let (requested, answered) = cut;
    check(history, &Snapshot { name: "vm@1".into(), requested, answered, disk })
}

const BASE: [Option<u64>; 4] = [Some(0), Some(0), Some(0), None];

#[test]
fn an_untouched_disk_is_right() {
    assert_eq!(judge(&history(vec![]), (1, 2), &blocks(BASE)), Ok(Verdict::default()));
}

#[test]
fn a_write_under_way_during_the_cut_may_be_there_or_not() {
    let history = history(vec![block(1, 0, 1, 20)]);
    for content in [0, 1] {
        let disk = blocks([Some(content), Some(0), Some(0), None]);
        let verdict = Verdict { in_flight: 1, split: 0 };
        assert_eq!(judge(&history, (10, 11), &disk), Ok(verdict), "write {content}");
    }
}

#[test]
fn a_lost_write_is_found() {
    let history = history(vec![block(1, 0, 1, 2)]);
    let lost = Violation::Lost { unit: 0, write: 1, acknowledged: 2, requested: 3 };
    assert_eq!(judge(&history, (3, 4), &blocks(BASE)), Err(vec![lost]));
}

#[test]
fn a_lost_write_of_zeros_is_found() {
    let history = history(vec![zeros(1, 0, 1, 2)]);
    let lost = Violation::Lost { unit: 0, write: 1, acknowledged: 2, requested: 3 };
    assert_eq!(judge(&history, (3, 4), &blocks(BASE)), Err(vec![lost]));
}

#[test]
fn a_write_from_the_future_is_found() {
    let history = history(vec![block(1, 3, 5, 6)]);
    let disk = blocks([Some(0), Some(0), Some(0), Some(1)]);
    let future = Violation::Future { unit: 3, write: 1, submitted: 5, answered: 4 };
    assert_eq!(judge(&history, (3, 4), &disk), Err(vec![future]));
}

#[test]
fn a_write_that_was_never_sent_is_found() {
    let disk = blocks([Some(9), Some(0), Some(0), None]);
    let torn = Violation::Torn { unit: 0, found: vec![Some(9); 8] };
    assert_eq!(judge(&history(vec![]), (3, 4), &disk), Err(vec![torn]));
}

#[test]
fn a_torn_block_is_found() {
    let history = history(vec![block(1, 0, 1, 20)]);
    let mut sectors = BASE.map(|write| [write; 8]).concat();
    sectors[5] = Some(1);
    let verdict = judge(&history, (10, 11), &disk(&sectors));
    let mut found = vec![Some(0); 8];
    found[5] = Some(1);
    assert_eq!(verdict, Err(vec![Violation::Torn { unit: 0, found }]));
}

#[test]
fn a_flipped_bit_is_found() {
    let mut disk = blocks(BASE);
    disk[SECTOR * 9 + 400] ^= 1;
    let verdict = judge(&history(vec![]), (1, 2), &disk).unwrap_err();
    assert!(matches!(verdict[..], [Violation::Garbage { sector: 9, .. }]), "{verdict:?}");
}

#[test]
fn a_stamp_in_another_place_is_found() {
    let mut disk = blocks(BASE);
    disk.copy_within(0..SECTOR, SECTOR);
    let verdict = judge(&history(vec![]), (1, 2), &disk).unwrap_err();
    assert!(matches!(verdict[..], [Violation::Garbage { sector: 1, .. }]), "{verdict:?}");
}

#[test]
fn an_inconsistent_cut_is_found_although_both_writes_were_under_way_at_some_time() {
    // Write 1 was acknowledged at 12 and write 2 sent at 13, both between request and answer.
    let history = history(vec![block(1, 0, 1, 12), block(2, 1, 13, 20)]);
    let right = [(0, 0), (1, 0), (1, 2)];
    for (a, b) in right {
        let disk = blocks([Some(a), Some(b), Some(0), None]);
        assert!(judge(&history, (10, 30), &disk).is_ok(), "{a} {b}");
    }
    let disk = blocks([Some(0), Some(2), Some(0), None]);
    let not_a_cut = Violation::NotACut { lacking: (0, 1, 12), held: (1, 2, 13) };
    assert_eq!(judge(&history, (10, 30), &disk), Err(vec![not_a_cut]));
}

#[test]
fn an_inconsistent_cut_through_zeros_is_found() {
    // The hole is zeroed (write 1), then block 1 is written (write 2): zeros hide which came first.
    let writes = vec![block(1, 3, 11, 12), zeros(2, 3, 13, 14), block(3, 1, 15, 16)];
    let history = history(writes);
    let sound = blocks([Some(0), Some(3), Some(0), None]);
    assert!(judge(&history, (10, 30), &sound).is_ok(), "the zeros are those of write 2");
    let broken = blocks([Some(0), Some(3), Some(0), Some(1)]);
    let not_a_cut = Violation::NotACut { lacking: (3, 2, 14), held: (1, 3, 15) };
    assert_eq!(judge(&history, (10, 30), &broken), Err(vec![not_a_cut]));
}

#[test]
fn two_ambiguous_blocks_must_agree_on_one_moment() {
    // Zeros in block 3 mean "before 12" or "after 23"; zeros in block 2 mean "from 15 to 20".
    let writes = vec![
        block(1, 3, 11, 12),
        zeros(2, 3, 23, 24),
        zeros(3, 2, 15, 16),
        block(4, 2, 17, 20),
        zeros(5, 2, 40, NEVER),
    ];
    let history = history(writes);
    let disk = blocks([Some(0), Some(0), None, None]);
    assert!(judge(&history, (10, 50), &disk).is_ok(), "all zeros from 40 on");
    let verdict = judge(&history, (10, 30), &disk).unwrap_err();
    assert!(
        matches!(verdict[..], [Violation::NotACut { .. } | Violation::NoCommonMoment { .. }]),
        "{verdict:?}"
    );
}

#[test]
fn a_write_over_two_blocks_that_is_there_by_half_is_counted() {
    let both = Write { sectors: 0..2 * BLOCK, ..block(1, 0, 1, 20) };
    let history = history(vec![both]);
    let disk = blocks([Some(1), Some(0), Some(0), None]);
    assert_eq!(judge(&history, (10, 11), &disk), Ok(Verdict { in_flight: 1, split: 1 }));
}

#[test]
fn a_snapshot_of_another_size_is_found() {
    let size = Violation::Size { expected: 32 * SECTOR, found: 8 * SECTOR };
    assert_eq!(judge(&history(vec![]), (1, 2), &disk(&[None; 8])), Err(vec![size]));
}

#[test]
fn writes_of_part_of_a_block_are_judged_by_sector() {
    let part = |id, sector: u64, submitted, acknowledged| Write {
        sectors: sector..sector + 1,
        ..block(id, 0, submitted, acknowledged)
    };
    let history = history(vec![part(1, 2, 1, 2), part(2, 4, 3, 4)]);
    let mut sectors = BASE.map(|write| [write; 8]).concat();
    sectors[2] = Some(1);
    assert!(judge(&history, (2, 3), &disk(&sectors)).is_ok());
    let lost = Violation::Lost { unit: 0, write: 2, acknowledged: 4, requested: 5 };
    assert_eq!(judge(&history, (5, 6), &disk(&sectors)), Err(vec![lost]));
    sectors[4] = Some(2);
    assert!(judge(&history, (5, 6), &disk(&sectors)).is_ok());
    sectors[2] = Some(0);
    let mut found = vec![Some(0); 8];
    found[4] = Some(2);
    let torn = Violation::Torn { unit: 0, found };
    assert_eq!(judge(&history, (5, 6), &disk(&sectors)), Err(vec![torn]), "a lost sector");
}
