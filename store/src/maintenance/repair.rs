//! The repair of everything that the catalog refers to, and of all records.
//!
//! ```text
//! catalog: roots ──► references ─┐
//!                                ├─► repair::repair: plan, add, remove ──► promote snapshots that
//! peers: lists of records ───────┘                                        are whole, sweep drained
//!                                                                         peers
//! ```
//!
//! Records are repaired whether or not the catalog refers to them: the record of a removal, which
//! nothing refers to, keeps a rebuilt catalog from restoring what was removed.
//!
//! One process repairs at a time: it holds the [`RepairLease`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;

use super::records::listed_records;
use super::references::{all_references, references_of};
use super::repair_lease::RepairLease;
use crate::catalog::Available;
use crate::clock::now;
use crate::cluster::membership::{self, Health, LastRepair, Peer};
use crate::cluster::protocol::{FragmentId, MAX_DELETED};
use crate::cluster::repair::{
    ConnectedPeers, PeerState, Peers, RepairLimits, RepairMembers, RepairPeer, Report, Wanted,
    repair,
};
use crate::documents::Documents;
use crate::encoding::Redundancy;
use crate::encoding::fragment::Kind;
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

/// A blob's name, whether it is a record, and the numbers of its data and parity blocks.
type Shape = (BlobId, bool, usize, usize);

/// The redundancy that each blob is to have.
type WantedBlobs = HashMap<Shape, Redundancy>;

/// Whether a published snapshot lacks redundancy.
pub fn has_available(repository: &Repository) -> Result<bool> {
    repository.catalog().has_available()
}

/// Restores the redundancy of every blob that the catalog refers to and of every record, and moves
/// fragments to the peers where they belong. `rate` limits the bytes per second. `progress` receives
/// the bytes that were transferred so far.
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
        RepairJob::new(repository, documents, security, lease, &proceed)?.run(rate, progress)
    })
}

/// One repair, under the lease.
struct RepairJob<'a> {
    repository: &'a Repository,
    documents: &'a dyn Documents,
    /// All peers that the catalog knows.
    peers: Vec<Peer>,
    connected: Arc<ConnectedPeers>,
    runtime: Runtime,
    /// Whether to go on.
    proceed: &'a dyn Fn() -> bool,
}

