//! `disk`: guest I/O without a checkpoint, compared with a raw file and qemu-storage-daemon.

mod goals;
mod measure;
mod testbed;
mod workload;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use self::measure::{Figure, Window, measure};
use self::testbed::{Contender, Testbed};
use self::workload::{Areas, WORKLOADS, Workload};
use crate::args::Args;
use crate::report::chart::{self, Series};
use crate::report::{Report, table::Table};
use crate::site::Site;

/// The numbers of queues that a guest uses.
const QUEUES: [usize; 2] = [1, 2];

/// All rounds of one workload with a number of queues.
#[derive(Serialize)]
struct Row {
    workload: &'static str,
    queues: usize,
    #[serde(skip)]
    spec: Workload,
    /// The rounds of each contender, in the order of [`Contender::ALL`].
    rounds: [Vec<Figure>; Contender::ALL.len()],
}

impl Row {
    fn name(&self) -> String {
        format!("{}, {}q", self.workload, self.queues)
    }

    /// The medians of a contender.
    fn of(&self, contender: Contender) -> Figure {
        Figure::median(&self.rounds[contender as usize])
    }
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let mut rows = rows(args);
    let rounds = u64::from(args.rounds());
    let prefilled = if args.quick { 512 << 20 } else { 1 << 30 };
    // Two contenders share a disk. Each one needs its own fresh slices.
    let slices = rounds * rows.len() as u64 * 2;
    let mut testbed = Testbed::new(site, Areas::new(prefilled, slices))?;
    let window = Window::new(args.quick);
    for round in 0..rounds {
        let count = rows.len() as u64;
        for (at, row) in rows.iter_mut().enumerate() {
            eprintln!("round {} of {rounds}: {}", round + 1, row.name());
            for position in 0..Contender::ALL.len() {
                // The order rotates, so that no contender is always the first.
                let contender = Contender::ALL[(position + round as usize) % Contender::ALL.len()];
                let slice = (round * count + at as u64) * 2 + u64::from(contender.is_quiet());
                let figure = measure(&mut testbed, contender, row.spec, row.queues, slice, &window)
                    .with_context(|| format!("{}: {}", contender.name(), row.name()))?;
                row.rounds[contender as usize].push(figure);
            }
        }
    }
    Ok(Report {
        tables: vec![speed(&rows), latency(&rows), cpu(&rows)],
        goals: goals::goals(&rows),
        data: json!({ "contenders": Contender::ALL.map(Contender::name), "rows": rows }),
        charts: vec![("speed".into(), relative_speed(&rows))],
    })
}

fn rows(args: &Args) -> Vec<Row> {
    let row = |queues, spec: Workload| {
        let rounds = Default::default();
        Row { workload: spec.name, queues, spec, rounds }
    };
    let rows = QUEUES.into_iter().flat_map(|queues| WORKLOADS.map(|spec| row(queues, spec)));
    rows.filter(|row| args.wants(&row.name())).collect()
}

fn speed(rows: &[Row]) -> Table {
    let head = ["requests/s", "raw", "qemu", "cairn", "cairn MiB/s", "of qemu", "of raw"];
    let mut table =
        Table::new("Speed (depth is for each queue; write + flush counts pairs)", &head);
    for row in rows {
        let [raw, qemu, cairn] =
            [Contender::Raw, Contender::Qemu, Contender::Cairn].map(|c| row.of(c).iops);
        table.row([
            row.name(),
            format!("{raw:.0}"),
            format!("{qemu:.0}"),
            format!("{cairn:.0}"),
            format!("{:.0}", cairn * row.spec.len as f64 / (1 << 20) as f64),
            format!("{:.2}", cairn / qemu),
            format!("{:.2}", cairn / raw),
        ]);
    }
    table
}

fn latency(rows: &[Row]) -> Table {
    let head =
        ["latency in us", "qemu p50", "p99", "p99.9", "max", "cairn p50", "p99", "p99.9", "max"];
    let mut table = Table::new("Latency as the guest sees it", &head);
    for row in rows {
        let mut cells = vec![row.name()];
        for contender in [Contender::Qemu, Contender::Cairn] {
            let of = row.of(contender).latency;
            cells.extend([of.p50, of.p99, of.p999, of.max].map(|us| format!("{us:.0}")));
        }
        table.row(cells);
    }
    table
}

fn cpu(rows: &[Row]) -> Table {
    let head = [
        "us of CPU per request",
        "raw",
        "qemu, polls",
        "cairn, polls",
        "qemu",
        "cairn",
        "cairn of qemu",
    ];
    let mut table = Table::new("CPU time of the server (raw: with the load)", &head);
    for row in rows {
        let of = |contender| row.of(contender).cpu_us;
        table.row([
            row.name(),
            format!("{:.1}", of(Contender::Raw)),
            format!("{:.1}", of(Contender::Qemu)),
            format!("{:.1}", of(Contender::Cairn)),
            format!("{:.1}", of(Contender::QemuQuiet)),
            format!("{:.1}", of(Contender::CairnQuiet)),
            format!("{:.2}", of(Contender::CairnQuiet) / of(Contender::QemuQuiet)),
        ]);
    }
    table
}

fn relative_speed(rows: &[Row]) -> String {
    let groups: Vec<String> = rows.iter().map(Row::name).collect();
    let series: Vec<Series<f64>> = [Contender::Raw, Contender::Qemu, Contender::Cairn]
        .into_iter()
        .map(|contender| Series {
            name: contender.name().into(),
            points: rows
                .iter()
                .map(|row| row.of(contender).iops / row.of(Contender::Qemu).iops)
                .collect(),
        })
        .collect();
    chart::grouped_bars("Speed", "qemu-storage-daemon = 1", &groups, &series)
}
