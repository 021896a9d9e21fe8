//! Reads the fragments of a blob, and decodes the blob from them.

use std::collections::BTreeMap;

use tokio::task::JoinSet;

use super::execute::Executor;
use super::peers::Peers;
use super::plan::{Findings, FragmentLocation, Holding, Rejection};
use super::shared::Shared;
use crate::cluster::client::assemble::EncodingAssembly;
use crate::cluster::protocol::FragmentId;
use crate::encoding::fragment::{Fragment, Kind};
use crate::error::{Error, ErrorKind};
use crate::id::{BlobId, PeerId};

/// Enough right fragments of an encoding, and the blob.
pub(super) struct Gathered {
    pub(super) assembly: EncodingAssembly<PeerId>,
    /// It has the blob's name.
    pub(super) content: Vec<u8>,
}

impl Gathered {
    /// All fragments of the encoding, if its description is what the blob gives. Then it can be
    /// sealed, whoever made it.
    pub(super) fn fragments(&self) -> Option<Vec<Fragment>> {
        let description = &self.assembly.description;
        let all = (0..description.width()).map(|index| self.assembly.rebuild(index as u8));
        let all = all.collect::<Result<Vec<_>, _>>().ok()?;
        let blocks: Vec<_> = all.iter().map(|one| Some(&one.block)).collect();
        description.describes(&self.content, &blocks).then_some(all)
    }
}

impl<P: Peers> Executor<'_, P> {
    /// Reads a fragment.
    pub(super) async fn get(&mut self, place: &FragmentLocation) -> Option<Fragment> {
        let holding = self.holdings.iter().find(|one| one.location() == *place).copied()?;
        let found = fetch(self.shared, self.entry.wanted.blob, &holding).await;
        self.accept(place, found)
    }

    /// Reads fragments, all at once. Leaves out those that cannot be read.
    pub(super) async fn get_all(
        &mut self,
        places: &[FragmentLocation],
    ) -> Vec<(FragmentLocation, Fragment)> {
        let mut asked = JoinSet::new();
        for holding in self.holdings.iter().filter(|one| places.contains(&one.location())) {
            let (shared, blob, holding) = (self.shared.clone(), self.entry.wanted.blob, *holding);
            asked.spawn(async move { (holding.location(), fetch(&shared, blob, &holding).await) });
        }
        let mut found = Vec::with_capacity(places.len());
        while let Some(answer) = asked.join_next().await {
            let Ok((place, answer)) = answer else { continue };
            found.extend(self.accept(&place, answer).map(|fragment| (place, fragment)));
        }
        found
    }

    /// Notes the result of reading a fragment.
    fn accept(
        &mut self,
        place: &FragmentLocation,
        found: Result<Option<Fragment>, Error>,
    ) -> Option<Fragment> {
        match found {
            Ok(Some(fragment)) => {
                self.done.bytes += fragment.block.len() as u64;
                return Some(fragment);
            }
            Err(error) if error.kind() != ErrorKind::Corrupt => {
                self.fail(&place.peer, &error);
                self.entry.findings.damaged.insert(*place);
            }
            Ok(None) | Err(_) => self.note_damaged(place),
        }
        None
    }

    /// Reads as many fragments of an encoding as are enough, all at once, and another one for each
    /// that is wrong, until they decode to the blob. If all of them do not, the encoding is
    /// rejected.
    pub(super) async fn gather(&mut self, encoding: &BlobId) -> Option<Gathered> {
        let blob = self.entry.wanted.blob;
        let (needed, places) = self.reading_order(encoding)?;
        let mut assembly: Option<EncodingAssembly<PeerId>> = None;
        let mut content = Vec::new();
        let (mut asked, mut next) = (JoinSet::new(), places.into_iter());
        let mut failure = None;
        loop {
            let missing = assembly.as_ref().map_or(needed, EncodingAssembly::missing);
            while asked.len() < missing
                && let Some(holding) = next.next()
            {
                let shared = self.shared.clone();
                asked.spawn(async move { (holding, fetch(&shared, blob, &holding).await) });
            }
            let Some(answer) = asked.join_next().await else { break };
            let Ok((holding, answer)) = answer else { continue };
            let place = holding.location();
            let Some(fragment) = self.accept(&place, answer) else { continue };
            let Fragment { description, index, block } = fragment;
            content.resize(description.len as usize, 0);
            let own = assembly.get_or_insert_with(|| EncodingAssembly::new(description));
            own.add(index, place.peer, block);
            match own.decode(&mut content) {
                Some(Ok(wrong)) => {
                    for (peer, index) in wrong {
                        self.note_forged(&FragmentLocation { peer, encoding: *encoding, index });
                    }
                    return Some(Gathered { assembly: assembly?, content });
                }
                Some(Err(error)) => failure = Some(error),
                None => {}
            }
        }
        match failure {
            // Not all choices were tried, so the encoding may be good.
            Some(error) if assembly.is_some_and(|one| one.is_hopeless()) => {
                self.entry.reason = Some(format!("too many of its fragments are forged: {error}"));
            }
            Some(error) => self.reject(*encoding, Rejection::Unreadable, error.to_string()),
            None => {}
        }
        None
    }

    /// The number of fragments that are enough, and all fragments of an encoding in the order in
    /// which they are read: enough different ones come first, of different peers if possible.
    fn reading_order(&self, encoding: &BlobId) -> Option<(usize, Vec<Holding>)> {
        let own = readable(&self.holdings, &self.entry.findings, encoding);
        let needed: usize = own.first()?.data.into();
        // Spread the reads over the holders, differently for each blob.
        let rotation = usize::from(self.entry.wanted.blob.as_bytes()[1]) % own.len();
        let mut rest: Vec<Holding> =
            own[rotation..].iter().chain(&own[..rotation]).copied().collect();
        let mut first: Vec<Holding> = Vec::new();
        for other_peers in [true, false] {
            let mut more = Vec::new();
            for one in rest {
                let is_new = |other: &Holding| {
                    other.index != one.index && (other.peer != one.peer || !other_peers)
                };
                let is_taken = first.len() < needed && first.iter().all(is_new);
                if is_taken { first.push(one) } else { more.push(one) }
            }
            rest = more;
        }
        first.extend(rest);
        Some((needed, first))
    }
}

