//! A cluster of real processes.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cairn_store::Repository;
use cairn_store::cluster::MemberState;
use cairn_store::net::identity::{Role, Security};
use serde_json::Value;

use crate::support::{Place, Run};

/// How long an automatic action may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A server process.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) address: String,
    pub(crate) id: String,
}

impl Server {
    /// Starts `cairn` with these arguments and waits until it listens.
    pub(crate) fn start(place: &Place, space: Option<&str>, args: &[&str], log: &str) -> Server {
        let log = std::fs::File::options().create(true).append(true).open(place.path(log)).unwrap();
        let mut command = place.command(&[args, &["--json"]].concat());
        if let Some(space) = space {
            command = inside(space, &command);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Value = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("{args:?} printed {line:?}: {error}"));
        let id = started["peer"].as_str().or(started["catalog"].as_str()).unwrap().to_owned();
        Server { child, address: started["listen"].as_str().unwrap().to_owned(), id }
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: i32) {
        let pid = self.child.id().cast_signed();
        assert_eq!(kill(pid, signal), 0);
    }
}

/// A command that runs `command` in a network namespace.
fn inside(space: &str, command: &Command) -> Command {
    let mut wrapped = Command::new("ip");
    wrapped.args(["netns", "exec", space]).arg(command.get_program()).args(command.get_args());
    wrapped.current_dir(command.get_current_dir().unwrap());
    wrapped
}

