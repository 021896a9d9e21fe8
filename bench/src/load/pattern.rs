//! The requests of a load and their order.

use seeded_rng::Rng;

use crate::io::Op;

/// A range of bytes of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Span {
    pub(crate) fn new(offset: u64, len: u64) -> Span {
        Span { offset, len }
    }

    /// One of `count` equal parts.
    pub(crate) fn part(self, index: usize, count: usize) -> Span {
        let len = self.len / count as u64;
        Span { offset: self.offset + index as u64 * len, len }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// This many of 100 requests are reads, the others writes.
    Mix(u64),
    /// Each write is followed by a flush.
    WriteFlush,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Random,
    /// In order, from the beginning again after the end.
    Sequential,
    /// In order, each position once.
    Once,
    /// Scattered, each position once, so that no write goes to a position that was written before.
    Scattered,
}

/// An endless or finite sequence of requests of one length.
pub(crate) struct Pattern {
    kind: Kind,
    order: Order,
    span: Span,
    len: usize,
    count: u64,
    rng: Rng,
}

impl Pattern {
    pub(crate) fn random(kind: Kind, span: Span, len: usize, seed: u64) -> Pattern {
        Pattern { kind, order: Order::Random, span, len, count: 0, rng: Rng::new(seed) }
    }

    pub(crate) fn sequential(kind: Kind, span: Span, len: usize) -> Pattern {
        Pattern { kind, order: Order::Sequential, span, len, count: 0, rng: Rng::new(0) }
    }

    pub(crate) fn once(span: Span, len: usize) -> Pattern {
        Pattern { kind: Kind::Write, order: Order::Once, span, len, count: 0, rng: Rng::new(0) }
    }

    /// A scattered pattern. The number of requests in the span must be a power of two.
    pub(crate) fn scattered(kind: Kind, span: Span, len: usize) -> Pattern {
        assert!(
            (span.len / len as u64).is_power_of_two(),
            "an odd step visits each position if their number is a power of two"
        );
        Pattern { kind, order: Order::Scattered, span, len, count: 0, rng: Rng::new(0) }
    }

    pub(crate) fn flushes(&self) -> bool {
        self.kind == Kind::WriteFlush
    }

    pub(crate) fn is_over(&self) -> bool {
        let finite = matches!(self.order, Order::Once | Order::Scattered);
        finite && self.count >= self.places()
    }

    fn places(&self) -> u64 {
        self.span.len / self.len as u64
    }

    pub(crate) fn next(&mut self) -> Option<Op> {
        if self.is_over() {
            return None;
        }
        let places = self.places();
        let place = match self.order {
            Order::Random => self.rng.below(places),
            Order::Sequential | Order::Once => self.count % places,
            Order::Scattered => self.count.wrapping_mul(0x9e37_79b1) % places,
        };
        self.count += 1;
        let (offset, len) = (self.span.offset + place * self.len as u64, self.len);
        let reads = match self.kind {
            Kind::Read => true,
            Kind::Write | Kind::WriteFlush => false,
            Kind::Mix(percent) => self.rng.below(100) < percent,
        };
        Some(if reads { Op::Read { offset, len } } else { Op::Write { offset, len } })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{Kind, Pattern, Span};

    #[test]
    fn scattered_requests_visit_each_position_once() {
        let span = Span::new(1 << 20, 1 << 20);
        let mut pattern = Pattern::scattered(Kind::Write, span, 4096);
        let mut seen = HashSet::new();
        while let Some(op) = pattern.next() {
            assert!(seen.insert(format!("{op:?}")));
        }
        assert_eq!(seen.len(), 256);
    }

    #[test]
    fn requests_stay_inside_their_span() {
        let span = Span::new(1 << 20, 1 << 20).part(1, 2);
        for op in std::iter::from_fn(|| Pattern::once(span, 4096).next()).take(1) {
            assert_eq!(op, crate::io::Op::Write { offset: 3 << 19, len: 4096 });
        }
    }
}
