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

/// Checks the pages of one peer's list.
pub(crate) struct ListCheck {
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
        ListCheck { after, listed: 0, waited: Duration::ZERO, patience: PATIENCE }
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
        let allowed = self.patience + Duration::from_secs(self.listed / SLOWEST_RATE);
        let begin = Instant::now();
        let page = timeout(allowed.saturating_sub(self.waited), page).await;
        self.waited += begin.elapsed();
        page.map_err(|_| {
            let (peer, kind) = (peer.to_string(), ErrorKind::Unavailable);
            Error::Peer { peer, kind, reason: "it sends its list too slowly".into() }
        })
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
        let [covered, ..] = last.as_bytes().as_chunks::<8>().0 else { unreachable!("32 bytes") };
        let possible = (MAX_PEER_FRAGMENTS * u128::from(u64::from_be_bytes(*covered))) >> 64;
        if u128::from(self.listed) > possible + u128::from(UNEVEN_FRAGMENTS) {
            return wrong("it lists more fragments than a peer can have");
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use super::ListCheck;
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
}
