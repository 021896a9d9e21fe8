//! Collections in the catalog: their numbers, the roots that they mark from, and the documents of
//! everybody who relies on blobs that no snapshot refers to.
//!
//! | key | is | lifetime |
//! |---|---|---|
//! | `collection` | the number of the collection that began last | stays |
//! | `collections` | when the last collections began, and what the last complete one did | stays |
//! | `commits/ID` | an import or another commit without a mirror: the number at which it began | expires |
//! | `readers/ID` | an export or another reader, and the content that it reads | expires |
//!
//! A mirror has the number at which it began to store in its own document. It stays there as long as
//! the mirror may have layers that are not published, because a later process may adopt them.
//!
//! - The change that notes a commit relies on the document `collection`. So it precedes the change
//!   that raises the number, or it has the higher number.
//! - The change that publishes relies on the commit's document and removes it.
//! - A collection raises the number, and then reads all documents as of one moment. So each commit
//!   is published by then, or its document is among them, or its number is that of the collection.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::documents::{
    IMAGES, ImageDocument, MIRRORS, MirrorDocument, SNAPSHOTS, SnapshotDocument, put_mirror,
};
use super::holder::Holder;
use super::images::snapshot_of;
use super::readers::{READERS, ReaderDocument};
use crate::clock::now;
use crate::cluster::membership::{ClusterEpoch, LOSSES};
use crate::collection::CollectionNumber;
use crate::documents::{Change, Query, View};
use crate::error::{Error, Result};
use crate::geometry::{Geometry, MAX_SIZE};
use crate::id::{ImageId, LeaseId, MirrorId};
use crate::name::{ImageName, SnapshotRef};
use crate::planted::{Defect, is_planted};
use crate::process::{Process, host_name};
use crate::tree::Root;

pub(super) const COLLECTION: &str = "collection";
const COLLECTIONS: &str = "collections";
const COMMITS: &str = "commits/";

/// How long the document of a commit or a reader lasts without a renewal, in seconds.
pub(crate) const LEASED_SECONDS: u32 = 600;

/// The most collections whose beginnings are remembered. Of older ones, fewer are.
const MAX_REMEMBERED: usize = 1000;

/// What protects the blobs of a commit until it is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommitBasis {
    /// The epoch of the cluster in which all blobs of the commit are known to be stored.
    pub(crate) epoch: ClusterEpoch,
    /// The number in the commit's document. All blobs of the commit have at least this stamp.
    pub(crate) collection: CollectionNumber,
}

impl CommitBasis {
    /// The basis of a commit that begins now.
    pub(super) fn of(view: &View) -> Result<CommitBasis> {
        Ok(CommitBasis { epoch: ClusterEpoch::of(view)?, collection: current(view)? })
    }

    /// The documents that [`CommitBasis::of`] needs.
    pub(super) fn queries() -> [Query; 2] {
        [Query::key(LOSSES), Query::key(COLLECTION)]
    }
}

/// The process that holds a document of a commit or a reader, for people.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HolderDocument {
    /// What it does.
    pub(super) what: String,
    pub(super) host: String,
    pub(super) process: Process,
    /// When it began: seconds since 1970.
    begun: u64,
}

impl HolderDocument {
    pub(super) fn new(what: &str) -> Result<HolderDocument> {
        let (host, process) = (host_name()?, Process::current()?);
        Ok(HolderDocument { what: what.into(), host, process, begun: now() })
    }
}

#[derive(Serialize, Deserialize)]
struct CommitDocument {
    collection: CollectionNumber,
    #[serde(flatten)]
    holder: HolderDocument,
}

/// A collection that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BegunCollection {
    number: CollectionNumber,
    /// Seconds since 1970.
    time: u64,
}

#[derive(Clone, Default, Serialize, Deserialize)]
struct CollectionsDocument {
    /// The last collections that have begun, the oldest first.
    begun: Vec<BegunCollection>,
    completed: Option<CompletedCollection>,
}

/// The last collection that was completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletedCollection {
    /// Its number.
    pub number: CollectionNumber,
    /// When it ended: seconds since 1970.
    pub time: u64,
    /// The bytes that it freed.
    pub freed_bytes: u64,
}

