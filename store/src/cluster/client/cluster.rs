//! Stores and reads blobs on many peers.
//!
//! **Writing.** Fragment *i* of a blob goes to the peer of rank *i*. A fragment that a peer
//! refuses, or that cannot reach its peer, goes to the next peer that has no fragment of the blob,
//! in another failure domain if possible.
//!
//! **Reading.** A read asks as many peers, by rank, as it needs. It asks one more peer for each
//! that has nothing or sends a wrong block, and one more when an answer is late (hedging). It fails
//! only when every peer was asked.
//!
//! A wrong block is counted. When the blob is decoded, the peer that sent the wrong block gets the
//! right one.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::assemble::{AssembledBlob, BlobAssembly, EncodingAssembly};
use super::connection::Connection;
use super::pool::ConnectionPool;
use super::reservation::Reserved;
use crate::cluster::placement::members::{FragmentTargets, Member, MemberState, RankedMembers};
use crate::cluster::protocol::MAX_PUT;
use crate::collection::CollectionNumber;
use crate::encoding::fragment::{Blocks, Description, Fragment, MAX_CONTENT, encode};
use crate::encoding::redundancy::{Redundancy, StoragePolicy};
use crate::encoding::seal::SealKeys;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};
use crate::net::identity::Security;

/// The least and the greatest delay before a read asks one more peer.
const HEDGE_DELAY: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// The most wrong blocks that are replaced at a time. Further ones wait until they are read again.
const MAX_REPLACEMENTS: usize = 8;

/// The most buffer lengths for which a client remembers how many peers a read needs.
const REMEMBERED_LENGTHS: usize = 64;

/// The latency of answers: running mean and mean deviation, in seconds.
#[derive(Clone, Copy)]
struct LatencyEstimate {
    mean: f64,
    deviation: f64,
}

impl LatencyEstimate {
    fn add(&mut self, time: Duration) {
        let error = time.as_secs_f64() - self.mean;
        self.mean += error / 8.0;
        self.deviation += (error.abs() - self.deviation) / 4.0;
    }

    /// The time after which an answer is late: the mean plus four mean deviations, within
    /// [`HEDGE_DELAY`].
    fn late(&self) -> Duration {
        let late = Duration::try_from_secs_f64(self.mean + 4.0 * self.deviation);
        late.unwrap_or(HEDGE_DELAY.1).clamp(HEDGE_DELAY.0, HEDGE_DELAY.1)
    }
}

/// The result of storing a blob durably with its full redundancy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Bytes of all its blocks.
    pub sent: u64,
    /// The number of durable fragments, each on a peer of its own. It is the full number.
    pub durable: usize,
}

/// The progress of storing a blob.
pub(crate) enum Progress {
    /// Enough fragments are durable to read the blob.
    Available,
    /// The blob is stored with full redundancy, or storing has failed.
    Ended(Result<Stored>),
}

/// The results of a blob's fragments so far.
struct Tally {
    /// Fragments that are durable.
    durable: usize,
    /// Fragments without a result yet.
    left: usize,
    /// Fragments that are enough to read the blob.
    needed: usize,
    /// Bytes of all its blocks.
    bytes: u64,
    failed: Option<Error>,
}

impl Tally {
    fn new(description: &Description, width: usize) -> Tally {
        let (needed, bytes) = (description.needed(), (width * description.block_len()) as u64);
        Tally { durable: 0, left: width, needed, bytes, failed: None }
    }

    /// Adds the result of one fragment.
    fn add(&mut self, result: Result<()>, blob: usize, progress: &mut Vec<(usize, Progress)>) {
        self.left -= 1;
        match result {
            Ok(()) => {
                self.durable += 1;
                if self.durable == self.needed {
                    progress.push((blob, Progress::Available));
                }
            }
            Err(error) => self.failed = Some(error),
        }
        if self.left == 0 {
            let stored = Stored { sent: self.bytes, durable: self.durable };
            progress.push((blob, Progress::Ended(self.failed.take().map_or(Ok(stored), Err))));
        }
    }
}

