//! EpochFiles: which writes a checkpoint holds.
//!
//! A write takes a *ticket* of the current epoch before it is submitted and gives it back when it
//! completes. The snapshot of epoch e holds exactly the writes with tickets up to e. Since the
//! epoch only grows and a ticket is taken after the request was popped, a write that the guest
//! sends after another's completion never has an older epoch: the cut is consistent over queues.
//!
//! Taking a ticket and freezing race on two variables, the ticket count and the generation. The
//! worker counts itself in and then looks at the generation; the freeze changes the generation and
//! then looks at the counts. With a sequentially consistent fence between, at least one sees the
//! other: either the worker starts again in the new epoch, or the freeze sees its ticket.
//!
//! A layer is *settled* when no ticket of its epoch is out. Writes of later epochs wait for that:
//! it takes as long as the slowest write in flight, and it makes everything after it simple, because
//! the dirty set of a settled layer is final and no old write can land in the mirror any more.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::mirror::bits::DirtySet;
use crate::mirror::epoch::Epoch;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::record::{EpochFiles, EpochRecord};
use crate::mirror::files::journal::Journal;

/// The most frozen epochs that may wait to be published.
pub(crate) const MAX_LAYERS: usize = 16;

/// Ticket counters of each worker, indexed by epoch. More than [`MAX_LAYERS`], so that two epochs
/// with tickets out never share a counter.
const TICKET_COUNTERS: u64 = 32;

/// What a write needs to know of epochs; replaced as a whole.
pub(crate) struct EpochView {
    generation: u64,
    pub(crate) epoch: Epoch,
    state: Arc<EpochRecord>,
    /// Frozen epochs that are not published, oldest first.
    pub(crate) layers: Vec<Arc<Layer>>,
}

impl EpochView {
    /// What this epoch changed so far.
    pub(crate) fn dirty(&self) -> &DirtySet {
        &self.state.dirty
    }
}

/// The ticket counters of one worker, on cache lines of their own.
#[repr(align(128))]
struct Tickets([AtomicU64; TICKET_COUNTERS as usize]);

/// One worker's access to the epochs: its number and the view it saw last.
pub(crate) struct EpochHandle {
    worker: usize,
    view: Arc<EpochView>,
}

impl EpochHandle {
    /// The view that the last ticket belongs to.
    pub(crate) fn view(&self) -> &Arc<EpochView> {
        &self.view
    }
}

/// How far storing the frozen epochs has come. Equal values mean that it did not get on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreProgress {
    pub(crate) layers: usize,
    pub(crate) done: u64,
}

/// The epochs of a mirror.
pub(crate) struct EpochManager {
    files: EpochFiles,
    pub(crate) journal: Arc<Journal>,
    generation: AtomicU64,
    epoch: AtomicU64,
    current: Mutex<Arc<EpochView>>,
    tickets: Vec<Tickets>,
}

impl EpochManager {
    /// `state` is that of the current epoch, `layers` are those before it that are not published.
    pub(crate) fn new(
        files: EpochFiles,
        journal: Arc<Journal>,
        workers: usize,
        state: EpochRecord,
        layers: Vec<Arc<Layer>>,
    ) -> EpochManager {
        let epoch = state.epoch();
        let view = EpochView { generation: 0, epoch, state: Arc::new(state), layers };
        EpochManager {
            files,
            journal,
            generation: AtomicU64::new(0),
            epoch: AtomicU64::new(epoch.0),
            current: Mutex::new(Arc::new(view)),
            tickets: (0..workers)
                .map(|_| Tickets(std::array::from_fn(|_| AtomicU64::new(0))))
                .collect(),
        }
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

    /// Takes a ticket of the current epoch, which is then `epoch_handle.view().epoch`. Also tells
    /// whether a ticket of an older epoch was held for a moment: whoever looked for that epoch to
    /// settle just then has to look again.
    pub(crate) fn take_ticket(&self, epoch_handle: &mut EpochHandle) -> (Epoch, bool) {
        let mut stale = false;
        loop {
            if self.generation.load(Ordering::SeqCst) != epoch_handle.view.generation {
                epoch_handle.view = self.view();
            }
            let epoch = epoch_handle.view.epoch;
            let counter = self.counter(epoch_handle.worker, epoch);
            counter.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if self.generation.load(Ordering::SeqCst) == epoch_handle.view.generation {
                return (epoch, stale);
            }
            counter.fetch_sub(1, Ordering::SeqCst);
            stale = true;
        }
    }

    /// Gives a ticket back. Returns whether a frozen epoch may have settled by that.
    pub(crate) fn return_ticket(&self, worker: usize, epoch: Epoch) -> bool {
        let before = self.counter(worker, epoch).fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "a ticket was given back twice");
        fence(Ordering::SeqCst);
        before == 1 && self.epoch.load(Ordering::SeqCst) != epoch.0
    }

    fn counter(&self, worker: usize, epoch: Epoch) -> &AtomicU64 {
        &self.tickets[worker].0[(epoch.0 % TICKET_COUNTERS) as usize]
    }

    /// Whether no write of the layer's epoch is submitted any more.
    ///
    /// A worker's counter that is zero after the freeze stays so but for tickets that are given
    /// back unused, hence the counters may be looked at one after the other.
    pub(crate) fn settle(&self, layer: &Layer) -> bool {
        if layer.is_settled() {
            return true;
        }
        fence(Ordering::SeqCst);
        let settled = (0..self.tickets.len())
            .all(|worker| self.counter(worker, layer.epoch).load(Ordering::SeqCst) == 0);
        if settled {
            layer.set_settled();
        }
        settled
    }

