//! A catalog over a socket: valid and invalid messages, lost requests and lost answers.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::sync::oneshot;

use super::serve_scan::ScanLimits;
use super::server::serve_within;
use super::wire::{MAX_REQUEST, Request};
use super::{CatalogStore, RemoteDocuments};
use crate::cluster::client::Connection as PeerConnection;
use crate::cluster::peer;
use crate::cluster::peer::PeerStore;
use crate::documents::{Change, Documents, Query};
use crate::error::ErrorKind;
use crate::net::admission::Admission;
use crate::net::frame::{HEADER, Header};
use crate::net::handshake::CATALOG_PROTOCOL;
use crate::net::handshake::testing::{Heard, frames_in, hello_frame};
use crate::net::identity::{Identity, Role, Security, init, sign_new_peer};
use crate::sys;
use crate::testing::own_port;

/// A catalog that a thread of its own serves.
pub(in crate::documents) struct Catalog {
    pub(super) dir: TempDir,
    pub(super) address: SocketAddr,
    limits: (Arc<Admission>, ScanLimits),
    stop: Option<oneshot::Sender<()>>,
    served: Option<JoinHandle<io::Result<()>>>,
}

impl Catalog {
    pub(in crate::documents) fn start() -> Catalog {
        Catalog::start_with(Security::INSECURE)
    }

    pub(super) fn start_with(security: Security) -> Catalog {
        Catalog::start_within(security, (Admission::new(1024), ScanLimits::default()))
    }

    pub(super) fn start_within(
        security: Security,
        limits: (Arc<Admission>, ScanLimits),
    ) -> Catalog {
        let dir = TempDir::new().unwrap();
        let listener = own_port();
        let address = listener.local_addr().unwrap();
        let mut catalog = Catalog { dir, address, limits, stop: None, served: None };
        catalog.serve(listener, security);
        catalog
    }

    fn serve(&mut self, listener: TcpListener, security: Security) {
        let store = Arc::new(CatalogStore::open(self.dir.path()).unwrap());
        let (stop, stopped) = oneshot::channel();
        let stopped = async { drop(stopped.await) };
        let limits = self.limits.clone();
        self.stop = Some(stop);
        self.served = Some(in_background(listener, move |listener| async move {
            serve_within(listener, store, security, limits, stopped).await
        }));
    }

    fn stop(&mut self) {
        drop(self.stop.take());
        self.served.take().unwrap().join().unwrap().unwrap();
    }

    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    pub(in crate::documents) fn client(&self) -> RemoteDocuments {
        RemoteDocuments::new(&self.address(), &Security::INSECURE).unwrap()
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        drop(self.stop.take());
    }
}

/// Runs a server on a thread with a runtime of its own.
fn in_background<F: Future<Output = io::Result<()>>>(
    listener: TcpListener,
    serve: impl FnOnce(tokio::net::TcpListener) -> F + Send + 'static,
) -> JoinHandle<io::Result<()>> {
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            listener.set_nonblocking(true)?;
            serve(tokio::net::TcpListener::from_std(listener)?).await
        })
    })
}

fn count(documents: &dyn Documents) -> u64 {
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

/// What the proxy does with a request.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    /// The request and its answer pass.
    Pass,
    /// The request is lost, and the connection with it.
    LoseRequest,
    /// The request arrives. Its answer is lost, and the connection with it.
    LoseAnswer,
}

/// Starts a proxy between a catalog and its clients. `decide` is called for each commit.
fn proxy(to: SocketAddr, decide: impl FnMut() -> Fate + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let decide = Arc::new(Mutex::new(decide));
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(to).unwrap());
            let unanswered = Arc::new(Mutex::new(HashSet::new()));
            let (own, decide) = (unanswered.clone(), decide.clone());
            let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || {
                relay(&mut from, &mut into, |header| {
                    let fate =
                        if header.kind == 203 { (decide.lock().unwrap())() } else { Fate::Pass };
                    if fate == Fate::LoseAnswer {
                        own.lock().unwrap().insert(header.number);
                    }
                    fate != Fate::LoseRequest
                });
            });
            let (mut from, mut into) = (server, client);
            thread::spawn(move || {
                relay(&mut from, &mut into, |header| {
                    !unanswered.lock().unwrap().contains(&header.number)
                });
            });
        }
    });
    address.to_string()
}

