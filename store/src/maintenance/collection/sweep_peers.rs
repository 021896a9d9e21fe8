//! Deletes from peers what is not marked.
//!
//! Each peer hands over its sorted list in pages, which is merged with the sorted names of what must
//! be kept. It is told in batches which fragments are garbage, and deletes those whose stamp is below
//! the bound. Which records are garbage is decided in `fold`.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::{Collection, CollectionProgress, CollectionReport, Space};
use crate::cluster::list_check::ListCheck;
use crate::cluster::membership::{self, Health, Peer};
use crate::cluster::protocol::{FragmentId, Held, MAX_DELETED, MAX_LISTED};
use crate::cluster::repair::{ConnectedPeers, Peers};
use crate::collection::CollectionNumber;
use crate::durable::sorted_runs::SortedRuns;
use crate::encoding::fragment::Kind;
use crate::error::{Error, Result};
use crate::id::{BlobId, PeerId};
use crate::maintenance::unlisted::count_unlisted_snapshots;

/// How often snapshots that only the peers know are looked for. An image that is being created is one
/// of them for a moment.
const LOOKS: u32 = 5;

/// The pause between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

impl Collection<'_> {
    /// Deletes the fragments that are not marked and whose stamp is below the bound, from all peers
    /// that answer.
    pub(super) fn sweep_peers(
        &self,
        marked: &SortedRuns<32>,
        report: &mut CollectionReport,
    ) -> Result<()> {
        let documents = self.repository.documents();
        let security = self.repository.security().ok_or(Error::NoCluster)?;
        let (peers, _) = membership::peers(documents)?;
        let members = peers.iter().filter_map(Peer::member);
        let permit = self.lease.permit();
        let connected = ConnectedPeers::new(members, security.clone(), permit, report.number);
        let (connected, runtime) = (Arc::new(connected), runtime()?);
        self.check_listed(&connected, &runtime, &peers)?;
        let is_live = |peer: &&Peer| matches!(peer.health, Health::Up | Health::Draining);
        self.repository.blobs().raise_stamp(report.number);
        for peer in &peers {
            if !is_live(&peer) {
                report.silent.push((peer.id, "it is down".into()));
                continue;
            }
            match runtime.block_on(self.sweep_peer(&connected, peer, marked, report)) {
                Err(Error::LeaseLost) => return Err(Error::LeaseLost),
                Err(error) => report.silent.push((peer.id, error.to_string())),
                Ok(()) => {}
            }
        }
        self.fold_records(&connected, &runtime, &peers, report)
    }

    /// Fails if the peers have records of snapshots that the catalog does not have.
    fn check_listed(
        &self,
        connected: &ConnectedPeers,
        runtime: &Runtime,
        peers: &[Peer],
    ) -> Result<()> {
        let catalog = self.repository.catalog();
        for look in 1.. {
            let unlisted = count_unlisted_snapshots(catalog, connected, peers);
            match runtime.block_on(unlisted)? {
                0 => break,
                snapshots if look == LOOKS => return Err(Error::Unlisted { snapshots }),
                _ => thread::sleep(LOOK_INTERVAL),
            }
        }
        Ok(())
    }

    async fn sweep_peer(
        &self,
        connected: &ConnectedPeers,
        peer: &Peer,
        marked: &SortedRuns<32>,
        report: &mut CollectionReport,
    ) -> Result<()> {
        let mut check = ListCheck::new(BlobId::from_bytes([0; 32]));
        let (mut marked, mut seen) = (marked.read()?, 0u64);
        loop {
            let request = connected.list(peer.id, check.after(), MAX_LISTED);
            let page = check.wait(&peer.id, request).await??;
            if !check.accept(&peer.id, page.iter().map(|(blob, _)| blob))? {
                return Ok(());
            }
            seen += page.len() as u64;
            let mut garbage = Vec::new();
            for (blob, held) in page {
                let is_marked = marked.seek(blob.as_bytes())?.as_ref() == Some(blob.as_bytes());
                match is_marked || held.kind == Kind::Record {
                    true => report.live.add(held.len.into()),
                    false => garbage.push((fragment_of(blob, &held), held.len.into())),
                }
            }
            for some in garbage.chunks(MAX_DELETED) {
                self.delete_from_peer(connected, &peer.id, some, report.bound, report).await?;
            }
            let freed = report.freed.bytes;
            (self.progress)(CollectionProgress::Sweeping { seen, freed });
        }
    }

    /// Deletes those of these fragments whose stamp is below `bound`.
    pub(super) async fn delete_from_peer(
        &self,
        connected: &ConnectedPeers,
        peer: &PeerId,
        garbage: &[(FragmentId, u64)],
        bound: CollectionNumber,
        report: &mut CollectionReport,
    ) -> Result<()> {
        let (objects, bytes) =
            (garbage.len() as u64, garbage.iter().map(|(_, bytes)| bytes).sum::<u64>());
        let mut freed = Space { objects, bytes };
        if !self.options.dry_run {
            if !(self.proceed)() {
                return Err(Error::LeaseLost);
            }
            let fragments: Vec<_> = garbage.iter().map(|(fragment, _)| *fragment).collect();
            freed.bytes = connected.delete_below(*peer, &fragments, 0, bound).await?;
            // The peer only says how many bytes are free again.
            let share = freed.bytes.min(bytes) as f64 / bytes.max(1) as f64;
            freed.objects = (objects as f64 * share).round() as u64;
        }
        report.freed.objects += freed.objects;
        report.freed.bytes += freed.bytes;
        report.waiting.objects += objects - freed.objects;
        report.waiting.bytes += bytes.saturating_sub(freed.bytes);
        Ok(())
    }
}

fn runtime() -> Result<Runtime> {
    let failed = |error| Error::io("starting", "a thread".as_ref(), error);
    Builder::new_current_thread().enable_all().build().map_err(failed)
}

fn fragment_of(blob: BlobId, held: &Held) -> FragmentId {
    FragmentId { blob, encoding: held.encoding, index: held.index }
}
