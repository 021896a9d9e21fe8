//! The copies of old blocks that a killed process left: tables of layers, and owners of memory.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::{fs, process, thread};

use cairn_store::{ChunkIndex, Geometry};

use super::{file_of, take};
use crate::mirror::cow::CowSpace;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::cow::memory::CowMemory;
use crate::mirror::cow::spill_space::SpillSpace;
use crate::mirror::epoch::Epoch;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::record::EpochRecord;
use crate::mirror::files::layer_table::LayerDir;
use crate::mirror::layout::{BLOCK_BYTES, Layout};

const CHUNKS: u64 = 16;
const CHUNK: u32 = 64 << 10;
const CHUNK_BLOCKS: u64 = CHUNK as u64 / BLOCK_BYTES;

/// The number of slots in the copy-on-write memory, of which the first half is allocated.
const SLOTS: u64 = 32;

/// Takes `data` as the description of two epochs: which chunks each epoch has changed, which of these
/// are idle, whether it has a table, and changes of eight bytes to tables and owners.
pub fn copies(mut data: &[u8]) {
    let dir = Scratch::new();
    let layout = Layout::new(Geometry::new(CHUNKS * u64::from(CHUNK), CHUNK).expect("a disk"));
    let layer_dir = Arc::new(LayerDir::new(&dir.0, &layout));
    let [flags] = take(&mut data);
    let states = [1, 2].map(|epoch| {
        let state = state(epoch, take(&mut data), take(&mut data));
        if flags >> epoch & 1 != 0 {
            layer_dir.create_table(Epoch(epoch)).expect("a table");
            state.set_has_table();
        }
        state
    });
    let mut owners = [0; SLOTS as usize * 8];
    for change in data.as_chunks().0 {
        apply(change, &layer_dir, &mut owners);
    }
    let memory = file_of(SLOTS / 2 * BLOCK_BYTES, &[]);
    let owners = file_of(owners.len() as u64, &[(0, &owners)]);
    let space = CowSpace {
        memory: CowMemory::new(memory, &owners, SLOTS * BLOCK_BYTES).expect("memory"),
        spill_buffers: BufferPool::new(0),
        spill: SpillSpace::new(0),
    };
    let owned: Vec<_> = space.memory.owned().collect();
    let layers = states.map(|state| Layer::recover(state, &layer_dir, &owned, &layout, &space));
    layers.iter().for_each(check);
    layers.iter().for_each(Layer::close);
    assert_eq!(space.spill.used(), 0, "all of the spill files is free again");
    drop(layers);
    let all = space.memory.take_at(0, SLOTS / 2 * BLOCK_BYTES);
    assert!(all.is_some(), "all memory is free again");
    layer_dir.wait_until_free(|| fs::read_dir(&dir.0).expect("a directory").count() == 0);
}

/// A change of a table's entry, or of a slot's owner.
fn apply(change: &[u8; 8], layer_dir: &LayerDir, owners: &mut [u8]) {
    let [what, chunk, kind, place, first, second, third, fourth] = *change;
    let epoch = Epoch(u64::from(what >> 1 & 3));
    if what & 1 == 0 {
        let at = usize::from(place) % SLOTS as usize * 8;
        let block = u64::from(chunk) * CHUNK_BLOCKS + u64::from(first) % CHUNK_BLOCKS;
        let owner = 1 << 63 | block << 29 | epoch.0;
        let owner = if kind > 0xf0 { u64::from_le_bytes(*change) } else { owner };
        owners[at..at + 8].copy_from_slice(&owner.to_le_bytes());
        return;
    }
    let path = layer_dir.table_path(epoch);
    let Ok(table) = OpenOptions::new().write(true).open(path) else { return };
    let mut entry = [second; 64];
    entry[32..40].copy_from_slice(&u64::from(kind & 3).to_le_bytes());
    entry[40..56].fill(0);
    entry[40..42].copy_from_slice(&[first, second]);
    entry[48..50].copy_from_slice(&[third, fourth]);
    let offset = 4096 + u64::from(chunk) % CHUNKS * 64;
    table.write_all_at(&entry[..56], offset).expect("a file");
}

/// Checks one layer.
fn check(layer: &Layer) {
    let failed = layer.failure().is_some();
    for chunk in (0..CHUNKS).map(ChunkIndex) {
        assert!(!failed || !layer.is_guarding(chunk), "no write waits for what is lost");
        assert!(!(layer.is_stored(chunk) && layer.is_guarding(chunk)), "idle is forever");
        if failed {
            continue;
        }
        let name = layer.stored(chunk).expect("a table that was checked");
        assert_eq!(name.is_some(), layer.is_stored(chunk), "what is durable has a name");
        if !layer.is_guarding(chunk) {
            continue;
        }
        let preserved = layer.preserved(chunk).expect("a table that was checked");
        assert!(preserved.spilled.without(&preserved.decided).is_empty());
        assert!(preserved.decided.runs().last().is_none_or(|run| run.end() <= CHUNK_BLOCKS));
        let mut blocks = BTreeSet::new();
        for piece in &preserved.runs {
            for block in piece.run.first..piece.run.end() {
                assert!(preserved.decided.contains(block) && !preserved.spilled.contains(block));
                assert!(blocks.insert(block), "two copies of one block");
            }
        }
        let mut data = vec![0; CHUNK as usize];
        preserved.overlay(&mut data, preserved.decided, |_, _| Ok(())).expect("nothing is read");
    }
    assert!(layer.stored_count() <= CHUNKS);
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

/// An empty directory of this thread.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        let name = format!("cairn-fuzz-{}-{:?}", process::id(), thread::current().id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).expect("a directory");
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
