//! A cluster whose catalog is an etcd: `cairn supervise` does what a catalog server does otherwise.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use cairn_store::Repository;
use cairn_store::documents::{self, Query};
use cairn_store::net::identity::Security;
use serde_json::Value;

use crate::lab::{Server, free_address_on, random, wait_for_repair, wait_until};
use crate::support::{Place, Timeline};

/// A process that is killed at the end.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An etcd of one member, and its address as a repository.
fn start_etcd(place: &Place) -> (Killed, String) {
    let [own, other] = ["127.0.0.1"; 2].map(free_address_on);
    let [own_url, other_url] = [&own, &other].map(|address| format!("http://{address}"));
    let child = Command::new("etcd")
        .arg("--data-dir")
        .arg(place.path("etcd"))
        .args(["--listen-client-urls", &own_url, "--advertise-client-urls", &own_url])
        .args(["--listen-peer-urls", &other_url, "--initial-advertise-peer-urls", &other_url])
        .args(["--initial-cluster", &format!("default={other_url}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let etcd = Killed(child.expect("etcd cannot be started; `make setup` installs it"));
    wait_until("etcd listens", || TcpStream::connect(&own).is_ok());
    (etcd, format!("etcd://{own}"))
}

fn start_supervisor(place: &Place, url: &str) -> Killed {
    let args = ["--store", url, "--insecure", "supervise", "--lost-after", "1"];
    start_supervisor_with(place, &args)
}

/// Starts a supervisor. The second argument names the repository.
fn start_supervisor_with(place: &Place, args: &[&str]) -> Killed {
    let mut command = place.command(&[args, &["--json"]].concat());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let started: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(started["supervises"], args[1]);
    Killed(child)
}

#[test]
fn with_an_etcd_a_supervisor_declares_peers_lost_and_repairs_and_no_peer_does() {
    let place = Place::new();
    let (_etcd, url) = start_etcd(&place);
    let start_peer = |at: usize| {
        let (data, domain) = (format!("peer{at}"), format!("rack{at}"));
        let args = ["serve", "--data", &data, "--listen", "127.0.0.1:0", "--domain", &domain];
        let args = [&args, &["--catalog", &url, "--insecure"][..]].concat();
        Server::start(&place, None, &args, &format!("{data}.log"))
    };
    let mut peers: Vec<Option<Server>> = (0..4).map(|at| Some(start_peer(at))).collect();
    let json = |args: &[&str]| place.json(&[&["--store", &url, "--insecure"], args].concat());
    let state = |id: &str| {
        let list = json(&["peers"]);
        let found = list["peers"].as_array().unwrap().iter().find(|peer| peer["peer"] == id);
        found.map(|peer| peer["state"].clone())
    };
    wait_until("the peers are up", || {
        json(&["peers"])["peers"].as_array().unwrap().iter().filter(|p| p["state"] == "up").count()
            == 4
    });
    let disk = random(1, 1 << 20);
    std::fs::write(place.path("disk.raw"), &disk).unwrap();
    json(&["import", "disk.raw", "vm", "--redundancy", "replicas=2"]);
    let mut kill = |at: usize| peers[at].take().unwrap().id.clone();
    let lost = kill(0);
    wait_until("the peer is down", || state(&lost) == Some("down".into()));
    let documents = documents::open(&url, &Security::INSECURE).unwrap();
    let leader = || -> Option<String> {
        let key = "leader/supervisor";
        documents.read(&[Query::key(key)]).unwrap().get(key).unwrap()
    };
    assert_eq!(leader(), None, "no peer supervises");

    let [first, second] = [(); 2].map(|()| start_supervisor(&place, &url));
    // Whether a repair that ended after this time, in seconds, left nothing to do.
    let is_whole_since = |time: u64| {
        let repair = json(&["peers"])["repair"].clone();
        let is_whole = repair["under"] == 0 && repair["survives"] == 1;
        repair["time"].as_u64().filter(|ended| *ended > time && is_whole)
    };
    wait_until("the peer is lost", || state(&lost) == Some("lost".into()));
    wait_for_repair("everything is repaired", || is_whole_since(0).is_some());
    let first_repair = is_whole_since(0).unwrap();
    assert!(leader().is_some());
    // One supervisor is enough, whichever acted.
    drop(first);
    let lost = kill(1);
    wait_until("the second peer is lost", || state(&lost) == Some("lost".into()));
    wait_for_repair("everything is repaired again", || is_whole_since(first_repair).is_some());
    place.ok(&["--store", &url, "--insecure", "export", "vm", "out.raw"]);
    assert!(std::fs::read(place.path("out.raw")).unwrap() == disk);
    drop(second);
}

/// A supervisor of a repository in a directory prunes and collects. Two of them do not disturb each
/// other, and a kill of one does no harm.
#[test]
fn supervisors_of_a_directory_prune_and_collect() {
    let place = Place::new();
    let url = format!("dir:{}", place.path("repository").display());
    std::fs::write(place.path("disk.raw"), random(1, 4 << 20)).unwrap();
    place.ok(&["import", "disk.raw", "gone"]);
    std::fs::write(place.path("disk.raw"), random(2, 1 << 20)).unwrap();
    place.ok(&["import", "disk.raw", "kept"]);
    let taken = Timeline::attach(&place, "kept");
    taken.take_all(&[1, 2, 3]);
    taken.detach();
    place.ok(&["rm", "gone"]);
    place.ok(&["policy", "set", "kept", "--keep-last", "2"]);
    let often = ["--prune-interval", "1s", "--gc-interval", "1s", "--gc-grace", "0"];
    let start =
        || start_supervisor_with(&place, &[&["--store", &url, "supervise"], &often[..]].concat());
    let [first, second] = [start(), start()];
    let repository = Repository::open(&url).unwrap();
    let last = || repository.catalog().last_collection().unwrap().map(|last| last.number);
    // One that runs at this moment, or was killed a moment ago, holds the lease.
    let dry_run = || {
        let run = place.run(&["gc", "--dry-run", "--grace", "0"]);
        assert!(run.code == 0 || run.code == 4, "{}", run.stderr);
        (run.code == 0).then_some(run.stdout)
    };
    wait_until("the policy is carried out", || {
        place.json(&["ls", "kept"]).as_array().unwrap().len() == 2
    });
    wait_until("all garbage is deleted", || {
        let text = dry_run().map(|text| String::from_utf8(text).unwrap());
        text.is_some_and(|text| {
            text.starts_with("last complete collection: ") && text.contains("would free 0 B")
        })
    });
    // Whichever acts.
    drop(first);
    let before = last();
    wait_for_repair("the other one collects", || last() > before);
    drop(second);
    place.ok(&["export", "kept", "out.raw"]);
    place.ok(&["verify"]);
}

#[test]
fn the_arguments_of_a_supervisor_are_checked() {
    let place = Place::new();
    let refused = |args: &[&str], text: &str| {
        let run = place.run(args);
        assert!(run.code == 2 && run.stderr.contains(text), "{args:?}: {}", run.stderr);
    };
    refused(&["supervise", "--lost-after", "9"], "has no peers");
    refused(&["--store", "etcd://127.0.0.1:1", "supervise"], "--insecure");
    let peer = ["serve", "--no-catalog", "--data", "peer", "--listen", "127.0.0.1:0", "--insecure"];
    for option in ["--lost-after", "--gc-interval", "--gc-grace", "--prune-interval"] {
        refused(&[&peer, &[option, "9"][..]].concat(), "omit them for a peer");
    }
    assert!(!place.path("peer").exists());
}
