//! The repair of everything that the catalog refers to.
//!
//! ```text
//! catalog: roots ──► references ──► repair::repair: plan and execute ──► promote snapshots that are
//!                                                                       whole, sweep drained peers
//! ```
//!
//! One process repairs at a time: it holds the [`RepairLease`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;

use super::references::{all_references, references_of};
use super::repair_lease::RepairLease;
use crate::catalog::Available;
use crate::clock::now;
use crate::cluster::membership::{self, Health, LastRepair, Peer};
use crate::cluster::protocol::{FragmentId, MAX_DELETED};
use crate::cluster::repair::{
    ConnectedPeers, PeerState, RepairLimits, RepairMembers, RepairPeer, Report, repair,
};
use crate::documents::Documents;
use crate::encoding::Redundancy;
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::net::identity::Security;
use crate::repository::Repository;

/// The age in seconds at which an unreferenced fragment on a drained peer counts as garbage. A
/// fragment that nothing refers to may belong to a snapshot that is being stored, and storing a large
/// image takes hours.
const GARBAGE_AGE_SECONDS: u32 = 24 * 3600;

/// Blobs that wait for repair to look at them.
const QUEUED_BLOBS: usize = 4096;

/// The redundancy that each blob is to have, by the numbers of its data and parity blocks.
type WantedBlobs = HashMap<(BlobId, usize, usize), Redundancy>;

/// Whether a published snapshot lacks redundancy.
pub fn has_available(repository: &Repository) -> Result<bool> {
    repository.catalog().has_available()
}

/// Restores the redundancy of every blob that the catalog refers to, and moves fragments to the peers
/// where they belong. `rate` limits the bytes per second. `progress` receives the bytes that were
/// transferred so far.
pub fn repair_all(
    repository: &Repository,
    rate: Option<u64>,
    progress: &dyn Fn(u64),
) -> Result<Report> {
    repair_while(repository, rate, &|| true, progress)
}

/// As [`repair_all`], until `proceed` returns `false`.
pub fn repair_while(
    repository: &Repository,
    rate: Option<u64>,
    proceed: &dyn Fn() -> bool,
    progress: &dyn Fn(u64),
) -> Result<Report> {
    let (Some((_, documents)), Some(security)) = (repository.cluster(), repository.security())
    else {
        return Err(Error::NoCluster);
    };
    RepairLease::with(documents, |lease| {
        let proceed = || proceed() && lease.is_held();
        let job = RepairJob { repository, documents, security, proceed: &proceed };
        job.run(rate, progress)
    })
}

/// One repair, under the lease.
struct RepairJob<'a> {
    repository: &'a Repository,
    documents: &'a dyn Documents,
    security: &'a Security,
    /// Whether to go on.
    proceed: &'a dyn Fn() -> bool,
}

