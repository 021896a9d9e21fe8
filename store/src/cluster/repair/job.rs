//! The repair job: many blobs at once, the most endangered first.
//!
//! ```text
//! blobs ──► scan: ask all peers in batches, plan ──► blobs with steps, by danger ──► groups
//!
//! group: ask again ──► plan ──► steps of all its blobs at once ──► … until no steps are left
//! ```
//!
//! Every decision follows from what the peers answer at that moment, so nothing has to be
//! remembered: a repair that ends at any point leaves nothing half done, and the next one
//! continues. Only one repair may run at a time: two repairs that see different members could each
//! drop what the other keeps.
//!
//! A peer that does not answer counts as down from then on. A peer that refuses a fragment counts
//! as full. Memory is bounded: the bytes of blocks ([`RepairLimits::memory`]) and the blobs that
//! wait ([`MAX_WAITING`]). If more blobs than that have steps, they are repaired before others are
//! scanned.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::execute::{Entry, Executor};
use super::members::{PeerState, RepairMembers};
use super::peers::Peers;
use super::plan::{Holding, Plan, plan};
use super::rate_limiter::RateLimiter;
use super::report::Report;
use crate::encoding::redundancy::Redundancy;
use crate::id::{BlobId, PeerId};

/// The blobs in one question to the peers.
const QUERY_BATCH: usize = 1024;

/// The most blobs that wait for work, some 40 MiB.
const MAX_WAITING: usize = 1 << 20;

/// The blobs in a group.
const GROUP_BLOBS: usize = 128;

/// The groups that are worked on at a time.
const PARALLEL_GROUPS: usize = 4;

/// The rounds of asking and planning for one blob: for what is missing, for what is surplus then,
/// and for steps that fail.
const MAX_ROUNDS: usize = 6;

/// How often a repair checks whether it has to stop.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The limits of a repair.
#[derive(Clone, Copy, Debug)]
pub struct RepairLimits {
    /// The most bytes a second, read and written together.
    pub rate: Option<u64>,
    /// The most bytes of blocks in memory. A blob that needs more is repaired alone.
    pub memory: usize,
}

impl Default for RepairLimits {
    fn default() -> RepairLimits {
        RepairLimits { rate: None, memory: 64 << 20 }
    }
}

/// The state that all tasks of a repair share.
pub(super) struct Shared<P> {
    pub(super) peers: Arc<P>,
    rate_limiter: Arc<RateLimiter>,
    inner: Arc<Inner>,
}

struct Inner {
    members: Mutex<RepairMembers>,
    /// The memory for blocks, in KiB.
    memory: Arc<Semaphore>,
    memory_kib: u32,
    stop: AtomicBool,
}

impl<P> Clone for Shared<P> {
    fn clone(&self) -> Self {
        let Shared { peers, rate_limiter, inner } = self;
        Shared { peers: peers.clone(), rate_limiter: rate_limiter.clone(), inner: inner.clone() }
    }
}

impl<P> Shared<P> {
    fn members(&self) -> RepairMembers {
        self.inner.members.lock().expect("no code panics with the members locked").clone()
    }

    /// Marks a peer that did not answer as down. A draining peer stays draining: what it has is
    /// stored elsewhere.
    pub(super) fn set_down(&self, peer: &PeerId) {
        let mut members =
            self.inner.members.lock().expect("no code panics with the members locked");
        if members.find(peer).is_some_and(|at| members.nodes()[at].state == PeerState::Up) {
            tracing::warn!(%peer, "a peer does not answer; it counts as down");
            members.set_state(peer, PeerState::Down);
        }
    }

    /// Marks a peer that refused a fragment as full.
    pub(super) fn set_full(&self, peer: &PeerId) {
        self.inner.members.lock().expect("no code panics with the members locked").set_full(peer);
    }

