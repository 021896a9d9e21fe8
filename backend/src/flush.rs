//! FLUSH when blocks have become present since the map was last written.
//!
//! FlushRequest: copy the presence bits of completed writes → sync the data → write the copy to the map →
//! sync the map. So presence never becomes durable before its data. One thread does it, for all the
//! flushes that came in meanwhile at once. It also tells the map of regions before their first write.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::device::Device;
use crate::mirror::Mirror;
use crate::mirror::files::disk_file::DiskFile;
use crate::mirror::files::map::MapFile;
use crate::mirror::layout::Span;
use crate::mirror::presence::Presence;
use crate::worker::{Command, Mailbox};

struct Flush {
    worker: Mailbox,
    key: usize,
}

enum FlushRequest {
    Flush(Flush),
    RecordIntent(Span),
}

/// How long to wait after the map could not be told of a region.
const INTENT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The map file and those who wait for it.
pub(crate) struct Flusher {
    map: Mutex<MapFile>,
    sender: Sender<FlushRequest>,
    receiver: Mutex<Option<Receiver<FlushRequest>>>,
    /// The presence version that the map holds.
    durable: AtomicU64,
}

impl Flusher {
    pub(crate) fn new(map: MapFile) -> Flusher {
        let (sender, receiver) = channel();
        Flusher {
            map: Mutex::new(map),
            sender,
            receiver: Mutex::new(Some(receiver)),
            durable: AtomicU64::new(0),
        }
    }

    /// Whether the map knows of every block that is present.
    pub(crate) fn is_current(&self, presence: &Presence) -> bool {
        self.durable.load(Ordering::SeqCst) >= presence.version()
    }

    /// Flushes everything completed so far, then answers `worker` with [`Command::Flushed`].
    pub(crate) fn request(&self, worker: Mailbox, key: usize) {
        // The receiver lives as long as the device.
        let _ = self.sender.send(FlushRequest::Flush(Flush { worker, key }));
    }

    /// Tells the map that `span` is going to change. An event tells when it knows.
    pub(crate) fn record_intent(&self, span: Span) {
        // As above.
        let _ = self.sender.send(FlushRequest::RecordIntent(span));
    }

    fn write_intent(&self, mirror: &Mirror, span: Span) -> io::Result<()> {
        let map = self.map();
        if !mirror.intent().covers(span) {
            map.write_intent(mirror.layout(), &mirror.intent().bytes_with(span))?;
            mirror.intent().set(span);
        }
        Ok(())
    }

    /// Makes the map forget regions in which nothing has changed since the parent snapshot.
    pub(crate) fn clear_unchanged_intent(
        &self,
        mirror: &Mirror,
        disk: &DiskFile,
    ) -> io::Result<()> {
        if !mirror.intent().clear_unchanged(|region| mirror.is_changed(region)) {
            return Ok(());
        }
        // The mirror must hold for good what the parent has, before the map says that they are equal. A
        // region that is announced meanwhile is among the bits again.
        let map = self.map();
        disk.sync()?;
        map.write_intent(mirror.layout(), &mirror.intent().bytes())
    }

    /// Makes everything completed so far durable.
    pub(crate) fn flush(&self, mirror: &Mirror, disk: &DiskFile) -> io::Result<()> {
        let map = self.map();
        let version = mirror.presence().version();
        let pages = mirror.presence().take_changed();
        let result = disk.sync().and_then(|()| match pages.is_empty() {
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

    /// The map file, for the start and the stop.
    pub(crate) fn map(&self) -> MutexGuard<'_, MapFile> {
        self.map.lock().expect("no code panics with the map locked")
    }
}

/// Starts the thread that serves the device's flushes.
pub(crate) fn spawn(device: Arc<Device>) -> io::Result<()> {
    let receiver = device.flusher.receiver.lock().expect("locked only here").take();
    let receiver = receiver.ok_or_else(|| io::Error::other("the flush thread is started once"))?;
    thread::Builder::new().name("flush".into()).spawn(move || {
        while let Ok(first) = receiver.recv() {
            let mut waiting = Vec::new();
            let mut announced = false;
            for order in std::iter::once(first).chain(receiver.try_iter()) {
                match order {
                    FlushRequest::Flush(flush) => waiting.push(flush),
                    FlushRequest::RecordIntent(span) => {
                        announced = true;
                        if let Err(error) = device.flusher.write_intent(&device.mirror, span) {
                            // The write waits, and asks again.
                            tracing::error!(%error, "the map cannot be told of a write");
                            thread::sleep(INTENT_RETRY_DELAY);
                        }
                    }
                }
            }
            if announced {
                device.mirror.notify();
            }
            if waiting.is_empty() {
                continue;
            }
            let result = device.flusher.flush(&device.mirror, &device.disk);
            if let Err(error) = &result {
                tracing::error!(%error, "a flush failed");
            }
            for Flush { worker, key } in waiting {
                let result = match &result {
                    Ok(()) => Ok(()),
                    Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
                };
                worker.send(Command::Flushed(key, result));
            }
        }
    })?;
    Ok(())
}
