//! The records that the peers list, whichever of them the catalog refers to.
//!
//! A record whose seal is of an older key gets a seal of the current one. So after a repair the older
//! keys can be taken out of `mac.key`, and tombstones, which nothing refers to, still count.

use crate::catalog::recorded_redundancy;
use crate::cluster::list_check::ListCheck;
use crate::cluster::membership::{Health, Peer};
use crate::cluster::repair::{ConnectedPeers, Peers, Wanted};
use crate::encoding::Redundancy;
use crate::encoding::fragment::Fragment;
use crate::error::Result;
use crate::id::{BlobId, PeerId};

/// What became of records with seals of older keys.
#[derive(Default)]
pub(super) struct Resealed {
    /// Copies of records that have a seal of the current key again.
    pub(super) copies: u64,
    /// Why other copies may still have seals of older keys.
    pub(super) failures: Vec<String>,
}

/// Reports every record that a live peer lists, with the redundancy that it should have. A record
/// may be reported several times. The records of a peer that does not answer are left out: other
/// peers have copies of them. Replaces the seals of older keys.
pub(super) async fn listed_records(
    connected: &ConnectedPeers,
    peers: &[Peer],
    mut report: impl FnMut(Wanted),
) -> Resealed {
    let mut resealed = Resealed::default();
    let is_live = |peer: &&Peer| matches!(peer.health, Health::Up | Health::Draining);
    let live: Vec<_> = peers.iter().filter(is_live).map(|peer| peer.id).collect();
    let default = Redundancy::for_peers(live.len()).of_small_blobs();
    for peer in live {
        let listed = records_of(connected, &peer, default, &mut resealed.copies, &mut report).await;
        if let Err(error) = listed {
            tracing::warn!(%peer, %error, "failed to list or to seal the records of a peer");
            resealed.fail(&peer, &error.to_string());
        }
    }
    for peer in peers.iter().filter(|peer| peer.health == Health::Down) {
        resealed.fail(&peer.id, "it is down");
    }
    if !connected.seals().has_old_keys() {
        resealed.failures.clear();
    }
    resealed
}

impl Resealed {
    fn fail(&mut self, peer: &PeerId, reason: &str) {
        self.failures.push(format!("records of peer {peer} may need older keys: {reason}"));
    }
}

/// Reports every record with a valid seal that a live peer lists. A record may be reported several
/// times. Fails if a peer does not list its records.
pub(super) async fn each_record(
    connected: &ConnectedPeers,
    peers: &[Peer],
    mut report: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let is_live = |peer: &&Peer| matches!(peer.health, Health::Up | Health::Draining);
    for peer in peers.iter().filter(is_live) {
        let mut pages = RecordPages::new(connected, peer.id);
        while let Some(page) = pages.next().await? {
            page.iter().try_for_each(|record| report(&record.block))?;
        }
    }
    Ok(())
}

/// The records of one peer that have a valid seal, in pages.
pub(super) struct RecordPages<'a> {
    connected: &'a ConnectedPeers,
    peer: PeerId,
    check: ListCheck,
}

impl<'a> RecordPages<'a> {
    pub(super) fn new(connected: &'a ConnectedPeers, peer: PeerId) -> RecordPages<'a> {
        RecordPages { connected, peer, check: ListCheck::new(BlobId::from_bytes([0; 32])) }
    }

    /// The next page; `None` if there are no more.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<Fragment>>> {
        let RecordPages { connected, peer, check } = self;
        let request = connected.records(peer, check.after());
        let mut page = check.wait(peer, request).await??;
        if !check.accept(peer, page.iter().map(|record| &record.description.blob))? {
            return Ok(None);
        }
        let seals = connected.seals();
        page.retain(|one| is_whole(one) && seals.is_sealed(&one.description));
        Ok(Some(page))
    }
}

async fn records_of(
    connected: &ConnectedPeers,
    peer: &PeerId,
    default: Redundancy,
    resealed: &mut u64,
    report: &mut impl FnMut(Wanted),
) -> Result<()> {
    let mut pages = RecordPages::new(connected, *peer);
    while let Some(page) = pages.next().await? {
        let seals = connected.seals();
        for record in page {
            let wanted = wanted_redundancy(&record.block, default);
            report(Wanted::record(record.description.blob, wanted));
            if seals.is_outdated(&record.description) {
                let seal = seals.seal(&record.description);
                let description = record.description.clone().with_seal(seal);
                connected.put(*peer, Fragment { description, ..record }).await?;
                *resealed += 1;
            }
        }
    }
    Ok(())
}

/// Whether a fragment is a whole record with its name. A peer that lists something else, or a record
/// that nobody has sealed, must not make repair look for it.
fn is_whole(fragment: &Fragment) -> bool {
    BlobId::of(&fragment.block) == fragment.description.blob
}

/// The redundancy of a record: that of its image's small blobs. A record that this program cannot
/// read gets the redundancy that a new image would have.
fn wanted_redundancy(record: &[u8], default: Redundancy) -> Redundancy {
    recorded_redundancy(record).map_or(default, Redundancy::of_small_blobs)
}
