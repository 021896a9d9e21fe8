//! A cluster of real processes.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::Repository;
use cairn_store::cluster::identity::{Role, Security};
use serde_json::Value;

use crate::support::{Place, Run};

/// How long anything may take that happens by itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A server process.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) address: String,
    pub(crate) id: String,
}

impl Server {
    /// Starts `cairn` with these arguments, and waits until it listens.
    fn start(place: &Place, args: &[&str], log: &str) -> Server {
        let log = std::fs::File::options().create(true).append(true).open(place.path(log)).unwrap();
        let mut command = place.command(&[args, &["--json"]].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let told: Value = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("{args:?} said {line:?}: {error}"));
        let id = told["peer"].as_str().or(told["catalog"].as_str()).unwrap().to_owned();
        Server { child, address: told["listen"].as_str().unwrap().to_owned(), id }
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: i32) {
        let pid = self.child.id().cast_signed();
        assert_eq!(unsafe_free_kill(pid, signal), 0);
    }
}

/// By the program of that name: this crate has no unsafe code.
fn unsafe_free_kill(pid: i32, signal: i32) -> i32 {
    let signal = format!("-{signal}");
    let status = std::process::Command::new("kill").args([signal, pid.to_string()]).status();
    status.unwrap().code().unwrap_or(-1)
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A catalog and peers, each a process, in one directory.
pub(crate) struct Lab {
    pub(crate) place: Place,
    pub(crate) catalog: Option<Server>,
    catalog_address: String,
    pub(crate) peers: Vec<Option<Server>>,
    keys: bool,
    /// More arguments of the catalog.
    pub(crate) lost_after: &'static str,
}

impl Lab {
    /// A catalog and so many peers, without keys.
    pub(crate) fn new(peers: usize) -> Lab {
        Lab::with(peers, false, "600")
    }

    /// The same, with keys or not, and a time after which peers are lost.
    pub(crate) fn with(peers: usize, keys: bool, lost_after: &'static str) -> Lab {
        let place = Place::new();
        if keys {
            place.ok(&["keys", "init", "keys"]);
        }
        let catalog_address = free_address();
        let mut lab =
            Lab { place, catalog: None, catalog_address, peers: Vec::new(), keys, lost_after };
        lab.start_catalog();
        for at in 0..peers {
            lab.peers.push(None);
            lab.start_peer(at, &[]);
        }
        lab.wait_for_peers(peers);
        lab
    }

    fn security(&self) -> &'static [&'static str] {
        if self.keys { &["--keys", "keys"] } else { &["--insecure"] }
    }

    pub(crate) fn start_catalog(&mut self) {
        let address = self.catalog_address.clone();
        let args = ["serve", "--data", "catalog", "--listen", &address];
        let more = ["--lost-after", self.lost_after, "--catalog"];
        let args = [&args, &more[..], self.security()].concat();
        self.catalog = Some(Server::start(&self.place, &args, "catalog.log"));
    }

    pub(crate) fn start_peer(&mut self, at: usize, more: &[&str]) {
        let (data, domain) = (format!("peer{at}"), format!("rack{at}"));
        let address = self.catalog_address.clone();
        let args = ["serve", "--data", &data, "--listen", "127.0.0.1:0", "--domain", &domain];
        let args = [&args, &["--catalog", &address][..], self.security(), more].concat();
        self.peers[at] = Some(Server::start(&self.place, &args, &format!("peer{at}.log")));
    }

    /// Kills a peer.
    pub(crate) fn kill(&mut self, at: usize) {
        drop(self.peers[at].take());
    }

    /// Removes what a dead peer had.
    pub(crate) fn wipe(&self, at: usize) {
        assert!(self.peers[at].is_none());
        std::fs::remove_dir_all(self.data(at)).unwrap();
    }

    pub(crate) fn data(&self, at: usize) -> PathBuf {
        self.place.path(&format!("peer{at}"))
    }

    pub(crate) fn url(&self) -> String {
        format!("cairn://{}", self.catalog_address)
    }

    pub(crate) fn address(&self) -> &str {
        &self.catalog_address
    }

    fn args<'a>(&self, url: &'a str, args: &[&'a str]) -> Vec<&'a str> {
        [&["--store", url], self.security(), args].concat()
    }

    /// Runs `cairn` on this cluster.
    pub(crate) fn run(&self, args: &[&str]) -> Run {
        let url = self.url();
        self.place.run(&self.args(&url, args))
    }

    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let url = self.url();
        self.place.ok(&self.args(&url, args))
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let url = self.url();
        self.place.json(&self.args(&url, args))
    }

    /// The cluster as a repository of this process.
    pub(crate) fn repository(&self) -> Repository {
        let security = match self.keys {
            true => Security::load(&self.place.path("keys"), Role::Client).unwrap(),
            false => Security::INSECURE,
        };
        Repository::connect(&self.url(), &security).unwrap()
    }

    /// What `cairn peers` says of one.
    pub(crate) fn peer(&self, id: &str) -> Value {
        let told = self.json(&["peers"]);
        let peers = told["peers"].as_array().unwrap();
        peers.iter().find(|peer| peer["peer"] == id).cloned().unwrap_or(Value::Null)
    }

    /// Waits until so many peers are up.
    pub(crate) fn wait_for_peers(&self, count: usize) {
        let up = || {
            let told = self.json(&["peers"]);
            told["peers"].as_array().unwrap().iter().filter(|peer| peer["state"] == "up").count()
        };
        wait_until("the peers are up", || up() == count);
    }

    /// Writes a disk of random bytes, and returns it.
    pub(crate) fn random_disk(&self, name: &str, seed: u64, len: usize) -> Vec<u8> {
        let bytes = random(seed, len);
        std::fs::write(self.place.path(name), &bytes).unwrap();
        bytes
    }

    /// Exports a snapshot and compares it.
    pub(crate) fn assert_exports(&self, snapshot: &str, expected: &[u8]) {
        self.ok(&["export", snapshot, "exported.raw", "--force"]);
        let found = std::fs::read(self.place.path("exported.raw")).unwrap();
        assert!(found == expected, "{snapshot} is something else");
    }
}

/// Bytes that follow from a seed.
pub(crate) fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    let mut bytes = vec![0; len];
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "not in time: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// An address that nobody uses, and that no outgoing connection takes: below the ports of those.
pub(crate) fn free_address() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = (std::process::id() % 400) as u16 * 30;
    loop {
        let port = 20_000 + (own + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        let address = format!("127.0.0.1:{port}");
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}
