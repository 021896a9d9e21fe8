use std::sync::Arc;

use cairn_store::{ChunkId, ChunkIndex, Geometry};

use super::{BlockSet, Blocks, CowAction, Epoch, Layer};
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::cow::memory::CowMemory;
use crate::mirror::cow::range_allocator::RangeAllocator;
use crate::mirror::cow::{CopyData, CowSpace, PreservedRun};
use crate::mirror::epoch::record::{ChunkCounts, EpochFiles};
use crate::mirror::files::journal::{ChunkEvent, CopyLocation, Journal, Record};
use crate::mirror::layout::Layout;

const CHUNK: ChunkIndex = ChunkIndex(3);

/// A layer of ten chunks, and what it leaves behind.
struct Bench {
    dir: tempfile::TempDir,
    space: CowSpace,
    journal: Arc<Journal>,
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
        let journal = Arc::new(Journal::open(&dir.path().join("journal")).unwrap());
        let layer = Layer::new(Arc::new(record), journal.clone());
        layer.settle();
        let space = CowSpace {
            memory: CowMemory::new(tempfile::tempfile().unwrap(), 1 << 20).unwrap(),
            spill_buffers: BufferPool::new(0),
            spill: RangeAllocator::new(1 << 20, 0),
        };
        Bench { dir, space, journal, layer }
    }

    fn cow_action(&self, run: Blocks, present: BlockSet) -> CowAction {
        self.layer.cow_action(CHUNK, run, present).unwrap()
    }

    fn copy(&self, run: Blocks, fill: u8) {
        let mut buffer = self.space.memory.take(run.span().len).unwrap();
        buffer.fill(fill);
        self.layer
            .record_copy(CHUNK, PreservedRun { run, data: CopyData::Memory(buffer) })
            .unwrap();
    }

    /// The layer as the next process has it.
    fn recover(&self) -> Layer {
        let (_, mut found) = EpochFiles::open(self.dir.path(), counts(10)).unwrap();
        let records = self.journal.read().unwrap().unwrap();
        let layout = Layout::new(Geometry::new(10 * 256 * 1024, 256 * 1024).unwrap());
        let record = found.pop().unwrap();
        Layer::recover(record, &self.journal, Some(&records), &layout, &self.space)
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
    let preserved = bench.layer.preserved(CHUNK);
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
    let preserved = bench.layer.preserved(CHUNK);
    assert_eq!(preserved.overlay(&mut read, all(), |_, _| Ok(())).unwrap(), all());
    assert!(read[4096..8192].iter().all(|byte| *byte == 0) && read[8192] == 0xff);
    assert_eq!(
        bench.cow_action(run(2, 1), all()),
        CowAction::Copy(vec![run(2, 1)]),
        "not durable yet"
    );
    bench.layer.mark_stored(&[(CHUNK, Some(ChunkId::of(&read)))]).unwrap();
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
    let preserved = again.preserved(CHUNK);
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
    bench.layer.mark_stored(&[(CHUNK, None)]).unwrap();
    let again = bench.recover();
    assert!(again.is_stored(CHUNK) && !again.is_guarding(CHUNK));
    assert!(bench.space.memory.take_at(0, 4096).is_some(), "the copy is not needed");

    let bench = Bench::new();
    let id = ChunkId::of(b"stored");
    assert!(bench.layer.begin_store(CHUNK));
    bench.layer.mark_stored(&[(CHUNK, Some(id))]).unwrap();
    assert_eq!(bench.recover().stored().get(&CHUNK), Some(&Some(id)));

    let bench = Bench::new();
    bench.layer.fail("no space");
    let again = bench.recover();
    assert_eq!(again.failure().as_deref(), Some("no space"));
    assert!(!again.is_guarding(CHUNK));
}

#[test]
fn a_journal_that_cannot_be_right_is_refused() {
    let bench = Bench::new();
    bench.cow_action(run(1, 1), all());
    bench.copy(run(1, 1), 0x11);
    assert!(bench.recover().failure().is_some(), "two copies in one range");

    let copied = |at| ChunkEvent::Copied(run(1, 1), CopyLocation::File(at));
    for (chunk, event) in [
        (ChunkIndex(4), ChunkEvent::Stored(None)),
        (ChunkIndex(4), ChunkEvent::Absent(run(1, 1))),
        (ChunkIndex(10), ChunkEvent::Stored(None)),
        (CHUNK, copied(512)),
        (CHUNK, copied(1 << 20)),
        (CHUNK, ChunkEvent::Absent(run(60, 5))),
    ] {
        let bench = Bench::new();
        bench.journal.write([Record { epoch: Epoch(1), chunk, event }]).unwrap();
        let again = bench.recover();
        assert!(again.failure().is_some() && !again.is_guarding(CHUNK), "{chunk:?} {event:?}");
    }
    let bench = Bench::new();
    let event = copied(4096);
    bench.journal.write([Record { epoch: Epoch(1), chunk: CHUNK, event }]).unwrap();
    assert!(bench.recover().failure().is_none(), "a whole block inside of the spill file");
}

fn counts(chunks: u64) -> ChunkCounts {
    ChunkCounts { now: chunks, capacity: chunks }
}
