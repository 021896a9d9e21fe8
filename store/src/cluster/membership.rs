//! Who takes part, in the catalog's documents.
//!
//! ```text
//! members/ID    where it listens, its domain and weight      written when it joins or changes
//! alive/ID      how full it is                               with a time to live, renewed by its heartbeat
//! suspects/ID   how often others have had wrong bytes of it
//! health/losses how many peers were ever called lost
//! ```
//!
//! A peer that stops beating is *down* after [`HEARTBEAT_TTL_SECONDS`]: it keeps its rank, so that nothing moves because of a
//! reboot. The keeper notes since when, and after a settable time calls it *lost*: from then on it has no rank, and
//! repair makes up for what it held. One that comes back is a member as before, with all that it has.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::placement::members::{Member, MemberState};
use crate::documents::{Change, Documents, Query, View};
use crate::error::{Error, Result};
use crate::id::PeerId;

/// How often a peer tells that it is there.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// How long that is believed, in seconds.
pub const HEARTBEAT_TTL_SECONDS: u32 = 7;

const MEMBERS: &str = "members/";
const ALIVE: &str = "alive/";
const SUSPECTS: &str = "suspects/";

/// How many peers were ever called lost. What is stored and has no name yet is not seen by a repair, so who publishes
/// it looks whether one was lost since.
pub(crate) const LOSSES: &str = "health/losses";

/// What the document says, as far as it is there.
pub(crate) fn losses(view: &View) -> Result<u64> {
    Ok(view.get(LOSSES)?.unwrap_or(0))
}

/// A new capacity changes a peer's weight, and with it what it is to hold, only if it differs by more than
/// one part in so many.
const WEIGHT_STEP: u64 = 4;

fn member_key(id: &PeerId) -> String {
    format!("{MEMBERS}{id}")
}

fn alive_key(id: &PeerId) -> String {
    format!("{ALIVE}{id}")
}

fn suspect_key(id: &PeerId) -> String {
    format!("{SUSPECTS}{id}")
}

/// What a peer says of itself when it joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Who it is.
    pub id: PeerId,
    /// Where others reach it.
    pub address: String,
    /// What it fails together with.
    pub domain: String,
}

/// What a heartbeat tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerStats {
    /// Bytes that it may hold.
    pub capacity: u64,
    /// Bytes that it holds.
    pub used: u64,
    /// Bytes that clients have reserved.
    pub reserved: u64,
    /// Fragments that it holds.
    pub fragments: u64,
    /// Processes that want to run on its host, as the kernel counts them, times 100.
    pub load: u64,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct MemberDocument {
    address: String,
    domain: String,
    weight: u64,
    /// Seconds since 1970.
    joined: u64,
    draining: bool,
    /// Since when it is down, as the keeper saw it.
    down_since: Option<u64>,
    lost: bool,
}

#[derive(Default, Serialize, Deserialize)]
struct SuspectDocument {
    wrong: u64,
    last: u64,
}

/// How a peer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It beats.
    Up,
    /// It does not beat.
    Down,
    /// It is being emptied.
    Draining,
    /// It has not beaten for so long that what it held is made again elsewhere.
    Lost,
}

impl Health {
    /// In a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Health::Up => "up",
            Health::Down => "down",
            Health::Draining => "draining",
            Health::Lost => "lost",
        }
    }
}

/// Everything that is known of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Who it is.
    pub id: PeerId,
    /// Where others reach it.
    pub address: String,
    /// What it fails together with.
    pub domain: String,
    /// Its share of the blobs.
    pub weight: u64,
    /// How it does.
    pub health: Health,
    /// Whether it is to be emptied, also while it is down.
    pub draining: bool,
    /// When it joined: seconds since 1970.
    pub joined: u64,
    /// Since when it is down, as far as that was noted.
    pub down_since: Option<u64>,
    /// What its last heartbeat told, if that is not too old.
    pub stats: Option<PeerStats>,
    /// How often it has given wrong bytes.
    pub wrong: u64,
}

