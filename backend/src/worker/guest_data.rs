//! Copies data between the guest's memory and buffers.

use vm_memory::{Bytes, GuestAddress};

use crate::memory::{GuestMap, OutsideMemory};
use crate::request::Segment;

/// Copies guest memory into a buffer.
pub(super) fn gather(
    map: &GuestMap,
    data: &[Segment],
    mut buffer: &mut [u8],
) -> Result<(), OutsideMemory> {
    for segment in data {
        let (piece, rest) = buffer.split_at_mut(segment.len as usize);
        map.memory().read_slice(piece, GuestAddress(segment.address)).map_err(|_| OutsideMemory)?;
        buffer = rest;
    }
    Ok(())
}

/// Copies a buffer into guest memory, as far as the buffer goes.
pub(super) fn scatter(
    map: &GuestMap,
    data: &[Segment],
    mut buffer: &[u8],
) -> Result<(), OutsideMemory> {
    for segment in data {
        let (piece, rest) = buffer.split_at(buffer.len().min(segment.len as usize));
        map.memory()
            .write_slice(piece, GuestAddress(segment.address))
            .map_err(|_| OutsideMemory)?;
        buffer = rest;
    }
    Ok(())
}
