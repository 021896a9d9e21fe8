//! Deletes the records that nobody needs from the peers.
//!
//! Each snapshot that was removed leaves its records and its tombstone. The tombstone must stay: a peer
//! that was away may return with an old record. A collection *folds* the tombstones of an image into a
//! [summary](crate::catalog::RemovalSummary), which stays for ever, and a later collection deletes what
//! the summary replaces:
//!
//! ```text
//! collection N:      tombstones that no summary has ─► a summary, with its full redundancy
//! collection N + 1:  enough peers list the summary ─► delete the records that it replaces
//! ```
//!
//! | record | is deleted when enough peers list |
//! |---|---|
//! | of a removed snapshot, but not of a mirror's parent | a summary with its number |
//! | tombstone of a snapshot | a summary with its number |
//! | summary | a later summary with all its numbers |
//! | anything of a removed image, but its tombstone | the image's tombstone |
//! | of a mirror that is not in the catalog | a later tombstone of the mirror |
//! | tombstone of a mirror that is not in the catalog | nothing else about the mirror, and all peers are up |
//!
//! *Enough peers* are as many as the record's redundancy has copies. Each copy was read and compared
//! with its name in this collection. Peers that are being drained do not count.

mod decide;
#[cfg(test)]
mod decide_tests;
mod listing;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};

use tokio::runtime::Runtime;

use self::decide::{ImageFold, ListedSummary, RecordKind};
use self::listing::{Entry, Listing, Subject};
use super::{Collection, CollectionReport};
use crate::catalog::{RecordsInUse, RemovalSummary, StoredSummary};
use crate::cluster::membership::{Health, Peer};
use crate::cluster::protocol::{FragmentId, MAX_DELETED};
use crate::cluster::repair::ConnectedPeers;
use crate::error::{Error, Result};
use crate::id::{BlobId, ImageId, MirrorId, PeerId};
use crate::name::ImageName;
use crate::snapshot::SnapshotState;

impl Collection<'_> {
    /// Deletes the records that nobody needs, and makes summaries. Does nothing if a peer that should
    /// answer does not list its records.
    pub(super) fn fold_records(
        &self,
        connected: &ConnectedPeers,
        runtime: &Runtime,
        peers: &[Peer],
        report: &mut CollectionReport,
    ) -> Result<()> {
        let listing = match runtime.block_on(Listing::read(connected, peers)) {
            Ok(listing) => listing,
            Err(error) => {
                tracing::warn!(%error, "records that nobody needs stay: they cannot be listed");
                return Ok(());
            }
        };
        // After the number was raised, as the roots are.
        let in_use = self.repository.catalog().records_in_use()?;
        let up = peers.iter().filter(|peer| peer.health == Health::Up);
        let fold = Fold {
            collection: self,
            connected,
            runtime,
            in_use: &in_use,
            up: up.map(|peer| peer.id).collect(),
            are_all_up: peers.iter().all(|peer| peer.health != Health::Down),
            garbage: BTreeMap::new(),
            report,
        };
        fold.run(&listing)
    }
}

/// The work on the records in one collection.
struct Fold<'a> {
    collection: &'a Collection<'a>,
    connected: &'a ConnectedPeers,
    runtime: &'a Runtime,
    in_use: &'a RecordsInUse,
    up: HashSet<PeerId>,
    are_all_up: bool,
    /// What is to be deleted, with its length.
    garbage: BTreeMap<PeerId, Vec<(FragmentId, u64)>>,
    report: &'a mut CollectionReport,
}

