//! `redundancy`: the cost of storing data for one client, with replicas and with Reed-Solomon
//! codes.

use anyhow::{Context, Result};
use cairn_store::encoding::{Redundancy, StoragePolicy};
use serde::Serialize;
use serde_json::json;

use crate::args::Args;
use crate::cluster::Testbed;
use crate::cluster::copy::copy;
use crate::cluster::data::Data;
use crate::cluster::link::{Link, RATE};
use crate::cluster::persist::persist;
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::site::Site;
use crate::stats::median;

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;

/// A redundancy, and the network between client and peers.
#[derive(Clone, Copy, Debug)]
struct Contender {
    name: &'static str,
    redundancy: &'static str,
    limited: bool,
    tls: bool,
}

const fn contender(
    name: &'static str,
    redundancy: &'static str,
    limited: bool,
    tls: bool,
) -> Contender {
    Contender { name, redundancy, limited, tls }
}

const ALL: [Contender; 7] = [
    contender("replicas=4, loopback", "replicas=4", false, false),
    contender("replicas=2, loopback", "replicas=2", false, false),
    contender("rs=4+4, loopback", "rs=4+4", false, false),
    contender("rs=4+4, TLS", "rs=4+4", false, true),
    contender("replicas=4, 1 Gbit/s", "replicas=4", true, false),
    contender("replicas=2, 1 Gbit/s", "replicas=2", true, false),
    contender("rs=4+4, 1 Gbit/s", "rs=4+4", true, false),
];

/// How often a round measures the contenders without a limited link.
const PASSES: usize = 3;

/// The name of the comparison: a copy of the data over TCP into a file.
const COPY: &str = "copy over TCP";

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Figure {
    seconds: f64,
    bytes: f64,
    client_cpu_s: f64,
    peers_cpu_s: f64,
    /// Bytes stored on the peers.
    space: f64,
    /// Bytes that the client sent, counted by its network interface.
    sent: f64,
    /// Bytes that the client sent, counted by the limit of the link.
    limited: f64,
    /// Seconds to store the same chunks again, by a client without cached state.
    known_seconds: f64,
    /// Bytes on the link while the same chunks are stored again.
    known_traffic: f64,
}

impl Figure {
    fn rate(&self) -> f64 {
        self.bytes / MIB / self.seconds
    }

    fn known_rate(&self) -> f64 {
        self.bytes / MIB / self.known_seconds
    }

    fn cpu(&self) -> f64 {
        (self.client_cpu_s + self.peers_cpu_s) / (self.bytes / GIB)
    }

    fn busy(&self) -> f64 {
        self.limited * 8.0 / self.seconds / RATE
    }
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let (unlimited, limited) =
        if args.quick { (256 << 20, 64 << 20) } else { (1 << 30, 256 << 20) };
    let mut data = [Data::new(unlimited), Data::new(limited)];
    let link = Link::new().context("creating a limited link, which needs root, ip and tc")?;
    // The first use of memory and of the page cache is slow in a virtual machine that has not used
    // them for long.
    copy(site, data[0].bytes())?;
    let mut rounds: Vec<Vec<(String, Figure)>> = Vec::new();
    let mut measurement = 0;
    for round in 0..args.rounds() {
        let mut figures = Vec::new();
        for one in order(args) {
            let Some(one) = one else {
                eprintln!("round {}: {COPY}", round + 1);
                let (seconds, cpu) = copy(site, data[0].bytes())?;
                let (bytes, client_cpu_s) = (data[0].bytes().len() as f64, cpu.as_secs_f64());
                let figure = Figure { seconds, bytes, client_cpu_s, ..Figure::default() };
                figures.push((COPY.into(), figure));
                continue;
            };
            eprintln!("round {}: {}", round + 1, one.name);
            let data = &mut data[usize::from(one.limited)];
            measurement += 1;
            data.make_unique(measurement);
            let figure = measure(site, one, data, &link).with_context(|| one.name)?;
            eprintln!(
                "  {:.0} MiB/s, known chunks {:.0} MiB/s, CPU {:.2} + {:.2} s",
                figure.rate(),
                figure.known_rate(),
                figure.client_cpu_s,
                figure.peers_cpu_s
            );
            figures.push((one.name.into(), figure));
        }
        rounds.push(figures);
    }
    let (tables, goals) = (vec![table(&rounds)], goals(&rounds));
    Ok(Report { tables, goals, data: json!({ "rounds": rounds }), charts: Vec::new() })
}

/// The order of measurements in a round. `None` stands for the copy. Without a limited link,
/// results depend on the state of the machine, which changes within seconds. So these contenders
/// are measured several times, in alternating order.
fn order(args: &Args) -> Vec<Option<&'static Contender>> {
    let wanted = |limited| {
        ALL.iter().filter(move |one| one.limited == limited && args.wants(one.name)).map(Some)
    };
    let mut all = Vec::new();
    for pass in 0..if args.quick { 1 } else { PASSES } {
        let once = std::iter::once(None).chain(wanted(false));
        match pass % 2 {
            0 => all.extend(once),
            _ => all.extend(once.collect::<Vec<_>>().into_iter().rev()),
        }
    }
    all.extend(wanted(true));
    all
}