/// Content that a collection marks.
#[derive(Clone, Debug)]
pub(crate) struct MarkedRoot {
    pub(crate) geometry: Geometry,
    pub(crate) root: Root,
    /// The index of the image in [`CollectionRoots::images`].
    pub(crate) image: u32,
    pub(crate) number: u64,
    pub(crate) owner: RootOwner,
}

/// What a collection keeps content for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RootOwner {
    Snapshot,
    /// A mirror, which needs the content of its parent.
    Mirror(MirrorId),
    Reader,
}

/// Something that keeps a collection from freeing space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceHolder {
    /// `commit`, `reader`, `mirror` or `pin`.
    pub kind: &'static str,
    /// What it does or keeps.
    pub what: String,
    /// The host; empty for a pin.
    pub host: String,
    /// When it began, when the mirror was last attached, or when the oldest pinned snapshot was taken:
    /// seconds since 1970.
    pub since: u64,
    /// Blobs that were stored or found since this collection are kept; `None` if it keeps content.
    pub collection: Option<CollectionNumber>,
}

/// What a collection must keep.
#[derive(Default)]
pub(crate) struct CollectionRoots {
    pub(crate) roots: Vec<MarkedRoot>,
    pub(crate) images: Vec<ImageName>,
    pub(crate) holders: Vec<SpaceHolder>,
    /// The number of the oldest commit.
    pub(crate) oldest: Option<CollectionNumber>,
}

impl CollectionRoots {
    /// The name of the snapshot that the content is that of.
    pub(crate) fn name(&self, root: &MarkedRoot) -> SnapshotRef {
        SnapshotRef::number(&self.images[root.image as usize], root.number)
    }

    fn hold_since(
        &mut self,
        holder: &HolderDocument,
        kind: &'static str,
        n: Option<CollectionNumber>,
    ) {
        let HolderDocument { what, host, begun, .. } = holder.clone();
        self.holders.push(SpaceHolder { kind, what, host, since: begun, collection: n });
        self.oldest = self.oldest.into_iter().chain(n).min();
    }
}

/// The current collection number.
pub(super) fn current(view: &View) -> Result<CollectionNumber> {
    Ok(view.get(COLLECTION)?.unwrap_or(CollectionNumber::FIRST))
}

/// The change that raises the number of a catalog that is being rebuilt above all that the catalog
/// before had given out, in seconds since 1970, as far as a clock can. What is on the peers has stamps
/// of those numbers, and nothing of it would be deleted until this catalog had as many collections.
pub(super) fn raise_after_loss(view: &View, change: Change) -> Result<Change> {
    // Rebuilds that run at the same time need not disturb each other.
    let hour = CollectionNumber(now() / 3600 * 3600);
    Ok(match current(view)? < hour {
        true => change.put(COLLECTION, &hour),
        false => change,
    })
}

impl Catalog {
    /// The number of the collection that began last.
    pub(crate) fn collection_number(&self) -> Result<CollectionNumber> {
        current(&self.read(&[Query::key(COLLECTION)])?)
    }

    /// The last collection that was completed.
    pub fn last_collection(&self) -> Result<Option<CompletedCollection>> {
        let view = self.read(&[Query::key(COLLECTIONS)])?;
        Ok(view.get::<CollectionsDocument>(COLLECTIONS)?.and_then(|one| one.completed))
    }

    /// Begins a commit without a mirror, or begins it again: creates its document. The document
    /// expires unless it is [renewed](Self::renew_leased).
    pub(crate) fn begin_commit(&self, id: &LeaseId, what: &str) -> Result<CommitBasis> {
        self.hold_since(id, what, None)
    }

    /// Begins something during which collections delete nothing at all. It ends as a commit does.
    pub(crate) fn hold_everything(&self, id: &LeaseId, what: &str) -> Result<CommitBasis> {
        self.hold_since(id, what, Some(CollectionNumber::FIRST))
    }

