//! Descriptor chains, as a guest makes them.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::memory::GuestMap;
use crate::mirror::layout::SECTOR_BYTES;
use crate::request::{
    Descriptor, MAX_DATA_BYTES, MAX_SEGMENTS, Parsed, RequestKind, Segment, parse,
};

/// The size of the guest's memory, which starts at address 0.
const MEMORY_BYTES: usize = 1 << 16;

/// Takes `data` as a chain of up to 64 descriptors of 13 bytes each, and as the guest's memory.
pub fn request(data: &[u8]) {
    let Some((count, rest)) = data.split_first() else { return };
    let chain = rest.chunks_exact(13).take(usize::from(count % 64));
    let chain: Vec<Descriptor> = chain
        .map(|bytes| Descriptor {
            segment: Segment {
                address: u64::from_le_bytes(bytes[0..8].try_into().expect("eight bytes")),
                len: u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes")),
            },
            writable: bytes[12] & 1 == 1,
        })
        .collect();
    let memory =
        GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).expect("memory");
    let content = &rest[..rest.len().min(MEMORY_BYTES)];
    memory.write_slice(content, GuestAddress(0)).expect("it fits");
    let Some(Parsed { status, request }) = parse(chain.iter().copied(), &memory) else { return };
    assert!((status.0 as usize) < MEMORY_BYTES);
    if let Ok(RequestKind::Read { data, len, .. } | RequestKind::Write { data, len, .. }) = request
    {
        assert!(len > 0 && len <= MAX_DATA_BYTES && len.is_multiple_of(SECTOR_BYTES));
        assert!(data.len() <= MAX_SEGMENTS);
        assert_eq!(data.iter().map(|segment| u64::from(segment.len)).sum::<u64>(), len);
        // Addresses outside of memory are refused, never translated.
        let _ = GuestMap::default().iovecs(&data);
    }
}
