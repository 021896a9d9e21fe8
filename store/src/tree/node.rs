//! A tree node and its canonical bytes.
//!
//! ```text
//! 0        4         5       6      8                      40
//! ┌────────┬─────────┬───────┬──────┬──────────────────────┬───────────────────────────┐
//! │ "CRNN" │ version │ level │ zero │ presence, 256 bits   │ the present children's ids │
//! └────────┴─────────┴───────┴──────┴──────────────────────┴───────────────────────────┘
//! ```
//!
//! A set of children has exactly one encoding, so equal subtrees have equal names.

use crate::geometry::FAN_OUT;

const MAGIC: &[u8; 4] = b"CRNN";
const VERSION: u8 = 1;
const BITMAP: usize = 8;
const CHILDREN: usize = 40;
const ID: usize = 32;

/// The longest encoding, in bytes.
pub(crate) const MAX_NODE: usize = CHILDREN + FAN_OUT as usize * ID;

/// The name of a child: of a chunk in a node of level 0, otherwise of a node one level below.
pub(crate) type Child = [u8; ID];

/// A tree node. Only present children take space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    level: u8,
    present: [u64; 4],
    children: Vec<Child>,
}

impl Node {
    /// A node without children.
    pub(crate) fn new(level: u8) -> Self {
        Self { level, present: [0; 4], children: Vec::new() }
    }

    /// The number of levels below the node.
    pub(crate) fn level(&self) -> u8 {
        self.level
    }

    /// The child in this slot.
    pub(crate) fn get(&self, slot: u8) -> Option<&Child> {
        self.has(slot).then(|| &self.children[self.rank(slot)])
    }

    /// Puts a child into this slot, or empties it.
    pub(crate) fn set(&mut self, slot: u8, child: Option<Child>) {
        let rank = self.rank(slot);
        match (self.has(slot), child) {
            (true, Some(child)) => self.children[rank] = child,
            (false, Some(child)) => {
                self.children.insert(rank, child);
                self.present[word(slot)] |= bit(slot);
            }
            (true, None) => {
                self.children.remove(rank);
                self.present[word(slot)] &= !bit(slot);
            }
            (false, None) => {}
        }
    }

    /// The names of the children, in order.
    pub(crate) fn children(&self) -> &[Child] {
        &self.children
    }

    /// Whether the node has no children. Such a node is never stored.
    pub(crate) fn is_empty(&self) -> bool {
        self.children.is_empty()
    }

    /// The first present slot from `from` on.
    pub(crate) fn next_present(&self, from: u8) -> Option<u8> {
        let mut mask = !(bit(from) - 1);
        for at in word(from)..self.present.len() {
            let rest = self.present[at] & mask;
            if rest != 0 {
                return u8::try_from(at as u32 * 64 + rest.trailing_zeros()).ok();
            }
            mask = u64::MAX;
        }
        None
    }

    /// Bytes of memory that the node takes.
    pub(crate) fn weight(&self) -> usize {
        size_of::<Self>() + self.children.capacity() * ID
    }

    /// The canonical bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(CHILDREN + self.children.len() * ID);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&[VERSION, self.level, 0, 0]);
        for word in self.present {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        self.children.iter().for_each(|child| bytes.extend_from_slice(child));
        bytes
    }

