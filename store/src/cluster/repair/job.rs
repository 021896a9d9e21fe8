//! Repairing everything: many blobs at once, the most endangered first.
//!
//! ```text
//! blobs ──► scan: ask all peers in batches, plan ──► those with something to do, by danger ──► groups
//!
//! group: ask again ──► plan ──► steps of all its blobs at once ──► ask again … until there is nothing to do
//! ```
//!
//! Everything is decided by what peers say just then, so nothing has to be remembered: a repair that ends at any
//! point leaves nothing half done, and the next one goes on. There must be one at a time: two that see different
//! members might each drop what the other keeps.
//!
//! A peer that does not answer counts as down from there on, one that takes nothing as full. Memory is bounded:
//! by blocks that are in memory, and by blobs that wait. If more than [`WINDOW`] have something to do, they are done
//! before others are looked at.

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

/// Blobs that peers are asked about at once.
const BATCH: usize = 1024;

/// Blobs that wait at most: some 40 MiB.
const WINDOW: usize = 1 << 20;

/// Blobs that are worked on together.
const GROUP: usize = 128;

/// Groups at a time.
const GROUPS: usize = 4;

/// How often a blob is looked at: what is missing, what is surplus then, and again for what fails.
const ROUNDS: usize = 6;

/// How soon it is noticed that the repair is to stop.
const NOTICE: Duration = Duration::from_millis(100);

/// Limits of a repair.
#[derive(Clone, Copy, Debug)]
pub struct RepairLimits {
    /// The most bytes that are read and written in a second, together.
    pub rate: Option<u64>,
    /// The most bytes of blocks in memory. A blob that needs more is worked on alone.
    pub memory: usize,
}

impl Default for RepairLimits {
    fn default() -> RepairLimits {
        RepairLimits { rate: None, memory: 64 << 20 }
    }
}

/// What all parts of a repair share.
pub(super) struct Shared<P> {
    pub(super) peers: Arc<P>,
    throttle: Arc<RateLimiter>,
    inner: Arc<Inner>,
}

struct Inner {
    members: Mutex<RepairMembers>,
    /// In KiB.
    memory: Arc<Semaphore>,
    most: u32,
    stop: AtomicBool,
}

impl<P> Clone for Shared<P> {
    fn clone(&self) -> Self {
        let Shared { peers, throttle, inner } = self;
        Shared { peers: peers.clone(), throttle: throttle.clone(), inner: inner.clone() }
    }
}

impl<P> Shared<P> {
    fn members(&self) -> RepairMembers {
        self.inner.members.lock().expect("no code panics with the members locked").clone()
    }

    /// A peer did not answer. One that is drained stays so: what it has is made again elsewhere.
    pub(super) fn set_down(&self, peer: &PeerId) {
        let mut members =
            self.inner.members.lock().expect("no code panics with the members locked");
        if members.find(peer).is_some_and(|at| members.nodes()[at].state == PeerState::Up) {
            tracing::warn!(%peer, "a peer does not answer and counts as down");
            members.set_state(peer, PeerState::Down);
        }
    }

    /// A peer did not take something.
    pub(super) fn set_full(&self, peer: &PeerId) {
        self.inner.members.lock().expect("no code panics with the members locked").set_full(peer);
    }

    /// Waits until so many bytes are allowed; or the repair is to stop.
    pub(super) async fn throttle(&self, bytes: u64) {
        let mut wait = self.throttle.take(bytes);
        while wait > Duration::ZERO && !self.is_stopped() {
            let part = wait.min(NOTICE);
            sleep(part).await;
            wait -= part;
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.inner.stop.load(Ordering::Relaxed)
    }
}

/// A blob that something is to be done for.
struct Work {
    survives: i32,
    blob: BlobId,
    wanted: Redundancy,
}

/// Repairs blobs until there are no more of them to come, or `goes_on` says no. Each blob that must exist is to come
/// once for each number of blocks that it is wanted with; copies with the greatest number that is wanted.
/// `progress` is told what was done so far.
pub async fn repair<P: Peers>(
    peers: Arc<P>,
    members: RepairMembers,
    mut blobs: mpsc::Receiver<(BlobId, Redundancy)>,
    how: RepairLimits,
    goes_on: &dyn Fn() -> bool,
    progress: &dyn Fn(&Report),
) -> Report {
    let most = (how.memory / 1024).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize)) as u32;
    let inner = Inner {
        members: Mutex::new(members),
        memory: Arc::new(Semaphore::new(most as usize)),
        most,
        stop: AtomicBool::new(false),
    };
    let shared =
        Shared { peers, throttle: Arc::new(RateLimiter::new(how.rate)), inner: Arc::new(inner) };
    let mut report = Report::default();
    let mut is_end = false;
    while !is_end {
        let mut waiting: Vec<Work> = Vec::new();
        while waiting.len() < WINDOW && !is_end {
            let mut batch = Vec::with_capacity(BATCH);
            is_end = blobs.recv_many(&mut batch, BATCH).await == 0;
            report.is_stopped |= !goes_on();
            if report.is_stopped {
                return report;
            }
            waiting.extend(shared.scan(&batch, &mut report).await);
            progress(&report);
        }
        waiting.sort_by_key(|work| work.survives);
        shared.work(waiting, &mut report, goes_on, progress).await;
        if report.is_stopped {
            return report;
        }
    }
    report
}