/// A fragment on its way to a peer.
struct Outbound {
    /// The blob's position among the blobs that are stored together.
    blob: usize,
    fragment: Fragment,
    place: usize,
    places: Arc<FragmentTargets>,
}

/// Groups fragments by member, with as many fragments in a group as one put can have.
fn groups(mut all: Vec<Outbound>) -> Vec<(usize, Vec<Outbound>)> {
    // The sort is stable: fragments of one member stay in the order of the blobs.
    all.sort_by_key(|one| one.places.member(one.place));
    let mut groups: Vec<(usize, Vec<Outbound>)> = Vec::new();
    let mut bytes = 0;
    for one in all {
        let (member, len) = (one.places.member(one.place), one.fragment.block.len());
        match groups.last_mut() {
            Some((last, group))
                if *last == member && group.len() < MAX_PUT && bytes + len <= MAX_CONTENT =>
            {
                bytes += len;
                group.push(one);
            }
            _ => {
                bytes = len;
                groups.push((member, vec![one]));
            }
        }
    }
    groups
}

/// The peers of a cluster as one blob store. Clones share their state.
#[derive(Clone)]
pub struct Cluster {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    members: RwLock<Arc<RankedMembers>>,
    pub(crate) pool: Arc<ConnectionPool>,
    latency: Mutex<LatencyEstimate>,
    /// By buffer length: how many peers the last blob needed that was read into such a buffer.
    needed: Mutex<HashMap<usize, usize>>,
    /// The number of wrong answers of each peer.
    suspects: Mutex<HashMap<PeerId, u64>>,
    replacing: Arc<Semaphore>,
    /// How often a peer that was up or draining went away.
    losses: AtomicU64,
    /// The least stamp of what is put, or found present.
    stamp: AtomicU64,
    pub(super) reserved: Reserved,
    /// The keys for seals.
    pub(super) seals: SealKeys,
}

