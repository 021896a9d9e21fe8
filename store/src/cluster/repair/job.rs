//! The repair job: many blobs at once, the most endangered first.
//!
//! ```text
//! blobs, sorted ─► scan: merge with the ─┬─► blobs with steps, by danger ──► pass that adds
//!                  peers' lists, plan    │                                        │
//!                                        └─► blobs with surplus ──► pass that removes
//!
//! group: ask about its blobs ──► plan ──► steps of all at once ──► … until no steps are left
//! ```
//!
//! The scan does not ask about each blob: a list of each peer's fragments costs the same however many
//! peers there are. A list may be older than the question of a group, by some seconds. So a scan only
//! decides which blobs to look at again; every step follows from a plan that a group made.
//!
//! The first pass only adds. The second one deletes the surplus of a blob after it has read, decoded
//! and compared what is kept. It adds, too, if what is kept turns out to be wrong. A blob that has
//! what it needs, where it needs it, and nothing else, is not read.
//!
//! Every decision follows from what the peers answer at that moment, so nothing has to be
//! remembered: a repair that ends at any point leaves nothing half done, and the next one
//! continues. Only one repair may run at a time: two repairs that see different members could each
//! delete what the other keeps.
//!
//! A peer that does not answer, or whose list is refused, counts as down from then on. Blobs that were
//! planned before were planned with what it had. A peer that has no space for a fragment counts as
//! full.
//!
//! Memory is bounded: the bytes of blocks ([`RepairLimits::memory`]), the pages of the lists, and the
//! blobs that wait ([`MAX_WAITING`]). If more blobs than that have something to do, they are repaired
//! before others are scanned. That may take hours, so the lists begin anew after it.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::entry::Entry;
use super::execute::Executor;
use super::listings::{Listings, predecessor};
use super::members::RepairMembers;
use super::peers::Peers;
use super::plan::{Findings, Holding, Plan, Wanted, plan};
use super::report::Report;
use super::shared::{RepairLimits, STOP_CHECK_INTERVAL, Shared};
use crate::error::ErrorKind;
use crate::id::{BlobId, PeerId};

/// The blobs that are planned at a time.
pub(super) const SCAN_BATCH: usize = if cfg!(test) { 4 } else { 1024 };

/// The most blobs that wait for work, some 50 MiB.
const MAX_WAITING: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// The blobs in a group.
const GROUP_BLOBS: usize = 128;

/// The groups that are worked on at a time.
const PARALLEL_GROUPS: usize = 4;

/// A blob with something to do.
struct Work {
    wanted: Wanted,
    survives: i32,
    /// See [`Entry::stored`].
    stored: u8,
}

impl Work {
    fn entry(&self) -> Entry {
        Entry::new(self.wanted, self.stored.into())
    }
}

/// What a group of blobs may have done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Only add. Blobs with surplus are left for the other pass.
    Add,
    /// Delete surplus.
    Remove,
}

/// The result of the work on some blobs.
#[derive(Default)]
pub(super) struct WorkResult {
    pub(super) report: Report,
    /// Blobs with surplus that was left.
    surplus: Vec<Work>,
}

/// Repairs all blobs from the channel, until it ends or `should_continue` returns false.
///
/// The channel must deliver the blobs that must exist in the order of their names, each once for each
/// kind and number of blocks that it is wanted with. Of copies it must deliver the greatest number that
/// is wanted. `progress` gets the report so far; see [`Report::newly_short`].
pub async fn repair<P: Peers>(
    peers: Arc<P>,
    members: RepairMembers,
    mut blobs: mpsc::Receiver<Wanted>,
    limits: RepairLimits,
    should_continue: &dyn Fn() -> bool,
    progress: &dyn Fn(&Report),
) -> Report {
    let shared = Shared::new(peers, members, limits);
    let mut report = Report::default();
    let mut is_end = false;
    let mut after = BlobId::from_bytes([0; 32]);
    while !is_end {
        let mut listings = shared.listings(after);
        let (mut lacking, mut surplus) = (Vec::new(), Vec::new());
        while lacking.len() + surplus.len() < MAX_WAITING && !is_end {
            let mut batch = Vec::with_capacity(SCAN_BATCH);
            is_end = blobs.recv_many(&mut batch, SCAN_BATCH).await == 0;
            report.is_stopped |= !should_continue();
            if report.is_stopped {
                return report;
            }
            for (plan, work) in shared.scan(&batch, &mut listings, &mut report).await {
                if plan.steps.is_empty() { surplus.push(work) } else { lacking.push(work) }
            }
            // The next batch may begin with the same blob, wanted with another kind or code.
            after = batch.last().map_or(after, |wanted| predecessor(&wanted.blob));
            report.advance(progress);
        }
        drop(listings);
        lacking.sort_unstable_by_key(|work| (work.survives, work.wanted.blob));
        let more = shared.work(lacking, Pass::Add, &mut report, should_continue, progress).await;
        surplus.extend(more);
        shared.work(surplus, Pass::Remove, &mut report, should_continue, progress).await;
        if report.is_stopped {
            return report;
        }
    }
    report
}

impl<P: Peers> Shared<P> {
    /// The lists of all live peers, from the blobs after `after` on.
    pub(super) fn listings(&self, after: BlobId) -> Listings<P> {
        let members = self.members();
        let live = members.nodes().iter().filter(|node| node.is_live());
        let live: Vec<PeerId> = live.map(|node| node.id).collect();
        Listings::new(self.peers.clone(), &live, after)
    }

