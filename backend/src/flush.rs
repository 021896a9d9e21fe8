//! Flushes that have to write the map, because blocks have become present since it was last
//! written.
//!
//! The order is: copy the presence bits of completed writes, sync the data, write the copied bits
//! to the map, sync the map. So a presence bit never becomes durable before the block's data. One
//! thread does this. One pass serves all flushes that arrived during the previous pass. The same
//! thread records write intent in the map before the first write to a region.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use cairn_store::Root;

use crate::local_disk::LocalDisk;
use crate::mirror::Mirror;
use crate::mirror::files::disk_file::DiskFile;
use crate::mirror::files::map::MapFile;
use crate::mirror::layout::Span;
use crate::mirror::presence::Presence;

/// Called with the result of a flush.
type FlushDone = Box<dyn FnOnce(io::Result<()>) + Send>;

enum FlushRequest {
    Flush(FlushDone),
    RecordIntent(Span),
}

/// The delay after write intent could not be recorded.
const INTENT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The map file, and how much of the mirror's state it holds.
pub(crate) struct MapWriter {
    map: Mutex<MapFile>,
    /// The presence version that the map holds.
    durable: AtomicU64,
}

impl MapWriter {
    pub(crate) fn new(map: MapFile) -> MapWriter {
        MapWriter { map: Mutex::new(map), durable: AtomicU64::new(0) }
    }

    fn map(&self) -> MutexGuard<'_, MapFile> {
        self.map.lock().expect("no code panics with the map locked")
    }

    fn is_current(&self, presence: &Presence) -> bool {
        self.durable.load(Ordering::SeqCst) >= presence.version()
    }

    fn write_intent(&self, mirror: &Mirror, span: Span) -> io::Result<()> {
        let map = self.map();
        if !mirror.intent().covers(span) {
            map.write_intent(mirror.layout(), &mirror.intent().bytes_with(span))?;
            mirror.intent().set(span);
        }
        Ok(())
    }

    fn clear_unchanged_intent(&self, mirror: &Mirror, data: &DiskFile) -> io::Result<()> {
        // Before the first bit is cleared: whoever writes the map meanwhile would write it without
        // regions whose data is not durable.
        let map = self.map();
        let cleared = mirror.intent().clear_unchanged(|region| mirror.is_changed(region));
        if cleared.is_empty() {
            return Ok(());
        }
        // The mirror must hold the parent's content durably before the map says that they are
        // equal.
        if let Err(error) = data.sync() {
            mirror.intent().restore(&cleared);
            return Err(error);
        }
        // If this fails, the map may have the regions or not. Their bits stay cleared, so the next
        // write to one of them records it again.
        map.write_intent(mirror.layout(), &mirror.intent().bytes())
    }

    /// Makes everything durable that has completed.
    pub(crate) fn flush(&self, mirror: &Mirror, data: &DiskFile) -> io::Result<()> {
        let map = self.map();
        let version = mirror.presence().version();
        let pages = mirror.presence().take_changed();
        let result = data.sync().and_then(|()| match pages.is_empty() {
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

/// Writes the map in a background thread.
pub(crate) struct Flusher {
    disk: Arc<LocalDisk>,
    writer: MapWriter,
    sender: Sender<FlushRequest>,
    receiver: Mutex<Option<Receiver<FlushRequest>>>,
}

impl Flusher {
    pub(crate) fn new(disk: Arc<LocalDisk>, map: MapFile) -> Flusher {
        let (sender, receiver) = channel();
        let writer = MapWriter::new(map);
        Flusher { disk, writer, sender, receiver: Mutex::new(Some(receiver)) }
    }

    /// Whether the map has every block that is present. Then a flush need not write it.
    pub(crate) fn is_current(&self) -> bool {
        self.writer.is_current(self.disk.mirror.presence())
    }

    /// Requests that everything that has completed becomes durable. `done` is called with the
    /// result.
    pub(crate) fn request(&self, done: FlushDone) {
        // The receiver lives as long as the process.
        let _ = self.sender.send(FlushRequest::Flush(done));
    }

    /// Requests that the map records the intent to write `span`. An event tells when it is
    /// recorded.
    pub(crate) fn record_intent(&self, span: Span) {
        // As above.
        let _ = self.sender.send(FlushRequest::RecordIntent(span));
    }

    /// Clears the intent of regions in which nothing has changed since the parent snapshot.
    pub(crate) fn clear_unchanged_intent(&self) -> io::Result<()> {
        self.writer.clear_unchanged_intent(&self.disk.mirror, &self.disk.data)
    }

    /// Records durably that the mirror's unchanged parts come from this snapshot.
    pub(crate) fn record_parent(&self, number: u64, root: Root) -> io::Result<()> {
        self.writer.map().set_parent(number, root)
    }

    /// Makes everything durable, and marks the map as cleanly closed. `knows_guests` tells whether
    /// guests that ran may go on.
    pub(crate) fn close_map(&self, knows_guests: bool) -> io::Result<()> {
        let mirror = &self.disk.mirror;
        self.writer.flush(mirror, &self.disk.data)?;
        let view = mirror.epoch_view();
        // If the live directory is lost, the checkpoints that are not stable are lost with it. Then
        // these are the changes.
        let dirty = view.dirty_sets().flat_map(|set| set.iter());
        self.writer.map().end(mirror.presence(), mirror.layout(), dirty, knows_guests)
    }

    /// Starts the thread.
    pub(crate) fn spawn(self: &Arc<Flusher>) -> io::Result<()> {
        let receiver = self.receiver.lock().expect("locked only here").take();
        let receiver =
            receiver.ok_or_else(|| io::Error::other("the flush thread is started once"))?;
        let flusher = self.clone();
        thread::Builder::new().name("flush".into()).spawn(move || flusher.run(&receiver))?;
        Ok(())
    }

    fn run(&self, receiver: &Receiver<FlushRequest>) {
        while let Ok(first) = receiver.recv() {
            let mut waiting = Vec::new();
            let mut has_intent = false;
            for request in std::iter::once(first).chain(receiver.try_iter()) {
                match request {
                    FlushRequest::Flush(done) => waiting.push(done),
                    FlushRequest::RecordIntent(span) => {
                        has_intent = true;
                        if let Err(error) = self.writer.write_intent(&self.disk.mirror, span) {
                            // The write waits, and requests it again.
                            tracing::error!(%error, "cannot record write intent in the map");
                            thread::sleep(INTENT_RETRY_DELAY);
                        }
                    }
                }
            }
            if has_intent {
                self.disk.mirror.notify();
            }
            if waiting.is_empty() {
                continue;
            }
            let result = self.writer.flush(&self.disk.mirror, &self.disk.data);
            if let Err(error) = &result {
                tracing::error!(%error, "a flush failed");
            }
            for done in waiting {
                done(match &result {
                    Ok(()) => Ok(()),
                    Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use crate::mirror::files::map::power_cut_tests::create_mirror;
    use crate::mirror::layout::Span;

    const BLOCK: Span = Span { offset: 0, len: 4096 };

    /// Somebody who writes the map would write it without a region that is being cleared, and whose
    /// data is not durable yet.
    #[test]
    fn no_intent_is_cleared_while_somebody_else_may_write_the_map() {
        let dir = tempfile::tempdir().unwrap();
        let (mirror, writer, disk) = create_mirror(&dir.path().join("mirror"), dir.path());
        writer.write_intent(&mirror, BLOCK).unwrap();
        let map = writer.map();
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
        let bits = writer.map().intent(mirror.layout()).unwrap();
        assert!(!bits.covers(BLOCK), "the map says so, too");
    }
}
