//! The peers as a place for blobs that threads use: a sliding window.
//!
//! ```text
//! put ──► window ──► known to the peers? ──► cut, parity, hashes ──► to many peers at once ──► durable: out of the window
//!           ▲                │ yes: out of the window                        │
//!           │                                                                └─► failed: stays
//!           └────────────────────────── flush tries again ◄──────────────────────────┘
//! ```
//!
//! A put copies into the window and returns; when the window is full it waits for room. Blobs of the window
//! can be read. A flush returns when every blob that was put before it is durable with its full redundancy, and fails
//! if one cannot be: that one stays, and the next flush tries it again. Only if the window is full of blobs that
//! failed, those leave it that can be read already; the next flush reads them again and sends what is missing.
//!
//! All connections belong to one thread of this object. Cutting and hashing have threads of their own, as many as
//! there are processors. No thread waits for another with a lock held, and the window moves without its users.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::cluster::{Cluster, Progress};
use super::recent_set::RecentSet;
use super::window::{Content, Entry, Status, Window};
use crate::blobs::{Blobs, NewBlob};
use crate::encoding::fragment::{Kind, MAX_CONTENT, Plain, cut};
use crate::encoding::redundancy::{Redundancy, StoragePolicy};
use crate::error::{Error, Result};
use crate::id::{BlobId, PeerId};

/// Bytes of blocks in the window.
const WINDOW_BYTES: usize = 64 << 20;

/// Blobs in one question, and questions at a time.
const QUERY_BATCH: usize = 256;
const PARALLEL_QUERIES: usize = 4;

/// Blobs that are cut by one thread, and then sent, together: a peer gets several of their blocks with one call.
const SEND_BATCH: usize = 16;

/// The part of the window that has to be free before those are woken who wait for room.
const WAKE_FRACTION: usize = 8;

/// How long it is remembered what is stored. Then the peers are asked again, which renews its age: what nothing refers
/// to is deleted when nobody has asked for it for longer.
const KNOWN_TTL: Duration = Duration::from_secs(600);

/// Bytes that went through a [`ClusterBlobs`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Content that was put.
    pub dirty: u64,
    /// Blocks that were sent: with the redundancy.
    pub sent: u64,
    /// Content that the peers had already.
    pub saved: u64,
}

/// The peers of a cluster as a place for blobs. It must not be used by asynchronous code, which it would block.
pub struct ClusterBlobs {
    shared: Arc<Shared>,
    runtime: Handle,
    /// Numbers of blobs of the window that are to be stored.
    queue: Option<mpsc::UnboundedSender<Vec<u64>>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

struct Shared {
    cluster: Cluster,
    limit: usize,
    window: Mutex<Window>,
    /// Something has left the window, or failed.
    changed: Condvar,
    known: Mutex<KnownBlobs>,
    /// As many cut and hash at a time.
    cutters: Semaphore,
    dirty: AtomicU64,
    sent: AtomicU64,
    saved: AtomicU64,
}

/// Blobs that are stored, as far as anybody remembers. All is forgotten when a peer goes away: some of
/// them have less than their redundancy then.
struct KnownBlobs {
    blobs: RecentSet<(BlobId, Redundancy)>,
    /// See [`Cluster::losses`].
    losses: u64,
    since: Instant,
}

impl ClusterBlobs {
    /// A place on these peers.
    pub fn new(cluster: Cluster) -> Result<ClusterBlobs> {
        ClusterBlobs::with_window(cluster, WINDOW_BYTES)
    }

    /// The same, with so many bytes on their way at most: a blob that is longer goes alone.
    pub fn with_window(cluster: Cluster, limit: usize) -> Result<ClusterBlobs> {
        let failed = |error| Error::io("starting a thread for", "the cluster".as_ref(), error);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            cluster,
            limit,
            window: Mutex::default(),
            changed: Condvar::new(),
            known: Mutex::new(KnownBlobs {
                blobs: RecentSet::default(),
                losses: 0,
                since: Instant::now(),
            }),
            cutters: Semaphore::new(processors),
            dirty: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            saved: AtomicU64::new(0),
        });
        let handle = runtime.handle().clone();
        let (queue, waiting) = mpsc::unbounded_channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let own = shared.clone();
        let run = move || {
            runtime.spawn(drive(own, waiting));
            // It ends with an error: whoever holds the other end drops it.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("cluster".into()).spawn(run).map_err(failed)?;
        let (queue, stop, thread) = (Some(queue), Some(stop), Some(thread));
        Ok(ClusterBlobs { shared, runtime: handle, queue, stop, thread })
    }

