//! The tables and charts of the case `checkpoint`.

use super::session::Outcome;
use super::{MIB, Rounds, Size};
use crate::report::chart::{self, Mark, Series};
use crate::report::table::Table;
use crate::stats::{largest, median};

pub(super) fn tables(sizes: &[Size]) -> Vec<Table> {
    let mut tables: Vec<Table> =
        sizes.iter().flat_map(|size| [checkpoint(size), latency(size)]).collect();
    tables.push(rates(sizes));
    tables
}

fn checkpoint(size: &Size) -> Table {
    let head = [
        "contender",
        "pause us",
        "answer us",
        "stable s",
        "idle s",
        "merged s",
        "copied MiB",
        "work s",
        "with checkpoint s",
        "slowdown",
    ];
    let title = format!("{} dirty, {} writes of work", size.name(), size.plan.work);
    let mut table = Table::new(title, &head);
    for rounds in &size.contenders {
        let of = |value: fn(&Outcome) -> f64| rounds.median(value);
        let pauses = || rounds.rounds.iter().flat_map(|outcome| outcome.pauses_us.iter().copied());
        let copied = rounds.rounds.iter().filter_map(|outcome| outcome.copied_bytes);
        let copied: Vec<f64> = copied.map(|bytes| bytes as f64 / MIB as f64).collect();
        table.row([
            rounds.name.into(),
            match pauses().count() {
                0 => "-".into(),
                _ => format!("{:.0}, max {:.0}", median(pauses()), largest(pauses())),
            },
            format!("{:.0}", of(|o| o.answer_us)),
            format!("{:.2}", of(|o| o.stable_s)),
            format!("{:.2}", of(|o| o.idle_stable_s)),
            format!("{:.2}", of(|o| o.merged_s)),
            if copied.is_empty() { "-".into() } else { format!("{:.0}", median(copied)) },
            format!("{:.2}", of(|o| o.work_s.0)),
            format!("{:.2}", of(|o| o.work_s.1)),
            format!("{:.2}", of(Outcome::slowdown)),
        ]);
    }
    table
}

fn latency(size: &Size) -> Table {
    let head = [
        "contender",
        "iops before",
        "during",
        "first 2 s",
        "after",
        "silent 100 ms",
        "us before: p99",
        "p99.9",
        "max",
        "during: p99",
        "p99.9",
        "max",
        "after: p99",
        "p99.9",
        "max",
    ];
    let mut table = Table::new(format!("{} dirty, what the guest sees", size.name()), &head);
    for rounds in &size.contenders {
        let of = |value: fn(&Outcome) -> f64| format!("{:.0}", rounds.median(value));
        table.row([
            rounds.name.into(),
            of(|o| o.timeline.iops_before),
            of(|o| o.timeline.iops_during),
            of(|o| o.timeline.iops_first),
            of(|o| o.timeline.iops_after),
            of(|o| o.timeline.silent as f64),
            of(|o| o.timeline.before.p99),
            of(|o| o.timeline.before.p999),
            of(|o| o.timeline.before.max),
            of(|o| o.timeline.during.p99),
            of(|o| o.timeline.during.p999),
            of(|o| o.timeline.during.max),
            of(|o| o.timeline.after.p99),
            of(|o| o.timeline.after.p999),
            of(|o| o.timeline.after.max),
        ]);
    }
    table
}

/// The rate at which data becomes durable while the guest is idle.
fn rates(sizes: &[Size]) -> Table {
    let names: Vec<&str> = sizes[0].contenders.iter().map(|rounds| rounds.name).collect();
    let mut head = vec!["MiB/s, idle guest", "plain writer"];
    head.extend(names);
    let mut table = Table::new("Rate of storing", &head);
    for size in sizes {
        let rate = |seconds: f64| format!("{:.0}", (size.plan.dirty / MIB) as f64 / seconds);
        let mut cells = vec![size.name(), rate(median(size.plain_s.iter().copied()))];
        cells.extend(size.contenders.iter().map(|r| rate(r.median(|o| o.idle_stable_s))));
        table.row(cells);
    }
    table
}

pub(super) fn charts(sizes: &[Size]) -> Vec<(String, String)> {
    let timelines =
        sizes.iter().map(|size| (format!("{}mib", size.plan.dirty / MIB), timeline(size)));
    timelines.chain([("slowdown".into(), slowdown(sizes))]).collect()
}

/// The chart of writes over time, in the last round.
fn timeline(size: &Size) -> String {
    let line = |rounds: &Rounds| Series {
        name: rounds.name.into(),
        points: rounds.rounds.last().map_or(Vec::new(), |o| o.timeline.intervals.clone()),
    };
    let series: Vec<_> = size.contenders.iter().map(line).collect();
    let mut marks = vec![Mark { name: "checkpoint".into(), x: 0.0 }];
    for rounds in &size.contenders {
        let x = rounds.rounds.last().map_or(0.0, |o| o.stable_s);
        marks.push(Mark { name: format!("{} stable", rounds.name), x });
    }
    let title = format!("Guest writes around a checkpoint of {}", size.name());
    chart::lines(&title, "writes/s in 100 ms", "seconds since the request", &series, &marks[..2])
}

fn slowdown(sizes: &[Size]) -> String {
    let groups: Vec<String> = sizes.iter().map(Size::name).collect();
    let series: Vec<_> = (0..sizes[0].contenders.len())
        .map(|at| Series {
            name: sizes[0].contenders[at].name.into(),
            points: sizes.iter().map(|s| s.contenders[at].median(Outcome::slowdown)).collect(),
        })
        .collect();
    chart::grouped_bars("The same work with a checkpoint", "without = 1", &groups, &series)
}