impl RepairJob<'_> {
    fn run(&self, rate: Option<u64>, progress: &dyn Fn(u64)) -> Result<Report> {
        let catalog = self.repository.catalog();
        // Before any blob is looked at: a snapshot that becomes available later is left to the next
        // repair.
        let available = catalog.available()?;
        let (peers, _) = membership::peers(self.documents)?;
        let mut wanted = WantedBlobs::new();
        let unread = all_references(self.repository, |blob, redundancy| {
            want(&mut wanted, blob, redundancy);
        })?;
        let mut report =
            self.repair_blobs(&peers, &wanted, rate, &|report| progress(report.bytes))?;
        report.unread = unread;
        if let Some(short) = report.short() {
            let is_all_whole = unread == 0 && short.is_empty();
            for snapshot in available {
                if is_all_whole || is_whole(self.repository, &snapshot, &wanted, short) {
                    catalog.promote(&snapshot)?;
                }
            }
        }
        if !report.is_stopped {
            self.sweep_drained(&peers)?;
        }
        if !report.is_stopped {
            let unreadable = (report.unreadable.len() as u64).max(unread);
            let (time, blobs, under) = (now(), report.blobs, report.left);
            let survives = report.survives;
            let last = LastRepair { time, blobs, under, unreadable, survives };
            membership::note_repair(self.documents, &last)?;
        }
        Ok(report)
    }

    fn repair_blobs(
        &self,
        peers: &[Peer],
        wanted: &WantedBlobs,
        rate: Option<u64>,
        progress: &dyn Fn(&Report),
    ) -> Result<Report> {
        let members: Vec<_> = peers.iter().filter_map(Peer::member).collect();
        let peers = peers.iter().map(|peer| RepairPeer {
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
        let peers = RepairMembers::new(peers);
        runtime()?.block_on(async {
            let connected = Arc::new(ConnectedPeers::new(members, self.security.clone()));
            let (queue, blobs) = mpsc::channel(QUEUED_BLOBS);
            let feed = async move {
                for ((blob, ..), redundancy) in wanted {
                    if queue.send((*blob, *redundancy)).await.is_err() {
                        return;
                    }
                }
            };
            let limits = RepairLimits { rate, ..RepairLimits::default() };
            let repair = repair(connected, peers, blobs, limits, self.proceed, progress);
            let ((), report) = tokio::join!(feed, repair);
            Ok(report)
        })
    }

    /// Deletes unreferenced fragments from drained peers, which would never become empty otherwise.
    ///
    /// The references are read again: a snapshot that was published while the repair was at work is not
    /// garbage, however old its blobs are. Nothing is deleted if a tree node cannot be read.
    fn sweep_drained(&self, peers: &[Peer]) -> Result<()> {
        let drained: Vec<_> = peers.iter().filter(|peer| peer.health == Health::Draining).collect();
        if drained.is_empty() {
            return Ok(());
        }
        let mut referenced = HashSet::new();
        let unread = all_references(self.repository, |blob, _| {
            referenced.insert(blob);
        })?;
        if unread > 0 {
            tracing::warn!(
                unread,
                "garbage stays on drained peers: some tree nodes cannot be read"
            );
            return Ok(());
        }
        let runtime = runtime()?;
        for peer in drained {
            if let Err(error) = runtime.block_on(self.sweep(peer, &referenced)) {
                tracing::warn!(peer = %peer.id, %error, "garbage stays on a drained peer");
            }
        }
        Ok(())
    }

    /// Deletes from a peer what is old and not referenced.
    async fn sweep(&self, peer: &Peer, referenced: &HashSet<BlobId>) -> Result<()> {
        // As for all of repair: with time limits, and only if the right peer is at the address.
        let connected = ConnectedPeers::new(peer.member(), self.security.clone());
        let mut after = BlobId::from_bytes([0; 32]);
        loop {
            let page = connected.list(&peer.id, after).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            after = *last;
            let garbage = page.iter().filter(|(blob, _)| !referenced.contains(blob));
            let garbage: Vec<FragmentId> = garbage
                .map(|(blob, held)| FragmentId {
                    blob: *blob,
                    encoding: held.encoding,
                    index: held.index,
                })
                .collect();
            for part in garbage.chunks(MAX_DELETED) {
                if !(self.proceed)() {
                    return Ok(());
                }
                connected.delete_idle(&peer.id, part, GARBAGE_AGE_SECONDS).await?;
            }
        }
    }
}

/// Whether repair looked at all blobs of a snapshot, and none of them lacks redundancy. A tree node may
/// be readable that was not readable before: then repair did not look at what is below it.
fn is_whole(
    repository: &Repository,
    snapshot: &Available,
    looked_at: &WantedBlobs,
    short: &HashSet<BlobId>,
) -> bool {
    let mut is_whole = true;
    let Available { refers, policy, .. } = snapshot;
    let unread =
        references_of(repository, refers, policy, &mut HashSet::new(), &mut |blob, wanted| {
            let seen = looked_at.get(&shape(blob, wanted));
            is_whole &= seen.is_some_and(|seen| seen.width() >= wanted.width());
            is_whole &= !short.contains(&blob);
        });
    unread == 0 && is_whole
}

fn runtime() -> Result<Runtime> {
    let failed = |error| Error::io("starting", "a thread".as_ref(), error);
    Builder::new_current_thread().enable_all().build().map_err(failed)
}

/// The key under which a blob is wanted.
fn shape(blob: BlobId, redundancy: Redundancy) -> (BlobId, usize, usize) {
    match redundancy {
        Redundancy::Replicas(_) => (blob, 1, 0),
        code => (blob, code.needed(), code.survives()),
    }
}

/// Adds a blob once for each number of blocks. Of several numbers of copies, the largest counts.
fn want(wanted: &mut WantedBlobs, blob: BlobId, redundancy: Redundancy) {
    let known = wanted.entry(shape(blob, redundancy)).or_insert(redundancy);
    if redundancy.width() > known.width() {
        *known = redundancy;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use tempfile::TempDir;

    use super::{Redundancy, WantedBlobs, all_references, is_whole, want};
    use crate::geometry::{ChunkIndex, Geometry};
    use crate::id::{BlobId, ChunkId};
    use crate::repository::{Durability, Repository};
    use crate::tree::Root;

    #[test]
    fn only_a_snapshot_that_repair_looked_at_completely_is_whole() {
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
        let unread = all_references(&repository, |blob, how| want(&mut wanted, blob, how)).unwrap();
        assert_eq!((available.len(), unread, wanted.len()), (1, 0, 2), "a node and a chunk");
        let whole = |looked_at: &WantedBlobs, short: &[BlobId]| {
            let short: HashSet<_> = short.iter().copied().collect();
            is_whole(&repository, &available[0], looked_at, &short)
        };
        assert!(whole(&wanted, &[]));
        assert!(whole(&wanted, &[BlobId::of(b"another one")]));
        for (blob, data, parity) in wanted.keys() {
            assert!(!whole(&wanted, &[*blob]));
            let mut less = wanted.clone();
            less.remove(&(*blob, *data, *parity));
            assert!(!whole(&less, &[]), "nobody has looked at {blob}");
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