    /// The cluster behind it.
    pub fn cluster(&self) -> &Cluster {
        &self.shared.cluster
    }

    /// Where the cluster's connections live: for other work with it.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// What went through since this object was made.
    pub fn counters(&self) -> Counters {
        let Shared { dirty, sent, saved, .. } = &*self.shared;
        let [dirty, sent, saved] = [dirty, sent, saved].map(|one| one.load(Ordering::Relaxed));
        Counters { dirty, sent, saved }
    }

    /// Tries again what failed.
    fn try_again(&self, window: &mut Window, before: u64) {
        let mut again = Vec::new();
        for (number, entry) in window.entries.range_mut(..before) {
            if let Some(entry) = entry
                && matches!(entry.status, Status::Failed(_))
            {
                entry.status = Status::UnderWay;
                entry.losses = self.shared.cluster.losses();
                again.push(*number);
            }
        }
        self.send(&mut again);
    }

    /// Has blobs of the window stored: with one word for many, since that wakes a thread.
    fn send(&self, numbers: &mut Vec<u64>) {
        // The other end lives as long as the thread does, which ends after this object.
        if let Some(queue) = &self.queue
            && !numbers.is_empty()
        {
            let _ = queue.send(std::mem::take(numbers));
        }
    }

    /// Takes room in the window. Returns its number; nothing if the same blob is in the window already. Before it waits,
    /// those are sent that are not yet.
    fn enter_window(
        &self,
        name: (BlobId, Redundancy),
        bytes: usize,
        unsent: &mut Vec<u64>,
    ) -> Result<Option<u64>> {
        let mut window = self.shared.window();
        let mut tried = false;
        loop {
            if let Some(number) = window.names.get(&name) {
                if matches!(window.entries.get(number), Some(Some(_))) {
                    return Ok(None);
                }
                // Another thread is just copying it. Who was told that it is taken may read it.
                self.send(unsent);
                window.copying += 1;
                window = self.shared.wait(window);
                window.copying -= 1;
                continue;
            }
            if window.bytes == 0 || window.bytes + bytes <= self.shared.limit {
                break;
            }
            self.send(unsent);
            let next = window.next;
            match window.failure(next, |_| true) {
                Some(Err(failure)) if tried => {
                    if !window.evict_degraded() {
                        return Err(failure);
                    }
                }
                // Only what has failed is in the way: the peers may be back.
                Some(_) => {
                    tried = true;
                    self.try_again(&mut window, next);
                }
                None => window = self.shared.wait(window),
            }
        }
        let number = window.next;
        window.next += 1;
        window.bytes += bytes;
        window.entries.insert(number, None);
        window.names.insert(name, number);
        Ok(Some(number))
    }

    /// Waits until all that was put before is durable: of each blob, that is, which still counts.
    fn flush_while(&self, counts: impl Fn(&Entry) -> bool) -> Result<()> {
        let mut window = self.shared.window();
        let before = window.next;
        self.try_again(&mut window, before);
        window.flushing += 1;
        let flushed = loop {
            match window.failure(before, &counts) {
                Some(result) => break result,
                None => window = self.shared.wait(window),
            }
        };
        window.flushing -= 1;
        flushed
    }
}

impl ClusterBlobs {
    /// Puts a blob that the peers have.
    fn put_again(&self, blob: BlobId, policy: &StoragePolicy, buf: &mut [u8]) -> Result<()> {
        let len = self.runtime.block_on(self.shared.cluster.get(&blob, buf))?;
        self.shared.known().blobs.clear();
        self.put(&[(blob, &buf[..len])], policy).map(drop)
    }

