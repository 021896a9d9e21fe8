//! The states of peers.

use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tempfile::TempDir;

use super::loss_detector::{LookTime, LossDetector};
use super::view::MembersView;
use super::{
    Announcement, Health, LOSSES, PeerStats, SUPERVISOR, check_no_data, drain, forget, leave, lose,
    peers, send_heartbeat, suspect,
};
use crate::cluster::placement::members::MemberState;
use crate::documents::{
    Change, Changed, Documents, Query, SqliteDocuments, View, try_lock, unlock,
};
use crate::error::{Error, Result};
use crate::id::PeerId;

const LOST_AFTER: Duration = Duration::from_secs(60);

fn documents() -> (TempDir, SqliteDocuments) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("catalog.db");
    SqliteDocuments::create(&path).unwrap();
    let documents = SqliteDocuments::open(&path).unwrap();
    (dir, documents)
}

fn announcement(n: u8) -> Announcement {
    let address = format!("10.0.0.{n}:7500");
    Announcement { id: PeerId::from_bytes([n; 16]), address, domain: "rack".into() }
}

const fn stats(capacity: u64) -> PeerStats {
    let (used, reserved, fragments, load) = (1, 2, 3, 4);
    PeerStats { capacity, used, reserved, fragments, load, scrubbed: Some(5), bad: 6 }
}

fn health(documents: &dyn Documents, n: u8) -> Option<Health> {
    let (all, _) = peers(documents).unwrap();
    all.into_iter().find(|peer| peer.id == announcement(n).id).map(|peer| peer.health)
}

fn detector() -> LossDetector {
    LossDetector::new(LOST_AFTER)
}

/// Looks at a time that both clocks show.
fn look(detector: &mut LossDetector, documents: &dyn Documents, seconds: u64) -> Vec<PeerId> {
    look_at(detector, documents, seconds, seconds)
}

fn look_at(
    detector: &mut LossDetector,
    documents: &dyn Documents,
    since_boot: u64,
    wall: u64,
) -> Vec<PeerId> {
    let now = LookTime { since_boot: Duration::from_secs(since_boot), wall };
    detector.look(documents, now).unwrap()
}

/// Looks every two seconds, and at the end. Asserts that no look but the last declares a peer lost.
fn look_until(
    detector: &mut LossDetector,
    documents: &dyn Documents,
    times: RangeInclusive<u64>,
) -> Vec<PeerId> {
    for seconds in (*times.start()..*times.end()).step_by(2) {
        assert_eq!(look(detector, documents, seconds), [], "after {seconds} s");
    }
    look(detector, documents, *times.end())
}

#[test]
fn a_peer_is_up_then_down_then_lost_and_back_again() {
    let (_dir, documents) = documents();
    send_heartbeat(&documents, &announcement(1), &stats(100), 1000).unwrap();
    send_heartbeat(&documents, &announcement(2), &stats(100), 1000).unwrap();
    assert_eq!(health(&documents, 1), Some(Health::Up));
    let mut detector = detector();
    assert_eq!(look(&mut detector, &documents, 1000), []);
    leave(&documents, &announcement(1).id).unwrap();
    assert_eq!(health(&documents, 1), Some(Health::Down));
    assert_eq!(look_until(&mut detector, &documents, 1010..=1069), []);
    assert_eq!(
        peers(&documents).unwrap().0[0].down_since,
        Some(1010),
        "the time when it was first seen down"
    );
    // The peer comes back between two looks: its time as down starts again.
    send_heartbeat(&documents, &announcement(1), &stats(100), 1069).unwrap();
    leave(&documents, &announcement(1).id).unwrap();
    assert_eq!(look_until(&mut detector, &documents, 1080..=1140), [announcement(1).id]);
    assert_eq!(look(&mut detector, &documents, 1150), [], "it is declared lost once");
    assert_eq!(health(&documents, 1), Some(Health::Lost));
    assert_eq!(health(&documents, 2), Some(Health::Up));
    assert!(peers(&documents).unwrap().0[0].member().is_none());
    send_heartbeat(&documents, &announcement(1), &stats(100), 1200).unwrap();
    assert_eq!(health(&documents, 1), Some(Health::Up));
    assert_eq!(peers(&documents).unwrap().0[0].joined, 1000);
}

