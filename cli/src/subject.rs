//! What a command is about: a snapshot, an image with all its snapshots, or a folder of images.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use cairn_store::{
    Error, ErrorKind, ImageName, Repository, Scope, Selector, Snapshot, SnapshotRef,
};

use crate::failure::{Doing, Exit, Failure, Outcome};

/// A snapshot, or images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// An image, a folder, or everything.
    Images(Scope),
    /// One snapshot.
    Snapshot(SnapshotRef),
}

impl FromStr for Subject {
    type Err = Error;

    fn from_str(text: &str) -> Result<Subject, Error> {
        if text.ends_with('/') {
            return text.parse().map(Subject::Images);
        }
        let name: SnapshotRef = text.parse()?;
        Ok(match name.selector {
            Selector::Newest => Subject::Images(Scope::Image(name.image)),
            Selector::Number(_) | Selector::Label(_) => Subject::Snapshot(name),
        })
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::Images(scope) => scope.fmt(f),
            Subject::Snapshot(name) => name.fmt(f),
        }
    }
}

/// The images in a scope. Fails if an image does not exist, or a folder is empty.
pub(crate) fn images_in(repository: &Repository, scope: &Scope) -> Outcome<Vec<ImageName>> {
    let doing = || format!("looking for '{scope}'");
    let catalog = repository.catalog();
    if let Scope::Image(image) = scope {
        return Ok(vec![catalog.image(image).doing(doing)?.name]);
    }
    let mut names = Vec::new();
    let mut each = |image: cairn_store::Image| {
        if scope.contains(&image.name) {
            names.push(image.name);
        }
        Ok(())
    };
    catalog.each_image(&mut each).doing(doing)?;
    if names.is_empty() && matches!(scope, Scope::Folder(_)) {
        let why = "no image is in it; `cairn ls` lists all images";
        return Err(Failure::new(Exit::NotFound, doing(), why));
    }
    Ok(names)
}

/// The snapshots with content that are meant, each once: all of all images if there are no subjects.
pub(crate) fn snapshots_of(
    repository: &Repository,
    subjects: &[Subject],
) -> Outcome<Vec<Snapshot>> {
    let catalog = repository.catalog();
    let everything = [Subject::Images(Scope::All)];
    let mut all = Vec::new();
    for subject in if subjects.is_empty() { &everything } else { subjects } {
        let doing = || format!("looking for the snapshots of '{subject}'");
        match subject {
            Subject::Snapshot(name) => {
                let snapshot = catalog.resolve(name).doing(doing)?;
                snapshot.require_content().doing(doing)?;
                all.push(snapshot);
            }
            Subject::Images(scope) => {
                for image in images_in(repository, scope)? {
                    match catalog.snapshots(&image) {
                        // The image was removed meanwhile.
                        Err(error) if error.kind() == ErrorKind::NotFound => {}
                        found => all.extend(found.doing(doing)?),
                    }
                }
            }
        }
    }
    all.retain(|one| one.state.has_content());
    let mut seen = BTreeSet::new();
    all.retain(|one| seen.insert((one.image.clone(), one.number)));
    Ok(all)
}
