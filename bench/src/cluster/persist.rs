//! A client that persists what it has in memory: named, put, and flushed.

use std::time::Instant;

use anyhow::{Context, Result};
use cairn_store::cluster::ClusterBlobs;
use cairn_store::encoding::StoragePolicy;
use cairn_store::{BlobId, Blobs};

use super::data::CHUNK;

/// Chunks that are put with one call: as many as `cairn-blk` puts.
const GROUP: usize = 16;

/// Persists chunks, and returns how many seconds it took until they were durable.
pub(crate) fn persist(client: &ClusterBlobs, bytes: &[u8], policy: &StoragePolicy) -> Result<f64> {
    let begin = Instant::now();
    for group in bytes.chunks(GROUP * CHUNK) {
        let blobs: Vec<_> = group.chunks(CHUNK).map(|chunk| (BlobId::of(chunk), chunk)).collect();
        client.put(&blobs, policy).context("put chunks")?;
    }
    client.flush().context("flush")?;
    Ok(begin.elapsed().as_secs_f64())
}
