//! A queue worker: one thread, one virtqueue, one ring.
//!
//! ```text
//!            ┌───────────────────────── loop ──────────────────────────┐
//!   inbox ──►│ commands ─► plan parked again ─► pop and plan ─► announce │
//!            │     ▲                                              │     │
//!            │     └── reap ◄── enter the kernel: submit, wait ◄──┘     │
//!            └─────────────────────────────────────────────────────────┘
//! ```
//!
//! Kicks, wake-ups and completions all arrive through the ring's one wait. A request that cannot go
//! on is *parked*: it holds nothing, and is planned again from the start after the next event. A
//! write that has to copy old blocks first is planned again when its last copy has ended.
//!
//! | module | is |
//! |---|---|
//! | [`state`] | the states of a worker |
//! | [`queue`] | the virtqueue: pop, complete, notify |
//! | [`jobs`] | requests before they are submitted: accepted, planned, parked |
//! | [`submit`] | the operations that a request starts on the ring |
//! | [`completion`] | what follows the end of an operation, up to the answer |
//! | [`guest_data`] | copies between guest memory and buffers |
//! | [`flush_queue`] | the flushes |
//! | [`busy_poll`] | polling instead of sleeping |

mod busy_poll;
mod completion;
mod flush_queue;
mod guest_data;
mod jobs;
pub(crate) mod queue;
mod state;
mod submit;

use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{fs::File, io, thread};

use slab::Slab;
use vmm_sys_util::eventfd::EventFd;

use self::busy_poll::BusyPoll;
use self::flush_queue::FlushQueue;
use self::jobs::{CopyingWrite, Job};
use self::queue::{ActiveQueue, Outcome, QueueSetup};
use self::state::{Stop, WorkerState};
use self::submit::{SplitRequest, Tag};
use crate::counters::{Counters, QueueCounters};
use crate::fetch::Fetcher;
use crate::flush::Flusher;
use crate::guest::GuestState;
use crate::image::Serial;
use crate::local_disk::LocalDisk;
use crate::log_limit::LogLimit;
use crate::memory::GuestMap;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::epoch::manager::EpochHandle;
use crate::uring::{Reaped, Ring};

/// How long a stop waits for parked requests before it fails them.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The time after which a worker that plans requests looks at its inbox again. A single request can
/// cover so many chunks, of so many checkpoints, that planning it takes milliseconds.
const PASS_TIME: Duration = Duration::from_millis(50);

/// The number of requests that are planned between two readings of the clock.
const PLANS_PER_CLOCK_READ: usize = 8;

/// What becomes of parked requests when their queue stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParkedRequests {
    /// They get some time, and then they fail.
    Finish,
    /// They stay in flight, and the next owner of the queue serves them.
    Leave,
}

/// The id of the poll of the wake-up descriptor. The ids of kick polls and signals count up from
/// here.
const WAKE_POLL_ID: u32 = 0;

/// A command for a worker.
pub(crate) enum Command {
    /// Drive this queue.
    Start(Box<QueueSetup>),
    /// Interrupt the guest through this descriptor.
    SetCall(Option<File>),
    /// Submit nothing more, and answer when nothing is in flight: guest memory is about to change.
    /// Parked requests stay.
    Pause(Sender<()>),
    /// Go on with this memory.
    Resume(Arc<GuestMap>),
    /// Finish every request that was submitted, and release the queue. The answer is the next
    /// available index.
    Stop(ParkedRequests, Sender<u16>),
    /// Drive this queue only to finish the requests that were popped before, and release it. The
    /// answer is the next available index.
    Drain(Box<QueueSetup>, Sender<u16>),
    /// The flush that was requested from the flusher has ended.
    Flushed(io::Result<()>),
    /// End the thread.
    Exit,
}

/// The sending end of a worker's inbox.
#[derive(Clone)]
pub(crate) struct Mailbox {
    sender: Sender<Command>,
    wake: Arc<EventFd>,
}

impl Mailbox {
    /// Sends a command. A worker that has ended does not receive it.
    pub(crate) fn send(&self, command: Command) {
        if self.sender.send(command).is_ok() {
            self.wake();
        }
    }

    /// Wakes the worker.
    pub(crate) fn wake(&self) {
        // Fails only when the counter is full: then the worker is awake already.
        let _ = self.wake.write(1);
    }
}

/// Creates a mailbox and its receiving end, for a worker that starts later.
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

