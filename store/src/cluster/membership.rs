//! The members of a cluster, as documents in the catalog.
//!
//! | document | holds | written |
//! |---|---|---|
//! | `members/ID` | address, domain, weight, draining, lost | when the peer joins or changes |
//! | `alive/ID` | capacity, used, reserved, fragments, load, scrub | by every heartbeat; it expires |
//! | `suspects/ID` | how often clients got wrong bytes from the peer | by clients |
//! | `health/losses` | how many peers were ever declared lost: the `ClusterEpoch` | with each loss |
//!
//! ```text
//! joins ──► up ──► down ── lost_after ──► lost ──► forgotten
//!            ▲      │  no heartbeat        │
//!            └──────┴──── heartbeat ───────┘        draining: up, and to be emptied
//! ```
//!
//! - A peer without a heartbeat for [`HEARTBEAT_TTL_SECONDS`] is *down*. It keeps its rank, so a
//!   reboot moves nothing.
//! - The supervisor notes since when a peer is down, and declares it *lost* when it has seen the peer
//!   down for a configurable time: see `loss_detector`. A lost peer has no rank, and repair replaces
//!   what it held.
//! - A lost peer that sends a heartbeat again is a member as before, with everything it has.
//! - A peer writes `members/ID` and `alive/ID` itself and is not trusted. A member whose document
//!   cannot be read is *lost*, and the others are not affected.
//! - While a supervisor acts, `members/ID` says whether the peer is down. So a client need not read
//!   heartbeats: see `view`.

pub(crate) mod loss_detector;
pub(crate) mod view;

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::placement::members::{Member, MemberState};
use crate::documents::{Change, Documents, Query, View};
use crate::error::{Error, Result};
use crate::id::PeerId;

/// The interval between two heartbeats of a peer.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// Seconds after the last heartbeat until a peer is down.
pub const HEARTBEAT_TTL_SECONDS: u32 = 7;

const MEMBERS: &str = "members/";
const ALIVE: &str = "alive/";
const SUSPECTS: &str = "suspects/";

/// How often the supervisor tries to change the document of a peer that is down.
const MAX_ATTEMPTS: usize = 4;

/// The folders that describe peers.
const FOLDERS: [&str; 3] = [MEMBERS, ALIVE, SUSPECTS];

/// The key of the document of the acting supervisor. It expires if it is not renewed.
pub(crate) const SUPERVISOR: &str = "leader/supervisor";

/// The key of the count of all peers that were ever declared lost.
pub(crate) const LOSSES: &str = "health/losses";

/// An epoch of the cluster. It ends when a peer is declared lost.
///
/// Repair restores only blobs that the catalog refers to. So content that is not yet published is
/// known to be whole only in the epoch in which it was stored, or in which the peers were asked for
/// all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClusterEpoch(u64);

impl ClusterEpoch {
    /// The epoch of a view that has the document [`LOSSES`]. A missing document counts as 0.
    pub(crate) fn of(view: &View) -> Result<ClusterEpoch> {
        losses(view).map(ClusterEpoch)
    }

    #[cfg(test)]
    pub(crate) const fn from_number(number: u64) -> ClusterEpoch {
        ClusterEpoch(number)
    }

    /// The count that identifies the epoch.
    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

fn losses(view: &View) -> Result<u64> {
    Ok(view.get(LOSSES)?.unwrap_or(0))
}

/// A new capacity changes a peer's weight, and with it the peer's share of the blobs, only if it
/// differs by more than this fraction: one part in `WEIGHT_STEP`.
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

/// What a peer announces about itself when it joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The peer's id.
    pub id: PeerId,
    /// The address at which clients reach it.
    pub address: String,
    /// Its failure domain: the peers that fail together.
    pub domain: String,
}

/// The figures that a heartbeat carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerStats {
    /// Bytes that the peer may hold.
    pub capacity: u64,
    /// Bytes that the peer holds.
    pub used: u64,
    /// Bytes that clients have reserved.
    pub reserved: u64,
    /// Fragments that the peer holds.
    pub fragments: u64,
    /// The load average of the peer's host, times 100.
    pub load: u64,
    /// When the peer had last read and verified all its fragments: seconds since 1970.
    #[serde(default)]
    pub scrubbed: Option<u64>,
    /// Bad fragments that the peer has ever found on its disk.
    #[serde(default)]
    pub bad: u64,
}

#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct MemberDocument {
    address: String,
    domain: String,
    weight: u64,
    /// Seconds since 1970.
    joined: u64,
    draining: bool,
    /// When the supervisor first saw it down: seconds since 1970.
    down_since: Option<u64>,
    lost: bool,
}

