use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cairn_store::{ChunkIndex, Geometry};

use super::{ChunkCounts, Epoch, EpochFiles, EpochManager, LayerDir, LayerState, MAX_LAYERS};
use crate::mirror::block_set::BlockSet;
use crate::mirror::cow::memory::CowMemory;
use crate::mirror::epoch::layer::{CopyData, CowAction, Layer};
use crate::mirror::layout::{BLOCK_BYTES, Blocks, Layout};

fn manager() -> EpochManager {
    let files = EpochFiles::private(100);
    let record = files.allocate().unwrap();
    record.begin(Epoch(1));
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::new(Geometry::new(100 << 18, 1 << 18).unwrap());
    EpochManager::new(files, LayerDir::new(dir.path(), &layout).into(), 2, record, Vec::new())
}

#[test]
fn a_layer_settles_when_its_last_ticket_is_back() {
    let epochs = manager();
    let (mut a, mut b) = (epochs.handle(0), epochs.handle(1));
    let (first, _) = epochs.take_ticket(&mut a);
    let layer = epochs.freeze().unwrap().unwrap();
    assert!(!epochs.settle(&layer));
    let (second, _) = epochs.take_ticket(&mut b);
    assert!(second > first);
    assert!(!epochs.settle(&layer));
    epochs.return_ticket(0, first);
    assert!(epochs.settle(&layer));
    epochs.return_ticket(1, second);
}

/// Real threads: while a worker holds a ticket, nobody finds that ticket's epoch settled.
#[test]
fn an_epoch_never_settles_while_a_ticket_of_it_is_out() {
    let epochs = manager();
    let settled = AtomicU64::new(0);
    let (stop, broken) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let (epochs, settled, stop, broken) = (&epochs, &settled, &stop, &broken);
            scope.spawn(move || {
                let mut handle = epochs.handle(worker);
                while !stop.load(Ordering::Relaxed) {
                    let (epoch, _) = epochs.take_ticket(&mut handle);
                    if (0..10).any(|_| settled.load(Ordering::SeqCst) >= epoch.0) {
                        broken.store(true, Ordering::SeqCst);
                    }
                    epochs.return_ticket(worker, epoch);
                }
            });
        }
        for _ in 0..2_000 {
            let layer = epochs.freeze().unwrap().unwrap();
            while !epochs.settle(&layer) {
                std::thread::yield_now();
            }
            settled.store(layer.epoch.0, Ordering::SeqCst);
            epochs.publish(&layer);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(!broken.load(Ordering::SeqCst), "an epoch settled under a ticket");
}

#[test]
fn the_number_of_waiting_layers_is_bounded() {
    let epochs = manager();
    for _ in 0..MAX_LAYERS {
        assert!(epochs.freeze().unwrap().is_some());
    }
    assert!(epochs.freeze().unwrap().is_none());
}

#[test]
fn a_failed_layer_joins_the_current_epoch_unless_a_later_one_waits() {
    let epochs = manager();
    epochs.view().mark_dirty(1);
    let first = epochs.freeze().unwrap().unwrap();
    epochs.view().mark_dirty(2);
    let second = epochs.freeze().unwrap().unwrap();
    assert!(epochs.settle(&first) && epochs.settle(&second));
    epochs.give_up(&first);
    assert_eq!(epochs.view().layers.len(), 2, "the second absorbs the first");
    epochs.view().mark_dirty(3);
    epochs.give_up(&second);
    assert!(epochs.view().layers.is_empty());
    assert_eq!(epochs.view().dirty().iter().collect::<Vec<_>>(), [1, 2, 3]);
}

/// Later checkpoints need the earlier ones, so the newest one is needed by the fewest others.
#[test]
fn a_lack_of_space_fails_the_newest_layer_that_uses_some() {
    let epochs = manager();
    let [first, second, third] = std::array::from_fn(|chunk| {
        epochs.view().mark_dirty(chunk as u64);
        let layer = epochs.freeze().unwrap().unwrap();
        assert!(epochs.settle(&layer));
        layer
    });
    let memory = CowMemory::private(1 << 20);
    let copy = |layer: &Layer, chunk: u64| {
        let (chunk, run) = (ChunkIndex(chunk), Blocks { first: 0, count: 1 });
        let present = BlockSet::run(run);
        assert_eq!(layer.cow_action(chunk, run, present).unwrap(), CowAction::Copy(vec![run]));
        let data = memory.take(BLOCK_BYTES).unwrap();
        layer.record_copy(chunk, run, 64 * chunk.0, CopyData::Memory(data)).unwrap();
        assert!(layer.has_copies());
    };
    copy(&first, 0);
    copy(&second, 1);
    let failed = || [&first, &second, &third].map(|layer| layer.failure().is_some());
    epochs.fail_newest("no space");
    assert_eq!(failed(), [false, true, false]);
    epochs.fail_newest("no space");
    assert_eq!(failed(), [true, true, false]);
    epochs.fail_newest("no space");
    assert_eq!(failed(), [true, true, true], "writes wait although nothing has copies");
    epochs.fail_newest("no space");
}