fn measure(site: &Site, one: &Contender, data: &Data, link: &Link) -> Result<Figure> {
    let testbed = Testbed::start(site, one.limited.then_some(link), one.tls)?;
    let policy: StoragePolicy = one.redundancy.parse::<Redundancy>()?.into();
    let client = testbed.client()?;
    let (before, cpu) = (link.traffic()?, testbed.cpu_time()?);
    let seconds = persist(&client, data.bytes(), &policy)?;
    let (after, cpu_after) = (link.traffic()?, testbed.cpu_time()?);
    let space = testbed.used(&client)? as f64;
    // A client without cached state asks the peers for every chunk.
    let other = testbed.client()?;
    let asked = link.traffic()?;
    let known_seconds = persist(&other, data.bytes(), &policy)?;
    let answered = link.traffic()?;
    let counters = other.counters();
    anyhow::ensure!(counters.sent == 0, "chunks that the peers have were sent: {counters:?}");
    let traffic = (answered.sent - asked.sent) + (answered.received - asked.received);
    Ok(Figure {
        seconds,
        bytes: data.bytes().len() as f64,
        client_cpu_s: (cpu_after.0 - cpu.0).as_secs_f64(),
        peers_cpu_s: (cpu_after.1 - cpu.1).as_secs_f64(),
        space,
        sent: (after.sent - before.sent) as f64,
        limited: (after.limited - before.limited) as f64,
        known_seconds,
        known_traffic: traffic as f64,
    })
}

/// The median over all rounds.
fn of(rounds: &[Vec<(String, Figure)>], name: &str, value: fn(&Figure) -> f64) -> Option<f64> {
    let figures = rounds.iter().flatten().filter(|(other, _)| other == name);
    let values: Vec<f64> = figures.map(|(_, figure)| value(figure)).collect();
    (!values.is_empty()).then(|| median(values))
}

fn table(rounds: &[Vec<(String, Figure)>]) -> Table {
    let head = [
        "persisting",
        "MiB/s",
        "CPU s/GiB",
        "client",
        "peers",
        "space",
        "traffic",
        "link busy",
        "known MiB/s",
        "known traffic",
    ];
    let mut table = Table::new("One client, eight peers, chunks of 256 KiB", &head);
    let names = std::iter::once(COPY).chain(ALL.iter().map(|one| one.name));
    for (at, name) in names.enumerate() {
        let figure = |value: fn(&Figure) -> f64| of(rounds, name, value).unwrap_or(0.0);
        if of(rounds, name, Figure::rate).is_none() {
            continue;
        }
        let limited = at > 0 && ALL[at - 1].limited;
        let only = |applies: bool, text: String| if applies { text } else { "-".into() };
        table.row([
            name.to_string(),
            format!("{:.0}", figure(Figure::rate)),
            format!("{:.2}", figure(Figure::cpu)),
            format!("{:.2}", figure(|one| one.client_cpu_s / (one.bytes / GIB))),
            format!("{:.2}", figure(|one| one.peers_cpu_s / (one.bytes / GIB))),
            only(at > 0, format!("{:.3} x", figure(|one| one.space / one.bytes))),
            only(limited, format!("{:.3} x", figure(|one| one.sent / one.bytes))),
            only(limited, format!("{:.1} %", 100.0 * figure(Figure::busy))),
            only(at > 0, format!("{:.0}", figure(Figure::known_rate))),
            only(limited, format!("{:.2} %", 100.0 * figure(|one| one.known_traffic / one.bytes))),
        ]);
    }
    table
}

fn goals(rounds: &[Vec<(String, Figure)>]) -> Vec<Goal> {
    let mut goals = Vec::new();
    let mut ratio = |what: &str, one: Option<f64>, other: Option<f64>, least, most| {
        let Some(ratio) = one.zip(other).map(|(one, other)| one / other) else { return };
        let (least, most): (Option<f64>, Option<f64>) = (least, most);
        goals.extend(least.map(|least| Goal::at_least(what, ratio, least)));
        goals.extend(most.map(|most| Goal::at_most(what, ratio, most)));
    };
    let rate = |name| of(rounds, name, Figure::rate);
    let [copies, two, code, tls, slow_copies, slow_two, slow_code] = ALL.map(|one| one.name);
    ratio("rs=4+4 of replicas=4, rate", rate(code), rate(copies), Some(1.38), None);
    let (slow, slow_two) = (rate(slow_code), rate(slow_two));
    ratio("1 Gbit/s: rs=4+4 of replicas=4, rate", slow, rate(slow_copies), Some(1.8), None);
    ratio("1 Gbit/s: rs=4+4 of replicas=2, rate", slow, slow_two, Some(0.9), Some(1.1));
    let one = Some(1.0);
    let traffic = of(rounds, slow_code, |one| one.sent / one.bytes);
    ratio("1 Gbit/s: rs=4+4, traffic of the data", traffic, one, None, Some(2.05));
    let space = of(rounds, slow_code, |one| one.space / one.bytes);
    ratio("rs=4+4, space of the data", space, one, None, Some(2.05));
    let busy = of(rounds, slow_code, Figure::busy);
    ratio("1 Gbit/s: rs=4+4, the link is busy", busy, one, Some(0.93), None);
    let cpu = |name| of(rounds, name, Figure::cpu);
    ratio("rs=4+4 of the copy, CPU time", cpu(code), cpu(COPY), None, Some(3.2));
    let known = of(rounds, code, Figure::known_rate);
    ratio("rs=4+4: known chunks of fresh ones, rate", known, rate(code), Some(2.0), None);
    let asked = of(rounds, slow_code, |one| one.known_traffic / one.bytes);
    ratio("1 Gbit/s: known chunks, traffic of the data", asked, one, None, Some(0.01));
    let _ = (two, tls);
    goals
}
