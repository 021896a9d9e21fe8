//! Checks a list that a peer sends in pages. A peer is not trusted: its list may be out of order,
//! repeat blobs, not end, or come so slowly that it never ends.

use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::cluster::protocol::MAX_FRAGMENTS;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};

/// The most fragments that a peer can have. A list that would have more, by the part of the names that
/// it has covered, is refused. Names are hashes, so an honest list covers them evenly.
const MAX_PEER_FRAGMENTS: u128 = 1 << 33;

/// Fragments that a list may have before that rule applies. A short list need not be even.
pub(crate) const UNEVEN_FRAGMENTS: u64 = if cfg!(test) { 1 << 13 } else { 1 << 20 };

/// How long all pages of a peer may take, beside the time for what they list.
const PATIENCE: Duration = Duration::from_secs(60);

/// The fragments a second that the slowest honest peer lists.
const SLOWEST_RATE: u64 = 100;

/// How long a list that covers all names may take, beside [`PATIENCE`]. A list that covers a part of
/// them may take that part of the time, so invented names gain nothing.
///
/// An honest peer with 10⁸ fragments sends them in 12 hours if each page of 64 takes 27 ms, which is
/// the smallest page. It lists 2300 fragments a second then.
const WHOLE_LIST_TIME: Duration = Duration::from_secs(12 * 3600);

/// Checks the pages of one peer's list.
pub(crate) struct ListCheck {
    /// Where the list begins, as a [`part`] of all names.
    start: u64,
    /// The last blob of the pages so far.
    after: BlobId,
    listed: u64,
    /// How long the pages so far took.
    waited: Duration,
    patience: Duration,
}

impl ListCheck {
    /// For a list that begins after a blob.
    pub(crate) fn new(after: BlobId) -> ListCheck {
        let (start, waited) = (part(&after), Duration::ZERO);
        ListCheck { start, after, listed: 0, waited, patience: PATIENCE }
    }

    /// The blob after which the next page begins.
    pub(crate) fn after(&self) -> BlobId {
        self.after
    }

    /// Waits for the next page. Fails if the pages take longer than an honest peer needs.
    pub(crate) async fn wait<T>(
        &mut self,
        peer: &PeerId,
        page: impl Future<Output = T>,
    ) -> Result<T> {
        let begin = Instant::now();
        let page = timeout(self.allowed().saturating_sub(self.waited), page).await;
        self.waited += begin.elapsed();
        page.map_err(|_| {
            let (peer, kind) = (peer.to_string(), ErrorKind::Unavailable);
            Error::Peer { peer, kind, reason: "it sends its list too slowly".into() }
        })
    }

    /// How long the pages so far and the next one may take.
    fn allowed(&self) -> Duration {
        let for_names = Duration::from_secs(self.listed / SLOWEST_RATE);
        let covered = u128::from(part(&self.after) - self.start);
        let for_progress = (WHOLE_LIST_TIME.as_millis() * covered) >> 64;
        self.patience + for_names.min(Duration::from_millis(for_progress as u64))
    }

    /// Checks the blobs of the next page. Returns whether the page has any.
    pub(crate) fn accept<'a>(
        &mut self,
        peer: &PeerId,
        page: impl Iterator<Item = &'a BlobId>,
    ) -> Result<bool> {
        let wrong = |reason: &str| {
            let (peer, kind) = (peer.to_string(), ErrorKind::Corrupt);
            Err(Error::Peer { peer, kind, reason: reason.into() })
        };
        let (mut last, mut of_blob) = (None, 0);
        for blob in page {
            let is_same = last == Some(*blob);
            if !is_same && *blob <= last.unwrap_or(self.after) {
                return wrong("it sent a list that is out of order");
            }
            of_blob = if is_same { of_blob + 1 } else { 1 };
            if of_blob > MAX_FRAGMENTS {
                return wrong("it lists more fragments of a blob than a peer stores");
            }
            last = Some(*blob);
            self.listed += 1;
        }
        let Some(last) = last else { return Ok(false) };
        self.after = last;
        let possible = (MAX_PEER_FRAGMENTS * u128::from(part(&last))) >> 64;
        if u128::from(self.listed) > possible + u128::from(UNEVEN_FRAGMENTS) {
            return wrong("it lists more fragments than a peer can have");
        }
        Ok(true)
    }
}

