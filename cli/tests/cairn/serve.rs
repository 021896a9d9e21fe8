//! A peer as a process: every fragment that it acknowledged survives a kill.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cairn_store::BlobId;
use cairn_store::cluster::{Cluster, Connection, Member, MemberState};
use cairn_store::collection::CollectionNumber;
use cairn_store::encoding::Redundancy;
use cairn_store::encoding::fragment::{Fragment, encode};
use cairn_store::net::identity::{Role, Security};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::support::Place;

struct Peer {
    child: Child,
    address: String,
    id: String,
}

impl Peer {
    fn start(place: &Place, more: &[&str]) -> Peer {
        Peer::start_in(place, "peer", more)
    }

    fn start_in(place: &Place, data: &str, more: &[&str]) -> Peer {
        let args = ["serve", "--data", data, "--listen", "127.0.0.1:0", "--json"];
        let how = if more.contains(&"--keys") {
            &["--no-catalog"][..]
        } else {
            &["--no-catalog", "--insecure"]
        };
        let mut command = place.command(&[&args, how, more].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Value = serde_json::from_str(&line).unwrap();
        let text = |name: &str| started[name].as_str().unwrap().to_owned();
        Peer { address: text("listen"), id: text("peer"), child }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn fragment(number: u64) -> Fragment {
    let content: Vec<u8> =
        (0..64u64 << 10).map(|at| (at * 31 + number * 7 + at / 251) as u8).collect();
    let content = [&number.to_le_bytes()[..], &content].concat();
    let redundancy = Redundancy::ReedSolomon { data: 4, parity: 4 };
    let (description, blocks) = encode(&BlobId::of(&content), &content, redundancy);
    let index = (number % 8) as u8;
    let block = blocks.share(index.into());
    Fragment { description, index, block }
}

#[tokio::test]
async fn an_acknowledged_fragment_survives_a_kill_of_the_peer_at_any_moment() {
    let place = Place::new();
    let mut stored = Vec::new();
    let mut id = None;
    for round in 0..6 {
        let peer = Peer::start(&place, &[]);
        assert_eq!(id.get_or_insert(peer.id.clone()), &peer.id, "it is the same peer");
        let connection =
            Arc::new(Connection::open(&peer.address, &Security::INSECURE).await.unwrap());
        for number in &stored {
            let wanted = fragment(*number);
            let found = connection.fetch(&wanted.description.blob).await.unwrap();
            assert_eq!(found, [wanted], "fragment {number} in round {round}");
        }
        let mut puts = JoinSet::new();
        for number in round * 1000..round * 1000 + 150 {
            let connection = connection.clone();
            puts.spawn(async move {
                connection.put(fragment(number), CollectionNumber::FIRST).await.map(|()| number)
            });
        }
        // The peer is killed after a number of acknowledgements.
        let mut left = 1 + round * 20;
        let mut peer = Some(peer);
        while let Some(put) = puts.join_next().await {
            stored.extend(put.unwrap());
            left = left.saturating_sub(1);
            if left == 0
                && let Some(peer) = peer.take()
            {
                peer.kill();
            }
        }
        assert!(connection.usage().await.is_err(), "the peer is dead");
    }
    assert!(!stored.is_empty(), "nothing was stored before a kill");
}

fn content(number: u64) -> Vec<u8> {
    (0..256u64 << 10).map(|at| (at * number + at / 255 + number) as u8).collect()
}

fn member(peer: &Peer, at: usize) -> Member {
    let (id, address) = (peer.id.parse().unwrap(), peer.address.clone());
    Member { id, address, weight: 1, domain: at.to_string(), state: MemberState::Up }
}

#[tokio::test]
async fn blobs_survive_the_loss_of_as_many_peers_as_their_redundancy_allows() {
    for (text, lost) in [("rs=4+4", 4), ("replicas=3", 2)] {
        let redundancy: Redundancy = text.parse().unwrap();
        let place = Place::new();
        let start = |at: usize| Peer::start_in(&place, &format!("peer{at}"), &[]);
        let mut peers: Vec<Option<Peer>> = (0..8).map(|at| Some(start(at))).collect();
        let members = |peers: &[Option<Peer>]| -> Vec<Member> {
            let all = peers.iter().enumerate();
            all.filter_map(|(at, peer)| Some(member(peer.as_ref()?, at))).collect()
        };
        let all = members(&peers);
        let cluster = Cluster::new(all.clone(), Security::INSECURE);
        let mut blobs = Vec::new();
        for number in 1..30 {
            let content = content(number);
            let blob = BlobId::of(&content);
            let sent = cluster.put(&blob, &content, &redundancy.into()).await.unwrap().sent;
            assert_eq!(sent as usize, content.len() * redundancy.width() / redundancy.needed());
            blobs.push((blob, content));
        }
        for at in 0..lost {
            peers[(at * 3) % 8].take().unwrap().kill();
        }
        // A client that knows all peers finds out which ones are dead.
        let cluster = Cluster::new(all, Security::INSECURE);
        let mut buffer = vec![0; 256 << 10];
        for (blob, content) in &blobs {
            let len = cluster.get(blob, &mut buffer).await.unwrap();
            assert!(&buffer[..len] == content, "{text}");
        }
        // A write goes to the remaining peers, if they are enough.
        let content = content(99);
        let written = cluster.put(&BlobId::of(&content), &content, &redundancy.into()).await;
        assert_eq!(written.is_ok(), redundancy.width() <= 8 - lost, "{text}: {written:?}");
        let missing = cluster.get(&BlobId::of(b"another"), &mut buffer).await;
        assert!(missing.is_err());
        // With Reed-Solomon codes, the loss of one more peer is too much.
        if text == "rs=4+4" {
            let next = peers.iter_mut().find_map(Option::take).unwrap();
            next.kill();
            let cluster = Cluster::new(members(&peers), Security::INSECURE);
            for (blob, _) in &blobs {
                assert!(cluster.get(blob, &mut buffer).await.is_err());
            }
        }
    }
}

#[tokio::test]
async fn a_peer_that_hangs_delays_a_read_only_for_a_short_time() {
    let redundancy: Redundancy = "rs=2+2".parse().unwrap();
    let place = Place::new();
    let peers: Vec<Peer> =
        (0..5).map(|at| Peer::start_in(&place, &format!("peer{at}"), &[])).collect();
    let members = peers.iter().enumerate().map(|(at, peer)| member(peer, at)).collect();
    let cluster = Cluster::new(members, Security::INSECURE);
    let mut blobs = Vec::new();
    for number in 1..20 {
        let content = content(number);
        let blob = BlobId::of(&content);
        cluster.put(&blob, &content, &redundancy.into()).await.unwrap();
        blobs.push((blob, content));
    }
    let signal = |name: &str| {
        let id = peers[2].child.id().to_string();
        assert!(std::process::Command::new("kill").args([name, &id]).status().unwrap().success());
    };
    signal("-STOP");
    let (mut buffer, mut slow) = (vec![0; 256 << 10], 0);
    for (blob, content) in &blobs {
        let begin = std::time::Instant::now();
        let len = cluster.get(blob, &mut buffer).await.unwrap();
        assert!(&buffer[..len] == content);
        slow += usize::from(begin.elapsed() > Duration::from_secs(5));
    }
    // One read may be slow because the machine is busy.
    assert!(slow < 2, "{slow} of {} reads", blobs.len());
    signal("-CONT");
}

#[test]
fn a_peer_without_keys_needs_the_option_insecure() {
    let place = Place::new();
    let run = place.run(&["serve", "--no-catalog", "--data", "peer", "--listen", "127.0.0.1:0"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("--insecure"), "{}", run.stderr);
    assert!(!place.path("peer").exists());
    let peer = Peer::start(&place, &["--capacity", "1M"]);
    let args = ["serve", "--data", "peer", "--listen", "127.0.0.1:0", "--insecure", "--no-catalog"];
    let second = place.run(&args);
    assert_eq!(second.code, 4, "the directory is in use: {}", second.stderr);
    drop(peer);
}

#[tokio::test]
async fn a_peer_with_keys_serves_only_clients_of_its_cluster() {
    let place = Place::new();
    for name in ["keys", "others"] {
        place.ok(&["keys", "init", name]);
    }
    assert_ne!(place.run(&["keys", "init", "keys"]).code, 0, "keys are not replaced");
    let signed = place.json(&["keys", "sign", "--keys", "keys", "peer-keys"]);
    let peer = Peer::start(&place, &["--keys", "peer-keys"]);
    assert_eq!(peer.id, signed["peer"], "the id is in the certificate");
    let load = |name: &str, role| Security::load(&place.path(name), role).unwrap();
    let connection = Connection::open(&peer.address, &load("keys", Role::Client)).await.unwrap();
    let one = fragment(1);
    connection.put(one.clone(), CollectionNumber::FIRST).await.unwrap();
    assert_eq!(connection.fetch(&one.description.blob).await.unwrap(), [one]);
    let other_peer = load("peer-keys", Role::Peer);
    for stranger in [Security::INSECURE, load("others", Role::Client), other_peer] {
        let opened = Connection::open(&peer.address, &stranger).await;
        // With TLS 1.3 a client may learn only with its first request that it is refused.
        if let Ok(connection) = opened {
            assert!(connection.usage().await.is_err());
        }
    }
    let supervisor = Connection::open(&peer.address, &load("keys", Role::Supervisor)).await;
    assert!(supervisor.unwrap().usage().await.is_ok());
    let serve = ["serve", "--no-catalog", "--data", "other", "--listen", "127.0.0.1:0"];
    let run = place.run(&[&serve[..], &["--keys", "nowhere"]].concat());
    assert!(run.code != 0 && run.stderr.contains("ca.pem"), "{}", run.stderr);
}

#[test]
fn a_peer_logs_soon_that_it_waits_for_its_catalog() {
    let place = Place::new();
    place.ok(&["keys", "init", "keys"]);
    place.ok(&["keys", "sign", "--keys", "keys", "peer-keys"]);
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let serve = ["serve", "--listen", "127.0.0.1:0", "--catalog", &free, "--data"];
    for (data, security) in [("one", &["--insecure"][..]), ("two", &["--keys", "peer-keys"])] {
        let begin = Instant::now();
        let mut command = place.command(&[&serve[..], &[data], security].concat());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let waits = format!("waiting for the catalog at {free}");
        let found = lines
            .take_while(|_| begin.elapsed() < Duration::from_secs(6))
            .any(|line| line.contains("WARN") && line.contains(&waits));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found && begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
    }
}

/// A peer that joins no catalog is used by nobody, so nobody gets one by accident.
#[test]
fn a_peer_without_a_catalog_needs_the_option_no_catalog() {
    let place = Place::new();
    std::fs::write(place.path("peer"), "a file, so that no peer starts").unwrap();
    let serve = ["serve", "--data", "peer", "--listen", "127.0.0.1:0", "--insecure"];
    let run = place.run(&serve);
    assert_eq!(run.code, 2, "{}", run.stderr);
    for text in ["--catalog HOST:PORT", "--catalog alone", "--no-catalog"] {
        assert!(run.stderr.contains(text), "no {text}: {}", run.stderr);
    }
    let run = place.run(&[&serve[..], &["--no-catalog", "--catalog", "127.0.0.1:1"]].concat());
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("cannot be used with"), "{}", run.stderr);
}
