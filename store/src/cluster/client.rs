//! Blobs on many peers: cut, sent, collected, put together.
//!
//! Fragment *i* of a blob goes to the peer of rank *i*. A peer that fails or is full is passed over, for the next
//! one beyond those that have a fragment already, in another failure domain if there is one. A read asks as many peers as are enough, by rank, one more for
//! each that has nothing, and one more when an answer is later than answers usually are. It fails only when
//! every peer was asked.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::connection::Connection;
use super::fragment::{Description, Fragment, encode};
use super::identity::Security;
use super::placement::{Candidate, rank};
use super::redundancy::Redundancy;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};

/// How long a peer may take to store a fragment, and to answer at all.
const ANSWER: Duration = Duration::from_secs(10);

/// How long a connection may take to be made, with all that belongs to it.
const OPEN: Duration = Duration::from_secs(5);

/// How long a peer that could not be reached is left alone.
const AWAY: Duration = Duration::from_secs(1);

/// The bounds of the time after which one more peer is asked.
const HEDGE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// A peer that takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Who it is.
    pub id: PeerId,
    /// Where it listens.
    pub address: String,
    /// See [`Candidate::weight`].
    pub weight: u64,
    /// See [`Candidate::domain`].
    pub domain: String,
}

/// What is known of the way to a member.
#[derive(Default)]
enum Way {
    #[default]
    Unknown,
    Open(Arc<Connection>),
    /// It could not be reached at this time, for this reason.
    Away(Instant, String),
}

/// How long answers take, as a mean and a mean deviation.
#[derive(Clone, Copy)]
struct Pace {
    mean: f64,
    deviation: f64,
}

impl Pace {
    fn add(&mut self, time: Duration) {
        let error = time.as_secs_f64() - self.mean;
        self.mean += error / 8.0;
        self.deviation += (error.abs() - self.deviation) / 4.0;
    }

    /// Most answers are there by then.
    fn late(&self) -> Duration {
        let late = Duration::try_from_secs_f64(self.mean + 4.0 * self.deviation);
        late.unwrap_or(HEDGE.1).clamp(HEDGE.0, HEDGE.1)
    }
}

/// The peers of a cluster, as one place for blobs.
#[derive(Clone)]
pub struct Cluster {
    inner: Arc<Inner>,
}

struct Inner {
    members: Vec<Member>,
    candidates: Vec<Candidate>,
    security: Security,
    ways: Vec<tokio::sync::Mutex<Way>>,
    pace: Mutex<Pace>,
}

impl Cluster {
    /// A cluster of these peers. Nobody is asked yet. One that is named twice counts once.
    pub fn new(mut members: Vec<Member>, security: Security) -> Cluster {
        let mut seen = HashSet::new();
        members.retain(|member| seen.insert(member.id));
        let candidate = |member: &Member| Candidate {
            id: member.id,
            weight: member.weight,
            domain: member.domain.clone(),
        };
        let candidates = members.iter().map(candidate).collect();
        let ways = members.iter().map(|_| tokio::sync::Mutex::default()).collect();
        let pace = Mutex::new(Pace { mean: 0.05, deviation: 0.05 });
        Cluster { inner: Arc::new(Inner { members, candidates, security, ways, pace }) }
    }

    /// Stores a blob with its full redundancy, durably. Returns the bytes of its blocks. After an error some of
    /// its fragments may be there.
    pub async fn put(&self, blob: &BlobId, content: &[u8], redundancy: Redundancy) -> Result<u64> {
        let width = redundancy.width();
        if width == 0 || redundancy.needed() == 0 || width > self.inner.members.len() {
            return Err(Error::TooFewPeers { peers: self.inner.members.len() });
        }
        let (description, blocks) = encode(blob, content, redundancy);
        let places = Arc::new(Places::new(rank(blob, &self.inner.candidates), width));
        let mut giving = JoinSet::new();
        for place in 0..width {
            let index = place % description.width();
            let block = blocks.get(index).to_vec();
            let fragment = Fragment { description: description.clone(), index: index as u8, block };
            let (inner, places) = (self.inner.clone(), places.clone());
            giving.spawn(async move { inner.give(fragment, place, &places).await });
        }
        // Dropping the set ends what is not needed any more.
        while let Some(given) = giving.join_next().await {
            given.expect("no code panics here, and nobody cancels it")?;
        }
        Ok((width * description.block_len()) as u64)
    }

