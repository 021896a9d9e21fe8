//! The image that the disk belongs to: its repository, and this mirror's attachment to the image.

use std::sync::Mutex;

use cairn_store::{
    Attachment, ChunkIndex, Error, ImageName, Repository, Selector, Snapshot, SnapshotEdit,
    SnapshotRef,
};

/// The length of the serial number that a guest can read.
const SERIAL_BYTES: usize = 20;

/// The serial number of a disk.
pub(crate) type Serial = [u8; SERIAL_BYTES];

/// Which snapshots are marked as obsolete.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ObsoleteSnapshots {
    /// The one with this number.
    One(u64),
    /// Those that were taken from inside the guest, but the newest of them, as many as stated.
    AllBut(u64),
}

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

    /// Marks snapshots as obsolete, among the last `limit` of the image. Returns the names of those
    /// that were not marked before.
    pub(crate) fn mark_obsolete(
        &self,
        which: ObsoleteSnapshots,
        limit: usize,
    ) -> cairn_store::Result<Vec<String>> {
        let numbers: Vec<u64> = match which {
            // Each mark leaves a record on the peers, so a guest must not repeat it without an end.
            ObsoleteSnapshots::One(number) => match self.find(Selector::Number(number))? {
                Some(marked) if marked.is_obsolete => Vec::new(),
                _ => vec![number],
            },
            ObsoleteSnapshots::AllBut(kept) => {
                let (last, _) = self.last_snapshots(limit)?;
                let own = last.into_iter().rev();
                let own = own.filter(|one| one.is_from_guest && one.state.has_content());
                let old = own.skip(usize::try_from(kept).unwrap_or(usize::MAX));
                old.filter(|one| !one.is_obsolete).map(|one| one.number).collect()
            }
        };
        let mark = |number| {
            let name = SnapshotRef::number(self.name(), number);
            match self.repository.edit_snapshot(&name, &SnapshotEdit::Obsolete) {
                // It was removed meanwhile, as the guest wants it.
                Err(Error::NoSnapshot { .. } | Error::WrongState { .. })
                    if matches!(which, ObsoleteSnapshots::AllBut(_)) =>
                {
                    Ok(None)
                }
                marked => marked.map(|marked| Some(marked.name().to_string())),
            }
        };
        numbers.into_iter().filter_map(|number| mark(number).transpose()).collect()
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