/// Ignores poisoning: no thread leaves the data half changed when it panics with one of these locks
/// held.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cluster {
    /// A cluster of these peers. No peer is contacted yet. Of several members with one id the first
    /// counts.
    pub fn new(members: Vec<Member>, security: Security) -> Cluster {
        let seals = security.seals().clone();
        let inner = Inner {
            members: RwLock::new(Arc::new(RankedMembers::new(members))),
            pool: ConnectionPool::new(security),
            latency: Mutex::new(LatencyEstimate { mean: 0.05, deviation: 0.05 }),
            needed: Mutex::default(),
            suspects: Mutex::default(),
            replacing: Arc::new(Semaphore::new(MAX_REPLACEMENTS)),
            losses: AtomicU64::new(0),
            stamp: AtomicU64::new(0),
            reserved: Reserved::default(),
            seals,
        };
        Cluster { inner: Arc::new(inner) }
    }

    /// Replaces the members. Connections to members that stay are kept.
    pub fn set_members(&self, members: Vec<Member>) {
        let members = Arc::new(RankedMembers::new(members));
        let mut current = self.inner.members.write().unwrap_or_else(PoisonError::into_inner);
        self.inner.pool.update(&current.all, &members.all);
        let is_there = |member: &&Member| member.state != MemberState::Down;
        let there: HashSet<PeerId> =
            members.all.iter().filter(is_there).map(|one| one.id).collect();
        if current.all.iter().filter(is_there).any(|one| !there.contains(&one.id)) {
            self.inner.losses.fetch_add(1, Ordering::SeqCst);
        }
        *current = members;
    }

    /// How often a peer that was up or draining went away. Blobs that were stored before may have
    /// less than their redundancy.
    pub(crate) fn losses(&self) -> u64 {
        self.inner.losses.load(Ordering::SeqCst)
    }

    /// Makes later puts and questions stamp blobs with at least this number. Returns whether the stamp
    /// was lower before.
    pub(super) fn raise_stamp(&self, number: CollectionNumber) -> bool {
        self.inner.stamp.fetch_max(number.0, Ordering::SeqCst) < number.0
    }

    /// The current members.
    pub fn members(&self) -> Vec<Member> {
        self.inner.members().all.clone()
    }

    /// Peers that have sent wrong blocks or invalid answers, and how often since this object was
    /// created.
    pub fn suspects(&self) -> Vec<(PeerId, u64)> {
        let mut all: Vec<_> = lock(&self.inner.suspects).iter().map(|(id, n)| (*id, *n)).collect();
        all.sort_unstable();
        all
    }

    /// Stores a blob durably with its full redundancy. After an error some of its fragments may be
    /// stored.
    pub async fn put(
        &self,
        blob: &BlobId,
        content: &[u8],
        policy: &StoragePolicy,
    ) -> Result<Stored> {
        let whole = Arc::new(encode(blob, content, *policy));
        self.store_one(whole, policy.redundancy, || ()).await
    }

    /// Stores an encoded blob. Calls `available` when enough fragments are durable to read it.
    pub(crate) async fn store_one(
        &self,
        whole: Arc<(Description, Blocks)>,
        redundancy: Redundancy,
        mut available: impl FnMut(),
    ) -> Result<Stored> {
        let mut stored = None;
        let report = |progress: Vec<(usize, Progress)>| {
            for (_, state) in progress {
                match state {
                    Progress::Available => available(),
                    Progress::Ended(result) => stored = Some(result),
                }
            }
        };
        self.store(vec![whole], redundancy, report).await;
        stored.unwrap_or(Err(Error::TooFewPeers { needed: redundancy.width(), peers: 0 }))
    }

    /// Stores encoded blobs, and reports the progress of each by its position in `all`. Each peer
    /// gets its fragments of all blobs together, so the progress of several blobs is reported at
    /// once.
    pub(crate) async fn store(
        &self,
        all: Vec<Arc<(Description, Blocks)>>,
        redundancy: Redundancy,
        mut report: impl FnMut(Vec<(usize, Progress)>),
    ) {
        let members = self.inner.members();
        let width = redundancy.width();
        let is_up = |member: &&Member| member.state != MemberState::Down;
        let peers = members.all.iter().filter(is_up).count();
        let too_few = || Error::TooFewPeers { needed: width, peers };
        if width == 0 || redundancy.needed() == 0 || width > members.all.len() {
            let failed = |blob| (blob, Progress::Ended(Err(too_few())));
            return report((0..all.len()).map(failed).collect());
        }
        let mut tallies: Vec<_> = all.iter().map(|whole| Tally::new(&whole.0, width)).collect();
        let mut waiting = Vec::with_capacity(all.len() * width);
        let mut progress = Vec::new();
        for (blob, whole) in all.into_iter().enumerate() {
            let (description, blocks) = &*whole;
            let description = description.clone().with_seal(self.inner.seals.seal(description));
            let places = Arc::new(members.places(&description.blob, width));
            for place in 0..width {
                let index = place % description.width();
                let (description, block) = (description.clone(), blocks.share(index));
                let fragment = Fragment { description, index: index as u8, block };
                match places.first(place) {
                    Some(place) => {
                        waiting.push(Outbound { blob, fragment, place, places: places.clone() });
                    }
                    None => tallies[blob].add(Err(too_few()), blob, &mut progress),
                }
            }
        }
        let mut sending = JoinSet::new();
        loop {
            for (member, group) in groups(std::mem::take(&mut waiting)) {
                let (inner, members) = (self.inner.clone(), members.clone());
                sending.spawn(async move { inner.send(&members.all[member], group).await });
            }
            if !progress.is_empty() {
                report(std::mem::take(&mut progress));
            }
            let Some(sent) = sending.join_next().await else { break };
            // A task that panicked leaves its fragments without a result: see below.
            for (mut one, result) in sent.unwrap_or_default() {
                let next = result.as_ref().err().and_then(|_| one.places.instead_of(one.place));
                match (next, result) {
                    (Some(place), Err(error)) => {
                        tracing::warn!(%error, "a fragment goes to another peer");
                        one.place = place;
                        waiting.push(one);
                    }
                    (_, result) => tallies[one.blob].add(result, one.blob, &mut progress),
                }
            }
        }
        for (blob, tally) in tallies.into_iter().enumerate().filter(|(_, tally)| tally.left > 0) {
            let reason = format!("the result of {} of its fragments is unknown", tally.left);
            progress.push((blob, Progress::Ended(Err(Error::NotStored { blobs: 1, reason }))));
        }
        report(progress);
    }

    /// Reads a blob into the start of `buf` and returns its length. The bytes have the hash that
    /// was asked for.
    pub async fn get(&self, blob: &BlobId, buf: &mut [u8]) -> Result<usize> {
        let members = self.inner.members();
        let mut ranks = members.to_ask(blob);
        let guess = lock(&self.inner.needed).get(&buf.len()).copied().unwrap_or(1);
        let mut asked = JoinSet::new();
        let ask = |asked: &mut JoinSet<_>, member: Option<usize>| {
            if let Some(at) = member {
                let (inner, members, blob) = (self.inner.clone(), members.clone(), *blob);
                asked.spawn(async move { (at, inner.fetch(&members.all[at], &blob).await) });
            }
        };
        (0..guess).for_each(|_| ask(&mut asked, ranks.next()));
        let mut found = BlobAssembly::new(*blob);
        let (mut reasons, mut wrong) = (Vec::new(), Vec::new());
        let (mut away, mut last) = (Vec::new(), false);
        loop {
            let late = lock(&self.inner.latency).late();
            let (at, answer) = match timeout(late, asked.join_next()).await {
                Err(_) => {
                    ask(&mut asked, ranks.next());
                    continue;
                }
                // Before a read fails, peers in back-off are asked once more: they may be back.
                Ok(None) if !last && !away.is_empty() => {
                    (last, reasons) = (true, Vec::new());
                    for at in away.drain(..) {
                        self.inner.pool.wake(&members.all[at]);
                        ask(&mut asked, Some(at));
                    }
                    continue;
                }
                Ok(None) => break,
                Ok(Some(answer)) => answer.map_err(|error| Error::Internal {
                    doing: "reading a blob",
                    reason: error.to_string(),
                })?,
            };
            let before = wrong.len();
            match answer {
                Ok(fragments) => wrong.extend(fragments.into_iter().filter_map(|one| {
                    found.add(at, one).err().map(|one| (at, one.description, one.index))
                })),
                Err(error) => {
                    match error.kind() {
                        ErrorKind::Corrupt => self.inner.mark_suspect(&members.all[at], blob),
                        ErrorKind::Unavailable => away.push(at),
                        _ => {}
                    }
                    reasons.push(error);
                }
            }
            if wrong.len() > before {
                self.inner.mark_suspect(&members.all[at], blob);
            }
            if let Some(AssembledBlob { partial, wrong: forged }) = found.decode(buf, &mut reasons)
            {
                let description = &partial.description;
                self.inner.remember(buf.len(), description.needed());
                self.inner.mark_all(&members, found.forgers(), blob);
                for (at, index) in forged {
                    self.inner.mark_suspect(&members.all[at], blob);
                    wrong.push((at, description.clone(), index));
                }
                let len = description.len as usize;
                self.inner.replace_wrong_blocks(&members, wrong, partial);
                return Ok(len);
            }
            // Ask as many peers as fragments may be missing.
            while asked.len() < found.missing(guess)
                && let Some(next) = ranks.next()
            {
                ask(&mut asked, Some(next));
            }
        }
        self.inner.mark_all(&members, found.forgers(), blob);
        match reasons.into_iter().max_by_key(|reason| reason.kind() == ErrorKind::Unavailable) {
            Some(reason) => Err(reason),
            None if wrong.is_empty() => Err(Error::MissingBlob { id: *blob }),
            None => Err(Error::corrupt(format!("blob {blob}"), "too many of its blocks are wrong")),
        }
    }
}