/// What workers need to serve requests.
pub(crate) struct RequestContext {
    pub(crate) disk: Arc<LocalDisk>,
    pub(crate) fetcher: Arc<Fetcher>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) guest: Arc<GuestState>,
    /// Buffers between unaligned requests and the disk.
    pub(crate) bounce_buffers: Arc<BufferPool>,
    pub(crate) serial: Serial,
}

/// Starts the worker of queue `index`. `poll` is how long the worker polls before it sleeps, and at
/// how many running queues it stops doing that.
pub(crate) fn spawn(
    index: usize,
    queue_size: u16,
    (poll, poll_max_queues): (Duration, usize),
    context: Arc<RequestContext>,
    mailbox: Mailbox,
    inbox: Inbox,
) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(format!("queue-{index}")).spawn(move || {
        // The ring belongs to the thread that creates it.
        let depth = u32::from(queue_size).max(64);
        let ring = Ring::new(context.disk.data.raw_fd(), depth);
        let worker = ring.map(|ring| Worker {
            index,
            ring,
            inbox,
            mailbox,
            epoch_handle: context.disk.mirror.epoch_handle(index),
            context,
            state: WorkerState::Idle,
            queue: None,
            kick_poll: None,
            signal: None,
            last_id: WAKE_POLL_ID,
            wake_armed: false,
            parked: Vec::new(),
            copying: Slab::new(),
            parts: Slab::new(),
            flushes: FlushQueue::default(),
            seen_events: 0,
            io_errors: LogLimit::new(Instant::now()),
            broken_rings: LogLimit::new(Instant::now()),
            has_unplanned: false,
            now: Instant::now(),
            poll: BusyPoll::new(poll),
            poll_max_queues,
        });
        if let Err(error) = worker.and_then(Worker::run) {
            // A disk with a dead worker must not pretend to be alive.
            panic!("queue worker {index} failed: {error}");
        }
    })
}

struct Worker {
    index: usize,
    ring: Ring<Tag>,
    inbox: Inbox,
    mailbox: Mailbox,
    epoch_handle: EpochHandle,
    context: Arc<RequestContext>,
    state: WorkerState,
    queue: Option<ActiveQueue>,
    /// The poll of the present queue's kick, while it is armed.
    kick_poll: Option<u32>,
    /// The signal to the present queue's guest that is in flight. There is one at most: a
    /// descriptor that blocks must not fill the kernel's memory.
    signal: Option<u32>,
    last_id: u32,
    wake_armed: bool,
    parked: Vec<Job>,
    copying: Slab<CopyingWrite>,
    parts: Slab<SplitRequest>,
    flushes: FlushQueue,
    /// The event count before the parked requests were last planned.
    seen_events: u64,
    /// The log lines for requests that failed.
    io_errors: LogLimit,
    /// The log lines for rings that the guest broke.
    broken_rings: LogLimit,
    /// Whether the last pass over the parked requests ended before the last one.
    has_unplanned: bool,
    /// The time when the worker last came back from its wait. The clock is read once for each loop.
    now: Instant,
    poll: BusyPoll,
    /// The worker polls only while at most this many queues run, because others need the processors
    /// too. If the guest polls, it may be one more.
    poll_max_queues: usize,
}

