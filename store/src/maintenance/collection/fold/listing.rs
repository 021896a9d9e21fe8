//! The records that the peers list, sorted by what they are about, in bounded memory. The summaries are
//! in memory: an image has one or two of them.

use std::collections::HashMap;

use super::decide::RecordKind;
use crate::catalog::{RecordSubject, RemovalSummary, recorded_redundancy};
use crate::cluster::membership::{Health, Peer};
use crate::cluster::protocol::FragmentId;
use crate::cluster::repair::ConnectedPeers;
use crate::durable::sorted_runs::{RunSorter, SortedEntries, SortedRuns, temporary_directory};
use crate::encoding::fragment::Fragment;
use crate::error::{Error, Result};
use crate::id::{BlobId, ImageId, MirrorId, PeerId};
use crate::maintenance::records::RecordPages;

/// The most entries in memory: 13 MiB.
const MAX_ENTRIES: usize = if cfg!(test) { 16 } else { 1 << 17 };

/// An encoded [`Entry`].
const ENTRY: usize = 17 + 8 + 1 + 32 + 32 + 1 + 2 + 1 + 4;

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Image(ImageId),
    Mirror(MirrorId),
}

/// A copy of a record on a peer.
pub(super) struct Entry {
    pub(super) subject: Subject,
    /// The number of the snapshot; 0 for the image. For a mirror, the time of the record.
    pub(super) number: u64,
    pub(super) kind: RecordKind,
    pub(super) fragment: FragmentId,
    pub(super) peer: PeerId,
    /// The copies that the record should have.
    pub(super) wanted: usize,
    /// The length of the record.
    pub(super) len: u64,
}

/// The records of all peers that are up or draining.
pub(super) struct Listing {
    entries: SortedRuns<ENTRY>,
    /// The peers, by the index that entries have.
    peers: Vec<PeerId>,
    pub(super) summaries: HashMap<BlobId, RemovalSummary>,
}

impl Listing {
    /// Fails if a peer that should answer does not list all its records.
    pub(super) async fn read(connected: &ConnectedPeers, peers: &[Peer]) -> Result<Listing> {
        let is_live = |peer: &&Peer| matches!(peer.health, Health::Up | Health::Draining);
        let live: Vec<PeerId> = peers.iter().filter(is_live).map(|peer| peer.id).collect();
        let mut sorter = RunSorter::new(&temporary_directory(), ENTRY, MAX_ENTRIES);
        let mut summaries = HashMap::new();
        for (at, peer) in live.iter().enumerate() {
            let at = u16::try_from(at).map_err(|_| Error::BadArgument("too many peers".into()))?;
            let mut pages = RecordPages::new(connected, *peer);
            while let Some(page) = pages.next().await? {
                for record in page {
                    // A later version may have written it: it stays.
                    let Ok(subject) = RecordSubject::of(&record.block) else { continue };
                    sorter.push(encode(&subject, &record, at));
                    if let RecordSubject::Summary(_, summary) = subject {
                        summaries.insert(record.description.blob, summary);
                    }
                }
            }
        }
        Ok(Listing { entries: sorter.finish()?, peers: live, summaries })
    }

    /// The entries by subject, number and kind: first images, then mirrors.
    pub(super) fn entries(&self) -> Result<Entries<'_>> {
        Ok(Entries { listing: self, entries: self.entries.read()? })
    }
}

/// Reads the entries of a listing in their order.
pub(super) struct Entries<'a> {
    listing: &'a Listing,
    entries: SortedEntries<'a, ENTRY>,
}

impl Entries<'_> {
    pub(super) fn next(&mut self) -> Result<Option<Entry>> {
        let entry = self.entries.next().transpose()?;
        Ok(entry.map(|entry| decode(&entry, &self.listing.peers)))
    }
}

fn encode(subject: &RecordSubject, record: &Fragment, peer: u16) -> [u8; ENTRY] {
    let (class, id, number, kind) = match subject {
        RecordSubject::ImageRemoval(image) => (0, *image.as_bytes(), 0, RecordKind::ImageRemoval),
        RecordSubject::Summary(image, _) => (0, *image.as_bytes(), 0, RecordKind::Summary),
        RecordSubject::Removal { image, number, is_failure } => {
            let kind = if *is_failure { RecordKind::Failure } else { RecordKind::Removal };
            (0, *image.as_bytes(), *number, kind)
        }
        RecordSubject::Snapshot { image, number, .. } => {
            (0, *image.as_bytes(), *number, RecordKind::Snapshot)
        }
        RecordSubject::Mirror { mirror, is_removal, recorded } => {
            let kind = if *is_removal { RecordKind::MirrorRemoval } else { RecordKind::Mirror };
            (1, *mirror.as_bytes(), *recorded, kind)
        }
    };
    let description = &record.description;
    let wanted = recorded_redundancy(&record.block)
        .map_or(u8::MAX.into(), |redundancy| redundancy.of_small_blobs().width());
    let mut entry = Vec::with_capacity(ENTRY);
    entry.push(class);
    entry.extend(id);
    entry.extend(number.to_be_bytes());
    entry.push(kind as u8);
    entry.extend(description.blob.as_bytes());
    entry.extend(description.id().as_bytes());
    entry.push(record.index);
    entry.extend(peer.to_be_bytes());
    entry.push(u8::try_from(wanted).unwrap_or(u8::MAX));
    entry.extend((record.block.len() as u32).to_be_bytes());
    entry.try_into().expect("an entry has this length")
}

fn decode(entry: &[u8; ENTRY], peers: &[PeerId]) -> Entry {
    fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
        let (taken, left) = rest.split_at(N);
        *rest = left;
        taken.try_into().expect("it has this length")
    }
    let rest = &mut &entry[..];
    let ([class], id) = (take::<1>(rest), take::<16>(rest));
    let subject = match class {
        0 => Subject::Image(ImageId::from_bytes(id)),
        _ => Subject::Mirror(MirrorId::from_bytes(id)),
    };
    let number = u64::from_be_bytes(take(rest));
    let [kind] = take::<1>(rest);
    let kind = *RecordKind::ALL.get(usize::from(kind)).expect("it was encoded from a kind");
    let (blob, encoding) = (BlobId::from_bytes(take(rest)), BlobId::from_bytes(take(rest)));
    let [index] = take::<1>(rest);
    let peer = peers[usize::from(u16::from_be_bytes(take(rest)))];
    let [wanted] = take::<1>(rest);
    let len = u32::from_be_bytes(take(rest)).into();
    let fragment = FragmentId { blob, encoding, index };
    Entry { subject, number, kind, fragment, peer, wanted: wanted.into(), len }
}
