//! When the supervisor repairs: a decision about what it has seen, without effects.
//!
//! ```text
//!            a change                 no change for SETTLE_TIME
//! settled ──────────────► changing ─────────────────────────────► settled ─► repair, if due
//!                           │  ▲ another change
//!                           │  └─┘
//!                           └─ for MAX_UNREST ─► repair, if due
//! ```
//!
//! A peer writes its own member document and is not trusted. It may change the document again and
//! again, so a repair does not wait for the members to settle for longer than [`MAX_UNREST`].

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::cluster::membership::{Health, Peer};
use crate::id::PeerId;

/// How long the members must stay the same before a repair starts: peers of one rack start one
/// after the other.
const SETTLE_TIME: Duration = Duration::from_secs(6);

/// How long a repair waits for the members to settle.
const MAX_UNREST: Duration = Duration::from_secs(60);

/// The interval between repairs when nothing has changed.
const FULL_SCAN_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// The retry interval at the start, and again when a peer is back or the members change. Each
/// repair doubles it, so the first retry comes after twice this time.
const FIRST_RETRY: Duration = Duration::from_secs(10);

/// The longest retry interval.
const LONGEST_RETRY: Duration = Duration::from_secs(600);

/// What a repair depends on: of each peer its id, weight, domain, whether it is lost, and whether
/// it is draining. A peer that only goes down changes nothing.
type Situation = Vec<(PeerId, u64, String, bool, bool)>;

/// The bad fragments that each peer has reported last. A peer that is not in it has reported none.
type BadFragments = HashMap<PeerId, u64>;

/// The times of the first and the last change of members that have not settled.
#[derive(Clone, Copy)]
struct Unrest {
    first: Instant,
    last: Instant,
}

/// The last repair.
struct Done {
    /// What was seen before it began.
    situation: Situation,
    bad: BadFragments,
    /// When it ended.
    at: Instant,
    is_incomplete: bool,
}

/// Decides when a repair is due.
pub(super) struct RepairSchedule {
    seen: Option<Situation>,
    unrest: Option<Unrest>,
    bad: BadFragments,
    /// The number of peers that are down.
    down: usize,
    done: Option<Done>,
    retry: Duration,
}

impl RepairSchedule {
    pub(super) fn new() -> RepairSchedule {
        let (seen, unrest, bad, down) = (None, None, BadFragments::new(), 0);
        RepairSchedule { seen, unrest, bad, down, done: None, retry: FIRST_RETRY }
    }

    /// Forgets the members and the last repair, because another supervisor acts.
    pub(super) fn forget(&mut self) {
        (self.seen, self.unrest, self.done) = (None, None, None);
    }

    /// Notes the state of the peers.
    pub(super) fn note(&mut self, peers: &[Peer], now: Instant) {
        note_bad(&mut self.bad, peers);
        let down = peers.iter().filter(|peer| peer.health == Health::Down).count();
        if down < std::mem::replace(&mut self.down, down) {
            self.retry = FIRST_RETRY;
        }
        let situation = Some(situation(peers));
        if self.seen != situation {
            self.seen = situation;
            self.retry = FIRST_RETRY;
            let first = self.unrest.filter(|unrest| !unrest.is_over(now)).map(|one| one.first);
            self.unrest = Some(Unrest { first: first.unwrap_or(now), last: now });
        }
    }

    /// Whether to repair. `has_available` tells whether a snapshot is only *available*.
    pub(super) fn is_due(&self, now: Instant, has_available: impl FnOnce() -> bool) -> bool {
        let Some(seen) = &self.seen else { return false };
        if self.unrest.is_some_and(|unrest| !unrest.permits_repair(now)) {
            return false;
        }
        let Some(done) = &self.done else { return true };
        let elapsed = now - done.at;
        done.situation != *seen
            || elapsed >= FULL_SCAN_INTERVAL
            || (elapsed >= self.retry
                && (done.is_incomplete || done.bad != self.bad || has_available()))
    }

    /// Notes that a repair has ended that was due when the peers were noted last.
    pub(super) fn note_repair(&mut self, is_incomplete: bool, now: Instant) {
        let Some(situation) = self.seen.clone() else { return };
        self.done = Some(Done { situation, bad: self.bad.clone(), at: now, is_incomplete });
        self.unrest = None;
        self.retry = (self.retry * 2).min(LONGEST_RETRY);
    }
}

impl Unrest {
    /// Whether the members have settled.
    fn is_over(&self, now: Instant) -> bool {
        now - self.last >= SETTLE_TIME
    }

    fn permits_repair(&self, now: Instant) -> bool {
        self.is_over(now) || now - self.first >= MAX_UNREST
    }
}

fn situation(peers: &[Peer]) -> Situation {
    let one = |peer: &Peer| {
        let (domain, is_lost) = (peer.domain.clone(), peer.health == Health::Lost);
        (peer.id, peer.weight, domain, is_lost, peer.draining)
    };
    peers.iter().map(one).collect()
}

