//! Reading a peer's fragments: get, have, list and records.

use std::collections::BTreeMap;

use super::PeerStore;
use super::group::KnownFragment;
use super::table::Found;
use crate::cluster::protocol::{FragmentId, FragmentPart, Held};
use crate::cluster::protocol::{
    MAX_FETCHED, MAX_FRAGMENTS, MAX_FRAGMENTS_LEN, MAX_HELD, MAX_LISTED, MAX_RECORDS, fragment_len,
};
use crate::collection::CollectionNumber;
use crate::encoding::MAX_STORED;
use crate::encoding::fragment::{Fragment, Kind};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// The blobs that are looked up at a time. A blob's fragments take more memory than the answer
/// about them.
const LOOKUP_BATCH: usize = 64;

impl PeerStore {
    /// The fragments of a blob, as many as an answer can hold. A blob has several only if it was
    /// encoded in several ways, and one encoding is as good as another.
    ///
    /// A damaged block is logged and sent as zeros. It counts as lost: its reader recognises it by
    /// the checksum, and a put of the fragment replaces it.
    pub fn get(&self, blob: &BlobId) -> Result<Vec<Fragment>> {
        let (mut known, mut room) = (self.of_blob(blob)?, MAX_STORED);
        known.retain(|one| {
            let len = one.description.block_len();
            let fits = len <= room;
            room -= if fits { len } else { 0 };
            fits
        });
        known.truncate(MAX_FETCHED);
        self.read(known, true)
    }

    /// One fragment, or none if the peer does not have it. A damaged block is sent as zeros, as by
    /// [`PeerStore::get`].
    pub fn get_fragment(&self, id: &FragmentId) -> Result<Vec<Fragment>> {
        let mut known = self.of_blob(&id.blob)?;
        known.retain(|one| one.index == id.index && one.description.id() == id.encoding);
        self.read(known, true)
    }

    /// The parts of a blob's fragments that hold some bytes of its content, in whole frames, of as
    /// many fragments as an answer can hold. A part that cannot be read is left out. The parts are
    /// not verified: a checksum covers a whole block. The reader verifies each frame.
    pub fn get_range(&self, blob: &BlobId, offset: u32, len: u32) -> Result<Vec<FragmentPart>> {
        let content = offset as usize..offset as usize + len as usize;
        let mut room = MAX_STORED;
        let mut parts = Vec::new();
        for one in self.of_blob(blob)?.into_iter().take(MAX_FETCHED) {
            let KnownFragment { description, index, .. } = &one;
            let stored = description.stored_range(description.frames_of(content.clone()));
            let part = description.part_of_block(*index, &stored);
            if part.len() > room {
                continue;
            }
            let mut bytes = vec![0; part.len()];
            match self.files.read_part(&one, part.start, &mut bytes) {
                Ok(()) => {
                    room -= bytes.len();
                    let (offset, bytes) = (part.start as u32, bytes.into());
                    let KnownFragment { description, index, .. } = one;
                    parts.push(FragmentPart { description, index, offset, bytes });
                }
                Err(error) => tracing::warn!(%blob, %error, "cannot read a part of a block"),
            }
        }
        Ok(parts)
    }

    /// A page of fragments of records, in the order of their blobs, starting after this blob: as
    /// many as an answer can hold. It is empty if there are no more.
    pub fn records(&self, after: &BlobId) -> Result<Vec<Fragment>> {
        let (mut after, mut page, mut room) = (*after, Vec::new(), MAX_FRAGMENTS_LEN);
        loop {
            // The order matters: what is no longer pending after this read is in the table.
            let pending = self.state().pending.record(&after);
            let next = [pending, self.table.record(&after)?].into_iter().flatten().min();
            let Some(blob) = next else { break };
            let mut known = self.of_blob(&blob)?;
            known.retain(|one| one.description.kind() == Kind::Record);
            if page.is_empty() {
                // If not even one record fits, some of its encodings are left out: one is as good
                // as another.
                let mut own = room;
                known.retain(|one| {
                    let fits = fragment_len(&one.description) <= own;
                    own -= if fits { fragment_len(&one.description) } else { 0 };
                    fits
                });
            }
            let len: usize = known.iter().map(|one| fragment_len(&one.description)).sum();
            if len > room || page.len() + known.len() > MAX_RECORDS {
                break;
            }
            let found = self.read(known, false)?;
            // Records that cannot be read take no space, so that they do not make the page look
            // like the last one.
            room -= if found.is_empty() { 0 } else { len };
            page.extend(found);
            after = blob;
        }
        Ok(page)
    }

    /// Reads the blocks of fragments. Damaged blocks are left out, or are zeros if `damaged` is
    /// set.
    fn read(&self, known: Vec<KnownFragment>, damaged: bool) -> Result<Vec<Fragment>> {
        let mut found = Vec::with_capacity(known.len());
        for mut one in known {
            let mut block = vec![0; one.description.block_len().min(MAX_STORED)];
            let mut read = self.files.read(&one, &mut block);
            if !matches!(read, Ok(true)) {
                // The fragment was deleted meanwhile, or is at another place.
                let all = self.of_blob(&one.description.blob)?;
                let Some(new) = all.into_iter().find(|new| new.is_like(&one)) else { continue };
                if new.place != one.place {
                    one = new;
                    read = self.files.read(&one, &mut block);
                }
            }
            let path = self.files.path(one.place.segment);
            if !read.map_err(|error| Error::io("reading", &path, error))? {
                let (blob, place) = (one.description.blob, one.place);
                tracing::error!(%blob, index = one.index, ?place, "a block is damaged");
                if !damaged {
                    continue;
                }
                block.fill(0);
            }
            let KnownFragment { description, index, .. } = one;
            found.push(Fragment { description, index, block: block.into() });
        }
        Ok(found)
    }

