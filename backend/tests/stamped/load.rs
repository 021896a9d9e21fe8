//! Stamped writes without pause, on each queue from its own thread.
//!
//! A unit (see [`History`](super::history::History)) has one request in flight at most, whichever
//! queue it is on; many units are in flight at once. Reads run among the writes and are compared
//! with what the unit must hold.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use seeded_rng::Rng;

use super::history::{Base, Clock, Kind, NEVER, Write};
use super::stamp::{self, Content, SECTOR, WriteId};
use crate::support::device::{Io, Layout, Queue};

/// Sectors of a block, the unit of presence.
pub(crate) const BLOCK: u64 = 8;

/// How often each kind of request is chosen, relative to the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mix {
    /// Writes of less than a block, at any sector.
    pub(crate) parts: u64,
    /// Writes of one block.
    pub(crate) blocks: u64,
    /// Writes of 64 KiB to 1 MiB.
    pub(crate) large: u64,
    pub(crate) zeroes: u64,
    pub(crate) discards: u64,
    pub(crate) reads: u64,
    pub(crate) flushes: u64,
}

impl Mix {
    pub(crate) const BLOCKS: Mix =
        Mix { parts: 0, blocks: 90, large: 0, zeroes: 0, discards: 0, reads: 10, flushes: 0 };
    pub(crate) const ALL: Mix =
        Mix { parts: 30, blocks: 40, large: 5, zeroes: 7, discards: 7, reads: 10, flushes: 1 };

    fn pick(&self, rng: &mut Rng) -> Choice {
        let weights = [
            (self.parts, Choice::Part),
            (self.blocks, Choice::Block),
            (self.large, Choice::Large),
            (self.zeroes, Choice::Zeroes),
            (self.discards, Choice::Discard),
            (self.reads, Choice::Read),
            (self.flushes, Choice::Flush),
        ];
        let mut point = rng.below(weights.iter().map(|(weight, _)| weight).sum());
        for (weight, choice) in weights {
            match point.checked_sub(weight) {
                Some(rest) => point = rest,
                None => return choice,
            }
        }
        unreachable!("the point lies within the sum of the weights")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Part,
    Block,
    Large,
    Zeroes,
    Discard,
    Read,
    Flush,
}

/// The marker of zeros in [`Shared::now`].
const ZEROS: WriteId = WriteId::MAX;

/// What the threads of one run share.
pub(crate) struct Shared {
    pub(crate) seed: u64,
    pub(crate) clock: Clock,
    pub(crate) stop: AtomicBool,
    unit_sectors: u64,
    claimed: Vec<AtomicBool>,
    /// The content of each sector, valid while its unit is claimed.
    now: Vec<AtomicU64>,
    next_write: AtomicU64,
}

impl Shared {
    pub(crate) fn new(seed: u64, unit_sectors: u64, base: &[Base]) -> Shared {
        let units = (base.len() as u64).div_ceil(unit_sectors);
        let now = base.iter().map(|base| match base {
            Base::Hole => ZEROS,
            Base::Stamped => 0,
        });
        Shared {
            seed,
            clock: Clock::new(),
            stop: AtomicBool::new(false),
            unit_sectors,
            claimed: (0..units).map(|_| AtomicBool::new(false)).collect(),
            now: now.map(AtomicU64::new).collect(),
            next_write: AtomicU64::new(1),
        }
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub(crate) fn next_write(&self) -> WriteId {
        self.next_write.fetch_add(1, Ordering::SeqCst)
    }

    fn units(&self, sectors: &Range<u64>) -> Range<usize> {
        let last = (sectors.end - 1) / self.unit_sectors;
        (sectors.start / self.unit_sectors) as usize..last as usize + 1
    }

    /// Claims all units of `sectors`, or none.
    fn claim(&self, sectors: &Range<u64>) -> bool {
        let units = self.units(sectors);
        for unit in units.clone() {
            if self.claimed[unit].swap(true, Ordering::SeqCst) {
                self.release_units(units.start..unit);
                return false;
            }
        }
        true
    }

    fn release(&self, sectors: &Range<u64>) {
        self.release_units(self.units(sectors));
    }

    fn release_units(&self, units: Range<usize>) {
        for unit in units {
            self.claimed[unit].store(false, Ordering::SeqCst);
        }
    }

    /// Remembers what an acknowledged write left, while its units are still claimed.
    pub(crate) fn note(&self, write: &Write) {
        let value = write.leaves().unwrap_or(ZEROS);
        for sector in write.sectors.clone() {
            self.now[sector as usize].store(value, Ordering::SeqCst);
        }
    }

    /// Compares bytes that were read with what they must be.
    pub(crate) fn verify(&self, first: u64, bytes: &[u8]) {
        for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR)) {
            let expected = match self.now[sector as usize].load(Ordering::SeqCst) {
                ZEROS => Content::Zeros,
                write => Content::Write(write),
            };
            let found = stamp::read(bytes, sector, self.seed);
            assert_eq!(found, expected, "sector {sector} read through the device");
        }
    }
}

/// A request in flight.
enum Pending {
    Write(Write),
    Read(Range<u64>),
    Flush,
}

