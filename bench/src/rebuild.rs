//! `rebuild`: rebuilding the fragments of a lost peer. One process reads the remaining fragments
//! and writes the lost ones over a limited link.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use cairn_store::BlobId;
use cairn_store::cluster::repair::{
    ConnectedPeers, DeletionPermit, PeerState, RepairLimits, RepairMembers, RepairPeer,
    Report as Repaired, Wanted, repair,
};
use cairn_store::collection::CollectionNumber;
use cairn_store::encoding::{Redundancy, StoragePolicy};
use serde::Serialize;
use serde_json::json;
use tokio::sync::mpsc;

use crate::args::Args;
use crate::cluster::data::{CHUNK, Data};
use crate::cluster::link::{Link, RATE};
use crate::cluster::persist::persist;
use crate::cluster::{PEERS, Testbed};
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::site::Site;
use crate::stats::median;

const MIB: f64 = (1 << 20) as f64;

/// The redundancy of the blobs.
const ALL: [&str; 2] = ["rs=4+4", "replicas=3"];

#[derive(Clone, Copy, Debug, Serialize)]
struct Figure {
    seconds: f64,
    /// Bytes of rebuilt fragments.
    rebuilt: f64,
    /// Bytes received over the link.
    received: f64,
    /// Bytes sent over the link.
    sent: f64,
}

impl Figure {
    fn rate(&self) -> f64 {
        self.rebuilt / MIB / self.seconds
    }

    /// The utilisation of the link, in the direction with more traffic.
    fn busy(&self) -> f64 {
        self.received.max(self.sent) * 8.0 / self.seconds / RATE
    }
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let mut data = Data::new(if args.quick { 64 << 20 } else { 256 << 20 });
    let link = Link::new().context("creating a limited link, which needs root, ip and tc")?;
    let mut rounds: [Vec<Figure>; ALL.len()] = Default::default();
    let mut measurement = 0;
    for round in 0..args.rounds() {
        for (name, figures) in ALL.into_iter().zip(&mut rounds) {
            eprintln!("round {}: {name}", round + 1);
            measurement += 1;
            data.make_unique(measurement);
            let figure = measure(site, name, &data, &link).context(name)?;
            eprintln!("  {:.0} MiB/s, the link {:.2} busy", figure.rate(), figure.busy());
            figures.push(figure);
        }
    }
    let head = ["stored as", "rebuilt MiB", "MiB/s", "received MiB", "sent MiB", "link busy"];
    let mut table = Table::new("One of nine peers is lost; 1 Gbit/s both ways", &head);
    let mut goals = Vec::new();
    for (name, figures) in ALL.into_iter().zip(&rounds) {
        let of = |value: fn(&Figure) -> f64| median(figures.iter().map(value));
        table.row([
            name.to_string(),
            format!("{:.0}", of(|one| one.rebuilt / MIB)),
            format!("{:.0}", of(Figure::rate)),
            format!("{:.0}", of(|one| one.received / MIB)),
            format!("{:.0}", of(|one| one.sent / MIB)),
            format!("{:.1} %", 100.0 * of(Figure::busy)),
        ]);
        goals.push(Goal::at_least(format!("{name}: the link is busy"), of(Figure::busy), 0.8));
    }
    let data = json!({ "rounds": rounds });
    Ok(Report { tables: vec![table], goals, data, charts: Vec::new() })
}

fn measure(site: &Site, name: &str, data: &Data, link: &Link) -> Result<Figure> {
    let mut testbed = Testbed::with_peers(PEERS + 1, site, Some(link), false)?;
    let redundancy: Redundancy = name.parse()?;
    let policy: StoragePolicy = redundancy.into();
    let client = testbed.client()?;
    persist(&client, data.bytes(), &policy)?;
    let (lost, left) = testbed.lose();
    let peers = left.iter().map(RepairPeer::from);
    let lost = RepairPeer { state: PeerState::Lost, ..RepairPeer::from(&lost) };
    let members = RepairMembers::new(peers.chain([lost]));
    let security = testbed.security().clone();
    let permit: DeletionPermit = Arc::new(|| Box::pin(async { true }));
    let connected = Arc::new(ConnectedPeers::new(left, security, permit, CollectionNumber::FIRST));
    let blobs: BTreeSet<BlobId> = data.bytes().chunks(CHUNK).map(BlobId::of).collect();
    let (before, begin) = (link.traffic()?, Instant::now());
    let repaired: Repaired = client.runtime().block_on(async {
        let (sender, receiver) = mpsc::channel(1024);
        let feed = async move {
            for blob in blobs {
                if sender.send(Wanted::content(blob, redundancy)).await.is_err() {
                    return;
                }
            }
        };
        let work = repair(connected, members, receiver, RepairLimits::default(), &|| true, &|_| ());
        tokio::join!(feed, work).1
    });
    let (seconds, after) = (begin.elapsed().as_secs_f64(), link.traffic()?);
    let rebuilt = repaired.rebuilt + repaired.moved;
    ensure!(!repaired.is_incomplete() && rebuilt > 0, "the repair is incomplete: {repaired:?}");
    let block = CHUNK / redundancy.needed();
    Ok(Figure {
        seconds,
        rebuilt: (rebuilt * block as u64) as f64,
        received: (after.received - before.received) as f64,
        sent: (after.sent - before.sent) as f64,
    })
}
