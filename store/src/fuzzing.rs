//! Entrances for the fuzzer: what is read back from a repository.
//!
//! Each takes arbitrary bytes and asserts what must hold whatever they are. `make fuzz` searches for a long time
//! and with knowledge of the code. The tests here are a short version.

use std::fs::File;

use crate::cluster::protocol::{Answer, MAX_BODY, Request};
use crate::documents::remote::wire as catalog;
use crate::net::frame::Header;
use crate::tree::node::Node;
use crate::{blobs, cluster};

/// Takes `data` for a tree node.
pub fn node(data: &[u8]) {
    let Ok(node) = Node::decode(data) else { return };
    assert_eq!(node.encode(), data, "a node has one encoding");
    assert!(!node.is_empty());
    let present: Vec<u8> = (0..=255).filter(|slot| node.get(*slot).is_some()).collect();
    let mut again = Node::new(data[5]);
    let mut next = node.next_present(0);
    for slot in &present {
        assert_eq!(next, Some(*slot), "the walk tells what is there");
        next = slot.checked_add(1).and_then(|from| node.next_present(from));
        again.set(*slot, node.get(*slot).copied());
    }
    assert_eq!(next, None);
    assert_eq!(again, node);
    for slots in 0..=256 {
        let inside = present.iter().all(|slot| u64::from(*slot) < slots);
        assert_eq!(node.check_place(data[5], slots).is_ok(), inside);
    }
    present.iter().for_each(|slot| again.set(*slot, None));
    assert!(again.is_empty());
}

/// Takes `data` for a frame: two bytes that say which kind of message, and its body.
pub fn wire(data: &[u8]) {
    let Some((kind, body)) = data.split_first_chunk() else { return };
    // Requests and answers have small numbers.
    let kind = u16::from_le_bytes(*kind) % 128;
    if let Ok(request) = Request::from_body(kind, body) {
        assert_eq!(request.to_body(), (kind, body.to_vec()), "a request has one form");
    }
    if let Ok(answer) = Answer::from_body(kind, body) {
        assert_eq!(answer.to_body(), (kind, body.to_vec()), "an answer has one form");
    }
    if let Some(header) = data.first_chunk()
        && let Ok(header) = Header::from_bytes(header, crate::cluster::protocol::MAX_BODY)
    {
        assert!(header.len <= MAX_BODY && data.starts_with(&header.to_bytes()));
    }
}

/// Takes `data` for a frame of the catalog's protocol: two bytes that say which kind of message, and its body.
pub fn catalog(data: &[u8]) {
    let Some((kind, body)) = data.split_first_chunk() else { return };
    // Requests have numbers from 200, answers from 300.
    let kind = 200 + u16::from_le_bytes(*kind) % 128;
    if let Ok(request) = catalog::Request::from_body(kind, body) {
        assert_eq!(request.to_body(), (kind, body.to_vec()), "a request has one form");
    }
    if let Ok(answer) = catalog::Answer::from_body(kind, body) {
        assert_eq!(answer.to_body(), (kind, body.to_vec()), "an answer has one form");
    }
}

/// Takes `data` for groups of blobs and flips in them, and scans them in `file`, which is an empty one.
pub fn segment(data: &[u8], file: &File) {
    blobs::directory::fuzzing::segment(data, file);
}

/// Takes `data` for groups of a peer's fragments and flips in them, and scans them in `file`, which is an empty one.
pub fn peer_segment(data: &[u8], file: &File) {
    cluster::peer::store::fuzzing::segment(data, file);
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::{ProptestConfig, any, prop_oneof, proptest};

    use super::Node;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn node(
            level in 0u8..4,
            slots in btree_set(any::<u8>(), 1..8),
            flips in vec((any::<usize>(), any::<u8>()), 0..4),
        ) {
            let mut node = Node::new(level);
            slots.iter().for_each(|slot| node.set(*slot, Some([*slot; 32])));
            let mut bytes = node.encode();
            for (at, mask) in flips {
                let at = at % bytes.len();
                bytes[at] ^= mask;
            }
            super::node(&bytes);
        }

        #[test]
        fn wire(data in vec(any::<u8>(), 0..400)) {
            super::wire(&data);
            // Random numbers seldom are those of messages.
            for kind in (0..12).chain(100..112) {
                let body = data.get(2..).unwrap_or_default();
                super::wire(&[&[kind, 0], body].concat());
            }
        }

        #[test]
        fn catalog(
            kind in prop_oneof![1u16..5, 101u16..106],
            // Small numbers, so that counts and lengths fit now and then.
            body in vec(0u8..4, 0..60),
        ) {
            super::catalog(&[&kind.to_le_bytes()[..], &body].concat());
        }

        #[test]
        fn segment(data in vec(any::<u8>(), 0..200)) {
            super::segment(&data, &tempfile::tempfile().unwrap());
        }

        #[test]
        fn peer_segment(data in vec(any::<u8>(), 0..60)) {
            super::peer_segment(&data, &tempfile::tempfile().unwrap());
            // Without flips.
            let [groups, rest @ ..] = &data[..] else { return Ok(()) };
            let mut whole = vec![groups % 5];
            whole.extend(rest.iter().take(2));
            super::peer_segment(&whole, &tempfile::tempfile().unwrap());
        }
    }
}
