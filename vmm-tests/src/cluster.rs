//! A catalog and peers, as real processes that know each other by keys.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::lab::{Lab, Store, run_test};
use crate::process::Process;

const START_LIMIT: Duration = Duration::from_secs(20);

/// A peer is seen as down some seconds after its last heartbeat.
const NOTICE_LIMIT: Duration = Duration::from_secs(40);

/// A repair of the catalog's own may be under way, and comes first.
const REPAIR_LIMIT: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(100);

/// What a peer or a catalog prints before its address.
const LISTENS: &str = " listens at ";

/// A repository on many machines. All its processes end when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    /// Numbered in the order of their start; nothing where one was destroyed.
    peers: Vec<Option<Peer>>,
    address: String,
    keys: PathBuf,
    _catalog: Process,
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

    /// Makes keys, starts a catalog and so many peers, each in a failure domain of its own, and waits until
    /// all are members.
    fn start(lab: &Lab, peers: usize) -> Result<Cluster> {
        let keys = lab.path("keys");
        lab.cairn(&["keys", "init", &keys.display().to_string()])?;
        let arguments = ["--catalog", "--listen", "127.0.0.1:0", "--data"].map(str::to_owned);
        let data = lab.path("catalog").display().to_string();
        let arguments = arguments.into_iter().chain([data]);
        let (_catalog, _, address) = serve(lab, "catalog", &keys, arguments)?;
        let mut cluster = Cluster { peers: Vec::new(), address, keys, _catalog };
        cluster.refill(lab, peers)?;
        Ok(cluster)
    }

    /// The repository, as the programs take it.
    fn store(&self) -> Store {
        Store::Cluster { catalog: self.address.clone(), keys: self.keys.clone() }
    }

    /// Starts one more peer, with an empty disk.
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
        let (process, id, _) = serve(lab, &name, &self.keys, arguments)?;
        self.peers.push(Some(Peer { id, data, process }));
        Ok(())
    }

    /// Ends a peer as a power cut would, and deletes everything that it held.
    pub fn destroy(&mut self, number: usize) -> Result<()> {
        let peer = self.peers.get_mut(number).and_then(Option::take);
        let mut peer = peer.with_context(|| format!("there is no peer {number}"))?;
        peer.process.kill()?;
        fs::remove_dir_all(&peer.data)
            .with_context(|| format!("deleting {}", peer.data.display()))?;
        Ok(())
    }

    /// Starts peers with empty disks until so many run, and waits until all are members.
    pub fn refill(&mut self, lab: &Lab, peers: usize) -> Result<()> {
        while self.peers.iter().flatten().count() < peers {
            self.add(lab)?;
        }
        self.wait(lab, "all peers are members", |told| count(told, "up") == peers)
    }

    /// The id of a peer that runs.
    pub fn id(&self, number: usize) -> Result<String> {
        let peer = self.peers.get(number).and_then(Option::as_ref);
        Ok(peer.with_context(|| format!("there is no peer {number}"))?.id.clone())
    }

    /// Tells the catalog that a peer's disk is gone for good.
    pub fn give_up(&self, lab: &Lab, id: &str) -> Result<()> {
        lab.cairn(&["peers", "lose", id])?;
        Ok(())
    }

    /// Repairs, as soon as nobody else does; returns what `cairn repair` says.
    pub fn repair(&self, lab: &Lab) -> Result<Value> {
        let end = Instant::now() + REPAIR_LIMIT;
        loop {
            match lab.cairn(&["--json", "repair"]) {
                Ok(report) => {
                    let told: Value = serde_json::from_str(&report)?;
                    if told["left"] == 0 || Instant::now() > end {
                        return Ok(told);
                    }
                }
                Err(error) if Instant::now() > end => return Err(error.context("repairing")),
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// Waits until the catalog sees so many peers as down.
    pub fn wait_down(&self, lab: &Lab, peers: usize) -> Result<()> {
        self.wait(lab, "the dead peers are seen as down", |told| count(told, "down") == peers)
    }

    fn wait(&self, lab: &Lab, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<()> {
        let end = Instant::now() + NOTICE_LIMIT;
        loop {
            let told = lab.cairn_at(&self.store(), &["--json", "peers"])?;
            if is_so(&serde_json::from_str(&told)?) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{what}: not in {NOTICE_LIMIT:?}: {told}");
            thread::sleep(POLL);
        }
    }
}

/// Runs a test in a lab of its own whose repository is a cluster of `peers` peers. The lab is kept when
/// the test fails.
pub fn in_cluster(name: &str, peers: usize, test: impl FnOnce(&Lab, &mut Cluster) -> Result<()>) {
    let made = Cluster::with_lab(name, peers).unwrap_or_else(|e| panic!("{e:#}"));
    let (lab, mut cluster) = made;
    run_test(name, lab, |lab| test(lab, &mut cluster));
}

/// Starts a `cairn serve`, and waits until it listens; returns its id and its address, too.
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
    let Some((who, address)) = line.split_once(LISTENS) else { bail!("{name} says: {line}") };
    let id = who.rsplit(' ').next().unwrap_or_default().to_owned();
    Ok((process, id, address.trim().to_owned()))
}

/// How many peers are in this state, in what `cairn peers --json` tells.
fn count(told: &Value, state: &str) -> usize {
    let peers = told["peers"].as_array();
    peers.map_or(0, |peers| peers.iter().filter(|peer| peer["state"] == state).count())
}