    /// Gives what left the window with less than its redundancy the rest of it, unless a repair has seen to that.
    fn complete_degraded(&self) -> Result<()> {
        let mut groups: HashMap<StoragePolicy, Vec<BlobId>> = HashMap::new();
        for (blob, policy) in &self.shared.window().degraded {
            groups.entry(*policy).or_default().push(*blob);
        }
        if groups.is_empty() {
            return Ok(());
        }
        let mut buf = vec![0; MAX_CONTENT];
        for (policy, blobs) in groups {
            let known = self.runtime.block_on(self.shared.cluster.known(&blobs, &policy));
            for (blob, is_known) in blobs.into_iter().zip(known) {
                // Before it is put: if it has to leave the window again, it comes back here.
                self.shared.window().degraded.remove(&(blob, policy));
                if !is_known {
                    self.put_again(blob, &policy, &mut buf).inspect_err(|_| {
                        self.shared.window().degraded.insert((blob, policy));
                    })?;
                }
            }
        }
        self.flush_while(|_| true)?;
        match self.shared.window().degraded.len() {
            0 => Ok(()),
            blobs => {
                let reason = "they can be read, and have less than their redundancy".into();
                Err(Error::NotStored { blobs, reason })
            }
        }
    }
}

/// Blobs of the window that wait to be sent together. However the put ends, they are.
struct Unsent<'a> {
    blobs: &'a ClusterBlobs,
    numbers: Vec<u64>,
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        self.blobs.send(&mut self.numbers);
    }
}

