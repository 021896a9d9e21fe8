//! `gc`: deletes the data that nothing refers to.

use cairn_store::maintenance::collection::{
    CollectionOptions, CollectionProgress, CollectionReport, collect,
};
use cairn_store::{CompletedCollection, Repository, SpaceHolder, now};
use serde_json::{Value, json};

use crate::args::Style;
use crate::failure::{Doing, Outcome};
use crate::output::{Align, Table, count, or_dash, print, print_json};
use crate::progress::Activity;
use crate::time::{ago, utc};

pub(crate) fn gc(repository: &Repository, options: &CollectionOptions, style: Style) -> Outcome {
    let last = repository.catalog().last_collection().doing(|| "collecting garbage".into())?;
    let activity = Activity::new();
    let report = collect(repository, options, &|progress| {
        activity.set(|| match progress {
            CollectionProgress::Marking { blobs } => format!("marked {}", count(blobs, "blob")),
            CollectionProgress::Sweeping { seen, freed } => {
                format!("looked at {}, freed {}", count(seen, "stored blob"), style.size(freed))
            }
        });
    });
    drop(activity);
    let report = report.doing(|| "collecting garbage".into())?;
    match style.json {
        true => print_json(&report_json(&report, options, last)),
        false => {
            print_last(last, style)?;
            print_text(&report, options, style)
        }
    }
}

fn print_last(last: Option<CompletedCollection>, style: Style) -> Outcome {
    print(&match last {
        Some(CompletedCollection { number, time, freed_bytes }) => format!(
            "last complete collection: {}, {} ({}), freed {}\n",
            number.0,
            ago(time, now()),
            utc(time),
            style.size(freed_bytes)
        ),
        None => "last complete collection: none\n".into(),
    })
}

fn print_text(report: &CollectionReport, options: &CollectionOptions, style: Style) -> Outcome {
    let CollectionReport { number, live, freed, waiting, .. } = report;
    let objects = |objects| count(objects, "object");
    let (kept, gone) = (style.size(live.bytes), style.size(freed.bytes));
    let verb = if options.dry_run { "would free" } else { "freed" };
    print(&format!(
        "collection {}: kept {kept} in {}, {verb} {gone} in {}\n",
        number.0,
        objects(live.objects),
        objects(freed.objects)
    ))?;
    if waiting.objects > 0 {
        let reason = match report.holders.iter().any(|holder| holder.collection.is_some()) {
            true => "commits that run may need it, or it is younger than the grace period",
            false => "it is younger than the grace period; --grace 0s frees it",
        };
        print(&format!(
            "{} of garbage in {} stays: {reason}\n",
            style.size(waiting.bytes),
            objects(waiting.objects)
        ))?;
    }
    for (peer, reason) in &report.silent {
        print(&format!("garbage stays on peer {peer}: {reason}\n"))?;
    }
    if report.holders.is_empty() {
        return Ok(());
    }
    let heading = [
        ("HOLDS SPACE", Align::Left),
        ("HOST", Align::Left),
        ("SINCE", Align::Left),
        ("WHAT", Align::Left),
    ];
    let mut table = Table::new(&heading);
    for SpaceHolder { kind, what, host, since, .. } in &report.holders {
        let host = or_dash((!host.is_empty()).then_some(host));
        table.row([(*kind).into(), host, utc(*since), what.clone()]);
    }
    print("\n")?;
    table.print()
}

fn report_json(
    report: &CollectionReport,
    options: &CollectionOptions,
    last: Option<CompletedCollection>,
) -> Value {
    let last = last.map(|one| {
        json!({ "collection": one.number.0, "time": one.time, "freed_bytes": one.freed_bytes })
    });
    let holder = |one: &SpaceHolder| {
        json!({
            "kind": one.kind,
            "what": one.what,
            "host": one.host,
            "since": one.since,
            "collection": one.collection.map(|number| number.0),
        })
    };
    let silent = report.silent.iter();
    json!({
        "collection": report.number.0,
        "dry_run": options.dry_run,
        "last_complete": last,
        "bound": report.bound.0,
        "roots": report.roots,
        "marked": report.marked,
        "live_objects": report.live.objects,
        "live_bytes": report.live.bytes,
        "freed_objects": report.freed.objects,
        "freed_bytes": report.freed.bytes,
        "waiting_objects": report.waiting.objects,
        "waiting_bytes": report.waiting.bytes,
        "holders": report.holders.iter().map(holder).collect::<Vec<_>>(),
        "silent_peers": silent
            .map(|(peer, reason)| json!({ "peer": peer.to_string(), "reason": reason }))
            .collect::<Vec<_>>(),
    })
}
