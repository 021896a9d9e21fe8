//! Every message has one encoding.

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::{Just, Strategy, any, prop_assert_eq, prop_oneof, proptest};

use super::{Answer, Bytes, Change, Changed, Document, Put, Query, Request, View};
use crate::net::message::FAILURE_KINDS;

fn query() -> impl Strategy<Value = Query> {
    (any::<bool>(), ".{0,20}").prop_map(|(whole, text)| match whole {
        true => Query::Key(text),
        false => Query::Prefix(text),
    })
}

fn change() -> impl Strategy<Value = Change> {
    let put = (".{0,20}", vec(any::<u8>(), 0..50), option::of(any::<u32>()))
        .prop_map(|(key, value, seconds)| Put { key, value, seconds });
    let relies_on = vec((".{0,20}", any::<u64>()), 0..4);
    (relies_on, vec(query(), 0..4), vec(put, 0..4), any::<bool>()).prop_map(
        |(relies_on, removes, puts, relaxed)| Change { relies_on, removes, puts, relaxed },
    )
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        vec(query(), 0..5).prop_map(Request::Read),
        vec(query(), 0..5).prop_map(Request::Scan),
        (any::<Option<[u8; 16]>>(), change()).prop_map(|(t, c)| Request::Commit(t, c)),
        (".{0,20}", any::<(u64, u32)>())
            .prop_map(|(folder, (revision, time))| Request::Wait(folder, revision, time)),
        (".{0,20}", ".{0,20}", any::<u32>())
            .prop_map(|(prefix, before, limit)| Request::Last(prefix, before, limit)),
        (".{0,20}", any::<u64>()).prop_map(|(prefix, revision)| Request::Changed(prefix, revision)),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    let document = || {
        (vec(any::<u8>(), 0..50), any::<u64>())
            .prop_map(|(value, version)| Document { value, version })
    };
    let documents = || btree_map(".{0,20}", document(), 0..6);
    prop_oneof![
        documents().prop_map(|page| Answer::Page(page.into_iter().collect())),
        any::<(u64, u64)>()
            .prop_map(|(revision, documents)| Answer::Scanned { revision, documents }),
        Just(Answer::TooLarge),
        (any::<u64>(), documents())
            .prop_map(|(revision, documents)| Answer::View(View { revision, documents })),
        any::<bool>().prop_map(Answer::Committed),
        any::<bool>().prop_map(Answer::Waited),
        (any::<(u64, u64)>(), documents()).prop_map(|((revision, total), documents)| {
            Answer::Changed(Changed { view: View { revision, documents }, total })
        }),
        (0usize..5, ".{0,40}").prop_map(|(kind, text)| Answer::Failed(FAILURE_KINDS[kind], text)),
    ]
}

proptest! {
    #[test]
    fn a_message_decodes_to_what_was_encoded(request in request(), answer in answer()) {
        let (kind, body) = request.to_body();
        prop_assert_eq!(Request::from_body(kind, &body.into()).unwrap(), request);
        let (kind, body) = answer.to_body();
        prop_assert_eq!(Answer::from_body(kind, &body.into()).unwrap(), answer);
    }

    #[test]
    fn damaged_bytes_are_refused_or_are_the_one_encoding_of_a_message(
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
            let bytes = Bytes::copy_from_slice(&body);
            if let Ok(found) = Request::from_body(kind, &bytes) {
                prop_assert_eq!(found.to_body(), (kind, body.clone()));
            }
            if let Ok(found) = Answer::from_body(kind, &bytes) {
                prop_assert_eq!(found.to_body(), (kind, body));
            }
        }
    }
}
