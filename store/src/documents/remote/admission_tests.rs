//! A catalog that more connections reach than it can serve.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::RemoteDocuments;
use super::serve_scan::ScanLimits;
use super::tests::{Catalog, try_increment};
use crate::net::admission::Admission;
use crate::net::handshake::CATALOG_PROTOCOL;
use crate::net::handshake::testing::{Heard, frames_in, hello_frame};
use crate::net::identity::{Role, Security, init};

/// Another address of this host, which counts as another host.
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

fn connect_from(address: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((address, 0).into()).unwrap();
        socket.connect(to).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

fn say_hello(stream: &mut TcpStream) {
    let version = CATALOG_PROTOCOL.newest;
    let (header, body) = hello_frame(&CATALOG_PROTOCOL, version, version);
    stream.write_all(&[&header.to_bytes()[..], &body].concat()).unwrap();
}

/// Waits until the catalog ends the connection. Returns what it sent before.
fn until_ended(stream: &mut TcpStream) -> Vec<Heard> {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    }
    frames_in(&bytes)
}

/// Opens this many connections that send nothing. The catalog has time to accept them: its queue of
/// connections is shorter.
fn silent(catalog: &Catalog, count: usize) -> Vec<TcpStream> {
    let open = |number: usize| {
        if number.is_multiple_of(50) {
            thread::sleep(Duration::from_millis(20));
        }
        TcpStream::connect(catalog.address).unwrap()
    };
    (0..count).map(open).collect()
}

/// Several hundred connections say nothing. A client that comes later is served at once: the newest
/// of them still have time to authenticate.
#[test]
fn silent_connections_do_not_keep_new_clients_out() {
    let keys = TempDir::new().unwrap();
    init(keys.path()).unwrap();
    let load = |role| Security::load(keys.path(), role).unwrap();
    for (own, client) in
        [(Security::INSECURE, Security::INSECURE), (load(Role::Catalog), load(Role::Client))]
    {
        let catalog = Catalog::start_with(own);
        let mut silent = silent(&catalog, 400);
        let documents = RemoteDocuments::new(&catalog.address(), &client).unwrap();
        assert!(try_increment(&documents));
        let newest = silent.last_mut().unwrap();
        newest.set_nonblocking(true).unwrap();
        let read = newest.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(read, Err(ErrorKind::WouldBlock), "the newest is still open");
    }
}

#[test]
fn the_flood_of_one_host_does_not_end_the_handshake_of_another() {
    let catalog = Catalog::start();
    let mut slow = connect_from(Ipv4Addr::LOCALHOST, catalog.address);
    let mut flood: Vec<_> = (0..300).map(|_| connect_from(OTHER, catalog.address)).collect();
    for ended in &mut flood[..200] {
        assert_eq!(until_ended(ended).len(), 0);
    }
    say_hello(&mut slow);
    slow.shutdown(Shutdown::Write).unwrap();
    let heard = until_ended(&mut slow);
    assert!(matches!(heard[..], [Heard::Welcome(_)]), "{heard:?}");
}

#[test]
fn one_host_cannot_take_the_places_of_all_clients() {
    let catalog = Catalog::start_within(
        Security::INSECURE,
        (Admission::with_limits(64, 8), ScanLimits::default()),
    );
    let mut greedy: Vec<_> = (0..20).map(|_| connect_from(OTHER, catalog.address)).collect();
    greedy.iter_mut().for_each(say_hello);
    // Whichever come first are served, and the other twelve are refused.
    let mut bytes = [0; 1];
    for stream in &mut greedy {
        let _ = stream.read(&mut bytes);
    }
    let documents: Vec<_> = (0..4).map(|_| catalog.client()).collect();
    for _ in 0..3 {
        assert!(documents.iter().all(|one| try_increment(one)), "each of four clients is served");
    }
}