impl MemberDocument {
    /// Stands for a document that cannot be read.
    fn unreadable() -> MemberDocument {
        MemberDocument { lost: true, ..MemberDocument::default() }
    }
}

#[derive(Default, Serialize, Deserialize)]
struct SuspectDocument {
    wrong: u64,
    last: u64,
}

/// The state of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Its heartbeats arrive.
    Up,
    /// Its heartbeats have stopped.
    Down,
    /// It is being emptied.
    Draining,
    /// It was declared lost: repair replaces what it held.
    Lost,
}

impl Health {
    /// The state as one word.
    pub fn as_str(self) -> &'static str {
        match self {
            Health::Up => "up",
            Health::Down => "down",
            Health::Draining => "draining",
            Health::Lost => "lost",
        }
    }
}

/// Everything that the catalog knows about a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The peer's id.
    pub id: PeerId,
    /// The address at which clients reach it.
    pub address: String,
    /// Its failure domain: the peers that fail together.
    pub domain: String,
    /// Its share of the blobs, compared with other weights.
    pub weight: u64,
    /// Its state.
    pub health: Health,
    /// Whether it is to be emptied. This holds while it is down, too.
    pub draining: bool,
    /// When it joined: seconds since 1970.
    pub joined: u64,
    /// When the supervisor first saw it down: seconds since 1970. `None` if it is up or nobody has
    /// noted it.
    pub down_since: Option<u64>,
    /// The figures of its last heartbeat, unless that has expired.
    pub stats: Option<PeerStats>,
    /// How often it has sent wrong bytes.
    pub wrong: u64,
}

