//! The repair of everything that a cluster's names refer to.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;

use super::repair_lease::RepairLease;
use crate::catalog::Available;
use crate::clock::now;
use crate::cluster::membership;
use crate::cluster::membership::{Health, LastRepair, Peer};
use crate::cluster::protocol::FragmentId;
use crate::cluster::protocol::MAX_DELETED;
use crate::cluster::repair::{
    ConnectedPeers, PeerState, RepairLimits, RepairMembers, RepairPeer, Report, repair,
};
use crate::documents::Documents;
use crate::encoding::Redundancy;
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::net::identity::Security;
use crate::repository::Repository;

/// How old, in seconds, something on a peer that is drained must be to be taken for garbage: what nothing refers
/// to may be a part of a snapshot that is being stored, and a large image takes hours.
const GARBAGE_AGE: u32 = 24 * 3600;

/// Blobs on their way to being looked at.
const QUEUE: usize = 4096;

/// Blobs that are wanted, by how many blocks they are cut into.
type WantedBlobs = HashMap<(BlobId, usize, usize), Redundancy>;

impl Repository {
    /// Whether a snapshot is published that has not its full redundancy.
    pub fn has_available(&self) -> Result<bool> {
        Ok(!self.catalog().available()?.is_empty())
    }

    /// Brings everything that a name refers to back to its redundancy, and to the peers where it belongs; sends at
    /// most `rate` bytes a second. `progress` is told the bytes that were sent so far.
    pub fn repair(&self, rate: Option<u64>, progress: &dyn Fn(u64)) -> Result<Report> {
        self.repair_while(rate, &|| true, progress)
    }

    /// The same, as long as `goes_on` says so.
    pub fn repair_while(
        &self,
        rate: Option<u64>,
        goes_on: &dyn Fn() -> bool,
        progress: &dyn Fn(u64),
    ) -> Result<Report> {
        let (Some((_, documents)), Some(security)) = (self.cluster(), self.security()) else {
            return Err(Error::NoCluster);
        };
        RepairLease::with(documents, |lease| {
            let goes_on = || goes_on() && lease.is_held();
            self.repair_under_lease(documents, security, rate, &goes_on, progress)
        })
    }

    fn repair_under_lease(
        &self,
        documents: &dyn Documents,
        security: &Security,
        rate: Option<u64>,
        goes_on: &dyn Fn() -> bool,
        progress: &dyn Fn(u64),
    ) -> Result<Report> {
        // Before the blobs are looked at: what becomes available meanwhile is for the next time.
        let available = self.catalog().available()?;
        let (peers, _) = membership::peers(documents)?;
        let mut wanted = WantedBlobs::new();
        let unread = self.references(|blob, redundancy| want(&mut wanted, blob, redundancy))?;
        let told = |report: &Report| progress(report.bytes);
        let mut report = run(&peers, security, &wanted, rate, goes_on, &told)?;
        report.unread = unread;
        if let Some(short) = report.short() {
            let is_all_sound = unread == 0 && short.is_empty();
            for snapshot in available {
                if is_all_sound || self.is_sound(&snapshot, &wanted, short) {
                    self.catalog().promote(&snapshot)?;
                }
            }
        }
        if !report.is_stopped {
            self.sweep_drained(&peers, security, goes_on)?;
        }
        if !report.is_stopped {
            let unreadable = (report.unreadable.len() as u64).max(unread);
            let (time, blobs, under) = (now(), report.blobs, report.left);
            let survives = report.survives;
            let last = LastRepair { time, blobs, under, unreadable, survives };
            membership::note_repair(documents, &last)?;
        }
        Ok(report)
    }

    /// Whether all of a snapshot was looked at, and nothing of it is short of its redundancy. A node may be readable now
    /// that was not before: what is below it nobody has seen.
    fn is_sound(
        &self,
        snapshot: &Available,
        looked_at: &WantedBlobs,
        short: &HashSet<BlobId>,
    ) -> bool {
        let mut is_sound = true;
        let Available { refers, policy, .. } = snapshot;
        let unread =
            self.references_of(refers, policy, &mut HashSet::new(), &mut |blob, wanted| {
                let seen = looked_at.get(&shape(blob, wanted));
                is_sound &= seen.is_some_and(|seen| seen.width() >= wanted.width());
                is_sound &= !short.contains(&blob);
            });
        unread == 0 && is_sound
    }

