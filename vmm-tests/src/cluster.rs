//! A cluster of real processes: a catalog and peers, with TLS.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::lab::{Lab, Store, run_test};
use crate::process::Process;

const START_LIMIT: Duration = Duration::from_secs(20);

/// How long a change of a peer's state may take to be visible. A peer is down some seconds after
/// its last heartbeat.
const STATE_LIMIT: Duration = Duration::from_secs(40);

/// How long to wait for a repair, which may have to wait for a repair of the catalog.
const REPAIR_LIMIT: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The text that a peer or a catalog prints before its address.
const LISTENS: &str = " listens at ";

/// A repository in a cluster. All its processes end when this value is dropped.
#[derive(Debug)]
pub struct Cluster {
    /// The peers in the order of their start, `None` for a destroyed one.
    peers: Vec<Option<Peer>>,
    address: String,
    keys: PathBuf,
    catalog: Process,
}

#[derive(Debug)]
struct Peer {
    id: String,
    data: PathBuf,
    process: Process,
}

impl Cluster {
    /// Makes a lab whose repository is a cluster of `peers` peers.
    pub fn with_lab(name: &str, peers: usize) -> Result<(Lab, Cluster)> {
        let mut lab = Lab::new(name)?;
        let cluster = Cluster::start(&lab, peers)?;
        lab.set_store(cluster.store());
        Ok((lab, cluster))
    }

    /// Creates keys, starts a catalog and `peers` peers, each in its own failure domain, and waits
    /// until all are members.
    fn start(lab: &Lab, peers: usize) -> Result<Cluster> {
        let keys = lab.path("keys");
        lab.cairn(&["keys", "init", &keys.display().to_string()])?;
        let (catalog, address) = serve_catalog(lab, &keys, "127.0.0.1:0")?;
        let mut cluster = Cluster { peers: Vec::new(), address, keys, catalog };
        cluster.refill(lab, peers)?;
        Ok(cluster)
    }

    /// Replaces the catalog by one with an empty disk at the same address, and rebuilds it.
    pub fn lose_catalog(&mut self, lab: &Lab) -> Result<()> {
        self.catalog.kill()?;
        let data = lab.path("catalog");
        fs::remove_dir_all(&data).with_context(|| format!("deleting {}", data.display()))?;
        (self.catalog, _) = serve_catalog(lab, &self.keys, &self.address)?;
        self.refill(lab, self.peers.iter().flatten().count())?;
        lab.cairn(&["catalog", "rebuild"])?;
        Ok(())
    }

    /// The repository, for the command lines of the programs.
    fn store(&self) -> Store {
        Store::Cluster { catalog: self.address.clone(), keys: self.keys.clone() }
    }

    /// Starts another peer with an empty disk.
    fn add(&mut self, lab: &Lab) -> Result<()> {
        let number = self.peers.len();
        let name = format!("peer-{number}");
        let data = lab.path(&name);
        let arguments = [
            ("--listen", "127.0.0.1:0"),
            ("--catalog", &self.address),
            ("--domain", &name),
            ("--data", &data.display().to_string()),
        ];
        let arguments = arguments.into_iter().flat_map(|(name, value)| [name.into(), value.into()]);
        let keys = lab.path(&format!("{name}-keys"));
        let [authority, own] = [&self.keys, &keys].map(|path| path.display().to_string());
        lab.cairn(&["keys", "sign", "--keys", &authority, &own])?;
        let (process, id, _) = serve(lab, &name, &keys, arguments)?;
        self.peers.push(Some(Peer { id, data, process }));
        Ok(())
    }

    /// Kills a peer and deletes its data.
    pub fn destroy(&mut self, number: usize) -> Result<()> {
        let peer = self.peers.get_mut(number).and_then(Option::take);
        let mut peer = peer.with_context(|| format!("there is no peer {number}"))?;
        peer.process.kill()?;
        fs::remove_dir_all(&peer.data)
            .with_context(|| format!("deleting {}", peer.data.display()))?;
        Ok(())
    }