impl Peer {
    /// The peer as placement and connections see it; `None` if it is lost.
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

/// All peers that joined and were not forgotten, and the revision of this view.
pub fn peers(documents: &dyn Documents) -> Result<(Vec<Peer>, u64)> {
    let view = documents.read(&FOLDERS.map(Query::prefix))?;
    Ok((peers_in(&view)?, view.revision))
}

fn peers_in(view: &View) -> Result<Vec<Peer>> {
    let keys = view.documents.range(MEMBERS.to_owned()..).map(|(key, _)| key);
    let ids = keys.map_while(|key| key.strip_prefix(MEMBERS)).map(str::parse);
    ids.map(|id| peer(view, id?)).collect()
}

/// A document that a peer writes; `None` if it does not exist or cannot be read.
fn written_by_peer<T: DeserializeOwned>(view: &View, key: &str) -> Option<T> {
    view.get(key).unwrap_or_else(|error| {
        tracing::warn!(%error, "a peer has written a wrong document; run `cairn peers`");
        None
    })
}

fn peer(view: &View, id: PeerId) -> Result<Peer> {
    let stats = written_by_peer::<PeerStats>(view, &alive_key(&id));
    let document =
        written_by_peer(view, &member_key(&id)).unwrap_or_else(MemberDocument::unreadable);
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

/// Writes a peer's heartbeat, and makes the peer a member if it is none.
pub fn send_heartbeat(
    documents: &dyn Documents,
    announcement: &Announcement,
    stats: &PeerStats,
    now: u64,
) -> Result<()> {
    let key = member_key(&announcement.id);
    loop {
        let view = documents.read(&[Query::key(&key)])?;
        let known = written_by_peer::<MemberDocument>(&view, &key);
        let weight = |known: &MemberDocument| {
            let difference = known.weight.abs_diff(stats.capacity);
            let same = difference <= known.weight / WEIGHT_STEP;
            if same { known.weight } else { stats.capacity }
        };
        let wanted = MemberDocument {
            address: announcement.address.clone(),
            domain: announcement.domain.clone(),
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
        if documents.commit(&change.put_for(
            HEARTBEAT_TTL_SECONDS,
            alive_key(&announcement.id),
            stats,
        ))? {
            return Ok(());
        }
    }
}

/// Fails if the peer is a member that is not lost, so that its data must be somewhere. A peer whose
/// data directory is empty calls this before it joins: its blobs would otherwise count as stored.
pub fn check_no_data(documents: &dyn Documents, id: &PeerId) -> Result<()> {
    let key = member_key(id);
    match written_by_peer::<MemberDocument>(&documents.read(&[Query::key(&key)])?, &key) {
        Some(document) if !document.lost => Err(Error::DataElsewhere { peer: id.to_string() }),
        _ => Ok(()),
    }
}

/// Removes a peer's heartbeat when the peer stops in good order: it is down at once.
pub fn leave(documents: &dyn Documents, id: &PeerId) -> Result<()> {
    let change = Change { relaxed: true, ..Change::default() };
    documents.commit(&change.remove(Query::Key(alive_key(id)))).map(drop)
}

/// Edits a member's document. Fails if there is none.
fn update(
    documents: &dyn Documents,
    id: &PeerId,
    edit: impl Fn(MemberDocument) -> MemberDocument,
) -> Result<()> {
    update_unless_alive(documents, id, None, edit).map(drop)
}

/// Edits a member's document like [`update`]. With `heartbeat`, the version of the peer's last
/// heartbeat, does nothing if the peer has sent another one, and gives up if the document changes
/// again and again: a hostile peer may write it without a pause. Returns whether it was edited.
fn update_unless_alive(
    documents: &dyn Documents,
    id: &PeerId,
    heartbeat: Option<u64>,
    edit: impl Fn(MemberDocument) -> MemberDocument,
) -> Result<bool> {
    let (key, alive) = (member_key(id), alive_key(id));
    let most = if heartbeat.is_some() { MAX_ATTEMPTS } else { usize::MAX };
    for _ in 0..most {
        let view = documents.read(&[&key, LOSSES, &alive].map(Query::key))?;
        if heartbeat.is_some_and(|version| view.version(&alive) != version) {
            return Ok(false);
        }
        if view.version(&key) == 0 {
            return Err(Error::NoPeer { peer: id.to_string() });
        }
        // A peer that has written nonsense is edited like one that has just joined.
        let document = written_by_peer::<MemberDocument>(&view, &key).unwrap_or_default();
        let edited = edit(document.clone());
        if edited == document {
            return Ok(true);
        }
        let relies_on = [key.as_str(), LOSSES].map(|key| (key.to_owned(), view.version(key)));
        let mut change = Change { relies_on: relies_on.into(), ..Change::default() };
        change.relies_on.extend(heartbeat.map(|version| (alive.clone(), version)));
        let change = match edited.lost && !document.lost {
            true => change.put(LOSSES, &(losses(&view)? + 1)),
            false => change,
        };
        if documents.commit(&change.put(&key, &edited))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Starts or ends the draining of a peer.
pub fn drain(documents: &dyn Documents, id: &PeerId, draining: bool) -> Result<()> {
    update(documents, id, |document| MemberDocument { draining, ..document })
}

/// Declares a peer lost at once, because its disk is known to be gone.
pub fn lose(documents: &dyn Documents, id: &PeerId) -> Result<()> {
    update(documents, id, |document| MemberDocument { lost: true, ..document })
}

/// Removes an empty or lost peer from the members.
///
/// A new epoch begins: a commit that is under way may have stored a fragment on the peer since the
/// heartbeat that said that it is empty.
pub fn forget(documents: &dyn Documents, id: &PeerId) -> Result<()> {
    let keys = [member_key(id), alive_key(id), suspect_key(id)];
    loop {
        let view = documents.read(&[&keys[0], LOSSES].map(Query::key))?;
        let mut change = Change::default();
        if view.version(&keys[0]) != 0 {
            change.relies_on.push((LOSSES.to_owned(), view.version(LOSSES)));
            change = change.put(LOSSES, &(losses(&view)? + 1));
        }
        let change = keys.iter().fold(change, |change, key| change.remove(Query::key(key)));
        if documents.commit(&change)? {
            return Ok(());
        }
    }
}

/// Adds `wrong` to the count of wrong answers of a peer.
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

/// The result of the last complete repair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastRepair {
    /// When it ended: seconds since 1970.
    pub time: u64,
    /// Blobs that the catalog refers to.
    pub blobs: u64,
    /// Of these blobs, the ones that still have less than their redundancy.
    pub under: u64,
    /// Of these blobs, the ones that cannot be read.
    pub unreadable: u64,
    /// How many more losses the weakest blob survives; `None` if there are no blobs.
    pub survives: Option<i64>,
}

const LAST_REPAIR: &str = "health/repair";

/// The result of the last repair, if there was one.
pub fn last_repair(documents: &dyn Documents) -> Result<Option<LastRepair>> {
    documents.read(&[Query::key(LAST_REPAIR)])?.get(LAST_REPAIR)
}

/// Writes the result of a repair.
pub fn note_repair(documents: &dyn Documents, repair: &LastRepair) -> Result<()> {
    documents.commit(&Change::default().put(LAST_REPAIR, repair)).map(drop)
}

#[cfg(test)]
mod tests;
