//! What snapshots, images and mirrors take: the bytes that nothing else refers to, and those that they
//! share.
//!
//! ```text
//! all roots, with their owners ─► sorted by node, for each level from the top:
//!
//!     node A of 1, 2 ─┐                      ┌─► owners of its children
//!     node B of 1    ─┼─► read each once ────┤         sorted with those of other nodes
//!     node C of other ┘                      └─► bytes of the node: unique or shared
//! ```
//!
//! - Roots that were asked for form *groups*: the snapshots of an image are the members of one, and a
//!   mirror is the only member of its own. An *owner* is a member, several members of one group, or
//!   everything that was not asked for.
//! - All references to the nodes of a level come from the level above. So the owners of a node are
//!   complete when it is read, each node is read once, however many trees have it, and no set of names
//!   is in memory: the references are sorted in temporary files.
//! - Owners of one group are joined on the way down. So a subtree that a thousand snapshots of an image
//!   share costs as much as that of one.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::blobs::directory::DirectoryBlobs;
use crate::catalog::{CollectionRoots, MarkedRoot, RootOwner};
use crate::durable::sorted_runs::{RunSorter, SortedRuns, temporary_directory};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, MirrorId, NodeId};
use crate::name::ImageName;
use crate::repository::Repository;

/// The most references of one level in memory: 10 MiB.
const MAX_REFERENCES: usize = if cfg!(test) { 8 } else { 1 << 18 };

/// The nodes that are read at a time.
const PARALLEL_NODES: usize = 16;

/// The blobs whose places are looked up at a time.
const LOOKUP_BATCH: usize = 1024;

/// How often the count is begun, if a collection runs meanwhile.
const MAX_ATTEMPTS: u32 = 3;

/// Progress is reported after this many blobs.
const REPORT_INTERVAL: u64 = 1 << 16;

/// The length of a reference: the name, the group, the member, and the size of the chunks.
const REFERENCE: usize = 41;

/// Several members of one group.
const SEVERAL: u32 = u32::MAX;

/// The group of everything that was not asked for.
const OTHERS: u32 = u32::MAX;

/// The bytes that something takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Bytes of chunks, before compression and redundancy.
    pub chunks: u64,
    /// The space in a directory, with that of tree nodes. 0 in a cluster.
    pub stored: u64,
}

/// What a snapshot takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotUsage {
    /// The number of the snapshot.
    pub number: u64,
    /// Bytes of all its chunks, each as often as it occurs in the disk.
    pub data: u64,
    /// What only this snapshot refers to. A collection frees it after the snapshot was removed.
    pub unique: Bytes,
}

impl SnapshotUsage {
    /// The bytes of its chunks that its removal does not free: something else refers to them, too, or
    /// they occur in it several times.
    pub fn shared(&self) -> u64 {
        self.data.saturating_sub(self.unique.chunks)
    }
}

/// What an image takes with all its snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageUsage {
    /// Its name.
    pub image: ImageName,
    /// Its snapshots with content, by number.
    pub snapshots: Vec<SnapshotUsage>,
    /// What only this image refers to. A collection frees it after the image was removed.
    pub unique: Bytes,
    /// Bytes of the chunks that this image and something else refer to: other images, mirrors and
    /// readers.
    pub shared: u64,
}

