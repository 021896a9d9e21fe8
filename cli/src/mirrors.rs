//! `mirrors`: the mirrors that refer to images.

use std::collections::{HashMap, HashSet};

use cairn_store::{MirrorId, MirrorRecord, Repository};
use serde_json::{Value, json};

use crate::args::Style;
use crate::failure::{Doing, Outcome};
use crate::output::{Align, Table, or_dash, print, print_json};
use crate::time::utc;

pub(crate) fn list(repository: &Repository, style: Style) -> Outcome {
    let mirrors = repository.catalog().mirrors().doing(|| "listing the mirrors".into())?;
    let stale: HashSet<MirrorId> = maybe_stale(&mirrors).collect();
    if style.json {
        let json = |mirror| mirror_json(mirror, stale.contains(&mirror.id));
        return print_json(&mirrors.iter().map(json).collect());
    }
    let mut table = Table::new(&[
        ("MIRROR", Align::Left),
        ("PARENT", Align::Left),
        ("MODE", Align::Left),
        ("WRITER", Align::Right),
        ("HOST", Align::Left),
        ("ATTACHED", Align::Left),
        ("NOTE", Align::Left),
        ("DIRECTORY", Align::Left),
    ]);
    let mut forget = String::new();
    for mirror in mirrors {
        let is_stale = stale.contains(&mirror.id);
        if is_stale {
            forget += &format!("  cairn mirrors --forget {}\n", mirror.id);
        }
        table.row([
            mirror.id.to_string(),
            format!("{}@{}", mirror.image, mirror.parent),
            mirror.mode.to_string(),
            or_dash(mirror.writer),
            mirror.host,
            utc(mirror.attached),
            or_dash(is_stale.then_some("stale?")),
            mirror.path,
        ]);
    }
    table.print()?;
    if forget.is_empty() {
        return Ok(());
    }
    print(&format!(
        "\nstale?: another mirror was attached in the same directory later. If the older one is \
         gone, forget it:\n{forget}"
    ))
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

pub(crate) fn forget(repository: &Repository, id: &MirrorId, style: Style) -> Outcome {
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