    /// Waits until the rate limit allows `bytes` more bytes, or the repair has to stop.
    pub(super) async fn throttle(&self, bytes: u64) {
        let mut wait = self.rate_limiter.take(bytes);
        while wait > Duration::ZERO && !self.is_stopped() {
            let part = wait.min(STOP_CHECK_INTERVAL);
            sleep(part).await;
            wait -= part;
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.inner.stop.load(Ordering::Relaxed)
    }
}

/// A blob that has steps to carry out.
struct Work {
    survives: i32,
    blob: BlobId,
    wanted: Redundancy,
}

/// Repairs all blobs from the channel, until it ends or `should_continue` returns false.
///
/// The channel must deliver each blob that must exist once for each number of blocks that it is
/// wanted with. Of copies it must deliver the greatest number that is wanted. `progress` gets the
/// report so far.
pub async fn repair<P: Peers>(
    peers: Arc<P>,
    members: RepairMembers,
    mut blobs: mpsc::Receiver<(BlobId, Redundancy)>,
    limits: RepairLimits,
    should_continue: &dyn Fn() -> bool,
    progress: &dyn Fn(&Report),
) -> Report {
    let memory_kib =
        (limits.memory / 1024).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize)) as u32;
    let inner = Inner {
        members: Mutex::new(members),
        memory: Arc::new(Semaphore::new(memory_kib as usize)),
        memory_kib,
        stop: AtomicBool::new(false),
    };
    let shared = Shared {
        peers,
        rate_limiter: Arc::new(RateLimiter::new(limits.rate)),
        inner: Arc::new(inner),
    };
    let mut report = Report::default();
    let mut is_end = false;
    while !is_end {
        let mut waiting: Vec<Work> = Vec::new();
        while waiting.len() < MAX_WAITING && !is_end {
            let mut batch = Vec::with_capacity(QUERY_BATCH);
            is_end = blobs.recv_many(&mut batch, QUERY_BATCH).await == 0;
            report.is_stopped |= !should_continue();
            if report.is_stopped {
                return report;
            }
            waiting.extend(shared.scan(&batch, &mut report).await);
            progress(&report);
        }
        waiting.sort_by_key(|work| work.survives);
        shared.work(waiting, &mut report, should_continue, progress).await;
        if report.is_stopped {
            return report;
        }
    }
    report
}

impl<P: Peers> Shared<P> {
    /// Plans a batch of blobs. Returns the blobs that have steps.
    async fn scan(&self, batch: &[(BlobId, Redundancy)], report: &mut Report) -> Vec<Work> {
        let blobs: Vec<BlobId> = batch.iter().map(|(blob, _)| *blob).collect();
        let (members, found) = self.look(&blobs).await;
        let mut work = Vec::new();
        for ((blob, wanted), holdings) in batch.iter().zip(found) {
            let plan = plan(blob, *wanted, &members, &holdings);
            report.blobs += 1;
            report.under += u64::from(plan.missing > 0);
            match plan.steps.is_empty() {
                true => report.settle(blob, &plan),
                false => {
                    work.push(Work { survives: plan.survives, blob: *blob, wanted: *wanted });
                }
            }
        }
        work
    }

    /// Asks all live peers about blobs. Returns what they have of each, and the members as they
    /// turned out to be.
    async fn look(&self, blobs: &[BlobId]) -> (RepairMembers, Vec<Vec<Holding>>) {
        let mut found = vec![Vec::new(); blobs.len()];
        if blobs.is_empty() {
            return (self.members(), found);
        }
        let mut asked = JoinSet::new();
        let blobs: Arc<[BlobId]> = blobs.into();
        for node in self.members().nodes().iter().filter(|node| node.is_live()) {
            let (peers, blobs, peer) = (self.peers.clone(), blobs.clone(), node.id);
            asked.spawn(async move { (peer, peers.have(peer, &blobs).await) });
        }
        while let Some(answer) = asked.join_next().await {
            let Ok((peer, answer)) = answer else { continue };
            match answer {
                Ok(held) if held.len() == blobs.len() => {
                    for (found, held) in found.iter_mut().zip(held) {
                        found.extend(held.into_iter().map(|one| Holding {
                            peer,
                            encoding: one.encoding,
                            data: one.data,
                            parity: one.parity,
                            index: one.index,
                            len: one.len,
                        }));
                    }
                }
                Ok(_) => self.set_down(&peer),
                Err(error) => {
                    tracing::warn!(%peer, %error, "failed to ask a peer which fragments it has");
                    self.set_down(&peer);
                }
            }
        }
        // The order does not depend on which peer answers first.
        found.iter_mut().for_each(|found| {
            found.sort_unstable_by_key(|one| (one.encoding, one.index, one.peer));
        });
        (self.members(), found)
    }

