use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use cairn_store::{ChunkId, ChunkIndex, Geometry};

use super::{BlockSet, Blocks, ChunkEntry, CopyData, CowAction, Epoch, Layer, LayerDir};
use crate::mapping::Buffer;
use crate::mirror::cow::CowSpace;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::cow::memory::CowMemory;
use crate::mirror::cow::spill_space::SpillSpace;
use crate::mirror::epoch::record::{ChunkCounts, EpochFiles};
use crate::mirror::layout::Layout;

const CHUNK: ChunkIndex = ChunkIndex(3);

/// A layer of ten chunks, and what it leaves behind.
struct Bench {
    dir: tempfile::TempDir,
    space: CowSpace,
    layout: Layout,
    layers: Arc<LayerDir>,
    layer: Layer,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let (epochs, _) = EpochFiles::open(dir.path(), counts(10)).unwrap();
        let record = epochs.allocate().unwrap();
        record.begin(Epoch(1));
        record.chunks.schedule(CHUNK.0);
        record.freeze(1 << 20);
        let layout = Layout::new(Geometry::new(10 * 256 * 1024, 256 * 1024).unwrap());
        let layers = Arc::new(LayerDir::new(dir.path(), &layout));
        let layer = Layer::new(Arc::new(record), layers.clone());
        layer.settle();
        let space = CowSpace {
            memory: CowMemory::private(1 << 20),
            spill_buffers: BufferPool::new(0),
            spill: SpillSpace::new(1 << 20),
        };
        Bench { dir, space, layout, layers, layer }
    }

    fn cow_action(&self, run: Blocks, present: BlockSet) -> CowAction {
        self.layer.cow_action(CHUNK, run, present).unwrap()
    }

    fn copy(&self, run: Blocks, fill: u8) {
        let mut buffer = self.space.memory.take(run.span().len).unwrap();
        buffer.fill(fill);
        self.record(run, CopyData::Memory(buffer));
    }

    fn spill(&self, run: Blocks, fill: u8) {
        let file = self.layer.spill_file().unwrap().unwrap();
        let mut buffer = Buffer::zeroed(run.span().len as usize);
        buffer.fill(fill);
        file.write(&buffer, self.layout.span_of(CHUNK).offset + run.span().offset).unwrap();
        self.record(run, CopyData::Spilled(self.space.spill.reserve(run.span().len).unwrap()));
    }

    fn record(&self, run: Blocks, data: CopyData) {
        let block = self.layout.blocks_of(CHUNK).first + run.first;
        self.layer.record_copy(CHUNK, run, block, data).unwrap();
    }

    fn mark_stored(&self, id: Option<ChunkId>) {
        self.layer.mark_stored(&[(CHUNK, id)], &self.layout).unwrap();
    }

    /// The bytes on the disk of the layer's spill file.
    fn spilled_bytes(&self) -> u64 {
        let file = self.dir.path().join("layer-1.spill");
        std::fs::metadata(file).map_or(0, |metadata| metadata.blocks() * 512)
    }

    /// The layer as the next process has it.
    fn recover(&self) -> Layer {
        let (_, mut found) = EpochFiles::open(self.dir.path(), counts(10)).unwrap();
        let owned: Vec<_> = self.space.memory.owned().collect();
        let record = found.pop().unwrap();
        Layer::recover(record, &self.layers, &owned, &self.layout, &self.space)
    }
}

fn all() -> BlockSet {
    BlockSet::run(run(0, 64))
}

fn run(first: u64, count: u64) -> Blocks {
    Blocks { first, count }
}

#[test]
fn many_small_writes_to_one_block_cause_one_copy() {
    let bench = Bench::new();
    assert_eq!(bench.cow_action(run(5, 1), all()), CowAction::Copy(vec![run(5, 1)]));
    assert_eq!(bench.cow_action(run(5, 1), all()), CowAction::Wait, "another queue is copying it");
    bench.copy(run(5, 1), 0);
    assert_eq!(bench.cow_action(run(5, 1), all()), CowAction::None);
    assert_eq!(bench.cow_action(run(4, 3), all()), CowAction::Copy(vec![run(4, 1), run(6, 1)]));
}

#[test]
fn an_absent_block_is_decided_without_a_copy() {
    let bench = Bench::new();
    let present = BlockSet::run(run(0, 8));
    assert_eq!(bench.cow_action(run(6, 4), present), CowAction::Copy(vec![run(6, 2)]));
    assert_eq!(bench.cow_action(run(8, 2), all()), CowAction::None);
    assert!(bench.layer.begin_store(CHUNK));
    let preserved = bench.layer.preserved(CHUNK).unwrap();
    assert!(preserved.decided.contains(8) && !preserved.decided.contains(6));
}

