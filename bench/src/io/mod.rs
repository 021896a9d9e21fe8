//! A queue of requests: of a vhost-user disk, or of a raw file.

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
}

/// One queue, used from one thread. A request owns a slot, whose number names it, and the slot's memory
/// until it is reaped.
pub(crate) trait Queue: Send {
    /// Prepares a request. It may begin before [`Queue::reap`] is called.
    fn submit(&mut self, slot: usize, op: Op) -> Result<()>;

    /// Lets everything that was submitted begin, waits for at least `min` requests to end, and adds their
    /// slots to `done`. A request that failed is an error: nothing is measured on a broken disk.
    fn reap(&mut self, min: usize, done: &mut Vec<usize>) -> Result<()>;
}

/// A disk in use, through one or more queues.
pub(crate) trait Connection: Send {
    fn queues(&mut self) -> Vec<&mut dyn Queue>;

    /// The queue of a disk that has one.
    fn first(&mut self) -> &mut dyn Queue {
        self.queues().swap_remove(0)
    }
}
