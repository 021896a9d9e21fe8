//! The messages of clients and guests, and the answers.

use std::iter;
use std::sync::LazyLock;

use cairn_agent::{
    Checkpoint, Event, Failed, MAX_LINE, Refusal, RefusalKind, Request, Wait, is_valid_label,
};
use cairn_store::{Selector, SnapshotRef};
use tokio::runtime::{Builder, Runtime};

use super::{flip, take};
use crate::control::session::{next_line, parse};

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_time().build().expect("a runtime"));

/// Messages with every field that a message can have, for the fuzzer to start with.
const EXAMPLES: [&str; 12] = [
    "",
    r#"{"op":"checkpoint","label":"a","consistency":"filesystem","wait":"stable","metadata":{"a":"b"}}"#,
    r#"{"op":"obsolete","keep_last":2}"#,
    r#"{"op":"obsolete","number":3}"#,
    r#"{"event":"marked","snapshots":["a@1"]}"#,
    r#"{"op":"stats"}"#,
    r#"{"op":"follow","number":3}"#,
    r#"{"event":"stable","snapshot":"a@1","number":1,"dirty_bytes":0,"stored_bytes":0,"elapsed_ms":0}"#,
    r#"{"event":"failed","snapshot":"a@1","number":1,"reason":"\u00e4"}"#,
    r#"{"event":"snapshots","snapshots":[{"snapshot":"a@1","label":"b","state":"stable","time":1}],"omitted":1}"#,
    r#"{"event":"error","kind":"busy","message":"c"}"#,
    r#"{"event":"status","protocol":1,"image":"a","parent":"a@1","size":1,"chunk_size":1,"read_only":false,"connected":true,"dirty_bytes":0,"present_bytes":0,"pending":[{"snapshot":"a@2","chunks":1,"done":0}],"checkpoint_error":"d","queues":[]}"#,
];

/// Takes `data` as everything that a client sends. The first bytes can put an example with flipped
/// bits before it, and blanks, so that the first line has about the maximum length.
pub fn messages(mut data: &[u8]) {
    let [example, flips, blanks] = take(&mut data);
    let mut said = EXAMPLES[usize::from(example) % EXAMPLES.len()].as_bytes().to_vec();
    let (flips, rest) = data.split_at(data.len().min(3 * usize::from(flips % 8)));
    if !said.is_empty() {
        flip(&mut said, flips);
    }
    said.extend(rest);
    if blanks >= 0xe0 {
        let first = said.iter().position(|byte| *byte == b'\n').map_or(said.len(), |at| at + 1);
        let wanted = MAX_LINE - 1 + usize::from(blanks % 4);
        said.splice(..0, iter::repeat_n(b' ', wanted.saturating_sub(first)));
    }
    RUNTIME.block_on(listen(&said));
    let text = String::from_utf8_lossy(rest).into_owned();
    let label = Some(text.clone());
    check_request(&Request::Checkpoint(Checkpoint { label, ..Checkpoint::default() }));
    let refusal = Refusal { kind: RefusalKind::Invalid, message: text.clone() };
    check_event(&Event::Error(refusal));
    check_event(&Event::Failed(Failed { snapshot: text.clone(), number: 1, reason: text.clone() }));
    // The catalog accepts exactly the labels that are accepted here.
    let named = format!("vm1@{text}").parse::<SnapshotRef>().ok();
    let is_label = named.is_some_and(|named| named.selector == Selector::Label(text.clone()));
    assert_eq!(is_valid_label(&text), is_label);
}

async fn listen(said: &[u8]) {
    let mut rest = said;
    loop {
        let before = rest;
        let Some(line) = next_line(&mut rest).await.expect("memory does not fail") else { break };
        assert!(!line.is_empty() && line.len() <= MAX_LINE + 1);
        assert_eq!(before, [&line, rest].concat(), "nothing is left out");
        assert!(line.ends_with(b"\n") || line.len() > MAX_LINE || rest.is_empty());
        assert!(!line[..line.len() - 1].contains(&b'\n'));
        if let Ok(event) = serde_json::from_slice::<Event>(&line) {
            check_event(&event);
            assert!(event.is_final(Wait::Accepted), "no exchange goes on without end");
        }
        match parse(&line) {
            Ok(request) => {
                assert!(line.len() <= MAX_LINE);
                check_request(&request);
            }
            Err(why) => {
                assert!(why.len() < 1024, "the refusal fits into a line");
                return;
            }
        }
    }
    assert!(rest.is_empty());
}

/// A request is one line, and parsing the line returns the request.
fn check_request(request: &Request) {
    let line = serde_json::to_vec(request).expect("every request has a form");
    assert!(!line.contains(&b'\n'));
    assert_eq!(&serde_json::from_slice::<Request>(&line).expect("it is a request"), request);
}

/// An event is one line, and parsing the line returns the event.
fn check_event(event: &Event) {
    let line = serde_json::to_vec(event).expect("every event has a form");
    assert!(!line.contains(&b'\n'));
    assert_eq!(&serde_json::from_slice::<Event>(&line).expect("it is an event"), event);
}
