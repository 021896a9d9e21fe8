//! Tests of seals: a process without their key, such as a peer, cannot forge content or records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tempfile::TempDir;

use super::sweep_tests::{Heartbeats, documents};
use super::{rebuild_catalog, repair_all};
use crate::blobs::NewBlob;
use crate::cluster::client::blobs_tests::Site;
use crate::cluster::client::{Cluster, Connection};
use crate::cluster::tests::{content, members};
use crate::encoding::fragment::encode;
use crate::encoding::{Compression, Redundancy, SealKeys, StoragePolicy};
use crate::error::Error;
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::BlobId;
use crate::name::ImageName;
use crate::net::identity::Security;
use crate::repository::Repository;
use crate::tree::Root;

const CHUNK: usize = 65536;

/// The cluster's key.
fn keys() -> Security {
    Security::insecure_with(SealKeys::new(&[[1; 32]]))
}

/// A peer that makes up a key.
fn forger() -> Security {
    Security::insecure_with(SealKeys::new(&[[2; 32]]))
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn policy(redundancy: &str) -> StoragePolicy {
    redundancy.parse::<Redundancy>().unwrap().into()
}

/// Publishes an image with these chunks.
fn publish(repository: &Repository, name: &str, chunks: &[Vec<u8>]) -> Root {
    let chunks: Vec<_> = chunks.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    let chunk = chunks[0].content.len();
    let geometry = Geometry::new((chunks.len() * chunk) as u64, chunk as u32).unwrap();
    let at = |(at, one): (usize, &NewBlob<'_>)| (ChunkIndex(at as u64), Some(one.chunk_id()));
    let changes: BTreeMap<_, _> = chunks.iter().enumerate().map(at).collect();
    let root = repository.commit_tree(&Root::default(), geometry, &changes).unwrap().root;
    repository.publish_image(&name.parse().unwrap(), geometry, &root, 0, 0).unwrap();
    root
}

#[test]
fn content_that_a_peer_has_forged_is_not_known_and_is_stored_again() {
    let site = Site::new(4);
    let policy = policy("rs=2+2");
    let (blob, right) = content(1, CHUNK);
    let forged = vec![9; CHUNK];
    runtime().block_on(async {
        for key in [Security::INSECURE, forger()] {
            let cluster = Cluster::new(members(&site.peers), key);
            let whole = Arc::new(encode(&blob, &forged, policy));
            cluster.store_one(whole, policy.redundancy, || ()).await.unwrap();
        }
        let unprotected = Cluster::new(members(&site.peers), Security::INSECURE);
        assert_eq!(unprotected.known(&[blob], &policy).await, [true], "the forgery is complete");
        let client = Cluster::new(members(&site.peers), keys());
        assert_eq!(client.known(&[blob], &policy).await, [false]);
        client.put(&blob, &right, &policy).await.unwrap();
        assert_eq!(client.known(&[blob], &policy).await, [true]);
        let mut found = vec![0; CHUNK];
        client.get(&blob, &mut found).await.unwrap();
        assert!(found == right);
    });
}

#[test]
fn a_replaced_key_still_proves_what_it_has_sealed() {
    let site = Site::new(3);
    let policy = policy("replicas=3");
    let (blob, right) = content(1, CHUNK);
    runtime().block_on(async {
        let client = |secrets: &[[u8; 32]]| {
            let keys = Security::insecure_with(SealKeys::new(secrets));
            Cluster::new(members(&site.peers), keys)
        };
        client(&[[1; 32]]).put(&blob, &right, &policy).await.unwrap();
        let rotated = client(&[[3; 32], [1; 32]]);
        assert_eq!(rotated.known(&[blob], &policy).await, [true], "nothing is stored again");
        // A client that stores it all the same replaces the seals, and no fragment is added.
        rotated.put(&blob, &right, &policy).await.unwrap();
        assert_eq!(client(&[[3; 32]]).known(&[blob], &policy).await, [true]);
        assert_eq!(client(&[[1; 32]]).known(&[blob], &policy).await, [false]);
    });
    assert_eq!((0..3).map(|peer| site.fragments_of(peer)).collect::<Vec<_>>(), [1, 1, 1]);
}

#[test]
fn a_repair_seals_content_that_nobody_has_sealed() {
    let site = Site::new(5);
    let dir = TempDir::new().unwrap();
    let documents = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &documents);
    let open = |security: &Security| {
        let repository = Repository::of_cluster(documents.clone(), security).unwrap();
        repository.with_policy(policy("rs=2+2"))
    };
    let mut chunks: Vec<_> = (0..10).map(|number| content(number, 2 * CHUNK).1).collect();
    // These shrink.
    chunks[..5].iter_mut().flatten().for_each(|byte| *byte &= 3);
    let zstd = StoragePolicy { compression: Compression::Zstd, ..policy("rs=2+2") };
    publish(&open(&Security::INSECURE).with_policy(zstd), "vm", &chunks);
    let names: Vec<_> = chunks.iter().map(|one| BlobId::of(one)).collect();
    let encodings = || {
        let mut all = BTreeSet::new();
        for peer in &site.peers {
            all.extend(runtime().block_on(async {
                let connection = Connection::open(&peer.address, &keys()).await.unwrap();
                let page = connection.list(&BlobId::from_bytes([0; 32]), 4096).await.unwrap();
                page.into_iter().map(|(blob, held)| (peer.id, blob, held.encoding, held.index))
            }));
        }
        all
    };
    let before = encodings();
    let sealed = open(&keys());
    let known = || {
        let cluster = Cluster::new(members(&site.peers), keys());
        runtime().block_on(cluster.known(&names, &policy("rs=2+2")))
    };
    assert_eq!(known(), [false; 10]);
    let report = repair_all(&sealed, None, &|_| ()).unwrap();
    assert!(!report.is_incomplete() && report.rebuilt > 0, "{report:?}");
    assert_eq!(known(), [true; 10]);
    assert_eq!(encodings(), before, "the seals of the same fragments were replaced");
    let again = repair_all(&sealed, None, &|_| ()).unwrap();
    assert_eq!((again.under, again.bytes), (0, 0), "{again:?}");
    // The record, to which the catalog refers, is sealed, too.
    let second = self::documents(&dir, "again.db");
    let _also_beating = Heartbeats::of(&site, &second);
    let rebuilt = Repository::of_cluster(second, &keys()).unwrap();
    assert_eq!(rebuild_catalog(&rebuilt, false).unwrap().images, 1);
}

#[test]
fn tombstones_still_count_after_a_repair_when_the_old_key_is_retired() {
    let site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let first = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &first);
    let with = |secrets: &[[u8; 32]]| Security::insecure_with(SealKeys::new(secrets));
    let (old, both, new) = (with(&[[1; 32]]), with(&[[3; 32], [1; 32]]), with(&[[3; 32]]));
    let open = |security: &Security| Repository::of_cluster(first.clone(), security).unwrap();
    publish(&open(&old), "kept", &[content(1, CHUNK).1]);
    publish(&open(&old), "removed", &[content(2, CHUNK).1]);
    open(&old).remove_image(&"removed".parse().unwrap(), true).unwrap();
    let rebuild = |file: &str| {
        let second = documents(&dir, file);
        let _beating = Heartbeats::of(&site, &second);
        let repository = Repository::of_cluster(second, &new).unwrap();
        rebuild_catalog(&repository, false).map(|_| {
            let images = repository.catalog().images().unwrap();
            images.into_iter().map(|image| image.name.to_string()).collect::<Vec<_>>()
        })
    };
    let early = rebuild("early.db");
    assert!(matches!(early, Err(Error::UnsealedRecords { .. })), "{early:?}");
    let report = repair_all(&open(&both), None, &|_| ()).unwrap();
    assert!(report.resealed > 0 && !report.is_incomplete(), "{report:?}");
    let again = repair_all(&open(&both), None, &|_| ()).unwrap();
    assert_eq!(again.resealed, 0, "{again:?}");
    assert_eq!(rebuild("retired.db").unwrap(), ["kept"]);
}

