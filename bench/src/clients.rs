//! `clients`: eight clients that store data at the same time, compared with one.

use std::thread;

use anyhow::{Context, Result, anyhow};
use cairn_store::encoding::{Redundancy, StoragePolicy};
use serde::Serialize;
use serde_json::json;

use crate::args::Args;
use crate::cluster::Testbed;
use crate::cluster::data::Data;
use crate::cluster::persist::persist;
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::site::Site;
use crate::stats::median;

const MIB: f64 = (1 << 20) as f64;
const CLIENTS: usize = 8;
const REDUNDANCY: Redundancy = Redundancy::ReedSolomon { data: 4, parity: 4 };

#[derive(Clone, Debug, Serialize)]
struct Figure {
    /// The rate of all clients together, in MiB/s.
    rate: f64,
    /// The rate of the slowest client, relative to the mean rate.
    least: f64,
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let mut data = Data::new(if args.quick { 256 << 20 } else { 1 << 30 });
    let mut rounds: [Vec<Figure>; 2] = Default::default();
    let mut measurement = 0;
    for round in 0..args.rounds() {
        for (clients, figures) in [1, CLIENTS].into_iter().zip(&mut rounds) {
            eprintln!("round {}: {clients} clients", round + 1);
            measurement += 1;
            data.make_unique(measurement);
            let figure = measure(site, &data, clients)?;
            eprintln!("  {:.0} MiB/s, slowest client {:.2} of the mean", figure.rate, figure.least);
            figures.push(figure);
        }
    }
    let [one, many] = rounds.each_ref().map(|figures| median(figures.iter().map(|one| one.rate)));
    let least = median(rounds[1].iter().map(|one| one.least));
    let mut table = Table::new("rs=4+4, chunks of 256 KiB", &["clients", "MiB/s", "least of fair"]);
    table.row(["1".into(), format!("{one:.0}"), "-".into()]);
    table.row([CLIENTS.to_string(), format!("{many:.0}"), format!("{least:.2} x")]);
    let goals = vec![
        Goal::at_least("eight clients of one, rate together", many / one, 0.9),
        Goal::at_least("the slowest client of its fair share", least, 0.5),
    ];
    let data = json!({ "rounds": rounds });
    Ok(Report { tables: vec![table], goals, data, charts: Vec::new() })
}

fn measure(site: &Site, data: &Data, clients: usize) -> Result<Figure> {
    let testbed = Testbed::start(site, None, false)?;
    let policy: StoragePolicy = REDUNDANCY.into();
    let handles = (0..clients).map(|_| testbed.client()).collect::<Result<Vec<_>>>()?;
    let seconds: Vec<f64> = thread::scope(|scope| {
        let running: Vec<_> = handles
            .iter()
            .zip(data.parts(clients))
            .map(|(client, part)| scope.spawn(move || persist(client, part, &policy)))
            .collect();
        let join = |one: thread::ScopedJoinHandle<'_, Result<f64>>| {
            one.join().map_err(|_| anyhow!("a client panicked")).and_then(|result| result)
        };
        running.into_iter().map(join).collect::<Result<_>>()
    })
    .with_context(|| format!("{clients} clients"))?;
    // All clients store the same amount, so the time of the slowest one is the time of all.
    let longest = seconds.iter().copied().fold(0.0, f64::max);
    let rate = data.bytes().len() as f64 / MIB / longest;
    // The rate of the slowest client, relative to the mean rate.
    let rates: Vec<f64> = seconds.iter().map(|seconds| 1.0 / seconds).collect();
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    let least = rates.iter().copied().fold(f64::MAX, f64::min) / mean;
    Ok(Figure { rate, least })
}
