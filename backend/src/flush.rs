//! Flushes that have to write the map, because blocks have become present since it was last
//! written.
//!
//! The order is: copy the presence bits of completed writes, sync the data, write the copied bits
//! to the map, sync the map. So a presence bit never becomes durable before the block's data. One
//! thread does this. One pass serves all flushes that arrived during the previous pass. The same
//! thread records write intent in the map before the first write to a region. It alternates between
//! the two, so that a flush waits for at most one write of intent, even while that fails.

use std::io;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::Root;

use crate::local_disk::LocalDisk;
use crate::log_limit::LogLimit;
use crate::mirror::Mirror;
use crate::mirror::files::data_sync::DataSync;
use crate::mirror::files::disk_file::DiskFile;
use crate::mirror::files::map::MapFile;
use crate::mirror::intent::RegionSet;
use crate::mirror::layout::{Layout, Span};
use crate::mirror::presence::Presence;

/// Called with the result of a flush.
type FlushDone = Box<dyn FnOnce(io::Result<()>) + Send>;

/// The delay after write intent could not be recorded.
const INTENT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// How long recording write intent may fail before the writes that wait for it fail.
pub(crate) const INTENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The map file, and how much of the mirror's state it holds. After a failed sync of the data file it
/// is not written any more.
pub(crate) struct MapWriter {
    map: Mutex<MapFile>,
    data_sync: Arc<DataSync>,
    /// The presence version that the map holds.
    durable: AtomicU64,
}

impl MapWriter {
    pub(crate) fn new(map: MapFile, data_sync: Arc<DataSync>) -> MapWriter {
        MapWriter { map: Mutex::new(map), data_sync, durable: AtomicU64::new(0) }
    }

    /// Locks the map. Returns an error if it may not be written any more.
    fn map(&self) -> io::Result<MutexGuard<'_, MapFile>> {
        let map = self.map.lock().expect("no code panics with the map locked");
        self.data_sync.check()?;
        Ok(map)
    }

    fn is_current(&self, presence: &Presence) -> bool {
        self.durable.load(Ordering::SeqCst) >= presence.version()
    }

    /// Records the intent to write to `regions`, with one write of the map.
    pub(crate) fn write_intent(&self, mirror: &Mirror, regions: &RegionSet) -> io::Result<()> {
        let map = self.map()?;
        if !mirror.intent().has_all(regions) {
            map.write_intent(&mirror.intent().bytes_with(regions))?;
            mirror.intent().set(regions);
        }
        Ok(())
    }

    /// Clears the intent of regions in which nothing has changed since the parent snapshot.
    pub(crate) fn clear_unchanged_intent(
        &self,
        mirror: &Mirror,
        data: &DiskFile,
    ) -> io::Result<()> {
        // Before the first bit is cleared: whoever writes the map meanwhile would write it without
        // regions whose data is not durable.
        let map = self.map()?;
        let cleared = mirror.intent().clear_unchanged(|region| mirror.is_changed(region));
        if cleared.is_empty() {
            return Ok(());
        }
        // The mirror must hold the parent's content durably before the map says that they are
        // equal.
        if let Err(error) = self.data_sync.sync(data) {
            mirror.intent().restore(&cleared);
            return Err(error);
        }
        // If this fails, the map may have the regions or not. Their bits stay cleared, so the next
        // write to one of them records it again.
        map.write_intent(&mirror.intent().bytes())
    }

    /// Makes room in the map and in the data file for a disk that is going to grow, and then records
    /// its size durably in the map. After an error, the disk keeps its size and everything goes on;
    /// the next process may find the new size.
    pub(crate) fn record_growth(&self, data: &DiskFile, layout: &Layout) -> io::Result<()> {
        self.map()?.make_room(layout)?;
        if data.len()? < layout.file_len() {
            data.set_len(layout.file_len())?;
        }
        // A map that says so never comes before the file that is so long.
        self.data_sync.sync_length(data)?;
        self.map()?.set_size(layout.size())
    }

    /// Makes everything durable that has completed.
    ///
    /// If the map cannot be written, its pages are written again by the next flush, because they are
    /// still in memory. If the data cannot be synced, there is no next flush: see [`DataSync`].
    pub(crate) fn flush(&self, mirror: &Mirror, data: &DiskFile) -> io::Result<()> {
        let map = self.map()?;
        let version = mirror.presence().version();
        let pages = mirror.presence().take_changed();
        let result = self.data_sync.sync(data).and_then(|()| match pages.is_empty() {
            true => Ok(()),
            false => map.write_pages(&pages),
        });
        match &result {
            Ok(()) => {
                mirror.presence().are_durable();
                self.durable.store(version, Ordering::SeqCst);
            }
            Err(_) => mirror.presence().give_back(),
        }
        result
    }
}

