//! Documents in a real etcd: kills and restarts, lost answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::collection::btree_set;
use proptest::prelude::{prop_assert_eq, proptest};
use tempfile::TempDir;

use super::{EtcdDocuments, document, removes};
use crate::documents::{Change, Documents, Query};
use crate::error::ErrorKind;
use crate::net::identity::Security;
use crate::testing::own_port;

/// An etcd of one member.
pub(in crate::documents) struct Process {
    dir: TempDir,
    child: Child,
    port: u16,
    other_port: u16,
    more: Vec<String>,
}

impl Process {
    pub(in crate::documents) fn start() -> Process {
        Process::start_with(&[])
    }

    pub(super) fn start_with(more: &[String]) -> Process {
        for _ in 0..20 {
            let dir = TempDir::new().unwrap();
            let (port, other_port) = (free_port(), free_port());
            let child = spawn(dir.path(), port, other_port, more);
            let mut process = Process { dir, child, port, other_port, more: more.to_vec() };
            if process.is_ready() {
                return process;
            }
        }
        panic!("etcd does not start");
    }

    /// Waits until etcd listens. Returns `false` if it exits: its ports may be in use.
    fn is_ready(&mut self) -> bool {
        let begin = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(begin.elapsed() < Duration::from_secs(60), "etcd does not listen");
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            thread::sleep(Duration::from_millis(20));
        }
        self.child.try_wait().unwrap().is_none()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        self.child = spawn(self.dir.path(), self.port, self.other_port, &self.more);
        assert!(self.is_ready(), "etcd does not start again");
    }

    pub(super) fn address(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }

    /// A client with a longer retry timeout than usual: many etcd processes run at once.
    pub(in crate::documents) fn client(&self) -> EtcdDocuments {
        let retry_timeout = Duration::from_secs(60);
        EtcdDocuments::with_retry_timeout(&self.address(), &Security::INSECURE, retry_timeout)
            .unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that is free.
fn free_port() -> u16 {
    own_port().local_addr().unwrap().port()
}

fn spawn(dir: &Path, port: u16, other_port: u16, more: &[String]) -> Child {
    let scheme = if more.is_empty() { "http" } else { "https" };
    let own = format!("{scheme}://127.0.0.1:{port}");
    let other = format!("http://127.0.0.1:{other_port}");
    let spawned = Command::new("etcd")
        .arg("--data-dir")
        .arg(dir.join("data"))
        .args(["--listen-client-urls", &own, "--advertise-client-urls", &own])
        .args(["--listen-peer-urls", &other, "--initial-advertise-peer-urls", &other])
        .args(["--initial-cluster", &format!("default={other}")])
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    spawned.expect("etcd cannot be started; `make setup` installs it")
}

pub(super) fn count(documents: &dyn Documents) -> u64 {
    documents.read(&[Query::key("count")]).unwrap().get("count").unwrap().unwrap_or(0)
}

/// Increments the counter, unless another client changes it meanwhile.
pub(super) fn try_increment(documents: &dyn Documents) -> bool {
    let view = documents.read(&[Query::key("count")]).unwrap();
    let count: u64 = view.get("count").unwrap().unwrap_or(0);
    let relies_on = vec![("count".into(), view.version("count"))];
    let change = Change { relies_on, ..Change::default() };
    documents.commit(&change.put("count", &(count + 1))).unwrap()
}

#[test]
fn increments_are_not_lost_or_repeated_when_etcd_is_killed_and_restarted() {
    let mut process = Process::start();
    let (stop, carried_out) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..3 {
            let documents = process.client();
            let (stop, carried_out) = (&stop, &carried_out);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    carried_out.fetch_add(try_increment(&documents).into(), Ordering::Relaxed);
                }
            });
        }
        for round in 0..3 {
            let begin = Instant::now();
            let enough = carried_out.load(Ordering::Relaxed) + 1 + round * 5;
            while carried_out.load(Ordering::Relaxed) < enough {
                assert!(begin.elapsed() < Duration::from_secs(60), "no increment succeeds");
                thread::sleep(Duration::from_millis(1));
            }
            process.kill();
            process.restart();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(count(&process.client()), carried_out.load(Ordering::Relaxed));
}

/// Starts a proxy before an etcd. When `lose_answer` is set, the proxy forwards requests, and
/// closes the connection in place of the next answer.
fn proxy(port: u16, lose_answer: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) =
                (client.unwrap(), TcpStream::connect(("127.0.0.1", port)).unwrap());
            for (mut from, mut into, is_answer) in [
                (client.try_clone().unwrap(), server.try_clone().unwrap(), false),
                (server, client, true),
            ] {
                let lose_answer = lose_answer.clone();
                thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(len @ 1..) = from.read(&mut buffer) {
                        // HTTP/2 acknowledges a request before it answers; acknowledgements are
                        // short.
                        if is_answer && len > 40 && lose_answer.swap(false, Ordering::SeqCst) {
                            break;
                        }
                        if into.write_all(&buffer[..len]).is_err() {
                            break;
                        }
                    }
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = into.shutdown(Shutdown::Both);
                });
            }
        }
    });
    own
}

#[test]
fn a_change_whose_answer_is_lost_is_carried_out_once_and_reported_as_done() {
    let process = Process::start();
    let lose_answer = Arc::new(AtomicBool::new(false));
    let address = format!("etcd://127.0.0.1:{}", proxy(process.port, lose_answer.clone()));
    let retry_timeout = Duration::from_secs(60);
    let documents =
        EtcdDocuments::with_retry_timeout(&address, &Security::INSECURE, retry_timeout).unwrap();
    assert!(try_increment(&documents), "this grants the lease for tokens");
    let direct = process.client();
    for round in 2..7 {
        let view = documents.read(&[Query::key("count")]).unwrap();
        let relies_on = vec![("count".into(), view.version("count"))];
        let change = Change { relies_on, ..Change::default() }.put("count", &round);
        lose_answer.store(true, Ordering::SeqCst);
        assert!(
            documents.commit(&change).unwrap(),
            "a change that was carried out is reported as such"
        );
        assert!(!lose_answer.load(Ordering::SeqCst), "an answer was lost");
        assert_eq!(count(&direct), round);
        assert!(!documents.commit(&change).unwrap(), "another commit has another token");
    }
}

