//! The guest's rings, and the ledger of the requests in flight.
//!
//! Each worker has a ring. The guest makes a request available and looks for its answer. In
//! between, the worker pops the request, has the mirror serve it, and returns it, with the ledger
//! kept as in `worker/queue`. The process can crash between any two of these steps. The next
//! process knows from the ledger and the ring's indices alone what is left to do. The guest checks
//! that each request is answered exactly once.

use std::collections::VecDeque;
use std::fs::File;

use seeded_rng::Rng;

use super::{WORKERS, World};
use crate::guest::ledger::{Ledger, LedgerRegion, RingIndices};
use crate::mirror::layout::Span;

/// The number of entries of a ring.
const RING_ENTRIES: u16 = 16;

/// How many of a thousand steps of this kind end in a crash.
const CRASH_PER_MILLE: u64 = 3;

/// What the guest requests.
#[derive(Clone, Copy)]
pub(super) struct Write {
    pub(super) span: Span,
    pub(super) version: u64,
}

/// A request that a worker has popped.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) worker: usize,
    head: u16,
    pub(super) write: Write,
    /// Whether an earlier process had popped the request.
    pub(super) is_resubmitted: bool,
}

/// A ring in the guest's memory.
pub(super) struct Ring {
    /// The requests that are not answered, by their heads.
    table: [Option<Write>; RING_ENTRIES as usize],
    available: [u16; RING_ENTRIES as usize],
    used: [u16; RING_ENTRIES as usize],
    indices: RingIndices,
    /// The used index up to which the guest has read.
    seen: u16,
}

fn slot(index: u16) -> usize {
    usize::from(index % RING_ENTRIES)
}

impl Ring {
    pub(super) fn new() -> Ring {
        // The indices wrap around soon.
        let start = u16::MAX - 20;
        Ring {
            table: [None; RING_ENTRIES as usize],
            available: [0; RING_ENTRIES as usize],
            used: [0; RING_ENTRIES as usize],
            indices: RingIndices { available: start, used: start },
            seen: start,
        }
    }

    /// A free head for another request.
    pub(super) fn free_head(&self, rng: &mut Rng) -> Option<u16> {
        let free: Vec<u16> =
            (0..RING_ENTRIES).filter(|head| self.table[slot(*head)].is_none()).collect();
        let pick = rng.below(free.len().max(1) as u64) as usize;
        free.get(pick).copied()
    }

    /// The guest makes a request available.
    pub(super) fn ask(&mut self, head: u16, write: Write) {
        self.table[slot(head)] = Some(write);
        self.available[slot(self.indices.available)] = head;
        self.indices.available = self.indices.available.wrapping_add(1);
    }

    /// The guest looks for answers.
    fn look(&mut self) -> Vec<Write> {
        let mut answered = Vec::new();
        while self.seen != self.indices.used {
            let head = self.used[slot(self.seen)];
            answered.push(self.table[slot(head)].take().expect("a request was answered twice"));
            self.seen = self.seen.wrapping_add(1);
        }
        answered
    }

    pub(super) fn is_idle(&self) -> bool {
        self.table.iter().all(Option::is_none)
    }
}

/// Memory for the ledgers of all rings.
pub(super) fn ledgers() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(LedgerRegion::len(WORKERS, RING_ENTRIES)).unwrap();
    file
}

/// Opens the rings as a process does, whatever an earlier one left.
pub(super) fn open(ledgers: &File, rings: &[Ring]) -> Vec<Queue> {
    let region = LedgerRegion::map(ledgers, 0, WORKERS, RING_ENTRIES).unwrap();
    rings.iter().enumerate().map(|(index, ring)| Queue::open(&region, index, ring)).collect()
}

/// What a process knows of a ring.
pub(super) struct Queue {
    ledger: Ledger,
    /// Requests that have to be served again, oldest first.
    resubmit: VecDeque<u16>,
    next_available: u16,
}

impl Queue {
    fn open(region: &LedgerRegion, index: usize, ring: &Ring) -> Queue {
        let mut ledger = region.ledger(index, RING_ENTRIES).unwrap();
        let resubmit = VecDeque::from(ledger.resume(ring.indices).unwrap_or_default());
        let next_available = ring.indices.used.wrapping_add(resubmit.len() as u16);
        Queue { ledger, resubmit, next_available }
    }

    /// Loses the oldest request that is in flight.
    pub(super) fn lose_one(&mut self, ring: &Ring) {
        if let Some(head) = self.resubmit.front() {
            self.ledger.returned(*head, ring.indices.used);
        }
    }
}

impl World {
    /// A worker pops a request.
    pub(super) fn pop(&mut self, worker: usize) {
        let (queue, ring) = (&mut self.queues[worker], &self.rings[worker]);
        let (head, is_resubmitted) = match queue.resubmit.pop_front() {
            Some(head) => (head, true),
            None if queue.next_available == ring.indices.available => return,
            None => (ring.available[slot(queue.next_available)], false),
        };
        if !is_resubmitted {
            queue.next_available = queue.next_available.wrapping_add(1);
            if self.crashes_now(CRASH_PER_MILLE) {
                return;
            }
            self.queues[worker].ledger.popped(head);
        }
        if self.crashes_now(CRASH_PER_MILLE) {
            return;
        }
        let write = self.rings[worker].table[slot(head)].expect("nobody asked for this");
        self.plan(Job { worker, head, write, is_resubmitted });
    }

    /// A worker returns a request.
    pub(super) fn answer(&mut self, job: Job) {
        let Job { worker, head, .. } = job;
        for step in 0..4 {
            if self.crashes_now(CRASH_PER_MILLE) {
                return;
            }
            let (queue, ring) = (&self.queues[worker], &mut self.rings[worker]);
            match step {
                0 => queue.ledger.returning(head, ring.indices.used),
                1 => ring.used[slot(ring.indices.used)] = head,
                2 => ring.indices.used = ring.indices.used.wrapping_add(1),
                _ => queue.ledger.returned(head, ring.indices.used),
            }
        }
        self.crashes_now(CRASH_PER_MILLE);
    }

    /// The guest looks for answers. Blocks whose write is answered may be written again.
    pub(super) fn look(&mut self, worker: usize) {
        for write in self.rings[worker].look() {
            let blocks = self.layout.blocks(write.span);
            for block in blocks.first..blocks.end() {
                let was = std::mem::replace(&mut self.in_flight[block as usize], false);
                assert!(was, "block {block} was not being written");
            }
        }
    }
}