/// Computes what the images for which `is_wanted` holds take, and their snapshots. `progress` gets the
/// number of blobs so far.
pub fn usage(
    repository: &Repository,
    is_wanted: &dyn Fn(&ImageName) -> bool,
    progress: &dyn Fn(u64),
) -> Result<Vec<ImageUsage>> {
    beside_collections(repository, &|| {
        let roots = repository.catalog().collection_roots(true)?;
        let mut numbers: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for root in roots.roots.iter().filter(|root| root.owner == RootOwner::Snapshot) {
            if is_wanted(&roots.images[root.image as usize]) {
                numbers.entry(root.image).or_default().push(root.number);
            }
        }
        numbers.values_mut().for_each(|numbers| numbers.sort_unstable());
        let places = numbers.keys().zip(0u32..).map(|(image, place)| (*image, place));
        let places: HashMap<u32, u32> = places.collect();
        let owner_of = |root: &MarkedRoot| {
            let place = *places.get(&root.image).filter(|_| root.owner == RootOwner::Snapshot)?;
            let member = numbers[&root.image].binary_search(&root.number).ok()?;
            Some((place, member as u32))
        };
        let groups = numbers.values().map(Vec::len).collect::<Vec<_>>();
        let counted = count(repository, &roots, &groups, &owner_of, progress)?;
        let usage = |((image, numbers), group): ((&u32, &Vec<u64>), Group)| ImageUsage {
            image: roots.images[*image as usize].clone(),
            snapshots: numbers
                .iter()
                .zip(group.members)
                .map(|(&number, Member { data, unique })| SnapshotUsage { number, data, unique })
                .collect(),
            unique: group.unique,
            shared: group.shared,
        };
        let mut all: Vec<_> = numbers.iter().zip(counted).map(usage).collect();
        all.sort_by(|one, other| one.image.cmp(&other.image));
        Ok(all)
    })
}

/// Computes what each mirror alone keeps from being freed: nothing, if the snapshot that it continues
/// exists. Mirrors without an entry keep nothing. `progress` gets the number of blobs so far.
pub fn mirror_usage(
    repository: &Repository,
    progress: &dyn Fn(u64),
) -> Result<BTreeMap<MirrorId, Bytes>> {
    beside_collections(repository, &|| {
        let roots = repository.catalog().collection_roots(true)?;
        let of_snapshots = roots.roots.iter().filter(|root| root.owner == RootOwner::Snapshot);
        let of_snapshots: HashSet<_> = of_snapshots.map(|root| root.root).collect();
        let mut mirrors = BTreeMap::new();
        for root in &roots.roots {
            if let RootOwner::Mirror(id) = root.owner
                && !of_snapshots.contains(&root.root)
            {
                let place = mirrors.len() as u32;
                mirrors.insert(id, place);
            }
        }
        drop(of_snapshots);
        if mirrors.is_empty() {
            return Ok(BTreeMap::new());
        }
        let owner_of = |root: &MarkedRoot| match root.owner {
            RootOwner::Mirror(id) => mirrors.get(&id).map(|place| (*place, 0)),
            RootOwner::Snapshot | RootOwner::Reader => None,
        };
        let groups = count(repository, &roots, &vec![1; mirrors.len()], &owner_of, progress)?;
        Ok(mirrors.iter().map(|(id, place)| (*id, groups[*place as usize].unique)).collect())
    })
}

/// Counts again if a collection has deleted meanwhile what was removed since the roots were read.
fn beside_collections<T>(repository: &Repository, count: &dyn Fn() -> Result<T>) -> Result<T> {
    let mut attempts = 1;
    loop {
        let before = repository.catalog().collection_number()?;
        match count() {
            Err(error) if error.kind() == ErrorKind::Corrupt && attempts < MAX_ATTEMPTS => {
                if repository.catalog().collection_number()? == before {
                    return Err(error);
                }
                attempts += 1;
            }
            counted => return counted,
        }
    }
}

/// The group and the member that a root is, if it was asked for.
type OwnerOf<'a> = dyn Fn(&MarkedRoot) -> Option<(u32, u32)> + 'a;

/// What a group of roots takes.
#[derive(Default)]
struct Group {
    members: Vec<Member>,
    /// Bytes of the blobs that only this group refers to.
    unique: Bytes,
    /// Bytes of the chunks that this group and something else refer to.
    shared: u64,
}

#[derive(Clone, Default)]
struct Member {
    /// Bytes of all its chunks, each as often as it occurs.
    data: u64,
    /// Bytes of the blobs that only this member refers to.
    unique: Bytes,
}

