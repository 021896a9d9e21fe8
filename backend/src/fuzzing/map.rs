//! The map file of a mirror.

use std::fs::File;

use cairn_store::{ChunkIndex, Geometry};

use super::{file_of, flip, path_of, take};
use crate::mirror::bits::{Bits, DirtySet};
use crate::mirror::files::map::{MapError, MapFile};
use crate::mirror::layout::{BLOCK_BYTES, Layout};
use crate::mirror::presence::{PAGE_BYTES, Presence};

const HEADER: usize = 512;
const HASHED: usize = 480;

/// The disk of the example. Its last chunk is partial.
const CHUNK: u32 = 64 << 10;
const SIZE: u64 = 10 * CHUNK as u64 + 512;

/// The number of bytes of each bitmap that may be flipped, which is more than the example's disk
/// needs.
const FLIPPED: usize = 64;

/// Flips bits in a valid map. The first byte chooses the state of the headers, and which checksums
/// are made valid again.
pub fn map(mut data: &[u8]) {
    let [how] = take(&mut data);
    let mut bytes = [header(1, how >> 4), header(2, how >> 4)].concat();
    bytes.resize(2 * HEADER + 3 * FLIPPED, 0);
    (0..2).for_each(|slot| seal(&mut bytes, slot));
    flip(&mut bytes, data);
    if how & 4 != 0 || data.is_empty() {
        (0..2).for_each(|slot| seal_bitmaps(&mut bytes, slot));
    }
    (0..2).filter(|slot| how & (1 << slot) != 0 || data.is_empty()).for_each(|slot| {
        seal(&mut bytes, slot);
    });
    let (headers, bitmaps) = bytes.split_at(2 * HEADER);
    let page = PAGE_BYTES as u64;
    let pieces = [
        (0, &headers[..HEADER]),
        (page, &headers[HEADER..]),
        (2 * page, &bitmaps[..FLIPPED]),
        (3 * page, &bitmaps[FLIPPED..2 * FLIPPED]),
        (4 * page, &bitmaps[2 * FLIPPED..]),
    ];
    let file = file_of(5 * page, &pieces);
    let checked = check(&file);
    assert!(checked.is_ok() || !data.is_empty(), "a whole map is refused: {checked:?}");
}

fn check(file: &File) -> Result<(), MapError> {
    let mut map = MapFile::open(&path_of(file))?;
    let layout = map.identity().layout();
    let (presence, dirty) = load(&map, &layout)?;
    let local: Vec<u64> = presence.touched_chunks(layout.blocks_per_chunk()).collect();
    let changed: Vec<u64> = dirty.iter().collect();
    assert!(local.iter().chain(&changed).all(|chunk| *chunk < layout.chunk_count()));
    assert_eq!(dirty.len(), changed.len() as u64);
    let intent = map.intent()?;
    let may_differ = |chunk: &u64| intent.covers_any(layout.span_of(ChunkIndex(*chunk)));
    let counts: Vec<u64> = local.iter().copied().filter(may_differ).collect();
    assert!(map.is_clean() || counts == changed, "after an unclean stop all of it counts");
    // A use of the mirror leaves the same state to the next one.
    let identity = map.identity().clone();
    map.begin([9; 16])?;
    assert!(!MapFile::open(&path_of(file))?.is_clean());
    map.end(&presence, dirty.iter(), true)?;
    let map = MapFile::open(&path_of(file)).expect("it was written by a clean stop");
    assert!(map.is_clean() && map.knows_guests());
    assert_eq!((map.identity(), map.use_id()), (&identity, &[9; 16]));
    let (presence, dirty) = load(&map, &layout).expect("it was written by a clean stop");
    assert_eq!(dirty.iter().collect::<Vec<_>>(), changed);
    assert!(presence.touched_chunks(layout.blocks_per_chunk()).eq(local));
    Ok(())
}

fn load(map: &MapFile, layout: &Layout) -> Result<(Presence, DirtySet), MapError> {
    let bits = |count| Bits::zeroed(count).expect("memory");
    let presence = Presence::absent(layout.block_count()).expect("memory");
    let chunks = layout.chunk_count();
    let dirty = DirtySet::new(bits(chunks), bits(chunks.div_ceil(64)));
    map.load(&presence, &dirty)?;
    Ok((presence, dirty))
}

/// A header without its checksums, as described in `docs/formats.md`.
fn header(sequence: u64, state: u8) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[0..8].copy_from_slice(b"CAIRNMAP");
    bytes[8] = 4;
    bytes[12] = state % 4;
    bytes[16..24].copy_from_slice(&sequence.to_le_bytes());
    bytes[24..40].copy_from_slice(&[7; 16]);
    bytes[40..48].copy_from_slice(&SIZE.to_le_bytes());
    bytes[48..52].copy_from_slice(&CHUNK.to_le_bytes());
    bytes[52..56].copy_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
    bytes[56] = 3;
    bytes[64] = 3;
    bytes[66..69].copy_from_slice(b"vm1");
    bytes[248..256].copy_from_slice(&SIZE.to_le_bytes());
    bytes
}

/// Makes a header's checksum over the bitmaps valid, if the file is large enough for its disk.
fn seal_bitmaps(bytes: &mut [u8], slot: usize) {
    let (headers, bitmaps) = bytes.split_at_mut(2 * HEADER);
    let header = &mut headers[slot * HEADER..][..HEADER];
    let size = u64::from_le_bytes(header[40..48].try_into().expect("eight bytes"));
    let chunk = u32::from_le_bytes(header[48..52].try_into().expect("four bytes"));
    let Ok(geometry) = Geometry::new(size, chunk) else { return };
    let dirty = geometry.chunk_count().div_ceil(8).min(FLIPPED as u64) as usize;
    let mut checksum = blake3::Hasher::new();
    checksum.update(&bitmaps[..FLIPPED]);
    checksum.update(&[0; PAGE_BYTES - FLIPPED]);
    checksum.update(&bitmaps[FLIPPED..][..dirty]);
    header[160..192].copy_from_slice(checksum.finalize().as_bytes());
}

/// Makes a header's own checksum valid.
fn seal(bytes: &mut [u8], slot: usize) {
    let header = &mut bytes[slot * HEADER..][..HEADER];
    let checksum = blake3::hash(&header[..HASHED]);
    header[HASHED..].copy_from_slice(checksum.as_bytes());
}
