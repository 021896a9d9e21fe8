//! Plain copy-on-write. While a checkpoint is stored, writes go to a side file. Afterwards they are
//! merged back.
//!
//! ```text
//!   state of a block    in place ──── write while storing ───► redirected to a slot
//!                          ▲                                      │         │
//!                          ├──────────── write while merging ─────┘         │ merge takes it
//!                          └──────────────── merged ──── Merging ◄──────────┘
//! ```

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use anyhow::Result;

use crate::io::ring::RingQueue;
use crate::io::{Connection, Op, Queue, Shape};

const BLOCK: u64 = 4096;

const IN_PLACE: u32 = 0;
const MERGING: u32 = u32::MAX;

/// The number of blocks that are merged concurrently.
const MERGE_DEPTH: usize = 32;

const DISK: usize = 0;
const SIDE: usize = 1;

/// The location of each block.
pub(super) struct Redirects {
    /// [`IN_PLACE`], [`MERGING`], or the number of a slot of the side file, counted from 1.
    places: Vec<AtomicU32>,
    storing: AtomicBool,
    slots: AtomicU64,
}

impl Redirects {
    pub(super) fn new(size: u64) -> Redirects {
        let places = (0..size / BLOCK).map(|_| AtomicU32::new(IN_PLACE)).collect();
        Redirects { places, storing: AtomicBool::new(false), slots: AtomicU64::new(0) }
    }

    /// Redirects writes to the side file from here on. No write may be in flight.
    pub(super) fn begin(&self) {
        self.slots.store(0, Ordering::SeqCst);
        self.storing.store(true, Ordering::SeqCst);
    }

    /// Ends the redirection of writes. No write may be in flight.
    pub(super) fn end(&self) {
        self.storing.store(false, Ordering::SeqCst);
    }

    /// The file and offset for a write to `block`.
    fn place(&self, block: u64) -> (usize, u64) {
        let place = &self.places[block as usize];
        if self.storing.load(Ordering::SeqCst) {
            let mut slot = place.load(Ordering::SeqCst);
            if slot == IN_PLACE {
                slot = self.slots.fetch_add(1, Ordering::SeqCst) as u32 + 1;
                place.store(slot, Ordering::SeqCst);
            }
            return (SIDE, (u64::from(slot) - 1) * BLOCK);
        }
        // The write replaces a block that waits for the merge. It waits for a block that is being
        // merged.
        loop {
            match place.load(Ordering::SeqCst) {
                IN_PLACE => return (DISK, block * BLOCK),
                MERGING => std::thread::yield_now(),
                slot => {
                    let _ =
                        place.compare_exchange(slot, IN_PLACE, Ordering::SeqCst, Ordering::SeqCst);
                }
            }
        }
    }

    /// Copies redirected blocks back to the disk while the guest runs. Returns the number of copied
    /// bytes.
    pub(super) fn merge(&self, disk: &File, side: &File) -> Result<u64> {
        let files = vec![disk.try_clone()?, side.try_clone()?];
        let mut queue = RingQueue::new(files, MERGE_DEPTH, BLOCK as usize)?;
        let mut blocks = 0..self.places.len() as u64;
        let mut at: [Option<u64>; MERGE_DEPTH] = [None; MERGE_DEPTH];
        let mut reading = [false; MERGE_DEPTH];
        let mut free: Vec<usize> = (0..MERGE_DEPTH).collect();
        let (mut done, mut moved) = (Vec::new(), 0);
        loop {
            while let Some(slot) = free.pop() {
                let Some((block, from)) = blocks.find_map(|block| self.take(block)) else {
                    free.push(slot);
                    break;
                };
                at[slot] = Some(block);
                reading[slot] = true;
                let op = Op::Read { offset: from * BLOCK, len: BLOCK as usize };
                queue.submit_to(SIDE, slot, op)?;
            }
            if free.len() == MERGE_DEPTH {
                break;
            }
            queue.reap(1, &mut done)?;
            for slot in done.drain(..) {
                let block = at[slot].expect("a slot in flight has a block");
                if std::mem::take(&mut reading[slot]) {
                    queue.write_back(DISK, slot, block * BLOCK, BLOCK as usize)?;
                } else {
                    self.places[block as usize].store(IN_PLACE, Ordering::SeqCst);
                    moved += BLOCK;
                    free.push(slot);
                }
            }
        }
        disk.sync_data()?;
        Ok(moved)
    }

    /// Changes the state of a redirected block to merging. Returns its number, and its slot counted
    /// from 0.
    fn take(&self, block: u64) -> Option<(u64, u64)> {
        let place = &self.places[block as usize];
        let slot = place.load(Ordering::SeqCst);
        let taken = slot != IN_PLACE
            && place.compare_exchange(slot, MERGING, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        taken.then(|| (block, u64::from(slot) - 1))
    }
}

/// A raw disk whose writes of 4 KiB can be redirected.
pub(super) struct RedirectedDisk {
    queue: RedirectedQueue,
}

struct RedirectedQueue {
    ring: RingQueue,
    redirects: Arc<Redirects>,
}

impl RedirectedDisk {
    pub(super) fn open(
        disk: &File,
        side: &File,
        redirects: Arc<Redirects>,
        shape: Shape,
    ) -> Result<RedirectedDisk> {
        let files = vec![disk.try_clone()?, side.try_clone()?];
        let ring = RingQueue::new(files, shape.depth, shape.longest)?;
        Ok(RedirectedDisk { queue: RedirectedQueue { ring, redirects } })
    }
}

impl Connection for RedirectedDisk {
    fn queues(&mut self) -> Vec<&mut dyn Queue> {
        vec![&mut self.queue]
    }
}

impl Queue for RedirectedQueue {
    fn submit(&mut self, slot: usize, op: Op) -> Result<()> {
        match op {
            Op::Write { offset, len } if len as u64 == BLOCK => {
                let (file, offset) = self.redirects.place(offset / BLOCK);
                self.ring.submit_to(file, slot, Op::Write { offset, len })
            }
            // Other sizes occur only while the disk is filled, before writes are redirected.
            other => self.ring.submit_to(DISK, slot, other),
        }
    }

    fn reap(&mut self, min: usize, done: &mut Vec<usize>) -> Result<()> {
        self.ring.reap(min, done)
    }
}
