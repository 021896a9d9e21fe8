//! The lists of all live peers, merged: what all of them have of one blob after the other.
//!
//! ```text
//! peer A: list ─► page ─► page (under way) ─┐
//! peer B: list ─► page ─► page (under way) ─┼─► merge by blob ─► holdings of the wanted blob
//! peer C: …                                 ┘
//! ```
//!
//! A fragment crosses the network once, in the list of its holder, however many peers there are. One
//! page of each peer is consumed while the next one is on its way. The pages of many peers are small
//! ([`page_entries`]), so that all of them together take bounded memory.
//!
//! A peer is not trusted. A list that is out of order, repeats blobs or does not end is refused
//! ([`ListCheck`]). A peer whose list fails has failed for all further blobs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::iter::Peekable;
use std::sync::Arc;
use std::vec;

use tokio::task::JoinSet;

use super::peers::Peers;
use super::plan::Holding;
use crate::cluster::list_check::ListCheck;
use crate::cluster::protocol::{Held, MAX_FRAGMENTS, MAX_LISTED};
use crate::error::{Error, Result};
use crate::id::{BlobId, PeerId};

/// The memory for pages of all peers.
const PAGES_BYTES: usize = 32 << 20;

/// The memory for an entry of a page: the entry, and its bytes in the message that is being decoded.
const ENTRY_BYTES: usize = 160;

/// A page of a list.
type Page = Vec<(BlobId, Held)>;

/// The fragments in a page, if this many peers are listed at a time.
fn page_entries(peers: usize) -> usize {
    (PAGES_BYTES / (2 * ENTRY_BYTES * peers.max(1))).clamp(MAX_FRAGMENTS, MAX_LISTED)
}

/// The name before a name; the first name for the first one.
pub(super) fn predecessor(blob: &BlobId) -> BlobId {
    let mut bytes = *blob.as_bytes();
    let last = bytes.iter().rposition(|byte| *byte > 0).unwrap_or(0);
    bytes[last] = bytes[last].saturating_sub(1);
    if bytes != *blob.as_bytes() {
        bytes[last + 1..].fill(u8::MAX);
    }
    BlobId::from_bytes(bytes)
}

/// The list of one peer.
struct Cursor {
    peer: PeerId,
    check: ListCheck,
    page: Peekable<vec::IntoIter<(BlobId, Held)>>,
    /// The request for the next page. It ends with the cursor.
    next: JoinSet<Result<Page>>,
}

impl Cursor {
    /// Requests the next page.
    fn request<P: Peers>(&mut self, peers: &Arc<P>, most: usize) {
        let (peers, peer, after) = (peers.clone(), self.peer, self.check.after());
        self.next.spawn(async move { peers.list(peer, after, most).await });
    }

    /// Waits for the next page, and requests the one after it. Returns whether there is one.
    async fn turn<P: Peers>(&mut self, peers: &Arc<P>, most: usize) -> Result<bool> {
        let page = match self.check.wait(&self.peer, self.next.join_next()).await? {
            None => return Ok(false),
            Some(Ok(page)) => page?,
            Some(Err(error)) => {
                let (doing, reason) = ("listing the fragments of a peer", error.to_string());
                return Err(Error::Internal { doing, reason });
            }
        };
        let has_any = self.check.accept(&self.peer, page.iter().map(|(blob, _)| blob))?;
        if has_any {
            self.request(peers, most);
        }
        self.page = page.into_iter().peekable();
        Ok(has_any)
    }

    fn head(&mut self) -> Option<BlobId> {
        self.page.peek().map(|(blob, _)| *blob)
    }
}

/// The lists of peers, merged.
pub(super) struct Listings<P> {
    peers: Arc<P>,
    cursors: Vec<Cursor>,
    /// The next blob of each cursor that has one.
    heads: BinaryHeap<Reverse<(BlobId, usize)>>,
    /// Cursors without a page.
    empty: Vec<usize>,
    /// The fragments in a page.
    most: usize,
    /// The last blob that was asked for, and what the peers have of it.
    found: Option<(BlobId, Vec<Holding>)>,
    failures: Vec<(PeerId, Error)>,
}

impl<P: Peers> Listings<P> {
    /// Begins to list what these peers have of the blobs after `after`.
    pub(super) fn new(peers: Arc<P>, listed: &[PeerId], after: BlobId) -> Listings<P> {
        let most = page_entries(listed.len());
        let cursor = |peer: &PeerId| {
            let (check, page) = (ListCheck::new(after), Vec::new().into_iter().peekable());
            let mut cursor = Cursor { peer: *peer, check, page, next: JoinSet::new() };
            cursor.request(&peers, most);
            cursor
        };
        let cursors: Vec<_> = listed.iter().map(cursor).collect();
        let (empty, heads) = ((0..cursors.len()).collect(), BinaryHeap::new());
        Listings { peers, cursors, heads, empty, most, found: None, failures: Vec::new() }
    }

    /// The fragments of a blob that the peers list, in an order that does not depend on the network.
    /// The blob must not be less than the one before.
    pub(super) async fn holdings(&mut self, blob: &BlobId) -> Vec<Holding> {
        if let Some((last, found)) = &self.found
            && last == blob
        {
            return found.clone();
        }
        debug_assert!(self.found.as_ref().is_none_or(|(last, _)| last < blob), "out of order");
        let mut found = Vec::new();
        self.turn_pages().await;
        while let Some(Reverse((head, at))) = self.heads.peek().copied()
            && head <= *blob
        {
            self.heads.pop();
            let Cursor { peer, page, .. } = &mut self.cursors[at];
            while let Some((_, held)) = page.next_if(|(next, _)| *next == head) {
                if head == *blob {
                    found.push(Holding::new(*peer, blob, &held, self.peers.seals()));
                }
            }
            match self.cursors[at].head() {
                Some(head) => self.heads.push(Reverse((head, at))),
                None => {
                    self.empty.push(at);
                    self.turn_pages().await;
                }
            }
        }
        found.sort_unstable_by_key(Holding::order);
        self.found = Some((*blob, found.clone()));
        found
    }

    /// The peers whose lists have failed since the last call.
    pub(super) fn take_failures(&mut self) -> Vec<(PeerId, Error)> {
        std::mem::take(&mut self.failures)
    }

    /// Turns the pages of the cursors that have none.
    async fn turn_pages(&mut self) {
        for at in std::mem::take(&mut self.empty) {
            let cursor = &mut self.cursors[at];
            match cursor.turn(&self.peers, self.most).await {
                Ok(_) => self.heads.extend(cursor.head().map(|head| Reverse((head, at)))),
                Err(error) => self.failures.push((cursor.peer, error)),
            }
        }
    }
}

#[cfg(test)]
mod tests;
