//! Tests of `ClusterBlobs`: the window between threads and peers.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use super::{Cluster, ClusterBlobs, Connection};
use crate::blobs::Blobs;
use crate::blobs::NewBlob;
use crate::cluster::Counters;
use crate::cluster::placement::MemberState;
use crate::cluster::protocol::{FragmentId, Held, StampBound};
use crate::cluster::tests::{Peer, content, members, policy, start};
use crate::error::{Error, ErrorKind, Result};
use crate::id::BlobId;
use crate::net::identity::Security;

/// Peers that run on a thread of their own.
pub(crate) struct Site {
    pub(crate) peers: Vec<Peer>,
    runtime: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Site {
    pub(crate) fn new(peers: usize) -> Site {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = thread::spawn(move || drop(runtime.block_on(stopped)));
        let peers = handle.block_on(async { tokio::spawn(start(peers)).await.unwrap() });
        Site { peers, runtime: handle, stop: Some(stop), thread: Some(thread) }
    }

    fn cluster(&self) -> Cluster {
        Cluster::new(members(&self.peers), Security::INSECURE)
    }

    fn blobs(&self) -> ClusterBlobs {
        ClusterBlobs::new(self.cluster()).unwrap()
    }

    pub(crate) fn stop(&mut self, peer: usize) {
        self.runtime.block_on(self.peers[peer].stop());
    }

    pub(crate) fn restart(&mut self, peer: usize) {
        self.runtime.block_on(self.peers[peer].restart());
    }

    /// Removes the data of a peer that is stopped. It gets another id when it is started again.
    pub(crate) fn wipe(&self, peer: usize) {
        for entry in std::fs::read_dir(self.peers[peer].directory()).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => std::fs::remove_dir_all(path).unwrap(),
                false => std::fs::remove_file(path).unwrap(),
            }
        }
    }

    fn fragments(&self) -> u64 {
        (0..self.peers.len()).map(|peer| self.fragments_of(peer)).sum()
    }

    pub(crate) fn fragments_of(&self, peer: usize) -> u64 {
        self.runtime.block_on(async {
            let address = &self.peers[peer].address;
            let connection = Connection::open(address, &Security::INSECURE).await.unwrap();
            connection.usage().await.unwrap().fragments
        })
    }

    /// Deletes all fragments of a peer.
    fn delete_all(&self, peer: usize) {
        self.runtime.block_on(async {
            let address = &self.peers[peer].address;
            let connection = Connection::open(address, &Security::INSECURE).await.unwrap();
            let all = connection.list(&BlobId::from_bytes([0; 32]), 4096).await.unwrap();
            let id = |(blob, held): (BlobId, Held)| FragmentId {
                blob,
                encoding: held.encoding,
                index: held.index,
            };
            let all: Vec<_> = all.into_iter().map(id).collect();
            let deadline = connection.clock().await.unwrap().after(Duration::from_secs(10));
            connection.delete(&all, 0, StampBound::ANY, deadline).await.unwrap();
        });
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

fn read(blobs: &ClusterBlobs, blob: &BlobId, len: usize) -> Result<Vec<u8>> {
    let mut buf = vec![0; len];
    let found = blobs.get(blob, &mut buf)?;
    buf.truncate(found);
    Ok(buf)
}

/// Flushes until it succeeds: a peer that was away is left alone for a while.
fn flush_in_time(blobs: &ClusterBlobs) {
    let begin = Instant::now();
    while let Err(error) = blobs.flush() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{error}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn threads_put_flush_and_read_through_a_window_smaller_than_what_they_put() {
    let site = Site::new(4);
    let blobs = ClusterBlobs::with_window(site.cluster(), 200_000).unwrap();
    thread::scope(|scope| {
        for thread in 0..4u64 {
            let blobs = &blobs;
            scope.spawn(move || {
                for number in 0..40u64 {
                    // Every fourth blob is put by all threads.
                    let number = if number % 4 == 0 { number } else { number + 1000 * thread };
                    let (blob, content) = content(number, 1 + (number as usize * 977) % 60_000);
                    let how = policy(["rs=2+2", "replicas=2"][number as usize % 2]);
                    blobs.put(&[NewBlob::new(&content)], &how).unwrap();
                    assert!(
                        read(blobs, &blob, 60_000).unwrap() == content,
                        "readable right after the put"
                    );
                    if number % 13 == 0 {
                        blobs.flush().unwrap();
                    }
                }
            });
        }
    });
    blobs.flush().unwrap();
    // Another client reads all of them.
    let other = site.blobs();
    let (mut dirty, mut different) = (0, HashSet::new());
    for (thread, number) in (0..4u64).flat_map(|thread| (0..40).map(move |n| (thread, n))) {
        let number = if number % 4 == 0 { number } else { number + 1000 * thread };
        let (blob, content) = content(number, 1 + (number as usize * 977) % 60_000);
        assert!(read(&other, &blob, 60_000).unwrap() == content);
        dirty += content.len() as u64;
        different.insert((blob, number % 2));
    }
    assert_eq!(blobs.counters().dirty, dirty);
    let fragments: u64 = different.iter().map(|(_, odd)| if *odd == 0 { 4 } else { 2 }).sum();
    assert_eq!(site.fragments(), fragments, "each blob was stored once");
}

#[test]
fn blobs_that_the_peers_have_are_not_sent() {
    let site = Site::new(4);
    let all: Vec<_> = (0..50).map(|number| content(number, 20_000)).collect();
    let group: Vec<_> = all.iter().map(|(_, content)| NewBlob::new(content)).collect();
    let first = site.blobs();
    first.put(&group, &policy("rs=2+2")).unwrap();
    first.flush().unwrap();
    assert_eq!(first.counters(), Counters { dirty: 1_000_000, sent: 2_000_000, saved: 0 });
    let second = site.blobs();
    for round in 1..3 {
        second.put(&group, &policy("rs=2+2")).unwrap();
        second.flush().unwrap();
        let saved = round * 1_000_000;
        assert_eq!(
            second.counters(),
            Counters { dirty: saved, sent: 0, saved },
            "the peers have all of them"
        );
    }
    // The peers do not have the blobs with another redundancy.
    second.put(&group, &policy("replicas=3")).unwrap();
    second.flush().unwrap();
    assert_eq!(second.counters().sent, 3_000_000);
    assert_eq!(site.fragments(), 50 * 4 + 50 * 3);
}

#[test]
fn remembered_blobs_are_forgotten_when_a_peer_goes_away() {
    let site = Site::new(4);
    let all: Vec<_> = (0..20).map(|number| content(number, 20_000)).collect();
    let group: Vec<_> = all.iter().map(|(_, content)| NewBlob::new(content)).collect();
    let policy = policy("replicas=3");
    let blobs = site.blobs();
    let mut sent = 0;
    let mut put = || {
        blobs.put(&group, &policy).unwrap();
        blobs.flush().unwrap();
        let more = blobs.counters().sent - sent;
        sent += more;
        more
    };
    assert_eq!((put(), put()), (1_200_000, 0));
    // A peer is down or lost: its fragments are sent to another peer before anything relies on
    // them.
    let mut down = members(&site.peers);
    down[3].state = MemberState::Down;
    blobs.cluster().set_members(down.clone());
    assert!(put() > 0, "the fragments of the peer that is down are sent again");
    let have = async || {
        blobs.cluster().known(&all.iter().map(|(blob, _)| *blob).collect::<Vec<_>>(), &policy).await
    };
    assert!(blobs.runtime().block_on(have()).into_iter().all(|is_known| is_known));
    // A peer that comes back reduces no redundancy.
    blobs.cluster().set_members(members(&site.peers));
    assert_eq!(put(), 0);
    down.truncate(3);
    blobs.cluster().set_members(down);
    assert_eq!(put(), 0, "the other peers have all fragments by then");
}

#[test]
fn a_blob_that_could_not_be_stored_stays_and_is_tried_again() {
    let mut site = Site::new(3);
    let blobs = ClusterBlobs::with_window(site.cluster(), 50_000).unwrap();
    let (blob, bytes) = content(1, 20_000);
    site.stop(1);
    blobs.put(&[NewBlob::new(&bytes)], &policy("replicas=3")).unwrap();
    for _ in 0..2 {
        let refused = blobs.flush().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    }
    blobs.flush_available().expect("two peers have the blob");
    assert!(read(&blobs, &blob, 20_000).unwrap() == bytes);
    // The window is full of blobs that cannot be stored at all: the put fails instead of waiting
    // for ever.
    (0..3).for_each(|peer| site.stop(peer));
    let mut refused = None;
    for number in 2..6 {
        let (_, content) = content(number, 20_000);
        refused = refused.or(blobs.put(&[NewBlob::new(&content)], &policy("replicas=3")).err());
    }
    assert_eq!(refused.expect("the window is full").kind(), ErrorKind::Unavailable);
    (0..3).for_each(|peer| site.restart(peer));
    // The first blob could be read already and left the window. It gets its full redundancy, too.
    flush_in_time(&blobs);
    let other = site.blobs();
    assert!(read(&other, &blob, 20_000).unwrap() == bytes);
    assert_eq!(site.fragments() % 3, 0);
    let (_, bytes) = content(9, 20_000);
    blobs.put(&[NewBlob::new(&bytes)], &policy("replicas=3")).unwrap();
    blobs.flush().unwrap();
}

#[test]
fn flush_available_succeeds_between_readable_and_full_redundancy() {
    let mut site = Site::new(4);
    let blobs = site.blobs();
    let (blob, bytes) = content(1, 20_000);
    site.stop(0);
    blobs.put(&[NewBlob::new(&bytes)], &policy("rs=2+2")).unwrap();
    blobs.flush_available().unwrap();
    let other = site.blobs();
    assert!(read(&other, &blob, 20_000).unwrap() == bytes, "another client can read it");
    blobs.flush().unwrap_err();
    site.stop(1);
    site.stop(2);
    let (_, bytes) = content(2, 20_000);
    blobs.put(&[NewBlob::new(&bytes)], &policy("rs=2+2")).unwrap();
    blobs.flush_available().unwrap_err();
    (0..3).for_each(|peer| site.restart(peer));
    flush_in_time(&blobs);
    assert_eq!(site.fragments(), 8);
}

#[test]
fn a_handle_can_be_dropped_at_any_time() {
    let site = Site::new(3);
    for round in 0..10 {
        let blobs = site.blobs();
        for number in 0..round * 3 {
            let (_, content) = content(1000 + number, 30_000);
            blobs.put(&[NewBlob::new(&content)], &policy("rs=2+1")).unwrap();
        }
        drop(blobs);
    }
}

#[test]
fn no_thread_waits_for_ever_whatever_the_peers_do() {
    let mut site = Site::new(4);
    let blobs = Arc::new(ClusterBlobs::with_window(site.cluster(), 100_000).unwrap());
    let done = Arc::new(AtomicBool::new(false));
    let stored_some = Arc::new(AtomicBool::new(false));
    let work = |thread: u64| {
        let (blobs, done, stored_some) = (blobs.clone(), done.clone(), stored_some.clone());
        move || {
            let mut number = thread * 1_000_000;
            let mut stored = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let mut group = Vec::new();
                for _ in 0..5 {
                    number += 1;
                    let (blob, content) = content(number, 10_000);
                    if blobs.put(&[NewBlob::new(&content)], &policy("replicas=3")).is_ok() {
                        group.push((blob, content));
                    }
                }
                if blobs.flush().is_ok() {
                    stored_some.fetch_or(!group.is_empty(), Ordering::Relaxed);
                    stored.extend(group);
                }
            }
            stored
        }
    };
    let threads: Vec<_> = (0..3).map(|thread| thread::spawn(work(thread))).collect();
    let begin = Instant::now();
    while !stored_some.load(Ordering::Relaxed) {
        assert!(begin.elapsed() < Duration::from_secs(60), "nothing was stored in time");
        thread::sleep(Duration::from_millis(10));
    }
    for round in 0..6 {
        site.stop(round % 4);
        thread::sleep(Duration::from_millis(100));
        site.stop((round + 1) % 4);
        thread::sleep(Duration::from_millis(100));
        site.restart(round % 4);
        site.restart((round + 1) % 4);
    }
    done.store(true, Ordering::Relaxed);
    let stored: Vec<_> = threads.into_iter().flat_map(|one| one.join().unwrap()).collect();
    assert!(!stored.is_empty());
    // With any two of the four peers away, every flushed blob can be read.
    for gone in [[0, 1], [2, 3]] {
        gone.iter().for_each(|peer| site.stop(*peer));
        let other = site.blobs();
        for (blob, content) in &stored {
            assert!(read(&other, blob, 10_000).unwrap() == *content);
        }
        gone.iter().for_each(|peer| site.restart(*peer));
    }
}

#[test]
fn more_than_a_window_can_be_available_while_a_peer_is_away() {
    let mut site = Site::new(4);
    let blobs = ClusterBlobs::with_window(site.cluster(), 100_000).unwrap();
    let how = policy("rs=2+2");
    site.stop(1);
    let all: Vec<_> = (0..20).map(|number| content(number, 20_000)).collect();
    for (_, content) in &all {
        blobs.put(&[NewBlob::new(content)], &how).unwrap();
    }
    blobs.flush_available().unwrap();
    let error = blobs.flush().unwrap_err();
    assert_eq!(
        error.kind(),
        ErrorKind::Unavailable,
        "full redundancy is not claimed early: {error}"
    );
    let other = site.blobs();
    for (blob, content) in &all {
        assert!(read(&other, blob, 20_000).unwrap() == *content, "every blob can be read");
    }
    // Blobs that have left the window are read again, and get the fragments that they lack.
    site.restart(1);
    flush_in_time(&blobs);
    assert!(site.fragments() >= 80, "{}", site.fragments());
    for peer in [0, 2] {
        site.stop(peer);
    }
    for (blob, content) in &all {
        assert!(read(&other, blob, 20_000).unwrap() == *content, "any two peers are enough");
    }
}

/// The blobs left the window with one copy, and the only peer that has them loses its data.
#[test]
fn a_lost_blob_fails_one_flush_and_not_the_later_ones() {
    let mut site = Site::new(2);
    let blobs = ClusterBlobs::with_window(site.cluster(), 100_000).unwrap();
    let how = policy("replicas=2");
    site.stop(1);
    for number in 0..20 {
        blobs.put(&[NewBlob::new(&content(number, 20_000).1)], &how).unwrap();
    }
    blobs.flush_available().unwrap();
    assert_eq!(blobs.flush().unwrap_err().kind(), ErrorKind::Unavailable);
    site.delete_all(0);
    site.restart(1);
    let begin = Instant::now();
    loop {
        match blobs.flush() {
            Err(Error::ContentLost { blobs }) => break assert!(blobs > 0),
            Err(error) if error.kind() == ErrorKind::Unavailable => {}
            other => panic!("blobs are lost, and the flush returned {other:?}"),
        }
        assert!(begin.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(20));
    }
    let (blob, content) = content(99, 20_000);
    blobs.put(&[NewBlob::new(&content)], &how).unwrap();
    blobs.flush().unwrap();
    assert!(read(&site.blobs(), &blob, 20_000).unwrap() == content);
}
