//! What a guest writes so that everybody can tell whether it is still there.
//!
//! Several writers share a disk. Block b belongs to writer b modulo their number. Each writer sends one
//! write after the other, numbered from 1; which of its blocks a number goes to follows from the number. So a
//! state of the disk in which a writer's newest number is n must hold all its writes up to n, and no
//! other: anything else was lost, torn, or came back.

use seeded_rng::mix;

/// Bytes of a block.
pub const BLOCK: usize = 4096;

/// One of the writers of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// Its place among them.
    pub index: u64,
    /// How many there are.
    pub writers: u64,
    /// Blocks of the disk.
    pub blocks: u64,
}

impl Writer {
    /// Blocks that belong to it.
    pub fn own_blocks(&self) -> u64 {
        (self.blocks - self.index).div_ceil(self.writers)
    }

    /// The block that the write with this number goes to.
    pub fn block_of(&self, number: u64) -> u64 {
        let pick = mix(self.index << 48 ^ number) % self.own_blocks();
        pick * self.writers + self.index
    }

    /// The content of a block after the write with this number; 0 is before the first.
    pub fn content(&self, block: u64, number: u64) -> Vec<u8> {
        if number == 0 {
            return vec![0; BLOCK];
        }
        let word = |at: u64| (if at.is_multiple_of(2) { block } else { number }).to_le_bytes();
        (0..BLOCK as u64 / 8).flat_map(word).collect()
    }

    /// The number of the write that a block's content is from, if it is one of this block's.
    pub fn number(&self, block: u64, content: &[u8]) -> Option<u64> {
        let number = u64::from_le_bytes(content.get(8..16)?.try_into().ok()?);
        (content == self.content(block, number)).then_some(number)
    }

    /// The newest number in a state of the whole disk, if that holds all writes up to it and no other.
    pub fn check(&self, disk: &[u8]) -> Result<u64, String> {
        let blocks = (self.index..self.blocks).step_by(self.writers as usize);
        let mut found = Vec::new();
        for block in blocks {
            let content = &disk[block as usize * BLOCK..][..BLOCK];
            let number = self
                .number(block, content)
                .ok_or_else(|| format!("block {block} holds nothing that was written to it"))?;
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
                    "writer {} has got to {newest}, but block {block} is of {number} instead of {expected}",
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
    fn a_lost_an_old_and_a_torn_write_are_found() {
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
