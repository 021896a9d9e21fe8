//! Reading a part of a blob's content: which stored bytes hold it, and what they decode to.
//!
//! ```text
//! bytes of the content ─► frames ─► range of the stored bytes ─► a part of each data block
//! ```

use std::ops::Range;

use super::description::Description;
use super::frames::{FRAME_BYTES, frame_count, frame_range, is_frame_of, open_frame};
use crate::error::Result;

impl Description {
    /// The frames that hold these bytes of the content.
    pub fn frames_of(&self, content: Range<usize>) -> Range<usize> {
        let end = content.end.min(self.len as usize);
        let start = content.start.min(end);
        start / FRAME_BYTES..if start == end { start / FRAME_BYTES } else { frame_count(end) }
    }

    /// The position of a frame in the stored bytes.
    pub(super) fn stored_frame(&self, frame: usize) -> Range<usize> {
        let len = self.stored_len as usize;
        if self.tables.frames.is_empty() {
            // There is one frame, or the stored bytes are the content.
            return match self.subtrees.len() {
                0 if frame == 0 => 0..len,
                _ => frame_range(frame, len),
            };
        }
        let frames = &self.tables.frames;
        let start: u32 = frames[..frame.min(frames.len())].iter().sum();
        start as usize..(start + frames.get(frame).unwrap_or(&0)) as usize
    }

    /// The position of frames in the stored bytes.
    pub fn stored_range(&self, frames: Range<usize>) -> Range<usize> {
        match frames.is_empty() {
            true => 0..0,
            false => self.stored_frame(frames.start).start..self.stored_frame(frames.end - 1).end,
        }
    }

    /// The part of the block with this index that is in a range of the stored bytes. Parity blocks
    /// have none.
    pub fn part_of_block(&self, index: u8, stored: &Range<usize>) -> Range<usize> {
        let len = self.block_len();
        let first = usize::from(index) * len;
        let within = |at: usize| at.clamp(first, first + len) - first;
        match index < self.data {
            true => within(stored.start)..within(stored.end),
            false => 0..0,
        }
    }

    /// Decodes one frame from its stored bytes, and verifies it against the blob's name. Returns its
    /// content.
    pub fn open(&self, frame: usize, stored: &[u8]) -> Result<Vec<u8>> {
        self.check_readable()?;
        if stored.len() != self.stored_frame(frame).len() {
            return Err(self.wrong("the stored bytes of a frame have another length"));
        }
        let mut content = vec![0; frame_range(frame, self.len as usize).len()];
        open_frame(self.codec, stored, &mut content).map_err(|reason| self.wrong(&reason))?;
        match is_frame_of(&self.blob, &self.subtrees, frame, &content) {
            true => Ok(content),
            false => Err(self.wrong("a frame has another hash")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{Description, FRAME_BYTES};
    use crate::encoding::compression::Compression;
    use crate::encoding::fragment::{Blocks, encode};
    use crate::encoding::{Redundancy, StoragePolicy};
    use crate::id::BlobId;

    /// Content of which some frames shrink and some do not.
    fn content(len: usize, seed: u8) -> Vec<u8> {
        let mut content = vec![0; len];
        blake3::Hasher::new().update(&[seed]).finalize_xof().fill(&mut content);
        for (frame, bytes) in content.chunks_mut(FRAME_BYTES).enumerate() {
            if frame % 3 != usize::from(seed) % 3 {
                bytes.iter_mut().for_each(|byte| *byte &= 3);
            }
        }
        content
    }

    /// The stored bytes of frames, as peers would send the parts of their blocks.
    fn stored(description: &Description, blocks: &Blocks, frame: usize) -> Vec<u8> {
        let stored = description.stored_range(frame..frame + 1);
        let parts = (0..description.width()).map(|index| {
            let part = description.part_of_block(index as u8, &stored);
            blocks.get(index)[part].to_vec()
        });
        parts.collect::<Vec<_>>().concat()
    }

    proptest! {
        #[test]
        fn each_part_of_the_content_can_be_read_alone(
            len in 1usize..400_000,
            seed in any::<u8>(),
            which in 0usize..4,
            how in 0usize..3,
            range in any::<[usize; 2]>(),
        ) {
            let content = content(len, seed);
            let redundancy: Redundancy =
                ["none", "replicas=3", "rs=3+2", "rs=4+4"][which].parse().unwrap();
            let compression = [Compression::None, Compression::Zstd, Compression::Lz4][how];
            let policy = StoragePolicy { redundancy, compression };
            let blob = BlobId::of(&content);
            let (description, blocks) = encode(&blob, &content, policy);
            let start = range[0] % len;
            let end = start + range[1] % (len - start + 1);
            let frames = description.frames_of(start..end);
            prop_assert_eq!(frames.is_empty(), start == end);
            let first = frames.start * FRAME_BYTES;
            let mut found = Vec::new();
            for frame in frames {
                let stored = stored(&description, &blocks, frame);
                found.extend(description.open(frame, &stored).unwrap());
                if !stored.is_empty() {
                    let mut wrong = stored.clone();
                    wrong[range[0] % stored.len()] ^= 1;
                    // A codec may decode two different inputs to the same bytes.
                    let opened = description.open(frame, &wrong);
                    let right = description.open(frame, &stored).unwrap();
                    prop_assert!(opened.is_err() || opened.unwrap() == right, "a flipped bit");
                    prop_assert!(description.open(frame, &stored[1..]).is_err(), "too short");
                    prop_assert!(description.open(frame + 1, &stored).is_err(), "another frame");
                }
            }
            prop_assert!(start == end || found[start - first..end - first] == content[start..end]);
        }
    }

    #[test]
    fn a_range_beyond_the_end_holds_nothing() {
        let content = content(100_000, 1);
        let (description, _) = encode(&BlobId::of(&content), &content, Redundancy::NONE);
        for range in [100_000..100_001, 200_000..300_000, 5..5, 0..0] {
            assert!(description.frames_of(range.clone()).is_empty(), "{range:?}");
            assert_eq!(description.stored_range(description.frames_of(range)), 0..0);
        }
        assert_eq!(description.frames_of(99_999..usize::MAX), 1..2);
        assert!(description.open(2, &[]).is_err());
    }
}
