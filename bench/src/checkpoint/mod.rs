//! `checkpoint`: guest writes during a checkpoint, compared with QEMU's incremental backup and the
//! other strategies of the BlobCR paper (its figures 4 and 5).

mod cairn;
mod goals;
mod persist;
mod plain;
mod qemu;
mod redirect;
mod session;
mod strategy;
mod subject;
mod tables;
mod timeline;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use self::session::{Outcome, Plan};
use self::subject::Contender;
use crate::args::Args;
use crate::report::Report;
use crate::site::Site;
use crate::stats::median;

const MIB: u64 = 1 << 20;

/// All rounds with one number of dirty bytes.
#[derive(Serialize)]
struct Size {
    plan: Plan,
    /// The time in which a plain writer writes as many bytes, in seconds.
    plain_s: Vec<f64>,
    contenders: Vec<Rounds>,
}

#[derive(Serialize)]
struct Rounds {
    name: &'static str,
    #[serde(skip)]
    contender: Contender,
    rounds: Vec<Outcome>,
}

impl Rounds {
    fn median(&self, value: impl Fn(&Outcome) -> f64) -> f64 {
        median(self.rounds.iter().map(value))
    }
}

impl Size {
    fn new(dirty: u64, args: &Args) -> Size {
        let rounds = |contender: Contender| {
            let name = contender.name();
            Rounds { name, contender, rounds: Vec::new() }
        };
        let wanted = Contender::ALL.into_iter().filter(|contender| args.wants(contender.name()));
        let contenders = wanted.map(rounds).collect();
        Size { plan: Plan::new(dirty, args.quick), plain_s: Vec::new(), contenders }
    }

    fn name(&self) -> String {
        format!("{} MiB", self.plan.dirty / MIB)
    }

    fn of(&self, contender: Contender) -> Option<&Rounds> {
        self.contenders.iter().find(|rounds| rounds.contender == contender)
    }
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let sizes: &[u64] =
        if args.quick { &[64 * MIB, 256 * MIB] } else { &[64 * MIB, 1024 * MIB, 4096 * MIB] };
    let mut sizes: Vec<Size> = sizes.iter().map(|dirty| Size::new(*dirty, args)).collect();
    for round in 0..args.rounds() {
        for size in &mut sizes {
            // The largest size is measured once: it takes long, so its result is less noisy.
            if size.plan.dirty > 2048 * MIB && round > 0 {
                continue;
            }
            measure(site, size, round)?;
        }
    }
    Ok(Report {
        tables: tables::tables(&sizes),
        goals: goals::goals(&sizes),
        data: json!({ "sizes": sizes }),
        charts: tables::charts(&sizes),
    })
}

/// Measures one round of all contenders.
fn measure(site: &Site, size: &mut Size, round: u32) -> Result<()> {
    let name = size.name();
    size.plain_s.push(plain::write(site, size.plan.dirty)?);
    let count = size.contenders.len();
    for position in 0..count {
        // The order rotates, so that no contender is always the first.
        let rounds = &mut size.contenders[(position + round as usize) % count];
        let contender = rounds.contender;
        eprintln!("round {}: {name} dirty, {}", round + 1, contender.name());
        let area = site.area()?;
        let mut subject = contender.start(site, &area, size.plan.dirty)?;
        let outcome = session::run(&mut *subject, &size.plan)
            .with_context(|| format!("{}, {name} dirty", contender.name()))?;
        rounds.rounds.push(outcome);
    }
    Ok(())
}
