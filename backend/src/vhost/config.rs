//! The features and the configuration space of the device.

use vhost::vhost_user::message::VhostUserVirtioFeatures;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};

use crate::mirror::layout::{BLOCK_BYTES, Layout, SECTOR_BYTES};
use crate::request::MAX_DISCARD_BYTES;

/// The length of `struct virtio_blk_config` up to the last field that this device uses. Later
/// fields read as zeros.
const CONFIG_BYTES: usize = 96;

/// The longest segment of a request.
const MAX_SEGMENT_BYTES: u32 = 4 << 20;

/// The offset of the field with which a guest reads and sets whether writes are cached.
pub(crate) const WRITEBACK_OFFSET: u32 = 32;

/// The features that the device offers. A guest is `migratable` if a second hypervisor can connect.
pub(crate) fn features(read_only: bool, migratable: bool) -> u64 {
    let bits = [
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_MQ,
    ];
    let mode: &[u32] = if read_only {
        &[VIRTIO_BLK_F_RO]
    } else {
        &[VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_F_CONFIG_WCE]
    };
    let mut always = VhostUserVirtioFeatures::PROTOCOL_FEATURES;
    always.set(VhostUserVirtioFeatures::LOG_ALL, migratable);
    bits.iter().chain(mode).fold(always.bits(), |all, bit| all | 1 << bit)
}

/// The configuration space, laid out as `struct virtio_blk_config`.
pub(crate) fn space(
    layout: &Layout,
    queues: u16,
    queue_size: u16,
    cached: bool,
) -> [u8; CONFIG_BYTES] {
    let mut space = [0; CONFIG_BYTES];
    let mut put = |offset: usize, bytes: &[u8]| {
        space[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    let max_discard = ((MAX_DISCARD_BYTES / SECTOR_BYTES) as u32).to_le_bytes();
    let one = 1u32.to_le_bytes();
    let block_sectors = (BLOCK_BYTES / SECTOR_BYTES) as u32;
    put(0, &(layout.size() / SECTOR_BYTES).to_le_bytes()); // capacity
    put(8, &MAX_SEGMENT_BYTES.to_le_bytes()); // size_max
    put(12, &u32::from(queue_size.saturating_sub(2).clamp(1, 254)).to_le_bytes()); // seg_max
    put(20, &(SECTOR_BYTES as u32).to_le_bytes()); // blk_size
    put(24, &[block_sectors.trailing_zeros() as u8]); // physical_block_exp
    put(26, &(block_sectors as u16).to_le_bytes()); // min_io_size
    put(28, &((layout.chunk_size() as u64 / SECTOR_BYTES) as u32).to_le_bytes()); // opt_io_size
    put(WRITEBACK_OFFSET as usize, &[u8::from(cached)]); // writeback
    put(34, &queues.to_le_bytes()); // num_queues
    put(36, &max_discard); // max_discard_sectors
    put(40, &one); // max_discard_seg
    put(44, &block_sectors.to_le_bytes()); // discard_sector_alignment
    put(48, &max_discard); // max_write_zeroes_sectors
    put(52, &one); // max_write_zeroes_seg
    put(56, &[1]); // write_zeroes_may_unmap
    space
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cairn_store::Geometry;
    use virtio_bindings::bindings::virtio_blk::virtio_blk_config;

    use super::{
        CONFIG_BYTES, Layout, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_WRITE_ZEROES, features, space,
    };

    #[test]
    fn the_space_has_the_layout_of_the_specification() {
        let layout = Layout::new(Geometry::new(1 << 30, 256 * 1024).unwrap());
        let space = space(&layout, 3, 128, true);
        let u32_at = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(space[0..8].try_into().unwrap()), (1 << 30) / 512);
        assert_eq!(u32_at(offset_of!(virtio_blk_config, size_max)), 4 << 20);
        assert_eq!(u32_at(offset_of!(virtio_blk_config, seg_max)), 126);
        assert_eq!(space[offset_of!(virtio_blk_config, wce)], 1);
        assert_eq!(u32_at(offset_of!(virtio_blk_config, blk_size)), 512);
        assert_eq!(space[offset_of!(virtio_blk_config, physical_block_exp)], 3);
        assert_eq!(u32_at(offset_of!(virtio_blk_config, opt_io_size)), 512);
        assert_eq!(space[offset_of!(virtio_blk_config, num_queues)], 3);
        assert_eq!(u32_at(offset_of!(virtio_blk_config, max_discard_sectors)), 131072);
        assert_eq!(u32_at(offset_of!(virtio_blk_config, max_discard_seg)), 1);
        assert_eq!(u32_at(offset_of!(virtio_blk_config, discard_sector_alignment)), 8);
        assert_eq!(u32_at(offset_of!(virtio_blk_config, max_write_zeroes_sectors)), 131072);
        assert_eq!(space[offset_of!(virtio_blk_config, write_zeroes_may_unmap)], 1);
        assert_eq!(CONFIG_BYTES, size_of::<virtio_blk_config>());
    }

    /// Drivers divide by these limits, or take a limit of zero for "nothing is allowed".
    #[test]
    fn no_limit_of_a_feature_that_is_offered_is_zero() {
        let sizes = [512, 4096, 4608, 65536, (1 << 30) + 512, 1 << 44];
        let queue_sizes = [1, 2, 4, 64, 256, 1024];
        for size in sizes {
            for (queue_size, chunk_size) in queue_sizes.into_iter().zip([65536, 4 << 20].repeat(3))
            {
                let layout = Layout::new(Geometry::new(size, chunk_size).unwrap());
                let space = space(&layout, 1, queue_size, true);
                let u32_at = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
                let limits = [
                    (VIRTIO_BLK_F_SIZE_MAX, u32_at(offset_of!(virtio_blk_config, size_max))),
                    (VIRTIO_BLK_F_SEG_MAX, u32_at(offset_of!(virtio_blk_config, seg_max))),
                    (
                        VIRTIO_BLK_F_DISCARD,
                        u32_at(offset_of!(virtio_blk_config, max_discard_sectors)),
                    ),
                    (VIRTIO_BLK_F_DISCARD, u32_at(offset_of!(virtio_blk_config, max_discard_seg))),
                    (
                        VIRTIO_BLK_F_DISCARD,
                        u32_at(offset_of!(virtio_blk_config, discard_sector_alignment)),
                    ),
                    (
                        VIRTIO_BLK_F_WRITE_ZEROES,
                        u32_at(offset_of!(virtio_blk_config, max_write_zeroes_sectors)),
                    ),
                    (
                        VIRTIO_BLK_F_WRITE_ZEROES,
                        u32_at(offset_of!(virtio_blk_config, max_write_zeroes_seg)),
                    ),
                ];
                for (feature, limit) in limits {
                    for read_only in [false, true] {
                        let is_offered = features(read_only, false) & 1 << feature != 0;
                        assert!(!is_offered || limit > 0, "{size} {queue_size}: feature {feature}");
                    }
                }
            }
        }
    }
}