    /// Works on all waiting blobs, some groups at a time.
    async fn work(
        &self,
        waiting: Vec<Work>,
        report: &mut Report,
        should_continue: &dyn Fn() -> bool,
        progress: &dyn Fn(&Report),
    ) {
        let mut groups = JoinSet::new();
        let mut waiting = waiting.into_iter().peekable();
        loop {
            while groups.len() < PARALLEL_GROUPS && waiting.peek().is_some() && !self.is_stopped() {
                let next = waiting.by_ref().take(GROUP_BLOBS);
                let entries = next.map(|work| Entry::new(work.blob, work.wanted)).collect();
                let shared = self.clone();
                groups.spawn(async move { shared.group(entries).await });
            }
            match timeout(STOP_CHECK_INTERVAL, groups.join_next()).await {
                Ok(None) => break,
                Ok(Some(Ok(done))) => {
                    report.add(done);
                    progress(report);
                }
                Ok(Some(Err(error))) => report.fail(format!("a repair task panicked: {error}")),
                Err(_) => {}
            }
            if !should_continue() {
                self.inner.stop.store(true, Ordering::Relaxed);
            }
        }
        report.is_stopped |= self.is_stopped();
    }

    /// Works on a group of blobs until no steps are left for them.
    async fn group(&self, mut entries: Vec<Entry>) -> Report {
        let mut report = Report::default();
        for round in 0..=MAX_ROUNDS {
            let blobs: Vec<BlobId> = entries.iter().map(|entry| entry.blob).collect();
            let (members, found) = self.look(&blobs).await;
            let mut executing = JoinSet::new();
            for (entry, holdings) in entries.drain(..).zip(found) {
                let holdings = entry.without_damaged(holdings);
                let plan = plan(&entry.blob, entry.wanted, &members, &holdings);
                let is_over = round == MAX_ROUNDS || self.is_stopped();
                if entry.is_idle(&plan) || is_over {
                    report.settle(&entry.blob, &plan);
                    if let Some(reason) = entry.reason.clone().filter(|_| !entry.is_idle(&plan)) {
                        report.fail(format!("blob {}: {reason}", entry.blob));
                    }
                    continue;
                }
                let shared = self.clone();
                executing.spawn(async move { shared.execute(entry, holdings, &plan).await });
            }
            while let Some(executed) = executing.join_next().await {
                match executed {
                    Ok((entry, done)) => {
                        report.add(done);
                        entries.push(entry);
                    }
                    Err(error) => report.fail(format!("a repair task panicked: {error}")),
                }
            }
            if entries.is_empty() {
                break;
            }
        }
        report
    }

    async fn execute(&self, entry: Entry, holdings: Vec<Holding>, plan: &Plan) -> (Entry, Report) {
        let mut executing = Executor::new(self, entry, holdings);
        let kib =
            executing.memory(plan).div_ceil(1024).clamp(1, self.inner.memory_kib as usize) as u32;
        let memory = self.inner.memory.clone().acquire_many_owned(kib).await;
        executing.execute(plan).await;
        drop(memory);
        (executing.entry, executing.done)
    }
}
