//! Stores data of a client on the peers.

use std::time::Instant;

use anyhow::{Context, Result};
use cairn_store::cluster::ClusterBlobs;
use cairn_store::encoding::StoragePolicy;
use cairn_store::{Blobs, NewBlob};

use super::data::CHUNK;

/// The number of chunks of one put. `cairn-blk` uses the same number.
const GROUP: usize = 16;

/// Stores the chunks and returns the seconds until they were durable.
pub(crate) fn persist(client: &ClusterBlobs, bytes: &[u8], policy: &StoragePolicy) -> Result<f64> {
    let begin = Instant::now();
    for group in bytes.chunks(GROUP * CHUNK) {
        let blobs: Vec<_> = group.chunks(CHUNK).map(NewBlob::new).collect();
        client.put(&blobs, policy).context("storing chunks")?;
    }
    client.flush().context("flushing")?;
    Ok(begin.elapsed().as_secs_f64())
}
