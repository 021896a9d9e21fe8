//! Readers: processes that read a snapshot, such as an export.
//!
//! The content that they read stays, even if the snapshot is removed: see `collection`. A prune leaves
//! their snapshots.

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::collection::{HolderDocument, LEASED_SECONDS};
use super::documents::{SnapshotDocument, optional_text, snapshot_key, text};
use crate::documents::{Change, Query, View};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::{ImageId, LeaseId, NodeId};
use crate::name::ImageName;
use crate::process::Process;
use crate::snapshot::Snapshot;
use crate::tree::Root;

pub(super) const READERS: &str = "readers/";

/// A reader, and the content that it reads.
#[derive(Serialize, Deserialize)]
pub(super) struct ReaderDocument {
    #[serde(with = "text")]
    pub(super) image: ImageName,
    #[serde(with = "text")]
    pub(super) image_id: ImageId,
    pub(super) number: u64,
    pub(super) size: u64,
    pub(super) chunk_size: u32,
    #[serde(with = "optional_text")]
    pub(super) root: Option<NodeId>,
    #[serde(flatten)]
    pub(super) holder: HolderDocument,
}

impl ReaderDocument {
    pub(super) fn content(&self) -> Result<(Geometry, Root)> {
        Ok((Geometry::new(self.size, self.chunk_size)?, Root(self.root)))
    }

    /// What the reader does, for people.
    fn describe(&self) -> String {
        let HolderDocument { what, host, process, .. } = &self.holder;
        format!("in use: {what}, process {} on host {host}", process.pid)
    }
}

/// A snapshot that is being read.
pub(crate) struct ReadSnapshot {
    pub(crate) image: ImageId,
    pub(crate) number: u64,
    /// Who reads it, for people.
    pub(crate) reader: String,
}

/// The snapshots that are being read. A process that `observer` sees to be dead reads nothing.
pub(super) fn read_snapshots(view: &View, observer: &Process) -> Result<Vec<ReadSnapshot>> {
    let readers = view.under::<ReaderDocument>(READERS)?.into_iter().map(|(_, reader)| reader);
    let readers = readers.filter(|reader| !reader.holder.process.is_dead(observer));
    let read = |one: ReaderDocument| {
        let (image, number, reader) = (one.image_id, one.number, one.describe());
        ReadSnapshot { image, number, reader }
    };
    Ok(readers.map(read).collect())
}

impl Catalog {
    /// The snapshots that are being read.
    pub(crate) fn read_snapshots(&self) -> Result<Vec<ReadSnapshot>> {
        read_snapshots(&self.read(&[Query::prefix(READERS)])?, &Process::current()?)
    }

    /// The content that is being read. A caller that also needs the content of snapshots reads that
    /// first: a reader begins while its snapshot is there.
    pub(crate) fn content_of_readers(&self) -> Result<Vec<(Geometry, Root)>> {
        let (observer, mut all) = (Process::current()?, Vec::new());
        self.documents.scan(&[READERS], &mut |key, document| {
            let one: ReaderDocument = document.decode(key)?;
            if !one.holder.process.is_dead(&observer) {
                all.push(one.content()?);
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// Begins to read a snapshot: its content stays, even if the snapshot is removed, as long as
    /// the reader's document is [renewed](Self::renew_leased).
    pub(crate) fn begin_reading(
        &self,
        id: &LeaseId,
        snapshot: &Snapshot,
        what: &str,
    ) -> Result<()> {
        let holder = HolderDocument::new(what)?;
        let key = snapshot_key(&snapshot.image_id, snapshot.number);
        self.change(&[Query::key(&key)], |view| {
            let found = view.get::<SnapshotDocument>(&key)?;
            if found
                .as_ref()
                .is_none_or(|one| !one.state.has_content() || Root(one.root) != snapshot.root)
            {
                return Err(Error::NoSnapshot { name: snapshot.name().to_string() });
            }
            let found = found.expect("it was just found");
            let document = ReaderDocument {
                image: snapshot.image.clone(),
                image_id: snapshot.image_id,
                number: snapshot.number,
                size: snapshot.geometry.size(),
                chunk_size: snapshot.geometry.chunk_size(),
                root: snapshot.root.0,
                holder: holder.clone(),
            };
            // A prune relies on the snapshot's document. This gives it another version.
            let change = Change::default().put(&key, &found);
            Ok((change.put_for(LEASED_SECONDS, reader_key(id), &document), ()))
        })
    }
}

/// The key of a reader.
pub(crate) fn reader_key(id: &LeaseId) -> String {
    format!("{READERS}{id}")
}