/// Counts what the groups take. `sizes` has their numbers of members.
fn count(
    repository: &Repository,
    roots: &CollectionRoots,
    sizes: &[usize],
    owner_of: &OwnerOf<'_>,
    progress: &dyn Fn(u64),
) -> Result<Vec<Group>> {
    let group = |&size| Group { members: vec![Member::default(); size], ..Group::default() };
    let groups = sizes.iter().map(group).collect();
    let mut counting = Counting { repository, groups, unique: Vec::new(), blobs: 0, progress };
    let mut levels: Vec<RunSorter<REFERENCE>> = Vec::new();
    for root in &roots.roots {
        let Some(id) = root.root.0 else { continue };
        let level = usize::from(level_of(repository, id)?);
        while levels.len() <= level {
            levels.push(references());
        }
        levels[level].push(Owner::of(root, owner_of).reference(id.as_bytes()));
    }
    let mut chunks = references();
    while let Some(nodes) = levels.pop() {
        let level = levels.len() as u8;
        let below = levels.last_mut().unwrap_or(&mut chunks);
        counting.count_nodes(level, nodes.finish()?, below)?;
    }
    counting.count_chunks(chunks.finish()?)?;
    counting.count_data(roots, owner_of)?;
    Ok(counting.groups)
}

fn level_of(repository: &Repository, root: NodeId) -> Result<u8> {
    let mut node = repository.trees().nodes(&[root]);
    Ok(node.pop().expect("a node for each name")?.level())
}

fn references() -> RunSorter<REFERENCE> {
    RunSorter::new(&temporary_directory(), REFERENCE, MAX_REFERENCES)
}

/// One of those that refer to a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    group: u32,
    member: u32,
    /// The size of its chunks, as a power of two.
    chunk_bits: u8,
}

impl Owner {
    fn of(root: &MarkedRoot, owner_of: &OwnerOf<'_>) -> Owner {
        let (group, member) = owner_of(root).unwrap_or((OTHERS, SEVERAL));
        Owner { group, member, chunk_bits: root.geometry.chunk_size().trailing_zeros() as u8 }
    }

    fn reference(self, name: &[u8; 32]) -> [u8; REFERENCE] {
        let mut entry = [self.chunk_bits; REFERENCE];
        entry[..32].copy_from_slice(name);
        entry[32..36].copy_from_slice(&self.group.to_be_bytes());
        entry[36..40].copy_from_slice(&self.member.to_be_bytes());
        entry
    }
}

fn parse(entry: &[u8; REFERENCE]) -> ([u8; 32], Owner) {
    let (name, rest) = entry.split_first_chunk::<32>().expect("41 bytes");
    let u32_at = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().expect("4 bytes"));
    (*name, Owner { group: u32_at(0), member: u32_at(4), chunk_bits: rest[8] })
}

/// A blob with all its owners: one for each group.
struct Owned {
    name: [u8; 32],
    owners: Vec<Owner>,
}

impl Owned {
    /// The owner, if there is only one, and it was asked for.
    fn only(&self) -> Option<Owner> {
        match self.owners[..] {
            [owner] if owner.group != OTHERS => Some(owner),
            _ => None,
        }
    }
}

/// Joins the references to one blob. They are sorted by group.
fn owned(references: &SortedRuns<REFERENCE>) -> Result<impl Iterator<Item = Result<Owned>>> {
    let mut references = references.read()?.peekable();
    Ok(std::iter::from_fn(move || {
        let mut blob: Option<Owned> = None;
        loop {
            let next = match references.peek() {
                None => return blob.map(Ok),
                Some(Err(_)) => return references.next().and_then(Result::err).map(Err),
                Some(Ok(entry)) => parse(entry),
            };
            let (name, owner) = next;
            match &mut blob {
                None => blob = Some(Owned { name, owners: vec![owner] }),
                Some(blob) if blob.name == name => match blob.owners.last_mut() {
                    Some(last) if last.group == owner.group => last.member = SEVERAL,
                    _ => blob.owners.push(owner),
                },
                Some(_) => return blob.map(Ok),
            }
            references.next();
        }
    }))
}

