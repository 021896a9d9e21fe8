//! The content of a sparse file.

use std::collections::BTreeMap;
use std::sync::Arc;

const BLOCK: usize = 4096;

type Block = [u8; BLOCK];

/// The content of a file with holes. Missing blocks are zeros. Clones share blocks.
#[derive(Clone, Default)]
pub(crate) struct Sparse {
    len: usize,
    blocks: BTreeMap<usize, Arc<Block>>,
}

impl Sparse {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn set_len(&mut self, len: usize) {
        self.punch(len, self.len.saturating_sub(len));
        self.len = len;
    }

    /// Extends the file to at least this length.
    pub(crate) fn extend(&mut self, len: usize) {
        self.len = self.len.max(len);
    }

    pub(crate) fn write(&mut self, offset: usize, data: &[u8]) {
        self.extend(offset + data.len());
        let mut rest = data;
        for (index, start, len) in pieces(offset, data.len()) {
            let (piece, behind) = rest.split_at(len);
            let block = self.blocks.entry(index).or_insert_with(|| Arc::new([0; BLOCK]));
            Arc::make_mut(block)[start..start + len].copy_from_slice(piece);
            rest = behind;
        }
    }

    /// Replaces a range by zeros. The length does not change.
    pub(crate) fn punch(&mut self, offset: usize, len: usize) {
        let end = self.len.min(offset.saturating_add(len));
        if end <= offset {
            return;
        }
        let touched = self.blocks.range(offset / BLOCK..end.div_ceil(BLOCK));
        let touched: Vec<_> = touched.map(|(index, _)| *index).collect();
        for index in touched {
            let first = index * BLOCK;
            let (start, stop) = (offset.max(first), end.min(first + BLOCK));
            if start == first && stop == self.len.min(first + BLOCK) {
                self.blocks.remove(&index);
            } else if let Some(block) = self.blocks.get_mut(&index) {
                Arc::make_mut(block)[start - first..stop - first].fill(0);
            }
        }
    }

    /// Reads up to `len` bytes at `offset`, fewer at the end of the file.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let start = self.len.min(offset);
        let end = self.len.min(start + len);
        let mut bytes = vec![0; end - start];
        let mut done = 0;
        for (index, start, len) in pieces(start, end - start) {
            if let Some(block) = self.blocks.get(&index) {
                bytes[done..done + len].copy_from_slice(&block[start..start + len]);
            }
            done += len;
        }
        bytes
    }

    /// The blocks that are not all zeros, each with its offset.
    pub(crate) fn data(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let all = self.blocks.iter().map(|(index, block)| {
            let first = index * BLOCK;
            (first, &block[..BLOCK.min(self.len - first)])
        });
        all.filter(|(_, bytes)| bytes.iter().any(|byte| *byte != 0))
    }
}

/// The parts of blocks that a range covers: the index of the block, the start in it, the length.
fn pieces(offset: usize, len: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let end = offset + len;
    (offset / BLOCK..end.div_ceil(BLOCK)).map(move |index| {
        let first = index * BLOCK;
        let (start, stop) = (offset.max(first), end.min(first + BLOCK));
        (index, start - first, stop.saturating_sub(start))
    })
}

#[cfg(test)]
mod tests {
    use seeded_rng::Rng;

    use super::{BLOCK, Sparse};

    #[test]
    fn it_behaves_like_a_vector_of_bytes() {
        let (mut sparse, mut plain) = (Sparse::default(), Vec::new());
        let mut rng = Rng::new(7);
        let mut below = |limit: usize| rng.below(limit as u64) as usize;
        for round in 0..5000 {
            let (offset, len) = (below(6 * BLOCK), below(2 * BLOCK));
            match below(4) {
                0 => {
                    sparse.set_len(offset);
                    plain.resize(offset, 0);
                }
                1 => {
                    sparse.punch(offset, len);
                    let end = plain.len().min(offset + len);
                    plain[offset.min(end)..end].fill(0);
                }
                _ => {
                    let data = vec![round as u8; len];
                    sparse.write(offset, &data);
                    plain.resize(plain.len().max(offset + len), 0);
                    plain[offset..offset + len].copy_from_slice(&data);
                }
            }
            assert_eq!(sparse.len(), plain.len());
            assert!(sparse.read(0, plain.len() + 1) == plain, "round {round}");
            let mut copy = vec![0; plain.len()];
            for (at, bytes) in sparse.data() {
                copy[at..at + bytes.len()].copy_from_slice(bytes);
            }
            assert!(copy == plain, "round {round}");
        }
    }
}
