//! Deletes from peers what is not marked.
//!
//! Each peer hands over its sorted list in pages, which is merged with the sorted names of what must
//! be kept. It is told in batches which fragments are garbage, and deletes those whose stamp is below
//! the bound. Which records are garbage is decided in `fold`.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::{Collection, CollectionProgress, CollectionReport};
use crate::cluster::list_check::ListCheck;
use crate::cluster::membership::{self, Health, Peer};
use crate::cluster::protocol::{FragmentId, Held, MAX_DELETED, MAX_LISTED, StampBound};
use crate::cluster::repair::{ConnectedPeers, Peers};
use crate::collection::CollectionNumber;
use crate::durable::sorted_runs::SortedRuns;
use crate::encoding::fragment::Kind;
use crate::error::{Error, Result};
use crate::id::{BlobId, PeerId};
use crate::maintenance::unlisted::{Disagreement, compare_with_records};
use crate::planted::{Defect, is_planted};

/// How often snapshots that only the peers know are looked for. An image that is being created is one
/// of them for a moment.
const LOOKS: u32 = 5;

/// The pause between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// The most bytes of a fragment on a disk beyond its block.
const MAX_PADDING: u64 = 64 << 10;

impl Collection<'_> {
    /// Deletes the fragments that are not marked and whose stamp is below the bound, from all peers
    /// that answer.
    pub(super) fn sweep_peers(
        &self,
        marked: &SortedRuns<32>,
        report: &mut CollectionReport,
    ) -> Result<()> {
        // Again: peers that were down may be back, with records that nobody has seen.
        self.check_catalog(report.number)?;
        let (connected, peers, runtime) = self.connect(report.number)?;
        (self.progress)(CollectionProgress::Sweeping { seen: 0, freed: 0 });
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

    fn connect(
        &self,
        number: CollectionNumber,
    ) -> Result<(Arc<ConnectedPeers>, Vec<Peer>, Runtime)> {
        let security = self.repository.security().ok_or(Error::NoCluster)?;
        let (peers, _) = membership::peers(self.repository.documents())?;
        let members = peers.iter().filter_map(Peer::member);
        let connected = ConnectedPeers::new(members, security.clone(), self.lease.permit(), number);
        Ok((Arc::new(connected), peers, runtime()?))
    }

    /// The error of a mark that has failed. If the catalog was restored from an older copy, it has
    /// snapshots whose content is gone, because they were removed.
    pub(super) fn why_unmarked(&self, number: CollectionNumber, error: Error) -> Error {
        let Ok((connected, peers, runtime)) = self.connect(number) else { return error };
        let compared = compare_with_records(self.repository.catalog(), &connected, &peers);
        match runtime.block_on(compared) {
            Ok(Disagreement { revived: snapshots @ 1.., .. }) => Error::Revived { snapshots },
            _ => error,
        }
    }

    /// Fails if the peers have records of snapshots that the catalog does not have, or tombstones of
    /// snapshots that it has.
    pub(super) fn check_catalog(&self, number: CollectionNumber) -> Result<()> {
        let (connected, peers, runtime) = self.connect(number)?;
        let catalog = self.repository.catalog();
        for look in 1.. {
            let compared = compare_with_records(catalog, &connected, &peers);
            let Disagreement { unlisted, revived } = runtime.block_on(compared)?;
            let is_planted = is_planted(Defect::AcceptOlderCatalog);
            match (unlisted, revived) {
                (0, 0) => break,
                _ if is_planted => break,
                (_, 1..) => return Err(Error::Revived { snapshots: revived }),
                _ if look == LOOKS => return Err(Error::Unlisted { snapshots: unlisted }),
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
                let is_record = held.kind == Kind::Record && !is_planted(Defect::SweepTombstones);
                match is_marked || is_record {
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
        let fragments: Vec<_> = garbage.iter().map(|(fragment, _)| *fragment).collect();
        let bound = StampBound { below: bound, number: report.number };
        let freed = match self.options.dry_run {
            true => connected.deletable(*peer, &fragments, bound).await?,
            false if !(self.proceed)() => return Err(Error::LeaseLost),
            false => connected.delete_within(*peer, &fragments, 0, bound).await?,
        };
        let freed_objects = u64::from(freed.fragments).min(objects);
        // A block takes whole pages of the file system. What a peer claims beyond that is not counted.
        let most = bytes.saturating_add(objects * MAX_PADDING);
        report.freed.objects += freed_objects;
        report.freed.bytes += freed.bytes.min(most);
        report.waiting.objects += objects - freed_objects;
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
