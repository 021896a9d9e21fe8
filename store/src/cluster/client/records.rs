//! Records of snapshots on the peers. A lost catalog is rebuilt from them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::cluster::Cluster;
use super::connection::Connection;
use crate::cluster::placement::members::Member;
use crate::encoding::compression::Compression;
use crate::encoding::fragment::encode_record;
use crate::encoding::redundancy::StoragePolicy;
use crate::error::Result;
use crate::id::{BlobId, PeerId};

/// The records on the peers of a cluster.
pub(crate) struct FoundRecords {
    /// The records, each once.
    pub(crate) records: Vec<Vec<u8>>,
    /// The number of peers that returned all their records.
    pub(crate) answered: u64,
    /// The other peers, and why each of them did not.
    pub(crate) silent: Vec<(PeerId, String)>,
}

impl Cluster {
    /// Stores a record durably with its full redundancy. With `lenient` it is enough that the
    /// record can be read.
    pub(super) async fn put_record(
        &self,
        record: &[u8],
        policy: &StoragePolicy,
        lenient: bool,
    ) -> Result<BlobId> {
        let blob = BlobId::of(record);
        // Uncompressed, so that a record can be read as it is found.
        let policy = StoragePolicy { compression: Compression::None, ..*policy };
        let whole = Arc::new(encode_record(&blob, record, policy));
        let mut available = false;
        let stored = self.store_one(whole, policy.redundancy, || available = true).await;
        match stored {
            Err(error) if !(lenient && available) => Err(error),
            _ => Ok(blob),
        }
    }

    /// All records that the peers have.
    pub(super) async fn records(&self) -> FoundRecords {
        let mut found = BTreeMap::new();
        let (mut answered, mut silent) = (0, Vec::new());
        for member in self.members() {
            match self.records_of(&member, &mut found).await {
                Ok(()) => answered += 1,
                Err(error) => silent.push((member.id, error.to_string())),
            }
        }
        FoundRecords { records: found.into_values().collect(), answered, silent }
    }

    async fn records_of(
        &self,
        member: &Member,
        found: &mut BTreeMap<BlobId, Vec<u8>>,
    ) -> Result<()> {
        let mut after = BlobId::from_bytes([0; 32]);
        loop {
            let next =
                |connection: Arc<Connection>| async move { connection.records(&after).await };
            let page = self.inner.pool.ask(member, next).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = last.description.blob;
            // Records are stored as copies, so the block is the whole record.
            let whole =
                page.into_iter().filter(|one| BlobId::of(&one.block) == one.description.blob);
            found.extend(whole.map(|one| (one.description.blob, one.block.to_vec())));
        }
    }
}
