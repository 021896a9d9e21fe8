//! Declares peers lost that have been down for too long.
//!
//! A supervisor measures by its own boot clock for how long it has seen a peer down. The wall clock
//! decides nothing: a step of it would make all peers that are down lost at once. The time that a
//! member's document has (`down_since`) is only shown to operators.
//!
//! What was seen is in memory. So a supervisor that starts to act begins to measure again, which
//! delays a loss and never brings one forward.

use std::collections::HashMap;
use std::time::Duration;

use super::{FOLDERS, Health, MemberDocument, Peer, alive_key, peers_in, update_unless_alive};
use crate::clock;
use crate::documents::{Documents, Query};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::sys::time_since_boot;

/// The longest time between two looks that counts as time for which a peer was seen down. A
/// supervisor that was stopped for longer does not know what happened meanwhile.
const MAX_GAP: Duration = Duration::from_secs(30);

/// The time of a look, on two clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LookTime {
    /// The time since the boot of this host. Nobody can set this clock.
    pub(crate) since_boot: Duration,
    /// Seconds since 1970.
    pub(crate) wall: u64,
}

impl LookTime {
    /// The current time of this host.
    pub(crate) fn now() -> LookTime {
        LookTime { since_boot: time_since_boot(), wall: clock::now() }
    }
}

/// Watches the peers that are down, for an acting supervisor.
pub(crate) struct LossDetector {
    lost_after: Duration,
    /// When each peer that is down was first seen down: the time since the boot.
    seen_down: HashMap<PeerId, Duration>,
    /// The time of the last look since the boot.
    last_look: Duration,
}

impl LossDetector {
    /// A peer that is seen down for `lost_after` is lost.
    pub(crate) fn new(lost_after: Duration) -> LossDetector {
        LossDetector { lost_after, seen_down: HashMap::new(), last_look: Duration::ZERO }
    }

    /// Forgets what was seen, because another supervisor acts.
    pub(crate) fn forget(&mut self) {
        self.seen_down.clear();
    }

    /// Looks at all peers. Notes since when a peer is down, and declares it lost if it was seen down
    /// for long enough. Returns the peers that this call declared lost.
    pub(crate) fn look(&mut self, documents: &dyn Documents, now: LookTime) -> Result<Vec<PeerId>> {
        let view = documents.read(&FOLDERS.map(Query::prefix))?;
        let mut down = peers_in(&view)?;
        down.retain(|peer| peer.health == Health::Down);
        self.measure(&down, now.since_boot);
        let mut lost = Vec::new();
        for peer in down {
            let heartbeat = view.version(&alive_key(&peer.id));
            // A time in the future is that of a clock that was set back.
            let since = peer.down_since.unwrap_or(now.wall).min(now.wall);
            let is_lost = self.is_lost(&peer.id, now.since_boot);
            // A heartbeat that arrives meanwhile would leave a peer that is up marked as down.
            let note =
                |document| MemberDocument { down_since: Some(since), lost: is_lost, ..document };
            let is_noted = match update_unless_alive(documents, &peer.id, Some(heartbeat), note) {
                // The peer was forgotten meanwhile. The others are looked at all the same.
                Err(Error::NoPeer { .. }) => false,
                noted => noted?,
            };
            lost.extend((is_noted && is_lost).then_some(peer.id));
        }
        Ok(lost)
    }

    /// Updates when the peers that are down were first seen down.
    fn measure(&mut self, down: &[Peer], now: Duration) {
        if now.saturating_sub(self.last_look) > MAX_GAP {
            self.forget();
        }
        self.last_look = now;
        let first_seen = |peer: &Peer| {
            // A heartbeat removes the note: the peer was up since the last look.
            let seen = self.seen_down.get(&peer.id).filter(|_| peer.down_since.is_some());
            (peer.id, seen.copied().unwrap_or(now))
        };
        self.seen_down = down.iter().map(first_seen).collect();
    }

    /// Whether a peer that is down was seen down for long enough.
    fn is_lost(&self, peer: &PeerId, now: Duration) -> bool {
        let seen = self.seen_down.get(peer);
        seen.is_some_and(|since| now.saturating_sub(*since) >= self.lost_after)
    }
}