impl<'a> RepairJob<'a> {
    fn new(
        repository: &'a Repository,
        documents: &'a dyn Documents,
        security: &Security,
        lease: &RepairLease,
        proceed: &'a dyn Fn() -> bool,
    ) -> Result<RepairJob<'a>> {
        let (peers, _) = membership::peers(documents)?;
        let members = peers.iter().filter_map(Peer::member);
        let connected = ConnectedPeers::new(members, security.clone(), lease.permit());
        let failed = |error| Error::io("starting", "a thread".as_ref(), error);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let connected = Arc::new(connected);
        Ok(RepairJob { repository, documents, peers, connected, runtime, proceed })
    }

    fn run(&self, rate: Option<u64>, progress: &dyn Fn(u64)) -> Result<Report> {
        let catalog = self.repository.catalog();
        // Before any blob is looked at: a snapshot that becomes available later is left to the next
        // repair.
        let available = catalog.available()?;
        let mut wanted = WantedBlobs::new();
        let unread = all_references(self.repository, |one| want(&mut wanted, one))?;
        self.runtime.block_on(listed_records(&self.connected, &self.peers, |record| {
            want(&mut wanted, record);
        }));
        let mut report = self.repair_blobs(&wanted, rate, &|report| progress(report.bytes));
        report.unread = unread;
        self.note_suspects(&report);
        if let Some(short) = report.short() {
            let is_all_whole = unread == 0 && short.is_empty();
            for snapshot in available {
                if is_all_whole || is_whole(self.repository, &snapshot, &wanted, short) {
                    catalog.promote(&snapshot)?;
                }
            }
        }
        if !report.is_stopped {
            self.sweep_drained()?;
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
        wanted: &WantedBlobs,
        rate: Option<u64>,
        progress: &dyn Fn(&Report),
    ) -> Report {
        let members = RepairMembers::new(self.peers.iter().map(|peer| RepairPeer {
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
        }));
        self.runtime.block_on(async {
            let (queue, blobs) = mpsc::channel(QUEUED_BLOBS);
            let feed = async move {
                for ((blob, is_record, ..), redundancy) in wanted {
                    let kind = if *is_record { Kind::Record } else { Kind::Content };
                    let wanted = Wanted { blob: *blob, kind, redundancy: *redundancy };
                    if queue.send(wanted).await.is_err() {
                        return;
                    }
                }
            };
            let limits = RepairLimits { rate, ..RepairLimits::default() };
            let connected = self.connected.clone();
            let repair = repair(connected, members, blobs, limits, self.proceed, progress);
            tokio::join!(feed, repair).1
        })
    }

    /// Counts the wrong fragments that peers hold, so that `cairn peers` shows them.
    fn note_suspects(&self, report: &Report) {
        for (peer, wrong) in report.suspects() {
            if let Err(error) = membership::suspect(self.documents, &peer, wrong, now()) {
                tracing::warn!(%peer, wrong, %error, "failed to report a peer with wrong fragments");
            }
        }
    }

    /// Deletes unreferenced content from drained peers, which would never become empty otherwise.
    /// Records are never garbage: repair moves them to other peers.
    ///
    /// The references are read again: a snapshot that was published while the repair was at work is not
    /// garbage, however old its blobs are. Nothing is deleted if a tree node cannot be read.
    fn sweep_drained(&self) -> Result<()> {
        let is_drained = |peer: &&Peer| peer.health == Health::Draining;
        let drained: Vec<_> = self.peers.iter().filter(is_drained).collect();
        if drained.is_empty() {
            return Ok(());
        }
        let mut referenced = HashSet::new();
        let unread = all_references(self.repository, |one| {
            referenced.insert(one.blob);
        })?;
        if unread > 0 {
            tracing::warn!(
                unread,
                "garbage stays on drained peers: some tree nodes cannot be read"
            );
            return Ok(());
        }
        for peer in drained {
            if let Err(error) = self.runtime.block_on(self.sweep(peer, &referenced)) {
                tracing::warn!(peer = %peer.id, %error, "garbage stays on a drained peer");
            }
        }
        Ok(())
    }

    /// Deletes from a peer what is old, not referenced and no record.
    async fn sweep(&self, peer: &Peer, referenced: &HashSet<BlobId>) -> Result<()> {
        let mut after = BlobId::from_bytes([0; 32]);
        loop {
            let page = self.connected.list(&peer.id, after).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            after = *last;
            let garbage = page
                .iter()
                .filter(|(blob, held)| held.kind != Kind::Record && !referenced.contains(blob));
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
                self.connected.delete(peer.id, part, GARBAGE_AGE_SECONDS).await?;
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
    let unread = references_of(repository, refers, policy, &mut HashSet::new(), &mut |wanted| {
        let seen = looked_at.get(&shape(&wanted));
        is_whole &= seen.is_some_and(|seen| seen.width() >= wanted.redundancy.width());
        is_whole &= !short.contains(&wanted.blob);
    });
    unread == 0 && is_whole
}

/// The key under which a blob is wanted.
fn shape(wanted: &Wanted) -> Shape {
    let is_record = wanted.kind == Kind::Record;
    match wanted.redundancy {
        Redundancy::Replicas(_) => (wanted.blob, is_record, 1, 0),
        code => (wanted.blob, is_record, code.needed(), code.survives()),
    }
}

/// Adds a blob once for each kind and number of blocks. Of several numbers of copies, the largest
/// counts.
fn want(all: &mut WantedBlobs, wanted: Wanted) {
    let known = all.entry(shape(&wanted)).or_insert(wanted.redundancy);
    if wanted.redundancy.width() > known.width() {
        *known = wanted.redundancy;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use tempfile::TempDir;

    use super::{Redundancy, Wanted, WantedBlobs, all_references, is_whole, want};
    use crate::blobs::NewBlob;
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
        repository.put_chunks(&[NewBlob::new(&content)]).unwrap();
        let changes = BTreeMap::from([(ChunkIndex(3), Some(chunk))]);
        let root = repository.commit_tree(&Root::default(), geometry, &changes).unwrap().root;
        repository.publish_image(&"vm".parse().unwrap(), geometry, &root, 0, 0).unwrap();
        let available = repository.catalog().available().unwrap();
        let mut wanted = WantedBlobs::new();
        let unread = all_references(&repository, |one| want(&mut wanted, one)).unwrap();
        assert_eq!((available.len(), unread, wanted.len()), (1, 0, 2), "a node and a chunk");
        let whole = |looked_at: &WantedBlobs, short: &[BlobId]| {
            let short: HashSet<_> = short.iter().copied().collect();
            is_whole(&repository, &available[0], looked_at, &short)
        };
        assert!(whole(&wanted, &[]));
        assert!(whole(&wanted, &[BlobId::of(b"another one")]));
        for shape in wanted.keys() {
            assert!(!whole(&wanted, &[shape.0]));
            let mut less = wanted.clone();
            less.remove(shape);
            assert!(!whole(&less, &[]), "nobody has looked at {}", shape.0);
        }
    }

    #[test]
    fn a_blob_is_wanted_once_for_each_kind_and_each_way_to_cut_it() {
        let mut wanted = WantedBlobs::new();
        let blob = BlobId::of(b"one");
        for text in ["replicas=2", "rs=4+4", "replicas=3", "none", "rs=2+2", "rs=4+4"] {
            want(&mut wanted, Wanted::content(blob, text.parse().unwrap()));
        }
        want(&mut wanted, Wanted::record(blob, "replicas=5".parse().unwrap()));
        let mut all: Vec<String> = wanted.values().map(Redundancy::to_string).collect();
        all.sort();
        assert_eq!(all, ["replicas=3", "replicas=5", "rs=2+2", "rs=4+4"]);
    }
}
