//! A queue worker: one thread, one virtqueue, one ring.
//!
//! ```text
//!            ┌────────────────────────── loop ──────────────────────────┐
//!   inbox ──►│ commands ─► pop and plan ─► plan parked again ─► announce │
//!            │     ▲                                             │      │
//!            │     └── reap ◄── enter the kernel: submit, wait ◄──┘      │
//!            └───────────────────────────────────────────────────────────┘
//! ```
//!
//! Kicks, wake-ups and completions all arrive through the ring's one wait. A request that cannot go
//! on is parked: it holds nothing, and is planned again from the start after the next event.

mod jobs;
pub(crate) mod queue;

use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{fs::File, io, thread};

use slab::Slab;
use vmm_sys_util::eventfd::EventFd;

use self::jobs::{Job, Parts, Tag};
use self::queue::{ActiveQueue, Chain, Outcome, QueueSetup};
use crate::device::Device;
use crate::memory::GuestMap;
use crate::mirror::cut::Entrance;
use crate::uring::{Reaped, Ring};

/// How long a stop waits for requests that wait for something else, such as a fetch, before it
/// fails them.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// The poll of the wake-up descriptor. Kick polls count up from here.
const WAKE: u32 = 0;

/// What a worker is told.
pub(crate) enum Command {
    /// Drive this queue.
    Start(Box<QueueSetup>),
    /// Interrupt through this descriptor from now on.
    SetCall(Option<File>),
    /// Submit nothing more, and answer when nothing is submitted: guest memory is about to change.
    /// Parked requests stay.
    Pause(Sender<()>),
    /// Go on with this memory.
    Resume(Arc<GuestMap>),
    /// Finish every request that was popped, let the queue go, and answer with the next available
    /// index.
    Stop(Sender<u16>),
    /// A flush of the map that was asked for under this key has ended.
    Flushed(usize, io::Result<()>),
    /// End the thread.
    Exit,
}

/// The way to a worker's inbox.
#[derive(Clone)]
pub(crate) struct Mailbox {
    sender: Sender<Command>,
    wake: Arc<EventFd>,
}

impl Mailbox {
    /// Tells the worker. A worker that is gone hears nothing.
    pub(crate) fn send(&self, command: Command) {
        if self.sender.send(command).is_ok() {
            self.wake();
        }
    }

    /// Makes the worker look around.
    pub(crate) fn wake(&self) {
        // Fails only when the counter is full: then the worker is awake already.
        let _ = self.wake.write(1);
    }
}

/// A mailbox and its other end, for a worker that starts later.
pub(crate) fn mailbox() -> io::Result<(Mailbox, Inbox)> {
    let (sender, receiver) = mpsc::channel();
    let wake = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
    Ok((Mailbox { sender, wake: wake.clone() }, Inbox { receiver, wake }))
}

/// The receiving end of a [`Mailbox`].
pub(crate) struct Inbox {
    receiver: Receiver<Command>,
    wake: Arc<EventFd>,
}

/// Starts the worker of queue `index`.
pub(crate) fn spawn(
    index: usize,
    queue_size: u16,
    device: Arc<Device>,
    mailbox: Mailbox,
    inbox: Inbox,
) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(format!("queue-{index}")).spawn(move || {
        // The ring belongs to the thread that makes it.
        let depth = u32::from(queue_size).max(64);
        let ring = Ring::new(device.disk.raw_fd(), device.preserve.raw_fd(), depth);
        let worker = ring.map(|ring| {
            let entrance = device.mirror.cut.entrance(index);
            Worker {
                index,
                ring,
                inbox,
                mailbox,
                entrance,
                device: device.clone(),
                queue: None,
                kick_poll: None,
                next_poll: WAKE,
                wake_armed: false,
                parked: Vec::new(),
                parts: Slab::new(),
                flushes: Slab::new(),
                seen: 0,
                paused: None,
                stopping: None,
                exit: false,
            }
        });
        if let Err(error) = worker.and_then(Worker::run) {
            // A disk with a dead worker must not pretend to be alive.
            panic!("queue worker {index} failed: {error}");
        }
    })
}

/// A pause that was asked for.
struct Pause {
    reply: Option<Sender<()>>,
}

struct Worker {
    index: usize,
    ring: Ring<Tag>,
    inbox: Inbox,
    mailbox: Mailbox,
    entrance: Entrance,
    device: Arc<Device>,
    queue: Option<ActiveQueue>,
    /// The poll of the present queue's kick, while it is armed.
    kick_poll: Option<u32>,
    next_poll: u32,
    wake_armed: bool,
    parked: Vec<Job>,
    parts: Slab<Parts>,
    flushes: Slab<Chain>,
    /// The event count before the last planning of the parked requests.
    seen: u64,
    paused: Option<Pause>,
    stopping: Option<(Sender<u16>, Instant)>,
    exit: bool,
}

impl Worker {
    fn run(mut self) -> io::Result<()> {
        loop {
            self.read_inbox()?;
            if self.exit {
                return Ok(());
            }
            let events = self.device.mirror.events.count();
            let again = std::mem::replace(&mut self.seen, events) != events;
            let mut busy = false;
            if self.paused.is_none() {
                if again {
                    self.plan_parked()?;
                }
                busy = self.pop_all()?;
            }
            self.announce()?;
            self.finish_pause();
            self.finish_stop()?;
            self.wait(busy)?;
            self.reap_all()?;
        }
    }

