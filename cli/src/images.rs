//! Images and snapshots: `create`, `show`, `clone`, `resize`, `rm`.

use std::path::Path;

use cairn_store::encoding::{Redundancy, StoragePolicy};
use cairn_store::{Geometry, Image, ImageName, Repository, Selector, Snapshot, SnapshotRef};
use serde_json::{Value, json};

use crate::args::{ImageOptions, Style};
use crate::control;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{or_dash, print, print_fields, print_json};
use crate::time::utc;

/// Checks the sizes of a new image.
pub(crate) fn geometry(size: u64, chunk_size: u64) -> Outcome<Geometry> {
    // A chunk size beyond 32 bits is refused like the largest number of 32 bits.
    let chunk_size = u32::try_from(chunk_size).unwrap_or(u32::MAX);
    Geometry::new(size, chunk_size).doing(|| "checking the sizes".into())
}

/// The repository with the storage policy of a new image, and a note on the redundancy if it was
/// chosen by default.
pub(crate) fn config(
    repository: Repository,
    options: &ImageOptions,
) -> Outcome<(Repository, Option<String>)> {
    let doing = || "choosing a redundancy".to_owned();
    let is_cluster = repository.cluster().is_some();
    let mut note = None;
    let redundancy = match options.redundancy {
        Some(redundancy) if !is_cluster && redundancy != Redundancy::NONE => {
            let why = "a repository in a directory stores one copy of everything; --redundancy is \
                       for clusters";
            return Err(Failure::new(Exit::Usage, doing(), why));
        }
        Some(redundancy) => redundancy,
        None => {
            let chosen = repository.default_redundancy().doing(doing)?;
            if is_cluster {
                note = Some(format!("redundancy {chosen}, chosen by the number of peers"));
            }
            chosen
        }
    };
    let policy = StoragePolicy { redundancy, compression: options.compress };
    Ok((repository.with_policy(policy), note))
}

/// Prints a note on standard error. A program that reads JSON wants none.
pub(crate) fn print_note(note: Option<&str>, style: Style) {
    if let Some(note) = note.filter(|_| !style.json) {
        eprintln!("{note}");
    }
}

pub(crate) fn create(
    repository: &Repository,
    image: &ImageName,
    geometry: Geometry,
    note: Option<&str>,
    style: Style,
) -> Outcome {
    let snapshot =
        repository.create_image(image, geometry).doing(|| format!("creating image '{image}'"))?;
    print_note(note, style);
    print_name(&snapshot, style)
}

pub(crate) fn clone(
    repository: &Repository,
    source: &SnapshotRef,
    image: &ImageName,
    style: Style,
) -> Outcome {
    let snapshot = repository
        .clone_snapshot(source, image)
        .doing(|| format!("cloning {source} to '{image}'"))?;
    print_name(&snapshot, style)
}

/// Prints the name of a snapshot that a command has created.
pub(crate) fn print_name(snapshot: &Snapshot, style: Style) -> Outcome {
    if style.json {
        return print_json(&snapshot_json(snapshot));
    }
    print(&format!("{}\n", snapshot.name()))
}

pub(crate) fn show(repository: &Repository, name: &SnapshotRef, style: Style) -> Outcome {
    let doing = || format!("showing {name}");
    let snapshot = repository.catalog().resolve(name).doing(doing)?;
    // A snapshot without content has no chunks to count.
    let stored = match snapshot.require_content() {
        Ok(()) => {
            let mut chunks = repository.chunks(&snapshot.root, snapshot.geometry);
            Some(chunks.try_fold(0, |count, chunk| chunk.map(|_| count + 1)).doing(doing)?)
        }
        Err(_) => None,
    };
    let times = repository.catalog().verified(&name.image).doing(doing)?;
    let verified = times.of(snapshot.number).filter(|_| snapshot.state.has_content());
    let holes = stored.map(|stored: u64| snapshot.geometry.chunk_count() - stored);
    if style.json {
        let mut value = snapshot_json(&snapshot);
        value["verified"] = json!(verified);
        value["chunks_stored"] = json!(stored);
        value["chunks_holes"] = json!(holes);
        return print_json(&value);
    }
    print_fields(&[
        ("snapshot", snapshot.name().to_string()),
        ("labels", or_dash(joined(&snapshot.labels))),
        ("pinned", if snapshot.is_pinned { "yes" } else { "no" }.into()),
        ("metadata", or_dash(joined(&metadata(&snapshot)))),
        ("taken by", if snapshot.is_from_guest { "the guest" } else { "the host" }.into()),
        ("obsolete", if snapshot.is_obsolete { "yes" } else { "no" }.into()),
        ("state", snapshot.state.to_string()),
        ("reason", or_dash(snapshot.reason)),
        ("parent", or_dash(snapshot.parent)),
        ("time", utc(snapshot.time)),
        ("consistency", snapshot.consistency.to_string()),
        ("verified", or_dash(verified.map(utc))),
        ("size", style.size(snapshot.geometry.size())),
        ("chunk size", style.size(snapshot.geometry.chunk_size().into())),
        ("redundancy", snapshot.policy.redundancy.to_string()),
        ("compression", snapshot.policy.compression.to_string()),
        ("chunks", snapshot.geometry.chunk_count().to_string()),
        ("stored chunks", or_dash(stored)),
        ("holes", or_dash(holes)),
        ("changed", style.size(snapshot.dirty_bytes)),
        ("stored", style.size(snapshot.stored_bytes)),
        ("sent", style.size(snapshot.sent_bytes)),
        ("saved", style.size(snapshot.saved_bytes)),
        ("pause", format!("{} us", snapshot.pause_us)),
        ("root", or_dash(snapshot.root.0)),
        ("mirror", or_dash(snapshot.mirror)),
    ])
}

