//! Records of snapshots on the peers. A lost catalog is rebuilt from them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::cluster::Cluster;
use super::connection::Connection;
use crate::cluster::list_check::ListCheck;
use crate::cluster::placement::members::Member;
use crate::encoding::compression::Compression;
use crate::encoding::fragment::encode_record;
use crate::encoding::redundancy::StoragePolicy;
use crate::error::Result;
use crate::id::{BlobId, PeerId};

/// The records on the peers of a cluster.
pub(crate) struct FoundRecords {
    /// The records with a valid seal, each once.
    pub(crate) records: Vec<Vec<u8>>,
    /// The number of records without a valid seal. A peer may have forged them.
    pub(crate) unsealed: u64,
    /// The peers that returned all their records.
    pub(crate) answered: Vec<PeerId>,
    /// The other peers, and why each of them did not.
    pub(crate) silent: Vec<(PeerId, String)>,
}

/// The most records without a seal that are counted. A peer can make up any number.
const MAX_UNSEALED: usize = 1 << 20;

/// Records on the peers that were asked so far.
#[derive(Default)]
struct Found {
    sealed: BTreeMap<BlobId, Vec<u8>>,
    unsealed: BTreeSet<BlobId>,
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
        let mut found = Found::default();
        let (mut answered, mut silent) = (Vec::new(), Vec::new());
        for member in self.members() {
            match self.records_of(&member, &mut found).await {
                Ok(()) => answered.push(member.id),
                Err(error) => silent.push((member.id, error.to_string())),
            }
        }
        let Found { sealed, mut unsealed } = found;
        unsealed.retain(|blob| !sealed.contains_key(blob));
        let (records, unsealed) = (sealed.into_values().collect(), unsealed.len() as u64);
        FoundRecords { records, unsealed, answered, silent }
    }

    async fn records_of(&self, member: &Member, found: &mut Found) -> Result<()> {
        let mut check = ListCheck::new(BlobId::from_bytes([0; 32]));
        loop {
            let after = check.after();
            let next =
                |connection: Arc<Connection>| async move { connection.records(&after).await };
            let request = self.inner.pool.ask(member, next);
            let page = check.wait(&member.id, request).await??;
            if !check.accept(&member.id, page.iter().map(|one| &one.description.blob))? {
                return Ok(());
            }
            for one in page {
                // Records are stored as copies, so the block is the whole record.
                if BlobId::of(&one.block) != one.description.blob {
                    continue;
                }
                let blob = one.description.blob;
                match self.inner.seals.is_sealed(&one.description) {
                    true => drop(found.sealed.insert(blob, one.block.to_vec())),
                    false if found.unsealed.len() < MAX_UNSEALED => {
                        found.unsealed.insert(blob);
                    }
                    false => {}
                }
            }
        }
    }
}
