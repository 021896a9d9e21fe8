//! Limits on what clients use of a server: memory and time.
//!
//! A request is read when there is memory for it and for its answer. The memory is free when the
//! answer is sent. So a client that sends a body slowly, or takes no answers, keeps memory from the
//! others. These limits prevent that:
//!
//! - One connection may hold a quarter of the memory.
//! - A quarter of the memory is reserved for connections that hold little, and have taken an answer
//!   before or want little.
//! - A connection that holds memory and moves hardly a byte is ended: after a while, or almost at
//!   once when others wait and such connections hold a quarter of all memory.
//!
//! `net::admission` bounds the connections.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// The memory that counts as little, in KiB.
const LITTLE_KIB: usize = 64;

/// The bytes a second that a connection that holds memory must move.
const MIN_BYTES_PER_SECOND: u64 = 64 << 10;

/// The time over which the rate of a connection is measured.
const RATE_WINDOW: Duration = Duration::from_millis(300);

/// The windows in a row in which a connection may be slow: about 10 s.
const SLOW_WINDOWS: u32 = 33;

/// The interval between two checks of all connections.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The limits that all connections of a server share.
pub(crate) struct Limits {
    /// A quarter of the memory, in KiB: what one connection may hold.
    quarter_kib: usize,
    /// Memory for any connection: three quarters.
    common: Arc<Semaphore>,
    /// Memory for connections that hold little, and are proven or want little. A connection is
    /// proven when it has taken an answer and is not slow.
    proven: Arc<Semaphore>,
    /// The number of requests that wait for memory.
    waiting: AtomicUsize,
    numbers: AtomicU64,
    clients: Mutex<HashMap<u64, Arc<Client>>>,
}

/// The state of one connection.
pub(crate) struct Client {
    share: Arc<Semaphore>,
    /// Bytes that the client has sent and received.
    moved: AtomicU64,
    /// Memory in KiB that waits for the client: bodies to receive and answers to send.
    stuck: AtomicUsize,
    /// Whether the client has taken an answer and is not slow.
    is_proven: AtomicBool,
    window: Mutex<Option<Window>>,
    end: Notify,
}

/// The current measurement of a connection's rate.
struct Window {
    start: Instant,
    moved: u64,
    slow: u32,
}

/// An authenticated connection. It leaves the limits when this is dropped.
pub(crate) struct ClientSlot {
    limits: Arc<Limits>,
    number: u64,
    client: Arc<Client>,
}

/// The memory that a request holds until its answer is sent.
pub(crate) struct Memory {
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
    /// Limits for the requests and answers of a server, which take `memory_kib` KiB together.
    pub(crate) fn new(memory_kib: usize) -> Arc<Limits> {
        let quarter_kib = memory_kib / 4;
        Arc::new(Limits {
            quarter_kib,
            common: Arc::new(Semaphore::new(3 * quarter_kib)),
            proven: Arc::new(Semaphore::new(quarter_kib)),
            waiting: AtomicUsize::new(0),
            numbers: AtomicU64::new(0),
            clients: Mutex::default(),
        })
    }

    /// Adds an authenticated connection.
    pub(crate) fn slot(self: &Arc<Limits>) -> ClientSlot {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let client = Arc::new(Client::new(self.quarter_kib));
        lock(&self.clients).insert(number, client.clone());
        ClientSlot { limits: self.clone(), number, client }
    }

    /// Ends connections that keep memory from others. Never returns.
    pub(crate) async fn watch(self: Arc<Limits>) {
        let mut ticks = interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pressed = None;
        loop {
            let now = ticks.tick().await;
            let is_pressed = self.waiting.load(Ordering::Relaxed) > 0;
            pressed = is_pressed.then(|| pressed.unwrap_or(now));
            let stalled: Vec<_> = lock(&self.clients)
                .values()
                .filter_map(|client| Some((client.clone(), client.check(now)?)))
                .collect();
            let held: usize = stalled.iter().map(|(client, _)| client.stuck()).sum();
            let is_cause = held >= self.quarter_kib;
            let at_once = is_cause && pressed.is_some_and(|since| now - since >= RATE_WINDOW);
            for (client, slow) in stalled {
                if at_once || slow >= SLOW_WINDOWS {
                    tracing::warn!(
                        kib = client.stuck(),
                        "ended a connection that holds memory and moves too few bytes"
                    );
                    client.end.notify_one();
                }
            }
        }
    }
}

