//! What clients may take of a peer: memory, time, and connections.
//!
//! A request is read when there is memory for it and its answer, and that is free again when the answer is sent. So
//! whoever sends a body slowly, or takes no answers, keeps memory from the others. Bounds against that:
//!
//! - One connection has a share at most.
//! - A part of the memory is for clients that hold nothing, and have taken answers before or want little.
//! - A connection that holds memory and moves hardly a byte is ended: after a while, or at once when others wait and
//!   those that do not move hold a good part of it.
//! - Of the connections that have not said who they are, the oldest is ended when there are too many.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Memory for requests and answers, in units of a KiB: for anybody,
const COMMON: usize = 48 << 10;
/// and for who has shown that it takes answers.
const PROVEN: usize = 16 << 10;

/// What one connection may hold.
const SHARE: usize = (COMMON + PROVEN) / 4;

/// What may be wanted by who has shown nothing.
const LITTLE: usize = 64;

/// Connections that have not said who they are.
const MAX_UNAUTHENTICATED: usize = 64;

/// The bytes that a connection with memory must move in a second.
const RATE: u64 = 64 << 10;

/// For so long connections are watched, again and again,
const WINDOW: Duration = Duration::from_millis(300);
/// and they may be slow so many times in a row.
const SLOW_WINDOWS: u32 = 33;

/// How often is looked.
const TICK: Duration = Duration::from_millis(100);

/// What all clients of a peer may take.
pub(super) struct Limits {
    common: Arc<Semaphore>,
    proven: Arc<Semaphore>,
    /// Requests that wait for memory.
    waiting: AtomicUsize,
    numbers: AtomicU64,
    clients: Mutex<HashMap<u64, Arc<Client>>>,
    /// By their age. Who is taken out is ended.
    unauthenticated: Mutex<BTreeMap<u64, oneshot::Sender<()>>>,
}

/// One connection.
pub(super) struct Client {
    share: Arc<Semaphore>,
    /// Bytes that it has sent and taken.
    moved: AtomicU64,
    /// Units that are free when it moves more.
    stuck: AtomicUsize,
    /// Whether it has taken answers, and is not slow.
    is_proven: AtomicBool,
    window: Mutex<Option<Window>>,
    end: Notify,
}

/// How a connection has moved lately.
struct Window {
    start: Instant,
    moved: u64,
    slow: u32,
}

/// A place among the clients, which is free when this is dropped.
pub(super) struct ClientSlot {
    limits: Arc<Limits>,
    number: u64,
    client: Arc<Client>,
}

/// A place among those who have not said who they are.
pub(super) struct Unauthenticated {
    limits: Arc<Limits>,
    number: u64,
    ended: oneshot::Receiver<()>,
}

/// Memory that a request holds until its answer is sent.
pub(super) struct Memory {
    permit: OwnedSemaphorePermit,
    share: OwnedSemaphorePermit,
    client: Arc<Client>,
    waits: Waits,
}

/// What a request waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    Body,
    Disk,
    Sent,
}

impl Limits {
    pub(super) fn new() -> Arc<Limits> {
        Arc::new(Limits {
            common: Arc::new(Semaphore::new(COMMON)),
            proven: Arc::new(Semaphore::new(PROVEN)),
            waiting: AtomicUsize::new(0),
            numbers: AtomicU64::new(0),
            clients: Mutex::default(),
            unauthenticated: Mutex::default(),
        })
    }

    /// One more who has not said who it is. If there are too many, the oldest one has had the most time.
    pub(super) fn unauthenticated(self: &Arc<Limits>) -> Unauthenticated {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let (end, ended) = oneshot::channel();
        let mut unauthenticated = lock(&self.unauthenticated);
        if unauthenticated.len() >= MAX_UNAUTHENTICATED {
            unauthenticated.pop_first();
        }
        unauthenticated.insert(number, end);
        drop(unauthenticated);
        Unauthenticated { limits: self.clone(), number, ended }
    }

