//! The current epoch, and the layers of earlier epochs.
//!
//! A write takes a *ticket* of the current epoch before it is submitted, and returns the ticket
//! when it completes. The snapshot of epoch e holds exactly the writes with tickets of epochs up to
//! e. The epoch only grows, and a ticket is taken after the request was popped. So a write that the
//! guest sends after another write's completion never has an older epoch: a checkpoint is
//! consistent over all queues.
//!
//! Taking a ticket and freezing an epoch race on two variables, the ticket count and the
//! generation. The worker counts its ticket and then checks the generation. The freeze changes the
//! generation and then checks the counts. With a sequentially consistent fence in between, at least
//! one of them sees the other: either the worker starts again in the new epoch, or the freeze sees
//! the ticket.
//!
//! The size of the disk changes under the lock under which an epoch ends. A worker that has seen
//! the larger size takes its ticket in an epoch that has not ended then. So no write beyond the size
//! of a layer is in its epoch.
//!
//! A layer is *settled* when no ticket of its epoch is out. Writes of later epochs wait for that,
//! which takes as long as the slowest write in flight. It keeps everything after it simple: the
//! dirty set of a settled layer is final, and no write of its epoch can reach the mirror any more.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};

use super::Epoch;
use super::layer::Layer;
use super::layer_state::LayerState;
use super::record::{ChunkCounts, EpochFiles, EpochRecord};
use crate::mirror::bits::DirtySet;
use crate::mirror::files::layer_table::LayerDir;

/// The most layers that may wait to be published.
pub(crate) const MAX_LAYERS: usize = 16;

/// Ticket counters of each worker, indexed by epoch. More than [`MAX_LAYERS`], so that two epochs
/// with tickets out never share a counter.
const TICKET_COUNTERS: u64 = 32;

/// The generation of a view that has to be replaced before it is used.
const NO_GENERATION: u64 = u64::MAX;

/// What a write needs to know about epochs. It is replaced as a whole.
pub(crate) struct EpochView {
    generation: u64,
    pub(crate) epoch: Epoch,
    record: Arc<EpochRecord>,
    /// The layers that are not published, oldest first.
    pub(crate) layers: Vec<Arc<Layer>>,
}

impl EpochView {
    /// The chunks that the current epoch has changed so far.
    pub(crate) fn dirty(&self) -> &DirtySet {
        self.record.chunks.dirty()
    }

    /// Records that the current epoch changes a chunk.
    pub(crate) fn mark_dirty(&self, chunk: u64) {
        self.record.chunks.schedule(chunk);
    }

    /// The sets of chunks that differ from the parent snapshot.
    pub(crate) fn dirty_sets(&self) -> impl Iterator<Item = &DirtySet> {
        self.layers.iter().map(|layer| layer.dirty()).chain([self.dirty()])
    }
}

/// The ticket counters of one worker, on cache lines of their own.
#[repr(align(128))]
struct Tickets([AtomicU64; TICKET_COUNTERS as usize]);

/// One worker's access to the epochs: the worker's number, and the view that it saw last.
pub(crate) struct EpochHandle {
    worker: usize,
    view: Arc<EpochView>,
}

impl EpochHandle {
    /// The view that the last ticket belongs to.
    pub(crate) fn view(&self) -> &Arc<EpochView> {
        &self.view
    }

    /// Forgets the layers, before the worker sleeps: they hold memory and files after they have
    /// ended.
    pub(crate) fn forget_layers(&mut self) {
        if !self.view.layers.is_empty() {
            let (epoch, record) = (self.view.epoch, self.view.record.clone());
            let view = EpochView { generation: NO_GENERATION, epoch, record, layers: Vec::new() };
            self.view = Arc::new(view);
        }
    }
}

/// How far the layers have been stored. Equal values mean that there was no progress in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreProgress {
    /// The number of layers that have ended in this process.
    pub(crate) ended: u64,
    /// The number of chunks of the other layers that are stored.
    pub(crate) done: u64,
}

/// The epochs of a mirror.
pub(crate) struct EpochManager {
    files: EpochFiles,
    layer_dir: Arc<LayerDir>,
    generation: AtomicU64,
    epoch: AtomicU64,
    /// The size of the disk.
    size: AtomicU64,
    /// The number of layers that have ended.
    ended: AtomicU64,
    current: Mutex<Arc<EpochView>>,
    tickets: Vec<Tickets>,
}