    /// Creates a commit document with a number, or with the current one.
    fn hold_since(
        &self,
        id: &LeaseId,
        what: &str,
        since: Option<CollectionNumber>,
    ) -> Result<CommitBasis> {
        let holder = HolderDocument::new(what)?;
        self.change(&CommitBasis::queries(), |view| {
            let basis = CommitBasis::of(view)?;
            let (collection, holder) = (since.unwrap_or(basis.collection), holder.clone());
            let document = CommitDocument { collection, holder };
            let change = match is_planted(Defect::NoCommitDocument) {
                true => Change::default(),
                false => Change::default().put_for(LEASED_SECONDS, commit_key(id), &document),
            };
            Ok((change, basis))
        })
    }

    /// The basis of a commit of a mirror that stores something: notes the current number in the
    /// mirror's document, unless an older one is there. Also returns whether the content of the mirror's
    /// `parent` must be verified: the document did not refer to it all the time.
    pub(crate) fn begin_mirror_commit(
        &self,
        holder: &Holder,
        parent: (u64, Root),
    ) -> Result<(CommitBasis, bool)> {
        let mut queries = holder.queries(0);
        queries.extend(CommitBasis::queries());
        self.change(&queries, |view| {
            holder.check(view)?;
            let before = holder.mirror(view)?;
            let mut mirror = before.clone();
            let (basis, _) = mirror_basis(view, &mut mirror)?;
            mirror.refer_to(parent);
            let change = match mirror == before {
                true => Change::default(),
                false => put_mirror(Change::default(), &holder.mirror_id(), &mirror),
            };
            Ok((change, (basis, mirror.is_parent_unverified)))
        })
    }

    /// Notes that the content of the mirror's parent was verified, while the document referred to it.
    pub(crate) fn note_parent_verified(&self, holder: &Holder, parent: (u64, Root)) -> Result<()> {
        self.change(&holder.queries(0), |view| {
            holder.check(view)?;
            let mirror = holder.mirror(view)?;
            let is_same = (mirror.parent, Root(mirror.root)) == parent;
            let verified = MirrorDocument { is_parent_unverified: false, ..mirror };
            let put = || put_mirror(Change::default(), &holder.mirror_id(), &verified);
            Ok((if is_same { put() } else { Change::default() }, ()))
        })
    }

    /// Renews the document of a commit or a reader. Returns `false` if it has expired: what it
    /// protected may be gone.
    pub(crate) fn renew_leased(&self, key: &str) -> Result<bool> {
        self.retry(|| {
            let view = self.read(&[Query::key(key)])?;
            let Some(document) = view.get::<serde_json::Value>(key)? else {
                return Ok(Some(false));
            };
            let mut change = Change::default().put_for(LEASED_SECONDS, key, &document);
            change.relies_on.push((key.to_owned(), view.version(key)));
            Ok(self.documents.commit(&change)?.then_some(true))
        })
    }

    /// Removes the document of a commit or a reader.
    pub(crate) fn end_leased(&self, key: &str) -> Result<()> {
        self.change(&[], |_| Ok((Change::default().remove(Query::key(key)), ())))
    }

    /// Raises the number. Fails if a place for blobs has seen a higher number than this catalog,
    /// unless `accept_older` is set: the catalog was restored from a copy, or was rebuilt.
    pub(crate) fn begin_collection(
        &self,
        highest_seen: CollectionNumber,
        accept_older: bool,
    ) -> Result<CollectionNumber> {
        self.change(&[Query::key(COLLECTION), Query::key(COLLECTIONS)], |view| {
            let current = current(view)?;
            let accept_older = accept_older || is_planted(Defect::AcceptOlderCatalog);
            if highest_seen > current && !accept_older {
                return Err(Error::OlderCatalog { catalog: current.0, blobs: highest_seen.0 });
            }
            let number = current.max(highest_seen).next();
            let mut all = view.get::<CollectionsDocument>(COLLECTIONS)?.unwrap_or_default();
            remember(&mut all.begun, BegunCollection { number, time: now() });
            Ok((Change::default().put(COLLECTION, &number).put(COLLECTIONS, &all), number))
        })
    }