#[test]
fn a_repair_says_which_peers_may_have_records_of_old_keys() {
    let mut site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let documents = documents(&dir, "catalog.db");
    let beating = Heartbeats::of(&site, &documents);
    let keys = Security::insecure_with(SealKeys::new(&[[3; 32], [1; 32]]));
    publish(
        &Repository::of_cluster(documents.clone(), &self::keys()).unwrap(),
        "vm",
        &[content(1, CHUNK).1],
    );
    let peer = site.peers[0].id;
    site.stop(0);
    let repository = Repository::of_cluster(documents.clone(), &keys).unwrap();
    let report = repair_all(&repository, None, &|_| ()).unwrap();
    let named = report.failures.iter().filter(|one| one.contains(&peer.to_string())).count();
    assert!(named > 0 && report.is_incomplete(), "{report:?}");
    drop(beating);
}

#[test]
fn forged_records_neither_remove_nor_add_an_image() {
    let site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let first = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &first);
    let open = |security: &Security| Repository::of_cluster(first.clone(), security).unwrap();
    publish(&open(&keys()), "vm", &[content(1, CHUNK).1]);
    // Another key makes up a tombstone and an image.
    let vm: ImageName = "vm".parse().unwrap();
    open(&forger()).remove_image(&vm, true).unwrap();
    publish(&open(&forger()), "forged", &[content(2, CHUNK).1]);
    let rebuild = |file: &str, security: &Security| {
        let second = documents(&dir, file);
        let _beating = Heartbeats::of(&site, &second);
        let repository = Repository::of_cluster(second, security).unwrap();
        let refused = rebuild_catalog(&repository, false);
        let is_refused = matches!(refused, Err(Error::UnsealedRecords { .. }));
        assert_eq!(is_refused, security.seals().current().is_some(), "{refused:?}");
        rebuild_catalog(&repository, true).unwrap();
        let images = repository.catalog().images().unwrap();
        images.into_iter().map(|image| image.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(rebuild("keys.db", &keys()), ["vm"]);
    assert_eq!(rebuild("insecure.db", &Security::INSECURE), ["forged"], "without seals all count");
    // A repair does not seal them.
    repair_all(&open(&keys()), None, &|_| ()).unwrap();
    let found = rebuild("repaired.db", &keys());
    assert!(found.contains(&"vm".to_string()), "{found:?}");
}
