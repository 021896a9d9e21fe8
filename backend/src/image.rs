//! The image that the disk belongs to: its repository, and this mirror's attachment to the image.

use std::sync::Mutex;

use cairn_store::{
    Attachment, ChunkIndex, Error, ImageName, Repository, Selector, Snapshot, SnapshotRef,
};

/// The length of the serial number that a guest can read.
const SERIAL_BYTES: usize = 20;

/// The serial number of a disk.
pub(crate) type Serial = [u8; SERIAL_BYTES];

/// An attached image. All threads share it.
pub(crate) struct Image {
    pub(crate) repository: Repository,
    pub(crate) attachment: Attachment,
    /// Why no checkpoint can be taken any more, if so.
    poison: Mutex<Option<String>>,
}

impl Image {
    pub(crate) fn new(repository: Repository, attachment: Attachment) -> Image {
        Image { repository, attachment, poison: Mutex::default() }
    }

    pub(crate) fn name(&self) -> &ImageName {
        self.attachment.image()
    }

    /// The serial number: the image's name, cut to the length that fits.
    pub(crate) fn serial(&self) -> Serial {
        let mut serial = [0; SERIAL_BYTES];
        for (to, from) in serial.iter_mut().zip(format!("cairn-{}", self.name()).bytes()) {
            *to = from;
        }
        serial
    }

    /// `image@number`.
    pub(crate) fn snapshot_name(&self, number: u64) -> String {
        format!("{}@{number}", self.name())
    }

    /// The name of the parent snapshot.
    pub(crate) fn parent_name(&self) -> String {
        self.snapshot_name(self.attachment.parent().0)
    }

    /// The snapshots of the image, as the catalog has them.
    pub(crate) fn snapshots(&self) -> cairn_store::Result<Vec<Snapshot>> {
        self.repository.catalog().snapshots(self.name())
    }

    /// The last snapshots of the image, at most `limit`, and the number of all.
    pub(crate) fn last_snapshots(&self, limit: usize) -> cairn_store::Result<(Vec<Snapshot>, u64)> {
        self.repository.catalog().last_snapshots(self.name(), limit)
    }

    /// One snapshot of the image, as the catalog has it; `None` if there is none.
    pub(crate) fn find(&self, selector: Selector) -> cairn_store::Result<Option<Snapshot>> {
        let name = SnapshotRef { image: self.name().clone(), selector };
        match self.repository.catalog().resolve(&name) {
            Err(Error::NoSnapshot { .. }) => Ok(None),
            found => found.map(Some),
        }
    }

    /// Reads a chunk of the parent snapshot. Returns `false` if the chunk is a hole: then the
    /// buffer is unchanged.
    pub(crate) fn read_parent(
        &self,
        chunk: ChunkIndex,
        buffer: &mut [u8],
    ) -> cairn_store::Result<bool> {
        let (_, root) = self.attachment.parent();
        match self.repository.chunk_at(&root, self.attachment.geometry(), chunk)? {
            Some(id) => self.repository.read_chunk(&id, buffer).map(|()| true),
            None => Ok(false),
        }
    }

    /// Records that no checkpoint can be taken any more, and why. The first reason stays.
    pub(crate) fn poison(&self, reason: String) {
        self.poison.lock().expect("no code panics with this lock held").get_or_insert(reason);
    }

    /// Why no checkpoint can be taken, if so.
    pub(crate) fn poison_reason(&self) -> Option<String> {
        self.poison.lock().expect("no code panics with this lock held").clone()
    }
}