    /// Starts peers with empty disks until `peers` peers run, and waits until all are members.
    pub fn refill(&mut self, lab: &Lab, peers: usize) -> Result<()> {
        while self.peers.iter().flatten().count() < peers {
            self.add(lab)?;
        }
        self.wait(lab, "all peers are members", |list| count(list, "up") == peers)
    }

    /// The id of a running peer.
    pub fn id(&self, number: usize) -> Result<String> {
        let peer = self.peers.get(number).and_then(Option::as_ref);
        Ok(peer.with_context(|| format!("there is no peer {number}"))?.id.clone())
    }

    /// Declares a peer lost.
    pub fn lose(&self, lab: &Lab, id: &str) -> Result<()> {
        lab.cairn(&["peers", "lose", id])?;
        Ok(())
    }

    /// Repairs as soon as no other repair runs, and returns the report of `cairn repair`.
    pub fn repair(&self, lab: &Lab) -> Result<Value> {
        let end = Instant::now() + REPAIR_LIMIT;
        loop {
            match lab.cairn(&["--json", "repair"]) {
                Ok(report) => {
                    let report: Value = serde_json::from_str(&report)?;
                    if report["left"] == 0 || Instant::now() > end {
                        return Ok(report);
                    }
                }
                Err(error) if Instant::now() > end => return Err(error.context("repairing")),
                Err(_) => thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// Waits until `peers` peers are down.
    pub fn wait_down(&self, lab: &Lab, peers: usize) -> Result<()> {
        self.wait(lab, "the dead peers are down", |list| count(list, "down") == peers)
    }

    /// Waits until the output of `cairn peers` meets a condition.
    fn wait(&self, lab: &Lab, what: &str, condition: impl Fn(&Value) -> bool) -> Result<()> {
        let end = Instant::now() + STATE_LIMIT;
        loop {
            let list = lab.cairn_at(&self.store(), &["--json", "peers"])?;
            if condition(&serde_json::from_str(&list)?) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "not within {STATE_LIMIT:?}: {what}: {list}");
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Runs a test in its own lab, whose repository is a cluster of `peers` peers. If the test fails,
/// the lab is kept.
pub fn in_cluster(name: &str, peers: usize, test: impl FnOnce(&Lab, &mut Cluster) -> Result<()>) {
    let made = Cluster::with_lab(name, peers).unwrap_or_else(|e| panic!("{e:#}"));
    let (lab, mut cluster) = made;
    run_test(name, lab, |lab| test(lab, &mut cluster));
}

/// Starts a catalog that listens at `address`. Returns the process and its address.
fn serve_catalog(lab: &Lab, keys: &Path, address: &str) -> Result<(Process, String)> {
    let data = lab.path("catalog").display().to_string();
    let arguments = ["--catalog", "--listen", address, "--data", &data].map(str::to_owned);
    let (process, _, address) = serve(lab, "catalog", keys, arguments)?;
    Ok((process, address))
}

/// Starts a `cairn serve` and waits until it listens. Returns the process, its id and its address.
fn serve(
    lab: &Lab,
    name: &str,
    keys: &Path,
    arguments: impl IntoIterator<Item = String>,
) -> Result<(Process, String, String)> {
    let keys = ["serve".to_owned(), "--keys".to_owned(), keys.display().to_string()];
    let arguments = keys.into_iter().chain(arguments);
    let log = lab.path(&format!("{name}.log"));
    let mut process = Process::start(name, &lab.tools().cairn, arguments, log)?;
    let line = process.wait_for_line(LISTENS, START_LIMIT)?;
    // "peer ID listens at ADDRESS"
    let Some((name_and_id, address)) = line.split_once(LISTENS) else {
        bail!("{name} printed: {line}")
    };
    let id = name_and_id.rsplit(' ').next().unwrap_or_default().to_owned();
    Ok((process, id, address.trim().to_owned()))
}

/// The number of peers in a state, in the output of `cairn peers --json`.
fn count(list: &Value, state: &str) -> usize {
    let peers = list["peers"].as_array();
    peers.map_or(0, |peers| peers.iter().filter(|peer| peer["state"] == state).count())
}
