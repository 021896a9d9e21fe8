//! Claims: who is about to change which blocks.
//!
//! A write and a fill of the same absent block race: the fill brings old bytes, and must not
//! overwrite the bytes of the write. So both claim their blocks first. Claims are volatile, and
//! are held only while an operation is in flight. A request takes all its claims or none, so no
//! request waits while it holds a claim.
//!
//! On a disk with sectors of 4 KiB, a write to a part of a block reads the block, changes the part,
//! and writes the whole block (*read-modify-write*). In between nobody else may change the block,
//! not even other parts of it.
//!
//! | holds \ wants     | write           | fill             | read-modify-write |
//! |-------------------|-----------------|------------------|-------------------|
//! | write             | goes on         | skips the blocks | waits             |
//! | fill              | waits           | waits            | waits             |
//! | read-modify-write | waits           | skips the blocks | waits             |
//!
//! Two writes to one block are a race of the guest itself.

use std::sync::Mutex;

use cairn_store::ChunkIndex;

use super::layout::Blocks;
use super::presence::Presence;

/// Locks over which the chunks are spread.
const SHARDS: usize = 64;

/// The two kinds of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteKind {
    /// A write that replaces what it writes to.
    Plain,
    /// A write that reads its blocks first.
    ReadModifyWrite,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClaimKind {
    Write(WriteKind),
    Fill,
}

#[derive(Debug)]
struct Claim {
    blocks: Blocks,
    kind: ClaimKind,
}

/// All claims of a disk.
pub(crate) struct Claims {
    shards: Vec<Mutex<Vec<Claim>>>,
}

impl Claims {
    pub(crate) fn new() -> Claims {
        Claims { shards: (0..SHARDS).map(|_| Mutex::new(Vec::new())).collect() }
    }

    fn shard(&self, chunk: ChunkIndex) -> std::sync::MutexGuard<'_, Vec<Claim>> {
        self.shards[chunk.0 as usize % SHARDS]
            .lock()
            .expect("no code panics with a claim shard locked")
    }

    /// Claims blocks of one chunk for a write, unless that has to wait for the holder of another
    /// claim.
    pub(crate) fn try_write(&self, chunk: ChunkIndex, blocks: Blocks, kind: WriteKind) -> bool {
        let plain = ClaimKind::Write(WriteKind::Plain);
        let mut claims = self.shard(chunk);
        let free = !claims.iter().any(|held| {
            held.blocks.overlaps(&blocks) && (kind != WriteKind::Plain || held.kind != plain)
        });
        if free {
            claims.push(Claim { blocks, kind: ClaimKind::Write(kind) });
        }
        free
    }

    /// Releases a claim of [`Claims::try_write`].
    pub(crate) fn release_write(&self, chunk: ChunkIndex, blocks: Blocks, kind: WriteKind) {
        self.release(chunk, blocks, ClaimKind::Write(kind));
    }

    /// Claims every block of `chunk` that is absent and that nobody has claimed. Returns them as
    /// runs.
    ///
    /// Presence is read under the same lock. A write sets it before it releases its claim, so a
    /// block is never unclaimed while it is about to become present.
    pub(crate) fn take_fill(
        &self,
        chunk: ChunkIndex,
        all: Blocks,
        presence: &Presence,
    ) -> Vec<Blocks> {
        let mut claims = self.shard(chunk);
        let mut runs: Vec<Blocks> = Vec::new();
        for block in all.first..all.end() {
            let one = Blocks { first: block, count: 1 };
            if presence.get(block) || claims.iter().any(|held| held.blocks.overlaps(&one)) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end() == block => run.count += 1,
                _ => runs.push(one),
            }
        }
        claims.extend(runs.iter().map(|blocks| Claim { blocks: *blocks, kind: ClaimKind::Fill }));
        runs
    }

    /// Claims blocks of one chunk for a fill, unless somebody has claimed one of them.
    pub(crate) fn try_fill(&self, chunk: ChunkIndex, blocks: Blocks) -> bool {
        let mut claims = self.shard(chunk);
        let free = !claims.iter().any(|held| held.blocks.overlaps(&blocks));
        if free {
            claims.push(Claim { blocks, kind: ClaimKind::Fill });
        }
        free
    }

    /// Releases the claims of [`Claims::take_fill`] or [`Claims::try_fill`].
    pub(crate) fn release_fill(&self, chunk: ChunkIndex, runs: &[Blocks]) {
        for run in runs {
            self.release(chunk, *run, ClaimKind::Fill);
        }
    }

    fn release(&self, chunk: ChunkIndex, blocks: Blocks, kind: ClaimKind) {
        let mut claims = self.shard(chunk);
        let held = claims.iter().position(|held| held.kind == kind && held.blocks == blocks);
        debug_assert!(held.is_some(), "released a claim that nobody holds: {kind:?} {blocks:?}");
        if let Some(held) = held {
            claims.swap_remove(held);
        }
    }
}