/// A peer that was never up again, and a supervisor that has seen it down once.
fn a_peer_that_is_down(documents: &dyn Documents) -> LossDetector {
    send_heartbeat(documents, &announcement(1), &stats(100), 1000).unwrap();
    leave(documents, &announcement(1).id).unwrap();
    let mut detector = detector();
    assert_eq!(look(&mut detector, documents, 1000), []);
    detector
}

#[test]
fn a_step_of_the_wall_clock_makes_no_peer_lost() {
    let (_dir, documents) = documents();
    let mut detector = a_peer_that_is_down(&documents);
    let day = 24 * 3600;
    assert_eq!(look_at(&mut detector, &documents, 1002, 1002 + day), []);
    assert_eq!(look_at(&mut detector, &documents, 1004, 4), [], "it was set back");
    for seconds in (1006..1060).step_by(2) {
        assert_eq!(look_at(&mut detector, &documents, seconds, seconds + day), [], "{seconds}");
    }
    let lost = look_at(&mut detector, &documents, 1060, 60);
    assert_eq!(lost, [announcement(1).id], "the peer was seen down for the whole time");
}

#[test]
fn a_supervisor_that_begins_to_act_measures_again_for_how_long_peers_are_down() {
    let (_dir, documents) = documents();
    let mut first = a_peer_that_is_down(&documents);
    assert_eq!(look_until(&mut first, &documents, 1002..=1059), []);
    // The boot clock of another host.
    let mut second = detector();
    for seconds in (10..70).step_by(2) {
        assert_eq!(look_at(&mut second, &documents, seconds, 1050 + seconds), [], "{seconds}");
    }
    let noted = peers(&documents).unwrap().0[0].down_since;
    assert_eq!(noted, Some(1000), "the note of the first one stays");
    // The first one acts again for a while.
    first.forget();
    assert_eq!(look_until(&mut first, &documents, 1120..=1130), []);
    second.forget();
    assert_eq!(look_until(&mut second, &documents, 80..=140), [announcement(1).id]);
}

/// Its host slept, or it could not reach the catalog. The peer may have been up meanwhile.
#[test]
fn time_in_which_a_supervisor_did_not_look_does_not_count() {
    let (_dir, documents) = documents();
    let mut detector = a_peer_that_is_down(&documents);
    assert_eq!(look_until(&mut detector, &documents, 5000..=5059), []);
    assert_eq!(look(&mut detector, &documents, 5060), [announcement(1).id]);
}

#[test]
fn a_peer_may_be_lost_as_soon_as_it_is_seen_down() {
    let (_dir, documents) = documents();
    for (lost_after, looks) in [(0, 1), (1, 2), (2, 2), (3, 3)] {
        send_heartbeat(&documents, &announcement(1), &stats(100), 1000).unwrap();
        leave(&documents, &announcement(1).id).unwrap();
        let mut detector = LossDetector::new(Duration::from_secs(lost_after));
        let lost = (0..looks).map(|nth| look(&mut detector, &documents, 1000 + 2 * nth).len());
        let expected = (0..looks).map(|nth| usize::from(nth + 1 == looks));
        assert!(lost.eq(expected), "{lost_after} s");
    }
}

/// A supervisor whose clock was decades ahead has noted the time.
#[test]
fn a_peer_that_is_down_since_the_future_is_lost_in_time() {
    let (_dir, documents) = documents();
    send_heartbeat(&documents, &announcement(1), &stats(100), 1000).unwrap();
    leave(&documents, &announcement(1).id).unwrap();
    assert_eq!(look_at(&mut detector(), &documents, 1, u64::MAX / 2), []);
    let mut detector = detector();
    assert_eq!(look_until(&mut detector, &documents, 1010..=1069), []);
    assert_eq!(peers(&documents).unwrap().0[0].down_since, Some(1010), "the note is corrected");
    assert_eq!(look(&mut detector, &documents, 1070), [announcement(1).id]);
}

#[test]
fn a_small_change_of_capacity_keeps_the_weight() {
    let (_dir, documents) = documents();
    let weight = || peers(&documents).unwrap().0[0].weight;
    send_heartbeat(&documents, &announcement(1), &stats(1000), 1).unwrap();
    for capacity in [1001, 900, 1200, 1250] {
        send_heartbeat(&documents, &announcement(1), &stats(capacity), 1).unwrap();
        assert_eq!(weight(), 1000, "{capacity}");
    }
    send_heartbeat(&documents, &announcement(1), &stats(2000), 1).unwrap();
    assert_eq!(weight(), 2000);
}

