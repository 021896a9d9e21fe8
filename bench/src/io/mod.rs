//! Queues of requests to a vhost-user disk or a raw file.

mod memory;
pub(crate) mod ring;
pub(crate) mod vhost;

pub(crate) use memory::Memory;

use anyhow::Result;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Read { offset: u64, len: usize },
    Write { offset: u64, len: usize },
    Flush,
}

/// How a client uses a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) queues: usize,
    /// Requests in flight on each queue.
    pub(crate) depth: usize,
    /// The longest request in bytes.
    pub(crate) longest: usize,
    /// Whether a vhost-user client polls for completions. Otherwise it sleeps until it is
    /// interrupted.
    pub(crate) polls: bool,
}

/// A queue that one thread uses. The number of a slot identifies a request. The request owns the
/// slot and its memory until it is reaped.
pub(crate) trait Queue: Send {
    /// Prepares a request. It may start before [`Queue::reap`] is called.
    fn submit(&mut self, slot: usize, op: Op) -> Result<()>;

    /// Starts all submitted requests, waits until at least `min` requests are complete, and adds
    /// their slots to `done`. Fails if a request failed, because results of a broken disk are
    /// meaningless.
    fn reap(&mut self, min: usize, done: &mut Vec<usize>) -> Result<()>;
}

/// A disk in use, through one or more queues.
pub(crate) trait Connection: Send {
    fn queues(&mut self) -> Vec<&mut dyn Queue>;

    /// The first queue.
    fn first(&mut self) -> &mut dyn Queue {
        self.queues().swap_remove(0)
    }
}