/// Sends a signal with the program `kill`, because this crate has no unsafe code. Returns its exit
/// code.
fn kill(pid: i32, signal: i32) -> i32 {
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

/// A catalog and peers as processes, with all their data in one directory.
pub(crate) struct Lab {
    pub(crate) place: Place,
    pub(crate) catalog: Option<Server>,
    catalog_address: String,
    pub(crate) peers: Vec<Option<Server>>,
    /// The address of each peer, whether it runs or not.
    addresses: Vec<String>,
    /// The network namespaces of peers, by their number.
    spaces: HashMap<usize, String>,
    keys: bool,
    /// The value of `--lost-after` for the catalog, in seconds.
    pub(crate) lost_after: &'static str,
}

impl Lab {
    /// Starts a catalog and `peers` peers, without keys.
    pub(crate) fn new(peers: usize) -> Lab {
        Lab::with(peers, false, "600")
    }

    /// Starts a catalog and `peers` peers, with or without keys. A peer is lost after it was down
    /// for `lost_after` seconds.
    pub(crate) fn with(peers: usize, keys: bool, lost_after: &'static str) -> Lab {
        let place = Place::new();
        if keys {
            place.ok(&["keys", "init", "keys"]);
        }
        Lab::at("127.0.0.1", place, peers, keys, lost_after)
    }

    /// Starts a catalog and `peers` peers at the address `host` of this machine, without keys.
    pub(crate) fn on(host: &str, peers: usize) -> Lab {
        Lab::at(host, Place::new(), peers, false, "600")
    }

    fn at(host: &str, place: Place, peers: usize, keys: bool, lost_after: &'static str) -> Lab {
        let catalog_address = free_address_on(host);
        let mut lab = Lab {
            place,
            catalog: None,
            catalog_address,
            peers: Vec::new(),
            addresses: Vec::new(),
            spaces: HashMap::new(),
            keys,
            lost_after,
        };
        lab.start_catalog();
        for _ in 0..peers {
            lab.add_peer_on(host, None, &[]);
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
        let more = ["--lost-after", self.lost_after, "--prune-interval", "2", "--catalog"];
        let args = [&args, &more[..], self.security()].concat();
        self.catalog = Some(Server::start(&self.place, None, &args, "catalog.log"));
    }

    /// Replaces the catalog by an empty one at the same address, and waits until `peers` peers have
    /// joined it.
    pub(crate) fn replace_catalog(&mut self, peers: usize) {
        drop(self.catalog.take());
        std::fs::remove_dir_all(self.place.path("catalog")).unwrap();
        self.start_catalog();
        self.wait_for_peers(peers);
    }

    /// Starts another peer and returns its number.
    pub(crate) fn add_peer(&mut self, more: &[&str]) -> usize {
        self.add_peer_on("127.0.0.1", None, more)
    }

    /// Starts another peer at the address `host`, in a network namespace if one is named, and
    /// returns its number.
    pub(crate) fn add_peer_on(&mut self, host: &str, space: Option<&str>, more: &[&str]) -> usize {
        if let Some(space) = space {
            self.spaces.insert(self.peers.len(), space.to_owned());
            // No other process uses ports of the namespace.
            self.addresses.push(format!("{host}:20000"));
        } else {
            self.addresses.push(free_address_on(host));
        }
        self.peers.push(None);
        if self.keys {
            let directory = format!("peer{}-keys", self.peers.len() - 1);
            self.place.ok(&["keys", "sign", "--keys", "keys", &directory]);
        }
        self.start_peer(self.peers.len() - 1, more);
        self.peers.len() - 1
    }

    /// Starts a peer at its address, with the content of its directory.
    pub(crate) fn start_peer(&mut self, at: usize, more: &[&str]) {
        let (data, domain) = (format!("peer{at}"), format!("rack{at}"));
        let (address, listen) = (self.catalog_address.clone(), self.addresses[at].clone());
        let keys = format!("peer{at}-keys");
        let security = if self.keys { &["--keys", &*keys][..] } else { &["--insecure"] };
        let args = ["serve", "--data", &data, "--listen", &listen, "--domain", &domain];
        let args = [&args, &["--catalog", &address][..], security, more].concat();
        let (space, log) = (self.spaces.get(&at).map(String::as_str), format!("peer{at}.log"));
        self.peers[at] = Some(Server::start(&self.place, space, &args, &log));
    }

    /// Kills a peer.
    pub(crate) fn kill(&mut self, at: usize) {
        drop(self.peers[at].take());
    }

    /// Stops a peer with SIGTERM.
    pub(crate) fn stop(&mut self, at: usize) {
        let mut peer = self.peers[at].take().unwrap();
        peer.signal(15);
        assert!(peer.child.wait().unwrap().success());
    }

    /// Removes the data of a peer that does not run.
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

    /// A handle that runs `cairn` on this cluster, independent of the state of its servers.
    pub(crate) fn operator(&self) -> Operator {
        let directory = self.place.dir.path().to_owned();
        Operator { directory, url: self.url(), security: self.security(), space: None }
    }

    /// Runs `cairn` on this cluster.
    pub(crate) fn run(&self, args: &[&str]) -> Run {
        self.operator().run(args)
    }

    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!(run.code, 0, "{args:?}: {}", run.stderr);
        String::from_utf8(run.stdout).unwrap()
    }

    pub(crate) fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[args, &["--json"]].concat())).unwrap()
    }

    /// The cluster as a repository of this process.
    pub(crate) fn repository(&self) -> Repository {
        let security = match self.keys {
            true => Security::load(&self.place.path("keys"), Role::Client).unwrap(),
            false => Security::INSECURE,
        };
        Repository::connect(&self.url(), &security).unwrap()
    }

    /// The entry of a peer in `cairn peers`, or null.
    pub(crate) fn peer(&self, id: &str) -> Value {
        let list = self.json(&["peers"]);
        let peers = list["peers"].as_array().unwrap();
        peers.iter().find(|peer| peer["peer"] == id).cloned().unwrap_or(Value::Null)
    }

    /// Waits until `count` peers are up.
    pub(crate) fn wait_for_peers(&self, count: usize) {
        let up = || {
            let list = self.json(&["peers"]);
            list["peers"].as_array().unwrap().iter().filter(|peer| peer["state"] == "up").count()
        };
        wait_until("the peers are up", || up() == count);
    }

    /// Runs a repair. Returns whether nothing is left to do.
    pub(crate) fn is_repaired(&self) -> bool {
        let run = self.run(&["repair", "--json"]);
        let report: Value = serde_json::from_slice(&run.stdout).unwrap_or_default();
        run.code == 0 && report["left"] == 0 && report["waiting"] == 0
    }

    /// Waits until a repair that ends after the call finds full redundancy. Earlier repairs do not
    /// count.
    pub(crate) fn wait_until_whole(&self, survives: u64) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        wait_until("everything is repaired", || {
            let repair = self.json(&["peers"])["repair"].clone();
            repair["time"].as_u64() > Some(since)
                && repair["under"] == 0
                && repair["survives"] == survives
        });
    }

    /// Writes a file of random bytes and returns its content.
    pub(crate) fn random_disk(&self, name: &str, seed: u64, len: usize) -> Vec<u8> {
        let bytes = random(seed, len);
        std::fs::write(self.place.path(name), &bytes).unwrap();
        bytes
    }

    /// Exports a snapshot and compares it with `expected`.
    pub(crate) fn assert_exports(&self, snapshot: &str, expected: &[u8]) {
        self.ok(&["export", snapshot, "exported.raw", "--force"]);
        let found = std::fs::read(self.place.path("exported.raw")).unwrap();
        assert!(found == expected, "{snapshot} has the wrong content");
    }
}

