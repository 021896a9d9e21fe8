//! What a peer keeps, in its data directory.
//!
//! ```text
//! DIR/peer.json      the marker: who this peer is
//! DIR/segments/      blocks, appended to a log
//! DIR/index.db       where each block is
//! DIR/fragments.db   of which blob it is a block, and what the others are
//! ```
//!
//! A put is staged; a flush makes everything durable that was put before it, with one sync for all blocks and one
//! for all descriptions. A fragment is known when both are durable, in this order, so whoever finds one may rely
//! on it. A deletion is the other way round: the fragment goes, then its block, if no other fragment has it, then
//! the bytes. What a crash leaves in between takes space, and no more.
//!
//! Two fragments may have one block. So a block that a put is about to rely on is *busy*, from before it is
//! looked for in the log until its fragment is known, and is not deleted then.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use super::super::Keep;
use super::super::fragment::{Fragment, MAX_CONTENT};
use super::super::wire::{MAX_FRAGMENTS_LEN, MAX_HELD, MAX_LISTED, fragment_len};
use super::table::{self, DATABASE, Known, Table};
use super::{FragmentId, Held, Usage};
use crate::blobs::{Blobs, LocalBlobs};
use crate::data_directory::DataDirectory;
use crate::error::{Error, Result};
use crate::id::{BlobId, PeerId};
use crate::sys;

/// Version 1 was never released.
const DIRECTORY: DataDirectory = DataDirectory {
    server: "peer",
    marker: "peer.json",
    format: "cairn-peer",
    version: 2,
    parts: &["segments", "index.db", DATABASE],
};

/// The most fragments of one blob: of all ways to encode it that anybody may try.
const MAX_FRAGMENTS: usize = 64;

/// The most fragments of records in one answer.
const MAX_RECORDS: usize = 1024;

/// The most fragments that are staged when a flush fails.
const MAX_STAGED: usize = 16384;

/// A fragment whose block is written, and that is not known yet.
struct Staged {
    known: Known,
    block: BlobId,
    /// The space that was taken for it: none if it was there already.
    bytes: u64,
}

#[derive(Default)]
struct State {
    staged: Vec<Staged>,
    /// Space that was taken for fragments that are not known yet.
    taken: u64,
    /// Space that clients have reserved and not used.
    reserved: u64,
    /// Fragments that are known.
    fragments: u64,
    /// Blocks that are put and not known yet, and by how many.
    busy: HashMap<BlobId, usize>,
}

impl State {
    fn set_busy(&mut self, staged: &[Staged]) {
        staged.iter().for_each(|one| *self.busy.entry(one.block).or_default() += 1);
    }

    /// The put of these has ended, well or badly.
    fn end(&mut self, staged: &[Staged]) {
        for Staged { block, bytes, .. } in staged {
            self.taken -= bytes;
            if let Some(count) = self.busy.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    self.busy.remove(block);
                }
            }
        }
    }
}

/// The fragments of one peer.
pub struct PeerStore {
    id: PeerId,
    capacity: Option<u64>,
    directory: PathBuf,
    /// It may be used by one process only.
    _lock: File,
    blocks: LocalBlobs,
    /// What the disk took for blocks at the start.
    space: u64,
    table: Table,
    state: Mutex<State>,
    /// Held by the one thread that makes fragments durable.
    flushing: Mutex<()>,
    /// Shared by those who put blocks into the log, alone for who takes some out.
    log: RwLock<()>,
}

/// Room on a peer that one client has reserved. What is left of it is free again when this is dropped.
pub struct Room {
    store: Arc<PeerStore>,
    left: Mutex<u64>,
}

impl Room {
    /// Nothing yet.
    pub fn new(store: Arc<PeerStore>) -> Room {
        Room { store, left: Mutex::new(0) }
    }

    /// Reserves so much, instead of what was reserved before. Fails if there is not that much, and then what was
    /// reserved before stays.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let capacity = self.store.usage()?.capacity;
        let mut state = self.store.state();
        let mut left = self.left();
        let others = self.store.used(&state) + state.reserved - *left;
        if others.checked_add(bytes).is_none_or(|all| all > capacity) && bytes > *left {
            return Err(Error::PeerFull { path: self.store.directory.clone(), capacity });
        }
        state.reserved = state.reserved - *left + bytes;
        *left = bytes;
        Ok(())
    }

    fn left(&self) -> MutexGuard<'_, u64> {
        self.left.lock().expect("no thread panics while it counts")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let left = *self.left();
        self.store.state().reserved -= left;
    }
}

