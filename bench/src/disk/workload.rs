//! The workloads of the case `disk`.

use crate::load::{Kind, Pattern, Span};

const MIB: u64 = 1 << 20;

/// The part of the disk that a workload uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The part that was written before.
    Prefilled,
    /// A part that was never written.
    Fresh,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    kind: Kind,
    place: Place,
    sequential: bool,
    pub(super) len: usize,
    pub(super) depth: usize,
    /// Whether the guest polls for completions.
    pub(super) polls: bool,
}

const fn random(name: &'static str, kind: Kind, depth: usize) -> Workload {
    Workload {
        name,
        kind,
        place: Place::Prefilled,
        sequential: false,
        len: 4 << 10,
        depth,
        polls: false,
    }
}

const fn sequential(name: &'static str, kind: Kind) -> Workload {
    Workload {
        name,
        kind,
        place: Place::Prefilled,
        sequential: true,
        len: 256 << 10,
        depth: 8,
        polls: false,
    }
}

const fn fresh(name: &'static str, depth: usize) -> Workload {
    let kind = Kind::WriteFlush;
    Workload {
        name,
        kind,
        place: Place::Fresh,
        sequential: false,
        len: 4 << 10,
        depth,
        polls: false,
    }
}

/// The same workload with a guest that polls.
const fn polled(name: &'static str, workload: Workload) -> Workload {
    Workload { name, polls: true, ..workload }
}

pub(super) const RANDOM_READ_1: &str = "4k random read, depth 1";
pub(super) const RANDOM_READ_32: &str = "4k random read, depth 32";

pub(super) const POLLED_READ_1: &str = "4k random read, depth 1, polled";

pub(super) const WORKLOADS: [Workload; 13] = [
    random(RANDOM_READ_1, Kind::Read, 1),
    random(RANDOM_READ_32, Kind::Read, 32),
    random("4k random write, depth 1", Kind::Write, 1),
    random("4k random write, depth 32", Kind::Write, 32),
    random("4k mix 70/30, depth 32", Kind::Mix(70), 32),
    sequential("256k sequential read, depth 8", Kind::Read),
    sequential("256k sequential write, depth 8", Kind::Write),
    random("4k write + flush, depth 1", Kind::WriteFlush, 1),
    random("4k write + flush, depth 8", Kind::WriteFlush, 8),
    fresh("4k write + flush, fresh, depth 1", 1),
    fresh("4k write + flush, fresh, depth 8", 8),
    polled(POLLED_READ_1, random("", Kind::Read, 1)),
    polled("256k sequential read, depth 8, polled", sequential("", Kind::Read)),
];

impl Workload {
    pub(super) fn flushes(&self) -> bool {
        self.kind == Kind::WriteFlush
    }

    /// The requests of one of several queues. `slice` is the number of the fresh part that they
    /// write.
    pub(super) fn pattern(
        &self,
        areas: &Areas,
        slice: u64,
        queue: usize,
        queues: usize,
    ) -> Pattern {
        let seed = slice << 8 | queue as u64;
        match (self.place, self.sequential) {
            (Place::Fresh, _) => {
                Pattern::scattered(self.kind, areas.slice(slice).part(queue, queues), self.len)
            }
            (Place::Prefilled, true) => {
                Pattern::sequential(self.kind, areas.prefilled().part(queue, queues), self.len)
            }
            (Place::Prefilled, false) => {
                Pattern::random(self.kind, areas.prefilled(), self.len, seed)
            }
        }
    }
}

/// The parts of every disk: a prefilled part, followed by slices that are written for the first
/// time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Areas {
    prefilled: u64,
    slices: u64,
}

impl Areas {
    /// The size of a slice in bytes. It is more than any disk writes and flushes during one
    /// measurement.
    const SLICE: u64 = 128 * MIB;

    pub(super) fn new(prefilled: u64, slices: u64) -> Areas {
        Areas { prefilled, slices }
    }

    pub(super) fn size(&self) -> u64 {
        self.prefilled + self.slices * Self::SLICE
    }

    pub(super) fn prefilled(&self) -> Span {
        Span::new(0, self.prefilled)
    }

    fn slice(&self, number: u64) -> Span {
        assert!(number < self.slices, "there are {} fresh slices", self.slices);
        Span::new(self.prefilled + number * Self::SLICE, Self::SLICE)
    }
}
