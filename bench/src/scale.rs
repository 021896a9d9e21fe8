//! `scale`: a catalog of 10⁶ snapshots beside one of 10³. What users ask of one image, and what the
//! supervisor does when nothing happens, must not depend on the number of snapshots. And placement
//! with up to 1,000 peers.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cairn_store::cluster::membership::{last_repair, peers};
use cairn_store::cluster::placement::{Candidate, Ranking};
use cairn_store::documents::{self, CatalogStore, Change, Documents};
use cairn_store::net::identity::Security;
use cairn_store::{BlobId, PeerId};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::Args;
use crate::proc::{cpu_time, memory};
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::server::catalog::Catalog;
use crate::site::{Area, Site};
use crate::stats::median;

/// Snapshots of each image.
const SNAPSHOTS_OF_IMAGE: u64 = 20;

/// Documents in one change while a catalog is filled.
const FILLED_TOGETHER: usize = 20_000;

/// How long the supervisor may take for its first repair.
const REPAIR_LIMIT: Duration = Duration::from_secs(600);

/// The largest time in the large catalog, compared with the small one.
const GOAL: f64 = 1.5;

/// The image whose snapshots are listed and shown.
const IMAGE: &str = "image-00000000";

/// Peers of a cluster whose placement is measured, each in a failure domain of its own.
const PLACEMENT_PEERS: [u16; 3] = [12, 100, 1000];

/// Places of a blob: those of `rs=4+4`.
const PLACES: usize = 8;

