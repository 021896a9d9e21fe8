//! `mirrors`: the mirrors that refer to images.

use std::collections::{BTreeMap, HashMap, HashSet};

use cairn_store::maintenance::unused_mirrors::{ForgetOptions, forget_unused};
use cairn_store::maintenance::usage::{Bytes, mirror_usage};
use cairn_store::{MirrorId, MirrorRecord, MirrorUse, Repository, now};
use serde_json::{Value, json};

use crate::args::{Forget, Style};
use crate::failure::{Doing, Outcome};
use crate::output::{Align, Listing, Table, count, or_dash, print, print_json};
use crate::progress::Activity;
use crate::time::{ago, utc};

pub(crate) fn list(repository: &Repository, style: Style) -> Outcome {
    let mirrors = repository.catalog().mirrors().doing(|| "listing the mirrors".into())?;
    let stale: HashSet<MirrorId> = maybe_stale(&mirrors).collect();
    // A damaged repository has mirrors, too.
    let alone = alone(repository);
    let alone_of =
        |id: &MirrorId| alone.as_ref().ok().map(|all| all.get(id).copied().unwrap_or_default());
    if style.json {
        let json = |mirror: &MirrorRecord| {
            let mut json = mirror_json(mirror, stale.contains(&mirror.id));
            json["alone_bytes"] = alone_of(&mirror.id).map(|bytes| bytes.chunks).into();
            json
        };
        return print_json(&mirrors.iter().map(json).collect());
    }
    let mut table = Table::new(&[
        ("MIRROR", Align::Left),
        ("PARENT", Align::Left),
        ("MODE", Align::Left),
        ("WRITER", Align::Right),
        ("HOST", Align::Left),
        ("ATTACHED", Align::Left),
        ("SEEN", Align::Left),
        ("ALONE", Align::Right),
        ("NOTE", Align::Left),
        ("DIRECTORY", Align::Left),
    ]);
    let mut forget = String::new();
    for mirror in mirrors {
        let is_stale = stale.contains(&mirror.id);
        if is_stale {
            forget += &format!("  cairn mirrors forget {}\n", mirror.id);
        }
        let note = match (is_stale, mirror.is_ephemeral) {
            (true, _) => Some("stale?"),
            (false, true) => Some("ephemeral"),
            (false, false) => None,
        };
        table.row([
            mirror.id.to_string(),
            format!("{}@{}", mirror.image, mirror.parent),
            mirror.mode.to_string(),
            or_dash(mirror.writer),
            mirror.host,
            utc(mirror.attached),
            ago(mirror.seen, now()),
            or_dash(alone_of(&mirror.id).map(|bytes| style.size(bytes.chunks))),
            or_dash(note),
            mirror.path,
        ]);
    }
    table.print()?;
    if let Err(error) = &alone {
        print(&format!("\nALONE is unknown: {error}\n"))?;
    }
    if forget.is_empty() {
        return Ok(());
    }
    print(&format!(
        "\nstale?: another mirror was attached in the same directory later. If the older one is \
         gone, forget it:\n{forget}"
    ))
}

/// The bytes that each mirror alone keeps from being freed.
fn alone(repository: &Repository) -> cairn_store::Result<BTreeMap<MirrorId, Bytes>> {
    let activity = Activity::new();
    let progress = |blobs| activity.set(|| format!("looked at {}", count(blobs, "blob")));
    mirror_usage(repository, &progress)
}

/// The mirrors in whose directory another mirror was attached later. The path does not prove that
/// the older mirror is gone: another file system may be mounted there, or two hosts may have the
/// same name.
fn maybe_stale(mirrors: &[MirrorRecord]) -> impl Iterator<Item = MirrorId> {
    let mut newest: HashMap<(&str, &str), u64> = HashMap::new();
    for mirror in mirrors {
        let attached = newest.entry((&mirror.host, &mirror.path)).or_default();
        *attached = mirror.attached.max(*attached);
    }
    mirrors
        .iter()
        .filter(move |one| one.writer.is_none())
        .filter(move |one| one.attached < newest[&(&*one.host, &*one.path)])
        .map(|one| one.id)
}

pub(crate) fn forget(repository: &Repository, args: &Forget, style: Style) -> Outcome {
    match (&args.id, args.unseen) {
        (Some(id), _) => forget_one(repository, id, style),
        (None, unseen) => {
            let options = ForgetOptions::new(unseen.unwrap_or(u64::MAX));
            let options = ForgetOptions { is_dry_run: args.dry_run, ..options };
            forget_all(repository, &options, style)
        }
    }
}

