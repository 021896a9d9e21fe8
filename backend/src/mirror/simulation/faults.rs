//! What goes wrong in the simulated host, and how often it did.

use std::collections::BTreeMap;
use std::fmt;

use super::{GARBAGE, World, space};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// A guest's write fails; nothing of it has landed, or all.
    Write,
    /// It fails, and some of its blocks have landed.
    ShortWrite,
    /// A fill fails before its first run is complete.
    Fill,
    /// A fill fails between its first run and its last.
    ShortFill,
    /// CopyData blocks that a write is going to change cannot be read.
    CopyRead,
    /// They cannot be written to the spill file, or not all of them.
    SpillWrite,
    /// Nor read back from there.
    SpillRead,
    /// A chunk cannot be read for its snapshot.
    PersistRead,
    /// A block of the mirror cannot be read any more, and its chunk has not changed.
    BadBlock,
    /// The repository does not take a chunk: it is tried again.
    Repository,
    /// A checkpoint is given up, whatever the reason.
    Commit,
    /// Writes wait too long for room: the oldest checkpoint is given up.
    Stall,
    /// No space for the state of the next epoch.
    NoEpoch,
    /// No space for a record of the journal, or not for all of it.
    NoRecord,
    /// No space for more of the shelf.
    NoCowMemory,
}

/// How often each has happened.
#[derive(Default)]
pub(super) struct Faults(BTreeMap<Fault, u64>);

impl Faults {
    pub(super) const ALL: [Fault; 15] = [
        Fault::Write,
        Fault::ShortWrite,
        Fault::Fill,
        Fault::ShortFill,
        Fault::CopyRead,
        Fault::SpillWrite,
        Fault::SpillRead,
        Fault::PersistRead,
        Fault::BadBlock,
        Fault::Repository,
        Fault::Commit,
        Fault::Stall,
        Fault::NoEpoch,
        Fault::NoRecord,
        Fault::NoCowMemory,
    ];

    pub(super) fn add(&mut self, fault: Fault, times: u64) {
        *self.0.entry(fault).or_default() += times;
    }

    pub(super) fn of(&self, fault: Fault) -> u64 {
        self.0.get(&fault).copied().unwrap_or(0)
    }

    pub(super) fn add_all(&mut self, others: &Faults) {
        others.0.iter().for_each(|(fault, times)| self.add(*fault, *times));
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} faults:", self.0.values().sum::<u64>())?;
        self.0.iter().try_for_each(|(fault, times)| write!(f, " {fault:?} {times}"))
    }
}

impl World {
    /// Whether something goes wrong now.
    pub(super) fn goes_wrong(&mut self, percent: u64) -> bool {
        !self.calm && self.rng.chance(percent)
    }

    /// Whether just this goes wrong now.
    pub(super) fn strikes(&mut self, fault: Fault, percent: u64) -> bool {
        let strikes = self.goes_wrong(percent);
        if strikes {
            self.faults.add(fault, 1);
        }
        strikes
    }

    /// Keeps some of the blocks of an operation that fails: those that land all the same.
    pub(super) fn some_of(&mut self, blocks: &mut Vec<u64>) {
        blocks.retain(|_| self.rng.chance(50));
    }

    /// Space runs out now and then, for a while.
    pub(super) fn space_step(&mut self) {
        if self.full_for > 0 {
            self.full_for -= 1;
            if self.full_for == 0 {
                space::set(None);
            }
        } else if self.rng.below(300) == 0 {
            self.full_for = 1 + self.rng.below(40);
            // Some records fit in, and half of one.
            space::set(Some(self.rng.below(300) as usize));
        }
    }

    /// A block turns bad. What the repository does not have is not touched: the guest would fail_layer it.
    pub(super) fn bad_block(&mut self) {
        let block = self.rng.below(self.layout.block_count());
        if self.mirror.presence().get(block) && self.mirror.invalidate(block) {
            self.faults.add(Fault::BadBlock, 1);
            self.disk[block as usize] = GARBAGE;
        }
    }

    /// What a write has to wait for may not come.
    pub(super) fn stall_step(&mut self) {
        if self.mirror.take_cow_exhausted() && self.strikes(Fault::Stall, 1) {
            self.mirror.fail_oldest("the simulated guest waits too long");
        }
    }

    /// Nothing goes wrong any more.
    pub(super) fn calm_down(&mut self) {
        self.calm = true;
        space::set(None);
        let refused = space::look();
        self.faults.add(Fault::NoRecord, refused.records);
        // EpochFiles and the shelf are the files that grow.
        self.faults.add(Fault::NoCowMemory, refused.files - self.faults.of(Fault::NoEpoch));
    }
}