impl Worker {
    fn run(mut self) -> io::Result<()> {
        loop {
            self.read_inbox()?;
            if matches!(self.state, WorkerState::Exited) {
                return Ok(());
            }
            let events = self.context.disk.mirror.events().count();
            let has_events = std::mem::replace(&mut self.seen_events, events) != events;
            if self.state.may_plan() {
                if has_events || self.has_unplanned {
                    self.plan_parked()?;
                }
                self.pop_all()?;
            }
            self.announce()?;
            self.report_breakage();
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
                Command::Start(setup) => self.start(*setup),
                Command::SetCall(call) => {
                    self.end_signal()?;
                    if let Some(queue) = &mut self.queue {
                        queue.set_call(call);
                    }
                }
                Command::Pause(reply) => drop(self.state.transition(WorkerState::Pausing(reply))),
                Command::Resume(map) => {
                    // A region that is replaced is away for a moment: a ring in it waits.
                    if self.queue.as_mut().is_none_or(|queue| queue.set_map(map)) {
                        self.state.transition(WorkerState::Running);
                        self.plan_parked()?;
                    }
                }
                Command::Stop(parked, reply) => self.stop(parked, reply),
                Command::Drain(setup, reply) => {
                    self.start(*setup);
                    self.stop(ParkedRequests::Finish, reply);
                }
                Command::Flushed(result) => self.finish_flush(&result)?,
                Command::Exit => drop(self.state.transition(WorkerState::Exited)),
            }
        }
        Ok(())
    }

    fn start(&mut self, setup: QueueSetup) {
        self.state.transition(WorkerState::Running);
        self.queue = Some(ActiveQueue::new(setup));
    }

    fn stop(&mut self, parked: ParkedRequests, reply: Sender<u16>) {
        let deadline = Instant::now() + STOP_TIMEOUT;
        let is_mapped = self.state.takes_requests();
        self.state.transition(WorkerState::Stopping(Stop { parked, deadline, reply, is_mapped }));
    }

    /// The counters of this queue.
    fn counters(&self) -> &QueueCounters {
        &self.context.counters.queues[self.index]
    }

    /// Whether a stop leaves parked requests to the next owner of the queue.
    fn leaves_parked(&self) -> bool {
        self.state.stop().is_some_and(|stop| stop.parked == ParkedRequests::Leave)
    }

    /// Pops and starts what the guest has made available, but at most as many chains as the queue
    /// has entries, and only for some time: a guest that refills its ring for ever must not keep the
    /// worker from its inbox. What is left is seen by [`Worker::wait`], which then does not sleep.
    fn pop_all(&mut self) -> io::Result<()> {
        let (only_resubmit, leaves) = (!self.state.takes_requests(), self.leaves_parked());
        let Some(queue) = &mut self.queue else { return Ok(()) };
        if leaves || (only_resubmit && !queue.has_resubmissions()) {
            return Ok(());
        }
        queue.disable_kicks();
        let (now, mut budget) = (self.now, queue.size());
        let mut clock = PassClock::start();
        // A queue that stops takes no new requests, but finishes those that any process has begun.
        while !clock.is_over()
            && let Some((chain, kind)) =
                self.queue.as_mut().and_then(|queue| queue.pop(now, only_resubmit, &mut budget))
        {
            self.accept(chain, kind)?;
        }
        Ok(())
    }

    /// Notifies the guest of all completions since the last call, once. While a signal is in flight
    /// the next one waits.
    fn announce(&mut self) -> io::Result<()> {
        if self.signal.is_none()
            && let Some(call) = self.queue.as_mut().and_then(ActiveQueue::announce)
        {
            let id = self.next_id();
            self.ring.signal(call, id)?;
            self.signal = Some(id);
        }
        Ok(())
    }

    /// Logs that the guest has broken its rings, if it has done so since the last call.
    fn report_breakage(&mut self) {
        let Some(error) = self.queue.as_mut().and_then(ActiveQueue::take_breakage) else { return };
        if let Some(count) = self.broken_rings.count(self.now) {
            tracing::error!(error, count, "the guest broke a virtqueue: it stops until a reset");
        }
    }

    /// Gives up a signal that is in flight. After that its descriptor may be closed.
    fn end_signal(&mut self) -> io::Result<()> {
        if let Some(signal) = self.signal.take() {
            self.ring.cancel_signal(signal)?;
        }
        self.ring.submit_all()
    }

    fn next_id(&mut self) -> u32 {
        self.last_id = self.last_id.wrapping_add(1).max(WAKE_POLL_ID + 1);
        self.last_id
    }

    /// Plans the parked requests again, but only for some time. Those that are left are the first ones
    /// of the next pass.
    fn plan_parked(&mut self) -> io::Result<()> {
        let mut jobs = std::mem::take(&mut self.parked).into_iter();
        let mut clock = PassClock::start();
        while !clock.is_over()
            && let Some(job) = jobs.next()
        {
            self.plan(job)?;
        }
        self.has_unplanned = jobs.len() > 0;
        if self.has_unplanned {
            let again = std::mem::take(&mut self.parked);
            self.parked = jobs.chain(again).collect();
        }
        Ok(())
    }

    /// Submits, and sleeps unless there is something to do.
    fn wait(&mut self) -> io::Result<()> {
        if !self.wake_armed {
            self.ring.poll(self.inbox.wake.as_raw_fd(), WAKE_POLL_ID)?;
            self.wake_armed = true;
        }
        if let (Some(kick), None) = (self.queue.as_ref().map(ActiveQueue::kick_fd), self.kick_poll)
        {
            let id = self.next_id();
            self.ring.poll(kick, id)?;
            self.kick_poll = Some(id);
        }
        if self.busy_poll()? {
            return Ok(());
        }
        let more = self.has_more();
        let events = self.context.disk.mirror.events();
        let may_sleep =
            !more && (self.parked.is_empty() || events.may_sleep(self.index, self.seen_events));
        if may_sleep {
            self.epoch_handle.forget_layers();
        }
        let limit = match self.state.stop() {
            _ if !may_sleep => Some(Duration::ZERO),
            Some(Stop { deadline, .. }) => Some(
                deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)),
            ),
            None => None,
        };
        self.ring.enter(limit)
    }

    /// Enables kicks. Returns whether there are requests to plan that no event or kick announces.
    fn has_more(&mut self) -> bool {
        let (may_plan, takes_requests) = (self.state.may_plan(), self.state.takes_requests());
        let is_left = may_plan && !self.leaves_parked();
        let Some(queue) = &mut self.queue else { return false };
        let has_new = takes_requests && queue.enable_kicks();
        has_new || is_left && (self.has_unplanned || queue.has_resubmissions())
    }

    /// Polls the queue for a short time instead of sleeping, while the guest has to act next.
    /// Returns whether there is something to do.
    fn busy_poll(&mut self) -> io::Result<bool> {
        let idle = self.ring.in_flight() == 0 && self.parked.is_empty() && self.flushes.is_empty();
        let Some(queue) = &self.queue else { return Ok(false) };
        // A guest that polls is awake: it needs no other processor to be woken on.
        let max_queues = self.poll_max_queues.saturating_add(usize::from(queue.guest_polls()));
        let has_processors = self.context.guest.running_queues() <= max_queues;
        if !idle || !has_processors || !self.state.takes_requests() || !self.poll.is_wanted() {
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
                Reaped::Signalled { id } if self.signal == Some(id) => self.signal = None,
                // Of an earlier queue or descriptor.
                Reaped::Ready { .. } | Reaped::Signalled { .. } => {}
            }
        }
        Ok(())
    }

    /// Pausing → Paused, when nothing is in flight.
    fn finish_pause(&mut self) {
        if matches!(self.state, WorkerState::Pausing(_))
            && self.ring.in_flight() == 0
            && self.flushes.is_empty()
            && let WorkerState::Pausing(reply) = self.state.transition(WorkerState::Paused)
        {
            // Fails if the connection that asked has ended.
            let _ = reply.send(());
        }
    }

    /// Stopping → Idle, when every request is answered or left, and the guest is notified. Requests
    /// that are still parked at the deadline fail, and an interrupt that blocks is given up.
    fn finish_stop(&mut self) -> io::Result<()> {
        let leaves = self.leaves_parked();
        let Some(Stop { deadline, is_mapped, .. }) = self.state.stop() else { return Ok(()) };
        let (deadline, is_mapped) = (*deadline, *is_mapped);
        if leaves {
            for job in std::mem::take(&mut self.parked) {
                self.counters().left.add(1);
                job.into_chain().leave();
            }
        } else if !self.parked.is_empty() && Instant::now() >= deadline {
            tracing::error!(requests = self.parked.len(), "a stopping queue fails parked requests");
            for job in std::mem::take(&mut self.parked) {
                self.end(job.into_chain(), Outcome::Failed);
            }
        }
        let resubmits = self.queue.as_ref().is_some_and(ActiveQueue::has_resubmissions);
        if self.ring.in_flight() > 0
            || !self.flushes.is_empty()
            || !self.parked.is_empty()
            || (resubmits && is_mapped && !leaves)
        {
            return Ok(());
        }
        self.announce()?;
        if self.signal.is_some() && Instant::now() < deadline {
            return Ok(());
        }
        if let Some(poll) = self.kick_poll.take() {
            self.ring.cancel_poll(poll)?;
        }
        // Before the queue's descriptors are closed.
        self.end_signal()?;
        let next_avail = self.queue.take().map_or(0, |queue| queue.next_avail());
        if let WorkerState::Stopping(stop) = self.state.transition(WorkerState::Idle) {
            // Fails if the connection that asked has ended.
            let _ = stop.reply.send(next_avail);
        }
        Ok(())
    }
}

/// Ends a pass over requests that takes too long.
struct PassClock {
    start: Option<Instant>,
    count: usize,
}

impl PassClock {
    fn start() -> PassClock {
        PassClock { start: None, count: 0 }
    }

    /// Call this before each request. Returns whether the pass is over.
    fn is_over(&mut self) -> bool {
        self.count += 1;
        if !self.count.is_multiple_of(PLANS_PER_CLOCK_READ) {
            return false;
        }
        // Short passes do not read the clock at all.
        self.start.get_or_insert_with(Instant::now).elapsed() >= PASS_TIME
    }
}