    /// Ends connections that keep memory from others. Never returns.
    pub(super) async fn watch(self: Arc<Limits>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pressed = None;
        loop {
            let now = ticks.tick().await;
            let is_pressed = self.waiting.load(Ordering::Relaxed) > 0;
            pressed = is_pressed.then(|| pressed.unwrap_or(now));
            let stalled: Vec<_> = lock(&self.clients)
                .values()
                .filter_map(|client| Some((client.clone(), client.look(now)?)))
                .collect();
            let held: usize = stalled.iter().map(|(client, _)| client.stuck()).sum();
            let is_cause = held >= (COMMON + PROVEN) / 4;
            let at_once = is_cause && pressed.is_some_and(|since| now - since >= WINDOW);
            for (client, slow) in stalled {
                if at_once || slow >= SLOW_WINDOWS {
                    tracing::warn!(units = client.stuck(), "a client does not move; it is ended");
                    client.end.notify_one();
                }
            }
        }
    }
}

impl Client {
    fn new() -> Client {
        Client {
            share: Arc::new(Semaphore::new(SHARE)),
            moved: AtomicU64::new(0),
            stuck: AtomicUsize::new(0),
            is_proven: AtomicBool::new(false),
            window: Mutex::default(),
            end: Notify::new(),
        }
    }

    fn stuck(&self) -> usize {
        self.stuck.load(Ordering::Relaxed)
    }

    /// How many times in a row it was slow, if it is.
    fn look(&self, now: Instant) -> Option<u32> {
        let mut window = lock(&self.window);
        if self.stuck() == 0 {
            *window = None;
            return None;
        }
        let moved = self.moved.load(Ordering::Relaxed);
        let window = window.get_or_insert(Window { start: now, moved, slow: 0 });
        let elapsed = now - window.start;
        if elapsed >= WINDOW {
            let is_slow = moved - window.moved < RATE * elapsed.as_millis() as u64 / 1000;
            let slow = if is_slow { window.slow + 1 } else { 0 };
            *window = Window { start: now, moved, slow };
            if is_slow {
                self.is_proven.store(false, Ordering::Relaxed);
            }
        }
        (window.slow > 0).then_some(window.slow)
    }
}

impl Unauthenticated {
    /// Whether it must go.
    pub(super) async fn ended(&mut self) {
        // It is never sent: the sender goes.
        let _ = (&mut self.ended).await;
    }

    /// It has said who it is.
    pub(super) fn into_slot(self) -> ClientSlot {
        let client = Arc::new(Client::new());
        lock(&self.limits.clients).insert(self.number, client.clone());
        ClientSlot { limits: self.limits.clone(), number: self.number, client }
    }
}

impl Drop for Unauthenticated {
    fn drop(&mut self) {
        lock(&self.limits.unauthenticated).remove(&self.number);
    }
}

impl ClientSlot {
    /// Whether it must go.
    pub(super) async fn ended(&self) {
        self.client.end.notified().await;
    }

    /// A stream of this client whose bytes are counted.
    pub(super) fn count<S>(&self, stream: S) -> Counted<S> {
        Counted { stream, client: self.client.clone() }
    }

    /// Waits for so much memory. The body of the request comes next.
    pub(super) async fn take(&self, units: usize) -> io::Result<Memory> {
        let permits = units as u32;
        let client = &self.client;
        let is_idle = client.share.available_permits() == SHARE;
        let share = client.share.clone().acquire_many_owned(permits).await;
        let share = share.map_err(io::Error::other)?;
        let limits = &self.limits;
        let permit = match limits.common.clone().try_acquire_many_owned(permits) {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = Waiting::new(&limits.waiting);
                let is_proven = client.is_proven.load(Ordering::Relaxed);
                let may = is_idle && (is_proven || units <= LITTLE);
                let permit = tokio::select! {
                    permit = limits.common.clone().acquire_many_owned(permits) => permit,
                    permit = limits.proven.clone().acquire_many_owned(permits), if may => permit,
                };
                permit.map_err(io::Error::other)?
            }
        };
        let mut memory = Memory { permit, share, client: client.clone(), waits: Waits::Disk };
        memory.wait_for(Waits::Body);
        Ok(memory)
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        lock(&self.limits.clients).remove(&self.number);
    }
}

