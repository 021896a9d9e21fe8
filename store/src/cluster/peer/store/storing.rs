//! Storing a peer's fragments: admission, staging, and the flush that makes them durable.
//!
//! ```text
//! put ─► admit ─┬─ new ─────────────► appended, staged ─┐
//!               ├─ damaged ─────────► appended, staged ─┼─► flush: one sync ─► pending
//!               └─ stored or staged ─► staged as update ─┘      └─► then updates of the table
//! ```

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::group::{KnownFragment, MAX_GROUP};
use super::room::Room;
use super::{MAX_PENDING_FACTOR, PeerStore};
use crate::cluster::protocol::{FragmentId, MAX_FRAGMENTS};
use crate::collection::CollectionNumber;
use crate::durable::segment::{ALIGNMENT, Segment};
use crate::encoding::Seal;
use crate::encoding::fragment::{Fragment, Kind};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// The part of a put that is not in its fragments.
#[derive(Clone, Copy)]
pub struct PutOrder<'a> {
    /// The collection number to stamp the fragments with.
    pub stamp: CollectionNumber,
    /// The space that the client has reserved.
    pub room: Option<&'a Room>,
}

/// A fragment whose put has not ended.
pub(super) struct Staged {
    pub(super) id: FragmentId,
    pub(super) staging: Staging,
}

impl Staged {
    /// The segment that the fragment was appended to, and the offset after its block.
    pub(super) fn written(&self) -> Option<(&Arc<Segment>, u64)> {
        match &self.staging {
            Staging::New(known, _, segment) | Staging::Replacement(known, _, segment) => {
                Some((segment, known.end()))
            }
            Staging::Update(..) => None,
        }
    }
}

/// What a flush does with a staged fragment.
pub(super) enum Staging {
    /// The fragment is new and takes this many bytes of space.
    New(KnownFragment, u64, Arc<Segment>),
    /// The fragment replaces another one, which is damaged.
    Replacement(KnownFragment, KnownFragment, Arc<Segment>),
    /// The fragment was already stored, or is staged by another put. Its idle timer is reset, its
    /// stamp is raised, and its seal is replaced.
    Update(Seal, CollectionNumber),
}

/// The decision about a fragment that is put.
enum Admission {
    /// The fragment is new. This many bytes of space were allotted to it.
    New(u64),
    /// The fragment is stored, but this copy is damaged.
    Damaged(KnownFragment),
    /// The fragment is stored and valid, or another put of it has not ended.
    Present,
}

impl PeerStore {
    /// Accepts fragments. One call with many fragments takes less space and time than many calls.
    /// After the next [`PeerStore::flush`] the fragments are durable and can be found.
    ///
    /// Returns, for each fragment, whether it was accepted. Fails if the disk fails.
    pub fn put(&self, fragments: &[Fragment]) -> Result<Vec<Result<()>>> {
        self.put_in(fragments, |_| PutOrder { stamp: CollectionNumber::FIRST, room: None })
    }