impl PeerStore {
    /// Opens a data directory, and makes it first if it is empty or not there. Without a capacity the file system
    /// is the limit.
    pub fn open(directory: &Path, capacity: Option<u64>) -> Result<PeerStore> {
        let make = || LocalBlobs::create(directory).and_then(|()| table::make(directory));
        let (lock, id) = DIRECTORY.take(directory, make)?;
        let id = id.parse()?;
        let blocks = LocalBlobs::open_careful(directory)?;
        let table = Table::open(directory)?;
        let state = State { fragments: table.count()?, ..State::default() };
        Ok(PeerStore {
            id,
            capacity,
            directory: directory.to_owned(),
            _lock: lock,
            space: blocks.space()?,
            blocks,
            table,
            state: Mutex::new(state),
            flushing: Mutex::default(),
            log: RwLock::default(),
        })
    }

    /// Who this peer is.
    pub fn id(&self) -> PeerId {
        self.id
    }

    /// Takes fragments: many at once take less space and time. They are durable, and others find them, after the
    /// next [`PeerStore::flush`]. Tells for each whether it was taken; fails if the disk does.
    pub fn put(&self, fragments: &[Fragment]) -> Result<Vec<Result<()>>> {
        self.put_in(fragments, |_| None)
    }

    /// As [`PeerStore::put`], into the room that was reserved for each, as long as there is some.
    pub fn put_in<'a>(
        &self,
        fragments: &[Fragment],
        room: impl Fn(usize) -> Option<&'a Room>,
    ) -> Result<Vec<Result<()>>> {
        if self.state().staged.len() >= MAX_STAGED {
            // The last flush has failed. Without another one there would be no bound.
            self.flush()?;
        }
        let capacity = self.usage()?.capacity;
        let mut results = Vec::with_capacity(fragments.len());
        let mut blocks = Vec::new();
        let mut staged = Vec::new();
        let known = self.table.of_blobs(fragments.iter().map(|one| &one.description.blob))?;
        for (at, (fragment, known)) in fragments.iter().zip(known).enumerate() {
            let result = self.admit(fragment, &known, capacity, room(at));
            if let Ok((block, bytes)) = result {
                blocks.push((block, &fragment.block[..]));
                let known = (fragment.description.clone(), fragment.index);
                staged.push(Staged { known, block, bytes });
            }
            results.push(result.map(drop));
        }
        let put = {
            let _log = self.log.read().expect("no thread panics while it puts");
            self.state().set_busy(&staged);
            self.blocks.put(&blocks, &Keep::default())
        };
        let mut state = self.state();
        match put {
            Ok(_) => {
                state.staged.extend(staged);
                Ok(results)
            }
            Err(error) => {
                state.end(&staged);
                Err(error)
            }
        }
    }

    /// Verifies a fragment and takes space for it, if it is new. Returns its block's name, and that space.
    fn admit(
        &self,
        fragment: &Fragment,
        known: &[Known],
        capacity: u64,
        room: Option<&Room>,
    ) -> Result<(BlobId, u64)> {
        let Fragment { description, index, block } = fragment;
        let name = description.block((*index).into());
        let name =
            name.filter(|_| description.matches((*index).into(), block)).ok_or_else(|| {
                let reason = "it is not the block that its description names";
                Error::corrupt(format!("a fragment of {}", description.blob), reason)
            })?;
        if known.iter().any(|(other, at)| at == index && other == description) {
            return Ok((name, 0));
        }
        if known.len() >= MAX_FRAGMENTS {
            let reason = "there are too many encodings of it";
            return Err(Error::corrupt(format!("blob {}", description.blob), reason));
        }
        let bytes = LocalBlobs::space_of(block.len());
        let mut state = self.state();
        let mut left = room.map(Room::left);
        let drawn = left.as_ref().map_or(0, |left| bytes.min(**left));
        if self.used(&state) + state.reserved - drawn + bytes > capacity {
            return Err(Error::PeerFull { path: self.directory.clone(), capacity });
        }
        if let Some(left) = &mut left {
            **left -= drawn;
        }
        state.reserved -= drawn;
        state.taken += bytes;
        Ok((name, bytes))
    }

    /// Returns when everything put before this call is durable.
    pub fn flush(&self) -> Result<()> {
        // Who waits here finds its fragments durable, or staged again.
        let _flushing = self.flushing.lock().expect("no thread panics while it flushes");
        let staged = std::mem::take(&mut self.state().staged);
        if staged.is_empty() {
            return Ok(());
        }
        let flushed = self.blocks.flush();
        let result = flushed.and_then(|()| self.table.insert(staged.iter().map(|one| &one.known)));
        let mut state = self.state();
        match result {
            Ok(new) => {
                state.end(&staged);
                state.fragments += new;
                Ok(())
            }
            Err(error) => {
                state.staged.extend(staged);
                Err(error)
            }
        }
    }

    /// Deletes fragments that nobody has stored or asked for (with renewal) within so many seconds; the others
    /// stay. Returns the bytes that the disk has again. That is durable when this returns.
    pub fn delete(&self, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        let deleted = self.table.delete(fragments, idle)?;
        let count = deleted.len() as u64;
        let mut blocks: Vec<BlobId> =
            deleted.into_iter().filter_map(|(one, index)| one.block(index.into())).collect();
        let forgotten = {
            // Nobody begins to rely on a block from here on.
            let _log = self.log.write().expect("no thread panics while it puts");
            {
                let mut state = self.state();
                state.fragments = state.fragments.saturating_sub(count);
                blocks.retain(|block| !state.busy.contains_key(block));
            }
            // A put that has ended before this is in the table.
            let mut unused = Vec::with_capacity(blocks.len());
            for block in blocks {
                if !self.table.refers_to(&block)? {
                    unused.push(block);
                }
            }
            self.blocks.forget(&unused)?
        };
        Ok(self.blocks.reclaim(forgotten))
    }

    /// All fragments of a blob. One that is damaged has zeros instead of its block, and is told in the log: it is as
    /// good as lost, whoever reads it sees that, and whoever puts it again replaces it.
    pub fn get(&self, blob: &BlobId) -> Result<Vec<Fragment>> {
        Ok(self.read(self.table.of_blob(blob)?, true))
    }

    /// Fragments of records behind this blob, in the order of their blobs, as many as an answer can hold. Nothing
    /// if there are no more.
    pub fn records(&self, after: &BlobId) -> Result<Vec<Fragment>> {
        let (mut after, mut page, mut room) = (*after, Vec::new(), MAX_FRAGMENTS_LEN);
        while let Some((blob, mut known)) = self.table.record(&after)? {
            if page.is_empty() {
                // One way to encode it is as good as another, if not even one record fits.
                let mut own = room;
                known.retain(|(one, _)| {
                    let fits = fragment_len(one) <= own;
                    own -= if fits { fragment_len(one) } else { 0 };
                    fits
                });
            }
            let len: usize = known.iter().map(|(one, _)| fragment_len(one)).sum();
            if len > room || page.len() + known.len() > MAX_RECORDS {
                break;
            }
            let found = self.read(known, false);
            // What cannot be read must not look like the end.
            room -= if found.is_empty() { 0 } else { len };
            page.extend(found);
            after = blob;
        }
        Ok(page)
    }

    /// The fragments whose blocks can be read, and those that are damaged, with zeros, if they are wanted.
    fn read(&self, known: Vec<Known>, damaged: bool) -> Vec<Fragment> {
        let mut found = Vec::with_capacity(known.len());
        for (description, index) in known {
            let (blob, name) = (description.blob, description.block(index.into()));
            let Some(name) = name else { continue };
            let mut block = vec![0; description.block_len().min(MAX_CONTENT)];
            match self.blocks.get(&name, &mut block) {
                Ok(len) if len == block.len() => {
                    found.push(Fragment { description, index, block: block.into() });
                }
                Ok(_) => tracing::error!(%blob, index, "a block has the wrong length"),
                // It was deleted in this moment.
                Err(Error::MissingBlob { .. }) => {}
                Err(error) => {
                    tracing::error!(%blob, index, %error, "a fragment cannot be read");
                    if damaged {
                        block.fill(0);
                        found.push(Fragment { description, index, block: block.into() });
                    }
                }
            }
        }
        found
    }

    /// What there is of each of these blobs. With `renew` the age of what is there begins again, so that it is not
    /// deleted for being idle; without, nothing is written.
    pub fn have(&self, blobs: &[BlobId], renew: bool) -> Result<Vec<Vec<Held>>> {
        let found = self.table.have(blobs, MAX_HELD)?;
        // What nobody has needs no writer, who may be busy with a sync. Most questions are about such.
        match renew && found.iter().any(|held| !held.is_empty()) {
            true => self.table.renew(blobs, MAX_HELD),
            false => Ok(found),
        }
    }

    /// The fragments of the first blobs behind this one, in the order of the blobs, all fragments of a blob
    /// together. Nothing if there are no more.
    pub fn list(&self, after: &BlobId) -> Result<Vec<(BlobId, Held)>> {
        self.table.list(after, MAX_LISTED)
    }

    /// How much there is.
    pub fn usage(&self) -> Result<Usage> {
        let (used, reserved, fragments) = {
            let state = self.state();
            (self.used(&state), state.reserved, state.fragments)
        };
        let capacity = match self.capacity {
            Some(capacity) => capacity,
            None => used + sys::free_space(&self.directory)?,
        };
        Ok(Usage { capacity, used, reserved, fragments })
    }

    /// What the disk takes for blocks, those included that are on their way.
    fn used(&self, state: &State) -> u64 {
        self.space.saturating_add_signed(self.blocks.balance()) + state.taken
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the state")
    }
}
