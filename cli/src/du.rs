//! `du`: what images and snapshots take, and what removing one frees.

use std::collections::BTreeSet;

use cairn_store::maintenance::usage::{ImageUsage, SnapshotUsage, usage};
use cairn_store::{Error, ImageName, Repository, Scope, SnapshotRef};
use serde_json::json;

use crate::args::Style;
use crate::failure::{Doing, Outcome};
use crate::output::{Align, Listing, count, or_dash};
use crate::progress::Activity;
use crate::subject::{Subject, images_in};

/// What is listed of an image.
enum Wanted {
    Image(ImageName),
    WithSnapshots(ImageName),
    Snapshot(SnapshotRef, u64),
}

impl Wanted {
    fn image(&self) -> &ImageName {
        match self {
            Wanted::Image(image) | Wanted::WithSnapshots(image) => image,
            Wanted::Snapshot(name, _) => &name.image,
        }
    }
}

pub(crate) fn du(repository: &Repository, subjects: &[Subject], style: Style) -> Outcome {
    let doing = || "adding up what is stored".to_owned();
    let all = wanted(repository, subjects)?;
    let images: BTreeSet<&ImageName> = all.iter().map(Wanted::image).collect();
    let activity = Activity::new();
    let progress = |blobs| activity.set(|| format!("looked at {}", count(blobs, "blob")));
    let found = usage(repository, &|image| images.contains(image), &progress).doing(doing)?;
    drop(activity);
    let heading = [
        ("NAME", Align::Left),
        ("UNIQUE", Align::Right),
        ("SHARED", Align::Right),
        ("FREES", Align::Right),
    ];
    let is_cluster = repository.cluster().is_some();
    let mut rows = Rows { listing: Listing::new(style, &heading), style, is_cluster };
    for one in &all {
        let at = found.binary_search_by(|usage| usage.image.cmp(one.image()));
        // An image without a snapshot with content, or one that was removed meanwhile.
        let Some(usage) = at.ok().map(|at| &found[at]) else { continue };
        match one {
            Wanted::Image(_) => rows.image(usage),
            Wanted::WithSnapshots(_) => {
                rows.image(usage);
                usage.snapshots.iter().for_each(|one| rows.snapshot(usage, one));
            }
            Wanted::Snapshot(name, number) => {
                let snapshot = usage.snapshots.iter().find(|one| one.number == *number);
                let missing = || Error::NoSnapshot { name: name.to_string() };
                rows.snapshot(usage, snapshot.ok_or_else(missing).doing(doing)?);
            }
        }
    }
    rows.listing.end()
}

fn wanted(repository: &Repository, subjects: &[Subject]) -> Outcome<Vec<Wanted>> {
    let everything = [Subject::Images(Scope::All)];
    let mut all = Vec::new();
    for subject in if subjects.is_empty() { &everything } else { subjects } {
        match subject {
            Subject::Images(scope @ Scope::Image(_)) => {
                all.extend(images_in(repository, scope)?.into_iter().map(Wanted::WithSnapshots));
            }
            Subject::Images(scope) => {
                all.extend(images_in(repository, scope)?.into_iter().map(Wanted::Image));
            }
            Subject::Snapshot(name) => {
                let doing = || format!("looking for {name}");
                let snapshot = repository.catalog().resolve(name).doing(doing)?;
                snapshot.require_content().doing(doing)?;
                all.push(Wanted::Snapshot(name.clone(), snapshot.number));
            }
        }
    }
    Ok(all)
}

struct Rows {
    listing: Listing,
    style: Style,
    is_cluster: bool,
}

impl Rows {
    fn image(&mut self, one: &ImageUsage) {
        let (unique, shared) = (one.unique.chunks, one.shared);
        self.add(one.image.to_string(), None, unique, shared, one.unique.stored);
    }

    fn snapshot(&mut self, image: &ImageUsage, one: &SnapshotUsage) {
        let name = SnapshotRef::number(&image.image, one.number).to_string();
        self.add(name, Some(one.number), one.unique.chunks, one.shared(), one.unique.stored);
    }

    fn add(&mut self, name: String, number: Option<u64>, unique: u64, shared: u64, stored: u64) {
        let (style, frees) = (self.style, (!self.is_cluster).then_some(stored));
        let json = json!({
            "name": name,
            "number": number,
            "unique_bytes": unique,
            "shared_bytes": shared,
            "frees_bytes": frees,
        });
        let size = |bytes| style.size(bytes);
        let row = [name, size(unique), size(shared), or_dash(frees.map(size))];
        self.listing.add(|| json, || row);
    }
}