/// Forgets the mirrors that no process has used for a long time, and says of each why it stays or goes.
fn forget_all(repository: &Repository, options: &ForgetOptions, style: Style) -> Outcome {
    let heading = [
        ("MIRROR", Align::Left),
        ("PARENT", Align::Left),
        ("HOST", Align::Left),
        ("ACTION", Align::Left),
        ("REASON", Align::Left),
        ("DIRECTORY", Align::Left),
    ];
    let mut listing = Listing::new(style, &heading);
    let (mut forgotten, mut total) = (0, 0);
    let result = forget_unused(repository, options, &mut |mirror, used| {
        let action = match (&used, options.is_dry_run) {
            (MirrorUse::Unused(_), false) => "forgot",
            (MirrorUse::Unused(_), true) => "forget",
            _ => "keep",
        };
        total += 1;
        forgotten += u64::from(action != "keep");
        let reason = reason(&used, mirror, options);
        let json = || {
            let mut json = mirror_json(mirror, false);
            json["action"] = action.into();
            json["reason"] = reason.clone().into();
            json
        };
        let row = || {
            let parent = format!("{}@{}", mirror.image, mirror.parent);
            let (host, path) = (mirror.host.clone(), mirror.path.clone());
            [mirror.id.to_string(), parent, host, action.into(), reason.clone(), path]
        };
        listing.add(json, row);
        Ok(())
    });
    // What was forgotten before a failure is printed, too.
    listing.end()?;
    result.doing(|| "forgetting unused mirrors".into())?;
    if style.json {
        return Ok(());
    }
    let total = count(total, "mirror");
    match options.is_dry_run {
        true => print(&format!("would forget {forgotten} of {total}\n")),
        false => print(&format!("forgot {forgotten} of {total}\n")),
    }
}

fn reason(used: &MirrorUse, mirror: &MirrorRecord, options: &ForgetOptions) -> String {
    let seen = || ago(mirror.seen, options.now);
    match used {
        MirrorUse::Writing { pid } => format!("process {pid} writes"),
        MirrorUse::Recent(_) | MirrorUse::Unused(_) => format!("last used {}", seen()),
        MirrorUse::Future(_) => {
            format!("last used in the future, {}: a clock is or was wrong", utc(mirror.seen))
        }
    }
}

fn forget_one(repository: &Repository, id: &MirrorId, style: Style) -> Outcome {
    repository.forget_mirror(id).doing(|| format!("forgetting mirror {id}"))?;
    if style.json {
        return print_json(&json!({ "forgotten": id.to_string() }));
    }
    print(&format!(
        "forgot {id}: changes in its directory after its last snapshot can no longer be used\n"
    ))
}

fn mirror_json(mirror: &MirrorRecord, maybe_stale: bool) -> Value {
    json!({
        "id": mirror.id.to_string(),
        "image": mirror.image.as_str(),
        "parent": mirror.parent,
        "root": mirror.root.0.map(|id| id.to_string()),
        "mode": mirror.mode.as_str(),
        "host": mirror.host,
        "path": mirror.path,
        "attached": mirror.attached,
        "seen": mirror.seen,
        "ephemeral": mirror.is_ephemeral,
        "writer_pid": mirror.writer,
        "maybe_stale": maybe_stale,
    })
}

#[cfg(test)]
mod tests {
    use cairn_store::{MirrorId, MirrorRecord, Mode, Root};

    use super::maybe_stale;

    fn mirror(id: u8, host: &str, path: &str, attached: u64, writer: Option<u32>) -> MirrorRecord {
        MirrorRecord {
            id: MirrorId::from_bytes([id; 16]),
            image: "vm1".parse().unwrap(),
            host: host.into(),
            path: path.into(),
            mode: Mode::ReadWrite,
            parent: 1,
            root: Root(None),
            attached,
            seen: attached,
            is_ephemeral: false,
            writer,
        }
    }

    #[test]
    fn a_mirror_may_be_stale_if_a_later_one_uses_its_directory() {
        let all = [
            mirror(1, "a", "/m", 10, None),
            mirror(2, "a", "/m", 20, None),
            mirror(3, "a", "/m", 30, None),
            mirror(4, "b", "/m", 5, None),
            mirror(5, "a", "/other", 5, None),
            // Attached in the same second, so the order is unknown.
            mirror(6, "b", "/twins", 7, None),
            mirror(7, "b", "/twins", 7, None),
            // It runs, so it is not stale, whatever the clocks show.
            mirror(8, "c", "/m", 1, Some(77)),
            mirror(9, "c", "/m", 2, None),
        ];
        let stale: Vec<_> = maybe_stale(&all).collect();
        assert_eq!(stale, [1, 2].map(|id| MirrorId::from_bytes([id; 16])));
    }
}