    /// Plans a batch of blobs. Returns the blobs with something to do.
    async fn scan(
        &self,
        batch: &[Wanted],
        listings: &mut Listings<P>,
        report: &mut Report,
    ) -> Vec<(Plan, Work)> {
        let mut found = Vec::with_capacity(batch.len());
        for wanted in batch {
            found.push(listings.holdings(&wanted.blob).await);
        }
        for (peer, error) in listings.take_failures() {
            tracing::warn!(%peer, %error, "failed to list the fragments of a peer");
            if error.kind() != ErrorKind::Unavailable {
                report.fail(format!("peer {peer} counts as down: {error}"));
            }
            self.set_down(&peer);
            // As of a peer that does not answer, nothing of it counts in this batch.
            found.iter_mut().for_each(|found| found.retain(|one| one.peer != peer));
        }
        let members = self.members();
        let mut work = Vec::new();
        for (wanted, holdings) in batch.iter().zip(found) {
            let plan = plan(wanted, &members, &holdings, &Findings::default());
            report.blobs += 1;
            report.under += u64::from(plan.is_short);
            match plan.is_empty() {
                true => report.settle(&wanted.blob, &plan),
                false => {
                    let survives = plan.survives;
                    work.push((plan, Work { wanted: *wanted, survives, stored: 0 }));
                }
            }
        }
        work
    }

    /// Asks all live peers about blobs. Returns what they have of each, and the members as they
    /// turned out to be.
    pub(super) async fn look(&self, blobs: &[BlobId]) -> (RepairMembers, Vec<Vec<Holding>>) {
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
                    let seals = self.peers.seals();
                    for ((found, blob), held) in found.iter_mut().zip(&*blobs).zip(held) {
                        let holding = |one| Holding::new(peer, blob, one, seals);
                        found.extend(held.iter().map(holding));
                    }
                }
                Ok(_) => self.set_down(&peer),
                Err(error) => {
                    tracing::warn!(%peer, %error, "failed to ask a peer which fragments it has");
                    self.set_down(&peer);
                }
            }
        }
        found.iter_mut().for_each(|found| found.sort_unstable_by_key(Holding::order));
        (self.members(), found)
    }

    /// Works on all waiting blobs, some groups at a time. Returns the blobs with surplus that was
    /// left.
    async fn work(
        &self,
        waiting: Vec<Work>,
        pass: Pass,
        report: &mut Report,
        should_continue: &dyn Fn() -> bool,
        progress: &dyn Fn(&Report),
    ) -> Vec<Work> {
        let mut surplus = Vec::new();
        let mut groups = JoinSet::new();
        let mut waiting = waiting.into_iter().peekable();
        loop {
            while groups.len() < PARALLEL_GROUPS && waiting.peek().is_some() && !self.is_stopped() {
                let next = waiting.by_ref().take(GROUP_BLOBS);
                let entries = next.map(|work| work.entry()).collect();
                let shared = self.clone();
                groups.spawn(async move { shared.group(entries, pass).await });
            }
            match timeout(STOP_CHECK_INTERVAL, groups.join_next()).await {
                Ok(None) => break,
                Ok(Some(Ok(done))) => {
                    report.add(done.report);
                    surplus.extend(done.surplus);
                    report.advance(progress);
                }
                Ok(Some(Err(error))) => report.fail(format!("a repair task panicked: {error}")),
                Err(_) => {}
            }
            if !should_continue() {
                self.stop();
            }
        }
        report.is_stopped |= self.is_stopped();
        surplus
    }

    /// Works on a group of blobs until nothing is left to do for them in this pass.
    pub(super) async fn group(&self, mut entries: Vec<Entry>, pass: Pass) -> WorkResult {
        let WorkResult { mut report, mut surplus } = WorkResult::default();
        while !entries.is_empty() {
            let blobs: Vec<BlobId> = entries.iter().map(|entry| entry.wanted.blob).collect();
            let (members, found) = self.look(&blobs).await;
            let mut executing = JoinSet::new();
            for (mut entry, holdings) in entries.drain(..).zip(found) {
                let plan = plan(&entry.wanted, &members, &holdings, &entry.findings);
                let is_over = self.is_stopped() || !entry.begin_round();
                if entry.is_idle(&plan) || is_over {
                    report.settle(&entry.wanted.blob, &plan);
                    if let Some(reason) = entry.reason.clone().filter(|_| !entry.is_idle(&plan)) {
                        report.fail(format!("blob {}: {reason}", entry.wanted.blob));
                    }
                } else if pass == Pass::Add && plan.steps.is_empty() {
                    let (survives, stored) = (plan.survives, entry.stored.min(255) as u8);
                    surplus.push(Work { wanted: entry.wanted, survives, stored });
                } else {
                    let shared = self.clone();
                    executing.spawn(async move { shared.execute(entry, holdings, &plan).await });
                }
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
        }
        WorkResult { report, surplus }
    }

    /// Carries out the plan for one blob.
    async fn execute(&self, entry: Entry, holdings: Vec<Holding>, plan: &Plan) -> (Entry, Report) {
        let mut executing = Executor::new(self, entry, holdings);
        let memory = self.reserve(executing.memory(plan)).await;
        executing.execute(&plan.steps).await;
        if let Some(removal) = &plan.removal {
            executing.remove(removal).await;
        }
        drop(memory);
        (executing.entry, executing.done)
    }
}