/// The fragments of an encoding that can be read, for all that is known. They agree about the
/// encoding: a kind, numbers of blocks, and a length.
pub(super) fn readable(
    holdings: &[Holding],
    findings: &Findings,
    encoding: &BlobId,
) -> Vec<Holding> {
    let is_own = |one: &&Holding| one.encoding == *encoding && !findings.is_wrong(&one.location());
    as_one_encoding(holdings.iter().filter(is_own).copied().collect())
}

/// Of fragments that peers report under one encoding, those that agree about it. A seal proves what
/// a peer says. Without one, that claim counts which most fragments have. A peer that claims
/// something else must not keep the others from being read. If it wins by chance, its fragment turns
/// out to be damaged, and the next round does without it.
fn as_one_encoding(mut all: Vec<Holding>) -> Vec<Holding> {
    let claim = |one: &Holding| (one.kind == Kind::Record, one.data, one.parity, one.len);
    let mut votes: BTreeMap<_, (bool, usize)> = BTreeMap::new();
    for one in &all {
        let (is_sealed, count) = votes.entry(claim(one)).or_default();
        *is_sealed |= one.is_sealed;
        *count += 1;
    }
    if let Some((best, _)) = votes.into_iter().max_by_key(|(_, votes)| *votes) {
        all.retain(|one| claim(one) == best);
    }
    all
}

/// Reads a fragment; `None` if it is damaged, missing, or not what its holder reported.
pub(super) async fn fetch<P: Peers>(
    shared: &Shared<P>,
    blob: BlobId,
    holding: &Holding,
) -> Result<Option<Fragment>, Error> {
    let Holding { peer, encoding, kind, data, parity, index, len, .. } = *holding;
    let found = shared.peers.get(peer, FragmentId { blob, encoding, index }).await?;
    let is_it = |one: &Fragment| {
        let description = &one.description;
        one.index == index
            && description.id() == encoding
            && description.kind() == kind
            && description.needed() == usize::from(data)
            && description.width() == usize::from(data) + usize::from(parity)
            && description.block_len() == len as usize
            && one.is_of(&blob)
    };
    let found = found.filter(is_it);
    if let Some(fragment) = &found {
        shared.throttle(fragment.block.len() as u64).await;
    }
    Ok(found)
}
