//! Reads every fragment that peers have of the blobs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Builder;
use tokio::sync::mpsc;

use super::report::Findings;
use super::{BlobUse, Verifier};
use crate::cluster::membership::{self, Health, Peer};
use crate::cluster::repair::{
    CheckedBlob, ConnectedPeers, DeletionPermit, RepairLimits, Wanted, check_fragments,
};
use crate::encoding::Redundancy;
use crate::error::{Error, Result};
use crate::id::{BlobId, NodeId};
use crate::maintenance::repair::repair_members;
use crate::maintenance::wanted::{SortedWanted, WantedBlobs};
use crate::tree::Referred;

/// Blobs that wait to be checked.
const QUEUED_BLOBS: usize = 1024;

impl Verifier<'_> {
    /// Reads all fragments of all blobs. A blob that the fragments do not give is read by the ordinary
    /// way, which tells why it cannot be read, if so.
    pub(super) fn check_fragments(
        &self,
        found: &mut Findings,
        done: &AtomicU64,
        progress: &dyn Fn(u64),
    ) -> Result<()> {
        let (Some((_, documents)), Some(security)) =
            (self.repository.cluster(), self.repository.security())
        else {
            return Err(Error::NoCluster);
        };
        let (peers, _) = membership::peers(documents)?;
        let members = repair_members(&peers);
        let stamp = self.repository.catalog().collection_number()?;
        // A verification deletes nothing.
        let permit: DeletionPermit = Arc::new(|| Box::pin(async { false }));
        let listed = peers.iter().filter_map(Peer::member);
        let connected = ConnectedPeers::new(listed, security.clone(), permit, stamp);
        let wanted = self.wanted(found)?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Error::io("starting", "a thread".as_ref(), error))?;
        let mut gone: BTreeMap<_, String> = BTreeMap::new();
        for peer in peers.iter().filter(|peer| peer.health == Health::Down) {
            gone.insert(peer.id, "it is down".into());
        }
        let mut suspicious = Vec::new();
        let silent = runtime.block_on(async {
            let (queue, blobs) = mpsc::channel(QUEUED_BLOBS);
            let feed = async move {
                for wanted in wanted.read()? {
                    if queue.send(wanted?).await.is_err() {
                        break;
                    }
                }
                Ok::<(), Error>(())
            };
            let mut each = |checked: CheckedBlob| {
                let id = checked.found.wanted.blob;
                let is_node = self.nodes.contains(&NodeId::from_bytes(*id.as_bytes()));
                let len = u64::from(checked.len.unwrap_or(0));
                if !is_node {
                    found.report.blobs += 1;
                    progress(done.fetch_add(len, Ordering::Relaxed) + len);
                }
                if checked.len.is_none() {
                    suspicious.push(id);
                }
                if checked.is_weak {
                    found.add_fragments(checked.found, &checked.problems);
                }
            };
            let limits = RepairLimits::default();
            let check = check_fragments(Arc::new(connected), members, blobs, limits, &mut each);
            let (fed, silent) = tokio::join!(feed, check);
            fed.map(|()| silent)
        })?;
        gone.extend(silent);
        found.report.silent = gone.into_iter().collect();
        suspicious.into_iter().for_each(|id| self.read_again(id, found));
        Ok(())
    }

    fn read_again(&self, id: BlobId, found: &mut Findings) {
        let is_node = self.nodes.contains(&NodeId::from_bytes(*id.as_bytes()));
        let used_as = if is_node { BlobUse::Node } else { BlobUse::Chunk };
        let mut buffer = vec![0; crate::geometry::MAX_CHUNK_SIZE as usize];
        if let Err(error) = self.repository.blobs().get(&id, &mut buffer) {
            found.forget_weak(&id);
            found.add(id, used_as, error);
        }
    }

    /// The blobs with the redundancy that each should have. What is below a node that cannot be read is
    /// not among them.
    fn wanted(&self, found: &mut Findings) -> Result<SortedWanted> {
        let mut wanted = WantedBlobs::new();
        let mut seen: BTreeMap<String, _> = BTreeMap::new();
        for snapshot in &self.snapshots {
            let chunks = snapshot.policy.redundancy;
            let small: Redundancy = chunks.of_small_blobs();
            // A tree that images share may be wanted with several redundancies.
            let seen = seen.entry(chunks.to_string()).or_default();
            let mut visit = |referred| match referred {
                Referred::Node(id) => wanted.add(&Wanted::content(id.into(), small)),
                Referred::Chunk(id) if self.sample.is_none_or(|sample| sample.has(&id)) => {
                    wanted.add(&Wanted::content(id.into(), chunks));
                }
                Referred::Chunk(_) => {}
            };
            let (root, geometry) = (&snapshot.root, snapshot.geometry);
            // Most of them have failed before, in the first walk.
            let mut failed = |id: NodeId, error| found.add(id.into(), BlobUse::Node, error);
            self.repository.trees().walk(root, geometry, seen, &mut visit, &mut failed);
        }
        wanted.finish()
    }
}
