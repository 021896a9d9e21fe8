//! Parses descriptor chains into requests. Pure: it reads guest memory and decides. It trusts
//! nothing that the guest wrote.

mod descriptors;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

pub(crate) use self::descriptors::Descriptors;
use crate::mirror::layout::SECTOR_BYTES;

/// The most data segments of one request: the limit of one vectored system call.
pub(crate) const MAX_SEGMENTS: usize = 1024;

/// The most data of one request. Linux sends at most a few MiB. The limit bounds bounce buffers.
pub(crate) const MAX_DATA_BYTES: u64 = 64 << 20;

/// The most bytes of a discard or a write of zeros, which bounds what one request changes.
pub(crate) const MAX_DISCARD_BYTES: u64 = 64 << 20;

/// The size of a request's header.
const HEADER_BYTES: usize = 16;

/// The most descriptors of one request, if the header is split into single bytes. What is parsed
/// stays small, however long the guest's tables are.
const MAX_DESCRIPTORS: usize = HEADER_BYTES + MAX_SEGMENTS + 1;

/// The size of the one range of a discard.
const DISCARD_RANGE_BYTES: usize = 16;

/// The flag of WRITE_ZEROES that permits deallocation. All other flags are reserved.
const FLAG_UNMAP: u32 = 1;

/// A contiguous range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) len: u32,
}

/// One descriptor of a chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub(crate) segment: Segment,
    pub(crate) writable: bool,
}

/// What the guest requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read { sector: u64, data: Vec<Segment>, len: u64 },
    Write { sector: u64, data: Vec<Segment>, len: u64 },
    Flush,
    GetId { data: Vec<Segment> },
    Discard { sector: u64, sectors: u32 },
    WriteZeroes { sector: u64, sectors: u32 },
}

/// How a chain is answered that is not a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The status says that this kind of request is not supported.
    Unsupported,
    /// The status says that the request failed.
    Invalid,
}

/// A parsed chain: the address of its status byte, and the request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Parsed {
    pub(crate) status: GuestAddress,
    pub(crate) request: Result<RequestKind, Refused>,
}

/// Parses a chain. Returns `None` if the chain has no room for a status byte, or is so long that the
/// place of its status is not looked for: then it can only be returned as it is.
pub(crate) fn parse(
    chain: impl Iterator<Item = Descriptor>,
    memory: &impl GuestMemoryBackend,
) -> Option<Parsed> {
    let mut readable = Vec::new();
    let mut writable: Vec<Segment> = Vec::new();
    let mut ordered = true;
    for (count, Descriptor { segment, writable: is_writable }) in chain.enumerate() {
        if count == MAX_DESCRIPTORS {
            return None;
        }
        if segment.len == 0 {
            continue;
        }
        if is_writable {
            writable.push(segment);
        } else {
            ordered &= writable.is_empty();
            readable.push(segment);
        }
    }
    let last = writable.last_mut()?;
    last.len -= 1;
    let status = GuestAddress(last.address.checked_add(u64::from(last.len))?);
    if last.len == 0 {
        writable.pop();
    }
    // A status byte that cannot be written does not count.
    memory.check_range(status, 1).then_some(())?;
    let request = if ordered { request(readable, writable, memory) } else { Err(Refused::Invalid) };
    Some(Parsed { status, request })
}

fn request(
    mut readable: Vec<Segment>,
    writable: Vec<Segment>,
    memory: &impl GuestMemoryBackend,
) -> Result<RequestKind, Refused> {
    let header: [u8; HEADER_BYTES] = take(&mut readable, memory)?;
    let kind = u32::from_le_bytes(header[0..4].try_into().expect("four bytes"));
    let sector = u64::from_le_bytes(header[8..16].try_into().expect("eight bytes"));
    match kind {
        VIRTIO_BLK_T_IN => {
            let len = data_len(&writable)?;
            readable.is_empty().then_some(()).ok_or(Refused::Invalid)?;
            Ok(RequestKind::Read { sector, data: writable, len })
        }
        VIRTIO_BLK_T_OUT => {
            let len = data_len(&readable)?;
            writable.is_empty().then_some(()).ok_or(Refused::Invalid)?;
            Ok(RequestKind::Write { sector, data: readable, len })
        }
        VIRTIO_BLK_T_FLUSH => Ok(RequestKind::Flush),
        VIRTIO_BLK_T_GET_ID => Ok(RequestKind::GetId { data: writable }),
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
            let range: [u8; DISCARD_RANGE_BYTES] = take(&mut readable, memory)?;
            let sector = u64::from_le_bytes(range[0..8].try_into().expect("eight bytes"));
            let sectors = u32::from_le_bytes(range[8..12].try_into().expect("four bytes"));
            let flags = u32::from_le_bytes(range[12..16].try_into().expect("four bytes"));
            // The device supports one range per request.
            if !readable.is_empty() || !writable.is_empty() {
                return Err(Refused::Invalid);
            }
            if u64::from(sectors) * SECTOR_BYTES > MAX_DISCARD_BYTES {
                return Err(Refused::Invalid);
            }
            match (kind, flags) {
                (VIRTIO_BLK_T_DISCARD, 0) => Ok(RequestKind::Discard { sector, sectors }),
                (VIRTIO_BLK_T_WRITE_ZEROES, 0 | FLAG_UNMAP) => {
                    Ok(RequestKind::WriteZeroes { sector, sectors })
                }
                _ => Err(Refused::Unsupported),
            }
        }
        _ => Err(Refused::Unsupported),
    }
}

/// Reads the first `N` bytes of `segments` and removes them, however they are split.
fn take<const N: usize>(
    segments: &mut Vec<Segment>,
    memory: &impl GuestMemoryBackend,
) -> Result<[u8; N], Refused> {
    let mut bytes = [0; N];
    let mut done = 0;
    while done < N {
        let first = segments.first_mut().ok_or(Refused::Invalid)?;
        let len = (first.len as usize).min(N - done);
        memory
            .read_slice(&mut bytes[done..done + len], GuestAddress(first.address))
            .map_err(|_| Refused::Invalid)?;
        done += len;
        first.len -= len as u32;
        match first.address.checked_add(len as u64) {
            Some(address) if first.len > 0 => first.address = address,
            _ => drop(segments.remove(0)),
        }
    }
    Ok(bytes)
}

/// The length of a request's data, if it is valid.
fn data_len(segments: &[Segment]) -> Result<u64, Refused> {
    let len: u64 = segments.iter().map(|segment| u64::from(segment.len)).sum();
    let fits = len > 0 && len <= MAX_DATA_BYTES && len.is_multiple_of(SECTOR_BYTES);
    if fits && segments.len() <= MAX_SEGMENTS { Ok(len) } else { Err(Refused::Invalid) }
}

#[cfg(test)]
mod tests;