/// What the thread has to do. Its size is bounded: a worker waits for one flush at a time.
struct FlushRequests {
    flushes: Vec<FlushDone>,
    /// The regions that writes wait for.
    wanted: RegionSet,
    /// When to try again to record them, after a failure.
    retry_at: Option<Instant>,
    /// Since when recording has failed.
    failing_since: Option<Instant>,
}

impl FlushRequests {
    /// How long the thread may sleep; `None` if there is something to do.
    fn idle_time(&self, now: Instant) -> Option<Duration> {
        let until_retry = match (self.wanted.is_empty(), self.retry_at) {
            (true, _) => Duration::MAX,
            (false, Some(at)) => at.saturating_duration_since(now),
            (false, None) => Duration::ZERO,
        };
        (self.flushes.is_empty() && !until_retry.is_zero()).then_some(until_retry)
    }

    /// Takes the regions that are to be recorded, if it is time for that.
    fn take_wanted(&mut self, now: Instant) -> Option<RegionSet> {
        let is_due = self.retry_at.is_none_or(|at| at <= now);
        (is_due && !self.wanted.is_empty()).then(|| self.wanted.take())
    }

    /// Records the outcome for the regions that were taken. Returns whether this is the first
    /// failure after a success.
    fn recorded(&mut self, regions: &RegionSet, is_ok: bool, now: Instant) -> bool {
        if is_ok {
            (self.retry_at, self.failing_since) = (None, None);
            return false;
        }
        self.wanted.insert_all(regions);
        self.retry_at = Some(now + INTENT_RETRY_DELAY);
        let is_first = self.failing_since.is_none();
        self.failing_since.get_or_insert(now);
        is_first
    }
}

/// Writes the map in a background thread.
pub(crate) struct Flusher {
    disk: Arc<LocalDisk>,
    writer: MapWriter,
    requests: Mutex<FlushRequests>,
    added: Condvar,
    intent_timeout: Duration,
    is_spawned: AtomicBool,
    failures: Mutex<LogLimit>,
}

impl Flusher {
    /// `intent_timeout` is how long recording write intent may fail before writes fail.
    pub(crate) fn new(disk: Arc<LocalDisk>, map: MapFile, intent_timeout: Duration) -> Flusher {
        let writer = MapWriter::new(map, disk.data_sync.clone());
        let requests = FlushRequests {
            flushes: Vec::new(),
            wanted: RegionSet::default(),
            retry_at: None,
            failing_since: None,
        };
        let (requests, added) = (Mutex::new(requests), Condvar::new());
        let is_spawned = AtomicBool::new(false);
        let failures = Mutex::new(LogLimit::new(Instant::now()));
        Flusher { disk, writer, requests, added, intent_timeout, is_spawned, failures }
    }