#[test]
fn a_published_layer_takes_the_ones_it_absorbed_along() {
    let epochs = manager();
    let first = epochs.freeze().unwrap().unwrap();
    let second = epochs.freeze().unwrap().unwrap();
    let third = epochs.freeze().unwrap().unwrap();
    assert!(epochs.settle(&first) && epochs.settle(&second));
    epochs.give_up(&first);
    epochs.publish(&second);
    let left: Vec<_> = epochs.view().layers.iter().map(|layer| layer.epoch).collect();
    assert_eq!(left, [third.epoch]);
}

/// The state of a layer after each step of its life, and where its changes are.
#[test]
fn a_layer_that_fails_joins_the_current_epoch_at_once_and_stays_until_its_checkpoint_ends() {
    let epochs = manager();
    epochs.view().mark_dirty(1);
    let layer = epochs.freeze().unwrap().unwrap();
    assert_eq!(layer.state(), LayerState::Frozen);
    assert!(epochs.settle(&layer));
    assert_eq!(layer.state(), LayerState::Settled);
    epochs.fail_newest("no space");
    assert_eq!(layer.state(), LayerState::Failed);
    assert!(epochs.view().dirty().contains(1));
    epochs.fail(&layer, "again");
    assert_eq!(layer.failure().as_deref(), Some("no space"), "the first reason stays");
    let later = epochs.freeze().unwrap().unwrap();
    assert!(epochs.settle(&later));
    epochs.give_up(&layer);
    assert_eq!(layer.state(), LayerState::Lost);
    epochs.publish(&later);
    assert_eq!((layer.state(), later.state()), (LayerState::Closed, LayerState::Closed));
    assert!(epochs.view().layers.is_empty());
}

/// Real threads: workers write the last chunk of the disk while it grows and is frozen. A disk of
/// `n` chunks has the size `n` here.
#[test]
fn a_layer_has_every_write_up_to_its_size_and_none_behind_it() {
    const CAPACITY: u64 = 1 << 20;
    let counts = |now| ChunkCounts { now, capacity: CAPACITY };
    let dir = tempfile::tempdir().unwrap();
    let (files, _) = EpochFiles::open(dir.path(), counts(1)).unwrap();
    let record = files.allocate().unwrap();
    record.begin(Epoch(1));
    let layers = LayerDir::new(dir.path(), &Layout::new(Geometry::new(1 << 20, 1 << 18).unwrap()));
    let epochs = EpochManager::new(files, layers.into(), 2, record, Vec::new());
    epochs.set_size(1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let (epochs, stop) = (&epochs, &stop);
            scope.spawn(move || {
                let mut handle = epochs.handle(worker);
                while !stop.load(Ordering::Relaxed) {
                    let size = epochs.size();
                    let (epoch, _) = epochs.take_ticket(&mut handle);
                    handle.view().mark_dirty(size - 1);
                    epochs.return_ticket(worker, epoch);
                }
            });
        }
        scope.spawn(|| {
            for size in (100..CAPACITY).step_by(997) {
                epochs.make_room(counts(size)).unwrap();
                epochs.set_size(size);
            }
            stop.store(true, Ordering::Relaxed);
        });
        let (mut sizes, mut written) = (Vec::new(), 0);
        while !stop.load(Ordering::Relaxed) {
            epochs.prepare().unwrap();
            let layer = epochs.freeze().unwrap().unwrap();
            while !epochs.settle(&layer) {
                std::thread::yield_now();
            }
            let behind = layer.dirty().iter().find(|chunk| *chunk >= layer.size());
            assert_eq!(behind, None, "a disk of {} chunks", layer.size());
            written += layer.dirty().len();
            sizes.push(layer.size());
            epochs.publish(&layer);
        }
        assert!(sizes.is_sorted() && written > 0);
    });
}

#[test]
fn a_worker_that_sleeps_keeps_no_layer_that_has_ended() {
    let epochs = manager();
    let mut idle = epochs.handle(0);
    let freeze = |_| Arc::downgrade(&epochs.freeze().unwrap().unwrap());
    let layers: Vec<_> = (0..MAX_LAYERS).map(freeze).collect();
    let (epoch, _) = epochs.take_ticket(&mut idle);
    epochs.return_ticket(0, epoch);
    idle.forget_layers();
    for layer in &layers {
        let layer = layer.upgrade().unwrap();
        assert!(epochs.settle(&layer));
        epochs.publish(&layer);
    }
    assert!(layers.iter().all(|layer| layer.upgrade().is_none()));
    assert_eq!(epochs.take_ticket(&mut idle).0, Epoch(1 + MAX_LAYERS as u64));
    assert!(idle.view().layers.is_empty());
}