/// Notes the bad fragments that each peer has found. Only a peer that is up reports them. The
/// numbers are not added up: a peer may invent one that hides those of the others in a sum.
fn note_bad(bad: &mut BadFragments, peers: &[Peer]) {
    for (id, found) in peers.iter().filter_map(|peer| Some((peer.id, peer.stats?.bad))) {
        if bad.get(&id).copied().unwrap_or(0) != found {
            bad.insert(id, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{FULL_SCAN_INTERVAL, MAX_UNREST, RepairSchedule};
    use crate::cluster::membership::{Health, Peer, PeerStats};
    use crate::id::PeerId;

    const POLL: Duration = Duration::from_secs(2);

    /// A cluster of three peers, and a supervisor that looks every two seconds.
    struct Scene {
        schedule: RepairSchedule,
        peers: Vec<Peer>,
        start: Instant,
        now: Instant,
        has_available: bool,
    }

    fn peer(number: u8) -> Peer {
        Peer {
            id: PeerId::from_bytes([number; 16]),
            address: format!("10.0.0.{number}:7500"),
            domain: number.to_string(),
            weight: 100,
            health: Health::Up,
            draining: false,
            joined: 1,
            down_since: None,
            stats: Some(PeerStats::default()),
            wrong: 0,
        }
    }

    impl Scene {
        fn new() -> Scene {
            let (schedule, start) = (RepairSchedule::new(), Instant::now());
            let peers = (0..3).map(peer).collect();
            Scene { schedule, peers, start, now: start, has_available: false }
        }

        /// A cluster after its first repair, with nothing left to do.
        fn repaired() -> Scene {
            let mut scene = Scene::new();
            assert_eq!(scene.next_repair(60), Some(6), "when the members have settled");
            scene.end_repair(false);
            assert_eq!(scene.next_repair(3600), None);
            scene
        }

        fn look(&mut self) -> bool {
            self.schedule.note(&self.peers, self.now);
            self.schedule.is_due(self.now, || self.has_available)
        }

        /// The seconds until a repair is due, at most `most`. `change` is called before each look.
        fn next_repair_with(
            &mut self,
            most: u64,
            change: impl Fn(u64, &mut [Peer]),
        ) -> Option<u64> {
            let begin = self.now;
            loop {
                let seconds = (self.now - begin).as_secs();
                change(seconds, &mut self.peers);
                if self.look() {
                    return Some(seconds);
                }
                if seconds >= most {
                    return None;
                }
                self.now += POLL;
            }
        }

        fn next_repair(&mut self, most: u64) -> Option<u64> {
            self.next_repair_with(most, |_, _| ())
        }

        fn end_repair(&mut self, is_incomplete: bool) {
            self.schedule.note_repair(is_incomplete, self.now);
        }

        fn set_bad(&mut self, peer: usize, bad: u64) {
            self.peers[peer].stats = Some(PeerStats { bad, ..PeerStats::default() });
        }
    }

    /// Its document has another weight every four seconds.
    fn toggle(seconds: u64, peers: &mut [Peer]) {
        peers[2].weight = 100 + seconds / 4 % 2;
    }

    #[test]
    fn a_peer_that_changes_its_document_again_and_again_delays_a_repair_for_a_minute() {
        let minute = MAX_UNREST.as_secs();
        let mut scene = Scene::new();
        assert_eq!(scene.next_repair_with(3600, toggle), Some(minute), "the first repair");
        scene.end_repair(false);
        scene.peers[0].health = Health::Lost;
        assert_eq!(scene.next_repair_with(3600, toggle), Some(minute), "after a loss");
        // Something is left to do, and the document is often as it was at the last repair.
        scene.end_repair(true);
        let next = scene.next_repair_with(3600, toggle);
        assert!(next.is_some_and(|seconds| seconds <= 2 * minute), "{next:?}");
    }

    #[test]
    fn peers_that_join_one_after_the_other_cause_one_repair() {
        let mut scene = Scene::repaired();
        let join = |seconds: u64, peers: &mut [Peer]| {
            for (at, peer) in peers.iter_mut().enumerate() {
                peer.draining = seconds >= 4 * at as u64;
            }
        };
        assert_eq!(scene.next_repair_with(3600, join), Some(8 + 6));
        scene.end_repair(false);
        assert_eq!(scene.next_repair(3600), None);
        // The next change has all the time to settle again.
        scene.peers[0].draining = false;
        assert_eq!(scene.next_repair(3600), Some(6));
    }

    #[test]
    fn a_number_that_a_peer_invents_hides_no_damage_that_others_find() {
        let mut scene = Scene::repaired();
        scene.set_bad(0, u64::MAX);
        assert_eq!(scene.next_repair(3600), Some(0));
        scene.end_repair(false);
        assert_eq!(scene.next_repair(3600), None);
        scene.set_bad(1, 1);
        assert_eq!(scene.next_repair(3600), Some(0), "the sum of both exceeds 64 bits");
        scene.end_repair(false);
        scene.set_bad(0, u64::MAX - 1);
        scene.set_bad(1, 2);
        assert!(scene.next_repair(3600).is_some(), "the sum is the same");
    }

    #[test]
    fn a_repair_is_repeated_while_something_is_left_and_less_and_less_often() {
        let mut scene = Scene::repaired();
        scene.has_available = true;
        assert_eq!(scene.next_repair(60), Some(0));
        let mut intervals = Vec::new();
        for _ in 0..6 {
            scene.end_repair(true);
            intervals.push(scene.next_repair(3600).unwrap());
        }
        assert_eq!(intervals, [40, 80, 160, 320, 600, 600]);
        scene.end_repair(true);
        scene.peers[1].health = Health::Down;
        assert_eq!(scene.next_repair(100), None, "a peer that only goes down is awaited");
        scene.peers[1].health = Health::Up;
        assert_eq!(scene.next_repair(100), Some(0), "it is back, and the last repair is long ago");
    }

    #[test]
    fn everything_is_repaired_once_a_day_and_by_each_new_leader() {
        let mut scene = Scene::repaired();
        let day = FULL_SCAN_INTERVAL.as_secs();
        assert!(scene.next_repair(2 * day).is_some());
        assert_eq!((scene.now - scene.start).as_secs(), 6 + day);
        scene.end_repair(false);
        scene.schedule.forget();
        assert_eq!(scene.next_repair(60), Some(6));
    }
}