#[test]
fn an_unreachable_etcd_is_reported_in_time() {
    let mut process = Process::start();
    let retry_timeout = Duration::from_secs(2);
    let documents =
        EtcdDocuments::with_retry_timeout(&process.address(), &Security::INSECURE, retry_timeout)
            .unwrap();
    assert!(try_increment(&process.client()));
    process.kill();
    let begin = Instant::now();
    for error in [
        documents.read(&[Query::key("count")]).unwrap_err(),
        documents.commit(&Change::default().put("x", &1)).unwrap_err(),
        documents.wait("a", 1, Duration::from_secs(10)).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains(&process.address()), "{error}");
    }
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    process.restart();
    assert_eq!(count(&process.client()), 1);
}

#[test]
fn a_read_of_more_documents_than_fit_in_a_transaction_shows_one_moment() {
    let process = Process::start();
    let documents = process.client();
    for begin in [0, 100, 200] {
        let change = (begin..begin + 100).fold(Change::default(), |change, number| {
            change.put(format!("many/{number}"), &number)
        });
        assert!(documents.commit(&change).unwrap());
    }
    let queries: Vec<_> = (0..300).map(|number| Query::key(format!("many/{number}"))).collect();
    let view = documents.read(&queries).unwrap();
    assert_eq!(view.documents.len(), 300);
    assert_eq!(view.get("many/250").unwrap(), Some(250));
    assert_eq!(documents.read(&[]).unwrap().revision, view.revision);
    let change =
        (0..300).fold(Change::default(), |change, number| change.put(format!("{number}"), &1));
    let error = documents.commit(&change).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    // Leases and tokens are not documents.
    let all = documents.read(&[Query::prefix("")]).unwrap();
    assert_eq!(all.documents.len(), 300);
}

proptest! {
    /// For any change, the deleted keys are the removed keys without those that are put.
    #[test]
    fn a_key_that_is_put_is_not_deleted(
        there in btree_set("[ab]{0,4}", 0..12),
        put in btree_set("[ab]{0,4}", 0..6),
        removed in btree_set("[ab]{0,3}", 0..3),
        prefixes in btree_set("[ab]{0,3}", 0..3),
    ) {
        let mut change = Change::default();
        for key in &put {
            change = change.put(key, &1);
        }
        for key in &removed {
            change = change.remove(Query::key(key));
        }
        for prefix in &prefixes {
            change = change.remove(Query::prefix(prefix));
        }
        let puts: BTreeMap<_, _> = change.puts.iter().map(|put| (document(&put.key), put)).collect();
        let ranges = removes(&change, &puts);
        let is_deleted = |key: &str| {
            let key = document(key).into_bytes();
            ranges.iter().any(|(begin, end)| match end {
                None => *begin == key,
                Some(end) => *begin <= key && key < *end,
            })
        };
        let deleted: BTreeSet<_> =
            there.union(&put).filter(|key| is_deleted(key)).cloned().collect();
        let goes = |key: &&String| {
            let named = removed.contains(*key) || prefixes.iter().any(|one| key.starts_with(one));
            named && !put.contains(*key)
        };
        let expected: BTreeSet<_> = there.union(&put).filter(goes).cloned().collect();
        prop_assert_eq!(deleted, expected);
    }
}

/// Whatever happens to etcd during a scan: a part of the documents is never taken for all.
#[test]
fn a_scan_that_etcd_cannot_complete_is_an_error() {
    const COUNT: usize = 1500;
    let mut process = Process::start();
    let long = process.client();
    for number in 0..COUNT / 100 {
        let change = Change { relaxed: true, ..Change::default() };
        let put = |change: Change, n: usize| change.put(format!("x/{number:02}{n:02}"), &1);
        assert!(long.commit(&(0..100).fold(change, put)).unwrap());
    }
    let scan = |documents: &EtcdDocuments, at_first: &mut dyn FnMut()| {
        let mut seen = 0;
        let scanned = documents.scan(&["x/"], &mut |_, _| {
            if seen == 0 {
                at_first();
            }
            seen += 1;
            Ok(())
        });
        (seen, scanned)
    };
    assert!(matches!(scan(&long, &mut || {}), (COUNT, Ok(1..))));

    // etcd forgets the revision that the scan shows.
    let member = format!("127.0.0.1:{}", process.port);
    let (seen, scanned) = scan(&long, &mut || {
        assert!(long.commit(&Change::default().put("y", &1)).unwrap());
        let revision = long.read(&[]).unwrap().revision as i64;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut client = etcd_client::Client::connect([&member], None).await.unwrap();
            client.compact(revision, None).await.unwrap();
        });
    });
    let error = scanned.unwrap_err();
    assert!(seen < COUNT && error.to_string().contains("compacted"), "{seen}: {error}");
    assert_eq!(error.kind(), ErrorKind::Unavailable);

    // It dies.
    let address = process.address();
    let retry_timeout = Duration::from_secs(5);
    let short =
        EtcdDocuments::with_retry_timeout(&address, &Security::INSECURE, retry_timeout).unwrap();
    let (seen, scanned) = scan(&short, &mut || process.kill());
    assert!(seen < COUNT);
    assert_eq!(scanned.unwrap_err().kind(), ErrorKind::Unavailable);
}
