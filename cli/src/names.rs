//! What users say about a snapshot: `tag`, `pin`, `unpin`, `meta`.

use cairn_store::metadata::{check_key, parse_pair};
use cairn_store::{Repository, SnapshotEdit, SnapshotRef};
use serde_json::json;

use crate::args::Style;
use crate::failure::{Doing, Outcome};
use crate::images::snapshot_json;
use crate::output::{print, print_json};

pub(crate) fn tag(
    repository: &Repository,
    name: &SnapshotRef,
    label: String,
    remove: bool,
    style: Style,
) -> Outcome {
    let (doing, edit) = match remove {
        false => (format!("giving {name} the label '{label}'"), SnapshotEdit::AddLabel(label)),
        true => {
            (format!("taking the label '{label}' from {name}"), SnapshotEdit::RemoveLabel(label))
        }
    };
    change(repository, name, &edit, doing, style)
}

pub(crate) fn pin(
    repository: &Repository,
    name: &SnapshotRef,
    is_pinned: bool,
    style: Style,
) -> Outcome {
    let doing = format!("{} {name}", if is_pinned { "pinning" } else { "unpinning" });
    change(repository, name, &SnapshotEdit::Pin(is_pinned), doing, style)
}

pub(crate) fn meta(
    repository: &Repository,
    name: &SnapshotRef,
    set: &[String],
    unset: Vec<String>,
    style: Style,
) -> Outcome {
    if set.is_empty() && unset.is_empty() {
        let doing = || format!("reading the metadata of {name}");
        let snapshot = repository.catalog().resolve(name).doing(doing)?;
        return match style.json {
            true => print_json(&json!(snapshot.metadata)),
            false => print(&snapshot.metadata.to_text()),
        };
    }
    let doing = || format!("changing the metadata of {name}");
    unset.iter().try_for_each(|key| check_key(key)).doing(doing)?;
    let set = set.iter().map(|pair| parse_pair(pair)).collect::<cairn_store::Result<Vec<_>>>();
    let set = set.doing(doing)?.into_iter();
    let set = set.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    change(repository, name, &SnapshotEdit::Metadata { set, unset }, doing(), style)
}

/// Changes a snapshot and prints its name.
fn change(
    repository: &Repository,
    name: &SnapshotRef,
    edit: &SnapshotEdit,
    doing: String,
    style: Style,
) -> Outcome {
    let snapshot = repository.edit_snapshot(name, edit).doing(|| doing)?;
    if style.json {
        return print_json(&snapshot_json(&snapshot));
    }
    print(&format!("{}\n", snapshot.name()))
}
