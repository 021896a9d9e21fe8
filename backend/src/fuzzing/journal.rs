//! The journal of a mirror, and the layers that are recovered with it.

use std::collections::BTreeSet;
use std::sync::Arc;

use cairn_store::{ChunkIndex, Geometry};

use super::{file_of, path_of, take};
use crate::mirror::cow::CowSpace;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::cow::memory::CowMemory;
use crate::mirror::cow::range_allocator::RangeAllocator;
use crate::mirror::epoch::Epoch;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::record::EpochRecord;
use crate::mirror::files::journal::{CopyLocation, Journal, Record, parse};
use crate::mirror::layout::{BLOCK_BYTES, Layout, SECTOR_BYTES};

const CHUNKS: u64 = 16;
const CHUNK: u32 = 64 << 10;
const CHUNK_BLOCKS: u64 = CHUNK as u64 / BLOCK_BYTES;

/// The number of blocks in the copy-on-write memory, of which the first half is allocated, and in
/// the spill file.
const SPACE_BLOCKS: u64 = 32;

/// Parses `data` as a journal. Then takes it as the description of a journal with two epochs: which
/// chunks each epoch has changed, which of these are idle, and records of six bytes.
pub fn journal(mut data: &[u8]) {
    if let Some(records) = parse(data) {
        assert_eq!(records.len(), data.len() / 64);
        check_encoding(&records);
    }
    let states = [1, 2].map(|epoch| state(epoch, take(&mut data), take(&mut data)));
    let bytes: Vec<u8> = data.as_chunks().0.iter().flat_map(record).collect();
    let records = parse(&bytes);
    if let Some(records) = &records {
        check_encoding(records);
    }
    let file = file_of(0, &[]);
    let journal = Arc::new(Journal::open(&path_of(&file)).expect("memory"));
    let memory =
        CowMemory::new(file_of(SPACE_BLOCKS / 2 * BLOCK_BYTES, &[]), SPACE_BLOCKS * BLOCK_BYTES)
            .expect("memory");
    let layout = Layout::new(Geometry::new(CHUNKS * u64::from(CHUNK), CHUNK).expect("a disk"));
    let space = CowSpace {
        memory,
        spill_buffers: BufferPool::new(0),
        spill: RangeAllocator::new(SPACE_BLOCKS * BLOCK_BYTES, 0),
    };
    let layers =
        states.map(|state| Layer::recover(state, &journal, records.as_deref(), &layout, &space));
    let mut taken = BTreeSet::new();
    layers.iter().for_each(|layer| check(layer, &mut taken));
    assert!(records.is_some() || layers.iter().all(|layer| layer.failure().is_some()));
    layers.iter().for_each(Layer::close);
    assert!(
        space.memory.take_at(0, SPACE_BLOCKS / 2 * BLOCK_BYTES).is_some(),
        "all memory is free again"
    );
    assert!(
        space.spill.take_at(0, SPACE_BLOCKS * BLOCK_BYTES).is_some(),
        "all of the file is free again"
    );
}

/// Checks one layer. None of its ranges may be in `taken`.
fn check(layer: &Layer, taken: &mut BTreeSet<(bool, u64)>) {
    let failed = layer.failure().is_some();
    for chunk in (0..CHUNKS).map(ChunkIndex) {
        let preserved = layer.preserved(chunk);
        assert!(
            preserved.decided.is_empty() || layer.is_guarding(chunk),
            "only what is guarded has copies"
        );
        assert!(preserved.decided.runs().last().is_none_or(|run| run.end() <= CHUNK_BLOCKS));
        assert!(!failed || !layer.is_guarding(chunk), "no write waits for what is lost");
        assert!(failed || !layer.is_stored(chunk) || layer.dirty().contains(chunk.0));
        assert!(!(layer.is_stored(chunk) && layer.is_guarding(chunk)), "idle is forever");
        for piece in &preserved.runs {
            assert!(
                (piece.run.first..piece.run.end()).all(|block| preserved.decided.contains(block))
            );
            let (in_memory, offset, limit) = match piece.data.location() {
                CopyLocation::Memory(offset) => (true, offset, SPACE_BLOCKS / 2),
                CopyLocation::File(offset) => (false, offset, SPACE_BLOCKS),
            };
            assert!(offset.is_multiple_of(BLOCK_BYTES), "direct I/O needs whole blocks");
            let blocks = offset / BLOCK_BYTES..offset / BLOCK_BYTES + piece.run.count;
            assert!(!blocks.is_empty() && blocks.end <= limit);
            for block in blocks {
                assert!(taken.insert((in_memory, block)), "two copies at one place");
            }
        }
        if !preserved.runs.is_empty() {
            let mut data = vec![0; CHUNK as usize];
            preserved
                .overlay(&mut data, preserved.decided, |_, _| Ok(()))
                .expect("nothing is read");
        }
    }
    assert!(layer.stored_count() <= CHUNKS);
}

/// Encoding returns the bytes that were parsed.
fn check_encoding(records: &[Record]) {
    let bytes: Vec<u8> = records.iter().flat_map(Record::encode).collect();
    assert_eq!(parse(&bytes).as_deref(), Some(records));
}

/// An epoch with these chunks dirty and idle, one bit each.
fn state(epoch: u64, dirty: [u8; 2], idle: [u8; 2]) -> EpochRecord {
    let state = EpochRecord::private(CHUNKS).expect("memory");
    state.begin(Epoch(epoch));
    let bits = |bytes| (0..CHUNKS).filter(move |bit| u16::from_le_bytes(bytes) & (1 << bit) != 0);
    bits(dirty).for_each(|chunk| state.chunks.schedule(chunk));
    bits(idle).for_each(|chunk| state.chunks.corrupt_idle(chunk));
    state
}

/// A record whose numbers are of the size that the epochs above have.
fn record([kind, chunk, first, count, place, id]: &[u8; 6]) -> [u8; 64] {
    let offset = match place {
        0..0x80 => u64::from(*place) * BLOCK_BYTES,
        0x80..0xff => u64::from(place - 0x80) * SECTOR_BYTES,
        0xff => u64::MAX,
    };
    let mut bytes = [*id; 64];
    bytes[0..4].copy_from_slice(&u32::from(kind & 7).to_le_bytes());
    bytes[4..6].copy_from_slice(&u16::from(*first).to_le_bytes());
    bytes[6..8].copy_from_slice(&u16::from(*count).to_le_bytes());
    bytes[8..16].copy_from_slice(&u64::from(kind >> 3 & 3).to_le_bytes());
    bytes[16..24].copy_from_slice(&u64::from(*chunk).to_le_bytes());
    bytes[24..32].copy_from_slice(&offset.to_le_bytes());
    bytes
}
