//! A peer as a process: it is killed, and what it said to have stored is there.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use cairn_store::BlobId;
use cairn_store::cluster::fragment::{Fragment, encode};
use cairn_store::cluster::{Connection, Redundancy};
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
        let args = ["serve", "--data", "peer", "--listen", "127.0.0.1:0", "--insecure", "--json"];
        let mut command = place.command(&[&args, more].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let told: Value = serde_json::from_str(&line).unwrap();
        let text = |name: &str| told[name].as_str().unwrap().to_owned();
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
    let block = blocks.get(index.into()).to_vec();
    Fragment { description, index, block }
}

#[tokio::test]
async fn what_a_peer_has_stored_survives_its_death_at_any_moment() {
    let place = Place::new();
    let mut stored = Vec::new();
    let mut id = None;
    for round in 0..6 {
        let peer = Peer::start(&place, &[]);
        assert_eq!(id.get_or_insert(peer.id.clone()), &peer.id, "it is the same peer");
        let connection = Arc::new(Connection::open(&peer.address).await.unwrap());
        for number in &stored {
            let wanted = fragment(*number);
            let found = connection.get(&wanted.description.blob).await.unwrap();
            assert_eq!(found, [wanted], "fragment {number} in round {round}");
        }
        let mut puts = JoinSet::new();
        for number in round * 1000..round * 1000 + 300 {
            let connection = connection.clone();
            puts.spawn(async move { connection.put(fragment(number)).await.map(|()| number) });
        }
        let killer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(30 + 40 * round)).await;
            peer.kill();
        });
        while let Some(put) = puts.join_next().await {
            stored.extend(put.unwrap());
        }
        killer.await.unwrap();
        assert!(connection.usage().await.is_err(), "the peer is dead");
    }
    assert!(!stored.is_empty(), "nothing was stored before a death");
}

#[test]
fn a_peer_is_not_insecure_by_accident() {
    let place = Place::new();
    let run = place.run(&["serve", "--data", "peer", "--listen", "127.0.0.1:0"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("--insecure"), "{}", run.stderr);
    assert!(!place.path("peer").exists());
    let peer = Peer::start(&place, &["--capacity", "1M"]);
    let args = ["serve", "--data", "peer", "--listen", "127.0.0.1:0", "--insecure"];
    let second = place.run(&args);
    assert_ne!(second.code, 0, "the directory is in use");
    drop(peer);
    let run = place.run(&["serve", "--data", "peer", "--listen", "nowhere", "--insecure"]);
    assert_ne!(run.code, 0);
}
