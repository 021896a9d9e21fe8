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
//! on is parked: it holds nothing, and is planned again from the start after the next event. A write that
//! has to copy old blocks first is planned again when its last copy has ended.

mod busy_poll;
mod jobs;
pub(crate) mod ledger;
pub(crate) mod queue;

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{fs::File, io, thread};

use slab::Slab;
use vmm_sys_util::eventfd::EventFd;

use self::busy_poll::BusyPoll;
use self::jobs::{CopyingWrite, Job, SplitRequest, Tag};
use self::queue::{ActiveQueue, Chain, Outcome, QueueSetup};
use crate::counters::QueueCounters;
use crate::device::Device;
use crate::memory::GuestMap;
use crate::mirror::epoch::manager::EpochHandle;
use crate::uring::{Reaped, Ring};

/// How long a stop waits for requests that wait for something else, such as a fetch, before it
/// fails them.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// What becomes of requests that wait for something else when their queue stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParkedRequests {
    /// They get some time, and fail then: the guest asked for the stop.
    Finish,
    /// They stay in flight, for whoever drives the queue next.
    Leave,
}

/// The poll of the wake-up descriptor. Kick polls count up from here.
const WAKE_POLL_ID: u32 = 0;

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
    /// Finish every request that was submitted, let the queue go, and answer with the next available
    /// index.
    Stop(ParkedRequests, Sender<u16>),
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
    (poll, most_queues): (Duration, usize),
    device: Arc<Device>,
    mailbox: Mailbox,
    inbox: Inbox,
) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(format!("queue-{index}")).spawn(move || {
        // The ring belongs to the thread that makes it.
        let depth = u32::from(queue_size).max(64);
        let ring = Ring::new(device.disk.raw_fd(), device.spill.raw_fd(), depth);
        let worker = ring.map(|ring| {
            let epoch_handle = device.mirror.epoch_handle(index);
            Worker {
                index,
                ring,
                inbox,
                mailbox,
                epoch_handle,
                device: device.clone(),
                queue: None,
                kick_poll: None,
                next_poll: WAKE_POLL_ID,
                wake_armed: false,
                parked: Vec::new(),
                copying: Slab::new(),
                parts: Slab::new(),
                flushes: Slab::new(),
                syncing: Vec::new(),
                unsynced: Vec::new(),
                seen: 0,
                now: Instant::now(),
                poll: BusyPoll::new(poll),
                most_queues,
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
    epoch_handle: EpochHandle,
    device: Arc<Device>,
    queue: Option<ActiveQueue>,
    /// The poll of the present queue's kick, while it is armed.
    kick_poll: Option<u32>,
    next_poll: u32,
    wake_armed: bool,
    parked: Vec<Job>,
    copying: Slab<CopyingWrite>,
    parts: Slab<SplitRequest>,
    flushes: Slab<Chain>,
    /// Flushes whose sync is under way,
    syncing: Vec<Chain>,
    /// and those that came after it began.
    unsynced: Vec<Chain>,
    /// The event count before the last planning of the parked requests.
    seen: u64,
    /// When the worker last came back from its wait: one look at the clock for each turn.
    now: Instant,
    poll: BusyPoll,
    /// The most queues that may run for it to look before it sleeps: others need the processors too.
    most_queues: usize,
    paused: Option<Pause>,
    stopping: Option<Stopping>,
    exit: bool,
}

/// A stop that was asked for.
struct Stopping {
    waiting: ParkedRequests,
    deadline: Instant,
    reply: Sender<u16>,
}

impl Worker {
    fn run(mut self) -> io::Result<()> {
        loop {
            self.read_inbox()?;
            if self.exit {
                return Ok(());
            }
            let events = self.device.mirror.events().count();
            let again = std::mem::replace(&mut self.seen, events) != events;
            if self.paused.is_none() {
                if again {
                    self.plan_parked()?;
                }
                self.pop_all()?;
            }
            self.announce()?;
            self.finish_pause();
            self.finish_stop()?;
            self.wait()?;
            self.now = Instant::now();
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
                    let queue = ActiveQueue::new(*setup);
                    // Whoever drove it before may have ended between a completion and its interrupt.
                    queue.interrupt();
                    self.queue = Some(queue);
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
                Command::Stop(waiting, reply) => {
                    let deadline = Instant::now() + STOP_TIMEOUT;
                    self.stopping = Some(Stopping { waiting, deadline, reply });
                }
                Command::Flushed(key, result) => {
                    let chain = self.flushes.remove(key);
                    self.finish(chain, result, 0);
                }
                Command::Exit => self.exit = true,
            }
        }
        Ok(())
    }

    /// What this queue's requests are counted in.
    fn counters(&self) -> &QueueCounters {
        &self.device.stats.queues[self.index]
    }

    /// Whether requests are popped at present.
    fn takes_requests(&self) -> bool {
        self.paused.is_none() && self.stopping.is_none()
    }

    /// Whether a stop leaves to the next what waits.
    fn leaves(&self) -> bool {
        self.stopping.as_ref().is_some_and(|stopping| stopping.waiting == ParkedRequests::Leave)
    }

    /// Pops and starts what the guest has made available.
    fn pop_all(&mut self) -> io::Result<()> {
        let (stopping, leaving) = (self.stopping.is_some(), self.leaves());
        let Some(queue) = &mut self.queue else { return Ok(()) };
        if self.paused.is_some() || leaving || (stopping && !queue.has_resubmissions()) {
            return Ok(());
        }
        queue.disable_kicks();
        let now = self.now;
        // A queue that stops takes nothing new, but finishes what was begun, by whomever.
        while let Some((chain, kind)) =
            self.queue.as_mut().and_then(|queue| queue.pop(now, stopping))
        {
            self.accept(chain, kind)?;
        }
        Ok(())
    }

    /// Tells the guest what was completed since the last time, once for all of it.
    fn announce(&mut self) -> io::Result<()> {
        match self.queue.as_mut().and_then(ActiveQueue::announce) {
            Some(call) => self.ring.signal(call),
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
    fn wait(&mut self) -> io::Result<()> {
        if !self.wake_armed {
            self.ring.poll(self.inbox.wake.as_raw_fd(), WAKE_POLL_ID)?;
            self.wake_armed = true;
        }
        if let (Some(queue), None) = (&self.queue, self.kick_poll) {
            self.next_poll = self.next_poll.wrapping_add(1).max(WAKE_POLL_ID + 1);
            self.ring.poll(queue.kick_fd(), self.next_poll)?;
            self.kick_poll = Some(self.next_poll);
        }
        if self.busy_poll()? {
            return Ok(());
        }
        let more =
            self.takes_requests() && self.queue.as_mut().is_some_and(ActiveQueue::enable_kicks);
        let may_sleep = !more
            && (self.parked.is_empty()
                || self.device.mirror.events().may_sleep(self.index, self.seen));
        let limit = match &self.stopping {
            _ if !may_sleep => Some(Duration::ZERO),
            Some(Stopping { deadline, .. }) => Some(
                deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)),
            ),
            None => None,
        };
        self.ring.enter(limit)
    }

    /// While the guest has to act next: looks at its queue for a short time instead of sleeping. Returns
    /// whether something is there.
    fn busy_poll(&mut self) -> io::Result<bool> {
        let idle = self.ring.in_flight() == 0 && self.parked.is_empty() && self.flushes.is_empty();
        let Some(queue) = &self.queue else { return Ok(false) };
        let spare = self.device.running.load(Ordering::Relaxed) <= self.most_queues;
        if !idle || !spare || !self.takes_requests() || !self.poll.is_wanted() {
            return Ok(false);
        }
        // The interrupt that makes the guest act must go out first.
        self.ring.submit_all()?;
        let ring = &mut self.ring;
        let found = self.poll.run(|| queue.has_more() || ring.has_completions());
        if self.ring.has_completions() {
            // The kernel adds it to the completions only when it is asked.
            self.ring.enter(Some(Duration::ZERO))?;
        }
        Ok(found)
    }

    fn reap_all(&mut self) -> io::Result<()> {
        while let Some(reaped) = self.ring.reap()? {
            match reaped {
                Reaped::Done(done) => self.completed(done)?,
                Reaped::Ready { id: WAKE_POLL_ID, ended } => self.wake_armed = !ended,
                Reaped::Ready { id, ended } if self.kick_poll == Some(id) => {
                    self.poll.kicked(self.now);
                    if ended {
                        self.kick_poll = None;
                    }
                }
                // The poll of a queue that is gone.
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

    /// Ends a stop when every request is answered or left. Those that still wait at the deadline fail.
    fn finish_stop(&mut self) -> io::Result<()> {
        let leaving = self.leaves();
        let Some(Stopping { deadline, .. }) = &self.stopping else { return Ok(()) };
        if leaving {
            for job in std::mem::take(&mut self.parked) {
                self.counters().left.add(1);
                job.into_chain().leave();
            }
        } else if !self.parked.is_empty() && Instant::now() >= *deadline {
            tracing::error!(
                requests = self.parked.len(),
                "a stopping queue fails requests that wait"
            );
            for job in std::mem::take(&mut self.parked) {
                self.end(job.into_chain(), Outcome::Failed);
            }
        }
        let again = self.queue.as_ref().is_some_and(ActiveQueue::has_resubmissions);
        let waiting = again && self.paused.is_none() && !leaving;
        if self.ring.in_flight() > 0
            || !self.flushes.is_empty()
            || !self.parked.is_empty()
            || waiting
        {
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
        if let Some(stopping) = self.stopping.take() {
            // As above.
            let _ = stopping.reply.send(next_avail);
        }
        Ok(())
    }
}