    /// The highest number of a collection that began at least `seconds` ago. What has a lower stamp
    /// was stored, or found present, before that.
    pub(crate) fn collection_before(&self, seconds: u64) -> Result<CollectionNumber> {
        let view = self.read(&[Query::key(COLLECTIONS)])?;
        let all = view.get::<CollectionsDocument>(COLLECTIONS)?.unwrap_or_default();
        let end = now().saturating_sub(seconds);
        let old = all.begun.iter().filter(|one| one.time <= end).map(|one| one.number).max();
        Ok(old.unwrap_or(CollectionNumber::FIRST))
    }

    /// Notes that a collection is complete.
    pub(crate) fn end_collection(&self, number: CollectionNumber, freed_bytes: u64) -> Result<()> {
        self.change(&[Query::key(COLLECTIONS)], |view| {
            let mut all = view.get::<CollectionsDocument>(COLLECTIONS)?.unwrap_or_default();
            all.completed = Some(CompletedCollection { number, time: now(), freed_bytes });
            Ok((Change::default().put(COLLECTIONS, &all), ()))
        })
    }

    /// Ends the commits of processes that have died on this host. A publication that such a process
    /// has sent before its death may still be on its way to the catalog: it fails from then on.
    pub(crate) fn end_dead_commits(&self) -> Result<()> {
        let (observer, mut dead) = (Process::current()?, Vec::new());
        self.documents.scan(&[COMMITS], &mut |key, document| {
            let one: CommitDocument = document.decode(key)?;
            if one.holder.process.is_dead(&observer) {
                dead.push(key.to_owned());
            }
            Ok(())
        })?;
        dead.iter().try_for_each(|key| self.end_leased(key))
    }

    /// Everything that a collection must keep, as of one moment. A dry run does not end the commits of
    /// dead processes, so it leaves them out with `skip_dead_commits`.
    pub(crate) fn collection_roots(&self, skip_dead_commits: bool) -> Result<CollectionRoots> {
        // Checks the version of the documents.
        self.read(&[])?;
        let observer = Process::current()?;
        let mut all = CollectionRoots::default();
        let mut images: HashMap<ImageId, (u32, u32)> = HashMap::new();
        let mut mirrors = Vec::new();
        let (mut kept, mut pins) = (HashSet::new(), BTreeMap::<u32, (u64, u64)>::new());
        // In the order of the keys: images precede mirrors, and both precede snapshots.
        let prefixes = [COMMITS, IMAGES, MIRRORS, READERS, SNAPSHOTS];
        self.documents.scan(&prefixes, &mut |key, document| {
            if key.starts_with(COMMITS) {
                let one: CommitDocument = document.decode(key)?;
                // Without a dry run, a process may have died after the dead commits were ended. Its
                // publication may still arrive.
                if !skip_dead_commits || !one.holder.process.is_dead(&observer) {
                    all.hold_since(&one.holder, "commit", Some(one.collection));
                }
            } else if let Some(name) = key.strip_prefix(IMAGES) {
                let image: ImageDocument = document.decode(key)?;
                let at = u32::try_from(all.images.len()).expect("a catalog has fewer images");
                all.images.push(name.parse()?);
                images.insert(image.id, (at, image.chunk_size));
            } else if let Some(id) = key.strip_prefix(MIRRORS) {
                let id = id.parse()?;
                let mirror: MirrorDocument = document.decode(key)?;
                if let Some(&(image, chunk_size)) = images.get(&mirror.image_id) {
                    // The tree itself tells the size that the parent had.
                    let geometry = Geometry::new(MAX_SIZE, chunk_size)?;
                    let (root, number) = (Root(mirror.root), mirror.parent);
                    all.roots.push(MarkedRoot {
                        geometry,
                        root,
                        image,
                        number,
                        owner: RootOwner::Mirror(id),
                    });
                    mirrors.push((image, mirror));
                }
            } else if key.starts_with(READERS) {
                let one: ReaderDocument = document.decode(key)?;
                if !one.holder.process.is_dead(&observer) {
                    let (geometry, root) = one.content()?;
                    let (image, number) = (all.images.len() as u32, one.number);
                    all.images.push(one.image);
                    all.roots.push(MarkedRoot {
                        geometry,
                        root,
                        image,
                        number,
                        owner: RootOwner::Reader,
                    });
                    all.hold_since(&one.holder, "reader", None);
                }
            } else {
                let snapshot: SnapshotDocument = document.decode(key)?;
                let (id, number) = snapshot_of(key)?;
                // A snapshot without an image is left from a rebuild that was killed.
                if let Some(&(image, chunk_size)) = images.get(&id)
                    && snapshot.state.has_content()
                {
                    let geometry = Geometry::new(snapshot.size, chunk_size)?;
                    let root = Root(snapshot.root);
                    all.roots.push(MarkedRoot {
                        geometry,
                        root,
                        image,
                        number,
                        owner: RootOwner::Snapshot,
                    });
                    kept.insert((image, number));
                    if snapshot.is_pinned {
                        let (count, since) = pins.entry(image).or_insert((0, u64::MAX));
                        (*count, *since) = (*count + 1, snapshot.time.min(*since));
                    }
                }
            }
            Ok(())
        })?;
        for (image, mirror) in mirrors {
            let name = SnapshotRef::number(&all.images[image as usize], mirror.parent);
            let mut hold = |what, collection| {
                let (host, since) = (mirror.host.clone(), mirror.attached);
                all.holders.push(SpaceHolder { kind: "mirror", what, host, since, collection });
            };
            if let Some(collection) = mirror.storing_since {
                hold(format!("{} stores a checkpoint of {name}", mirror.path), Some(collection));
                all.oldest = all.oldest.into_iter().chain([collection]).min();
            }
            if mirror.root.is_some() && !kept.contains(&(image, mirror.parent)) {
                hold(format!("{} continues {name}, which was removed", mirror.path), None);
            }
        }
        for (image, (count, since)) in pins {
            let plural = if count == 1 { "" } else { "s" };
            let what = format!("{count} pinned snapshot{plural} of {}", all.images[image as usize]);
            let host = String::new();
            all.holders.push(SpaceHolder { kind: "pin", what, host, since, collection: None });
        }
        Ok(all)
    }
}