impl EpochManager {
    /// `record` is that of the current epoch. `layers` are the earlier epochs that are not
    /// published. The caller sets the size of the disk.
    pub(crate) fn new(
        files: EpochFiles,
        layer_dir: Arc<LayerDir>,
        workers: usize,
        record: EpochRecord,
        layers: Vec<Arc<Layer>>,
    ) -> EpochManager {
        let epoch = record.epoch();
        let view = EpochView { generation: 0, epoch, record: Arc::new(record), layers };
        EpochManager {
            files,
            layer_dir,
            generation: AtomicU64::new(0),
            epoch: AtomicU64::new(epoch.0),
            size: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            current: Mutex::new(Arc::new(view)),
            tickets: (0..workers)
                .map(|_| Tickets(std::array::from_fn(|_| AtomicU64::new(0))))
                .collect(),
        }
    }

    /// The size of the disk.
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    /// Makes room for the chunks of a disk that is going to grow. After an error, the disk keeps its
    /// size and everything goes on.
    pub(crate) fn make_room(&self, chunks: ChunkCounts) -> io::Result<()> {
        // No freeze can come in between, which would use another record.
        let current = self.current();
        current.record.grow(chunks)?;
        self.files.grow(chunks)
    }

    /// Sets the size of the disk, for which there is room.
    pub(crate) fn set_size(&self, size: u64) {
        let _current = self.current();
        self.size.store(size, Ordering::SeqCst);
    }

