//! `verify`: reads all data of snapshots and verifies it.

use std::collections::BTreeSet;

use cairn_store::maintenance::verify::{UnreadableBlob, Verification, Verifier};
use cairn_store::{ErrorKind, Repository, Selector, Snapshot, SnapshotRef};
use serde_json::{Value, json};

use crate::args::Style;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{count, print, print_json};
use crate::progress::Progress;

/// The most unreadable blobs that are printed as text.
const MAX_PRINTED: usize = 20;

pub(crate) fn verify(repository: &Repository, names: &[SnapshotRef], style: Style) -> Outcome {
    let doing = || "verifying snapshots".to_owned();
    let snapshots = selected(repository, names)?;
    let number = snapshots.len() as u64;
    let verifier = Verifier::new(repository, snapshots).doing(doing)?;
    let progress = Progress::new(verifier.bytes());
    let report = verifier.run(&|bytes| progress.set(bytes));
    drop(progress);
    match style.json {
        true => print_json(&report_json(&report, number))?,
        false => print(&report_text(&report, number, style))?,
    }
    outcome(&report)
}

/// The failure of a verification that has found unreadable data.
fn outcome(report: &Verification) -> Outcome {
    if report.unreadable == 0 {
        return Ok(());
    }
    let affected = report.affected.len() as u64;
    let need = if affected == 1 { "needs" } else { "need" };
    let snapshots = format!("{} {need}", count(affected, "snapshot"));
    let doing = "verifying snapshots";
    if report.lost > 0 {
        let why = format!(
            "{} lost, which {snapshots}; `cairn repair` restores what a cluster still has in \
             part, and a repository in a directory needs a copy",
            are(report.lost)
        );
        return Err(Failure::new(Exit::Corrupt, doing, why));
    }
    let why = format!(
        "{} unreadable at the moment, which {snapshots}; start the peers that are down, or \
         check the disk, and verify again",
        are(report.unreadable)
    );
    Err(Failure::new(Exit::Unavailable, doing, why))
}

fn are(blobs: u64) -> String {
    format!("{} {}", count(blobs, "blob"), if blobs == 1 { "is" } else { "are" })
}

/// The snapshots with these names; all snapshots with content if there are no names.
fn selected(repository: &Repository, names: &[SnapshotRef]) -> Outcome<Vec<Snapshot>> {
    let catalog = repository.catalog();
    let mut all = Vec::new();
    if names.is_empty() {
        for image in catalog.images().doing(|| "listing the images".into())? {
            match catalog.snapshots(&image.name) {
                // The image was removed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                found => all.extend(found.doing(|| format!("verifying {}", image.name))?),
            }
        }
    }
    for name in names {
        let doing = || format!("verifying {name}");
        if name.selector == Selector::Newest {
            all.extend(catalog.snapshots(&name.image).doing(doing)?);
        } else {
            let snapshot = catalog.resolve(name).doing(doing)?;
            snapshot.require_content().doing(doing)?;
            all.push(snapshot);
        }
    }
    all.retain(|one| one.state.has_content());
    let mut seen = BTreeSet::new();
    all.retain(|one| seen.insert((one.image.clone(), one.number)));
    Ok(all)
}

/// What a verification of this many snapshots found.
fn report_text(report: &Verification, snapshots: u64, style: Style) -> String {
    let snapshots = count(snapshots, "snapshot");
    let result = match (report.affected.len(), report.lost) {
        (0, _) => format!("{snapshots} verified"),
        (affected, 0) => format!("{snapshots} read, {affected} unreadable at the moment"),
        (affected, _) => format!("{snapshots} read, {affected} damaged"),
    };
    let (blobs, size) = (count(report.blobs, "blob"), style.size(report.bytes));
    let mut text = format!("{result}: {blobs}, {size} read\n");
    for UnreadableBlob { blob, used_as, error } in report.errors.iter().take(MAX_PRINTED) {
        text += &format!("unreadable: {} {blob}: {error}\n", used_as.as_str());
    }
    let printed = report.errors.len().min(MAX_PRINTED) as u64;
    if report.unreadable > printed {
        text += &format!("and {} more\n", report.unreadable - printed);
    }
    for name in &report.affected {
        text += &format!("affected: {name}\n");
    }
    text
}

fn report_json(report: &Verification, snapshots: u64) -> Value {
    let error = |one: &UnreadableBlob| {
        json!({
            "blob": one.blob.to_string(),
            "used_as": one.used_as.as_str(),
            "lost": one.is_lost(),
            "error": one.error.to_string(),
        })
    };
    json!({
        "snapshots": snapshots,
        "blobs": report.blobs,
        "bytes": report.bytes,
        "unreadable": report.unreadable,
        "lost": report.lost,
        "errors": report.errors.iter().map(error).collect::<Vec<_>>(),
        "affected": report.affected.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}