#[cfg(test)]
mod tests {
    use cairn_store::ChunkIndex;

    use super::WriteKind::{Plain, ReadModifyWrite};
    use super::{Blocks, Claims, Presence};

    const CHUNK: ChunkIndex = ChunkIndex(1);
    const ALL: Blocks = Blocks { first: 16, count: 16 };

    #[test]
    fn a_fill_skips_what_is_present_or_being_written() {
        let (claims, presence) = (Claims::new(), Presence::absent(64).unwrap());
        presence.set(Blocks { first: 16, count: 2 });
        assert!(claims.try_write(CHUNK, Blocks { first: 20, count: 4 }, Plain));
        let runs = claims.take_fill(CHUNK, ALL, &presence);
        assert_eq!(runs, [Blocks { first: 18, count: 2 }, Blocks { first: 24, count: 8 }]);
        claims.release_fill(CHUNK, &runs);
        claims.release_write(CHUNK, Blocks { first: 20, count: 4 }, Plain);
        assert_eq!(claims.take_fill(CHUNK, ALL, &presence), [Blocks { first: 18, count: 14 }]);
    }

    #[test]
    fn a_write_waits_for_a_fill_of_its_blocks_only() {
        let (claims, presence) = (Claims::new(), Presence::absent(64).unwrap());
        presence.set(Blocks { first: 16, count: 8 });
        let runs = claims.take_fill(CHUNK, ALL, &presence);
        assert!(!claims.try_write(CHUNK, Blocks { first: 23, count: 2 }, Plain));
        assert!(claims.try_write(CHUNK, Blocks { first: 16, count: 8 }, Plain));
        claims.release_fill(CHUNK, &runs);
        assert!(claims.try_write(CHUNK, Blocks { first: 23, count: 2 }, Plain));
    }

    #[test]
    fn two_fills_never_claim_the_same_block() {
        let (claims, presence) = (Claims::new(), Presence::absent(64).unwrap());
        assert_eq!(claims.take_fill(CHUNK, ALL, &presence), [ALL]);
        assert!(claims.take_fill(CHUNK, ALL, &presence).is_empty());
    }

    #[test]
    fn a_write_that_reads_its_blocks_is_alone_on_them() {
        let (claims, presence) = (Claims::new(), Presence::absent(64).unwrap());
        let two = Blocks { first: 17, count: 2 };
        let one = Blocks { first: 18, count: 1 };
        for (first, second) in
            [(ReadModifyWrite, Plain), (Plain, ReadModifyWrite), (ReadModifyWrite, ReadModifyWrite)]
        {
            assert!(claims.try_write(CHUNK, two, first));
            assert!(!claims.try_write(CHUNK, one, second), "{first:?}, {second:?}");
            assert!(claims.try_write(CHUNK, Blocks { first: 19, count: 1 }, second));
            claims.release_write(CHUNK, Blocks { first: 19, count: 1 }, second);
            claims.release_write(CHUNK, two, first);
        }
        assert!(claims.try_write(CHUNK, one, ReadModifyWrite));
        assert!(!claims.try_fill(CHUNK, two));
        assert!(!claims.take_fill(CHUNK, ALL, &presence).iter().any(|run| run.overlaps(&one)));
        assert!(!claims.try_write(CHUNK, ALL, ReadModifyWrite), "a fill has the rest");
    }
}