    fn current(&self) -> MutexGuard<'_, Arc<EpochView>> {
        self.current.lock().expect("no code panics with the epochs locked")
    }

    /// The present view.
    pub(crate) fn view(&self) -> Arc<EpochView> {
        self.current().clone()
    }

    pub(crate) fn handle(&self, worker: usize) -> EpochHandle {
        EpochHandle { worker, view: self.view() }
    }

    /// Takes a ticket of the current epoch, which is then `handle.view().epoch`. Also returns
    /// whether a ticket of an older epoch was held for a moment. In that case a thread that checked
    /// at that moment whether the older epoch is settled has to check again.
    pub(crate) fn take_ticket(&self, handle: &mut EpochHandle) -> (Epoch, bool) {
        let mut stale = false;
        loop {
            if self.generation.load(Ordering::SeqCst) != handle.view.generation {
                handle.view = self.view();
            }
            let epoch = handle.view.epoch;
            let counter = self.counter(handle.worker, epoch);
            counter.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if self.generation.load(Ordering::SeqCst) == handle.view.generation {
                return (epoch, stale);
            }
            counter.fetch_sub(1, Ordering::SeqCst);
            stale = true;
        }
    }

    /// Returns a ticket. The result tells whether a frozen epoch may have settled by that.
    pub(crate) fn return_ticket(&self, worker: usize, epoch: Epoch) -> bool {
        let before = self.counter(worker, epoch).fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "a ticket was returned twice");
        fence(Ordering::SeqCst);
        before == 1 && self.epoch.load(Ordering::SeqCst) != epoch.0
    }

    fn counter(&self, worker: usize, epoch: Epoch) -> &AtomicU64 {
        &self.tickets[worker].0[(epoch.0 % TICKET_COUNTERS) as usize]
    }

    /// Frozen → Settled, if no write of the layer's epoch is in flight. Returns whether the layer
    /// is settled.
    ///
    /// A worker's counter that is zero after the freeze stays zero, except for tickets that are
    /// returned unused. So the counters can be checked one after the other.
    pub(crate) fn settle(&self, layer: &Layer) -> bool {
        if layer.state().is_settled() {
            return true;
        }
        fence(Ordering::SeqCst);
        let settled = (0..self.tickets.len())
            .all(|worker| self.counter(worker, layer.epoch).load(Ordering::SeqCst) == 0);
        if settled {
            layer.settle();
        }
        settled
    }

    /// Ends the current epoch, which becomes a layer. Takes constant time. Returns `None` if
    /// [`MAX_LAYERS`] layers wait already.
    pub(crate) fn freeze(&self) -> io::Result<Option<Arc<Layer>>> {
        let next = self.files.allocate()?;
        let mut current = self.current();
        if current.layers.len() == MAX_LAYERS {
            next.remove();
            return Ok(None);
        }
        // The record may be older than the growth of the disk.
        if let Err(error) = self.files.fit(&next) {
            next.remove();
            return Err(error);
        }
        let epoch = Epoch(current.epoch.0 + 1);
        // First: there is an open epoch at any time.
        next.begin(epoch);
        current.record.freeze(self.size());
        let layer = Arc::new(Layer::new(current.record.clone(), self.layer_dir.clone()));
        let mut layers = current.layers.clone();
        layers.push(layer.clone());
        let view = EpochView { generation: 0, epoch, record: Arc::new(next), layers };
        self.replace(&mut current, view);
        Ok(Some(layer))
    }

    /// Prepares what the next [`EpochManager::freeze`] needs.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        self.files.prepare()
    }

    /// Closes `layer`, whose snapshot is published, and all earlier layers, which it has absorbed.
    pub(crate) fn publish(&self, layer: &Layer) {
        let mut current = self.current();
        let (done, layers) =
            current.layers.iter().cloned().partition(|old| old.epoch <= layer.epoch);
        self.drop_layers(&mut current, done, layers);
    }

    /// Abandons a layer whose checkpoint failed.
    ///
    /// While a later layer waits, the abandoned one stays, and the later one absorbs it. Otherwise
    /// its changes, and the changes of the layers that it had absorbed, join the current epoch.
    pub(crate) fn give_up(&self, layer: &Layer) {
        let mut current = self.current();
        // Before anything else: the process can end in between.
        layer.abandon();
        if current.layers.last().is_some_and(|last| last.epoch > layer.epoch) {
            return;
        }
        // No freeze can come in between, so this set belongs to the next layer.
        for chunk in current.layers.iter().flat_map(|failed| failed.dirty().iter()) {
            current.mark_dirty(chunk);
        }
        let done = current.layers.clone();
        self.drop_layers(&mut current, done, Vec::new());
    }

    /// How far the layers have been stored.
    pub(crate) fn progress(&self) -> StoreProgress {
        let view = self.view();
        let done = view.layers.iter().map(|layer| layer.done_count()).sum();
        StoreProgress { ended: self.ended.load(Ordering::Relaxed), done }
    }

    /// Fails a layer: no snapshot can be made of it, and no write waits for it any more. Its
    /// changes join the current epoch at once, so that the next checkpoint does not need this
    /// layer.
    pub(crate) fn fail(&self, layer: &Layer, reason: &str) {
        // No freeze can come in between.
        let current = self.current();
        if !matches!(layer.state(), LayerState::Settled | LayerState::Abandoned) {
            debug_assert!(layer.state().is_settled(), "the dirty set may still grow");
            return;
        }
        // Its changes first: the process can end in between.
        for chunk in layer.dirty().iter() {
            current.mark_dirty(chunk);
        }
        layer.fail(reason);
    }

    /// Does [`EpochManager::fail`] for the newest layer that has copies, or for the newest layer if
    /// none has any. A layer needs those before it, because its snapshot has their changes too. So
    /// the newest one is needed by the fewest others. A layer that is not settled has no copies yet,
    /// so no write waits for space because of it.
    pub(crate) fn fail_newest(&self, reason: &str) {
        let view = self.view();
        let guards =
            |layer: &&Arc<Layer>| layer.state().is_settled() && !layer.state().has_failed();
        let mut guarding = view.layers.iter().rev().filter(guards);
        let newest = guarding.clone().next();
        if let Some(layer) = guarding.find(|layer| layer.has_copies()).or(newest) {
            self.fail(layer, reason);
        }
    }

    fn drop_layers(
        &self,
        current: &mut MutexGuard<'_, Arc<EpochView>>,
        done: Vec<Arc<Layer>>,
        layers: Vec<Arc<Layer>>,
    ) {
        self.ended.fetch_add(done.len() as u64, Ordering::Relaxed);
        for layer in done {
            layer.close();
        }
        let record = current.record.clone();
        self.replace(current, EpochView { generation: 0, epoch: current.epoch, record, layers });
    }

    fn replace(&self, current: &mut MutexGuard<'_, Arc<EpochView>>, view: EpochView) {
        let generation = current.generation + 1;
        self.epoch.store(view.epoch.0, Ordering::SeqCst);
        **current = Arc::new(EpochView { generation, ..view });
        self.generation.store(generation, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