    /// Deletes what nothing refers to from peers that are drained: they would never become empty.
    ///
    /// What is referred to is asked again. What was published while the repair was at work is not garbage, however old
    /// its blobs are by now. Nothing is deleted if anything that has to be known for this cannot be read.
    fn sweep_drained(
        &self,
        peers: &[Peer],
        security: &Security,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<()> {
        let drained: Vec<_> = peers.iter().filter(|peer| peer.health == Health::Draining).collect();
        if drained.is_empty() {
            return Ok(());
        }
        let mut wanted = HashSet::new();
        let unread = self.references(|blob, _| {
            wanted.insert(blob);
        })?;
        if unread > 0 {
            tracing::warn!(
                unread,
                "garbage stays on peers that are drained: what is none is not known"
            );
            return Ok(());
        }
        let runtime = runtime()?;
        for peer in drained {
            let swept = runtime.block_on(sweep(peer, security, &wanted, goes_on));
            if let Err(error) = swept {
                tracing::warn!(peer = %peer.id, %error, "garbage stays on a peer that is drained");
            }
        }
        Ok(())
    }
}

fn runtime() -> Result<Runtime> {
    let failed = |error| Error::io("starting", "a thread".as_ref(), error);
    Builder::new_current_thread().enable_all().build().map_err(failed)
}

/// What is looked at once.
fn shape(blob: BlobId, redundancy: Redundancy) -> (BlobId, usize, usize) {
    match redundancy {
        Redundancy::Replicas(_) => (blob, 1, 0),
        code => (blob, code.needed(), code.survives()),
    }
}

/// Once for each number of blocks; of copies, the greatest number that somebody wants.
fn want(wanted: &mut WantedBlobs, blob: BlobId, redundancy: Redundancy) {
    let known = wanted.entry(shape(blob, redundancy)).or_insert(redundancy);
    if redundancy.width() > known.width() {
        *known = redundancy;
    }
}

fn run(
    peers: &[Peer],
    security: &Security,
    wanted: &WantedBlobs,
    rate: Option<u64>,
    goes_on: &dyn Fn() -> bool,
    progress: &dyn Fn(&Report),
) -> Result<Report> {
    let members: Vec<_> = peers.iter().filter_map(Peer::member).collect();
    let nodes = peers.iter().map(|peer| RepairPeer {
        id: peer.id,
        weight: peer.weight,
        domain: peer.domain.clone(),
        state: match peer.health {
            Health::Up => PeerState::Up,
            Health::Down => PeerState::Down,
            Health::Draining => PeerState::Draining,
            Health::Lost => PeerState::Lost,
        },
        full: false,
    });
    let nodes = RepairMembers::new(nodes);
    runtime()?.block_on(async {
        let connected = Arc::new(ConnectedPeers::new(members, security.clone()));
        let (give, blobs) = mpsc::channel(QUEUE);
        let feed = async move {
            for ((blob, ..), redundancy) in wanted {
                if give.send((*blob, *redundancy)).await.is_err() {
                    return;
                }
            }
        };
        let how = RepairLimits { rate, ..RepairLimits::default() };
        let ((), report) =
            tokio::join!(feed, repair(connected, nodes, blobs, how, goes_on, progress));
        Ok(report)
    })
}

/// Deletes from a peer what is not wanted.
async fn sweep(
    peer: &Peer,
    security: &Security,
    wanted: &HashSet<BlobId>,
    goes_on: &dyn Fn() -> bool,
) -> Result<()> {
    // As all repair does: within a time, and of nobody else who is at its address.
    let connected = ConnectedPeers::new(peer.member(), security.clone());
    let mut after = BlobId::from_bytes([0; 32]);
    loop {
        let page = connected.list(&peer.id, after).await?;
        let Some((last, _)) = page.last() else { return Ok(()) };
        after = *last;
        let garbage = page.iter().filter(|(blob, _)| !wanted.contains(blob));
        let garbage: Vec<FragmentId> = garbage
            .map(|(blob, held)| FragmentId {
                blob: *blob,
                encoding: held.encoding,
                index: held.index,
            })
            .collect();
        for part in garbage.chunks(MAX_DELETED) {
            if !goes_on() {
                return Ok(());
            }
            connected.delete_idle(&peer.id, part, GARBAGE_AGE).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use tempfile::TempDir;

    use super::{Redundancy, WantedBlobs, want};
    use crate::geometry::{ChunkIndex, Geometry};
    use crate::id::{BlobId, ChunkId};
    use crate::repository::{Durability, Repository};
    use crate::tree::Root;

    #[test]
    fn only_what_was_looked_at_and_is_whole_is_sound() {
        let dir = TempDir::new().unwrap();
        let url = format!("dir:{}", dir.path().join("repository").display());
        let repository = Repository::open_or_create(&url).unwrap();
        let repository = repository.with_durability(Durability::Optimistic);
        let geometry = Geometry::new(1 << 20, 65536).unwrap();
        let content = vec![7; 65536];
        let chunk = ChunkId::of(&content);
        repository.put_chunks(&[(chunk, &content)]).unwrap();
        let changes = BTreeMap::from([(ChunkIndex(3), Some(chunk))]);
        let root = repository.commit_tree(&Root::default(), geometry, &changes).unwrap().root;
        repository.publish_image(&"vm".parse().unwrap(), geometry, &root, 0, 0).unwrap();
        let available = repository.catalog().available().unwrap();
        let mut wanted = WantedBlobs::new();
        let unread = repository.references(|blob, how| want(&mut wanted, blob, how)).unwrap();
        assert_eq!((available.len(), unread, wanted.len()), (1, 0, 2), "a node and a chunk");
        let is_sound = |looked_at: &WantedBlobs, short: &[BlobId]| {
            let short: HashSet<_> = short.iter().copied().collect();
            repository.is_sound(&available[0], looked_at, &short)
        };
        assert!(is_sound(&wanted, &[]));
        assert!(is_sound(&wanted, &[BlobId::of(b"another one")]));
        for (blob, data, parity) in wanted.keys() {
            assert!(!is_sound(&wanted, &[*blob]));
            let mut less = wanted.clone();
            less.remove(&(*blob, *data, *parity));
            assert!(!is_sound(&less, &[]), "nobody has looked at {blob}");
        }
    }

    #[test]
    fn a_blob_is_wanted_once_for_each_way_to_cut_it() {
        let mut wanted = WantedBlobs::new();
        let blob = BlobId::of(b"one");
        for text in ["replicas=2", "rs=4+4", "replicas=3", "none", "rs=2+2", "rs=4+4"] {
            want(&mut wanted, blob, text.parse().unwrap());
        }
        let mut all: Vec<String> = wanted.values().map(Redundancy::to_string).collect();
        all.sort();
        assert_eq!(all, ["replicas=3", "rs=2+2", "rs=4+4"]);
    }
}
