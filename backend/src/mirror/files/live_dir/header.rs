//! The header of the state file. It names the boot of the host and the use of the mirror for which
//! the live directory is valid.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::options;
use crate::mapping::PAGE_BYTES;
use crate::mirror::files::map::{MapFile, UseId};

pub(super) const MAGIC: &[u8; 8] = b"CRNLIVE\0";
/// Instead of [`MAGIC`] after a sync of the data file has failed. No release adopts such a directory.
pub(super) const INVALID_MAGIC: &[u8; 8] = b"CRNLOST\0";
pub(super) const VERSION: u32 = 3;

/// The size of the header.
pub(super) const HEADER_BYTES: usize = 128;

/// The position of the version in the header.
pub(super) const VERSION_RANGE: Range<usize> = 8..12;

/// The positions in the header of the id of the use, and of the id of a use that may have begun.
const USE_ID_RANGE: Range<usize> = 80..96;
pub(super) const NEXT_USE_ID_RANGE: Range<usize> = 96..112;

/// An id that differs from one boot of the host to the next.
pub(super) fn boot_id() -> io::Result<[u8; 36]> {
    let text = fs::read("/proc/sys/kernel/random/boot_id")?;
    text.get(..36)
        .and_then(|id| id.try_into().ok())
        .ok_or_else(|| io::Error::other("cannot read the host's boot id"))
}

/// The header of a live directory of the mirror with this map, for this boot and this use.
pub(super) fn header(boot: &[u8; 36], map: &MapFile, use_id: &UseId) -> [u8; HEADER_BYTES] {
    let identity = map.identity();
    let mut bytes = [0; HEADER_BYTES];
    bytes[0..8].copy_from_slice(MAGIC);
    bytes[VERSION_RANGE].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..48].copy_from_slice(boot);
    bytes[48..64].copy_from_slice(identity.mirror.as_bytes());
    bytes[64..72].copy_from_slice(&identity.capacity.to_le_bytes());
    bytes[72..76].copy_from_slice(&identity.geometry.chunk_size().to_le_bytes());
    bytes[USE_ID_RANGE].copy_from_slice(use_id);
    bytes
}

fn read_header(file: &File) -> io::Result<[u8; HEADER_BYTES]> {
    let mut bytes = [0; HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Whether a state file has this header. An error is not the same as `false`: the file may be all
/// that is left. The live directory of another version of this program is such an error: it holds
/// writes and checkpoints that are nowhere else.
pub(super) fn has_header(state: &Path, wanted: &[u8; HEADER_BYTES]) -> io::Result<bool> {
    match options().open(state) {
        Ok(file) if file.metadata()?.len() < PAGE_BYTES as u64 => Ok(false),
        Ok(file) => {
            let mut found = read_header(&file)?;
            if found.starts_with(INVALID_MAGIC) {
                tracing::warn!(
                    state = %state.display(),
                    "a sync of the mirror's data failed: only what was durable before is used"
                );
                return Ok(false);
            }
            let version = u32::from_le_bytes(found[VERSION_RANGE].try_into().expect("4 bytes"));
            found[VERSION_RANGE].copy_from_slice(&wanted[VERSION_RANGE]);
            let promised: UseId = found[NEXT_USE_ID_RANGE].try_into().expect("16 bytes");
            found[NEXT_USE_ID_RANGE].fill(0);
            let is_it = found == *wanted;
            found[USE_ID_RANGE].copy_from_slice(&promised);
            let is_it = is_it || (promised != UseId::default() && found == *wanted);
            if is_it && version != VERSION {
                return Err(io::Error::other(format!(
                    "{} has version {version}, this program uses {VERSION}; run the cairn-blk that \
                     made it until its checkpoints are stable, and stop it there",
                    state.display()
                )));
            }
            Ok(is_it)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
