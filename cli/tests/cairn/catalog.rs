//! The catalog server as a process: every change that it acknowledged survives a kill.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::ErrorKind;
use cairn_store::documents;
use cairn_store::documents::{Change, Documents, Query, RemoteDocuments};
use cairn_store::net::identity::{Role, Security};
use serde_json::Value;

use crate::support::Place;

struct Catalog {
    child: Child,
    address: String,
    id: String,
}

impl Catalog {
    /// Starts a catalog at a port below the range for outgoing connections, so that no other
    /// process takes it while the catalog is down.
    fn start(place: &Place, more: &[&str]) -> Catalog {
        let first = std::process::id().wrapping_mul(7919);
        let port = |number: u32| 10_000 + first.wrapping_add(number * 131) % 22_000;
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let tries = (0..50).map(|_| port(NEXT.fetch_add(1, Ordering::Relaxed)));
        let mut started =
            tries.filter_map(|port| Catalog::start_at(place, &format!("127.0.0.1:{port}"), more));
        started.next().expect("a port is free")
    }

    fn start_at(place: &Place, listen: &str, more: &[&str]) -> Option<Catalog> {
        let args = ["serve", "--catalog", "--data", "catalog", "--listen", listen, "--json"];
        let how = if more.contains(&"--keys") { &[][..] } else { &["--insecure"] };
        let mut command = place.command(&[&args, how, more].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            child.wait().unwrap();
            return None;
        }
        let started: Value = serde_json::from_str(&line).unwrap();
        let text = |name: &str| started[name].as_str().unwrap().to_owned();
        Some(Catalog { address: text("listen"), id: text("catalog"), child })
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args([name, &id]).status().unwrap().success());
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn count(documents: &dyn Documents) -> u64 {
    documents.read(&[Query::key("count")]).unwrap().get("count").unwrap().unwrap_or(0)
}

/// Increments the count, unless another client has changed it in the meantime.
fn try_increment(documents: &dyn Documents) -> bool {
    let view = documents.read(&[Query::key("count")]).unwrap();
    let count: u64 = view.get("count").unwrap().unwrap_or(0);
    let relies_on = vec![("count".into(), view.version("count"))];
    let change = Change { relies_on, ..Change::default() };
    documents.commit(&change.put("count", &(count + 1))).unwrap()
}

/// The clients do not notice the kills: each call is answered, and each acknowledged change was
/// made exactly once.
#[test]
fn a_catalog_that_is_killed_and_restarted_loses_and_repeats_no_change() {
    let place = Place::new();
    let mut catalog = Catalog::start(&place, &[]);
    let (address, id) = (catalog.address.clone(), catalog.id.clone());
    let (stop, committed) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..3 {
            let retry_timeout = Duration::from_secs(60);
            let documents =
                RemoteDocuments::with_retry_timeout(&address, &Security::INSECURE, retry_timeout)
                    .unwrap();
            let (stop, committed) = (&stop, &committed);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    committed.fetch_add(try_increment(&documents).into(), Ordering::Relaxed);
                }
            });
        }
        for round in 0..6 {
            // It is killed after some more changes, while others are in progress.
            let begin = Instant::now();
            let enough = committed.load(Ordering::Relaxed) + 1 + round * 5;
            while committed.load(Ordering::Relaxed) < enough {
                assert!(begin.elapsed() < Duration::from_secs(60), "there is no progress");
                thread::sleep(Duration::from_millis(1));
            }
            catalog.kill();
            catalog = Catalog::start_at(&place, &address, &[]).expect("it starts again");
            assert_eq!(catalog.id, id, "it is the same catalog");
        }
        stop.store(true, Ordering::Relaxed);
    });
    let documents = documents::open(&address, &Security::INSECURE).unwrap();
    assert_eq!(count(&*documents), committed.load(Ordering::Relaxed));
}

#[test]
fn a_catalog_that_hangs_is_named_in_the_error() {
    let place = Place::new();
    let catalog = Catalog::start(&place, &[]);
    let retry_timeout = Duration::from_secs(2);
    let documents =
        RemoteDocuments::with_retry_timeout(&catalog.address, &Security::INSECURE, retry_timeout)
            .unwrap();
    assert!(try_increment(&*documents::open(&catalog.address, &Security::INSECURE).unwrap()));
    catalog.signal("-STOP");
    let begin = Instant::now();
    let error = documents.commit(&Change::default().put("x", &1)).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains(&catalog.address), "{error}");
    catalog.signal("-CONT");
    assert_eq!(count(&documents), 1, "the client continues");
}

#[test]
fn a_catalog_with_keys_lets_peers_send_heartbeats_and_clients_change_documents() {
    let place = Place::new();
    place.ok(&["keys", "init", "keys"]);
    let id = place.json(&["keys", "sign", "--keys", "keys", "peer"])["peer"].clone();
    let catalog = Catalog::start(&place, &["--keys", "keys"]);
    let by = |keys: &str, role| {
        let security = Security::load(&place.path(keys), role).unwrap();
        documents::open(&catalog.address, &security).unwrap()
    };
    let client = by("keys", Role::Client);
    assert!(try_increment(&*client));
    let peer = by("peer", Role::Peer);
    let alive = format!("alive/{}", id.as_str().unwrap());
    assert!(peer.commit(&Change::default().put_for(5, alive, &1)).unwrap());
    let error = peer.commit(&Change::default().put("count", &9)).unwrap_err().to_string();
    assert!(error.contains("a peer may not change 'count'"), "{error}");
    assert_eq!(count(&*client), 1);
    // The supervisor runs in the catalog's process and needs keys of its own.
    std::fs::remove_file(place.path("keys/supervisor.key")).unwrap();
    let args = ["serve", "--catalog", "--data", "other", "--listen", "127.0.0.1:0"];
    let run = place.run(&[&args, &["--keys", "keys"][..]].concat());
    assert!(run.code == 2 && run.stderr.contains("supervisor.key"), "{}", run.stderr);
}

#[test]
fn the_arguments_of_a_catalog_are_checked() {
    let place = Place::new();
    let serve = ["serve", "--data", "catalog", "--listen", "127.0.0.1:0"];
    let refused = |more: &[&str], text: &str| {
        let run = place.run(&[&serve, more].concat());
        assert!(run.code != 0 && run.stderr.contains(text), "{more:?}: {}", run.stderr);
    };
    refused(&["--catalog"], "--insecure");
    refused(&["--catalog", "--insecure", "--capacity", "1G"], "are for peers");
    refused(&["--insecure", "--catalog", "nonsense"], "not the address of a catalog");
    assert!(!place.path("catalog").exists());
    let catalog = Catalog::start(&place, &[]);
    refused(&["--catalog", "--insecure"], "another process");
    drop(catalog);
    refused(&["--insecure", "--no-catalog"], "not a peer's");
}
