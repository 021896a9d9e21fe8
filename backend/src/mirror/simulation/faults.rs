//! What fails in the simulated host, and how often.

use std::collections::BTreeMap;
use std::fmt;

use super::{GARBAGE, World, space};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// A guest's write fails; none of its blocks have landed, or all.
    Write,
    /// A guest's write fails, and some of its blocks have landed.
    ShortWrite,
    /// A fill fails before its first run is complete.
    Fill,
    /// A fill fails between its first run and its last.
    ShortFill,
    /// Old blocks that a write is going to change cannot be read.
    CopyRead,
    /// Old blocks cannot be written to the spill file, or not all of them.
    SpillWrite,
    /// Old blocks cannot be read back from the spill file.
    SpillRead,
    /// A chunk cannot be read for its snapshot.
    PersistRead,
    /// A block of a chunk that has not changed cannot be read from the mirror.
    BadBlock,
    /// The repository does not accept a chunk; it is tried again.
    Repository,
    /// A checkpoint is given up for any other reason.
    Commit,
    /// Writes wait too long for space, and the newest checkpoint with copies fails.
    Stall,
    /// There is no space for the record of the next epoch.
    NoEpoch,
    /// There is no space for a record of the journal, or for a part of it.
    NoRecord,
    /// There is no space for more copy-on-write memory.
    NoCowMemory,
}

/// How often each fault has happened.
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
    /// Whether an operation fails.
    pub(super) fn goes_wrong(&mut self, percent: u64) -> bool {
        !self.calm && self.rng.chance(percent)
    }

    /// Whether this fault happens.
    pub(super) fn strikes(&mut self, fault: Fault, percent: u64) -> bool {
        let strikes = self.goes_wrong(percent);
        if strikes {
            self.faults.add(fault, 1);
        }
        strikes
    }

    /// Keeps some blocks of an operation that fails: those that have landed.
    pub(super) fn some_of(&mut self, blocks: &mut Vec<u64>) {
        blocks.retain(|_| self.rng.chance(50));
    }

    /// Space runs out from time to time, for a while.
    pub(super) fn space_step(&mut self) {
        if self.full_for > 0 {
            self.full_for -= 1;
            if self.full_for == 0 {
                space::set(None);
            }
        } else if self.rng.below(300) == 0 {
            self.full_for = 1 + self.rng.below(40);
            // Some records fit, and half of one.
            space::set(Some(self.rng.below(300) as usize));
        }
    }

    /// A block becomes unreadable. Blocks that the repository does not have are left alone: the
    /// guest would lose them.
    pub(super) fn bad_block(&mut self) {
        let block = self.rng.below(self.layout.block_count());
        if self.mirror.presence().get(block) && self.mirror.invalidate(block) {
            self.faults.add(Fault::BadBlock, 1);
            self.disk[block as usize] = GARBAGE;
        }
    }

    /// Space that writes wait for may never become free.
    pub(super) fn stall_step(&mut self) {
        if self.mirror.take_cow_exhausted() && self.strikes(Fault::Stall, 1) {
            self.mirror.fail_newest("the simulated guest waits too long");
        }
    }

    /// From here on nothing fails any more.
    pub(super) fn calm_down(&mut self) {
        self.calm = true;
        space::set(None);
        let refused = space::look();
        self.faults.add(Fault::NoRecord, refused.records);
        // The files that grow are those of epochs and the copy-on-write memory.
        self.faults.add(Fault::NoCowMemory, refused.files - self.faults.of(Fault::NoEpoch));
    }
}