    fn read_inbox(&mut self) -> io::Result<()> {
        while let Ok(command) = self.inbox.receiver.try_recv() {
            match command {
                Command::Start(setup) => {
                    debug_assert!(
                        self.queue.is_none(),
                        "a queue is stopped before the next starts"
                    );
                    self.queue = Some(ActiveQueue::new(*setup));
                    self.stopping = None;
                }
                Command::SetCall(call) => {
                    self.ring.submit_all()?;
                    if let Some(queue) = &mut self.queue {
                        queue.set_call(call);
                        queue.interrupt();
                    }
                }
                Command::Pause(reply) => self.paused = Some(Pause { reply: Some(reply) }),
                Command::Resume(map) => {
                    // A region that is replaced is away for a moment: rings in it wait for it.
                    let whole = self.queue.as_mut().is_none_or(|queue| queue.set_map(map));
                    self.paused = (!whole).then_some(Pause { reply: None });
                    if whole {
                        self.plan_parked()?;
                    }
                }
                Command::Stop(reply) => self.stopping = Some((reply, Instant::now() + STOP_LIMIT)),
                Command::Flushed(key, result) => {
                    let chain = self.flushes.remove(key);
                    self.finish(chain, result, 0);
                }
                Command::Exit => self.exit = true,
            }
        }
        Ok(())
    }

    /// Pops and starts what the guest has made available. Returns whether there may be more.
    fn pop_all(&mut self) -> io::Result<bool> {
        if self.stopping.is_some() {
            return Ok(false);
        }
        let Some(queue) = &mut self.queue else { return Ok(false) };
        queue.disable_kicks();
        while let Some((chain, kind)) = self.queue.as_mut().and_then(ActiveQueue::pop) {
            self.accept(chain, kind)?;
        }
        Ok(self.queue.as_mut().is_some_and(ActiveQueue::enable_kicks))
    }

    /// Tells the guest what was completed since the last time, once for all of it.
    fn announce(&mut self) -> io::Result<()> {
        match self.queue.as_mut().and_then(ActiveQueue::announce) {
            Some(call) => self.ring.raise(call),
            None => Ok(()),
        }
    }

    fn plan_parked(&mut self) -> io::Result<()> {
        for job in std::mem::take(&mut self.parked) {
            self.plan(job)?;
        }
        Ok(())
    }

    /// Submits, and sleeps unless there is something to do.
    fn wait(&mut self, busy: bool) -> io::Result<()> {
        if !self.wake_armed {
            self.ring.poll(self.inbox.wake.as_raw_fd(), WAKE)?;
            self.wake_armed = true;
        }
        if let (Some(queue), None) = (&self.queue, self.kick_poll) {
            self.next_poll = self.next_poll.wrapping_add(1).max(WAKE + 1);
            self.ring.poll(queue.kick_fd(), self.next_poll)?;
            self.kick_poll = Some(self.next_poll);
        }
        let may_sleep = !busy
            && (self.parked.is_empty()
                || self.device.mirror.events.may_sleep(self.index, self.seen));
        let limit = match &self.stopping {
            _ if !may_sleep => Some(Duration::ZERO),
            Some((_, deadline)) => Some(
                deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)),
            ),
            None => None,
        };
        self.ring.enter(limit)
    }

    fn reap_all(&mut self) -> io::Result<()> {
        while let Some(reaped) = self.ring.reap()? {
            match reaped {
                Reaped::Done(done) => self.completed(done)?,
                Reaped::Ready { id: WAKE, ended } => self.wake_armed = !ended,
                Reaped::Ready { id, ended: true } if self.kick_poll == Some(id) => {
                    self.kick_poll = None;
                }
                // A kick: the queue is looked at anyway. Or the poll of a queue that is gone.
                Reaped::Ready { .. } => {}
            }
        }
        Ok(())
    }

    fn finish_pause(&mut self) {
        if self.ring.in_flight() == 0
            && self.flushes.is_empty()
            && let Some(reply) = self.paused.as_mut().and_then(|pause| pause.reply.take())
        {
            // Nobody waits for the answer of a connection that is gone.
            let _ = reply.send(());
        }
    }

    /// Ends a stop when every request is answered. Those that still wait at the deadline fail.
    fn finish_stop(&mut self) -> io::Result<()> {
        let Some((_, deadline)) = &self.stopping else { return Ok(()) };
        if !self.parked.is_empty() && Instant::now() >= *deadline {
            tracing::error!(
                requests = self.parked.len(),
                "a stopping queue fails requests that wait"
            );
            for job in std::mem::take(&mut self.parked) {
                self.end(job.into_chain(), Outcome::Failed);
            }
        }
        if self.ring.in_flight() > 0 || !self.flushes.is_empty() || !self.parked.is_empty() {
            return Ok(());
        }
        self.announce()?;
        if let Some(poll) = self.kick_poll.take() {
            self.ring.cancel_poll(poll)?;
        }
        // Before the queue's descriptors are closed.
        self.ring.submit_all()?;
        let next_avail = match self.queue.take() {
            Some(queue) => queue.next_avail(),
            None => 0,
        };
        self.paused = None;
        if let Some((reply, _)) = self.stopping.take() {
            // As above.
            let _ = reply.send(next_avail);
        }
        Ok(())
    }
}
