//! Peers that return wrong data.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use cairn_store::{BlobId, Repository, Snapshot};

use crate::lab::{Lab, TIMEOUT, wait_until, with_seeds};
use crate::proxy::Proxy;

const MIB: usize = 1 << 20;

/// Reads a snapshot and compares it with `disk`.
fn assert_reads(repository: &Repository, snapshot: &Snapshot, disk: &[u8]) {
    let chunk_size = snapshot.geometry.chunk_size() as usize;
    let mut buf = vec![0; chunk_size];
    let mut found = 0;
    for chunk in repository.chunks(&snapshot.root, snapshot.geometry) {
        let (at, id) = chunk.unwrap();
        repository.read_chunk(&id, &mut buf).unwrap();
        let expected = disk.chunks(chunk_size).nth(at.0 as usize).unwrap();
        assert!(buf[..expected.len()] == *expected, "chunk {} has the wrong content", at.0);
        found += 1;
    }
    assert_eq!(found, disk.len().div_ceil(chunk_size));
}

fn wrong(lab: &Lab, id: &str) -> u64 {
    lab.peer(id)["wrong"].as_u64().unwrap()
}

#[test]
fn a_peer_that_flips_bits_damages_no_data_and_is_reported() {
    with_seeds(|seed| {
        let mut lab = Lab::new(4);
        let proxy = Proxy::start(seed);
        let liar = lab.add_peer(&["--advertise", &proxy.address]);
        proxy.leads_to(&lab.peers[liar].as_ref().unwrap().address);
        lab.wait_for_peers(5);
        let id = lab.peers[liar].as_ref().unwrap().id.clone();
        // Bits are flipped during the imports too.
        proxy.flip(10);
        let disk = lab.random_disk("disk.raw", seed, 8 * MIB + 4096);
        lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=2+2", "--chunk-size", "64K"]);
        lab.ok(&["import", "disk.raw", "copies", "--redundancy", "replicas=2"]);
        let repository = lab.repository();
        let begin = Instant::now();
        let before = proxy.flipped();
        while proxy.flipped() < before + 5 {
            for name in ["vm", "copies"] {
                let snapshot = repository.catalog().resolve(&name.parse().unwrap()).unwrap();
                assert_reads(&repository, &snapshot, &disk);
            }
            assert!(begin.elapsed() < 3 * TIMEOUT, "only {} answers are wrong", proxy.flipped());
        }
        wait_until("the peer is reported", || wrong(&lab, &id) > 0);
        // A program that ends soon reports it too.
        proxy.flip(500);
        let before = wrong(&lab, &id);
        lab.assert_exports("vm", &disk);
        proxy.flip(0);
        assert!(wrong(&lab, &id) > before, "the export reported nothing");
        for other in lab.peers[..liar].iter().flatten() {
            assert_eq!(wrong(&lab, &other.id), 0, "no other peer is reported");
        }
        assert_reads(
            &repository,
            &repository.catalog().resolve(&"vm".parse().unwrap()).unwrap(),
            &disk,
        );
    });
}

#[test]
fn a_fragment_that_is_damaged_on_disk_is_replaced_when_it_is_read() {
    with_seeds(|seed| {
        let mut lab = Lab::new(4);
        let disk = lab.random_disk("disk.raw", seed, 6 * MIB);
        lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=2+2", "--chunk-size", "64K"]);
        let id = lab.peers[1].as_ref().unwrap().id.clone();
        // A stop writes the peer's table. Without it, damaged fragments would not be in the table
        // after a restart.
        lab.stop(1);
        damage(&lab, 1);
        lab.start_peer(1, &[]);
        lab.wait_for_peers(4);
        let damaged = damaged_blobs(&lab, 1);
        assert!(damaged.len() > 50, "only {} fragments are damaged", damaged.len());
        // Read until no damage is found.
        let begin = Instant::now();
        let mut passes = 0;
        loop {
            let repository = lab.repository();
            let snapshot = repository.catalog().resolve(&"vm".parse().unwrap()).unwrap();
            assert_reads(&repository, &snapshot, &disk);
            let suspects = repository.cluster().unwrap().0.suspects();
            assert!(suspects.iter().all(|(peer, _)| peer.to_string() == id), "{suspects:?}");
            if suspects.is_empty() {
                break;
            }
            passes += 1;
            assert!(begin.elapsed() < TIMEOUT, "the damage remains");
        }
        assert!(passes > 0 && wrong(&lab, &id) > 0, "the peer is reported");
        // A read asks two of four peers for each blob, so other fragments are still damaged.
        let left = damaged_blobs(&lab, 1);
        assert!(left.is_subset(&damaged));
        let replaced = damaged.len() - left.len();
        println!("{replaced} of {} fragments are replaced after {passes} passes", damaged.len());
        assert!(replaced >= damaged.len() / 4, "{replaced} of {}", damaged.len());
        // The replaced fragments are durable.
        lab.kill(1);
        lab.start_peer(1, &[]);
        assert_eq!(damaged_blobs(&lab, 1), left);
    });
}

/// Flips a bit in each page of the segments of a stopped peer.
fn damage(lab: &Lab, at: usize) {
    for entry in std::fs::read_dir(lab.data(at).join("segments")).unwrap() {
        let path = entry.unwrap().path();
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let len = file.metadata().unwrap().len();
        for place in (4096 + 100..len).step_by(4096) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, place).unwrap();
            file.write_all_at(&[byte[0] ^ 4], place).unwrap();
        }
    }
}

/// The blobs of which a peer lists a fragment but has no correct one.
fn damaged_blobs(lab: &Lab, at: usize) -> BTreeSet<BlobId> {
    use cairn_store::cluster::Connection;
    use cairn_store::encoding::fragment::Fragment;
    use cairn_store::net::identity::Security;
    let address = lab.peers[at].as_ref().unwrap().address.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let peer = Connection::open(&address, &Security::INSECURE).await.unwrap();
        let (mut after, mut damaged) = (BlobId::from_bytes([0; 32]), BTreeSet::new());
        loop {
            let page = peer.list(&after, 4096).await.unwrap();
            let Some((last, _)) = page.last() else { return damaged };
            after = *last;
            for (blob, _) in page {
                let is_sound = |found: Vec<Fragment>| found.iter().any(|one| one.is_of(&blob));
                if !peer.fetch(&blob).await.is_ok_and(is_sound) {
                    damaged.insert(blob);
                }
            }
        }
    })
}
