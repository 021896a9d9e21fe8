//! Group commit: one thread stores the fragments of many puts with one sync.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::server::{Answers, Outgoing};
use super::store::{PeerStore, PutOrder, Room};
use crate::cluster::protocol::{Answer, Refusal};
use crate::collection::CollectionNumber;
use crate::encoding::fragment::Fragment;
use crate::error::{Error, Result};
use crate::net::limits::Memory;
use crate::net::message::reason_of;

/// While puts come quickly, the thread waits for more in steps of this length.
const GATHER_INTERVAL: Duration = Duration::from_millis(5);

/// The most such steps.
const MAX_GATHERS: usize = 8;

/// The bytes from which the thread does not wait for more. A client has 64 MiB on their way to all
/// its peers, and must not come to a halt.
const GROUP_COMMIT_BYTES: usize = 2 << 20;

/// How long no put must come before the table is written with few fragments.
const IDLE_BEFORE_SETTLE: Duration = Duration::from_secs(1);

/// The bytes of fragments that are written together.
const WRITE_BATCH_BYTES: usize = 8 << 20;

/// The most fragments that are written together. For each, the store looks up what is known of its
/// blob.
const WRITE_BATCH_FRAGMENTS: usize = 1024;

/// The most bytes of fragments that share one sync.
const MAX_GROUP_BYTES: usize = 64 << 20;

/// Fragments that a client puts.
pub(super) struct Put {
    pub(super) stamp: CollectionNumber,
    pub(super) fragments: Vec<Fragment>,
    /// The space that their client has reserved.
    pub(super) room: Arc<Room>,
    pub(super) reply_to: ReplyTo,
}

impl Put {
    fn bytes(&self) -> usize {
        self.fragments.iter().map(|one| one.block.len()).sum()
    }
}

/// Where the answer to a put goes.
pub(super) struct ReplyTo {
    pub(super) number: u64,
    pub(super) answers: Answers,
    pub(super) memory: Memory,
}

impl ReplyTo {
    fn answer(self, answer: Answer) {
        // The client may have disconnected.
        let _ = self.answers.send(Outgoing::new(self.number, answer, self.memory));
    }
}

/// A put whose fragments were written and are not durable yet.
struct Written {
    count: usize,
    /// The positions of refused fragments, and why.
    refused: Vec<(usize, Error)>,
    reply_to: ReplyTo,
}

impl Written {
    fn answer(self, flushed: &Result<()>) {
        let answer = match (flushed, self.refused.first()) {
            (Err(error), _) => failure(self.count, error),
            (Ok(()), None) => Answer::Stored,
            (Ok(()), Some((_, first))) => {
                let mut which = vec![None; self.count];
                self.refused
                    .iter()
                    .for_each(|(at, error)| which[*at] = Some(Refusal::because(error)));
                Answer::Refused { which, reason: reason_of(first) }
            }
        };
        self.reply_to.answer(answer);
    }
}

/// The answer to a put of `count` fragments that failed as a whole.
fn failure(count: usize, error: &Error) -> Answer {
    match Refusal::because(error) {
        Refusal::Full => {
            Answer::Refused { which: vec![Some(Refusal::Full); count], reason: reason_of(error) }
        }
        Refusal::Failed(_) => Answer::failed(error),
    }
}

/// Waits for the next put. Meanwhile it adds durable fragments to the table: at once if there are
/// many, and when no put comes for a while if there are few. In the latter case it also loads names
/// into the Bloom filter.
fn next_put(
    store: &PeerStore,
    waiting: &mut mpsc::UnboundedReceiver<Put>,
    runtime: &Handle,
) -> Option<Put> {
    let settle = |only_many| {
        if let Err(error) = store.settle(only_many) {
            tracing::warn!(%error, "failed to write the table of fragments; will retry");
        }
    };
    settle(true);
    let mut pause = IDLE_BEFORE_SETTLE;
    loop {
        if let Ok(next) = runtime.block_on(async { timeout(pause, waiting.recv()).await }) {
            return next;
        }
        settle(false);
        match store.read_names() {
            Ok(true) => pause = Duration::ZERO,
            Ok(false) => return waiting.blocking_recv(),
            Err(error) => {
                tracing::warn!(%error, "failed to read the table of fragments; will retry");
                return waiting.blocking_recv();
            }
        }
    }
}