impl Client {
    fn new(share_kib: usize) -> Client {
        Client {
            share: Arc::new(Semaphore::new(share_kib)),
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

    /// How many windows in a row the connection was slow; `None` if it is not slow.
    fn check(&self, now: Instant) -> Option<u32> {
        let mut window = lock(&self.window);
        if self.stuck() == 0 {
            *window = None;
            return None;
        }
        let moved = self.moved.load(Ordering::Relaxed);
        let window = window.get_or_insert(Window { start: now, moved, slow: 0 });
        let elapsed = now - window.start;
        if elapsed >= RATE_WINDOW {
            let is_slow =
                moved - window.moved < MIN_BYTES_PER_SECOND * elapsed.as_millis() as u64 / 1000;
            let slow = if is_slow { window.slow + 1 } else { 0 };
            *window = Window { start: now, moved, slow };
            if is_slow {
                self.is_proven.store(false, Ordering::Relaxed);
            }
        }
        (window.slow > 0).then_some(window.slow)
    }
}

impl ClientSlot {
    /// Returns when the connection must end.
    pub(crate) async fn ended(&self) {
        self.client.end.notified().await;
    }

    /// Wraps a stream of this client so that its bytes are counted.
    pub(crate) fn count<S>(&self, stream: S) -> Counted<S> {
        Counted { stream, client: self.client.clone() }
    }

    /// Waits for `kib` KiB of memory, at most a quarter of all. The body of the request comes next.
    pub(crate) async fn take(&self, kib: usize) -> io::Result<Memory> {
        assert!(kib <= self.limits.quarter_kib, "a connection would wait for {kib} KiB for ever");
        let permits = kib as u32;
        let client = &self.client;
        let held = self.limits.quarter_kib - client.share.available_permits();
        let share = client.share.clone().acquire_many_owned(permits).await;
        let share = share.map_err(io::Error::other)?;
        let limits = &self.limits;
        let permit = match limits.common.clone().try_acquire_many_owned(permits) {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = Waiting::new(&limits.waiting);
                let is_proven = client.is_proven.load(Ordering::Relaxed);
                let may = held <= LITTLE_KIB && (is_proven || kib <= LITTLE_KIB);
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
    /// Notes that the body has arrived: the request does not wait for its client.
    pub(crate) fn received(&mut self) {
        self.wait_for(Waits::Disk);
    }

    /// Notes that the answer is ready and waits until its client takes it. Releases the memory that
    /// an answer of `kib` KiB does not need.
    pub(crate) fn answered(&mut self, kib: usize) {
        let excess = self.permit.num_permits().saturating_sub(kib);
        drop(self.permit.split(excess));
        drop(self.share.split(excess));
        self.wait_for(Waits::Sent);
    }

    /// Ends the connection that holds this memory.
    pub(crate) fn end_connection(&self) {
        self.client.end.notify_one();
    }

    fn wait_for(&mut self, waits: Waits) {
        let kib = self.permit.num_permits();
        if self.waits == Waits::Disk && waits != Waits::Disk {
            self.client.stuck.fetch_add(kib, Ordering::Relaxed);
        } else if self.waits != Waits::Disk && waits == Waits::Disk {
            self.client.stuck.fetch_sub(kib, Ordering::Relaxed);
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

/// Counts a waiting request until it is dropped.
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
pub(crate) struct Counted<S> {
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

    use super::{
        CHECK_INTERVAL, Client, LITTLE_KIB, Limits, MIN_BYTES_PER_SECOND, RATE_WINDOW, SLOW_WINDOWS,
    };

    const QUARTER_KIB: usize = 16 << 10;

    /// Checks a client at the usual interval while it moves `rate` bytes a second.
    fn slow_after(client: &Client, start: Instant, time: Duration, rate: u64) -> Option<u32> {
        let mut slow = None;
        for tick in 0..(time.as_millis() / CHECK_INTERVAL.as_millis()) as u32 {
            slow = client.check(start + tick * CHECK_INTERVAL);
            client
                .moved
                .fetch_add(rate * CHECK_INTERVAL.as_millis() as u64 / 1000, Ordering::Relaxed);
        }
        slow
    }

    #[test]
    fn a_connection_that_holds_memory_must_move_bytes() {
        let client = Client::new(QUARTER_KIB);
        let start = Instant::now();
        let second = Duration::from_secs(1);
        assert_eq!(slow_after(&client, start, second, 0), None, "the connection holds nothing");
        client.stuck.store(1, Ordering::Relaxed);
        assert_eq!(slow_after(&client, start, 10 * second, 2 * MIN_BYTES_PER_SECOND), None);
        let slow = slow_after(&client, start + 10 * second, 12 * second, MIN_BYTES_PER_SECOND / 2);
        assert!(slow >= Some(SLOW_WINDOWS), "{slow:?} windows in twelve seconds");
        let later = start + 22 * second;
        assert_eq!(
            slow_after(&client, later, RATE_WINDOW + second, 2 * MIN_BYTES_PER_SECOND),
            None,
            "the connection moves again"
        );
        assert!(slow_after(&client, later + 2 * second, second, 0).is_some());
        client.stuck.store(0, Ordering::Relaxed);
        assert_eq!(client.check(later + 4 * second), None, "the connection holds nothing any more");
    }

    #[tokio::test]
    async fn memory_is_free_again_when_its_answer_is_sent() {
        let limits = Limits::new(4 * QUARTER_KIB);
        let slot = limits.slot();
        let mut memory = slot.take(5000).await.unwrap();
        assert_eq!(slot.client.stuck(), 5000);
        memory.received();
        assert_eq!(slot.client.stuck(), 0, "the request waits for the disk, not for the client");
        memory.answered(10);
        assert_eq!(
            (slot.client.stuck(), slot.client.share.available_permits()),
            (10, QUARTER_KIB - 10)
        );
        drop(memory);
        assert_eq!((slot.client.stuck(), slot.client.share.available_permits()), (0, QUARTER_KIB));
        assert_eq!(limits.common.available_permits(), 3 * QUARTER_KIB);
        assert!(slot.client.is_proven.load(Ordering::Relaxed));
    }

    #[tokio::test]
    async fn a_connection_that_holds_little_gets_reserved_memory() {
        let limits = Limits::new(4 * QUARTER_KIB);
        let greedy: Vec<_> = (0..3).map(|_| limits.slot()).collect();
        let mut held = Vec::new();
        for slot in &greedy {
            held.push(slot.take(QUARTER_KIB).await.unwrap());
        }
        let slot = limits.slot();
        held.push(slot.take(LITTLE_KIB).await.unwrap());
        held.push(slot.take(LITTLE_KIB).await.unwrap());
        let wait = Duration::from_millis(50);
        let more = tokio::time::timeout(wait, slot.take(1)).await;
        assert!(more.is_err(), "it holds more than little");
    }
}
