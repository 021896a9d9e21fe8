//! Checks blobs: reads all fragments that the peers have of them, compares each with the blob, and
//! finds those that are missing. A check changes nothing.
//!
//! ```text
//! lists of the peers ─► holdings of a blob ─► read all ─► verify each encoding ─► plan ─► problems
//!                                  ▲                                                 │
//!                                  └── ask the peers, once more ◄── something wrong ─┘
//! ```
//!
//! A fragment may have been moved or rebuilt since it was listed. So a blob with a problem is looked
//! at twice, and only what is wrong the second time counts.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::{JoinSet, spawn_blocking};

use super::entry::Entry;
use super::job::{Pass, SCAN_BATCH, WorkResult};
use super::listings::{Listings, predecessor};
use super::members::RepairMembers;
use super::peers::Peers;
use super::plan::{Findings, FragmentLocation, Holding, Rejection, Step, Wanted, plan};
use super::read::fetch;
use super::report::Report;
use super::shared::{RepairLimits, Shared};
use super::verify::{Verdict, verify};
use crate::encoding::fragment::Fragment;
use crate::error::ErrorKind;
use crate::id::{BlobId, PeerId};

/// The blobs that are checked at a time, if their blocks fit into memory.
const PARALLEL_BLOBS: usize = 64;

/// The blobs in a group that is repaired.
const GROUP_BLOBS: usize = 128;

/// What is wrong with a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FragmentState {
    /// The peer should have it and does not.
    Missing,
    /// The peer has it, and its bytes do not match its checksum.
    Damaged,
    /// It matches its checksum, and is not what the blob gives.
    Wrong,
}

impl FragmentState {
    /// The state as one word.
    pub fn as_str(self) -> &'static str {
        match self {
            FragmentState::Missing => "missing",
            FragmentState::Damaged => "damaged",
            FragmentState::Wrong => "wrong",
        }
    }

    /// Whether there is no fragment.
    pub fn is_missing(self) -> bool {
        self == FragmentState::Missing
    }
}

/// A fragment that is not as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FragmentProblem {
    /// The peer that has it or should have it.
    pub peer: PeerId,
    /// The block's index.
    pub index: u8,
    /// What is wrong.
    pub state: FragmentState,
}

/// A blob whose fragments are not as they should be, and what a repair needs to know.
#[derive(Clone, Debug)]
pub struct FoundBlob {
    /// The blob.
    pub wanted: Wanted,
    /// What was found out by reading its fragments.
    findings: Findings,
}

/// The result of a check of one blob.
#[derive(Clone, Debug)]
pub struct CheckedBlob {
    /// The blob, with what was found out.
    pub found: FoundBlob,
    /// The length of its content, which was decoded and has its name. `None` if no encoding as wanted
    /// gives it.
    pub len: Option<u32>,
    /// The fragments that are not as they should be.
    pub problems: Vec<FragmentProblem>,
    /// Whether fewer live peers than wanted have a fragment, or a fragment is not right. What a peer
    /// that is down may have is not counted as missing.
    pub is_weak: bool,
}

/// Checks all blobs from the channel, which delivers them in the order of their names. `each` gets the
/// results in any order. Returns the peers whose fragments could not be looked at, and why.
pub(crate) async fn check_fragments<P: Peers>(
    peers: Arc<P>,
    members: RepairMembers,
    mut blobs: mpsc::Receiver<Wanted>,
    limits: RepairLimits,
    each: &mut dyn FnMut(CheckedBlob),
) -> BTreeMap<PeerId, String> {
    let shared = Shared::new(peers, members, limits);
    let mut silent = BTreeMap::new();
    let mut checking = JoinSet::new();
    let mut listings: Option<Listings<P>> = None;
    loop {
        let mut batch = Vec::with_capacity(SCAN_BATCH);
        if blobs.recv_many(&mut batch, SCAN_BATCH).await == 0 {
            break;
        }
        let first = predecessor(&batch[0].blob);
        let listings = listings.get_or_insert_with(|| shared.listings(first));
        for wanted in batch {
            let mut holdings = listings.holdings(&wanted.blob).await;
            for (peer, error) in listings.take_failures() {
                shared.set_down(&peer);
                silent.insert(peer, error.to_string());
            }
            holdings.retain(|one| !silent.contains_key(&one.peer) && one.is_possible());
            // The blocks, and the content that is decoded and encoded again.
            let bytes = 3 * holdings.iter().map(|one| one.len as usize).sum::<usize>();
            let permit = shared.reserve(bytes).await;
            while checking.len() >= PARALLEL_BLOBS {
                finish(&mut checking, &mut silent, each).await;
            }
            let shared = shared.clone();
            checking.spawn(async move {
                let checked = shared.check_twice(wanted, holdings).await;
                drop(permit);
                checked
            });
        }
    }
    while !checking.is_empty() {
        finish(&mut checking, &mut silent, each).await;
    }
    silent
}

/// Peers that did not answer while a blob was checked, and why.
type Silent = Vec<(PeerId, String)>;

/// Waits for one of the checks.
async fn finish(
    checking: &mut JoinSet<(CheckedBlob, Silent)>,
    silent: &mut BTreeMap<PeerId, String>,
    each: &mut dyn FnMut(CheckedBlob),
) {
    match checking.join_next().await {
        Some(Ok((checked, more))) => {
            silent.extend(more);
            each(checked);
        }
        Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
        None => {}
    }
}

