//! What a guest pays for a collection on the same disk.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use cairn_store::Repository;

use super::{CACHED, Results, collect_all, create, import, random};
use crate::args::Args;
use crate::io::{Connection, Queue, Shape};
use crate::load::{Kind, Pattern, Sample, Span, Watch, drive, write_once};
use crate::report::goals::Goal;
use crate::report::table::Table;
use crate::server::cairn::Cairn;
use crate::site::Site;
use crate::stats::{Latency, median};
use crate::sys::settle;

/// The pairs of measurements with and without collections.
const PAIRS: u64 = 5;

/// The requests that the guest keeps in flight.
const DEPTH: usize = 4;

/// The loads of the guest.
const LOADS: [(&str, Kind); 2] =
    [("4k mix 70/30", Kind::Mix(70)), ("4k write + flush", Kind::WriteFlush)];

/// Returns the latencies of each load and pair, alone and beside collections.
pub(super) fn run(
    site: &Site,
    args: &Args,
    results: &mut Results,
) -> Result<Vec<Vec<[Latency; 2]>>> {
    let area = site.area()?;
    let size: u64 = if args.quick { 64 << 20 } else { 1 << 30 };
    let cairn = Cairn::start(site, &area, size, &[])?;
    let span = Span::new(0, size);
    let shape = Shape { queues: 1, depth: DEPTH, longest: 256 << 10, polls: false };
    let mut disk = cairn.connect(shape)?;
    write_once(disk.first(), DEPTH, span)?;
    let repository = Repository::open(&area.store())?;
    create(&repository, "names", CACHED)?;
    let mut all = vec![Vec::new(); LOADS.len()];
    for pair in 0..PAIRS {
        for (load, (name, kind)) in LOADS.into_iter().enumerate() {
            eprintln!("pair {}: a guest with {name}", pair + 1);
            let mut latencies = [Latency::default(); 2];
            for beside in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
                // The collections free this image.
                let chunks = if args.quick { 256 } else { 2048 };
                import(&repository, "garbage", &random(pair * 10 + load as u64 + 1, chunks))?;
                repository.remove_image(&"garbage".parse()?, false)?;
                settle();
                let mut pattern = Pattern::random(kind, span, 4096, pair);
                let seconds = if args.quick { 1 } else { 4 };
                let during = Duration::from_secs(seconds);
                let collected = (beside == 1).then_some(&repository);
                latencies[beside] = measure(disk.first(), &mut pattern, during, collected)?;
                collect_all(&repository)?;
            }
            all[load].push(latencies);
        }
    }
    let head = ["load, depth 4", "p99 alone us", "beside collections us", "of pairs"];
    let mut table = Table::new("A guest beside collections on the same disk", &head);
    for ((name, _), pairs) in LOADS.into_iter().zip(&all) {
        let p99 = |beside: usize| median(pairs.iter().map(|pair| pair[beside].p99));
        let ratio = median(pairs.iter().map(|[alone, beside]| beside.p99 / alone.p99));
        let [alone, beside] = [p99(0), p99(1)].map(|p99| format!("{p99:.0}"));
        table.row([name.to_owned(), alone, beside, format!("{ratio:.2}")]);
        let goal = format!("p99 of a guest beside collections, {name}");
        results.goals.push(Goal::at_most(goal, ratio, 1.2));
    }
    results.tables.push(table);
    Ok(all)
}

/// The latencies of a load, with collections of the repository one after the other beside it.
fn measure(
    queue: &mut dyn Queue,
    pattern: &mut Pattern,
    during: Duration,
    repository: Option<&Repository>,
) -> Result<Latency> {
    let (watch, is_over) = (Watch::default(), AtomicBool::new(false));
    let samples: Vec<Sample> = thread::scope(|scope| {
        let load = scope.spawn(|| drive(queue, DEPTH, pattern, &watch));
        let collecting = scope.spawn(|| -> Result<()> {
            while let Some(repository) = repository.filter(|_| !is_over.load(Ordering::Relaxed)) {
                collect_all(repository)?;
            }
            Ok(())
        });
        thread::sleep(during);
        watch.stop();
        is_over.store(true, Ordering::Relaxed);
        collecting.join().expect("a collection does not panic")?;
        load.join().expect("a load does not panic")
    })?;
    Ok(Latency::of(samples.iter().map(Sample::nanoseconds).collect()))
}