fn epoch(documents: &dyn Documents) -> Option<u64> {
    documents.read(&[Query::key(LOSSES)]).unwrap().get(LOSSES).unwrap()
}

#[test]
fn draining_survives_a_restart_and_ends_on_request() {
    let (_dir, documents) = documents();
    send_heartbeat(&documents, &announcement(1), &stats(100), 1).unwrap();
    drain(&documents, &announcement(1).id, true).unwrap();
    leave(&documents, &announcement(1).id).unwrap();
    send_heartbeat(&documents, &announcement(1), &stats(100), 2).unwrap();
    assert_eq!(health(&documents, 1), Some(Health::Draining));
    drain(&documents, &announcement(1).id, false).unwrap();
    assert_eq!(health(&documents, 1), Some(Health::Up));
    drain(&documents, &announcement(9).id, true).unwrap_err();
    forget(&documents, &announcement(1).id).unwrap();
    assert_eq!(health(&documents, 1), None);
}

#[test]
fn a_peer_that_writes_nonsense_is_lost_and_others_are_not_affected() {
    let (_dir, documents) = documents();
    for n in [1, 2, 3] {
        send_heartbeat(&documents, &announcement(n), &stats(100), 1).unwrap();
    }
    let [first, second] = [1, 2].map(|n| announcement(n).id);
    let put = |key: String| documents.commit(&Change::default().put(key, &"nonsense")).unwrap();
    assert!(put(format!("members/{first}")) && put(format!("alive/{second}")));
    assert_eq!(
        [1, 2, 3].map(|n| health(&documents, n).unwrap()),
        [Health::Lost, Health::Down, Health::Up]
    );
    look(&mut detector(), &documents, 1);
    // Its next heartbeat, in good order, makes it a member again.
    send_heartbeat(&documents, &announcement(1), &stats(100), 2).unwrap();
    assert_eq!(health(&documents, 1), Some(Health::Up));
    assert!(put(format!("members/{first}")));
    // It is lost for good, and commits ask for what they stored on it.
    let before = epoch(&documents);
    lose(&documents, &first).unwrap();
    assert_eq!(health(&documents, 1), Some(Health::Lost));
    assert_ne!(epoch(&documents), before);
    forget(&documents, &first).unwrap();
    assert_eq!(health(&documents, 1), None);
}

/// A commit may have stored a fragment on the peer since the heartbeat that said that it is empty.
#[test]
fn forgetting_a_peer_begins_an_epoch() {
    let (_dir, documents) = documents();
    send_heartbeat(&documents, &announcement(1), &stats(100), 1).unwrap();
    let before = epoch(&documents);
    forget(&documents, &announcement(1).id).unwrap();
    assert_ne!(epoch(&documents), before);
    let after = epoch(&documents);
    forget(&documents, &announcement(1).id).unwrap();
    assert_eq!(epoch(&documents), after, "it was no member any more");
}

#[test]
fn a_peer_with_an_empty_disk_is_refused_unless_it_is_lost_or_new() {
    let (_dir, documents) = documents();
    let id = announcement(1).id;
    check_no_data(&documents, &id).unwrap();
    send_heartbeat(&documents, &announcement(1), &stats(100), 1).unwrap();
    for _ in 0..2 {
        assert!(matches!(check_no_data(&documents, &id), Err(Error::DataElsewhere { .. })));
        leave(&documents, &id).unwrap();
    }
    lose(&documents, &id).unwrap();
    check_no_data(&documents, &id).unwrap();
}

#[test]
fn counts_of_wrong_answers_add_up() {
    let (_dir, documents) = documents();
    send_heartbeat(&documents, &announcement(1), &stats(100), 1).unwrap();
    suspect(&documents, &announcement(1).id, 2, 5).unwrap();
    suspect(&documents, &announcement(1).id, 3, 6).unwrap();
    assert_eq!(peers(&documents).unwrap().0[0].wrong, 5);
}

/// Documents that call a hook after the first read, and count what is read.
struct HookedDocuments<'a> {
    documents: &'a SqliteDocuments,
    after_read: Mutex<Option<Box<dyn FnOnce() + Send + 'a>>>,
    read: AtomicUsize,
}

impl<'a> HookedDocuments<'a> {
    fn new(
        documents: &'a SqliteDocuments,
        hook: Option<Box<dyn FnOnce() + Send + 'a>>,
    ) -> HookedDocuments<'a> {
        HookedDocuments { documents, after_read: Mutex::new(hook), read: AtomicUsize::new(0) }
    }

    fn count(&self, view: &View) {
        self.read.fetch_add(view.documents.len(), Ordering::Relaxed);
    }

    /// How many documents were read since the last call.
    fn taken(&self) -> usize {
        self.read.swap(0, Ordering::Relaxed)
    }
}