    /// Reads a blob into the start of `buf` and returns its length. What it returns has the name that was asked
    /// for. `redundancy` is what the blob most likely has; another is found, too, a little later.
    pub async fn get(
        &self,
        blob: &BlobId,
        redundancy: Redundancy,
        buf: &mut [u8],
    ) -> Result<usize> {
        let mut ranks = rank(blob, &self.inner.candidates).into_iter();
        let mut asked = JoinSet::new();
        let mut found = Collected::default();
        let mut reasons = Vec::new();
        let ask = |asked: &mut JoinSet<_>, member: Option<usize>| {
            if let Some(member) = member {
                let (inner, blob) = (self.inner.clone(), *blob);
                asked.spawn(async move { inner.take(member, &blob).await });
            }
        };
        (0..redundancy.needed()).for_each(|_| ask(&mut asked, ranks.next()));
        loop {
            let late = self.inner.pace().late();
            let answer = match timeout(late, asked.join_next()).await {
                Err(_) => {
                    ask(&mut asked, ranks.next());
                    continue;
                }
                Ok(None) => break,
                Ok(Some(answer)) => {
                    answer.map_err(|error| Error::BadArgument(error.to_string()))?
                }
            };
            match answer {
                Ok(fragments) => fragments.into_iter().for_each(|one| found.add(one)),
                Err(error) => reasons.push(error),
            }
            if let Some(len) = found.decode(buf, &mut reasons) {
                return Ok(len);
            }
            // As many as may be missing.
            while asked.len() < found.missing(redundancy.needed()) && ranks.len() > 0 {
                ask(&mut asked, ranks.next());
            }
        }
        match reasons.into_iter().max_by_key(|reason| reason.kind() == ErrorKind::Unavailable) {
            Some(reason) => Err(reason),
            None => Err(Error::MissingBlob { id: *blob }),
        }
    }
}

impl Inner {
    fn pace(&self) -> std::sync::MutexGuard<'_, Pace> {
        self.pace.lock().expect("no code panics with the pace locked")
    }

    /// Gives a fragment to the peer of this place, or to another one that has none.
    async fn give(
        self: &Arc<Inner>,
        fragment: Fragment,
        mut place: usize,
        places: &Places,
    ) -> Result<()> {
        loop {
            let member = places.ranks[place];
            let put = |connection: Arc<Connection>| {
                let fragment = fragment.clone();
                async move { connection.put(fragment).await }
            };
            let Err(error) = self.ask(member, put).await else { return Ok(()) };
            match places.instead_of(place, &self.candidates) {
                Some(next) => place = next,
                None => return Err(error),
            }
            tracing::warn!(%error, "a fragment goes to another peer");
        }
    }

    /// What a member has of a blob.
    async fn take(self: &Arc<Inner>, member: usize, blob: &BlobId) -> Result<Vec<Fragment>> {
        let begin = Instant::now();
        let get = |connection: Arc<Connection>| async move { connection.get(blob).await };
        let found = self.ask(member, get).await?;
        self.pace().add(begin.elapsed());
        Ok(found)
    }

    /// Asks a member, within a time. A connection that was there before may have ended since: then it is made
    /// again, once.
    async fn ask<T, F: Future<Output = Result<T>>>(
        self: &Arc<Inner>,
        at: usize,
        question: impl Fn(Arc<Connection>) -> F,
    ) -> Result<T> {
        let asked = async {
            let (connection, is_new) = self.connection(at).await?;
            match question(connection.clone()).await {
                Err(_) if !is_new && connection.is_lost() => {
                    question(self.connection(at).await?.0).await
                }
                result => result,
            }
        };
        match timeout(ANSWER, asked).await {
            Ok(result) => result,
            Err(_) => {
                let reason = "it does not answer in time";
                if let Ok(mut way) = self.ways[at].try_lock() {
                    *way = Way::Away(Instant::now(), reason.into());
                }
                Err(self.away(at, reason))
            }
        }
    }

    fn away(&self, member: usize, reason: &str) -> Error {
        let peer = self.members[member].address.clone();
        Error::Peer { peer, kind: ErrorKind::Unavailable, reason: reason.into() }
    }

    /// The connection to a member, and whether it is new. What comes of a try is remembered, also if who asked
    /// has given up meanwhile.
    async fn connection(self: &Arc<Inner>, at: usize) -> Result<(Arc<Connection>, bool)> {
        let inner = self.clone();
        let connected = tokio::spawn(async move { inner.connect(at).await });
        connected.await.expect("no code panics here, and nobody cancels it")
    }

    async fn connect(&self, at: usize) -> Result<(Arc<Connection>, bool)> {
        let member = &self.members[at];
        // One at a time: the others use what this one finds.
        let mut way = self.ways[at].lock().await;
        match &*way {
            Way::Open(connection) if !connection.is_lost() => {
                return Ok((connection.clone(), false));
            }
            Way::Away(since, reason) if since.elapsed() < AWAY => return Err(self.away(at, reason)),
            _ => {}
        }
        let opened = match timeout(OPEN, Connection::open(&member.address, &self.security)).await {
            // Behind an address that was a peer's there may be another, with another disk.
            Ok(Ok(connection)) if connection.peer() != member.id => {
                Err(self.away(at, &format!("it is {}, not {}", connection.peer(), member.id)))
            }
            Ok(opened) => opened,
            Err(_) => Err(self.away(at, "it cannot be reached in time")),
        };
        match opened {
            Ok(connection) => {
                let connection = Arc::new(connection);
                *way = Way::Open(connection.clone());
                Ok((connection, true))
            }
            Err(error) => {
                *way = Way::Away(Instant::now(), error.to_string());
                Err(error)
            }
        }
    }
}

