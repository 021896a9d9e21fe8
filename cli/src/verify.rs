//! `verify`: reads all data of snapshots and verifies it.

use cairn_store::Repository;
use cairn_store::maintenance::verify::sample::Sample;
use cairn_store::maintenance::verify::{FoundFragment, UnreadableBlob, Verification, Verifier};
use cairn_store::maintenance::{repair_all, repair_blobs};
use serde_json::{Value, json};

use crate::args::Style;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{count, print, print_json};
use crate::progress::Progress;
use crate::subject::{Subject, snapshots_of};

/// The most unreadable blobs, and the most fragments, that are printed as text.
const MAX_PRINTED: usize = 20;

/// How to verify.
pub(crate) struct Options {
    /// The part of the chunks that is read, and the seed if it was given.
    pub(crate) sample: Option<(f64, Option<u64>)>,
    /// Whether to repair what was found.
    pub(crate) repair: bool,
}

/// What a repair has done about the fragments that were found.
struct Repaired {
    rebuilt: u64,
    left: u64,
    failures: Vec<String>,
}

pub(crate) fn verify(
    repository: &Repository,
    subjects: &[Subject],
    options: &Options,
    style: Style,
) -> Outcome {
    let doing = || "verifying snapshots".to_owned();
    let sample = options
        .sample
        .map(|(fraction, seed)| Sample::new(fraction, seed.map_or_else(Sample::random_seed, Ok)?));
    let sample = sample.transpose().doing(doing)?;
    let snapshots = snapshots_of(repository, subjects)?;
    let number = snapshots.len() as u64;
    let verifier = Verifier::new(repository, snapshots, sample).doing(doing)?;
    let progress = Progress::new(verifier.bytes());
    let report = verifier.run(&|bytes| progress.set(bytes)).doing(doing)?;
    drop(progress);
    let is_cluster = repository.cluster().is_some();
    let repaired = match options.repair && is_cluster && report.weak > 0 {
        true => Some(repair(repository, &report)?),
        false => None,
    };
    let run = Run { report, snapshots: number, sample, repaired, is_cluster };
    match style.json {
        true => print_json(&run.json())?,
        false => print(&run.text(style))?,
    }
    run.outcome(options)
}

/// Repairs what was found. If that is more than a report has, repairs everything.
fn repair(repository: &Repository, report: &Verification) -> Outcome<Repaired> {
    let progress = Progress::new(0);
    let (found, has_more) = report.to_repair();
    let doing = || "repairing what was found".to_owned();
    let mut repair = repair_blobs(repository, found, &|bytes| progress.set(bytes)).doing(doing)?;
    if has_more {
        let all = repair_all(repository, None, &|bytes| progress.set(bytes)).doing(doing)?;
        repair.rebuilt += all.rebuilt + all.moved;
        repair.left = all.left;
        repair.failures.extend(all.failures);
    }
    let rebuilt = repair.rebuilt + repair.moved;
    Ok(Repaired { rebuilt, left: repair.left, failures: repair.failures })
}

/// A run of the command.
struct Run {
    report: Verification,
    /// The number of snapshots.
    snapshots: u64,
    sample: Option<Sample>,
    repaired: Option<Repaired>,
    is_cluster: bool,
}

impl Run {
    /// The failure of a verification that has found something wrong.
    fn outcome(&self, options: &Options) -> Outcome {
        let Verification { affected, lost, unreadable, weak, silent, .. } = &self.report;
        let need = |number: usize| {
            let verb = if number == 1 { "needs" } else { "need" };
            format!("{} {verb}", count(number as u64, "snapshot"))
        };
        let snapshots = need(affected.len());
        let fail = |exit, why| Err(Failure::new(exit, "verifying snapshots", why));
        if *lost > 0 {
            let help = match (self.is_cluster, options.repair) {
                (false, true) => {
                    "a directory has nothing to repair from; import a copy of the disk, which \
                     stores the data again"
                }
                (false, false) => "a repository in a directory needs a copy",
                (true, true) => "the peers that are up do not have enough of it",
                (true, false) => "`cairn repair` restores what a cluster still has in part",
            };
            let why = format!("{} lost, which {snapshots}; {help}", are(*lost, "blob"));
            return fail(Exit::Corrupt, why);
        }
        if *unreadable > 0 {
            let why = format!(
                "{} unreadable at the moment, which {snapshots}; start the peers that are down, or \
                 check the disk, and verify again",
                are(*unreadable, "blob")
            );
            return fail(Exit::Unavailable, why);
        }
        match &self.repaired {
            None if *weak > 0 => {
                let snapshots = need(self.report.weakened.len());
                let why = format!(
                    "{} readable and without full redundancy, or with a damaged fragment, which \
                     {snapshots}; repair with `cairn verify --repair`",
                    are(*weak, "blob")
                );
                return fail(Exit::Corrupt, why);
            }
            Some(repaired) if repaired.left > 0 || !repaired.failures.is_empty() => {
                let reason = repaired.failures.first().map(|reason| format!(": {reason}"));
                let why = format!(
                    "{} still without full redundancy{}; see `cairn peers`, and repair again with \
                     `cairn repair`",
                    are(repaired.left, "blob"),
                    reason.unwrap_or_default()
                );
                return fail(Exit::Unavailable, why);
            }
            _ => {}
        }
        if !silent.is_empty() {
            let why = format!(
                "everything can be read, and the fragments on {} were not looked at; start the \
                 peers that are down, and verify again",
                count(silent.len() as u64, "peer")
            );
            return fail(Exit::Unavailable, why);
        }
        Ok(())
    }

