//! The guest's rings, and the ledger of what is in flight on them.
//!
//! Each worker has a ring. The guest makes a request available and looks for its answer; between the two
//! the worker pops it, has the mirror do it, and returns it, with the ledger kept as `worker/queue` keeps
//! it. The process may die between any two of these steps. The next one learns from the ledger and the
//! ring's indices alone what there is to do, and the guest sees to it that each request is answered, and
//! only once.

use std::collections::VecDeque;
use std::fs::File;

use seeded_rng::Rng;

use super::{WORKERS, World};
use crate::mirror::layout::Span;
use crate::worker::ledger::{Ledger, Region, RingIndices};

/// Entries of a ring.
const SIZE: u16 = 16;

/// How many of a thousand steps of this kind are a process's last.
const DEADLY: u64 = 3;

/// What the guest asks for.
#[derive(Clone, Copy)]
pub(super) struct Write {
    pub(super) span: Span,
    pub(super) version: u64,
}

/// A request in the hands of a worker.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) worker: usize,
    head: u16,
    pub(super) write: Write,
    /// Whether a process before this one had popped it.
    pub(super) again: bool,
}

/// A ring in the guest's memory.
pub(super) struct Ring {
    /// The requests that are not answered, by their heads.
    table: [Option<Write>; SIZE as usize],
    available: [u16; SIZE as usize],
    used: [u16; SIZE as usize],
    indices: RingIndices,
    /// The used index up to which the guest has looked.
    seen: u16,
}

fn slot(index: u16) -> usize {
    usize::from(index % SIZE)
}

impl Ring {
    pub(super) fn new() -> Ring {
        // The indices soon begin anew.
        let start = u16::MAX - 20;
        Ring {
            table: [None; SIZE as usize],
            available: [0; SIZE as usize],
            used: [0; SIZE as usize],
            indices: RingIndices { available: start, used: start },
            seen: start,
        }
    }

    /// A head for another request.
    pub(super) fn free_head(&self, rng: &mut Rng) -> Option<u16> {
        let free: Vec<u16> = (0..SIZE).filter(|head| self.table[slot(*head)].is_none()).collect();
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
    file.set_len(Region::len(WORKERS, SIZE)).unwrap();
    file
}

/// A process takes up the rings, whatever was before.
pub(super) fn open(ledgers: &File, rings: &[Ring]) -> Vec<Queue> {
    let region = Region::map(ledgers, 0, WORKERS, SIZE).unwrap();
    rings.iter().enumerate().map(|(index, ring)| Queue::open(&region, index, ring)).collect()
}

/// What a process knows of a ring.
pub(super) struct Queue {
    ledger: Ledger,
    /// What is to be done again, oldest first.
    again: VecDeque<u16>,
    next_available: u16,
}

impl Queue {
    fn open(region: &Region, index: usize, ring: &Ring) -> Queue {
        let mut ledger = region.ledger(index, SIZE).unwrap();
        let again = VecDeque::from(ledger.resume(ring.indices).unwrap_or_default());
        let next_available = ring.indices.used.wrapping_add(again.len() as u16);
        Queue { ledger, again, next_available }
    }

    /// Loses the oldest request that is in flight.
    pub(super) fn lose_one(&mut self, ring: &Ring) {
        if let Some(head) = self.again.front() {
            self.ledger.returned(*head, ring.indices.used);
        }
    }
}

impl World {
    /// A worker pops a request.
    pub(super) fn pop(&mut self, worker: usize) {
        let (queue, ring) = (&mut self.queues[worker], &self.rings[worker]);
        let (head, again) = match queue.again.pop_front() {
            Some(head) => (head, true),
            None if queue.next_available == ring.indices.available => return,
            None => (ring.available[slot(queue.next_available)], false),
        };
        if !again {
            queue.next_available = queue.next_available.wrapping_add(1);
            if self.dies(DEADLY) {
                return;
            }
            self.queues[worker].ledger.popped(head);
        }
        if self.dies(DEADLY) {
            return;
        }
        let write = self.rings[worker].table[slot(head)].expect("nobody asked for this");
        self.plan(Job { worker, head, write, again });
    }

    /// A worker returns a request.
    pub(super) fn answer(&mut self, job: Job) {
        let Job { worker, head, .. } = job;
        for step in 0..4 {
            if self.dies(DEADLY) {
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
        self.dies(DEADLY);
    }

    /// The guest looks for answers: what it has them for may be written again.
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
