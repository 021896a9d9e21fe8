//! What a peer tells of its fragments.

use std::collections::BTreeMap;

use super::PeerStore;
use super::group::KnownFragment;
use super::table::Found;
use crate::cluster::protocol::Held;
use crate::cluster::protocol::{MAX_FRAGMENTS_LEN, MAX_HELD, MAX_LISTED, fragment_len};
use crate::encoding::fragment::{Fragment, Kind, MAX_CONTENT};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// Blobs that are looked up at once: a blob's fragments take more memory than what is told of them.
const AT_ONCE: usize = 64;

/// The most fragments of a blob in one answer.
const MAX_GIVEN: usize = 6;

/// The most fragments of records in one answer.
const MAX_RECORDS: usize = 1024;

impl PeerStore {
    /// The fragments of a blob, as many as an answer can hold: a blob has several only if it was encoded in several
    /// ways, and one is as good as another. One that is damaged has zeros instead of its block, and is told in the log: it is as
    /// good as lost, whoever reads it sees that, and whoever puts it again replaces it.
    pub fn get(&self, blob: &BlobId) -> Result<Vec<Fragment>> {
        let (mut known, mut room) = (self.of_blob(blob)?, MAX_CONTENT);
        known.retain(|one| {
            let len = one.description.block_len();
            let fits = len <= room;
            room -= if fits { len } else { 0 };
            fits
        });
        known.truncate(MAX_GIVEN);
        self.read(known, true)
    }

    /// Fragments of records behind this blob, in the order of their blobs, as many as an answer can hold. Nothing
    /// if there are no more.
    pub fn records(&self, after: &BlobId) -> Result<Vec<Fragment>> {
        let (mut after, mut page, mut room) = (*after, Vec::new(), MAX_FRAGMENTS_LEN);
        loop {
            // What is no more pending after this is in the table.
            let pending = self.state().pending.record(&after);
            let next = [pending, self.table.record(&after)?].into_iter().flatten().min();
            let Some(blob) = next else { break };
            let mut known = self.of_blob(&blob)?;
            known.retain(|one| one.description.kind() == Kind::Record);
            if page.is_empty() {
                // One way to encode it is as good as another, if not even one record fits.
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
            // What cannot be read must not look like the end.
            room -= if found.is_empty() { 0 } else { len };
            page.extend(found);
            after = blob;
        }
        Ok(page)
    }

    /// The fragments whose blocks can be read, and those that are damaged, with zeros, if they are wanted.
    fn read(&self, known: Vec<KnownFragment>, damaged: bool) -> Result<Vec<Fragment>> {
        let mut found = Vec::with_capacity(known.len());
        for mut one in known {
            let mut block = vec![0; one.description.block_len().min(MAX_CONTENT)];
            let mut read = self.files.read(&one, &mut block);
            if !matches!(read, Ok(true)) {
                // It was deleted in this moment, or is somewhere else.
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

    /// What there is of each of these blobs. With `renew` the age of what is there begins again, so that it is not
    /// deleted for being idle; without, nothing is written.
    pub fn have(&self, blobs: &[BlobId], renew: bool) -> Result<Vec<Vec<Held>>> {
        let mut room = MAX_HELD;
        let (mut all, mut old) = (Vec::with_capacity(blobs.len()), Vec::new());
        for some in blobs.chunks(AT_ONCE) {
            for found in self.known(some)? {
                if renew && found.is_old {
                    old.push(all.len());
                }
                all.push(held_within(&found, &mut room));
            }
        }
        // What nobody has, or has asked for a moment ago, needs no writer, who may be busy with a sync.
        if !old.is_empty() {
            let own: Vec<_> = old.iter().map(|at| blobs[*at]).collect();
            self.table.renew(&own)?;
            // They may have been deleted before.
            let mut old = old.into_iter();
            for some in own.chunks(AT_ONCE) {
                for (at, again) in old.by_ref().zip(self.known(some)?) {
                    room += all[at].len();
                    all[at] = held_within(&again, &mut room);
                }
            }
        }
        Ok(all)
    }

    /// The fragments of the first blobs behind this one, in the order of the blobs, all fragments of a blob
    /// together. Nothing if there are no more.
    pub fn list(&self, after: &BlobId) -> Result<Vec<(BlobId, Held)>> {
        let pending = self.state().pending.blobs(after, MAX_LISTED);
        let page = self.table.list(after, MAX_LISTED)?;
        let mut all: BTreeMap<BlobId, Vec<KnownFragment>> = BTreeMap::new();
        for one in page.all {
            all.entry(one.description.blob).or_default().push(one);
        }
        // Behind a page that is full there is more that is not pending.
        let is_in = |blob: &&BlobId| page.until.is_none_or(|until| **blob <= until);
        for blob in pending.iter().filter(is_in) {
            all.insert(*blob, self.of_blob(blob)?);
        }
        let mut listed = Vec::new();
        for (blob, known) in all {
            if !listed.is_empty() && listed.len() + known.len() > MAX_LISTED {
                break;
            }
            let mut held: Vec<_> = known.iter().map(held).collect();
            held.sort_unstable_by_key(|one| (one.encoding, one.index));
            listed.extend(held.into_iter().map(|one| (blob, one)));
        }
        Ok(listed)
    }

    /// What is known of a blob.
    fn of_blob(&self, blob: &BlobId) -> Result<Vec<KnownFragment>> {
        let found = self.known(std::slice::from_ref(blob))?.pop();
        Ok(found.unwrap_or_default().known)
    }

    /// What is known of each of these blobs.
    pub(super) fn known(&self, blobs: &[BlobId]) -> Result<Vec<Found>> {
        let mut found: Vec<_> = blobs.iter().map(|_| Found::default()).collect();
        // Before the table: what is no more pending is there. And what comes there has a new age.
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
        for (at, told) in asked.into_iter().zip(self.table.of_blobs(&names)?) {
            let Found { known, is_old } = &mut found[at];
            // What is pending may replace what is there.
            let mut old = told.known;
            old.retain(|old| !known.iter().any(|new| new.is_like(old)));
            known.splice(..0, old);
            *is_old = told.is_old;
        }
        Ok(found)
    }
}

/// What is told of a blob's fragments, as long as there is room in the answer.
fn held_within(found: &Found, room: &mut usize) -> Vec<Held> {
    let all: Vec<_> = found.known.iter().map(held).take(*room).collect();
    *room -= all.len();
    all
}

fn held(known: &KnownFragment) -> Held {
    let KnownFragment { description, index, .. } = known;
    let (data, width) = (description.needed() as u8, description.width() as u8);
    let (len, kind) = (description.block_len() as u32, description.kind());
    Held { encoding: description.id(), data, parity: width - data, index: *index, kind, len }
}