impl Peer {
    /// As placement and transport see it; nothing if it is lost.
    pub fn member(&self) -> Option<Member> {
        let state = match self.health {
            Health::Up => MemberState::Up,
            Health::Down => MemberState::Down,
            Health::Draining => MemberState::Draining,
            Health::Lost => return None,
        };
        Some(Member {
            id: self.id,
            address: self.address.clone(),
            weight: self.weight,
            domain: self.domain.clone(),
            state,
        })
    }
}

/// All peers that ever joined and were not removed, and the revision of this view.
pub fn peers(documents: &dyn Documents) -> Result<(Vec<Peer>, u64)> {
    let folders = [MEMBERS, ALIVE, SUSPECTS].map(Query::prefix);
    let view = documents.read(&folders)?;
    let members = view.under::<MemberDocument>(MEMBERS)?.into_iter();
    let all =
        members.map(|(id, document)| peer(&view, id.parse()?, document)).collect::<Result<_>>();
    Ok((all?, view.revision))
}

fn peer(view: &View, id: PeerId, document: MemberDocument) -> Result<Peer> {
    let stats = view.get::<PeerStats>(&alive_key(&id))?;
    let health = match stats {
        _ if document.lost => Health::Lost,
        None => Health::Down,
        Some(_) if document.draining => Health::Draining,
        Some(_) => Health::Up,
    };
    Ok(Peer {
        id,
        address: document.address,
        domain: document.domain,
        weight: document.weight,
        health,
        draining: document.draining,
        joined: document.joined,
        down_since: document.down_since.filter(|_| stats.is_none()),
        stats,
        wrong: view.get::<SuspectDocument>(&suspect_key(&id))?.unwrap_or_default().wrong,
    })
}

/// Tells that a peer is there, and makes it a member if it is none.
pub fn send_heartbeat(
    documents: &dyn Documents,
    who: &Announcement,
    stats: &PeerStats,
    now: u64,
) -> Result<()> {
    let key = member_key(&who.id);
    loop {
        let view = documents.read(&[Query::key(&key)])?;
        let known = view.get::<MemberDocument>(&key)?;
        let weight = |known: &MemberDocument| {
            let difference = known.weight.abs_diff(stats.capacity);
            let same = difference <= known.weight / WEIGHT_STEP;
            if same { known.weight } else { stats.capacity }
        };
        let wanted = MemberDocument {
            address: who.address.clone(),
            domain: who.domain.clone(),
            weight: known.as_ref().map_or(stats.capacity, weight),
            joined: known.as_ref().map_or(now, |known| known.joined),
            draining: known.as_ref().is_some_and(|known| known.draining),
            down_since: None,
            lost: false,
        };
        let change = if known.as_ref() == Some(&wanted) {
            Change { relaxed: true, ..Change::default() }
        } else {
            let relies_on = vec![(key.clone(), view.version(&key))];
            Change { relies_on, ..Change::default() }.put(&key, &wanted)
        };
        if documents.commit(&change.put_for(HEARTBEAT_TTL_SECONDS, alive_key(&who.id), stats))? {
            return Ok(());
        }
    }
}

/// Tells that a peer goes in good order: it is down at once.
pub fn leave(documents: &dyn Documents, id: &PeerId) -> Result<()> {
    let change = Change { relaxed: true, ..Change::default() };
    documents.commit(&change.remove(Query::Key(alive_key(id)))).map(drop)
}

/// Changes a member's document, if there is one.
fn update(
    documents: &dyn Documents,
    id: &PeerId,
    edit: impl Fn(MemberDocument) -> MemberDocument,
) -> Result<()> {
    let key = member_key(id);
    loop {
        let view = documents.read(&[Query::key(&key), Query::key(LOSSES)])?;
        let Some(document) = view.get::<MemberDocument>(&key)? else {
            return Err(Error::NoPeer { peer: id.to_string() });
        };
        let edited = edit(document.clone());
        if edited == document {
            return Ok(());
        }
        let relies_on = [key.as_str(), LOSSES].map(|key| (key.to_owned(), view.version(key)));
        let change = Change { relies_on: relies_on.into(), ..Change::default() };
        let change = match edited.lost && !document.lost {
            true => change.put(LOSSES, &(losses(&view)? + 1)),
            false => change,
        };
        if documents.commit(&change.put(&key, &edited))? {
            return Ok(());
        }
    }
}

