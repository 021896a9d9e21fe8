//! The map file of a mirror: which blocks are local, in a form that survives the death of the host.
//!
//! The file is laid out for the largest size to which the disk can grow, and has space for its
//! present size: the rest is holes. `docs/formats.md` describes the bytes. Two header slots are written in turn, so that a torn
//! write leaves the other one. A torn page of presence is safe, because both the old and the new
//! value of each bit are safe. The dirty set is written only at a clean stop, and valid only after
//! one. The header of a clean stop has a checksum over both bitmaps.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use cairn_store::{
    ChunkIndex, Geometry, ImageId, ImageName, MAX_SIZE, MirrorId, MirrorParent, NodeId, Root,
};

use crate::mapping::Buffer;
use crate::mirror::bits::DirtySet;
use crate::mirror::files::disk_file::allocate_more;
use crate::mirror::intent::WriteIntent;
use crate::mirror::layout::{BLOCK_BYTES, Layout};
use crate::mirror::presence::{PAGE_BYTES, Page, Presence};

const MAGIC: &[u8; 8] = b"CAIRNMAP";
const VERSION: u32 = 4;
const SLOT_BYTES: u64 = 4096;
const PRESENCE_OFFSET: u64 = 2 * SLOT_BYTES;
const HEADER_BYTES: usize = 512;
const HASHED_BYTES: usize = 480;
const NAME_RANGE: std::ops::Range<usize> = 66..130;
const USE_ID_RANGE: std::ops::Range<usize> = 136..152;
const BITMAP_HASH_RANGE: std::ops::Range<usize> = 160..192;
const IMAGE_ID_RANGE: std::ops::Range<usize> = 192..208;
const PARENT_OFFSET: usize = 208;
const ROOT_RANGE: std::ops::Range<usize> = 216..248;
const CAPACITY_OFFSET: usize = 248;
const ANNOUNCED_OFFSET: usize = 256;
/// Up to this many pages are cheaper to write directly than with a sync.
const DIRECT_WRITE_MAX_PAGES: usize = 2;

/// The state of the bitmaps, in the flags of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MapState {
    /// In use: presence may be behind, and the dirty set is not valid.
    InUse = 0,
    /// Stopped cleanly. The header has the checksum of the bitmaps.
    Clean = 1,
    /// Never used: both bitmaps are empty.
    Fresh = 2,
    /// Stopped cleanly, but data that guests wrote before may be lost: none of these guests may go
    /// on.
    GuestsUnknown = 3,
}

/// Identifies one use of a mirror, from a start to its clean stop. Processes that are killed in
/// between, and those that take over from them, share the id.
pub(crate) type UseId = [u8; 16];

/// Why a map cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Reading or writing the file failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Neither header is valid.
    #[error("it is damaged ({0}); delete the mirror's directory to start again from a snapshot")]
    Damaged(&'static str),
    /// Written by an earlier release.
    #[error(
        "it has version {0}, this release reads version {VERSION}; delete the mirror's directory to \
         start again from a snapshot"
    )]
    Older(u32),
    /// Written by a later release.
    #[error("it has version {0}, this release reads up to {VERSION}; use a newer cairn-blk")]
    Newer(u32),
}

/// The identity of a mirror. Only the size of its disk changes after its creation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) mirror: MirrorId,
    pub(crate) image: ImageName,
    pub(crate) image_id: ImageId,
    pub(crate) geometry: Geometry,
    /// The largest size to which the disk can grow.
    pub(crate) capacity: u64,
    /// The snapshot that the mirror started from.
    pub(crate) origin: u64,
}

impl Identity {
    /// The layout of the disk.
    pub(crate) fn layout(&self) -> Layout {
        Layout::with_capacity(self.geometry, self.capacity)
    }
}

/// The open map of a mirror.
pub(crate) struct MapFile {
    file: File,
    /// The same file, opened so that a write is durable when it returns.
    direct: File,
    identity: Identity,
    header: Header,
}

/// The part of the header that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    sequence: u64,
    state: MapState,
    /// The current use, or the last one.
    use_id: UseId,
    /// The checksum of the bitmaps, after a clean stop.
    bitmaps: [u8; 32],
    /// The number and the root of the snapshot that the mirror's unchanged parts come from. After a
    /// kill it may be an older one: both name the same content for every block that is not local.
    parent: (u64, Root),
    /// The highest number of a snapshot that this mirror may have published, or 0.
    announced: u64,
}