/// The places that the fragments of one blob go to, by rank.
struct Places {
    ranks: Vec<usize>,
    /// For each rank: nothing, or whether it has a fragment, or is to have one.
    taken: Mutex<Vec<Option<bool>>>,
}

impl Places {
    /// The first `width` ranks are to have one.
    fn new(ranks: Vec<usize>, width: usize) -> Places {
        let taken = (0..ranks.len()).map(|place| (place < width).then_some(true)).collect();
        Places { ranks, taken: Mutex::new(taken) }
    }

    /// The next place for a fragment that one did not take: in a failure domain that has none, if there is one.
    fn instead_of(&self, place: usize, candidates: &[Candidate]) -> Option<usize> {
        let mut taken = self.taken.lock().expect("no code panics with the places locked");
        taken[place] = Some(false);
        let domain = |place: usize| &candidates[self.ranks[place]].domain;
        let has_one = |place: usize| {
            (0..taken.len()).any(|one| taken[one] == Some(true) && domain(one) == domain(place))
        };
        let free = || (0..taken.len()).filter(|one| taken[*one].is_none());
        let next = free().find(|one| !has_one(*one)).or_else(|| free().next())?;
        taken[next] = Some(true);
        Some(next)
    }
}

/// Fragments of one encoding of a blob.
struct Partial {
    description: Description,
    blocks: Vec<Option<Vec<u8>>>,
}

impl Partial {
    /// How many it lacks.
    fn missing(&self) -> usize {
        self.description.needed().saturating_sub(self.blocks.iter().flatten().count())
    }
}

/// Fragments of a blob, by the name of their encoding.
#[derive(Default)]
struct Collected(HashMap<BlobId, Partial>);

impl Collected {
    fn add(&mut self, fragment: Fragment) {
        let Fragment { description, index, block } = fragment;
        let partial = self.0.entry(description.id()).or_insert_with(|| {
            let blocks = vec![None; description.width()];
            Partial { description, blocks }
        });
        partial.blocks[usize::from(index)] = Some(block);
    }

    /// How many fragments the encoding lacks that is nearest to being whole; `needed` if there is none.
    fn missing(&self, needed: usize) -> usize {
        self.0.values().map(Partial::missing).min().unwrap_or(needed)
    }

    /// The blob, if an encoding is whole. One that is something else is dropped, and told.
    fn decode(&mut self, buf: &mut [u8], reasons: &mut Vec<Error>) -> Option<usize> {
        let whole = self.0.extract_if(|_, partial| partial.missing() == 0);
        for (_, Partial { description, mut blocks }) in whole {
            let len = description.len as usize;
            let decoded = match buf.get_mut(..len) {
                Some(content) => description.decode(&mut blocks, content),
                None => Err(Error::corrupt(format!("blob {}", description.blob), "it is too long")),
            };
            match decoded {
                Ok(()) => return Some(len),
                Err(error) => reasons.push(error),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::{Candidate, Places};
    use crate::id::PeerId;

    #[test]
    fn a_fragment_that_is_refused_goes_to_a_domain_without_one() {
        // Two peers in each of four domains, in rounds.
        let candidate = |n: u8| Candidate {
            id: PeerId::from_bytes([n; 16]),
            weight: 1,
            domain: (n % 4).to_string(),
        };
        let candidates: Vec<_> = (0..8).map(candidate).collect();
        let places = Places::new((0..8).collect(), 4);
        assert_eq!(places.instead_of(2, &candidates), Some(6), "the other one of its domain");
        assert_eq!(places.instead_of(6, &candidates), Some(4), "any, if there is no such");
        assert_eq!(places.instead_of(0, &candidates), Some(5));
        assert_eq!(places.instead_of(5, &candidates), Some(7));
        assert_eq!(places.instead_of(7, &candidates), None);
    }
}