#[test]
fn preserved_blocks_take_precedence_over_what_persist_read() {
    let bench = Bench::new();
    assert!(bench.layer.begin_store(CHUNK));
    assert!(!bench.layer.begin_store(CHUNK), "one thread stores a chunk");
    assert_eq!(bench.cow_action(run(1, 1), all()), CowAction::Copy(vec![run(1, 1)]));
    bench.copy(run(1, 1), 0);
    let mut read = vec![0xff; 64 * 4096];
    let preserved = bench.layer.preserved(CHUNK).unwrap();
    assert_eq!(preserved.overlay(&mut read, all(), |_, _| Ok(())).unwrap(), all());
    assert!(read[4096..8192].iter().all(|byte| *byte == 0) && read[8192] == 0xff);
    assert_eq!(
        bench.cow_action(run(2, 1), all()),
        CowAction::Copy(vec![run(2, 1)]),
        "not durable yet"
    );
    bench.mark_stored(Some(ChunkId::of(&read)));
    assert_eq!(bench.cow_action(run(3, 1), all()), CowAction::None);
    assert!(!bench.layer.begin_store(CHUNK), "idle is final");
}

#[test]
fn a_chunk_that_was_not_changed_is_not_guarded() {
    let bench = Bench::new();
    assert_eq!(bench.layer.cow_action(ChunkIndex(4), run(0, 64), all()).unwrap(), CowAction::None);
    assert!(!bench.layer.begin_store(ChunkIndex(4)));
}

#[test]
fn a_failed_read_puts_the_chunk_back() {
    let bench = Bench::new();
    assert!(bench.layer.begin_store(CHUNK));
    bench.layer.cancel_store(CHUNK);
    assert_eq!(bench.cow_action(run(1, 1), all()), CowAction::Copy(vec![run(1, 1)]));
    bench.layer.cancel_copy(CHUNK, run(1, 1));
    assert_eq!(bench.cow_action(run(1, 1), all()), CowAction::Copy(vec![run(1, 1)]));
}

#[test]
fn the_next_process_finds_copies_and_absent_blocks_but_nothing_half_done() {
    let bench = Bench::new();
    bench.cow_action(run(1, 2), all());
    bench.copy(run(1, 2), 0x11);
    bench.cow_action(run(10, 1), all());
    bench.cow_action(run(20, 1), BlockSet::default());
    // In truth the ranges are free because the process is gone.
    bench.layer.drop_copies();
    let again = bench.recover();
    let preserved = again.preserved(CHUNK).unwrap();
    assert!(preserved.decided.contains(1) && preserved.decided.contains(2));
    assert!(preserved.decided.contains(20) && !preserved.decided.contains(10));
    let mut read = vec![0xff; 64 * 4096];
    preserved.overlay(&mut read, all(), |_, _| Ok(())).unwrap();
    assert!(read[4096..3 * 4096].iter().all(|byte| *byte == 0x11));
    assert!(bench.space.memory.take_at(0, 8192).is_none(), "the copy's range is in use");
    assert_eq!(
        again.cow_action(CHUNK, run(10, 1), all()).unwrap(),
        CowAction::Copy(vec![run(10, 1)])
    );
}

#[test]
fn the_next_process_guards_nothing_that_is_durable_or_lost() {
    let bench = Bench::new();
    bench.cow_action(run(1, 1), all());
    bench.copy(run(1, 1), 0x11);
    assert!(bench.layer.begin_store(CHUNK));
    bench.mark_stored(None);
    let again = bench.recover();
    assert!(again.is_stored(CHUNK) && !again.is_guarding(CHUNK));
    assert!(bench.space.memory.take_at(0, 4096).is_some(), "the copy is not needed");

    let bench = Bench::new();
    let id = ChunkId::of(b"stored");
    assert!(bench.layer.begin_store(CHUNK));
    bench.mark_stored(Some(id));
    let again = bench.recover();
    assert_eq!(again.stored(CHUNK).unwrap(), Some(Some(id)));
    assert_eq!(again.stored_count(), 1);

    let bench = Bench::new();
    bench.layer.fail("no space");
    let again = bench.recover();
    assert_eq!(again.failure().as_deref(), Some("no space"));
    assert!(!again.is_guarding(CHUNK));
}

#[test]
fn spilled_copies_outlive_the_process_and_their_space_comes_back_with_the_chunk() {
    let bench = Bench::new();
    bench.cow_action(run(1, 2), all());
    bench.spill(run(1, 2), 0x11);
    bench.cow_action(run(5, 1), all());
    bench.copy(run(5, 1), 0x22);
    assert_eq!(bench.cow_action(run(1, 2), all()), CowAction::None);
    assert_eq!((bench.space.spill.used(), bench.spilled_bytes()), (8192, 8192));
    assert_eq!(bench.layer.chunks_with_copies(4), [CHUNK, CHUNK]);
    // In truth the memory is free because the process is gone.
    bench.layer.tracked.iter().for_each(|shard| shard.lock().unwrap().clear());
    let again = bench.recover();
    assert_eq!(bench.space.spill.used(), 16384, "of both processes, in truth one is gone");
    assert!(again.begin_store(CHUNK));
    let preserved = again.preserved(CHUNK).unwrap();
    let mut read = vec![0xff; 64 * 4096];
    let start = bench.layout.span_of(CHUNK).offset;
    let valid = preserved
        .overlay(&mut read, all(), |to, run| again.read_spilled(to, start + run.span().offset))
        .unwrap();
    assert_eq!(valid, all());
    let block = |at: usize| &read[at * 4096..(at + 1) * 4096];
    for (at, fill) in [(0, 0xff), (1, 0x11), (2, 0x11), (3, 0xff), (5, 0x22), (6, 0xff)] {
        assert!(block(at).iter().all(|byte| *byte == fill), "block {at}");
    }
    again.mark_stored(&[(CHUNK, Some(ChunkId::of(&read)))], &bench.layout).unwrap();
    assert_eq!((bench.space.spill.used(), bench.spilled_bytes()), (8192, 0));
    assert!(again.tracked.iter().all(|shard| shard.lock().unwrap().is_empty()));
}