/// Runs `cairn` on a cluster.
#[derive(Clone)]
pub(crate) struct Operator {
    pub(crate) directory: PathBuf,
    url: String,
    security: &'static [&'static str],
    /// The network namespace in which commands run.
    pub(crate) space: Option<String>,
}

impl Operator {
    /// A `cairn` command on the cluster, outside of the network namespace.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
        command.args(["--store", &self.url]).args(self.security).args(args);
        command.current_dir(&self.directory);
        command
    }

    /// Runs `cairn` on the cluster.
    pub(crate) fn run(&self, args: &[&str]) -> Run {
        let mut command = self.command(args);
        if let Some(space) = &self.space {
            command = inside(space, &command);
        }
        command.output().unwrap().into()
    }
}

/// Random choices that a seed reproduces.
pub(crate) struct Dice(blake3::OutputReader);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(blake3::Hasher::new().update(b"dice").update(&seed.to_le_bytes()).finalize_xof())
    }

    /// A number in `0..limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        u64::from_le_bytes(bytes) % limit
    }

    /// One of the numbers in `from`, or `None` if it is empty.
    pub(crate) fn choose(&mut self, from: &[usize]) -> Option<usize> {
        let count = from.len() as u64;
        (count > 0).then(|| from[self.below(count) as usize])
    }
}

/// Runs a test with a seed and prints the seed. `CAIRN_SEED` sets it. With `CAIRN_SOAK_SECONDS` the
/// test is repeated with other seeds for that long.
pub(crate) fn with_seeds(test: impl Fn(u64)) {
    let number = |name: &str| -> Option<u64> {
        std::env::var(name).ok().map(|text| text.parse().expect("a number"))
    };
    let begin = Instant::now();
    let soak = Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let mut seed = number("CAIRN_SEED").unwrap_or(now.as_nanos() as u64 % 1_000_000_000);
    loop {
        println!("CAIRN_SEED={seed}");
        test(seed);
        seed += 1;
        if begin.elapsed() >= soak {
            return;
        }
    }
}

/// Random bytes that a seed reproduces.
pub(crate) fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    let mut bytes = vec![0; len];
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Waits until this process knows that `count` peers are up. It reads the membership only from time
/// to time.
pub(crate) fn wait_for_members(repository: &Repository, count: usize) {
    let up = || {
        let members = repository.cluster().unwrap().0.members();
        members.iter().filter(|member| member.state == MemberState::Up).count()
    };
    wait_until("the client knows all peers", || up() == count);
}

pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    wait_within(TIMEOUT, what, condition);
}

/// Waits for the effect of a repair. A repair that was killed holds its lease for a while, so this
/// waits longer.
pub(crate) fn wait_for_repair(what: &str, condition: impl Fn() -> bool) {
    wait_within(3 * TIMEOUT, what, condition);
}

fn wait_within(time: Duration, what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < time, "timed out waiting for: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// A free address of this host. Its port is below the range for outgoing connections, so none of
/// them takes it.
pub(crate) fn free_address_on(host: &str) -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = (std::process::id() % 400) as u16 * 30;
    loop {
        let port = 20_000 + (own + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        let address = format!("{host}:{port}");
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}
