//! A peer over a socket: what is said to it, well and badly.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::tests::{CODE, flip, fragment};
use super::{PeerStore, serve};
use crate::cluster::Connection;
use crate::cluster::fragment::Fragment;
use crate::cluster::identity::Security;
use crate::cluster::wire::{Answer, HEADER, Header, Hello, MAX_BODY, Request};
use crate::error::ErrorKind;
use crate::id::BlobId;

struct Peer {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    served: JoinHandle<std::io::Result<()>>,
}

impl Peer {
    async fn start(dir: &TempDir, capacity: Option<u64>) -> Peer {
        let store = Arc::new(PeerStore::open(dir.path(), capacity).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let stopped = async { drop(stopped.await) };
        let served = tokio::spawn(serve(listener, store, Security::INSECURE, stopped));
        Peer { address, stop, served }
    }

    async fn connect(&self) -> Connection {
        Connection::open(&self.address.to_string(), &Security::INSECURE).await.unwrap()
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.served.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn fragments_that_were_stored_are_given_back_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let connection = Arc::new(peer.connect().await);
    let all: Vec<Fragment> = (0..200).map(|number| fragment(number, CODE, 3)).collect();
    let puts: Vec<_> = all
        .iter()
        .cloned()
        .map(|one| {
            let connection = connection.clone();
            tokio::spawn(async move { connection.put(one).await })
        })
        .collect();
    for put in puts {
        put.await.unwrap().unwrap();
    }
    let id = connection.peer();
    peer.stop().await;
    assert!(connection.usage().await.is_err(), "the peer has gone");
    assert!(connection.is_lost());

    let peer = Peer::start(&dir, None).await;
    let connection = peer.connect().await;
    assert_eq!(connection.peer(), id);
    for one in &all {
        assert_eq!(connection.get(&one.description.blob).await.unwrap(), std::slice::from_ref(one));
    }
    let asked = [all[5].description.blob, BlobId::of(b"another")];
    let held = connection.have(&asked, true).await.unwrap();
    assert_eq!((held[0].len(), held[1].len()), (1, 0));
    assert_eq!(connection.usage().await.unwrap().fragments, 200);
    peer.stop().await;
}

#[tokio::test]
async fn a_failure_is_told_with_its_kind_and_hurts_nobody_else() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, Some(40 << 10)).await;
    let connection = peer.connect().await;
    let mut wrong = fragment(1, CODE, 0);
    wrong.block = flip(&wrong.block, 0);
    assert_eq!(connection.put(wrong).await.unwrap_err().kind(), ErrorKind::Corrupt);
    connection.put(fragment(1, CODE, 0)).await.unwrap();
    connection.put(fragment(2, CODE, 0)).await.unwrap();
    let refused = connection.put(fragment(3, CODE, 0)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert_eq!(connection.usage().await.unwrap().fragments, 2);
    peer.stop().await;
}

/// Says something, and returns all that is answered until the peer closes.
async fn say(peer: &Peer, frames: &[(Header, Vec<u8>)]) -> Vec<Answer> {
    let mut stream = TcpStream::connect(peer.address).await.unwrap();
    for (header, body) in frames {
        stream.write_all(&header.to_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
    }
    stream.shutdown().await.unwrap();
    let mut answers = Vec::new();
    let mut bytes = Vec::new();
    let read = timeout(Duration::from_secs(20), stream.read_to_end(&mut bytes)).await;
    // A reset is as good as an end.
    let _ = read.expect("the peer closes");
    let mut rest = &bytes[..];
    while let Some((head, behind)) = rest.split_first_chunk::<HEADER>() {
        let header = Header::from_bytes(head).unwrap();
        let (body, behind) = behind.split_at(header.len);
        answers.push(Answer::from_body(header.kind, body).unwrap());
        rest = behind;
    }
    answers
}

fn frame(request: &Request) -> (Header, Vec<u8>) {
    let (kind, body) = request.to_body();
    (Header { kind, number: 7, len: body.len() }, body)
}

#[tokio::test]
async fn who_does_not_speak_the_protocol_is_told_or_ignored() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let hello = |oldest, newest| frame(&Request::Hello(Hello { oldest, newest }));
    let future = say(&peer, &[hello(2, 9)]).await;
    assert!(
        matches!(&future[..], [Answer::Failed(ErrorKind::Invalid, text)] if text.contains("update"))
    );
    assert!(matches!(say(&peer, &[hello(0, 9)]).await[..], [Answer::Welcome(1, _)]));
    let rude = say(&peer, &[frame(&Request::Usage)]).await;
    assert!(matches!(rude[..], [Answer::Failed(ErrorKind::Invalid, _)]));
    let twice = say(&peer, &[hello(1, 1), hello(1, 1)]).await;
    assert!(matches!(twice[..], [Answer::Welcome(..), Answer::Failed(..)]), "{twice:?}");
    let unknown = (Header { kind: 77, number: 1, len: 3 }, vec![1, 2, 3]);
    let confused = say(&peer, &[hello(1, 1), unknown]).await;
    assert!(matches!(confused[..], [Answer::Welcome(..), Answer::Failed(ErrorKind::Corrupt, _)]));
    let long = (Header { kind: 2, number: 1, len: MAX_BODY + 1 }, vec![0; 100]);
    assert!(matches!(say(&peer, &[hello(1, 1), long]).await[..], [Answer::Welcome(..)]));
    let cut = (Header { kind: 2, number: 1, len: 5000 }, vec![0; 100]);
    assert!(matches!(say(&peer, &[hello(1, 1), cut]).await[..], [Answer::Welcome(..)]));
    assert_eq!(peer.connect().await.usage().await.unwrap().fragments, 0, "it goes on");
    peer.stop().await;
}

/// Memory for requests is shared: clients that ask and do not listen must not keep it for ever.
#[tokio::test]
async fn clients_that_do_not_listen_do_not_stop_the_others() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let good = peer.connect().await;
    let one = fragment(1, CODE, 0);
    good.put(one.clone()).await.unwrap();
    let mut silent = Vec::new();
    for _ in 0..50 {
        let mut stream = TcpStream::connect(peer.address).await.unwrap();
        let (header, body) = frame(&Request::Hello(Hello { oldest: 1, newest: 1 }));
        stream.write_all(&[&header.to_bytes()[..], &body].concat()).await.unwrap();
        let (header, body) = frame(&Request::Get(one.description.blob));
        for _ in 0..20 {
            stream.write_all(&[&header.to_bytes()[..], &body].concat()).await.unwrap();
        }
        silent.push(stream);
    }
    let asked = timeout(Duration::from_secs(20), good.get(&one.description.blob)).await;
    assert_eq!(asked.expect("in time").unwrap().len(), 1);
    drop(silent);
    peer.stop().await;
}