impl<P: Peers> Shared<P> {
    /// Looks at blobs. Returns those that something is to be done for.
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

    /// Asks everybody about blobs. Returns what was found of each, and the members as they were found.
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
                    tracing::warn!(%peer, %error, "a peer does not tell what it has");
                    self.set_down(&peer);
                }
            }
        }
        // Whoever answers first is not preferred.
        found.iter_mut().for_each(|found| {
            found.sort_unstable_by_key(|one| (one.encoding, one.index, one.peer));
        });
        (self.members(), found)
    }

    /// Works on all that waits, some groups at a time.
    async fn work(
        &self,
        waiting: Vec<Work>,
        report: &mut Report,
        goes_on: &dyn Fn() -> bool,
        progress: &dyn Fn(&Report),
    ) {
        let mut groups = JoinSet::new();
        let mut waiting = waiting.into_iter().peekable();
        loop {
            while groups.len() < GROUPS && waiting.peek().is_some() && !self.is_stopped() {
                let next = waiting.by_ref().take(GROUP);
                let entries = next.map(|work| Entry::new(work.blob, work.wanted)).collect();
                let shared = self.clone();
                groups.spawn(async move { shared.group(entries).await });
            }
            match timeout(NOTICE, groups.join_next()).await {
                Ok(None) => break,
                Ok(Some(Ok(done))) => {
                    report.add(done);
                    progress(report);
                }
                Ok(Some(Err(error))) => {
                    report.fail(format!("a part of the repair has ended: {error}"))
                }
                Err(_) => {}
            }
            if !goes_on() {
                self.inner.stop.store(true, Ordering::Relaxed);
            }
        }
        report.is_stopped |= self.is_stopped();
    }

    /// Works on some blobs until there is nothing left to do for them.
    async fn group(&self, mut entries: Vec<Entry>) -> Report {
        let mut report = Report::default();
        for round in 0..=ROUNDS {
            let blobs: Vec<BlobId> = entries.iter().map(|entry| entry.blob).collect();
            let (members, found) = self.look(&blobs).await;
            let mut executing = JoinSet::new();
            for (entry, holdings) in entries.drain(..).zip(found) {
                let holdings = entry.sift(holdings);
                let plan = plan(&entry.blob, entry.wanted, &members, &holdings);
                let is_over = round == ROUNDS || self.is_stopped();
                if entry.is_idle(&plan) || is_over {
                    report.settle(&entry.blob, &plan);
                    if let Some(reason) = entry.reason.clone().filter(|_| !entry.is_idle(&plan)) {
                        report.fail(format!("blob {}: {reason}", entry.blob));
                    }
                    continue;
                }
                let shared = self.clone();
                executing.spawn(async move { shared.mend(entry, holdings, &plan).await });
            }
            while let Some(mended) = executing.join_next().await {
                match mended {
                    Ok((entry, done)) => {
                        report.add(done);
                        entries.push(entry);
                    }
                    Err(error) => report.fail(format!("a part of the repair has ended: {error}")),
                }
            }
            if entries.is_empty() {
                break;
            }
        }
        report
    }

    async fn mend(&self, entry: Entry, holdings: Vec<Holding>, plan: &Plan) -> (Entry, Report) {
        let mut executing = Executor::new(self, entry, holdings);
        let units = executing.memory(plan).div_ceil(1024).clamp(1, self.inner.most as usize) as u32;
        let memory = self.inner.memory.clone().acquire_many_owned(units).await;
        executing.execute(plan).await;
        drop(memory);
        (executing.entry, executing.done)
    }
}