/// Has a peer emptied, or not any more.
pub fn drain(documents: &dyn Documents, id: &PeerId, draining: bool) -> Result<()> {
    update(documents, id, |document| MemberDocument { draining, ..document })
}

/// Calls a peer lost at once: its disk is known to be gone.
pub fn lose(documents: &dyn Documents, id: &PeerId) -> Result<()> {
    update(documents, id, |document| MemberDocument { lost: true, ..document })
}

/// Removes a peer that is empty or lost from the members.
pub fn forget(documents: &dyn Documents, id: &PeerId) -> Result<()> {
    let keys = [member_key(id), alive_key(id), suspect_key(id)];
    let change =
        keys.into_iter().fold(Change::default(), |change, key| change.remove(Query::Key(key)));
    documents.commit(&change).map(drop)
}

/// Notes that a peer has given wrong bytes so often since the last note.
pub fn suspect(documents: &dyn Documents, id: &PeerId, wrong: u64, now: u64) -> Result<()> {
    let key = suspect_key(id);
    loop {
        let view = documents.read(&[Query::key(&key)])?;
        let known = view.get::<SuspectDocument>(&key)?.unwrap_or_default();
        let noted = SuspectDocument { wrong: known.wrong + wrong, last: now };
        let relies_on = vec![(key.clone(), view.version(&key))];
        if documents
            .commit(&Change { relies_on, relaxed: true, ..Change::default() }.put(&key, &noted))?
        {
            return Ok(());
        }
    }
}

/// What the last repair of everything found and left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastRepair {
    /// When it ended: seconds since 1970.
    pub time: u64,
    /// Blobs that names refer to.
    pub blobs: u64,
    /// Of them, those that still have less than their redundancy.
    pub under: u64,
    /// Of them, those that cannot be read.
    pub unreadable: u64,
    /// How many more losses the worst of them survives; nothing if there are none.
    pub survives: Option<i64>,
}

const LAST_REPAIR: &str = "health/repair";

/// What the last repair told.
pub fn last_repair(documents: &dyn Documents) -> Result<Option<LastRepair>> {
    documents.read(&[Query::key(LAST_REPAIR)])?.get(LAST_REPAIR)
}

/// Notes what a repair has found.
pub fn note_repair(documents: &dyn Documents, repair: &LastRepair) -> Result<()> {
    documents.commit(&Change::default().put(LAST_REPAIR, repair)).map(drop)
}