    /// What the verification found.
    fn text(&self, style: Style) -> String {
        let report = &self.report;
        let snapshots = count(self.snapshots, "snapshot");
        let sampled = if self.sample.is_some() { " in part" } else { "" };
        let result = match (report.affected.len(), report.lost) {
            (0, _) => format!("{snapshots} verified{sampled}"),
            (affected, 0) => format!("{snapshots} read, {affected} unreadable at the moment"),
            (affected, _) => format!("{snapshots} read, {affected} damaged"),
        };
        let (blobs, size) = (count(report.blobs, "blob"), style.size(report.bytes));
        let mut text = format!("{result}: {blobs}, {size} read\n");
        if let Some(sample) = &self.sample {
            text += &format!("seed: {}\n", sample.seed());
        }
        for UnreadableBlob { blob, used_as, error } in report.errors.iter().take(MAX_PRINTED) {
            text += &format!("unreadable: {} {blob}: {error}\n", used_as.as_str());
        }
        text += &more(report.unreadable, report.errors.len());
        for FoundFragment { blob, problem } in report.fragments.iter().take(MAX_PRINTED) {
            let (state, peer, index) = (problem.state.as_str(), problem.peer, problem.index);
            text += &format!("{state}: fragment {index} of blob {blob} on peer {peer}\n");
        }
        text += &more(report.missing + report.damaged, report.fragments.len());
        for name in &report.affected {
            text += &format!("affected: {name}\n");
        }
        for name in &report.weakened {
            text += &format!("readable, without full redundancy: {name}\n");
        }
        for (peer, reason) in &report.silent {
            text += &format!("not looked at: peer {peer}: {reason}\n");
        }
        if let Some(repaired) = &self.repaired {
            let rebuilt = count(repaired.rebuilt, "fragment");
            let left = count(repaired.left, "blob");
            text += &format!("repaired: {rebuilt} rebuilt, {left} left without full redundancy\n");
        }
        text
    }

    fn json(&self) -> Value {
        let report = &self.report;
        let error = |one: &UnreadableBlob| {
            json!({
                "blob": one.blob.to_string(),
                "used_as": one.used_as.as_str(),
                "lost": one.is_lost(),
                "error": one.error.to_string(),
            })
        };
        let fragment = |one: &FoundFragment| {
            json!({
                "blob": one.blob.to_string(),
                "peer": one.problem.peer.to_string(),
                "index": one.problem.index,
                "state": one.problem.state.as_str(),
            })
        };
        let silent = report.silent.iter();
        let repaired = self.repaired.as_ref().map(
            |one| json!({ "rebuilt": one.rebuilt, "left": one.left, "failures": one.failures }),
        );
        json!({
            "snapshots": self.snapshots,
            "seed": self.sample.map(|sample| sample.seed()),
            "verified": report.verified,
            "blobs": report.blobs,
            "bytes": report.bytes,
            "unreadable": report.unreadable,
            "lost": report.lost,
            "errors": report.errors.iter().map(error).collect::<Vec<_>>(),
            "affected": report.affected.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "weak": report.weak,
            "missing_fragments": report.missing,
            "damaged_fragments": report.damaged,
            "fragments": report.fragments.iter().map(fragment).collect::<Vec<_>>(),
            "weakened": report.weakened.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "silent_peers": silent
                .map(|(peer, reason)| json!({ "peer": peer.to_string(), "reason": reason }))
                .collect::<Vec<_>>(),
            "repaired": repaired,
        })
    }
}

fn are(number: u64, noun: &str) -> String {
    format!("{} {}", count(number, noun), if number == 1 { "is" } else { "are" })
}

/// A line about what is not printed.
fn more(all: u64, known: usize) -> String {
    match all.saturating_sub(known.min(MAX_PRINTED) as u64) {
        0 => String::new(),
        left => format!("and {left} more\n"),
    }
}