    fn requests(&self) -> MutexGuard<'_, FlushRequests> {
        self.requests.lock().expect("no code panics with the requests locked")
    }

    /// Whether the map has every block that is present. Then a flush need not write it.
    pub(crate) fn is_current(&self) -> bool {
        self.writer.is_current(self.disk.mirror.presence())
    }

    /// Requests that everything that has completed becomes durable. `done` is called with the
    /// result.
    pub(crate) fn request(&self, done: FlushDone) {
        self.requests().flushes.push(done);
        self.added.notify_one();
    }

    /// Requests that the map records the intent to write `span`. An event tells when that was tried.
    /// Returns `false` if it has failed for too long: then the write fails. It is tried further, so
    /// that later writes succeed.
    pub(crate) fn record_intent(&self, span: Span) -> bool {
        let mut requests = self.requests();
        requests.wanted.insert(span);
        let failing_since = requests.failing_since;
        drop(requests);
        self.added.notify_one();
        failing_since.is_none_or(|since| since.elapsed() < self.intent_timeout)
    }

    /// Clears the intent of regions in which nothing has changed since the parent snapshot.
    pub(crate) fn clear_unchanged_intent(&self) -> io::Result<()> {
        self.writer.clear_unchanged_intent(&self.disk.mirror, &self.disk.data)
    }

    /// Records durably that the mirror's unchanged parts come from this snapshot.
    pub(crate) fn record_parent(&self, number: u64, root: Root) -> io::Result<()> {
        self.writer.map()?.set_parent(number, root)
    }

    /// Records durably that this mirror may publish the snapshot with this number.
    pub(crate) fn announce(&self, number: u64) -> io::Result<()> {
        self.writer.map()?.announce(number)
    }

    /// Makes room for a disk that is going to grow, and records its size durably.
    pub(crate) fn record_growth(&self, layout: &Layout) -> io::Result<()> {
        self.writer.record_growth(&self.disk.data, layout)
    }

    /// Makes everything durable, and marks the map as cleanly closed. `knows_guests` tells whether
    /// guests that ran may go on, and `parent` is the snapshot that the mirror's unchanged parts come
    /// from.
    pub(crate) fn close_map(&self, knows_guests: bool, parent: (u64, Root)) -> io::Result<()> {
        let mirror = &self.disk.mirror;
        self.writer.flush(mirror, &self.disk.data)?;
        // Not an older one: the thread that stores may record one at the same time.
        let (number, root) = parent;
        if number > self.writer.map()?.parent().number {
            self.record_parent(number, root)?;
        }
        let view = mirror.epoch_view();
        // If the live directory is lost, the checkpoints that are not stable are lost with it. Then
        // these are the changes.
        let dirty = view.dirty_sets().flat_map(|set| set.iter());
        self.writer.map()?.end(mirror.presence(), dirty, knows_guests)
    }

    /// Starts the thread.
    pub(crate) fn spawn(self: &Arc<Flusher>) -> io::Result<()> {
        if self.is_spawned.swap(true, Ordering::SeqCst) {
            return Err(io::Error::other("the flush thread is started once"));
        }
        let flusher = self.clone();
        thread::Builder::new().name("flush".into()).spawn(move || flusher.run())?;
        Ok(())
    }

    fn run(&self) {
        loop {
            self.step();
        }
    }

    /// Waits for requests, and serves them: first the intent, and then the flushes.
    fn step(&self) {
        let (wanted, flushes) = self.next();
        if let Some(regions) = wanted {
            self.write_intent(&regions);
        }
        if !flushes.is_empty() {
            self.flush(flushes);
        }
    }

    /// Waits until there is something to do.
    fn next(&self) -> (Option<RegionSet>, Vec<FlushDone>) {
        let mut requests = self.requests();
        while let Some(time) = requests.idle_time(Instant::now()) {
            requests = self.added.wait_timeout(requests, time).expect("as in `requests`").0;
        }
        (requests.take_wanted(Instant::now()), mem::take(&mut requests.flushes))
    }

    fn write_intent(&self, regions: &RegionSet) {
        let result = self.writer.write_intent(&self.disk.mirror, regions);
        let is_first = self.requests().recorded(regions, result.is_ok(), Instant::now());
        if let (Err(error), true) = (result, is_first) {
            tracing::error!(%error, "cannot record write intent in the map; retrying");
        }
        // Also after a failure: writes that have waited for too long fail.
        self.disk.mirror.notify();
    }

    fn flush(&self, waiting: Vec<FlushDone>) {
        let result = self.writer.flush(&self.disk.mirror, &self.disk.data);
        if let Err(error) = &result {
            let mut failures = self.failures.lock().expect("no code panics with this lock held");
            if let Some(times) = failures.count(Instant::now()) {
                tracing::error!(%error, times, "a flush failed");
            }
        }
        for done in waiting {
            done(match &result {
                Ok(()) => Ok(()),
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::{Duration, Instant};

    use crash_images::Mounted;

    use super::{Flusher, INTENT_RETRY_DELAY, MapWriter};
    use crate::local_disk::LocalDisk;
    use crate::mirror::files::map::power_cut_tests::create_mirror;
    use crate::mirror::layout::{Blocks, Span};

    const BLOCK: Span = Span { offset: 0, len: 4096 };

    /// Somebody who writes the map would write it without a region that is being cleared, and whose
    /// data is not durable yet.
    #[test]
    fn no_intent_is_cleared_while_somebody_else_may_write_the_map() {
        let dir = tempfile::tempdir().unwrap();
        let (mirror, writer, disk) = create_mirror(&dir.path().join("mirror"), dir.path());
        writer.write_intent(&mirror, &mirror.intent().regions_of(BLOCK)).unwrap();
        let map = writer.map().unwrap();
        thread::scope(|scope| {
            let (begin, begun) = mpsc::channel();
            let (mirror, writer, disk) = (&mirror, &writer, &disk);
            scope.spawn(move || {
                begin.send(()).unwrap();
                writer.clear_unchanged_intent(mirror, disk).unwrap();
            });
            begun.recv().unwrap();
            thread::sleep(Duration::from_millis(100));
            assert!(mirror.intent().covers(BLOCK), "it is cleared before the map is locked");
            drop(map);
        });
        assert!(!mirror.intent().covers(BLOCK), "nothing has changed");
        let bits = writer.map().unwrap().intent().unwrap();
        assert!(!bits.covers(BLOCK), "the map says so, too");
    }

    /// Ends the thread of a flusher when it is dropped.
    struct EndThread<'a> {
        flusher: &'a Flusher,
        is_done: &'a AtomicBool,
    }

    impl Drop for EndThread<'_> {
        fn drop(&mut self) {
            self.is_done.store(true, Ordering::SeqCst);
            self.flusher.request(Box::new(drop));
        }
    }

    /// The result of a flush, and how long it took.
    fn flush(flusher: &Flusher) -> (std::io::Result<()>, Duration) {
        let (sender, receiver) = mpsc::channel();
        let begin = Instant::now();
        flusher.request(Box::new(move |result| sender.send(result).unwrap()));
        let result = receiver.recv_timeout(Duration::from_secs(10)).expect("a flush ends");
        (result, begin.elapsed())
    }

    #[test]
    fn intent_that_cannot_be_recorded_piles_up_nothing_delays_no_flush_and_fails_in_time() {
        const TIMEOUT: Duration = Duration::from_millis(500);
        let (mounted, elsewhere) = (Mounted::new(), tempfile::tempdir().unwrap());
        let (mirror, writer, data) = create_mirror(&mounted.root().join("vm1"), elsewhere.path());
        let MapWriter { map, data_sync, .. } = writer;
        let disk = Arc::new(LocalDisk { mirror, data, data_sync, read_only: false });
        let flusher = Flusher::new(disk, map.into_inner().unwrap(), TIMEOUT);
        let (disk, is_done) = (&flusher.disk, AtomicBool::new(false));
        thread::scope(|scope| {
            // The thread ends with the test: it has files open that the test serves.
            let _end = EndThread { flusher: &flusher, is_done: &is_done };
            scope.spawn(|| {
                while !is_done.load(Ordering::SeqCst) {
                    flusher.step();
                }
            });
            mounted.fail_writes("vm1/map", true);
            let begin = Instant::now();
            for _ in 0..100_000 {
                flusher.record_intent(BLOCK);
            }
            let mut times = Vec::new();
            while flusher.record_intent(BLOCK) {
                // Until a write changes presence, a flush does not need the map.
                let (result, took) = flush(&flusher);
                result.unwrap();
                times.push(took);
                assert!(begin.elapsed() < 20 * TIMEOUT, "writes wait for ever");
            }
            assert!(begin.elapsed() >= TIMEOUT && !disk.mirror.intent().covers(BLOCK));
            // Single ones may be slow because the machine is.
            times.sort_unstable();
            assert!(times[times.len() / 2] < INTENT_RETRY_DELAY, "flushes took {times:?}");
            disk.mirror.presence().set(Blocks { first: 0, count: 1 });
            flush(&flusher).0.expect_err("the map cannot be written");

            mounted.fail_writes("vm1/map", false);
            let deadline = Instant::now() + Duration::from_secs(5);
            while !disk.mirror.intent().covers(BLOCK) {
                assert!(Instant::now() < deadline, "the intent is not recorded");
                thread::sleep(Duration::from_millis(5));
            }
            flush(&flusher).0.expect("the page is written again");
            assert!(flusher.record_intent(BLOCK) && flusher.is_current());
        });
    }
}