/// Forwards frames until one may not pass, then closes both connections.
pub(super) fn relay(
    from: &mut TcpStream,
    into: &mut TcpStream,
    mut may_pass: impl FnMut(&Header) -> bool,
) {
    let mut pass = || -> io::Result<bool> {
        let mut head = [0; HEADER];
        from.read_exact(&mut head)?;
        let header = Header::from_bytes(&head, crate::cluster::protocol::MAX_BODY).unwrap();
        let mut body = vec![0; header.len];
        from.read_exact(&mut body)?;
        if !may_pass(&header) {
            return Ok(false);
        }
        into.write_all(&[&head[..], &body].concat())?;
        Ok(true)
    };
    while pass().unwrap_or(false) {}
    let _ = from.shutdown(Shutdown::Both);
    let _ = into.shutdown(Shutdown::Both);
}

#[test]
fn a_change_whose_answer_is_lost_is_carried_out_once_and_reported_as_done() {
    let catalog = Catalog::start();
    for fate in [Fate::LoseAnswer, Fate::LoseRequest] {
        let mut fates = vec![fate, Fate::Pass, fate];
        let address = proxy(catalog.address, move || fates.pop().unwrap_or(Fate::Pass));
        let documents = RemoteDocuments::new(&address, &Security::INSECURE).unwrap();
        let before = count(&documents);
        assert!(try_increment(&documents), "a change that was carried out is reported as such");
        assert!(try_increment(&documents));
        assert_eq!(count(&catalog.client()), before + 2);
        let change = Change { relies_on: vec![("count".into(), 1)], ..Change::default() };
        assert!(!documents.commit(&change.put("count", &0)).unwrap(), "a refused one is not");
    }
}

#[test]
fn increments_over_an_unreliable_network_are_not_lost_or_repeated() {
    let seed = u64::from_le_bytes(sys::random().unwrap());
    println!("seed {seed}");
    let catalog = Catalog::start();
    let mut state = seed | 1;
    let address = proxy(catalog.address, move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match state % 8 {
            0 => Fate::LoseRequest,
            1 | 2 => Fate::LoseAnswer,
            _ => Fate::Pass,
        }
    });
    let carried_out: usize = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let retry_timeout = Duration::from_secs(60);
                let documents = RemoteDocuments::with_retry_timeout(
                    &address,
                    &Security::INSECURE,
                    retry_timeout,
                )
                .unwrap();
                scope.spawn(move || (0..25).filter(|_| try_increment(&documents)).count())
            })
            .collect();
        threads.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert_eq!(count(&catalog.client()), carried_out as u64);
    assert!(carried_out >= 25, "{carried_out}");
}

/// Retries until `is_done`: a client with a short retry timeout may fail at first.
fn retry(is_done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_done() {
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not succeed in time");
    }
}

#[test]
fn an_unreachable_catalog_is_reported_in_time_and_used_when_it_returns() {
    let mut catalog = Catalog::start();
    let retry_timeout = Duration::from_secs(1);
    let short =
        RemoteDocuments::with_retry_timeout(&catalog.address(), &Security::INSECURE, retry_timeout)
            .unwrap();
    let long = catalog.client();
    assert!(try_increment(&long) && try_increment(&long));
    let is_reached = || short.read(&[Query::key("count")]).is_ok();
    retry(is_reached);
    catalog.stop();
    let begin = Instant::now();
    let error = short.read(&[Query::key("count")]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains(&catalog.address()), "{error}");
    assert!(short.wait("a", 0, Duration::from_secs(20)).is_err());
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    let address = catalog.address;
    thread::scope(|scope| {
        let waiting = scope.spawn(|| try_increment(&long));
        catalog.serve(TcpListener::bind(address).unwrap(), Security::INSECURE);
        assert!(waiting.join().unwrap(), "the call retries until the catalog is back");
    });
    assert_eq!(count(&long), 3);
    retry(is_reached);
    // A request that meets another catalog at the same address fails. Later ones go there.
    let version = long.read(&[Query::key("count")]).unwrap().version("count");
    catalog.stop();
    catalog.dir = TempDir::new().unwrap();
    catalog.serve(TcpListener::bind(address).unwrap(), Security::INSECURE);
    let error = short.read(&[]).unwrap_err().to_string();
    assert!(error.contains("right directory"), "{error}");
    retry(is_reached);
    assert!(short.read(&[Query::key("count")]).unwrap().documents.is_empty());
    assert!(try_increment(&short) && try_increment(&short) && try_increment(&short));
    let relies_on = vec![("count".to_owned(), version)];
    let stale = Change { relies_on, ..Change::default() }.put("count", &0);
    assert!(!short.commit(&stale).unwrap(), "the version is that of the old catalog");
}

