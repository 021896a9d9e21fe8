//! A pattern of writes from which a state of the disk can be verified.
//!
//! Several writers share a disk. With `w` writers, block `b` belongs to writer `b mod w`. Each
//! writer makes one write after the other, numbered from 1. The block of a write follows from its
//! number. So a state of the disk in which the newest write of a writer is `n` must contain all its
//! writes up to `n` and no other. Any other state has lost, torn or stale writes.

use seeded_rng::mix;

/// The size of a block in bytes.
pub const BLOCK: usize = 4096;

/// One of the writers of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// The index of this writer.
    pub index: u64,
    /// The number of writers.
    pub writers: u64,
    /// The number of blocks of the disk.
    pub blocks: u64,
}

impl Writer {
    /// The number of blocks that belong to this writer.
    pub fn own_blocks(&self) -> u64 {
        (self.blocks - self.index).div_ceil(self.writers)
    }

    /// The block of the write with this number.
    pub fn block_of(&self, number: u64) -> u64 {
        let pick = mix(self.index << 48 ^ number) % self.own_blocks();
        pick * self.writers + self.index
    }

    /// The content of a block after the write with this number. Number 0 means before the first
    /// write.
    pub fn content(&self, block: u64, number: u64) -> Vec<u8> {
        if number == 0 {
            return vec![0; BLOCK];
        }
        let word = |at: u64| (if at.is_multiple_of(2) { block } else { number }).to_le_bytes();
        (0..BLOCK as u64 / 8).flat_map(word).collect()
    }

    /// The number of the write that left this content in the block, or `None` if no write did.
    pub fn number(&self, block: u64, content: &[u8]) -> Option<u64> {
        let number = u64::from_le_bytes(content.get(8..16)?.try_into().ok()?);
        (content == self.content(block, number)).then_some(number)
    }

    /// Verifies a state of the whole disk. Returns the number of the newest write of this writer,
    /// or an error unless the state contains all its writes up to that one and no other.
    pub fn check(&self, disk: &[u8]) -> Result<u64, String> {
        let blocks = (self.index..self.blocks).step_by(self.writers as usize);
        let mut found = Vec::new();
        for block in blocks {
            let content = &disk[block as usize * BLOCK..][..BLOCK];
            let number = self
                .number(block, content)
                .ok_or_else(|| format!("the content of block {block} was never written to it"))?;
            found.push((block, number));
        }
        let newest = found.iter().map(|(_, number)| *number).max().unwrap_or(0);
        let mut last = std::collections::HashMap::new();
        for number in 1..=newest {
            last.insert(self.block_of(number), number);
        }
        for (block, number) in found {
            let expected = last.get(&block).copied().unwrap_or(0);
            if number != expected {
                return Err(format!(
                    "the newest write of writer {} is {newest}, but block {block} has write {number} \
                     instead of {expected}",
                    self.index
                ));
            }
        }
        Ok(newest)
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, Writer};

    #[test]
    fn lost_and_torn_writes_are_found() {
        let writer = Writer { index: 1, writers: 3, blocks: 20 };
        let mut disk = vec![0; 20 * BLOCK];
        assert_eq!(writer.check(&disk), Ok(0));
        let mut before = disk.clone();
        for number in 1..=50 {
            let at = writer.block_of(number) as usize * BLOCK;
            assert_eq!(writer.block_of(number) % 3, 1);
            before.clone_from(&disk);
            disk[at..at + BLOCK].copy_from_slice(&writer.content(writer.block_of(number), number));
            assert_eq!(writer.check(&disk), Ok(number));
        }
        let at = writer.block_of(50) as usize * BLOCK;
        let mut torn = disk.clone();
        torn[at..at + 512].copy_from_slice(&before[at..at + 512]);
        assert!(writer.check(&torn).is_err());
        let other = (1..50).rev().find(|number| writer.block_of(*number) != writer.block_of(50));
        let at = writer.block_of(other.unwrap()) as usize * BLOCK;
        let mut lost = disk.clone();
        lost[at..at + BLOCK].fill(0);
        assert!(writer.check(&lost).is_err());
    }
}
