//! What a commit beside a collection pays.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::Result;

use super::{CACHED, Results, collect_all, create, import, open, random};
use crate::args::Args;
use crate::report::goals::Goal;
use crate::report::table::Table;
use crate::site::Site;
use crate::stats::median;
use crate::sys::settle;

/// The pairs of commits with and without a collection.
const PAIRS: usize = 5;

/// Commits alone and beside collections that have something to free.
pub(super) fn run(site: &Site, args: &Args, results: &mut Results) -> Result<Vec<(f64, f64)>> {
    let area = site.area()?;
    let chunks = if args.quick { 256 } else { 2048 };
    let path = area.path("commits");
    let writer = open(&path)?;
    create(&writer, "names", CACHED)?;
    let mut pairs = Vec::new();
    for pair in 0..PAIRS as u64 {
        eprintln!("pair {}: commits", pair + 1);
        let mut seconds = [0.0; 2];
        for beside in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
            let seed = pair * 10 + beside as u64 + 1;
            import(&writer, "garbage", &random(seed << 32, chunks))?;
            writer.remove_image(&"garbage".parse()?, false)?;
            let contents = random(seed, chunks);
            settle();
            let is_over = AtomicBool::new(beside == 0);
            seconds[beside] = thread::scope(|scope| {
                let collecting = scope.spawn(|| -> Result<()> {
                    while !is_over.load(Ordering::Relaxed) {
                        collect_all(&open(&path)?)?;
                    }
                    Ok(())
                });
                let taken = import(&writer, &format!("image{seed}"), &contents);
                is_over.store(true, Ordering::Relaxed);
                collecting.join().expect("a collection does not panic")?;
                taken
            })?;
            writer.remove_image(&format!("image{seed}").parse()?, false)?;
            collect_all(&writer)?;
        }
        pairs.push((seconds[0], seconds[1]));
    }
    let [alone, beside] =
        [median(pairs.iter().map(|pair| pair.0)), median(pairs.iter().map(|pair| pair.1))];
    let mut table = Table::new("An import, in seconds", &["alone", "beside collections"]);
    table.row([format!("{alone:.3}"), format!("{beside:.3}")]);
    results.tables.push(table);
    let slower = median(pairs.iter().map(|pair| pair.1 / pair.0));
    results.goals.push(Goal::at_most("an import beside collections, of pairs", slower, 1.1));
    Ok(pairs)
}
