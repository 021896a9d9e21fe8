//! The record of an epoch, as an earlier process left it.

use cairn_store::{Consistency, NewSnapshot};

use super::{file_of, flip, path_of, take};
use crate::mapping::PAGE_BYTES;
use crate::mirror::epoch::layer_state::LayerState;
use crate::mirror::epoch::record::{ChunkCounts, EpochRecord};

/// The size of the part of the header that is used.
const HEADER: usize = 389 * 8;

/// Flips bits in the record of an epoch that has begun. The first byte chooses the size of the
/// disk.
pub fn epoch(mut data: &[u8]) {
    let [size] = take(&mut data);
    let chunks = [1, 64, 100, 5000][usize::from(size % 4)];
    let mut bytes = [*b"CRNEPOCH", word(4), word(chunks), word(1)].concat();
    // The words of the bitmaps, and one more word: bits beyond the last chunk have no meaning.
    let words = chunks.div_ceil(64) as usize;
    let (bitmap, summary) = ((words + 1) * 8, (words.div_ceil(64) + 1) * 8);
    bytes.resize(HEADER + 2 * bitmap + summary, 0);
    flip(&mut bytes, data);
    let (header, rest) = bytes.split_at(HEADER);
    let (dirty, rest) = rest.split_at(bitmap);
    let (summary, idle) = rest.split_at(summary);
    let page = PAGE_BYTES as u64;
    // All these disks have bitmaps of one page.
    let pieces = [(0, header), (page, dirty), (2 * page, summary), (3 * page, idle)];
    let file = file_of(4 * page, &pieces);
    let open = || EpochRecord::open(&path_of(&file), ChunkCounts { now: chunks, capacity: chunks });
    // The record of another version is an error, and other damage means that there is no record.
    let Ok(Some(state)) = open() else {
        assert!(!data.is_empty(), "a whole state is refused");
        return;
    };
    check(&state, chunks);
    let again = open().ok().flatten().expect("it is as good as before");
    assert_eq!(again.epoch(), state.epoch());
    assert!(again.chunks.dirty().iter().eq(state.chunks.dirty().iter()));
    assert_eq!(again.accepted(), state.accepted());
    assert_eq!(again.failure(), state.failure());
    again.abandon();
    assert_eq!(again.state(), LayerState::Lost);
    again.close();
    assert_eq!(again.state(), LayerState::Closed);
}

fn check(state: &EpochRecord, chunks: u64) {
    assert_ne!(state.epoch().0, 0, "it has begun");
    let dirty: Vec<u64> = state.chunks.dirty().iter().collect();
    assert!(dirty.is_sorted_by(|a, b| a < b) && dirty.iter().all(|chunk| *chunk < chunks));
    assert_eq!(state.chunks.dirty().len(), dirty.len() as u64);
    let contained = (0..chunks).filter(|chunk| state.chunks.dirty().contains(*chunk));
    assert!(contained.eq(dirty.iter().copied()), "the summary tells all of it");
    // Bytes that are not UTF-8 may have made the text longer.
    let label = state.accepted().and_then(|new| new.label);
    assert!(label.is_none_or(|label| label.chars().count() <= 64));
    assert!(state.failure().is_none_or(|reason| reason.chars().count() <= 512));
    // What is recorded is found again, whatever was there before.
    let number = state.accepted().map_or(7, |new| new.number);
    let label = state.failure().filter(|text| !text.is_empty() && text.len() <= 64);
    let new = NewSnapshot {
        number,
        label,
        metadata: state.accepted().map(|new| new.metadata).unwrap_or_default(),
        is_from_guest: number % 2 == 1,
        size: state.size(),
        consistency: state.accepted().map_or(Consistency::Crash, |new| new.consistency),
        time: number.rotate_left(8),
        dirty_bytes: number.rotate_left(16),
        pause_us: number.rotate_left(24),
    };
    state.accept(&new);
    assert_eq!(state.accepted(), Some(new));
    let failure = state.failure();
    if state.state() == LayerState::Open {
        state.freeze(state.size());
    }
    state.settle();
    state.fail("no space");
    assert_eq!(state.failure(), failure.or(Some("no space".into())), "the first reason stays");
}

fn word(value: u64) -> [u8; 8] {
    value.to_le_bytes()
}