/// Repairs blobs that a check has found.
pub(crate) async fn repair_found<P: Peers>(
    peers: Arc<P>,
    members: RepairMembers,
    found: &[FoundBlob],
    limits: RepairLimits,
    should_continue: &dyn Fn() -> bool,
    progress: &dyn Fn(&Report),
) -> Report {
    let shared = Shared::new(peers, members, limits);
    let mut report = Report::default();
    for some in found.chunks(GROUP_BLOBS) {
        if !should_continue() {
            report.is_stopped = true;
            break;
        }
        let entry = |found: &FoundBlob| {
            let mut entry = Entry::new(found.wanted, 0);
            entry.findings = found.findings.clone();
            entry
        };
        report.blobs += some.len() as u64;
        report.under += some.len() as u64;
        // Surplus is left to a complete repair.
        let WorkResult { report: done, .. } =
            shared.group(some.iter().map(entry).collect(), Pass::Add).await;
        report.add(done);
        report.advance(progress);
    }
    report
}

impl<P: Peers> Shared<P> {
    /// Checks a blob. If something is wrong, asks the peers what they have, and checks again.
    async fn check_twice(&self, wanted: Wanted, holdings: Vec<Holding>) -> (CheckedBlob, Silent) {
        let (checked, silent) = self.check(wanted, holdings).await;
        if checked.problems.is_empty() && !checked.is_weak && checked.len.is_some() {
            return (checked, silent);
        }
        let (_, found) = self.look(&[wanted.blob]).await;
        let holdings = found.into_iter().flatten().filter(Holding::is_possible).collect();
        let (checked, more) = self.check(wanted, holdings).await;
        (checked, silent.into_iter().chain(more).collect())
    }

    /// Reads all fragments of the encodings as wanted, and compares them with the blob.
    async fn check(&self, wanted: Wanted, mut holdings: Vec<Holding>) -> (CheckedBlob, Silent) {
        let (mut findings, mut silent) = (Findings::default(), Silent::new());
        let mut encodings: BTreeMap<BlobId, Vec<(FragmentLocation, Fragment)>> = BTreeMap::new();
        let mut asked = JoinSet::new();
        for holding in holdings.iter().filter(|one| wanted.is_shape_of(one)).copied() {
            let shared = self.clone();
            asked.spawn(async move { (holding, fetch(&shared, wanted.blob, &holding).await) });
        }
        while let Some(answer) = asked.join_next().await {
            let Ok((holding, answer)) = answer else { continue };
            let place = holding.location();
            match answer {
                Ok(Some(fragment)) => {
                    encodings.entry(place.encoding).or_default().push((place, fragment));
                }
                Err(error) if error.kind() != ErrorKind::Corrupt => {
                    self.set_down(&place.peer);
                    silent.push((place.peer, error.to_string()));
                }
                Ok(None) | Err(_) => drop(findings.damaged.insert(place)),
            }
        }
        holdings.retain(|one| silent.iter().all(|(peer, _)| *peer != one.peer));
        let mut len = None;
        for (encoding, found) in encodings {
            let (places, fragments): (Vec<_>, Vec<Fragment>) = found.into_iter().unzip();
            let description = fragments[0].description.clone();
            let content_len = description.len;
            let indices: HashSet<u8> = fragments.iter().map(|one| one.index).collect();
            if indices.len() < description.needed() {
                continue;
            }
            // Decoding and hashing take all processors.
            let verified = spawn_blocking(move || verify(&description, &fragments)).await;
            match verified.expect("a comparison does not panic") {
                Verdict::Decoded { wrong } => {
                    len = len.or(Some(content_len));
                    findings.forged.extend(wrong.into_iter().map(|at| places[at]));
                }
                Verdict::Rejected(rejection) => {
                    if rejection == Rejection::Inconsistent {
                        len = len.or(Some(content_len));
                    }
                    findings.rejected.insert(encoding, rejection);
                }
            }
        }
        (conclude(wanted, &self.members(), &holdings, findings, len), silent)
    }
}

/// The problems that follow from what was read: a pure decision.
fn conclude(
    wanted: Wanted,
    members: &RepairMembers,
    holdings: &[Holding],
    findings: Findings,
    len: Option<u32>,
) -> CheckedBlob {
    let plan = plan(&wanted, members, holdings, &findings);
    let problem = |place: &FragmentLocation, state| FragmentProblem {
        peer: place.peer,
        index: place.index,
        state,
    };
    let damaged = findings.damaged.iter().map(|place| problem(place, FragmentState::Damaged));
    let forged = findings.forged.iter().map(|place| problem(place, FragmentState::Wrong));
    let rejected = holdings.iter().filter(|one| findings.rejected.contains_key(&one.encoding));
    let rejected = rejected.map(|one| problem(&one.location(), FragmentState::Wrong));
    let mut problems: Vec<_> = damaged.chain(forged).chain(rejected).collect();
    let has_damaged: HashSet<PeerId> = problems.iter().map(|one| one.peer).collect();
    let is_copies = wanted.redundancy.needed() == 1;
    for step in &plan.steps {
        let (index, to) = match step {
            Step::Rebuild { index, to, .. } => (*index, *to),
            // Of several fragments, a copy fills a place, and none is missing.
            Step::Copy { index, to, .. } if is_copies && plan.is_short => (*index, *to),
            Step::Copy { .. } | Step::Encode { .. } => continue,
        };
        // What a damaged fragment is replaced with is not missing as well.
        if !has_damaged.contains(&to) {
            let state = FragmentState::Missing;
            problems.push(FragmentProblem { peer: to, index, state });
        }
    }
    problems.sort_unstable();
    problems.dedup();
    let is_short = plan.is_short && plan.missing > plan.waiting;
    let is_weak = is_short || !problems.is_empty();
    CheckedBlob { found: FoundBlob { wanted, findings }, len, problems, is_weak }
}
