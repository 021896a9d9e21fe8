//! `backup`: a disk image in a repository, a second version of it, and the removal of the first,
//! compared with backup programs.

mod contender;
mod source;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use self::contender::{Contender, Workplace};
use self::source::Source;
use crate::args::Args;
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::site::Site;
use crate::stats::median;
use crate::sys;

const MIB: f64 = (1 << 20) as f64;

/// What each contender does in a round, in this order.
const STEPS: [&str; 4] = ["first version", "second version", "remove the first", "read back"];
const FIRST: usize = 0;
const SECOND: usize = 1;
const REMOVE: usize = 2;
const READ_BACK: usize = 3;

/// The cost of one step.
#[derive(Clone, Copy, Debug, Serialize)]
struct Figure {
    seconds: f64,
    /// CPU time of the program and of what it has started, in seconds.
    cpu_s: f64,
    /// The space of the repository after the step, in bytes.
    space: u64,
}

/// The steps of one contender in a round.
#[derive(Clone, Debug, Serialize)]
struct Measured {
    contender: &'static str,
    steps: Vec<Figure>,
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let contenders = Contender::all(site)?;
    let size: u64 = if args.quick { 128 << 20 } else { 2 << 30 };
    let place = site.area()?;
    let mut source = Source::create(&place.path("disk.raw"), size)?;
    let mut rounds = Vec::new();
    for round in 0..args.rounds() {
        rounds.push(measure(site, &contenders, &mut source, round)?);
    }
    Ok(Report {
        tables: vec![times(&rounds, size), costs(&rounds, size)],
        goals: goals(&rounds),
        data: json!({ "bytes": size, "steps": STEPS, "rounds": rounds }),
        charts: Vec::new(),
    })
}

/// One round. Each step is measured for all contenders before the next one begins.
fn measure(
    site: &Site,
    contenders: &[Contender],
    source: &mut Source,
    round: u32,
) -> Result<Vec<Measured>> {
    let area = site.area()?;
    let mut all = Vec::new();
    for (at, contender) in contenders.iter().enumerate() {
        let work = Workplace::create(&area.path(&format!("work-{at}")))?;
        contender.prepare(&work).with_context(|| contender.name())?;
        let measured = Measured { contender: contender.name(), steps: Vec::new() };
        all.push((contender, work, measured));
    }
    for (step, name) in STEPS.iter().enumerate() {
        if step == SECOND {
            source.change()?;
        }
        // The order differs from step to step and from round to round.
        match round % 2 {
            0 => all.rotate_left(1),
            _ => all.reverse(),
        }
        for (contender, work, measured) in &mut all {
            source.warm_up()?;
            sys::settle();
            let (begin, cpu) = (Instant::now(), sys::children_cpu_time()?);
            match step {
                FIRST => contender.store(work, source.path(), 1),
                SECOND => contender.store(work, source.path(), 2),
                REMOVE => contender.remove_first(work),
                READ_BACK => source.compare(contender.read_second(work, source.path())),
                _ => unreachable!("all steps are listed"),
            }
            .with_context(|| format!("{}: {name}", contender.name()))?;
            let figure = Figure {
                seconds: begin.elapsed().as_secs_f64(),
                cpu_s: (sys::children_cpu_time()? - cpu).as_secs_f64(),
                space: space(&work.repository())?,
            };
            eprintln!(
                "round {}: {}, {name}: {:.2} s, {:.0} MiB stored",
                round + 1,
                contender.name(),
                figure.seconds,
                figure.space as f64 / MIB
            );
            measured.steps.push(figure);
        }
    }
    Ok(all.into_iter().map(|(_, _, measured)| measured).collect())
}

/// The space that a directory's files occupy, in bytes.
fn space(directory: &Path) -> Result<u64> {
    let mut sum = 0;
    let entries = fs::read_dir(directory);
    for entry in entries.with_context(|| format!("reading {}", directory.display()))? {
        let entry = entry?;
        sum += match entry.file_type()?.is_dir() {
            true => space(&entry.path())?,
            false => entry.metadata()?.blocks() * 512,
        };
    }
    Ok(sum)
}

/// The median over the rounds, or nothing for a contender that was not measured.
fn of(rounds: &[Vec<Measured>], name: &str, step: usize, value: fn(&Figure) -> f64) -> Option<f64> {
    let all = rounds.iter().flatten().filter(|one| one.contender == name);
    let values: Vec<f64> = all.map(|one| value(&one.steps[step])).collect();
    (!values.is_empty()).then(|| median(values))
}

fn names(rounds: &[Vec<Measured>]) -> Vec<&'static str> {
    let mut names: Vec<_> = rounds.iter().flatten().map(|one| one.contender).collect();
    // The order of `Contender::all`, whatever the order of the last round was.
    names.sort_by_key(|name| Contender::NAMES.iter().position(|other| other == name));
    names.dedup();
    names
}

fn times(rounds: &[Vec<Measured>], size: u64) -> Table {
    let mut head = vec!["seconds"];
    for step in STEPS {
        head.extend([step, "of cairn"]);
    }
    let title = format!("A disk image of {} MiB, 1 % of it changed", size >> 20);
    let mut table = Table::new(title, &head);
    let seconds = |name, step| of(rounds, name, step, |one| one.seconds).unwrap_or_default();
    for name in names(rounds) {
        let mut row = vec![name.to_owned()];
        for step in 0..STEPS.len() {
            row.push(format!("{:.2}", seconds(name, step)));
            row.push(format!("{:.1} x", seconds(name, step) / seconds(contender::CAIRN, step)));
        }
        table.row(row);
    }
    table
}

fn costs(rounds: &[Vec<Measured>], size: u64) -> Table {
    let head = [
        "CPU time and space",
        "first version s",
        "second version s",
        "remove s",
        "read back s",
        "space of the first",
        "of both",
        "after the removal",
    ];
    let mut table = Table::new("CPU time, and space relative to the image", &head);
    for name in names(rounds) {
        let cpu = |step| of(rounds, name, step, |one| one.cpu_s).unwrap_or_default();
        let space = |step| of(rounds, name, step, |one| one.space as f64).unwrap_or_default();
        let cpu = [FIRST, SECOND, REMOVE, READ_BACK].map(|step| format!("{:.2}", cpu(step)));
        let space = [FIRST, SECOND, REMOVE].map(|at| format!("{:.3} x", space(at) / size as f64));
        table.row(std::iter::once(name.to_owned()).chain(cpu).chain(space));
    }
    table
}

fn goals(rounds: &[Vec<Measured>]) -> Vec<Goal> {
    let mut goals = Vec::new();
    let seconds = |name, step| of(rounds, name, step, |one| one.seconds);
    for (name, import) in [(contender::RESTIC, 10.0), (contender::BORG, 6.0)] {
        for (step, least) in [(FIRST, import), (SECOND, 1.0), (REMOVE, 1.0)] {
            let both = seconds(name, step).zip(seconds(contender::CAIRN, step));
            let what = format!("{}: as fast as {name}", STEPS[step]);
            goals.extend(both.map(|(other, cairn)| Goal::at_least(what, other / cairn, least)));
        }
    }
    goals
}