/// A command that is measured in both catalogs in turn, for the repetition with this number.
type Measured = (&'static str, fn(u64) -> Vec<String>);

const COMMANDS: [Measured; 4] = [
    ("ls IMAGE", |_| vec!["ls".into(), IMAGE.into()]),
    ("show IMAGE (newest)", |_| vec!["show".into(), IMAGE.into()]),
    ("show IMAGE@LABEL", |_| vec!["show".into(), format!("{IMAGE}@last")]),
    // From another image each time, except the one that is listed.
    ("rm IMAGE@N", |n| vec!["rm".into(), format!("image-{:08}@{}", 1 + n % 49, 20 - n / 49)]),
];

#[derive(Clone, Debug, Default, Serialize)]
struct Figure {
    snapshots: u64,
    /// Seconds to fill the catalog.
    fill_s: f64,
    /// Bytes of its database.
    bytes: u64,
    /// Seconds from the start of the server to the end of its first repair.
    first_repair_s: f64,
    /// Milliseconds of each command: the median.
    commands_ms: Vec<f64>,
    /// Milliseconds of `cairn ls` of all images, once.
    ls_all_ms: f64,
    /// CPU milliseconds in a minute in which nothing happens.
    idle_cpu_ms: f64,
    /// Resident memory of the server after that, in bytes.
    resident: u64,
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let sizes = [1_000, if args.quick { 100_000 } else { 1_000_000 }];
    let repeats = if args.quick { 21 } else { 101 };
    let idle = Duration::from_secs(if args.quick { 10 } else { 60 });
    let area = site.area()?;
    let mut figures = Vec::new();
    let mut catalogs = Vec::new();
    for snapshots in sizes {
        eprintln!("filling a catalog of {snapshots} snapshots");
        let data = area.path(&format!("catalog-{snapshots}"));
        let begin = Instant::now();
        fill(&data, snapshots)?;
        let fill_s = begin.elapsed().as_secs_f64();
        let bytes = std::fs::metadata(data.join("catalog.db"))?.len();
        let begin = Instant::now();
        let catalog = Catalog::start(site, &area, &data)?;
        wait_for_repair(&catalog)?;
        let first_repair_s = begin.elapsed().as_secs_f64();
        eprintln!("  {fill_s:.1} s to fill, {first_repair_s:.1} s to the end of the first repair");
        figures.push(Figure { snapshots, fill_s, bytes, first_repair_s, ..Figure::default() });
        catalogs.push(catalog);
    }
    for (_, command) in COMMANDS {
        let mut times = [Vec::new(), Vec::new()];
        for number in 0..repeats {
            for (catalog, times) in catalogs.iter().zip(&mut times) {
                times.push(cairn(site, &area, catalog, &command(number))?);
            }
        }
        for (figure, times) in figures.iter_mut().zip(times) {
            figure.commands_ms.push(median(times));
        }
    }
    for (figure, catalog) in figures.iter_mut().zip(&catalogs) {
        figure.ls_all_ms = cairn(site, &area, catalog, &["ls".into()])?;
    }
    eprintln!("measuring idle catalogs for {} s", idle.as_secs());
    let cpu = |catalogs: &[Catalog]| -> Result<Vec<Duration>> {
        catalogs.iter().map(|one| cpu_time(one.pid())).collect()
    };
    let before = cpu(&catalogs)?;
    thread::sleep(idle);
    for ((figure, catalog), (before, after)) in
        figures.iter_mut().zip(&catalogs).zip(before.iter().zip(cpu(&catalogs)?))
    {
        let minutes = idle.as_secs_f64() / 60.0;
        figure.idle_cpu_ms = (after - *before).as_secs_f64() * 1000.0 / minutes;
        figure.resident = memory(catalog.pid())?.resident;
    }
    Ok(report(&figures))
}

/// Writes images and snapshots into a catalog that nobody serves. `docs/formats.md` explains the
/// documents.
fn fill(data: &Path, snapshots: u64) -> Result<()> {
    let store = CatalogStore::open(data)?;
    let documents = store.documents();
    let mut change = Change::default().put("schema", &4);
    for number in 0..snapshots / SNAPSHOTS_OF_IMAGE {
        let id = format!("{:032x}", u128::from(number) << 64 | 1);
        change = change.put(format!("images/image-{number:08}"), &image(&id));
        for one in 1..=SNAPSHOTS_OF_IMAGE {
            change = change.put(format!("snapshots/{id}/{one:016x}"), &snapshot(one));
        }
        let label = json!({ "number": SNAPSHOTS_OF_IMAGE, "failed": false });
        change = change.put(format!("labels/{id}/last"), &label);
        if change.puts.len() >= FILLED_TOGETHER {
            ensure!(documents.commit(&change)?, "the catalog has changed");
            change = Change::default();
        }
    }
    ensure!(documents.commit(&change)?, "the catalog has changed");
    Ok(())
}

fn image(id: &str) -> Value {
    json!({
        "id": id,
        "size": 1u64 << 30,
        "chunk_size": 256 << 10,
        "created": 1_700_000_000,
        "origin": null,
        "redundancy": "none",
        "compression": "auto",
        "next_number": SNAPSHOTS_OF_IMAGE + 1,
        "fence": 0,
        "writer": null,
        "removing": false,
        "restored": 0,
        "index": {
            "snapshots": SNAPSHOTS_OF_IMAGE,
            "with_content": SNAPSHOTS_OF_IMAGE,
            "newest": SNAPSHOTS_OF_IMAGE,
            "pinned": 0,
            "obsolete": 0,
            "highest": SNAPSHOTS_OF_IMAGE,
        },
    })
}

/// A snapshot of an empty disk, so that no peer needs content.
fn snapshot(number: u64) -> Value {
    json!({
        "parent": number.checked_sub(1).filter(|parent| *parent > 0),
        "size": 1_u64 << 30,
        "root": null,
        "time": 1_700_000_000 + number,
        "labels": (number == SNAPSHOTS_OF_IMAGE).then_some("last").as_slice(),
        "is_pinned": false,
        "metadata": {},
        "is_from_guest": false,
        "is_obsolete": false,
        "edits": 0,
        "state": "stable",
        "consistency": "crash",
        "dirty_bytes": 1 << 20,
        "stored_bytes": 1 << 20,
        "sent_bytes": 3 << 20,
        "saved_bytes": 0,
        "pause_us": 100,
        "reason": null,
        "mirror": null,
        "is_parent_available": false,
        "record": null,
    })
}

/// The supervisor repairs once after its start.
fn wait_for_repair(catalog: &Catalog) -> Result<()> {
    let documents = documents::open(&catalog.address, &Security::INSECURE)?;
    let end = Instant::now() + REPAIR_LIMIT;
    while last_repair(&*documents)?.is_none() || peers(&*documents)?.0.is_empty() {
        ensure!(Instant::now() < end, "the supervisor's first repair does not end");
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Runs `cairn` with these arguments. Returns the milliseconds that it took.
fn cairn(site: &Site, area: &Area, catalog: &Catalog, args: &[String]) -> Result<f64> {
    let log = area.path("cairn.log");
    let file = std::fs::File::create(&log)?;
    let url = format!("cairn://{}", catalog.address);
    let mut command = Command::new(&site.cairn);
    command.args(["--store", &url, "--insecure"]).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    let begin = Instant::now();
    let status = command.status().context("starting cairn")?;
    let time = begin.elapsed();
    let text = || std::fs::read_to_string(&log).unwrap_or_default();
    ensure!(status.success(), "cairn {} failed: {}", args.join(" "), text());
    Ok(time.as_secs_f64() * 1000.0)
}

fn report(figures: &[Figure]) -> Report {
    let head = ["", "10^3", "more", "ratio"];
    let title = format!(
        "A catalog of {} snapshots beside one of {}",
        figures[1].snapshots, figures[0].snapshots
    );
    let mut table = Table::new(&title, &head);
    let mut goals = Vec::new();
    let mut row = |what: &str, value: &dyn Fn(&Figure) -> f64, goal: bool| {
        let [one, other] = [value(&figures[0]), value(&figures[1])];
        let ratio = other / one;
        table.row([
            what.to_owned(),
            format!("{one:.1}"),
            format!("{other:.1}"),
            format!("{ratio:.2} x"),
        ]);
        if goal {
            goals.push(Goal::at_most(what, ratio, GOAL));
        }
    };
    for (at, (name, _)) in COMMANDS.iter().enumerate() {
        row(&format!("cairn {name}, ms"), &|one| one.commands_ms[at], true);
    }
    row("idle supervisor and server, CPU ms in a minute", &|one| one.idle_cpu_ms, true);
    row("cairn ls of all images, ms", &|one| one.ls_all_ms, false);
    row("the first repair after a start, s", &|one| one.first_repair_s, false);
    row("resident memory of the server, MiB", &|one| one.resident as f64 / 1048576.0, false);
    row("database, MiB", &|one| one.bytes as f64 / 1048576.0, false);
    let tables = vec![table, placement()];
    Report { tables, goals, data: json!({ "figures": figures }), charts: Vec::new() }
}

/// The time to choose the places of a blob: all peers in order, and the first ones only.
fn placement() -> Table {
    let head = ["peers", "all in order, ns", "the first 8, ns"];
    let mut table = Table::new("Placement of one blob", &head);
    for peers in PLACEMENT_PEERS {
        let candidate = |n: u16| Candidate {
            id: PeerId::from_bytes([n.to_le_bytes(); 8].concat().try_into().unwrap_or_default()),
            weight: 1 << 40,
            domain: n.to_string(),
        };
        let ranking = Ranking::new((0..peers).map(candidate).collect());
        let time = |places: &dyn Fn(&BlobId) -> usize| {
            let blobs = 200_000 / u32::from(peers);
            let begin = Instant::now();
            let used: usize = (0..blobs).map(|n| places(&BlobId::of(&n.to_le_bytes()))).sum();
            assert!(used > 0, "each blob has places");
            begin.elapsed().as_nanos() as f64 / f64::from(blobs)
        };
        let all = time(&|blob| ranking.all(blob).len());
        let first = time(&|blob| ranking.first(blob, PLACES).len());
        table.row([peers.to_string(), format!("{all:.0}"), format!("{first:.0}")]);
    }
    table
}