impl Drop for ClusterBlobs {
    fn drop(&mut self) {
        drop((self.queue.take(), self.stop.take()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Blobs for ClusterBlobs {
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
        let content = {
            let window = self.shared.window();
            let entry = window.contents.get(id).and_then(|number| window.entries.get(number));
            entry.and_then(|entry| Some(entry.as_ref()?.content.clone()))
        };
        match content {
            None => self.runtime.block_on(self.shared.cluster.get(id, buf)),
            Some(content) => content.read(buf),
        }
    }

    fn put(&self, blobs: &[NewBlob<'_>], policy: &StoragePolicy) -> Result<u64> {
        let (mut taken, mut unsent) = (0, Unsent { blobs: self, numbers: Vec::new() });
        for (blob, content) in blobs {
            let len = content.len() as u64;
            if content.is_empty() || content.len() > MAX_CONTENT {
                return Err(Error::BadArgument(format!("a blob cannot have {len} bytes")));
            }
            self.shared.dirty.fetch_add(len, Ordering::Relaxed);
            let (name, policy) = ((*blob, policy.redundancy), *policy);
            let bytes = match policy.redundancy {
                Redundancy::Replicas(_) => content.len(),
                code => content.len().div_ceil(code.needed().max(1)) * code.width(),
            };
            let is_known = self.shared.known().blobs.contains(&name);
            let number = match is_known {
                true => None,
                false => self.enter_window(name, bytes, &mut unsent.numbers)?,
            };
            let Some(number) = number else {
                self.shared.saved.fetch_add(len, Ordering::Relaxed);
                continue;
            };
            let content = Content::Plain(Plain::new(content, policy.redundancy));
            let (blob, status, available) = (*blob, Status::UnderWay, false);
            let losses = self.shared.cluster.losses();
            let entry = Entry { blob, policy, bytes, content, status, losses, available };
            {
                let mut window = self.shared.window();
                window.entries.insert(number, Some(entry));
                window.contents.insert(blob, number);
                if window.copying > 0 {
                    self.shared.changed.notify_all();
                }
            }
            unsent.numbers.push(number);
            taken += len;
        }
        Ok(taken)
    }

    fn flush(&self) -> Result<()> {
        self.flush_while(|_| true)?;
        self.complete_degraded()
    }
}

impl ClusterBlobs {
    /// Returns when everything that was put before this call can be read by everybody, though it may
    /// not have its full redundancy.
    pub fn flush_available(&self) -> Result<()> {
        self.shared.window().availability_waiters += 1;
        let flushed = self.flush_while(|entry| !entry.available);
        self.shared.window().availability_waiters -= 1;
        flushed
    }

    /// Stores a snapshot's record, durably, and returns its name. A `lenient` record may have less
    /// than its redundancy.
    pub(crate) fn put_record(
        &self,
        record: &[u8],
        policy: &StoragePolicy,
        lenient: bool,
    ) -> Result<BlobId> {
        // At once, outside the window: a publication waits for its one record.
        self.runtime.block_on(self.shared.cluster.put_record(record, policy, lenient))
    }

    /// All records that the peers have.
    pub(crate) fn records(&self) -> Vec<Vec<u8>> {
        self.runtime.block_on(self.shared.cluster.records())
    }

    /// Reserves space for `bytes` of content that is stored by this policy. Returns how much each
    /// peer keeps free. Fails if the peers do not have it.
    pub(crate) fn reserve(&self, bytes: u64, policy: &StoragePolicy) -> Result<Vec<(PeerId, u64)>> {
        let (width, needed) = (policy.redundancy.width() as u64, policy.redundancy.needed() as u64);
        let bytes = bytes.saturating_mul(width).div_ceil(needed.max(1));
        self.runtime.block_on(self.shared.cluster.reserve(bytes))
    }

    /// Releases space that was [reserved](ClusterBlobs::reserve).
    pub(crate) fn release(&self, reserved: &[(PeerId, u64)]) {
        self.runtime.block_on(self.shared.cluster.release(reserved));
    }

    /// Forgets which blobs the peers are known to have. After the loss of a peer, blobs that no
    /// snapshot refers to may be gone.
    pub(crate) fn forget_known(&self) {
        self.shared.known().blobs.clear();
    }
}

impl Shared {
    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, KnownBlobs> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let losses = self.cluster.losses();
        if known.losses != losses || known.since.elapsed() >= KNOWN_TTL {
            *known = KnownBlobs { blobs: RecentSet::default(), losses, since: Instant::now() };
        }
        known
    }

    fn wait<'a>(&self, window: MutexGuard<'a, Window>) -> MutexGuard<'a, Window> {
        self.changed.wait(window).unwrap_or_else(PoisonError::into_inner)
    }

    /// What came of blobs.
    fn end(&self, all: impl IntoIterator<Item = (u64, Result<(), String>)>) {
        let mut window = self.window();
        for (number, result) in all {
            match result {
                Ok(()) => {
                    if let Some(entry) = window.remove(number) {
                        let name = (entry.blob, entry.policy.redundancy);
                        // If a peer went away meanwhile, nobody knows whether it was one that has it.
                        let mut known = self.known();
                        if known.losses == entry.losses {
                            known.blobs.insert(name);
                        }
                    }
                }
                Err(reason) => {
                    if let Some(Some(entry)) = window.entries.get_mut(&number) {
                        entry.status = Status::Failed(reason);
                    }
                }
            }
        }
        // Who waits for room is woken when there is some worth it: to wake a thread costs as much as to copy a chunk. What
        // has failed keeps its room, and then there may never be that much.
        let is_room = window.bytes <= self.limit - self.limit / WAKE_FRACTION;
        let worth = is_room || window.flushing > 0 || window.has_failed();
        drop(window);
        if worth {
            self.changed.notify_all();
        }
    }

    /// These can be read already.
    fn set_available(&self, numbers: impl Iterator<Item = u64>) {
        let mut window = self.window();
        for number in numbers {
            if let Some(Some(entry)) = window.entries.get_mut(&number) {
                entry.available = true;
            }
        }
        if window.availability_waiters > 0 {
            self.changed.notify_all();
        }
    }
}

/// A blob under way. However that ends, those who wait for it learn of it.
struct UnderWay {
    shared: Arc<Shared>,
    number: u64,
    done: bool,
}

impl UnderWay {
    fn end_all(shared: &Shared, all: Vec<(UnderWay, Result<(), String>)>) {
        shared.end(all.into_iter().map(|(mut one, result)| {
            one.done = true;
            (one.number, result)
        }));
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if !self.done {
            self.shared.end([(self.number, Err("the work on it was given up".into()))]);
        }
    }
}

/// Takes what is put, asks the peers about it, and sends what they do not have.
async fn drive(shared: Arc<Shared>, mut queue: mpsc::UnboundedReceiver<Vec<u64>>) {
    let questions = Arc::new(Semaphore::new(PARALLEL_QUERIES));
    let mut waiting = Vec::new();
    while let Some(first) = queue.recv().await {
        waiting.extend(first);
        while !waiting.is_empty() {
            let permit = questions.clone().acquire_owned().await;
            // What came while the peers were asked about the last ones.
            while waiting.len() < QUERY_BATCH
                && let Ok(more) = queue.try_recv()
            {
                waiting.extend(more);
            }
            let begin = |number| UnderWay { shared: shared.clone(), number, done: false };
            let batch = waiting.drain(..waiting.len().min(QUERY_BATCH)).map(begin).collect();
            let shared = shared.clone();
            tokio::spawn(async move {
                let _permit = permit;
                ask(&shared, batch).await;
            });
        }
    }
}

/// Asks about blobs, and sends those that are not known.
async fn ask(shared: &Arc<Shared>, batch: Vec<UnderWay>) {
    let mut groups: HashMap<StoragePolicy, Vec<(BlobId, Content, UnderWay)>> = HashMap::new();
    {
        let window = shared.window();
        for one in batch {
            if let Some(Some(entry)) = window.entries.get(&one.number) {
                let content = entry.content.clone();
                groups.entry(entry.policy).or_default().push((entry.blob, content, one));
            }
        }
    }
    for (policy, blobs) in groups {
        let names: Vec<_> = blobs.iter().map(|(blob, ..)| *blob).collect();
        let known = shared.cluster.known(&names, &policy).await;
        let (mut unknown, mut ended) = (Vec::new(), Vec::new());
        for ((blob, content, one), is_known) in blobs.into_iter().zip(known) {
            if is_known {
                shared.saved.fetch_add(content.len() as u64, Ordering::Relaxed);
                ended.push((one, Ok(())));
            } else {
                unknown.push((blob, content, one));
            }
        }
        UnderWay::end_all(shared, ended);
        while !unknown.is_empty() {
            let rest = unknown.split_off(unknown.len().min(SEND_BATCH));
            tokio::spawn(cut_and_store(shared.clone(), policy, unknown));
            unknown = rest;
        }
    }
}

/// Cuts blobs, and sends them to their peers.
async fn cut_and_store(
    shared: Arc<Shared>,
    policy: StoragePolicy,
    blobs: Vec<(BlobId, Content, UnderWay)>,
) {
    let permit = shared.cutters.acquire().await;
    let cutting = tokio::task::spawn_blocking(move || {
        let cut = |(blob, content, one)| match content {
            Content::Cut(whole) => (whole, one),
            Content::Plain(plain) => (Arc::new(cut(Kind::Content, &blob, &plain, &policy)), one),
        };
        blobs.into_iter().map(cut).collect::<Vec<_>>()
    });
    // If it panics or is given up, so are they.
    let Ok(all) = cutting.await else { return };
    drop(permit);
    let (mut wholes, mut under_way) = (Vec::new(), Vec::new());
    {
        let mut window = shared.window();
        for (whole, one) in all {
            if let Some(Some(entry)) = window.entries.get_mut(&one.number) {
                entry.content = Content::Cut(whole.clone());
            }
            wholes.push(whole);
            under_way.push(Some(one));
        }
    }
    let tell = |news: Vec<(usize, Progress)>| {
        let (mut available, mut ended) = (Vec::new(), Vec::new());
        for (blob, progress) in news {
            match progress {
                Progress::Available => {
                    available.extend(under_way[blob].as_ref().map(|one| one.number));
                }
                Progress::Ended(stored) => {
                    let sent = stored.as_ref().map_or(0, |stored| stored.sent);
                    shared.sent.fetch_add(sent, Ordering::Relaxed);
                    let result = stored.map(drop).map_err(|error| error.to_string());
                    ended.extend(under_way[blob].take().map(|one| (one, result)));
                }
            }
        }
        shared.set_available(available.into_iter());
        UnderWay::end_all(&shared, ended);
    };
    shared.cluster.store(wholes, policy.redundancy, tell).await;
}
