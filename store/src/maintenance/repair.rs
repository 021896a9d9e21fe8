//! The repair of everything that the catalog refers to, and of all records.
//!
//! ```text
//! catalog: roots ──► references ─┬─► sorted ─► repair::repair: plan, add, remove ─► promote snapshots
//! peers: records ────────────────┘                  ▲                              that are whole,
//! peers: lists ─────────────────────────────────────┘                              sweep drained peers
//! ```
//!
//! No step has all names in memory: they are sorted in temporary files, and merged with the peers'
//! lists, which are sorted, too.
//!
//! Records are repaired whether or not the catalog refers to them: the record of a removal, which
//! nothing refers to, keeps a rebuilt catalog from restoring what was removed.
//!
//! One process repairs at a time: it holds the [`RepairLease`].

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;

use super::records::listed_records;
use super::references::all_references;
use super::repair_lease::RepairLease;
use super::unlisted::{Disagreement, compare_with_records};
use super::wanted::{SortedWanted, WantedBlobs, names};
use super::whole_snapshots::whole_snapshots;
use crate::catalog::Available;
use crate::clock::now;
use crate::cluster::list_check::ListCheck;
use crate::cluster::membership::{self, Health, LastRepair, Peer};
use crate::cluster::protocol::{FragmentId, MAX_DELETED, MAX_LISTED, StampBound};
use crate::cluster::repair::{
    ConnectedPeers, FoundBlob, PeerState, Peers, RepairLimits, RepairMembers, RepairPeer, Report,
    repair, repair_found,
};
use crate::collection::CollectionNumber;
use crate::documents::Documents;
use crate::durable::sorted_runs::SortedRuns;
use crate::encoding::fragment::Kind;
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::net::identity::Security;
use crate::repository::Repository;
use crate::tree::Referred;

/// The age in seconds at which an unreferenced fragment on a drained peer counts as garbage. A
/// fragment that nothing refers to may belong to a snapshot that is being stored, and storing a large
/// image takes hours.
const GARBAGE_AGE_SECONDS: u32 = 24 * 3600;

/// The age in seconds at which the creation of an image counts as interrupted. Between the record and
/// the image's document are some seconds.
const ABANDONED_DRAFT_SECONDS: u64 = 3600;

/// Blobs that wait for repair to look at them.
const QUEUED_BLOBS: usize = 4096;

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

/// Repairs blobs that a verification has found, without looking at others.
pub fn repair_blobs(
    repository: &Repository,
    found: &[FoundBlob],
    progress: &dyn Fn(u64),
) -> Result<Report> {
    let (Some((_, documents)), Some(security)) = (repository.cluster(), repository.security())
    else {
        return Err(Error::NoCluster);
    };
    RepairLease::with(documents, |lease| {
        let proceed = || lease.is_held();
        let job = RepairJob::new(repository, documents, security, lease, &proceed)?;
        let (connected, members) = (job.connected.clone(), repair_members(&job.peers));
        let progress = |report: &Report| progress(report.bytes);
        let limits = RepairLimits::default();
        let repair = repair_found(connected, members, found, limits, &proceed, &progress);
        let report = job.runtime.block_on(repair);
        job.note_suspects(&report);
        Ok(report)
    })
}