    /// The fragments of each of these blobs. With `renew` the idle timers of the fragments are
    /// reset and their stamps raised, durably; without, nothing is written.
    pub fn have(
        &self,
        blobs: &[BlobId],
        renew: Option<CollectionNumber>,
    ) -> Result<Vec<Vec<Held>>> {
        let mut room = MAX_HELD;
        let (mut all, mut old) = (Vec::with_capacity(blobs.len()), Vec::new());
        let stamp = renew.unwrap_or_default();
        let mut is_below = false;
        for some in blobs.chunks(LOOKUP_BATCH) {
            for found in self.known(some)? {
                if renew.is_some() && (found.is_old || found.is_below(stamp)) {
                    old.push(all.len());
                    is_below |= found.is_below(stamp);
                }
                all.push(held_within(&found, &mut room));
            }
        }
        // Unknown blobs, and blobs that were renewed recently, need no write. So they do not wait
        // for the writer, which may be busy with a sync.
        if !old.is_empty() {
            let own: Vec<_> = old.iter().map(|at| blobs[*at]).collect();
            if is_below {
                // The stamps of pending fragments are raised in the table.
                self.settle(false)?;
            }
            self.table.renew(&own, stamp)?;
            // They may have been deleted before the renewal.
            let mut old = old.into_iter();
            for some in own.chunks(LOOKUP_BATCH) {
                for (at, again) in old.by_ref().zip(self.known(some)?) {
                    room += all[at].len();
                    all[at] = held_within(&again, &mut room);
                }
            }
        }
        Ok(all)
    }

    /// A page of about `most` fragments, in the order of their blobs, starting after this blob: all
    /// fragments of a blob or none. It is empty if there are no more.
    pub fn list(&self, after: &BlobId, most: usize) -> Result<Vec<(BlobId, Held)>> {
        // All fragments of one blob fit.
        let most = most.clamp(MAX_FRAGMENTS, MAX_LISTED);
        let pending = self.state().pending.blobs(after, most);
        let page = self.table.list(after, most)?;
        let mut all: BTreeMap<BlobId, Vec<KnownFragment>> = BTreeMap::new();
        for one in page.all {
            all.entry(one.description.blob).or_default().push(one);
        }
        // After a full page the table may have blobs that come before pending ones.
        let is_in = |blob: &&BlobId| page.until.is_none_or(|until| **blob <= until);
        for blob in pending.iter().filter(is_in) {
            all.insert(*blob, self.of_blob(blob)?);
        }
        let mut listed = Vec::new();
        for (blob, known) in all {
            if !listed.is_empty() && listed.len() + known.len() > most {
                break;
            }
            let mut held: Vec<_> = known.iter().map(held).collect();
            held.sort_unstable_by_key(|one| (one.encoding, one.index));
            listed.extend(held.into_iter().map(|one| (blob, one)));
        }
        Ok(listed)
    }

    /// The known fragments of a blob.
    fn of_blob(&self, blob: &BlobId) -> Result<Vec<KnownFragment>> {
        let found = self.known(std::slice::from_ref(blob))?.pop();
        Ok(found.unwrap_or_default().known)
    }

    /// The known fragments of each of these blobs.
    pub(super) fn known(&self, blobs: &[BlobId]) -> Result<Vec<Found>> {
        let mut found: Vec<_> = blobs.iter().map(|_| Found::default()).collect();
        // Pending fragments are read before the table: what is no longer pending is in the table,
        // with a new age.
        let mut asked = Vec::new();
        {
            let state = self.state();
            for (at, blob) in blobs.iter().enumerate() {
                found[at].known = state.pending.of_blob(blob);
                if state.filter.may_have(blob) {
                    asked.push(at);
                }
            }
        }
        if asked.is_empty() {
            return Ok(found);
        }
        let names: Vec<_> = asked.iter().map(|at| blobs[*at]).collect();
        for (at, row) in asked.into_iter().zip(self.table.of_blobs(&names)?) {
            let Found { known, is_old } = &mut found[at];
            // A pending fragment may replace one of the table.
            let mut old = row.known;
            old.retain(|old| !known.iter().any(|new| new.is_like(old)));
            known.splice(..0, old);
            *is_old = row.is_old;
        }
        Ok(found)
    }
}

/// The answer about a blob's fragments, cut to the room that is left in the answer.
fn held_within(found: &Found, room: &mut usize) -> Vec<Held> {
    let all: Vec<_> = found.known.iter().map(held).take(*room).collect();
    *room -= all.len();
    all
}

fn held(known: &KnownFragment) -> Held {
    let KnownFragment { description, index, .. } = known;
    let (data, width) = (description.needed() as u8, description.width() as u8);
    let (len, kind) = (description.block_len() as u32, description.kind());
    let (parity, seal) = (width - data, description.seal);
    Held { encoding: description.id(), data, parity, index: *index, kind, len, seal }
}
