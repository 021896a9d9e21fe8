//! Storing what clients put: one thread, and one sync for all that waits.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::limits::Memory;
use super::server::{Answers, Outgoing};
use super::store::{PeerStore, Room};
use crate::cluster::protocol::Answer;
use crate::encoding::fragment::Fragment;
use crate::error::{Error, Result};
use crate::net::message::reason_of;

/// More fragments are waited for while some come within this time, so many times, and until there are so many bytes. A
/// client has 64 MiB of them on their way to all its peers, and must not come to a halt.
const GATHER_INTERVAL: Duration = Duration::from_millis(5);
const MAX_GATHERS: usize = 8;
const GROUP_COMMIT_BYTES: usize = 2 << 20;

/// How long nothing comes before the table is told of little.
const IDLE_BEFORE_SETTLE: Duration = Duration::from_secs(1);

/// Bytes of fragments that are written together, and how many at most: for each it is looked up what is known of its
/// blob.
const WRITE_BATCH_BYTES: usize = 8 << 20;
const WRITE_BATCH_FRAGMENTS: usize = 1024;

/// Bytes of fragments that wait for one sync at most.
const MAX_GROUP_BYTES: usize = 64 << 20;

/// Fragments on their way in.
pub(super) struct Put {
    pub(super) fragments: Vec<Fragment>,
    /// What their client has reserved.
    pub(super) room: Arc<Room>,
    pub(super) reply_to: ReplyTo,
}

impl Put {
    fn bytes(&self) -> usize {
        self.fragments.iter().map(|one| one.block.len()).sum()
    }
}

/// Who waits for the answer to a put.
pub(super) struct ReplyTo {
    pub(super) number: u64,
    pub(super) answers: Answers,
    pub(super) memory: Memory,
}

impl ReplyTo {
    fn answer(self, answer: Answer) {
        // The client may have gone.
        let _ = self.answers.send(Outgoing::new(self.number, answer, self.memory));
    }
}

/// Fragments that were written, and who waits until they are durable; `refused` are those among them that were not.
struct Written {
    count: usize,
    refused: Vec<(usize, Error)>,
    reply_to: ReplyTo,
}

impl Written {
    fn answer(self, flushed: &Result<()>) {
        let answer = match (flushed, self.refused.first()) {
            (Err(error), _) => Answer::failed(error),
            (Ok(()), None) => Answer::Stored,
            (Ok(()), Some((_, first))) => {
                let mut which = vec![None; self.count];
                self.refused.iter().for_each(|(at, error)| which[*at] = Some(error.kind()));
                Answer::Refused { which, reason: reason_of(first) }
            }
        };
        self.reply_to.answer(answer);
    }
}

/// Waits for something to store. The table is told meanwhile what is durable: of much at once, of little when nothing
/// comes for a while. Then its names are read, too.
fn next_put(
    store: &PeerStore,
    waiting: &mut mpsc::UnboundedReceiver<Put>,
    runtime: &Handle,
) -> Option<Put> {
    let settle = |much| {
        if let Err(error) = store.settle(much) {
            tracing::warn!(%error, "the table of fragments cannot be written; it is tried again");
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
                tracing::warn!(%error, "the table of fragments cannot be read; it is tried again");
                return waiting.blocking_recv();
            }
        }
    }
}

/// Stores what comes, until nobody is left who could send more.
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
        next = next_put(store, &mut waiting, runtime);
    }
}

/// What waits; and, since a sync costs the same for one and for many, what comes in the next moments, if there are `more`
/// to be expected. One that comes alone does not wait.
fn gather(first: Put, more: bool, waiting: &mut mpsc::UnboundedReceiver<Put>) -> Vec<Put> {
    let mut bytes = first.bytes();
    let mut all = vec![first];
    for time in 0..=MAX_GATHERS {
        let before = all.len();
        while bytes < MAX_GROUP_BYTES
            && let Ok(more) = waiting.try_recv()
        {
            bytes += more.bytes();
            all.push(more);
        }
        let is_alone = time == 0 && !more && all.len() == 1;
        let is_end = time > 0 && all.len() == before;
        if is_alone || is_end || bytes >= GROUP_COMMIT_BYTES || time == MAX_GATHERS {
            break;
        }
        thread::sleep(GATHER_INTERVAL);
    }
    all
}

/// Writes a batch. What was taken joins the group that is to be synced.
fn put(store: &PeerStore, batch: Vec<Put>, group: &mut Vec<Written>) {
    if batch.is_empty() {
        return;
    }
    let mut fragments = Vec::new();
    // For each fragment, whose it is, and which of those.
    let mut owners = Vec::new();
    let (mut rooms, mut written) = (Vec::new(), Vec::new());
    for (owner, one) in batch.into_iter().enumerate() {
        let count = one.fragments.len();
        owners.extend((0..count).map(|at| (owner, at)));
        fragments.extend(one.fragments);
        rooms.push(one.room);
        written.push(Written { count, refused: Vec::new(), reply_to: one.reply_to });
    }
    match store.put_in(&fragments, |at| Some(&*rooms[owners[at].0])) {
        Err(error) => {
            written.into_iter().for_each(|one| one.reply_to.answer(Answer::failed(&error)))
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
