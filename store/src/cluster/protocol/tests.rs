use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_assert_eq, prop_oneof, proptest};

use super::FragmentPart;
use super::{Answer, Fragment, Request};
use super::{DeletedFragments, FragmentId, Held, PeerTime, Refusal, StampBound, Usage};
use crate::collection::CollectionNumber;
use crate::encoding::Redundancy;
use crate::encoding::fragment::{Kind, encode, encode_record};
use crate::encoding::{SEAL_BYTES, Seal};
use crate::id::BlobId;
use crate::net::frame::{HEADER, Header};
use crate::net::message::FAILURE_KINDS;

fn blob() -> impl Strategy<Value = BlobId> {
    any::<[u8; 32]>().prop_map(BlobId::from_bytes)
}

fn fragment() -> impl Strategy<Value = Fragment> {
    let redundancy = prop_oneof![Just("none"), Just("rs=2+1"), Just("rs=4+4")];
    (vec(any::<u8>(), 1..300), redundancy, any::<u8>()).prop_map(|(content, code, index)| {
        let code: Redundancy = code.parse().unwrap();
        let blob = BlobId::of(&content);
        let (description, blocks) = match index % 2 {
            0 => encode(&blob, &content, code),
            _ => encode_record(&blob, &content, code),
        };
        let index = index % description.width() as u8;
        let block = blocks.share(index.into());
        let seal = Seal::from_bytes([index; SEAL_BYTES]);
        Fragment { description: description.with_seal(seal), index, block }
    })
}

fn fragment_id() -> impl Strategy<Value = FragmentId> {
    (blob(), blob(), any::<u8>()).prop_map(|(blob, encoding, index)| FragmentId {
        blob,
        encoding,
        index,
    })
}

fn held() -> impl Strategy<Value = Held> {
    let kind = prop_oneof![Just(Kind::Content), Just(Kind::Record)];
    (blob(), any::<[u8; 3]>(), kind, any::<u32>(), any::<[u8; SEAL_BYTES]>()).prop_map(
        |(encoding, [data, parity, index], kind, len, seal)| {
            let seal = Seal::from_bytes(seal);
            Held { encoding, data, parity, index, kind, len, seal }
        },
    )
}

fn stamp() -> impl Strategy<Value = CollectionNumber> {
    (0..=CollectionNumber::MAX.0).prop_map(CollectionNumber)
}

fn part() -> impl Strategy<Value = FragmentPart> {
    (fragment(), any::<[u16; 2]>()).prop_map(|(fragment, [start, len])| {
        let Fragment { description, index, block } = fragment;
        let start = usize::from(start) % (block.len() + 1);
        let bytes = block.slice(start..start + usize::from(len) % (block.len() - start + 1));
        FragmentPart { description, index, offset: start as u32, bytes }
    })
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        (stamp(), vec(fragment(), 1..4))
            .prop_map(|(stamp, fragments)| Request::Put { stamp, fragments }),
        (blob(), any::<u32>(), any::<u32>()).prop_map(|(blob, offset, len)| Request::GetRange {
            blob,
            offset,
            len
        }),
        blob().prop_map(Request::Get),
        fragment_id().prop_map(Request::GetFragment),
        Just(Request::Clock),
        (proptest::option::of(stamp()), vec(blob(), 0..20))
            .prop_map(|(renew, blobs)| Request::Have { renew, blobs }),
        Just(Request::Usage),
        (any::<(u64, u32, bool)>(), stamp(), stamp(), vec(fragment_id(), 0..20)).prop_map(
            |((deadline, idle, is_dry), below, number, fragments)| Request::Delete {
                deadline: PeerTime(deadline),
                idle,
                bound: StampBound { below, number },
                is_dry,
                fragments
            }
        ),
        blob().prop_map(Request::Records),
        (blob(), any::<u16>()).prop_map(|(after, most)| Request::List { after, most }),
        any::<u64>().prop_map(Request::Reserve),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![
        Just(Answer::Stored),
        (vec(proptest::option::of(0usize..6), 0..8), 0usize..6, ".{0,40}").prop_map(
            |(mut which, last, reason)| {
                which.push(Some(last));
                let refusal = |number| {
                    FAILURE_KINDS.get(number).map_or(Refusal::Full, |kind| Refusal::Failed(*kind))
                };
                let which = which.into_iter().map(|number| number.map(refusal)).collect();
                Answer::Refused { which, reason }
            }
        ),
        vec(fragment(), 0..4).prop_map(Answer::Fragments),
        vec(part(), 0..4).prop_map(Answer::Parts),
        vec(vec(held(), 0..4), 0..8).prop_map(Answer::Held),
        any::<[u64; 4]>().prop_map(|[capacity, used, reserved, fragments]| {
            Answer::Usage(Usage { capacity, used, reserved, fragments })
        }),
        any::<u64>().prop_map(|time| Answer::Clock(PeerTime(time))),
        any::<(u32, u64)>().prop_map(|(fragments, bytes)| {
            Answer::Deleted(DeletedFragments { fragments, bytes })
        }),
        vec((blob(), held()), 0..8).prop_map(Answer::Listed),
        Just(Answer::Reserved),
        (0usize..5, ".{0,40}").prop_map(|(kind, text)| Answer::Failed(FAILURE_KINDS[kind], text)),
    ]
}

proptest! {
    #[test]
    fn a_message_decodes_to_itself(request in request(), answer in answer()) {
        let (kind, body) = request.to_body();
        let (same, parts) = request.to_parts();
        prop_assert_eq!((same, parts.concat()), (kind, body.clone()));
        prop_assert_eq!(Request::from_body(kind, &body).unwrap(), request);
        let (kind, body) = answer.to_body();
        let (same, parts) = answer.to_parts();
        prop_assert_eq!((same, parts.concat()), (kind, body.clone()));
        prop_assert_eq!(Answer::from_body(kind, &body).unwrap(), answer);
    }

    #[test]
    fn damaged_bytes_are_refused_or_decode_to_their_only_encoding(
        request in request(),
        answer in answer(),
        flips in vec((any::<usize>(), any::<u8>()), 0..4),
        cut in any::<usize>(),
    ) {
        for (kind, mut body) in [request.to_body(), answer.to_body()] {
            for (at, mask) in &flips {
                if !body.is_empty() {
                    let at = at % body.len();
                    body[at] ^= mask;
                }
            }
            if cut % 3 == 0 {
                body.truncate(cut % (body.len() + 1));
            }
            if let Ok(found) = Request::from_body(kind, &body) {
                prop_assert_eq!(found.to_body(), (kind, body.clone()));
            }
            if let Ok(found) = Answer::from_body(kind, &body) {
                prop_assert_eq!(found.to_body(), (kind, body));
            }
        }
    }

    #[test]
    fn a_header_decodes_to_itself_or_is_refused(bytes in any::<[u8; HEADER]>()) {
        if let Ok(header) = Header::from_bytes(&bytes, crate::cluster::protocol::MAX_BODY) {
            prop_assert_eq!(header.to_bytes(), bytes);
        }
        let mut small = bytes;
        small[2..4].fill(0);
        small[6..8].fill(0);
        prop_assert_eq!(Header::from_bytes(&small, crate::cluster::protocol::MAX_BODY).unwrap().to_bytes(), small);
    }
}
