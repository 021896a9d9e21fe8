//! What was written when: one counter orders all events of a run.
//!
//! A submission takes its number before the request is handed to the driver, an acknowledgement
//! takes it after the completion was seen. So when the number of A's acknowledgement is below that
//! of B's submission, B was really sent after the guest knew that A was done. The same holds for a
//! checkpoint's request and answer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::stamp::WriteId;

/// A place in the order of events.
pub(crate) type Moment = u64;

/// An acknowledgement that never came.
pub(crate) const NEVER: Moment = Moment::MAX;

/// Hands out moments. The first is 1: the imported image was there at 0.
#[derive(Debug)]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    pub(crate) fn new() -> Clock {
        Clock(AtomicU64::new(1))
    }

    /// The next moment, without taking it.
    pub(crate) fn now(&self) -> Moment {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn tick(&self) -> Moment {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Sectors get this write's stamp.
    Stamp,
    /// Sectors become zeros: WRITE_ZEROES, or DISCARD of whole blocks.
    Zeros,
}

/// One write of the run.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) id: WriteId,
    pub(crate) kind: Kind,
    pub(crate) sectors: Range<u64>,
    pub(crate) submitted: Moment,
    pub(crate) acknowledged: Moment,
}

impl Write {
    /// What its sectors hold after it: its stamp or, as `None`, zeros.
    pub(crate) fn leaves(&self) -> Option<WriteId> {
        match self.kind {
            Kind::Stamp => Some(self.id),
            Kind::Zeros => None,
        }
    }
}

/// What the imported image holds in a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    Hole,
    Stamped,
}

/// All writes of a run, by the unit that they touch.
///
/// A unit is the extent that has at most one write in flight: a block, or a single sector. Its
/// writes are totally ordered, so its state is told by how many of them were applied.
pub(crate) struct History {
    pub(crate) seed: u64,
    pub(crate) unit_sectors: u64,
    pub(crate) writes: Vec<Write>,
    /// For each unit the indexes of its writes, in order.
    pub(crate) units: Vec<Vec<u32>>,
    pub(crate) base: Vec<Base>,
}

impl History {
    /// `base` has an entry for each sector of the disk.
    pub(crate) fn new(
        seed: u64,
        unit_sectors: u64,
        base: Vec<Base>,
        writes: Vec<Write>,
    ) -> History {
        let mut writes = writes;
        writes.sort_by_key(|write| write.submitted);
        let count = (base.len() as u64).div_ceil(unit_sectors);
        let mut units = vec![Vec::new(); count as usize];
        for (index, write) in writes.iter().enumerate() {
            let first = write.sectors.start / unit_sectors;
            let last = (write.sectors.end - 1) / unit_sectors;
            for unit in &mut units[first as usize..=last as usize] {
                if let Some(&previous) = unit.last() {
                    let previous: &Write = &writes[previous as usize];
                    assert!(
                        previous.acknowledged < write.submitted,
                        "the load had two writes of one unit in flight: {previous:?}, {write:?}"
                    );
                }
                unit.push(index as u32);
            }
        }
        History { seed, unit_sectors, writes, units, base }
    }

    pub(crate) fn sectors_of(&self, unit: usize) -> Range<u64> {
        let first = unit as u64 * self.unit_sectors;
        first..(first + self.unit_sectors).min(self.base.len() as u64)
    }
}
