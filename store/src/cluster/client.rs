//! Blobs on many peers: cut, sent, collected, put together.
//!
//! Fragment *i* of a blob goes to the peer of rank *i*. A peer that fails or is full is passed over, for the next
//! one beyond those that have a fragment already. A read asks as many peers as are enough, by rank, one more for
//! each that has nothing, and one more when an answer is later than answers usually are. It fails only when
//! every peer was asked.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
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
    /// A cluster of these peers. Nobody is asked yet.
    pub fn new(members: Vec<Member>, security: Security) -> Cluster {
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
        let (description, blocks) = encode(blob, content, redundancy);
        let width = redundancy.width();
        let ranks = Arc::new(rank(blob, &self.inner.candidates));
        let spare = Arc::new(AtomicUsize::new(width));
        let mut giving = JoinSet::new();
        for place in 0..width {
            let index = place % description.width();
            let block = blocks.get(index).to_vec();
            let fragment = Fragment { description: description.clone(), index: index as u8, block };
            let (inner, ranks, spare) = (self.inner.clone(), ranks.clone(), spare.clone());
            giving.spawn(async move { inner.give(fragment, place, &ranks, &spare).await });
        }
        // Dropping the set ends what is not needed any more.
        while let Some(given) = giving.join_next().await {
            given.map_err(|error| Error::BadArgument(error.to_string()))??;
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

    /// Gives a fragment to the peer of this place, or to one beyond the last.
    async fn give(
        &self,
        fragment: Fragment,
        mut place: usize,
        ranks: &[usize],
        spare: &AtomicUsize,
    ) -> Result<()> {
        let mut last = None;
        while let Some(member) = ranks.get(place) {
            let given = async { self.connection(*member).await?.put(fragment.clone()).await };
            let error = match timeout(ANSWER, given).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => error,
                Err(_) => self.late(*member),
            };
            tracing::warn!(%error, "a fragment goes to another peer");
            last = Some(error);
            place = spare.fetch_add(1, Ordering::SeqCst);
        }
        Err(last.unwrap_or_else(|| Error::TooFewPeers { peers: ranks.len() }))
    }

    /// What a member has of a blob.
    async fn take(&self, member: usize, blob: &BlobId) -> Result<Vec<Fragment>> {
        let begin = Instant::now();
        let taken = async { self.connection(member).await?.get(blob).await };
        let found = timeout(ANSWER, taken).await.unwrap_or_else(|_| Err(self.late(member)))?;
        self.pace().add(begin.elapsed());
        Ok(found)
    }

    fn late(&self, member: usize) -> Error {
        self.away(member, "it does not answer in time")
    }

    fn away(&self, member: usize, reason: &str) -> Error {
        let peer = self.members[member].address.clone();
        Error::Peer { peer, kind: ErrorKind::Unavailable, reason: reason.into() }
    }

    /// The connection to a member.
    async fn connection(&self, at: usize) -> Result<Arc<Connection>> {
        let member = &self.members[at];
        // One at a time: the others use what this one finds.
        let mut way = self.ways[at].lock().await;
        match &*way {
            Way::Open(connection) if !connection.is_lost() => return Ok(connection.clone()),
            Way::Away(since, reason) if since.elapsed() < AWAY => return Err(self.away(at, reason)),
            _ => {}
        }
        let opened = match Connection::open(&member.address, &self.security).await {
            // Behind an address that was a peer's there may be another, with another disk.
            Ok(connection) if connection.peer() != member.id => {
                Err(self.away(at, &format!("it is {}, not {}", connection.peer(), member.id)))
            }
            opened => opened,
        };
        match opened {
            Ok(connection) => {
                let connection = Arc::new(connection);
                *way = Way::Open(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                *way = Way::Away(Instant::now(), error.to_string());
                Err(error)
            }
        }
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