/// Adds a collection that begins. If there are too many, those go without which no gap is longer than
/// an eighth of its age. So one of about each age stays, however often collections begin.
fn remember(begun: &mut Vec<BegunCollection>, one: BegunCollection) {
    begun.push(one);
    if begun.len() <= MAX_REMEMBERED {
        return;
    }
    let mut newest_first: Vec<BegunCollection> = Vec::new();
    for (at, middle) in begun.iter().enumerate().rev() {
        if let Some(newer) = newest_first.last()
            && let Some(older) = at.checked_sub(1).map(|at| begun[at])
            && newer.time.saturating_sub(older.time) <= one.time.saturating_sub(newer.time) / 8
        {
            continue;
        }
        newest_first.push(*middle);
    }
    begun.clear();
    begun.extend(newest_first.into_iter().rev());
}

/// The basis of a commit of this mirror, and whether the mirror's document must be written for it.
pub(super) fn mirror_basis(
    view: &View,
    mirror: &mut MirrorDocument,
) -> Result<(CommitBasis, bool)> {
    let mut basis = CommitBasis::of(view)?;
    let is_new = mirror.storing_since.is_none();
    basis.collection = *mirror.storing_since.get_or_insert(basis.collection);
    Ok((basis, is_new))
}

/// Whether the document of a commit protects its blobs.
pub(super) fn protects(view: &View, id: &LeaseId, basis: &CommitBasis) -> Result<bool> {
    if is_planted(Defect::NoCommitDocument) {
        return Ok(true);
    }
    let document = view.get::<CommitDocument>(&commit_key(id))?;
    Ok(document.is_some_and(|document| document.collection == basis.collection))
}

/// The key of a commit without a mirror.
pub(crate) fn commit_key(id: &LeaseId) -> String {
    format!("{COMMITS}{id}")
}

#[cfg(test)]
mod tests;