impl Documents for HookedDocuments<'_> {
    fn read(&self, queries: &[Query]) -> Result<View> {
        let view = self.documents.read(queries)?;
        self.count(&view);
        if let Some(hook) = self.after_read.lock().unwrap().take() {
            hook();
        }
        Ok(view)
    }

    fn changed(&self, prefix: &str, revision: u64) -> Result<Changed> {
        let changed = self.documents.changed(prefix, revision)?;
        self.count(&changed.view);
        Ok(changed)
    }

    fn commit(&self, change: &Change) -> Result<bool> {
        self.documents.commit(change)
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool> {
        self.documents.wait(folder, revision, limit)
    }
}

/// Otherwise clients would take a peer for down that has just come back.
#[test]
fn a_peer_whose_heartbeat_arrives_while_the_supervisor_looks_is_not_marked_as_down() {
    let (_dir, documents) = documents();
    send_heartbeat(&documents, &announcement(1), &stats(100), 1000).unwrap();
    leave(&documents, &announcement(1).id).unwrap();
    let beat = || send_heartbeat(&documents, &announcement(1), &stats(100), 1001).unwrap();
    let hooked = HookedDocuments::new(&documents, Some(Box::new(beat)));
    assert_eq!(look(&mut LossDetector::new(Duration::ZERO), &hooked, 1002), []);
    let view = documents.read(&[Query::prefix("members/")]).unwrap();
    let (_, member) = &view.under::<serde_json::Value>("members/").unwrap()[0];
    assert!(member["down_since"].is_null() && member["lost"] == false, "{member}");
}

/// One supervisor reads all heartbeats, so that thousands of clients need not.
#[test]
fn a_client_of_a_supervised_cluster_reads_only_the_members_that_change() {
    const PEERS: u8 = 50;
    let (_dir, documents) = documents();
    let beat = |n| send_heartbeat(&documents, &announcement(n), &stats(100), 1000).unwrap();
    (0..PEERS).for_each(beat);
    let counting = HookedDocuments::new(&documents, None);
    let mut view = MembersView::default();
    let mut update = || {
        let has_changed = counting.wait("members", view.revision(), Duration::ZERO).unwrap();
        let members = view.update(&counting, has_changed).unwrap();
        let state = |n: u8| {
            let id = announcement(n).id;
            members.as_ref().map(|all| all.iter().find(|one| one.id == id).map(|one| one.state))
        };
        (state(1), counting.taken())
    };
    let (up, down) = (Some(Some(MemberState::Up)), Some(Some(MemberState::Down)));
    // Nobody supervises: the client reads members and heartbeats.
    assert_eq!(update(), (up, 2 * usize::from(PEERS)));
    leave(&documents, &announcement(1).id).unwrap();
    assert_eq!(update(), (down, 2 * usize::from(PEERS) - 1), "it sees a peer go down by itself");
    beat(1);
    assert!(try_lock(&documents, SUPERVISOR, "one", 60).unwrap());
    assert_eq!(update(), (up, 1 + usize::from(PEERS)), "it reads all members once");

    (0..PEERS).for_each(beat);
    assert_eq!(update(), (None, 1), "a heartbeat costs nothing");
    leave(&documents, &announcement(1).id).unwrap();
    assert_eq!(update(), (None, 1), "the supervisor has not seen it");
    look(&mut detector(), &documents, 1001);
    assert_eq!(update(), (down, 2), "one member has changed");
    beat(1);
    assert_eq!(update(), (up, 2));
    drain(&documents, &announcement(1).id, true).unwrap();
    assert_eq!(update(), (Some(Some(MemberState::Draining)), 2));
    lose(&documents, &announcement(1).id).unwrap();
    assert_eq!(update(), (Some(None), 2), "it is lost");
    forget(&documents, &announcement(1).id).unwrap();
    assert_eq!(update(), (Some(None), usize::from(PEERS)), "one is removed: all others are read");
    beat(1);
    assert_eq!(update(), (up, 2));
    unlock(&documents, SUPERVISOR, "one").unwrap();
    assert_eq!(update(), (up, 2 * usize::from(PEERS)), "the supervisor has ended");
}
