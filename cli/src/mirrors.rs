//! The mirrors that refer to images: `mirrors`.

use cairn_store::{MirrorId, MirrorRecord, Repository};
use serde_json::{Value, json};

use crate::args::Style;
use crate::failure::{Doing, Outcome};
use crate::output::{Align, Table, or_dash, print, print_json};
use crate::time::utc;

pub(crate) fn list(repository: &Repository, style: Style) -> Outcome {
    let mirrors = repository.mirrors().doing(|| "listing the mirrors".into())?;
    if style.json {
        return print_json(&mirrors.iter().map(mirror_json).collect());
    }
    let mut table = Table::new(&[
        ("MIRROR", Align::Left),
        ("PARENT", Align::Left),
        ("MODE", Align::Left),
        ("WRITER", Align::Right),
        ("HOST", Align::Left),
        ("ATTACHED", Align::Left),
        ("DIRECTORY", Align::Left),
    ]);
    for mirror in mirrors {
        table.row([
            mirror.id.to_string(),
            format!("{}@{}", mirror.image, mirror.parent),
            mirror.mode.to_string(),
            or_dash(mirror.writer),
            mirror.host,
            utc(mirror.attached),
            mirror.path,
        ]);
    }
    table.print()
}

pub(crate) fn forget(repository: &Repository, id: &MirrorId, style: Style) -> Outcome {
    repository.forget_mirror(id).doing(|| format!("forgetting mirror {id}"))?;
    if style.json {
        return print_json(&json!({ "forgotten": id.to_string() }));
    }
    print(&format!("forgot {id}\n"))
}

fn mirror_json(mirror: &MirrorRecord) -> Value {
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
    })
}