impl MapFile {
    /// Creates the map of a new mirror: nothing is local, and it counts as cleanly stopped. The
    /// file appears atomically and durably.
    pub(crate) fn create(path: &Path, identity: Identity, root: Root) -> Result<MapFile, MapError> {
        let fresh = path.with_extension("new");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&fresh)?;
        let header = Header {
            sequence: 1,
            state: MapState::Fresh,
            use_id: [0; 16],
            bitmaps: [0; 32],
            parent: (identity.origin, root),
            announced: 0,
        };
        file.write_all(&encode(&identity, header))?;
        // Allocates all space, so that a later flush does not fail for lack of it.
        file.set_len(file_len(&identity.layout()))?;
        allocate_parts(&file, &identity.layout())?;
        file.sync_all()?;
        std::fs::rename(&fresh, path)?;
        let directory = path.parent().unwrap_or(Path::new("."));
        File::open(directory)?.sync_all()?;
        let direct = open_direct(path)?;
        Ok(MapFile { file, direct, identity, header })
    }

    /// Opens an existing map.
    pub(crate) fn open(path: &Path) -> Result<MapFile, MapError> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        // A killed process may have left a header that is not durable. The next header goes to the
        // other slot, and a power cut must not destroy both.
        file.sync_data()?;
        let slots = [0, SLOT_BYTES].map(|offset| {
            let mut bytes = [0; HEADER_BYTES];
            read_up_to(&file, &mut bytes, offset)
                .map_err(MapError::from)
                .and_then(|()| decode(&bytes))
        });
        let newest = match slots {
            [Err(MapError::Newer(version)), _] | [_, Err(MapError::Newer(version))] => {
                return Err(MapError::Newer(version));
            }
            [Ok(a), Ok(b)] if a.1.sequence > b.1.sequence => a,
            [Ok(_), Ok(b)] => b,
            [Ok(one), Err(_)] | [Err(_), Ok(one)] => one,
            [Err(error), Err(_)] => return Err(error),
        };
        let (identity, header) = newest;
        if file.metadata()?.len() < file_len(&identity.layout()) {
            return Err(MapError::Damaged("it is too short"));
        }
        let direct = open_direct(path)?;
        Ok(MapFile { file, direct, identity, header })
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Makes room for a disk that is going to grow. After an error, the map is as before.
    pub(crate) fn make_room(&self, layout: &Layout) -> io::Result<()> {
        allocate_parts(&self.file, layout)?;
        // The space is durable before a write relies on it: see `write_pages`.
        self.file.sync_data()
    }

    /// Records durably that the disk has grown. There is room for it, and the mirror is in use.
    pub(crate) fn set_size(&mut self, size: u64) -> io::Result<()> {
        let geometry = Geometry::new(size, self.identity.geometry.chunk_size());
        let geometry = geometry.map_err(io::Error::other)?;
        if self.is_clean() || size < self.identity.geometry.size() || size > self.identity.capacity
        {
            return Err(io::Error::other("the mirror's disk cannot get this size"));
        }
        let identity = Identity { geometry, ..self.identity.clone() };
        self.write(&identity, self.header)?;
        self.identity = identity;
        Ok(())
    }

    /// The snapshot that the mirror's unchanged parts come from.
    pub(crate) fn parent(&self) -> MirrorParent {
        let (number, root) = self.header.parent;
        let announced = self.header.announced.max(number);
        MirrorParent { image: self.identity.image_id, number, root, announced }
    }

    /// Records durably that the mirror has another parent.
    pub(crate) fn set_parent(&mut self, number: u64, root: Root) -> io::Result<()> {
        if self.header.parent == (number, root) {
            return Ok(());
        }
        self.write_header(Header { parent: (number, root), ..self.header })
    }

    /// Records durably that the mirror may publish the snapshot with this number. The next process
    /// accepts that snapshot as the mirror's parent, even if it is not recorded as the parent.
    pub(crate) fn announce(&mut self, number: u64) -> io::Result<()> {
        if self.header.announced >= number {
            return Ok(());
        }
        self.write_header(Header { announced: number, ..self.header })
    }

    /// The id of the current use, or of the last one.
    pub(crate) fn use_id(&self) -> &UseId {
        &self.header.use_id
    }

    /// Whether a guest that ran before the stop may go on, because nothing that it wrote is lost.
    pub(crate) fn knows_guests(&self) -> bool {
        matches!(self.header.state, MapState::Clean | MapState::Fresh)
    }

    /// Whether the last process stopped cleanly.
    pub(crate) fn is_clean(&self) -> bool {
        self.header.state != MapState::InUse
    }

    /// Reads the write intent.
    pub(crate) fn intent(&self) -> io::Result<WriteIntent> {
        let layout = self.identity.layout();
        let mut bytes = vec![0; WriteIntent::bytes_for(&layout)];
        self.file.read_exact_at(&mut bytes, intent_at(&layout))?;
        Ok(WriteIntent::new(&layout, &bytes))
    }

    /// Makes write intent durable.
    pub(crate) fn write_intent(&self, bytes: &[u8]) -> io::Result<()> {
        let mut pages = Buffer::zeroed(bytes.len().next_multiple_of(PAGE_BYTES));
        pages[..bytes.len()].copy_from_slice(bytes);
        self.direct.write_all_at(&pages, intent_at(&self.identity.layout()))
    }

    /// Reads which blocks are local, and which chunks had changed at a clean stop, into sets that
    /// are empty. After an unclean stop, a chunk counts as changed if it has local blocks and lies
    /// in a region with write intent.
    pub(crate) fn load(&self, presence: &Presence, dirty: &DirtySet) -> Result<(), MapError> {
        let layout = self.identity.layout();
        let mut checksum = blake3::Hasher::new();
        let mut page = vec![0; PAGE_BYTES];
        for index in 0..presence.bytes() / PAGE_BYTES as u64 {
            self.file.read_exact_at(&mut page, PRESENCE_OFFSET + index * PAGE_BYTES as u64)?;
            checksum.update(&page);
            presence.load_page(index, &page);
        }
        if presence.any_from(layout.block_count()) {
            return Err(MapError::Damaged("a block beyond the disk's end is present"));
        }
        if self.header.state == MapState::Fresh {
            // Otherwise the header that said that the map was used is lost.
            let empty = presence.local_bytes() == 0;
            return empty.then_some(()).ok_or(MapError::Damaged("its header is lost"));
        }
        if self.header.state == MapState::InUse {
            let intent = self.intent()?;
            for chunk in presence.touched_chunks(layout.blocks_per_chunk()) {
                if intent.covers_any(layout.span_of(ChunkIndex(chunk))) {
                    dirty.insert(chunk);
                }
            }
            return Ok(());
        }
        let mut bytes = vec![0; dirty_len(layout.chunk_count())];
        self.file.read_exact_at(&mut bytes, dirty_at(&layout))?;
        checksum.update(&bytes);
        if checksum.finalize() != self.header.bitmaps {
            return Err(MapError::Damaged("the checksum of its bitmaps is wrong"));
        }
        for (at, byte) in bytes.iter().enumerate().filter(|(_, byte)| **byte != 0) {
            for bit in (0..8).filter(|bit| byte & (1 << bit) != 0) {
                let chunk = at as u64 * 8 + bit;
                if chunk >= layout.chunk_count() {
                    return Err(MapError::Damaged("a chunk beyond the disk's end has changed"));
                }
                dirty.insert(chunk);
            }
        }
        Ok(())
    }

    /// Makes pages of the presence bitmap durable. The data of their blocks must be durable
    /// already.
    ///
    /// A few pages, as most flushes have, are written directly to the disk. The file is allocated,
    /// so that needs no commit of the file system's journal. Many pages share one sync.
    pub(crate) fn write_pages(&self, pages: &[Page]) -> io::Result<()> {
        let few = pages.len() <= DIRECT_WRITE_MAX_PAGES;
        let file = if few { &self.direct } else { &self.file };
        for page in pages {
            file.write_all_at(&page.bytes, PRESENCE_OFFSET + page.index * PAGE_BYTES as u64)?;
        }
        if few { Ok(()) } else { self.file.sync_data() }
    }

    /// Records durably that a use of the mirror begins, which may end uncleanly.
    pub(crate) fn begin(&mut self, use_id: UseId) -> io::Result<()> {
        let (state, bitmaps) = (MapState::InUse, [0; 32]);
        self.write_header(Header { use_id, state, bitmaps, ..self.header })
    }

    /// Records durably that the mirror was stopped cleanly with these changed chunks, and whether
    /// guests that ran may go on. The presence pages must be durable already.
    pub(crate) fn end(
        &mut self,
        presence: &Presence,
        dirty: impl Iterator<Item = u64>,
        knows_guests: bool,
    ) -> io::Result<()> {
        let layout = self.identity.layout();
        let mut bytes = vec![0u8; dirty_len(layout.chunk_count())];
        for chunk in dirty {
            bytes[(chunk / 8) as usize] |= 1 << (chunk % 8);
        }
        self.file.write_all_at(&bytes, dirty_at(&layout))?;
        self.file.sync_data()?;
        let mut checksum = blake3::Hasher::new();
        // The checksum is over the file's content, because a fetch may set bits until the very end
        // of the process.
        let mut page = vec![0; PAGE_BYTES];
        for index in 0..presence.bytes() / PAGE_BYTES as u64 {
            self.file.read_exact_at(&mut page, PRESENCE_OFFSET + index * PAGE_BYTES as u64)?;
            checksum.update(&page);
        }
        checksum.update(&bytes);
        let state = if knows_guests { MapState::Clean } else { MapState::GuestsUnknown };
        let bitmaps = *checksum.finalize().as_bytes();
        self.write_header(Header { state, bitmaps, ..self.header })
    }

    fn write_header(&mut self, header: Header) -> io::Result<()> {
        let identity = self.identity.clone();
        self.write(&identity, header)
    }

    fn write(&mut self, identity: &Identity, header: Header) -> io::Result<()> {
        let header = Header { sequence: self.header.sequence + 1, ..header };
        let bytes = encode(identity, header);
        self.file.write_all_at(&bytes, if header.sequence % 2 == 1 { 0 } else { SLOT_BYTES })?;
        self.file.sync_data()?;
        self.header = header;
        Ok(())
    }
}

fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).custom_flags(libc::O_DIRECT | libc::O_DSYNC).open(path)
}

/// The size of the dirty set of this many chunks.
fn dirty_len(chunks: u64) -> usize {
    chunks.div_ceil(8) as usize
}

/// The offset of the dirty set.
fn dirty_at(layout: &Layout) -> u64 {
    PRESENCE_OFFSET + Presence::bytes_for(layout.capacity_blocks())
}

/// The offset of the write intent. It starts at a page, and is written at once.
fn intent_at(layout: &Layout) -> u64 {
    let end = dirty_at(layout) + dirty_len(layout.capacity_chunks()) as u64;
    end.next_multiple_of(SLOT_BYTES)
}

fn file_len(layout: &Layout) -> u64 {
    intent_at(layout) + (WriteIntent::capacity_bytes(layout) as u64).next_multiple_of(SLOT_BYTES)
}

/// Allocates the space that a disk needs. The file is long enough for its capacity.
fn allocate_parts(file: &File, layout: &Layout) -> io::Result<()> {
    let pages = |bytes: u64| bytes.next_multiple_of(SLOT_BYTES);
    allocate_more(file, 0, PRESENCE_OFFSET + Presence::bytes_for(layout.block_count()))?;
    allocate_more(file, dirty_at(layout), pages(dirty_len(layout.chunk_count()) as u64))?;
    allocate_more(file, intent_at(layout), pages(WriteIntent::bytes_for(layout) as u64))
}