/// Stores puts until all senders are gone.
pub(super) fn store_puts(
    store: &PeerStore,
    mut waiting: mpsc::UnboundedReceiver<Put>,
    runtime: &Handle,
) {
    let mut next = next_put(store, &mut waiting, runtime);
    let mut last = 0;
    while let Some(first) = next {
        let puts = gather(first, last > 1, &mut waiting);
        last = puts.len();
        let serving = store.serving();
        let (mut batch, mut bytes, mut count, mut group) = (Vec::new(), 0, 0, Vec::new());
        for one in puts {
            (bytes, count) = (bytes + one.bytes(), count + one.fragments.len());
            batch.push(one);
            if bytes >= WRITE_BATCH_BYTES || count >= WRITE_BATCH_FRAGMENTS {
                put(store, std::mem::take(&mut batch), &mut group);
                (bytes, count) = (0, 0);
            }
        }
        put(store, batch, &mut group);
        let flushed = store.flush();
        group.into_iter().for_each(|one| one.answer(&flushed));
        drop(serving);
        next = next_put(store, &mut waiting, runtime);
    }
}

/// Collects the puts that wait. A sync costs the same for one and for many, so with `more` to be
/// expected it also waits for the next ones. A put that comes alone does not wait.
fn gather(first: Put, more: bool, waiting: &mut mpsc::UnboundedReceiver<Put>) -> Vec<Put> {
    let mut bytes = first.bytes();
    let mut all = vec![first];
    for step in 0..=MAX_GATHERS {
        let before = all.len();
        while bytes < MAX_GROUP_BYTES
            && let Ok(more) = waiting.try_recv()
        {
            bytes += more.bytes();
            all.push(more);
        }
        let is_alone = step == 0 && !more && all.len() == 1;
        let is_end = step > 0 && all.len() == before;
        if is_alone || is_end || bytes >= GROUP_COMMIT_BYTES || step == MAX_GATHERS {
            break;
        }
        thread::sleep(GATHER_INTERVAL);
    }
    all
}

/// Writes a batch. Puts with fragments that were taken join the group that is to be synced.
fn put(store: &PeerStore, batch: Vec<Put>, group: &mut Vec<Written>) {
    if batch.is_empty() {
        return;
    }
    let mut fragments = Vec::new();
    // For each fragment, the position of its put and its position in the put.
    let mut owners = Vec::new();
    let (mut orders, mut written) = (Vec::new(), Vec::new());
    for (owner, one) in batch.into_iter().enumerate() {
        let count = one.fragments.len();
        owners.extend((0..count).map(|at| (owner, at)));
        fragments.extend(one.fragments);
        orders.push((one.stamp, one.room));
        written.push(Written { count, refused: Vec::new(), reply_to: one.reply_to });
    }
    let order = |at: usize| {
        let (stamp, room) = &orders[owners[at].0];
        PutOrder { stamp: *stamp, room: Some(room) }
    };
    match store.put_in(&fragments, order) {
        Err(error) => {
            for one in written {
                let answer = failure(one.count, &error);
                one.reply_to.answer(answer);
            }
        }
        Ok(results) => {
            for ((owner, at), result) in owners.into_iter().zip(results) {
                written[owner].refused.extend(result.err().map(|error| (at, error)));
            }
            let (taken, refused): (Vec<_>, Vec<_>) =
                written.into_iter().partition(|one| one.refused.len() < one.count);
            refused.into_iter().for_each(|one| one.answer(&Ok(())));
            group.extend(taken);
        }
    }
}