pub(crate) fn resize(
    repository: &Repository,
    image: &ImageName,
    size: u64,
    control: Option<&Path>,
    style: Style,
) -> Outcome {
    // An image never shrinks, so a wrong socket is refused first.
    control.map(|socket| control::check_growth(socket, image)).transpose()?;
    let before = repository
        .catalog()
        .resize(image, size)
        .doing(|| format!("resizing image '{image}'"))?
        .geometry
        .size();
    // From here on the image is larger. A disk that cannot follow now does so later.
    let disk = control.map(control::resize).transpose().map_err(|failure| {
        failure.and(format!(
            "image '{image}' has {} from here on, and its disk follows when it can",
            style.size(size)
        ))
    })?;
    if style.json {
        let image = image.to_string();
        return print_json(
            &json!({ "image": image, "before": before, "size": size, "disk": disk }),
        );
    }
    let disk = disk.map(|disk| format!("; the running disk has {}", style.size(disk)));
    let (before, size) = (style.size(before), style.size(size));
    print(&format!("{image}: {before} -> {size}{}\n", disk.unwrap_or_default()))
}

pub(crate) fn rm(
    repository: &Repository,
    name: &SnapshotRef,
    force: bool,
    style: Style,
) -> Outcome {
    let doing = || format!("removing {name}");
    let removed = match name.selector {
        Selector::Newest => {
            repository.remove_image(&name.image, force).doing(doing)?;
            name.to_string()
        }
        _ if force => {
            let why = "--force is for images; a snapshot is removed without it, or not at all";
            return Err(Failure::new(Exit::Usage, doing(), why));
        }
        _ => repository.remove_snapshot(name).doing(doing)?.name().to_string(),
    };
    if style.json {
        return print_json(&json!({ "removed": removed }));
    }
    print(&format!("removed {removed}; its data stays until garbage collection\n"))
}

/// The metadata of a snapshot, as `key=value`.
pub(crate) fn metadata(snapshot: &Snapshot) -> Vec<String> {
    snapshot.metadata.iter().map(|(key, value)| format!("{key}={value}")).collect()
}

/// These texts in one; `None` if there are none.
pub(crate) fn joined(texts: &[String]) -> Option<String> {
    (!texts.is_empty()).then(|| texts.join(", "))
}

pub(crate) fn image_json(image: &Image) -> Value {
    json!({
        "name": image.name.as_str(),
        "size": image.geometry.size(),
        "chunk_size": image.geometry.chunk_size(),
        "created": image.created,
        "snapshots": image.snapshots,
        "pinned": image.pinned,
        "obsolete": image.obsolete,
        "newest": image.newest,
        "origin": image.origin,
        "redundancy": image.policy.redundancy.to_string(),
        "compression": image.policy.compression.to_string(),
    })
}

pub(crate) fn snapshot_json(snapshot: &Snapshot) -> Value {
    json!({
        "snapshot": snapshot.name().to_string(),
        "image": snapshot.image.as_str(),
        "number": snapshot.number,
        "parent": snapshot.parent,
        "root": snapshot.root.0.map(|id| id.to_string()),
        "time": snapshot.time,
        "size": snapshot.geometry.size(),
        "chunk_size": snapshot.geometry.chunk_size(),
        "redundancy": snapshot.policy.redundancy.to_string(),
        "compression": snapshot.policy.compression.to_string(),
        "labels": snapshot.labels,
        "pinned": snapshot.is_pinned,
        "metadata": snapshot.metadata,
        "from_guest": snapshot.is_from_guest,
        "obsolete": snapshot.is_obsolete,
        "state": snapshot.state.as_str(),
        "consistency": snapshot.consistency.as_str(),
        "dirty_bytes": snapshot.dirty_bytes,
        "stored_bytes": snapshot.stored_bytes,
        "sent_bytes": snapshot.sent_bytes,
        "saved_bytes": snapshot.saved_bytes,
        "pause_us": snapshot.pause_us,
        "reason": snapshot.reason,
        "mirror": snapshot.mirror.map(|id| id.to_string()),
    })
}
