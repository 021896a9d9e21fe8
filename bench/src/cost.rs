//! `cost`: the cost of a checkpoint of the same changes for images of different sizes.

use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use crate::args::Args;
use crate::io::{Connection, Shape};
use crate::load::{Span, write_once};
use crate::proc;
use crate::report::chart::{self, Series};
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::server::cairn::Cairn;
use crate::site::Site;
use crate::stats::{largest, median};
use crate::sys;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

const SIZES: [u64; 4] = [GIB, 64 * GIB, TIB, 8 * TIB];
const NAMES: [&str; 4] = ["1 GiB", "64 GiB", "1 TiB", "8 TiB"];

const DIRTY: u64 = 256 * MIB;
/// The number of places in the image at which the changes are.
const PLACES: u64 = 16;
/// Checkpoints in each round. All have the same changes; the first one is of an empty image.
const CHECKPOINTS: usize = 3;

/// The largest ratio between the sizes that counts as no difference.
const FLAT: f64 = 1.5;
/// Memory that does not depend on the size, in bytes: buffers, memory for copies, caches, stacks.
const POOLS: u64 = 160 * MIB;
/// Memory for each TiB of the image, in bytes.
const PER_TIB: u64 = 64 * MIB;

#[derive(Clone, Debug, Serialize)]
struct Figure {
    /// The pause that the server reports, in microseconds.
    pause_us: Vec<f64>,
    /// The time from the request to stable, in seconds.
    stable_s: Vec<f64>,
    start_s: f64,
    /// Resident memory before the first write, in bytes.
    resident_before: u64,
    /// Resident memory at the end, in bytes.
    resident: u64,
    /// The most resident memory, in bytes.
    peak: u64,
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let mut rounds: [Vec<Figure>; 4] = Default::default();
    for round in 0..args.rounds() {
        for ((size, name), figures) in SIZES.iter().zip(NAMES).zip(&mut rounds) {
            eprintln!("round {}: an image of {name}", round + 1);
            figures.push(measure(site, *size).with_context(|| format!("an image of {name}"))?);
        }
    }
    Ok(Report {
        tables: vec![table(&rounds)],
        goals: goals(&rounds),
        data: json!({ "images": NAMES, "rounds": rounds }),
        charts: vec![("size".into(), chart(&rounds))],
    })
}

fn measure(site: &Site, size: u64) -> Result<Figure> {
    let area = site.area()?;
    let begin = Instant::now();
    let cairn = Cairn::start(site, &area, size, &[])?;
    let start_s = begin.elapsed().as_secs_f64();
    let resident_before = proc::memory(cairn.pid())?.resident;
    let mut control = cairn.control()?;
    let mut connection =
        cairn.connect(Shape { queues: 1, depth: 8, longest: 256 << 10, polls: false })?;
    let (mut pause_us, mut stable_s) = (Vec::new(), Vec::new());
    for _ in 0..CHECKPOINTS {
        for place in 0..PLACES {
            let span = Span::new(size / PLACES * place, DIRTY / PLACES);
            write_once(connection.first(), 8, span)?;
        }
        sys::settle();
        let asked = Instant::now();
        pause_us.push(control.checkpoint()?.pause_us as f64);
        control.stable()?;
        stable_s.push(asked.elapsed().as_secs_f64());
    }
    let memory = proc::memory(cairn.pid())?;
    let (resident, peak) = (memory.resident, memory.peak);
    Ok(Figure { pause_us, stable_s, start_s, resident_before, resident, peak })
}

fn pause(figures: &[Figure]) -> f64 {
    median(figures.iter().flat_map(|figure| figure.pause_us.iter().copied()))
}

fn stable(figures: &[Figure]) -> f64 {
    median(figures.iter().flat_map(|figure| figure.stable_s.iter().copied()))
}

fn mib(figures: &[Figure], bytes: fn(&Figure) -> u64) -> f64 {
    median(figures.iter().map(|figure| bytes(figure) as f64 / MIB as f64))
}

fn table(rounds: &[Vec<Figure>]) -> Table {
    let head = [
        "image",
        "pause us",
        "largest",
        "stable s",
        "start s",
        "MiB at start",
        "MiB after",
        "MiB at most",
    ];
    let mut table = Table::new("256 MiB dirty in 16 places", &head);
    for (name, figures) in NAMES.iter().zip(rounds) {
        let pauses = figures.iter().flat_map(|figure| figure.pause_us.iter().copied());
        table.row([
            name.to_string(),
            format!("{:.0}", pause(figures)),
            format!("{:.0}", largest(pauses)),
            format!("{:.3}", stable(figures)),
            format!("{:.2}", median(figures.iter().map(|figure| figure.start_s))),
            format!("{:.0}", mib(figures, |figure| figure.resident_before)),
            format!("{:.0}", mib(figures, |figure| figure.resident)),
            format!("{:.0}", mib(figures, |figure| figure.peak)),
        ]);
    }
    table
}

fn goals(rounds: &[Vec<Figure>]) -> Vec<Goal> {
    let spread = |value: fn(&[Figure]) -> f64| {
        let values: Vec<f64> = rounds.iter().map(|figures| value(figures)).collect();
        largest(values.iter().copied()) / values.iter().copied().fold(f64::MAX, f64::min).max(1e-9)
    };
    let mut goals = vec![
        Goal::at_most("pause, largest of smallest over the sizes", spread(pause), FLAT),
        Goal::at_most("time to stable, largest of smallest", spread(stable), FLAT),
    ];
    for ((size, name), figures) in SIZES.iter().zip(NAMES).zip(rounds) {
        let allowed = POOLS as f64 + PER_TIB as f64 * *size as f64 / TIB as f64;
        let peak = mib(figures, |figure| figure.peak);
        let what = format!("{name}: memory, of 64 MiB for each TiB and pools of 160 MiB");
        goals.push(Goal::limit(what, peak, allowed / MIB as f64, "MiB"));
    }
    goals
}

fn chart(rounds: &[Vec<Figure>]) -> String {
    let relative = |name: &str, value: fn(&[Figure]) -> f64| Series {
        name: name.into(),
        points: rounds.iter().map(|figures| value(figures) / value(&rounds[0])).collect(),
    };
    let series = [
        relative("pause", pause),
        relative("time to stable", stable),
        relative("memory", |figures| mib(figures, |figure| figure.peak)),
    ];
    let groups: Vec<String> = NAMES.iter().map(|name| name.to_string()).collect();
    chart::grouped_bars("The same checkpoint on larger images", "1 GiB = 1", &groups, &series)
}