/// The peers as repairs and checks see them.
pub(super) fn repair_members(peers: &[Peer]) -> RepairMembers {
    RepairMembers::new(peers.iter().map(|peer| RepairPeer {
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
    }))
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
        let stamp = repository.catalog().collection_number()?;
        let connected = ConnectedPeers::new(members, security.clone(), lease.permit(), stamp);
        let failed = |error| Error::io("starting", "a thread".as_ref(), error);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let connected = Arc::new(connected);
        Ok(RepairJob { repository, documents, peers, connected, runtime, proceed })
    }

    fn run(&self, rate: Option<u64>, progress: &dyn Fn(u64)) -> Result<Report> {
        let catalog = self.repository.catalog();
        self.bury_drafts()?;
        // Before any blob is looked at: a snapshot that becomes available later is left to the next
        // repair.
        let available = catalog.available()?;
        let mut wanted = WantedBlobs::new();
        let unread = all_references(self.repository, |one| wanted.add(&one))?;
        let records = listed_records(&self.connected, &self.peers, |one| wanted.add(&one));
        let resealed = self.runtime.block_on(records);
        let wanted = wanted.finish()?;
        let short = RefCell::new(names());
        let mut report = self.repair_blobs(&wanted, rate, &|report| {
            let mut short = short.borrow_mut();
            report.newly_short().iter().for_each(|blob| short.push(*blob.as_bytes()));
            progress(report.bytes);
        })?;
        report.unread = unread;
        report.resealed = resealed.copies;
        resealed.failures.into_iter().for_each(|reason| report.fail(reason));
        self.note_suspects(&report);
        if report.is_settled() && !available.is_empty() {
            self.promote(&available, &wanted, &short.into_inner().finish()?, unread)?;
        }
        drop(wanted);
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

    /// Stores the tombstones of images whose creation was interrupted. Without them, a rebuilt catalog
    /// would have the images.
    fn bury_drafts(&self) -> Result<()> {
        for id in self.repository.catalog().old_drafts(ABANDONED_DRAFT_SECONDS)? {
            match self.repository.bury_draft(&id) {
                Ok(()) => tracing::info!(image = %id, "the creation of an image was given up"),
                Err(error) => {
                    tracing::warn!(image = %id, %error, "failed to give up the creation of an image");
                }
            }
        }
        Ok(())
    }

    /// Makes the snapshots stable whose blobs were all looked at, and of which none is `short`.
    fn promote(
        &self,
        available: &[Available],
        wanted: &SortedWanted,
        short: &SortedRuns<32>,
        unread: u64,
    ) -> Result<()> {
        // A peer that has gone since took with it the fragments that its list counted. The next repair
        // looks again.
        if !self.are_peers_there()? {
            return Ok(());
        }
        let is_whole = match unread == 0 && short.is_empty() {
            true => vec![true; available.len()],
            false => whole_snapshots(self.repository, available, wanted, short)?,
        };
        let mut whole = available.iter().zip(is_whole).filter(|(_, is_whole)| *is_whole);
        whole.try_for_each(|(snapshot, _)| self.repository.catalog().promote(snapshot))
    }

    /// Whether all peers that were up or draining when the repair began still are.
    fn are_peers_there(&self) -> Result<bool> {
        let is_there = |peer: &&Peer| matches!(peer.health, Health::Up | Health::Draining);
        let (now, _) = membership::peers(self.documents)?;
        let now: HashSet<_> = now.iter().filter(is_there).map(|peer| peer.id).collect();
        Ok(self.peers.iter().filter(is_there).all(|peer| now.contains(&peer.id)))
    }

    /// Repairs all wanted blobs. Fails if their names cannot be read back; what was repaired by then
    /// stays.
    fn repair_blobs(
        &self,
        wanted: &SortedWanted,
        rate: Option<u64>,
        progress: &dyn Fn(&Report),
    ) -> Result<Report> {
        let members = repair_members(&self.peers);
        self.runtime.block_on(async {
            let (queue, blobs) = mpsc::channel(QUEUED_BLOBS);
            let feed = async move {
                for wanted in wanted.read()? {
                    if queue.send(wanted?).await.is_err() {
                        break;
                    }
                }
                Ok(())
            };
            let limits = RepairLimits { rate, ..RepairLimits::default() };
            let connected = self.connected.clone();
            let repair = repair(connected, members, blobs, limits, self.proceed, progress);
            let (fed, report) = tokio::join!(feed, repair);
            fed.map(|()| report)
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
    /// The references are read again, also those of readers: a snapshot that was published while the
    /// repair was at work is not garbage, however old its blobs are. Nothing is deleted if a tree node
    /// cannot be read, or if the peers have records of snapshots that the catalog does not have.
    fn sweep_drained(&self) -> Result<()> {
        let is_drained = |peer: &&Peer| peer.health == Health::Draining;
        let drained: Vec<_> = self.peers.iter().filter(is_drained).collect();
        if drained.is_empty() {
            return Ok(());
        }
        let catalog = self.repository.catalog();
        let compared = compare_with_records(catalog, &self.connected, &self.peers);
        match self.runtime.block_on(compared) {
            Ok(Disagreement { unlisted: 0, .. }) => {}
            Ok(Disagreement { unlisted, .. }) => {
                tracing::warn!(
                    unlisted,
                    "garbage stays on drained peers: they have records of snapshots that the catalog does \
                     not have; run `cairn catalog rebuild`"
                );
                return Ok(());
            }
            Err(error) => {
                tracing::warn!(%error, "garbage stays on drained peers: failed to read all records");
                return Ok(());
            }
        }
        // Before the references are read, as in a collection: what a commit stores has its number or a
        // higher one.
        let below = catalog.collection_roots(false)?.oldest.unwrap_or(CollectionNumber::MAX);
        let bound = StampBound { below, number: catalog.collection_number()? };
        let mut referenced = names();
        let mut report = |blob: BlobId| referenced.push(*blob.as_bytes());
        let mut unread = all_references(self.repository, |one| report(one.blob))?;
        // The snapshots that they read may have been removed.
        for (geometry, root) in catalog.content_of_readers()? {
            let trees = self.repository.trees();
            unread +=
                trees.references(&root, geometry, &mut HashSet::new(), &mut |one| match one {
                    Referred::Node(id) => report(id.into()),
                    Referred::Chunk(id) => report(id.into()),
                });
        }
        if unread > 0 {
            tracing::warn!(
                unread,
                "garbage stays on drained peers: some tree nodes cannot be read"
            );
            return Ok(());
        }
        let referenced = referenced.finish()?;
        for peer in drained {
            if let Err(error) = self.runtime.block_on(self.sweep(peer, &referenced, bound)) {
                tracing::warn!(peer = %peer.id, %error, "garbage stays on a drained peer");
            }
        }
        Ok(())
    }

    /// Deletes from a peer what is old, within a bound, not referenced and no record.
    async fn sweep(
        &self,
        peer: &Peer,
        referenced: &SortedRuns<32>,
        bound: StampBound,
    ) -> Result<()> {
        let mut check = ListCheck::new(BlobId::from_bytes([0; 32]));
        let mut referenced = referenced.read()?;
        loop {
            let request = self.connected.list(peer.id, check.after(), MAX_LISTED);
            let page = check.wait(&peer.id, request).await??;
            if !check.accept(&peer.id, page.iter().map(|(blob, _)| blob))? {
                return Ok(());
            }
            let mut garbage = Vec::new();
            for (blob, held) in page {
                let found = referenced.seek(blob.as_bytes())?;
                if held.kind != Kind::Record && found.as_ref() != Some(blob.as_bytes()) {
                    let (encoding, index) = (held.encoding, held.index);
                    garbage.push(FragmentId { blob, encoding, index });
                }
            }
            for part in garbage.chunks(MAX_DELETED) {
                if !(self.proceed)() {
                    return Ok(());
                }
                self.connected.delete_within(peer.id, part, GARBAGE_AGE_SECONDS, bound).await?;
            }
        }
    }
}