/// How one queue is loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) depth: usize,
    pub(crate) mix: Mix,
    /// Whether buffers start at odd addresses and in several pieces.
    pub(crate) skewed: bool,
}

/// Writes on `queue` until told to stop, and returns what was written.
pub(crate) fn run(queue: &mut Queue, load: Load, shared: &Shared, mut rng: Rng) -> Vec<Write> {
    let mut log = Vec::new();
    let mut pending: Vec<Option<Pending>> = (0..load.depth).map(|_| None).collect();
    loop {
        let mut misses = 0;
        while !shared.stopped() && queue.in_flight() < load.depth && misses < 8 {
            match choose(load.mix, shared, &mut rng) {
                Some((io, request)) => {
                    let slot = queue.take_slot().expect("fewer in flight than slots");
                    let layout = layout(&load, &mut rng);
                    pending[slot] = Some(start(queue, slot, io, request, layout, shared));
                }
                None => misses += 1,
            }
        }
        if queue.in_flight() == 0 {
            match shared.stopped() {
                true => return log,
                false => std::thread::yield_now(),
            }
            continue;
        }
        for done in queue.reap(1) {
            let acknowledged = shared.clock.tick();
            let request = pending[done.slot].take().expect("a request was in the slot");
            match request {
                Pending::Write(write) => {
                    let write = Write { acknowledged, ..write };
                    done.result.unwrap_or_else(|e| panic!("{write:?}: {e}"));
                    shared.note(&write);
                    shared.release(&write.sectors);
                    log.push(write);
                }
                Pending::Read(sectors) => {
                    done.result.unwrap_or_else(|e| panic!("read of sectors {sectors:?}: {e}"));
                    let len = sectors.clone().count() * SECTOR;
                    shared.verify(sectors.start, &queue.fetch(done.slot, len));
                    shared.release(&sectors);
                }
                Pending::Flush => done.result.unwrap_or_else(|e| panic!("flush: {e}")),
            }
        }
    }
}

fn layout(load: &Load, rng: &mut Rng) -> Layout {
    if load.skewed && rng.chance(50) {
        let skew = rng.pick(&[1, 16, 511, 512, 2048]);
        // All requests must fit into a ring of 256 entries.
        let most = (256 / load.depth - 2).min(5);
        return Layout { skew, segments: rng.between(1, most as u64) as usize };
    }
    Layout::PLAIN
}

/// Draws a request and claims its units; `None` when one of them is in flight.
fn choose(mix: Mix, shared: &Shared, rng: &mut Rng) -> Option<(Choice, Range<u64>)> {
    let disk = shared.now.len() as u64;
    let choice = mix.pick(rng);
    let len = match choice {
        Choice::Flush => return Some((choice, 0..0)),
        Choice::Part => rng.between(1, BLOCK - 1),
        Choice::Block => BLOCK,
        Choice::Large => rng.between(16 * BLOCK, 256 * BLOCK),
        Choice::Zeroes => rng.pick(&[1, 3, BLOCK, 5 * BLOCK, 40 * BLOCK + 5]),
        Choice::Discard => rng.pick(&[1, 2, 16, 64]) * BLOCK,
        Choice::Read => rng.pick(&[1, BLOCK, 20 * BLOCK]),
    };
    // The disk's end is drawn on purpose, because its last block and chunk may be partial.
    let at = match rng.chance(2) {
        true => disk - len,
        false => rng.below(disk - len + 1),
    };
    let at = match choice {
        Choice::Part | Choice::Zeroes | Choice::Read => at,
        // Only whole blocks are sure to become zeros, and most file systems write whole blocks.
        Choice::Block | Choice::Large | Choice::Discard | Choice::Flush => at / BLOCK * BLOCK,
    };
    let sectors = at..at + len;
    shared.claim(&sectors).then_some((choice, sectors))
}

fn start(
    queue: &mut Queue,
    slot: usize,
    choice: Choice,
    sectors: Range<u64>,
    layout: Layout,
    shared: &Shared,
) -> Pending {
    let offset = sectors.start * SECTOR as u64;
    let len = (sectors.end - sectors.start) * SECTOR as u64;
    let (io, kind) = match choice {
        Choice::Flush => {
            queue.submit(slot, Io::Flush, Layout::PLAIN);
            return Pending::Flush;
        }
        Choice::Read => {
            queue.submit(slot, Io::Read { offset, len: len as usize }, layout);
            return Pending::Read(sectors);
        }
        Choice::Zeroes => {
            (Io::WriteZeroes { offset, len, unmap: offset.is_multiple_of(1024) }, Kind::Zeros)
        }
        Choice::Discard => (Io::Discard { offset, len }, Kind::Zeros),
        Choice::Part | Choice::Block | Choice::Large => {
            (Io::Write { offset, len: len as usize }, Kind::Stamp)
        }
    };
    let id = shared.next_write();
    if kind == Kind::Stamp {
        let mut data = vec![0; len as usize];
        stamp::stamp_range(&mut data, sectors.start, id, shared.seed);
        queue.fill(slot, layout, &data);
    }
    let submitted = shared.clock.tick();
    queue.submit(slot, io, layout);
    Pending::Write(Write { id, kind, sectors, submitted, acknowledged: NEVER })
}