    /// Ends the current epoch: its dirty set becomes a layer. Constant time. `None` if
    /// [`MAX_LAYERS`] wait already.
    pub(crate) fn freeze(&self) -> io::Result<Option<Arc<Layer>>> {
        let next = self.files.allocate()?;
        let mut current = self.current();
        if current.layers.len() == MAX_LAYERS {
            next.remove();
            return Ok(None);
        }
        let layer = Arc::new(Layer::new(current.state.clone(), self.journal.clone()));
        let mut layers = current.layers.clone();
        layers.push(layer.clone());
        let epoch = Epoch(current.epoch.0 + 1);
        next.begin(epoch);
        self.replace(
            &mut current,
            EpochView { generation: 0, epoch, state: Arc::new(next), layers },
        );
        Ok(Some(layer))
    }

    /// Makes ready what the next [`EpochManager::freeze`] needs.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        self.files.prepare()
    }

    /// Removes `layer` and all before it, which it has absorbed: they are published.
    pub(crate) fn publish(&self, layer: &Layer) {
        let mut current = self.current();
        let (done, layers) =
            current.layers.iter().cloned().partition(|old| old.epoch <= layer.epoch);
        self.drop_layers(&mut current, done, layers);
    }

    /// Deals with a layer that cannot be published.
    ///
    /// While a later layer waits, the failed one stays: the later one absorbs it. Otherwise its
    /// changes, and those of the layers that it had absorbed, join the current epoch.
    pub(crate) fn give_up(&self, layer: &Layer) {
        let mut current = self.current();
        // Before anything else: the process may end in between.
        layer.end();
        if current.layers.last().is_some_and(|last| last.epoch > layer.epoch) {
            return;
        }
        // No freeze can come between: this set is the next layer's.
        for chunk in current.layers.iter().flat_map(|failed| failed.dirty().iter()) {
            current.dirty().insert(chunk);
        }
        let done = current.layers.clone();
        self.drop_layers(&mut current, done, Vec::new());
    }

    /// How far storing the frozen epochs has come.
    pub(crate) fn progress(&self) -> StoreProgress {
        let view = self.view();
        let done = view.layers.iter().map(|layer| layer.done_count()).sum();
        StoreProgress { layers: view.layers.len(), done }
    }

    /// Gives a frozen epoch up: its snapshot cannot be had any more, and no write waits for it. Its changes
    /// join the current epoch at once, so that the next checkpoint does not need this one.
    pub(crate) fn fail(&self, layer: &Layer, reason: &str) {
        debug_assert!(layer.is_settled(), "the dirty set may still grow");
        // No freeze can come between.
        let current = self.current();
        // Its changes first: the process may end in between.
        for chunk in layer.dirty().iter() {
            current.dirty().insert(chunk);
        }
        layer.set_failure(reason);
    }

    /// As [`EpochManager::fail`], for the oldest one that is not given up already. One that is not settled has no
    /// copies yet that anybody would wait for.
    pub(crate) fn fail_oldest(&self, reason: &str) {
        let view = self.view();
        let is_it = |layer: &&Arc<Layer>| layer.is_settled() && layer.failure().is_none();
        if let Some(layer) = view.layers.iter().find(is_it) {
            self.fail(layer, reason);
        }
    }

    fn drop_layers(
        &self,
        current: &mut MutexGuard<'_, Arc<EpochView>>,
        done: Vec<Arc<Layer>>,
        layers: Vec<Arc<Layer>>,
    ) {
        for layer in done {
            layer.close();
        }
        // Nobody writes a record for an epoch without a layer that would still be needed.
        let is_needed = |epoch| layers.iter().any(|layer| layer.epoch == epoch);
        let shortened = match layers.is_empty() {
            true => self.journal.clear(),
            false => self.journal.compact(is_needed),
        };
        if let Err(error) = shortened {
            tracing::error!(%error, "the journal of the mirror cannot be shortened");
        }
        let state = current.state.clone();
        self.replace(current, EpochView { generation: 0, epoch: current.epoch, state, layers });
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
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::{Epoch, EpochFiles, EpochManager, Journal, MAX_LAYERS};

    fn manager() -> EpochManager {
        let files = EpochFiles::private(100);
        let state = files.allocate().unwrap();
        state.begin(Epoch(1));
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(&dir.path().join("journal")).unwrap();
        EpochManager::new(files, journal.into(), 2, state, Vec::new())
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
                    let mut epoch_handle = epochs.handle(worker);
                    while !stop.load(Ordering::Relaxed) {
                        let (epoch, _) = epochs.take_ticket(&mut epoch_handle);
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
        epochs.view().dirty().insert(1);
        let first = epochs.freeze().unwrap().unwrap();
        epochs.view().dirty().insert(2);
        let second = epochs.freeze().unwrap().unwrap();
        epochs.give_up(&first);
        assert_eq!(epochs.view().layers.len(), 2, "the second absorbs the first");
        epochs.view().dirty().insert(3);
        epochs.give_up(&second);
        assert!(epochs.view().layers.is_empty());
        assert_eq!(epochs.view().dirty().iter().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn a_published_layer_takes_the_ones_it_absorbed_along() {
        let epochs = manager();
        let first = epochs.freeze().unwrap().unwrap();
        let second = epochs.freeze().unwrap().unwrap();
        let third = epochs.freeze().unwrap().unwrap();
        epochs.give_up(&first);
        epochs.publish(&second);
        let left: Vec<_> = epochs.view().layers.iter().map(|layer| layer.epoch).collect();
        assert_eq!(left, [third.epoch]);
    }
}