/// What the keeper of a cluster does about its members: notes since when one is down, and calls it lost after
/// `lost_after`. Returns those that were lost just now.
pub fn watch_over(
    documents: &dyn Documents,
    lost_after: Duration,
    now: u64,
) -> Result<Vec<PeerId>> {
    let mut lost = Vec::new();
    for peer in peers(documents)?.0.into_iter().filter(|peer| peer.health == Health::Down) {
        let since = peer.down_since.unwrap_or(now);
        let is_lost = now.saturating_sub(since) >= lost_after.as_secs();
        update(documents, &peer.id, |document| MemberDocument {
            down_since: Some(since),
            lost: is_lost,
            ..document
        })?;
        lost.extend(is_lost.then_some(peer.id));
    }
    Ok(lost)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tempfile::TempDir;

    use super::{
        Announcement, Health, PeerStats, drain, forget, leave, peers, send_heartbeat, suspect,
        watch_over,
    };
    use crate::documents::{Documents, SqliteDocuments};
    use crate::id::PeerId;

    const LOST_AFTER: Duration = Duration::from_secs(60);

    fn place() -> (TempDir, SqliteDocuments) {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        let documents = SqliteDocuments::open(&path).unwrap();
        (dir, documents)
    }

    fn who(n: u8) -> Announcement {
        let address = format!("10.0.0.{n}:7500");
        Announcement { id: PeerId::from_bytes([n; 16]), address, domain: "rack".into() }
    }

    const fn stats(capacity: u64) -> PeerStats {
        PeerStats { capacity, used: 1, reserved: 2, fragments: 3, load: 4 }
    }

    fn health(documents: &dyn Documents, n: u8) -> Option<Health> {
        let (all, _) = peers(documents).unwrap();
        all.into_iter().find(|peer| peer.id == who(n).id).map(|peer| peer.health)
    }

    #[test]
    fn a_peer_is_up_then_down_then_lost_and_back_again() {
        let (_dir, documents) = place();
        send_heartbeat(&documents, &who(1), &stats(100), 1000).unwrap();
        send_heartbeat(&documents, &who(2), &stats(100), 1000).unwrap();
        assert_eq!(health(&documents, 1), Some(Health::Up));
        assert!(watch_over(&documents, LOST_AFTER, 1000).unwrap().is_empty());
        leave(&documents, &who(1).id).unwrap();
        assert_eq!(health(&documents, 1), Some(Health::Down));
        assert!(watch_over(&documents, LOST_AFTER, 1010).unwrap().is_empty());
        assert!(watch_over(&documents, LOST_AFTER, 1069).unwrap().is_empty());
        assert_eq!(peers(&documents).unwrap().0[0].down_since, Some(1010), "the first who saw it");
        // It flaps: the time begins anew.
        send_heartbeat(&documents, &who(1), &stats(100), 1069).unwrap();
        leave(&documents, &who(1).id).unwrap();
        assert!(watch_over(&documents, LOST_AFTER, 1080).unwrap().is_empty());
        assert_eq!(watch_over(&documents, LOST_AFTER, 1140).unwrap(), [who(1).id]);
        assert!(watch_over(&documents, LOST_AFTER, 1150).unwrap().is_empty(), "once");
        assert_eq!(health(&documents, 1), Some(Health::Lost));
        assert_eq!(health(&documents, 2), Some(Health::Up));
        assert!(peers(&documents).unwrap().0[0].member().is_none());
        send_heartbeat(&documents, &who(1), &stats(100), 1200).unwrap();
        assert_eq!(health(&documents, 1), Some(Health::Up));
        assert_eq!(peers(&documents).unwrap().0[0].joined, 1000);
    }

    #[test]
    fn a_little_more_room_moves_nothing() {
        let (_dir, documents) = place();
        let weight = || peers(&documents).unwrap().0[0].weight;
        send_heartbeat(&documents, &who(1), &stats(1000), 1).unwrap();
        for capacity in [1001, 900, 1200, 1250] {
            send_heartbeat(&documents, &who(1), &stats(capacity), 1).unwrap();
            assert_eq!(weight(), 1000, "{capacity}");
        }
        send_heartbeat(&documents, &who(1), &stats(2000), 1).unwrap();
        assert_eq!(weight(), 2000);
    }

    #[test]
    fn draining_outlives_a_restart_and_ends_when_it_is_told() {
        let (_dir, documents) = place();
        send_heartbeat(&documents, &who(1), &stats(100), 1).unwrap();
        drain(&documents, &who(1).id, true).unwrap();
        leave(&documents, &who(1).id).unwrap();
        send_heartbeat(&documents, &who(1), &stats(100), 2).unwrap();
        assert_eq!(health(&documents, 1), Some(Health::Draining));
        drain(&documents, &who(1).id, false).unwrap();
        assert_eq!(health(&documents, 1), Some(Health::Up));
        drain(&documents, &who(9).id, true).unwrap_err();
        forget(&documents, &who(1).id).unwrap();
        assert_eq!(health(&documents, 1), None);
    }

    #[test]
    fn suspicions_add_up() {
        let (_dir, documents) = place();
        send_heartbeat(&documents, &who(1), &stats(100), 1).unwrap();
        suspect(&documents, &who(1).id, 2, 5).unwrap();
        suspect(&documents, &who(1).id, 3, 6).unwrap();
        assert_eq!(peers(&documents).unwrap().0[0].wrong, 5);
    }
}