impl Inner {
    /// The least stamp of what is put, or found present.
    pub(super) fn stamp(&self) -> CollectionNumber {
        CollectionNumber(self.stamp.load(Ordering::SeqCst))
    }

    pub(crate) fn members(&self) -> Arc<RankedMembers> {
        self.members.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends fragments to a member, and returns the result of each.
    async fn send(&self, member: &Member, group: Vec<Outbound>) -> Vec<(Outbound, Result<()>)> {
        let stamp = self.stamp();
        let put = |connection: Arc<Connection>| {
            let fragments = group.iter().map(|one| one.fragment.clone()).collect();
            async move { connection.put_all(fragments, stamp).await }
        };
        match self.pool.ask(member, put).await {
            Ok(results) => group.into_iter().zip(results).collect(),
            Err(error) => {
                // Errors cannot be cloned, so each fragment gets its own.
                let failed = || {
                    let (peer, reason) = (member.address.clone(), error.to_string());
                    Err(Error::Peer { peer, kind: error.kind(), reason })
                };
                group.into_iter().map(|one| (one, failed())).collect()
            }
        }
    }

    /// Fetches a member's fragments of a blob.
    async fn fetch(&self, member: &Member, blob: &BlobId) -> Result<Vec<Fragment>> {
        let begin = Instant::now();
        let get = |connection: Arc<Connection>| async move { connection.fetch(blob).await };
        let found = self.pool.ask(member, get).await?;
        lock(&self.latency).add(begin.elapsed());
        Ok(found)
    }

    /// Counts a wrong answer of each of these peers.
    fn mark_all(&self, members: &RankedMembers, which: Vec<usize>, blob: &BlobId) {
        which.into_iter().for_each(|at| self.mark_suspect(&members.all[at], blob));
    }

    /// Counts a wrong answer of a peer.
    pub(super) fn mark_suspect(&self, member: &Member, blob: &BlobId) {
        let mut suspects = lock(&self.suspects);
        let count = suspects.entry(member.id).or_default();
        *count += 1;
        let (peer, address, count) = (member.id, &member.address, *count);
        tracing::warn!(%peer, address, %blob, count, "a peer sent a wrong answer");
    }

    /// Remembers that a blob that was read into a buffer of `len` bytes needed `needed` peers.
    fn remember(&self, len: usize, needed: usize) {
        let mut all = lock(&self.needed);
        if all.len() >= REMEMBERED_LENGTHS && !all.contains_key(&len) {
            all.clear();
        }
        all.insert(len, needed);
    }

    /// Sends the right fragments to the peers that sent wrong ones, in the background.
    fn replace_wrong_blocks(
        &self,
        members: &RankedMembers,
        wrong: Vec<(usize, Description, u8)>,
        whole: EncodingAssembly<usize>,
    ) {
        // What this client has not sealed it has not verified: other blocks than those that it has
        // decoded may be wrong. Repair finds out.
        if !self.seals.is_sealed(&whole.description) {
            return;
        }
        let whole = Arc::new(whole);
        for (at, description, index) in wrong {
            if description != whole.description {
                continue;
            }
            let Ok(permit) = self.replacing.clone().try_acquire_owned() else { return };
            let (pool, member, whole) = (self.pool.clone(), members.all[at].clone(), whole.clone());
            let stamp = self.stamp();
            tokio::spawn(async move {
                let _permit = permit;
                let put = |connection: Arc<Connection>| {
                    let fragment = whole.rebuild(index);
                    async move { connection.put(fragment?, stamp).await }
                };
                if let Err(error) = pool.ask(&member, put).await {
                    tracing::warn!(peer = %member.id, %error, "failed to replace a wrong block");
                }
            });
        }
    }
}