    /// Accepts fragments like [`PeerStore::put`], and takes their space from reservations first.
    /// `order` returns the rest of the put of the fragment with an index.
    pub fn put_in<'a>(
        &self,
        fragments: &[Fragment],
        order: impl Fn(usize) -> PutOrder<'a>,
    ) -> Result<Vec<Result<()>>> {
        let mut log = self.log();
        self.sync.check()?;
        if self.has_pending(MAX_PENDING_FACTOR) {
            // The table could not be written. Without a retry the pending fragments would be
            // unbounded.
            self.settle(false)?;
        }
        let capacity = self.usage()?.capacity;
        let ids: Vec<_> = fragments.iter().map(id).collect();
        // The busy fragments are read before the known ones: a fragment that is no longer busy is
        // known.
        let (mut busy, mut coming) = {
            let state = self.state();
            let busy: HashSet<_> =
                ids.iter().filter(|id| state.busy.contains_key(id)).copied().collect();
            // For each blob, the number of staged fragments that will become known.
            let mut coming = HashMap::<BlobId, usize>::new();
            for one in state.staged.iter().filter(|one| matches!(one.staging, Staging::New(..))) {
                *coming.entry(one.id.blob).or_default() += 1;
            }
            (busy, coming)
        };
        let blobs: Vec<_> = ids.iter().map(|id| id.blob).collect();
        let known = self.known(&blobs)?;
        let mut results = Vec::with_capacity(fragments.len());
        let (mut again, mut new) = (Vec::new(), Vec::new());
        for (at, (fragment, found)) in fragments.iter().zip(known).enumerate() {
            let id = ids[at];
            let coming = coming.entry(id.blob).or_default();
            let is_busy = busy.contains(&id);
            let order = order(at);
            let stamp = order.stamp;
            let admitted =
                self.admit(fragment, found.known, *coming, capacity, order.room, is_busy);
            if admitted.is_ok() {
                busy.insert(id);
            }
            results.push(match admitted {
                Ok(Admission::Present) => {
                    let staging = Staging::Update(fragment.description.seal, stamp);
                    again.push(Staged { id, staging });
                    Ok(())
                }
                Ok(Admission::New(bytes)) => {
                    *coming += 1;
                    new.push((fragment, stamp, id, None, bytes));
                    Ok(())
                }
                Ok(Admission::Damaged(old)) => {
                    new.push((fragment, stamp.max(old.stamp), id, Some(old), 0));
                    Ok(())
                }
                Err(error) => Err(error),
            });
        }
        let bytes = new.iter().map(|(.., bytes)| bytes).sum::<u64>();
        let mut staged = Vec::with_capacity(again.len() + new.len());
        for group in new.chunks_mut(MAX_GROUP) {
            let fragments: Vec<_> =
                group.iter().map(|(fragment, stamp, ..)| (*fragment, *stamp)).collect();
            let (segment, all) = log.append(&self.table, &fragments).inspect_err(|_| {
                // Nothing refers to the groups that were already appended.
                self.state().staged_bytes -= bytes;
            })?;
            for ((.., id, old, bytes), known) in group.iter_mut().zip(all) {
                let segment = segment.clone();
                let staging = match old.take() {
                    Some(old) => Staging::Replacement(known, old, segment),
                    None => Staging::New(known, *bytes, segment),
                };
                staged.push(Staged { id: *id, staging });
            }
        }
        // Updates come last: they may be of fragments that this call has appended.
        staged.extend(again);
        let mut state = self.state();
        staged.iter().for_each(|one| *state.busy.entry(one.id).or_default() += 1);
        state.staged.extend(staged);
        Ok(results)
    }

    /// Verifies a fragment, and allots space to it if it is new.
    fn admit(
        &self,
        fragment: &Fragment,
        known: Vec<KnownFragment>,
        coming: usize,
        capacity: u64,
        room: Option<&Room>,
        is_busy: bool,
    ) -> Result<Admission> {
        let Fragment { description, index, block } = fragment;
        if !description.matches((*index).into(), block) {
            let reason = "the block does not match its description";
            return Err(Error::corrupt(format!("a fragment of {}", description.blob), reason));
        }
        if is_busy {
            return Ok(Admission::Present);
        }
        let count = known.len() + coming;
        let is_it = |one: &KnownFragment| one.index == *index && one.description == *description;
        if let Some(known) = known.into_iter().find(is_it) {
            let mut there = vec![0; block.len()];
            let read = self.files.read(&known, &mut there);
            let path = self.files.path(known.place.segment);
            let is_whole = read.map_err(|error| Error::io("reading", &path, error))?;
            return Ok(match is_whole {
                true => Admission::Present,
                false => Admission::Damaged(known),
            });
        }
        if count >= MAX_FRAGMENTS {
            let reason = "the peer has too many fragments of it";
            return Err(Error::corrupt(format!("blob {}", description.blob), reason));
        }
        let bytes = block.len().next_multiple_of(ALIGNMENT) as u64;
        // Nothing can be removed without the record of its removal.
        let overdraft = match description.kind() {
            Kind::Record => {
                self.reserve.release();
                self.reserve.wanted()
            }
            Kind::Content => 0,
        };
        let mut state = self.state();
        let mut left = room.map(Room::left);
        let drawn = left.as_ref().map_or(0, |left| bytes.min(**left));
        let taken = state.used + state.staged_bytes + state.reserved - drawn;
        if taken + bytes > capacity + overdraft {
            return Err(Error::PeerFull { path: self.directory.clone(), capacity });
        }
        if let Some(left) = &mut left {
            **left -= drawn;
        }
        state.reserved -= drawn;
        state.staged_bytes += bytes;
        Ok(Admission::New(bytes))
    }

    /// Returns when every fragment that was put before this call is durable.
    pub fn flush(&self) -> Result<()> {
        // A thread that waited for the lock finds its fragments durable, or the store poisoned.
        let _flushing = self.flushing.lock().expect("no thread panics during a flush");
        self.sync.check()?;
        let staged = std::mem::take(&mut self.state().staged);
        self.sync.sync(staged.iter().filter_map(Staged::written))?;
        let (mut ids, mut updates) = (Vec::with_capacity(staged.len()), Vec::new());
        {
            let mut state = self.state();
            for Staged { id, staging } in staged {
                ids.push(id);
                match staging {
                    Staging::New(known, bytes, _) => {
                        state.filter.insert(&id.blob);
                        state.staged_bytes -= bytes;
                        state.used += bytes;
                        state.fragments += 1;
                        state.pending.push(known, None);
                    }
                    Staging::Replacement(known, old, _) => state.pending.push(known, Some(old)),
                    Staging::Update(seal, stamp) => updates.push((id, seal, stamp)),
                }
            }
        }
        let updated = self.update(&updates);
        let mut state = self.state();
        for id in ids {
            if let Entry::Occupied(mut puts) = state.busy.entry(id) {
                *puts.get_mut() -= 1;
                if *puts.get() == 0 {
                    puts.remove();
                }
            }
        }
        updated
    }

    /// Resets the idle timers of stored fragments, raises their stamps and replaces their seals. They
    /// are busy, so none of them is deleted before.
    fn update(&self, updates: &[(FragmentId, Seal, CollectionNumber)]) -> Result<()> {
        if updates.is_empty() {
            return Ok(());
        }
        let is_pending = {
            let pending = &self.state().pending;
            let is_pending = |id: &FragmentId| pending.contains(&id.blob, &id.encoding, id.index);
            updates.iter().any(|(id, ..)| is_pending(id))
        };
        if is_pending {
            self.settle(false)?;
        }
        self.table.update(updates)
    }
}

/// Returns the id of a fragment.
pub(super) fn id(fragment: &Fragment) -> FragmentId {
    let Fragment { description, index, .. } = fragment;
    FragmentId { blob: description.blob, encoding: description.id(), index: *index }
}