impl Fold<'_> {
    fn run(mut self, listing: &Listing) -> Result<()> {
        let mut entries = listing.entries()?;
        let mut next = entries.next()?;
        while let Some(first) = next.take() {
            // The first records of an image say whether it was removed, and have its summaries.
            let (subject, mut head) = (first.subject, vec![first]);
            loop {
                next = entries.next()?;
                let is_head = |entry: &mut Entry| {
                    let is_first = matches!(subject, Subject::Mirror(_)) || entry.number == 0;
                    entry.subject == subject && is_first
                };
                match next.take_if(is_head) {
                    Some(entry) => head.push(entry),
                    None => break,
                }
            }
            let image = match subject {
                Subject::Mirror(mirror) => {
                    self.mirror(&mirror, &head)?;
                    continue;
                }
                Subject::Image(image) => image,
            };
            let is_removed = self.has_enough(&head, RecordKind::ImageRemoval);
            let (listed, parents) = (self.in_use.images.get(&image), &self.in_use.parents);
            let noted = listed.and_then(|(_, noted)| noted.as_ref());
            let summaries = self.summaries(&head, listing, noted);
            let mut fold = ImageFold::new(image, listed.is_some(), is_removed, &summaries, parents);
            for entry in &head {
                if fold.see(entry.number, entry.kind, &entry.fragment.blob) {
                    self.delete(entry)?;
                }
            }
            while let Some(entry) = next.take_if(|entry| entry.subject == subject) {
                if fold.see(entry.number, entry.kind, &entry.fragment.blob) {
                    self.delete(&entry)?;
                }
                next = entries.next()?;
            }
            let Some((name, _)) = listed else { continue };
            let newest = summaries.iter().max_by_key(|one| one.summary.collection);
            match (fold.end(), newest) {
                (Some(summary), _) => self.put_summary(&image, name, summary)?,
                // Whoever has stored it could not note it, or the catalog was rebuilt.
                (None, Some(newest)) if noted.is_none_or(|one| one.record != newest.record) => {
                    if self.is_whole(&head, &newest.record) {
                        self.note_summary(&image, name, newest.record)?;
                    }
                }
                (None, _) => {}
            }
        }
        let peers: Vec<PeerId> = self.garbage.keys().copied().collect();
        peers.into_iter().try_for_each(|peer| self.delete_from(&peer))
    }

    /// Whether enough peers have a record of this kind.
    fn has_enough(&self, entries: &[Entry], kind: RecordKind) -> bool {
        let mut of_kind = entries.iter().filter(|entry| entry.kind == kind);
        of_kind.any(|one| self.is_whole(entries, &one.fragment.blob))
    }

    /// Whether enough peers have this record.
    fn is_whole(&self, entries: &[Entry], record: &BlobId) -> bool {
        let copies: Vec<&Entry> =
            entries.iter().filter(|entry| entry.fragment.blob == *record).collect();
        let peers: HashSet<PeerId> = copies.iter().map(|entry| entry.peer).collect();
        let wanted = copies.iter().map(|entry| entry.wanted).max();
        wanted.is_some_and(|wanted| peers.intersection(&self.up).count() >= wanted)
    }

    /// The summaries among the first records of an image, for which this one is noted.
    fn summaries(
        &self,
        head: &[Entry],
        listing: &Listing,
        noted: Option<&StoredSummary>,
    ) -> Vec<ListedSummary> {
        let mut all: Vec<ListedSummary> = Vec::new();
        for entry in head.iter().filter(|entry| entry.kind == RecordKind::Summary) {
            let record = entry.fragment.blob;
            if all.iter().any(|one| one.record == record) {
                continue;
            }
            let summary = listing.summaries[&record].clone();
            let is_earlier =
                |one: &StoredSummary| one.record == record && one.collection < self.report.number;
            let is_settled = noted.is_some_and(is_earlier) && self.is_whole(head, &record);
            all.push(ListedSummary { record, summary, is_settled });
        }
        all
    }

    /// Decides about all records of a mirror, which are in the order of their times.
    fn mirror(&mut self, mirror: &MirrorId, all: &[Entry]) -> Result<()> {
        let Some(last) = all.last().filter(|last| last.kind == RecordKind::MirrorRemoval) else {
            return Ok(());
        };
        if self.in_use.mirrors.contains(mirror) || !self.is_whole(all, &last.fragment.blob) {
            return Ok(());
        }
        let last = last.fragment.blob;
        let is_alone = all.iter().all(|entry| entry.fragment.blob == last);
        let is_garbage = |entry: &&Entry| match is_alone {
            true => self.are_all_up,
            false => entry.fragment.blob != last,
        };
        let garbage: Vec<&Entry> = all.iter().filter(is_garbage).collect();
        garbage.into_iter().try_for_each(|entry| self.delete(entry))
    }

    fn put_summary(
        &mut self,
        image: &ImageId,
        name: &ImageName,
        summary: RemovalSummary,
    ) -> Result<()> {
        if self.collection.options.dry_run {
            return Ok(());
        }
        if !(self.collection.proceed)() {
            return Err(Error::LeaseLost);
        }
        let summary = RemovalSummary { collection: self.report.number, ..summary };
        let repository = self.collection.repository;
        let Some(record) = repository.catalog().summary_record(name, image, summary)? else {
            return Ok(());
        };
        match repository.put_record(record, SnapshotState::Stable) {
            Ok(record) => record.map_or(Ok(()), |record| self.note_summary(image, name, record)),
            Err(error) => {
                tracing::warn!(%name, %error, "tombstones stay: their summary cannot be stored");
                Ok(())
            }
        }
    }

    fn note_summary(&self, image: &ImageId, name: &ImageName, record: BlobId) -> Result<()> {
        match self.collection.options.dry_run {
            true => Ok(()),
            false => {
                let catalog = self.collection.repository.catalog();
                catalog.note_summary(name, image, record, self.report.number)
            }
        }
    }

    fn delete(&mut self, entry: &Entry) -> Result<()> {
        let garbage = self.garbage.entry(entry.peer).or_default();
        garbage.push((entry.fragment, entry.len));
        match garbage.len() >= MAX_DELETED {
            true => self.delete_from(&entry.peer),
            false => Ok(()),
        }
    }

    fn delete_from(&mut self, peer: &PeerId) -> Result<()> {
        let garbage = self.garbage.remove(peer).unwrap_or_default();
        // The sweep has counted all records as live.
        let live = &mut self.report.live;
        live.objects -= live.objects.min(garbage.len() as u64);
        live.bytes -= live.bytes.min(garbage.iter().map(|(_, len)| len).sum());
        let Fold { collection, connected, runtime, report, .. } = self;
        // No commit relies on these records, so no older commit holds them back.
        let bound = report.number;
        let deleted = collection.delete_from_peer(connected, peer, &garbage, bound, report);
        match runtime.block_on(deleted) {
            Err(Error::LeaseLost) => Err(Error::LeaseLost),
            Err(error) => {
                self.report.silent.push((*peer, error.to_string()));
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}
