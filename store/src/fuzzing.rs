//! Entry points of the fuzzer: the decoders of stored and received bytes.
//!
//! Each function takes arbitrary bytes and asserts what must hold for any bytes. `make fuzz` runs
//! for a long time and is guided by code coverage. The tests here are a short version.

use std::fs::File;

use bytes::Bytes;

use crate::cluster::protocol::{Answer, MAX_BODY, Request};
use crate::documents::remote::wire as catalog;
use crate::net::frame::Header;
use crate::net::handshake::{PEER_PROTOCOL, choose_version};
use crate::net::message::FAILED;
use crate::tree::node::Node;
use crate::{blobs, cluster};

/// Decodes `data` as a tree node.
pub fn node(data: &[u8]) {
    let Ok(node) = Node::decode(data) else { return };
    assert_eq!(node.encode(), data, "a node has one encoding");
    assert!(!node.is_empty());
    let present: Vec<u8> = (0..=255).filter(|slot| node.get(*slot).is_some()).collect();
    let mut again = Node::new(data[5]);
    let mut next = node.next_present(0);
    for slot in &present {
        assert_eq!(next, Some(*slot), "the walk finds every present slot");
        next = slot.checked_add(1).and_then(|from| node.next_present(from));
        again.set(*slot, node.get(*slot).copied());
    }
    assert_eq!(next, None);
    assert_eq!(again, node);
    for slots in 0..=256 {
        let inside = present.iter().all(|slot| u64::from(*slot) < slots);
        assert_eq!(node.check_position(data[5], slots).is_ok(), inside);
    }
    present.iter().for_each(|slot| again.set(*slot, None));
    assert!(again.is_empty());
}

/// Decodes `data` as a message of the peers' protocol: two bytes for its kind, then its body.
pub fn wire(data: &[u8]) {
    let Some((kind, body)) = data.split_first_chunk() else { return };
    // The kinds of requests and answers are small numbers.
    let kind = u16::from_le_bytes(*kind) % 128;
    if let Ok(request) = Request::from_body(kind, body) {
        assert_eq!(request.to_body(), (kind, body.to_vec()), "a request has one encoding");
    }
    if let Ok(answer) = Answer::from_body(kind, body) {
        assert_eq!(answer.to_body(), (kind, body.to_vec()), "an answer has one encoding");
        if let Answer::Parts(parts) = answer {
            for part in parts {
                let frames = part.description.frames_of(0..usize::MAX);
                let stored = part.description.stored_range(frames.clone());
                assert!(part.description.part_of_block(part.index, &stored).len() <= MAX_BODY);
                frames.for_each(|frame| drop(part.description.open(frame, &part.bytes)));
            }
        }
    }
    if let Ok(version) = choose_version(&PEER_PROTOCOL, &Bytes::copy_from_slice(body)) {
        let (oldest, newest) = (PEER_PROTOCOL.oldest, PEER_PROTOCOL.newest);
        assert!((oldest..=newest).contains(&version) && body.starts_with(&PEER_PROTOCOL.magic));
    }
    if let Some(header) = data.first_chunk()
        && let Ok(header) = Header::from_bytes(header, crate::cluster::protocol::MAX_BODY)
    {
        assert!(header.len <= MAX_BODY && data.starts_with(&header.to_bytes()));
    }
}

/// Decodes `data` as a message of the catalog's protocol: two bytes for its kind, then its body.
pub fn catalog(data: &[u8]) {
    let Some((kind, body)) = data.split_first_chunk() else { return };
    // The kinds of requests start at 200, those of answers at 300. A failure has a small one.
    let kind = match u16::from_le_bytes(*kind) % 128 {
        0 => FAILED,
        kind => 200 + kind,
    };
    let bytes = Bytes::copy_from_slice(body);
    if let Ok(request) = catalog::Request::from_body(kind, &bytes) {
        assert_eq!(request.to_body(), (kind, body.to_vec()), "a request has one encoding");
    }
    if let Ok(answer) = catalog::Answer::from_body(kind, &bytes) {
        assert_eq!(answer.to_body(), (kind, body.to_vec()), "an answer has one encoding");
    }
}

/// Writes groups of blobs and flips bits in them, both as `data` says, to the empty `file`, and
/// scans it.
pub fn segment(data: &[u8], file: &File) {
    blobs::directory::fuzzing::segment(data, file);
}

/// Writes groups of a peer's fragments and flips bits in them, both as `data` says, to the empty
/// `file`, and scans it.
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
            // Random numbers are rarely kinds of messages.
            for kind in (0..13).chain(100..113) {
                let body = data.get(2..).unwrap_or_default();
                super::wire(&[&[kind, 0], body].concat());
            }
        }

        #[test]
        fn catalog(
            kind in prop_oneof![1u16..6, 101u16..108],
            // Small numbers, so that counts and lengths sometimes fit.
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