/// Reads as much as the file has. The rest of `bytes` becomes zero.
fn read_up_to(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes[done..].fill(0);
    Ok(())
}

fn encode(identity: &Identity, header: Header) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&(header.state as u32).to_le_bytes());
    bytes[16..24].copy_from_slice(&header.sequence.to_le_bytes());
    bytes[24..40].copy_from_slice(identity.mirror.as_bytes());
    bytes[40..48].copy_from_slice(&identity.geometry.size().to_le_bytes());
    bytes[48..52].copy_from_slice(&identity.geometry.chunk_size().to_le_bytes());
    bytes[52..56].copy_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
    bytes[56..64].copy_from_slice(&identity.origin.to_le_bytes());
    let name = identity.image.as_str().as_bytes();
    bytes[64..66].copy_from_slice(&(name.len() as u16).to_le_bytes());
    bytes[NAME_RANGE][..name.len()].copy_from_slice(name);
    bytes[USE_ID_RANGE].copy_from_slice(&header.use_id);
    bytes[BITMAP_HASH_RANGE].copy_from_slice(&header.bitmaps);
    bytes[IMAGE_ID_RANGE].copy_from_slice(identity.image_id.as_bytes());
    let (number, Root(root)) = header.parent;
    bytes[PARENT_OFFSET..PARENT_OFFSET + 8].copy_from_slice(&number.to_le_bytes());
    // No node has this name: an empty disk has no root.
    bytes[ROOT_RANGE].copy_from_slice(&root.map_or([0; 32], |root| *root.as_bytes()));
    bytes[CAPACITY_OFFSET..CAPACITY_OFFSET + 8].copy_from_slice(&identity.capacity.to_le_bytes());
    bytes[ANNOUNCED_OFFSET..ANNOUNCED_OFFSET + 8].copy_from_slice(&header.announced.to_le_bytes());
    let hash = blake3::hash(&bytes[..HASHED_BYTES]);
    bytes[HASHED_BYTES..].copy_from_slice(hash.as_bytes());
    bytes
}

fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<(Identity, Header), MapError> {
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    if &bytes[0..8] != MAGIC {
        return Err(MapError::Damaged("no map header"));
    }
    if blake3::hash(&bytes[..HASHED_BYTES])
        != blake3::Hash::from_bytes(bytes[HASHED_BYTES..].try_into().expect("32 bytes"))
    {
        return Err(MapError::Damaged("the checksum of its header is wrong"));
    }
    if u32_at(8) > VERSION {
        return Err(MapError::Newer(u32_at(8)));
    }
    if u32_at(8) < VERSION {
        return Err(MapError::Older(u32_at(8)));
    }
    if u64::from(u32_at(52)) != BLOCK_BYTES {
        return Err(MapError::Damaged("an unknown block size"));
    }
    let mirror: [u8; 16] = bytes[24..40].try_into().expect("16 bytes");
    let geometry = Geometry::new(u64_at(40), u32_at(48))
        .map_err(|_| MapError::Damaged("an impossible disk size"))?;
    let capacity = u64_at(CAPACITY_OFFSET);
    if capacity < geometry.size() || capacity > MAX_SIZE {
        return Err(MapError::Damaged("an impossible capacity"));
    }
    let length = usize::from(u16::from_le_bytes(bytes[64..66].try_into().expect("two bytes")));
    let image = bytes[NAME_RANGE]
        .get(..length)
        .and_then(|name| std::str::from_utf8(name).ok())
        .and_then(|name| name.parse().ok())
        .ok_or(MapError::Damaged("an impossible image name"))?;
    let image_id: [u8; 16] = bytes[IMAGE_ID_RANGE].try_into().expect("16 bytes");
    let identity = Identity {
        mirror: MirrorId::from_bytes(mirror),
        image,
        image_id: ImageId::from_bytes(image_id),
        geometry,
        capacity,
        origin: u64_at(56),
    };
    let state = match u32_at(12) {
        0 => MapState::InUse,
        1 => MapState::Clean,
        2 => MapState::Fresh,
        3 => MapState::GuestsUnknown,
        _ => return Err(MapError::Damaged("an unknown state")),
    };
    let sequence = u64_at(16);
    // The sequence numbers of later headers must fit.
    if sequence > u64::MAX / 2 {
        return Err(MapError::Damaged("an impossible sequence number"));
    }
    let bitmaps = bytes[BITMAP_HASH_RANGE].try_into().expect("32 bytes");
    let use_id = bytes[USE_ID_RANGE].try_into().expect("16 bytes");
    let root: [u8; 32] = bytes[ROOT_RANGE].try_into().expect("32 bytes");
    let root = Root((root != [0; 32]).then(|| NodeId::from_bytes(root)));
    let parent = (u64_at(PARENT_OFFSET), root);
    let announced = u64_at(ANNOUNCED_OFFSET);
    Ok((identity, Header { sequence, state, use_id, bitmaps, parent, announced }))
}

#[cfg(test)]
pub(crate) mod power_cut_tests;

#[cfg(test)]
mod region_power_cut_tests;

#[cfg(test)]
mod tests;