/// The part of all names that is before a name, times 2⁶⁴.
fn part(name: &BlobId) -> u64 {
    let [first, ..] = name.as_bytes().as_chunks::<8>().0 else { unreachable!("32 bytes") };
    u64::from_be_bytes(*first)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use super::{ListCheck, PATIENCE, SLOWEST_RATE, WHOLE_LIST_TIME};
    use crate::error::ErrorKind;
    use crate::id::{BlobId, PeerId};

    /// Each page has one entry, and takes longer than an honest peer needs for it.
    #[tokio::test]
    async fn a_peer_that_sends_its_list_too_slowly_is_refused() {
        let peer = PeerId::from_bytes([1; 16]);
        let mut check = ListCheck::new(BlobId::from_bytes([0; 32]));
        check.patience = Duration::from_millis(300);
        for page in 1..100u8 {
            match check.wait(&peer, sleep(Duration::from_millis(50))).await {
                Ok(()) => {}
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                    return;
                }
            }
            assert!(check.accept(&peer, [BlobId::from_bytes([page; 32])].iter()).unwrap());
        }
        panic!("all pages were accepted");
    }

    /// The first name after this part of all names, times 2⁶⁴.
    fn name(part: u64) -> BlobId {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&part.to_be_bytes());
        BlobId::from_bytes(bytes)
    }

    /// How long a peer may take that lists names `step` apart, in pages, as slowly as the number of
    /// names permits.
    fn longest_wait(after: u64, step: u64) -> Duration {
        const PAGE: u64 = 50;
        let peer = PeerId::from_bytes([1; 16]);
        let mut check = ListCheck::new(name(after));
        let mut last = after;
        while let Some(end) = last.checked_add(PAGE * step)
            && check.waited < 4 * WHOLE_LIST_TIME
        {
            let page: Vec<_> = (1..=PAGE).map(|at| name(last + at * step)).collect();
            if check.waited > check.allowed() || check.accept(&peer, page.iter()).is_err() {
                break;
            }
            check.waited += Duration::from_millis(PAGE * 1000 / SLOWEST_RATE - 10);
            last = end;
        }
        check.waited
    }

    #[test]
    fn a_peer_that_invents_names_cannot_hold_a_repair_for_longer_than_a_whole_list_may_take() {
        let soon = PATIENCE + Duration::from_secs(1);
        let wait = longest_wait(0, 1);
        assert!(wait <= soon, "names that do not advance: {wait:?}");
        // With this step, the list reaches the last name after 2²³ names, which takes a day.
        let wait = longest_wait(0, 1 << 41);
        assert!(wait <= WHOLE_LIST_TIME + soon, "names that advance slowly: {wait:?}");
        // Most of the names are before the list.
        let wait = longest_wait(u64::MAX / 16 * 15, 1 << 37);
        assert!(wait <= WHOLE_LIST_TIME / 16 + soon, "the end of a list: {wait:?}");
    }

    /// 10⁸ fragments, in the smallest pages, each of which takes 20 ms.
    #[test]
    fn an_honest_peer_under_load_completes_a_long_list() {
        const FRAGMENTS: u64 = 100_000_000;
        const PAGE: u64 = 64;
        let mut check = ListCheck::new(name(0));
        for page in 1..=FRAGMENTS / PAGE {
            check.waited += Duration::from_millis(20);
            assert!(check.waited <= check.allowed(), "page {page}: {:?}", check.waited);
            check.listed = page * PAGE;
            check.after = name(page * PAGE * (u64::MAX / FRAGMENTS));
        }
    }
}