#[test]
fn waiting_requests_do_not_delay_others() {
    let catalog = Catalog::start();
    let documents = Arc::new(catalog.client());
    let revision = documents.read(&[]).unwrap().revision;
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let documents = documents.clone();
            thread::spawn(move || {
                documents.wait("count", revision, Duration::from_secs(60)).unwrap()
            })
        })
        .collect();
    let begin = Instant::now();
    for _ in 0..5 {
        assert_eq!(count(&*documents), 0);
    }
    assert!(try_increment(&*documents));
    waiting.into_iter().for_each(|one| assert!(one.join().unwrap(), "the change is reported"));
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
}

#[test]
fn large_documents_pass_and_too_large_ones_are_refused() {
    let catalog = Catalog::start();
    let documents = catalog.client();
    let text = "x".repeat(900 << 10);
    for number in 0..20 {
        let change = Change { relaxed: true, ..Change::default() };
        assert!(documents.commit(&change.put(format!("large/{number:02}"), &text)).unwrap());
        if number == 9 {
            let view = documents.read(&[Query::prefix("large/")]).unwrap();
            assert_eq!(view.get::<String>("large/07").unwrap(), Some(text.clone()));
        }
    }
    assert_eq!(documents.read(&[Query::prefix("large/0")]).unwrap().documents.len(), 10);
    let long = Change::default().put("large", &"x".repeat(MAX_REQUEST));
    assert_eq!(documents.commit(&long).unwrap_err().kind(), ErrorKind::Invalid);
    let long = Change::default().put("x".repeat(2000), &1);
    assert_eq!(documents.commit(&long).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(try_increment(&documents), "the catalog still serves");
}

/// Sends frames, and returns all answers until the catalog closes the connection.
fn exchange(catalog: &Catalog, frames: &[(Header, Vec<u8>)]) -> Vec<Heard> {
    let mut stream = TcpStream::connect(catalog.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    for (header, body) in frames {
        stream.write_all(&[&header.to_bytes()[..], body].concat()).unwrap();
    }
    stream.shutdown(Shutdown::Write).unwrap();
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        // A reset ends the connection, too.
        Err(error) if error.kind() != io::ErrorKind::ConnectionReset => panic!("{error}"),
        _ => {}
    }
    frames_in(&bytes)
}

pub(super) fn frame(request: &Request) -> (Header, Vec<u8>) {
    let (kind, body) = request.to_body();
    (Header { kind, number: 7, len: body.len() }, body)
}

#[test]
fn a_client_that_breaks_the_protocol_gets_a_failure_or_is_disconnected() {
    let catalog = Catalog::start();
    let hello = |oldest, newest| hello_frame(&CATALOG_PROTOCOL, oldest, newest);
    let future = exchange(&catalog, &[hello(5, 9)]);
    assert!(
        matches!(&future[..], [Heard::Failed(ErrorKind::Invalid, text)] if text.contains("update"))
    );
    assert!(matches!(exchange(&catalog, &[hello(0, 9)])[..], [Heard::Welcome(4)]));
    let without_hello = exchange(&catalog, &[frame(&Request::Read(vec![]))]);
    assert!(matches!(without_hello[..], [Heard::Failed(ErrorKind::Invalid, _)]));
    let twice = exchange(&catalog, &[hello(4, 4), hello(4, 4)]);
    assert!(matches!(twice[..], [Heard::Welcome(_), Heard::Failed(..)]), "{twice:?}");
    let unknown = (Header { kind: 250, number: 1, len: 3 }, vec![1, 2, 3]);
    let answers = exchange(&catalog, &[hello(4, 4), unknown]);
    assert!(matches!(answers[..], [Heard::Welcome(_), Heard::Failed(ErrorKind::Corrupt, _)]));
    let long = (Header { kind: 203, number: 1, len: MAX_REQUEST + 1 }, vec![0; 100]);
    assert!(matches!(exchange(&catalog, &[hello(4, 4), long])[..], [Heard::Welcome(_)]));
    let cut = (Header { kind: 203, number: 1, len: 5000 }, vec![0; 100]);
    assert!(matches!(exchange(&catalog, &[hello(4, 4), cut])[..], [Heard::Welcome(_)]));
    assert!(try_increment(&catalog.client()), "the catalog still serves");
}

#[test]
fn silent_connections_do_not_disturb_authenticated_clients() {
    let catalog = Catalog::start();
    let documents = catalog.client();
    assert!(try_increment(&documents));
    let silent: Vec<_> = (0..200).map(|_| TcpStream::connect(catalog.address).unwrap()).collect();
    assert!(try_increment(&documents), "it is connected already");
    drop(silent);
}

#[test]
fn a_client_detects_a_peer_in_place_of_a_catalog_and_a_catalog_in_place_of_a_peer() {
    let keys = TempDir::new().unwrap();
    let of = |name: &str| keys.path().join(name);
    init(&of("keys")).unwrap();
    sign_new_peer(&of("keys"), &of("peer")).unwrap();
    let load = |name: &str, role| Security::load(&of(name), role).unwrap();
    let plain = || Security::INSECURE;
    let secure =
        (load("peer", Role::Peer), load("keys", Role::Catalog), load("keys", Role::Client));
    for (as_peer, as_catalog, as_client) in [(plain(), plain(), plain()), secure] {
        let dir = TempDir::new().unwrap();
        let id = as_peer.identity().and_then(Identity::peer);
        let store = Arc::new(PeerStore::open_as(dir.path(), None, id).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = in_background(listener, move |listener| async move {
            peer::serve(listener, store, as_peer, async { drop(stopped.await) }).await
        });
        let begin = Instant::now();
        let error = RemoteDocuments::new(&address, &as_client).unwrap().read(&[]).unwrap_err();
        assert!(error.to_string().contains("name the catalog's address"), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(8), "it does not retry");
        drop(stop);
        serving.join().unwrap().unwrap();

        let catalog = Catalog::start_with(as_catalog);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let address = catalog.address();
        let opened = runtime.block_on(PeerConnection::open(&address, &as_client));
        let error = opened.map(drop).unwrap_err().to_string();
        assert!(error.contains("catalog"), "{error}");
    }
}

#[test]
fn the_identity_of_a_client_decides_which_documents_it_may_read_and_change() {
    let keys = TempDir::new().unwrap();
    let of = |name: &str| keys.path().join(name);
    for authority in ["keys", "others"] {
        init(&of(authority)).unwrap();
    }
    let id = sign_new_peer(&of("keys"), &of("peer")).unwrap();
    let load = |name: &str, role| Security::load(&of(name), role).unwrap();
    let catalog = Catalog::start_with(load("keys", Role::Catalog));
    let by = |security: &Security, seconds| {
        let retry_timeout = Duration::from_secs(seconds);
        RemoteDocuments::with_retry_timeout(&catalog.address(), security, retry_timeout).unwrap()
    };
    let client = by(&load("keys", Role::Client), 60);
    assert!(client.commit(&Change::default().put("images/vm1", &1)).unwrap());
    let peer = by(&load("peer", Role::Peer), 60);
    let alive = format!("alive/{id}");
    assert!(peer.commit(&Change::default().put_for(60, &alive, &1)).unwrap());
    assert_eq!(peer.read(&[Query::key(&alive)]).unwrap().get(&alive).unwrap(), Some(1));
    for refused in [Query::prefix(""), Query::key("images/vm1"), Query::prefix("members/")] {
        let error = peer.read(&[refused]).unwrap_err();
        assert!(error.to_string().contains("a peer may not read"), "{error}");
    }
    let change = Change::default().put(&alive, &2).remove(Query::key("images/vm1"));
    let error = peer.commit(&change).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("a peer may not change 'images/vm1'"), "{error}");
    let view = client.read(&[Query::prefix("")]).unwrap();
    assert_eq!(view.get(&alive).unwrap(), Some(1), "no part of the change was carried out");
    let strangers = [Security::INSECURE, load("others", Role::Client), load("keys", Role::Catalog)];
    for stranger in strangers {
        assert!(by(&stranger, 2).read(&[]).is_err());
    }
    let open = Catalog::start();
    let client = RemoteDocuments::new(&open.address(), &load("keys", Role::Client)).unwrap();
    let error = client.read(&[]).unwrap_err().to_string();
    assert!(error.contains("--insecure") || error.contains("unreachable"), "{error}");
}