    /// Decodes canonical bytes. The error says what is wrong with them.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        if bytes.len() < CHILDREN {
            return Err("it is too short for a tree node");
        }
        if &bytes[..4] != MAGIC {
            return Err("it is not a tree node");
        }
        if bytes[4] != VERSION {
            return Err("it is a tree node of an unknown version");
        }
        if bytes[6..BITMAP] != [0, 0] {
            return Err("its reserved bytes are not zero");
        }
        let mut present = [0; 4];
        for (word, bytes) in present.iter_mut().zip(bytes[BITMAP..CHILDREN].as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let (children, rest) = bytes[CHILDREN..].as_chunks::<ID>();
        let count = present.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        if count == 0 {
            return Err("it has no children");
        }
        if !rest.is_empty() || count != children.len() {
            return Err("its length does not match its children");
        }
        Ok(Self { level: bytes[5], present, children: children.to_vec() })
    }

    /// Fails unless the node has this level and no children beyond the first `slots` slots, which
    /// are those inside the disk.
    pub(crate) fn check_position(&self, level: u8, slots: u64) -> Result<(), &'static str> {
        if self.level != level {
            return Err("it is a tree node of another level");
        }
        match u8::try_from(slots) {
            Ok(slots) if self.next_present(slots).is_some() => {
                Err("it has children beyond the end of the disk")
            }
            _ => Ok(()),
        }
    }

    fn has(&self, slot: u8) -> bool {
        self.present[word(slot)] & bit(slot) != 0
    }

    /// How many children are present before this slot.
    fn rank(&self, slot: u8) -> usize {
        let before = self.present[..word(slot)].iter().map(|word| word.count_ones()).sum::<u32>();
        (before + (self.present[word(slot)] & (bit(slot) - 1)).count_ones()) as usize
    }
}

fn word(slot: u8) -> usize {
    usize::from(slot / 64)
}

fn bit(slot: u8) -> u64 {
    1 << (slot % 64)
}

#[cfg(test)]
mod tests {
    use super::{CHILDREN, MAX_NODE, Node};

    fn node(level: u8, slots: &[u8]) -> Node {
        let mut node = Node::new(level);
        slots.iter().for_each(|slot| node.set(*slot, Some([*slot; 32])));
        node
    }

    #[test]
    fn the_bytes_of_a_node_are_stable() {
        let bytes = node(2, &[0, 9, 255]).encode();
        assert_eq!(&bytes[..8], b"CRNN\x01\x02\0\0");
        let mut presence = [0; 32];
        (presence[0], presence[1], presence[31]) = (0x01, 0x02, 0x80);
        assert_eq!(bytes[8..40], presence);
        assert_eq!(bytes[40..], [[0; 32], [9; 32], [255; 32]].concat());
    }

    #[test]
    fn nodes_with_equal_children_are_equal_whatever_changes_led_to_them() {
        let mut other = node(0, &[255, 77, 9, 0]);
        other.set(77, None);
        other.set(78, None);
        assert_eq!(other, node(0, &[0, 9, 255]));
        assert_eq!(other.get(9), Some(&[9; 32]));
        assert_eq!(other.get(10), None);
        assert_eq!(other.next_present(10), Some(255));
    }

    #[test]
    fn a_node_decodes_to_what_was_encoded() {
        for slots in [(0..=255).collect::<Vec<u8>>(), vec![0], vec![255], vec![63, 64, 127, 128]] {
            let node = node(1, &slots);
            let bytes = node.encode();
            assert!(bytes.len() <= MAX_NODE);
            assert_eq!(Node::decode(&bytes), Ok(node));
        }
    }

    #[test]
    fn bytes_that_are_not_canonical_are_refused() {
        let good = node(0, &[1, 200]).encode();
        Node::decode(&good).unwrap();
        assert!(Node::decode(&node(0, &[]).encode()).is_err(), "empty");
        for len in 0..good.len() {
            assert!(Node::decode(&good[..len]).is_err(), "cut to {len}");
        }
        assert!(Node::decode(&[&good[..], &[0; 32]].concat()).is_err(), "too long");
        for at in (0..CHILDREN).filter(|at| *at != 5) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(Node::decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_node_fits_only_positions_of_its_level_and_width() {
        let node = node(1, &[1, 200]);
        assert!(node.check_position(1, 256).is_ok());
        assert!(node.check_position(1, 201).is_ok());
        assert!(node.check_position(1, 200).is_err());
        assert!(node.check_position(0, 256).is_err());
    }
}