struct Counting<'a> {
    repository: &'a Repository,
    groups: Vec<Group>,
    /// Blobs with one owner, whose space is not known yet.
    unique: Vec<(BlobId, Owner)>,
    blobs: u64,
    progress: &'a dyn Fn(u64),
}

impl Counting<'_> {
    /// Counts the nodes of a level, and passes their owners on to their children.
    fn count_nodes(
        &mut self,
        level: u8,
        nodes: SortedRuns<REFERENCE>,
        below: &mut RunSorter<REFERENCE>,
    ) -> Result<()> {
        let mut nodes = owned(&nodes)?;
        loop {
            let some = nodes.by_ref().take(PARALLEL_NODES).collect::<Result<Vec<_>>>()?;
            if some.is_empty() {
                return self.look_up();
            }
            let ids: Vec<_> = some.iter().map(|one| NodeId::from_bytes(one.name)).collect();
            for (one, node) in some.iter().zip(self.repository.trees().nodes(&ids)) {
                let node = node?;
                if node.level() != level {
                    let name = NodeId::from_bytes(one.name);
                    let reason = "it is a tree node of another level";
                    return Err(Error::corrupt(format!("tree node {name}"), reason));
                }
                for child in node.children() {
                    one.owners.iter().for_each(|owner| below.push(owner.reference(child)));
                }
                self.add(one, 0)?;
            }
        }
    }

    fn count_chunks(&mut self, chunks: SortedRuns<REFERENCE>) -> Result<()> {
        for one in owned(&chunks)? {
            let one = one?;
            self.add(&one, 1 << one.owners[0].chunk_bits)?;
        }
        self.look_up()
    }

    /// Adds a blob, with the bytes that it counts as a chunk.
    fn add(&mut self, one: &Owned, chunk: u64) -> Result<()> {
        self.blobs += 1;
        if self.blobs.is_multiple_of(REPORT_INTERVAL) {
            (self.progress)(self.blobs);
        }
        match one.only() {
            Some(owner) => {
                self.add_unique(owner, Bytes { chunks: chunk, stored: 0 });
                self.unique.push((BlobId::from_bytes(one.name), owner));
                if self.unique.len() >= LOOKUP_BATCH {
                    self.look_up()?;
                }
            }
            None => {
                for owner in one.owners.iter().filter(|owner| owner.group != OTHERS) {
                    self.groups[owner.group as usize].shared += chunk;
                }
            }
        }
        Ok(())
    }

    fn add_unique(&mut self, owner: Owner, bytes: Bytes) {
        let group = &mut self.groups[owner.group as usize];
        let member = group.members.get_mut(owner.member as usize);
        let member = member.map(|one| &mut one.unique);
        for unique in std::iter::once(&mut group.unique).chain(member) {
            unique.chunks += bytes.chunks;
            unique.stored += bytes.stored;
        }
    }

    /// Adds the space of blobs with one owner.
    fn look_up(&mut self) -> Result<()> {
        let unique = std::mem::take(&mut self.unique);
        let Some(blobs) = self.repository.blobs_in_directory() else { return Ok(()) };
        let blobs: &DirectoryBlobs = blobs;
        let ids: Vec<_> = unique.iter().map(|(id, _)| *id).collect();
        for ((_, owner), place) in unique.iter().zip(blobs.places(&ids)?) {
            let stored = place.map_or(0, |place| place.space());
            self.add_unique(*owner, Bytes { chunks: 0, stored });
        }
        Ok(())
    }

    /// Counts the chunks of each member.
    fn count_data(&mut self, roots: &CollectionRoots, owner_of: &OwnerOf<'_>) -> Result<()> {
        let mut counts = HashMap::new();
        for root in &roots.roots {
            let Some((group, member)) = owner_of(root) else { continue };
            let chunks = self.repository.trees().count_chunks(&root.root, &mut counts)?;
            let data = chunks * u64::from(root.geometry.chunk_size());
            self.groups[group as usize].members[member as usize].data = data;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
