//! Failures that the catalog does not know yet.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use cairn_store::{Consistency, NewSnapshot};

use super::{CommitQueue, Ending, record_failures};

fn failure(number: u64) -> (NewSnapshot, String) {
    let new = NewSnapshot {
        number,
        label: None,
        metadata: cairn_store::Metadata::default(),
        is_from_guest: false,
        size: 1 << 20,
        consistency: Consistency::Crash,
        time: 0,
        dirty_bytes: 0,
        pause_us: 0,
    };
    (new, "a reason".into())
}

/// Three checkpoints have failed.
fn queue() -> Mutex<CommitQueue> {
    Mutex::new(CommitQueue {
        commits: VecDeque::new(),
        numbers: 0..0,
        labels: HashMap::new(),
        unrecorded: [2, 3, 4].map(failure).into(),
        last_failed: None,
        closed: false,
    })
}

fn left(queue: &Mutex<CommitQueue>) -> Vec<u64> {
    queue.lock().unwrap().unrecorded.iter().map(|(new, _)| new.number).collect()
}

/// Each request of a catalog that does not answer takes seconds.
#[test]
fn a_catalog_that_does_not_answer_is_asked_once() {
    let queue = queue();
    let asked = RefCell::new(Vec::new());
    let ask = |ending| {
        let record = |new: &NewSnapshot, _: &str| {
            asked.borrow_mut().push(new.number);
            ending
        };
        record_failures(&queue, record, || false);
        asked.take()
    };
    assert_eq!(ask(Ending::Unrecorded), [2]);
    assert_eq!(ask(Ending::Unrecorded), [3], "the next time, another one is first");
    assert_eq!(left(&queue), [4, 2, 3]);
    assert_eq!(ask(Ending::Failed), [4, 2, 3]);
    assert!(left(&queue).is_empty());
}

#[test]
fn a_process_that_stops_records_no_further_failure() {
    let queue = queue();
    let asked = Cell::new(0);
    let record = |_: &NewSnapshot, _: &str| {
        asked.set(asked.get() + 1);
        Ending::Failed
    };
    record_failures(&queue, record, || asked.get() == 1);
    assert_eq!((asked.get(), left(&queue)), (1, vec![3, 4]));
}