impl Memory {
    /// The body is there, and its client is not waited for.
    pub(super) fn received(&mut self) {
        self.wait_for(Waits::Disk);
    }

    /// The answer is there, and waits until its client takes it. It may be shorter than it might have been.
    pub(super) fn answered(&mut self, units: usize) {
        let excess = self.permit.num_permits().saturating_sub(units);
        drop(self.permit.split(excess));
        drop(self.share.split(excess));
        self.wait_for(Waits::Sent);
    }

    fn wait_for(&mut self, waits: Waits) {
        let units = self.permit.num_permits();
        if self.waits == Waits::Disk && waits != Waits::Disk {
            self.client.stuck.fetch_add(units, Ordering::Relaxed);
        } else if self.waits != Waits::Disk && waits == Waits::Disk {
            self.client.stuck.fetch_sub(units, Ordering::Relaxed);
        }
        self.waits = waits;
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.waits == Waits::Sent {
            self.client.is_proven.store(true, Ordering::Relaxed);
        }
        self.wait_for(Waits::Disk);
    }
}

/// Counts who waits, as long as it does.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A stream whose bytes are counted.
pub(super) struct Counted<S> {
    stream: S,
    client: Arc<Client>,
}

impl<S> Counted<S> {
    fn add(&self, bytes: usize) {
        self.client.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn counted(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(len)) = written {
            self.add(len);
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.add(buf.filled().len() - before);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.counted(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.counted(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics with this lock held")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use tokio::time::Instant;

    use super::{Client, Limits, RATE, SHARE, SLOW_WINDOWS, TICK, WINDOW};

    /// Looks as often as it is done, while the client moves so many bytes in a second.
    fn slow_after(client: &Client, start: Instant, time: Duration, rate: u64) -> Option<u32> {
        let mut slow = None;
        for tick in 0..(time.as_millis() / TICK.as_millis()) as u32 {
            slow = client.look(start + tick * TICK);
            client.moved.fetch_add(rate * TICK.as_millis() as u64 / 1000, Ordering::Relaxed);
        }
        slow
    }

    #[test]
    fn who_holds_memory_must_move() {
        let client = Client::new();
        let start = Instant::now();
        let second = Duration::from_secs(1);
        assert_eq!(slow_after(&client, start, second, 0), None, "it holds nothing");
        client.stuck.store(1, Ordering::Relaxed);
        assert_eq!(slow_after(&client, start, 10 * second, 2 * RATE), None);
        let slow = slow_after(&client, start + 10 * second, 12 * second, RATE / 2);
        assert!(slow >= Some(SLOW_WINDOWS), "{slow:?} windows in twelve seconds");
        let later = start + 22 * second;
        assert_eq!(slow_after(&client, later, WINDOW + second, 2 * RATE), None, "it moves again");
        assert!(slow_after(&client, later + 2 * second, second, 0).is_some());
        client.stuck.store(0, Ordering::Relaxed);
        assert_eq!(client.look(later + 4 * second), None, "it has sent what it held");
    }

    #[tokio::test]
    async fn memory_is_free_again_when_its_answer_is_sent() {
        let limits = Limits::new();
        let slot = limits.unauthenticated().into_slot();
        let mut memory = slot.take(5000).await.unwrap();
        assert_eq!(slot.client.stuck(), 5000);
        memory.received();
        assert_eq!(slot.client.stuck(), 0, "the disk is not the client");
        memory.answered(10);
        assert_eq!((slot.client.stuck(), slot.client.share.available_permits()), (10, SHARE - 10));
        drop(memory);
        assert_eq!((slot.client.stuck(), slot.client.share.available_permits()), (0, SHARE));
        assert_eq!(limits.common.available_permits(), super::COMMON);
        assert!(slot.client.is_proven.load(Ordering::Relaxed));
    }
}
