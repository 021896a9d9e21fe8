//! Syncs of the data file, and what a failed one means.
//!
//! Linux reports a failed sync once, and then drops what it could not write: the next sync succeeds,
//! although the data is lost. A disk may lose its cache in the same way. Nobody keeps what was
//! written since the last sync, so nobody can write it again. A failed sync is therefore treated as a
//! power cut:
//!
//! - Every later sync fails, in all threads. So does every flush.
//! - The map is not written any more: it says what was durable before.
//! - No checkpoint is accepted or published: what is read from the data file may be older than what
//!   the guest has written.
//! - The live directory becomes invalid. The next process goes on as after the death of the host.
//!
//! Only one sync runs at a time. Otherwise a sync that starts after another one has failed could
//! succeed, and be relied on, before the thread of the failed one has recorded the failure.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::disk_file::DiskFile;
use super::live_dir::LiveValidity;

/// What is reported after a failed sync, and what to do.
pub(crate) const SYNC_FAILED: &str = "\
    a sync of the mirror's data failed, and it is unknown which of the guest's writes are lost: all \
    flushes fail, and no checkpoint is taken; check the mirror's disk, then start cairn-blk and the \
    guest again, which go on from what was durable before, or start from a snapshot in another \
    directory";

/// The syncs of a data file. All threads share it.
pub(crate) struct DataSync {
    live: LiveValidity,
    turns: Mutex<Turns>,
    ended: Condvar,
}

/// Who syncs, and who waits for that.
#[derive(Default)]
struct Turns {
    is_running: bool,
    /// The number of threads that wait. They come before threads that only try.
    waiting: usize,
}

impl DataSync {
    pub(crate) fn new(live: LiveValidity) -> Arc<DataSync> {
        Arc::new(DataSync { live, turns: Mutex::default(), ended: Condvar::new() })
    }

    /// Returns an error if a sync has failed.
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.live.is_valid() {
            true => Ok(()),
            false => Err(io::Error::other(SYNC_FAILED)),
        }
    }

    /// Why nothing can become durable any more, if so.
    pub(crate) fn failure(&self) -> Option<&'static str> {
        (!self.live.is_valid()).then_some(SYNC_FAILED)
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().expect("no code panics with this lock held")
    }

    /// Permits the caller to sync the data file, unless a sync is running or has failed, or another
    /// thread waits for its turn.
    pub(crate) fn try_begin(self: &Arc<DataSync>) -> Option<RunningSync> {
        let mut turns = self.turns();
        if turns.is_running || turns.waiting > 0 || self.check().is_err() {
            return None;
        }
        turns.is_running = true;
        Some(RunningSync { syncs: self.clone(), has_ended: false })
    }

    /// Makes completed writes durable.
    pub(crate) fn sync(self: &Arc<DataSync>, data: &DiskFile) -> io::Result<()> {
        self.run(|| data.sync())
    }

    /// Makes completed writes and the length of the file durable.
    pub(crate) fn sync_length(self: &Arc<DataSync>, data: &DiskFile) -> io::Result<()> {
        self.run(|| data.sync_length())
    }

    fn run(self: &Arc<DataSync>, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut turns = self.turns();
        turns.waiting += 1;
        let turns = self.ended.wait_while(turns, |turns| turns.is_running);
        let mut turns = turns.expect("as in `turns`");
        turns.waiting -= 1;
        turns.is_running = true;
        drop(turns);
        let running = RunningSync { syncs: self.clone(), has_ended: false };
        let result = self.check().and_then(|()| sync());
        running.end(result)
    }
}

/// A sync that is running. No other one runs until this is dropped.
///
/// A sync that is dropped without its result counts as failed.
pub(crate) struct RunningSync {
    syncs: Arc<DataSync>,
    has_ended: bool,
}

impl RunningSync {
    /// Ends the sync with its result, and returns that.
    pub(crate) fn end(mut self, result: io::Result<()>) -> io::Result<()> {
        // Before the next sync may begin.
        if let Err(error) = &result
            && self.syncs.check().is_ok()
        {
            self.syncs.live.invalidate();
            tracing::error!(%error, "{SYNC_FAILED}");
        }
        self.has_ended = true;
        result
    }
}

impl Drop for RunningSync {
    fn drop(&mut self) {
        if !self.has_ended {
            self.syncs.live.invalidate();
        }
        self.syncs.turns().is_running = false;
        self.syncs.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::super::disk_file::DiskFile;
    use super::super::live_dir::LiveValidity;
    use super::DataSync;

    #[test]
    fn a_sync_that_waits_for_one_that_fails_does_not_succeed() {
        let dir = tempfile::tempdir().unwrap();
        let data = DiskFile::open(&dir.path().join("disk")).unwrap();
        let syncs = DataSync::new(LiveValidity::private());
        syncs.sync(&data).unwrap();
        let running = syncs.try_begin().unwrap();
        assert!(syncs.try_begin().is_none(), "one at a time");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| syncs.sync(&data));
            thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            running.end(Err(io::ErrorKind::Other.into())).unwrap_err();
            waiting.join().unwrap().unwrap_err();
        });
        assert!(syncs.check().is_err() && syncs.try_begin().is_none());
        syncs.sync(&data).unwrap_err();
    }

    #[test]
    fn a_sync_without_a_result_has_failed() {
        let syncs = DataSync::new(LiveValidity::private());
        drop(syncs.try_begin().unwrap());
        assert!(syncs.check().is_err());
    }

    /// A worker in write-through mode begins its next sync as soon as one has ended.
    #[test]
    fn a_sync_that_waits_comes_before_those_that_begin_later() {
        let dir = tempfile::tempdir().unwrap();
        let data = DiskFile::open(&dir.path().join("disk")).unwrap();
        let syncs = DataSync::new(LiveValidity::private());
        let (stop, ended) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    if let Some(running) = syncs.try_begin() {
                        thread::sleep(Duration::from_millis(1));
                        running.end(Ok(())).unwrap();
                        ended.fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
            while ended.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            for _ in 0..20 {
                let before = ended.load(Ordering::SeqCst);
                syncs.sync(&data).unwrap();
                let passed = ended.load(Ordering::SeqCst) - before;
                assert!(passed <= 5, "{passed} others came first");
                thread::sleep(Duration::from_millis(2));
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}