#[test]
fn a_chunk_without_copies_in_memory_takes_no_memory() {
    let bench = Bench::new();
    bench.cow_action(run(1, 1), all());
    bench.spill(run(1, 1), 0x11);
    bench.cow_action(run(20, 1), BlockSet::default());
    assert!(bench.layer.begin_store(CHUNK));
    bench.layer.cancel_store(CHUNK);
    bench.cow_action(run(2, 1), all());
    bench.layer.cancel_copy(CHUNK, run(2, 1));
    assert!(bench.layer.tracked.iter().all(|shard| shard.lock().unwrap().is_empty()));
    assert_eq!(bench.cow_action(run(1, 1), all()), CowAction::None);
    assert_eq!(bench.cow_action(run(20, 1), all()), CowAction::None);
}

#[test]
fn a_layer_that_ends_gives_all_its_space_back() {
    let bench = Bench::new();
    bench.cow_action(run(1, 1), all());
    bench.spill(run(1, 1), 0x11);
    bench.layer.fail("no space");
    assert_eq!(bench.space.spill.used(), 0);
    bench.layers.wait_until_free(|| bench.spilled_bytes() == 0);
    bench.layer.close();
    let is_layers = |name: &str| name.starts_with("layer-");
    bench.layers.wait_until_free(|| {
        let mut files = std::fs::read_dir(bench.dir.path()).unwrap();
        !files.any(|file| is_layers(file.unwrap().file_name().to_str().unwrap()))
    });
}

#[test]
fn a_copy_that_ends_after_its_layer_is_not_written() {
    let bench = Bench::new();
    bench.cow_action(run(1, 1), all());
    assert!(bench.layer.begin_store(CHUNK));
    bench.mark_stored(None);
    bench.layer.close();
    // The old content has been read. It has to be spilled, but nobody needs it.
    assert!(bench.layer.spill_file().unwrap().is_none());
    bench.record(run(1, 1), CopyData::Spilled(bench.space.spill.reserve(4096).unwrap()));
    assert_eq!(bench.space.spill.used(), 0);
    assert!(!bench.dir.path().join("layer-1.spill").exists());
}

#[test]
fn what_an_earlier_process_cannot_have_left_fails_the_layer() {
    let bench = Bench::new();
    bench.cow_action(run(1, 1), all());
    bench.copy(run(1, 1), 0x11);
    assert!(bench.recover().failure().is_some(), "two copies in one slot of memory");

    let all = BlockSet::run(run(0, 64));
    let entry = |decided, spilled| ChunkEntry { stored: None, decided, spilled };
    for (entry, fails) in [
        (entry(all, all), true),
        (entry(all, BlockSet::default()), false),
        (entry(BlockSet::default(), all), true),
    ] {
        let bench = Bench::new();
        bench.layer.table().unwrap().write_blocks(CHUNK, &entry).unwrap();
        let again = bench.recover();
        assert_eq!(again.failure().is_some(), fails, "{entry:?}");
        assert_eq!(again.is_guarding(CHUNK), !fails);
    }

    let bench = Bench::new();
    bench.layer.record.chunks.corrupt_idle(CHUNK.0);
    assert!(bench.recover().failure().is_some(), "durable, but without a table");
    let bench = Bench::new();
    bench.layer.table().unwrap();
    bench.layer.record.chunks.corrupt_idle(CHUNK.0);
    assert!(bench.recover().failure().is_some(), "durable, but without a name");

    let bench = Bench::new();
    bench.cow_action(run(20, 1), BlockSet::default());
    std::fs::remove_file(bench.layer.table_path()).unwrap();
    assert!(bench.recover().failure().is_some(), "the table is gone");

    let bench = Bench::new();
    bench.cow_action(run(1, 1), BlockSet::run(run(0, 64)));
    bench.spill(run(1, 1), 0x11);
    let spill = bench.dir.path().join("layer-1.spill");
    std::fs::write(&spill, b"short").unwrap();
    assert!(bench.recover().failure().is_some(), "the spill file is too short");
    std::fs::remove_file(&spill).unwrap();
    assert!(bench.recover().failure().is_some(), "the spill file is gone");
}

fn counts(chunks: u64) -> ChunkCounts {
    ChunkCounts { now: chunks, capacity: chunks }
}
