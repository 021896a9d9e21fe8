//! The mirror through which an image was written before.
//!
//! The catalog does not know what a mirror has that no snapshot has. It knows which mirrors were
//! attached for writing, and when.

use cairn_store::{ImageName, MirrorOwner, MirrorRecord, Mode, Repository, SnapshotRef};

/// Warns if the image was written before through another mirror, whose last writes a new mirror of
/// `owner` does not have.
pub(super) fn warn(store: &Repository, owner: &MirrorOwner, image: &ImageName) {
    let mirrors = match store.catalog().mirrors() {
        Ok(mirrors) => mirrors,
        Err(error) => {
            tracing::warn!(%error, "cannot look for other mirrors of the image");
            return;
        }
    };
    let Some(former) = former_writer(&mirrors, owner, image) else { return };
    let last = SnapshotRef::number(image, former.parent);
    tracing::warn!(
        host = former.host.as_str(),
        path = former.path.as_str(),
        "the image was written before through another mirror: writes after {last} may exist only \
         there, and this disk does not have them. To go on with them, stop this process and start \
         cairn-blk on that host with that directory as --mirror and with --image {last}"
    );
}

/// The mirror through which the image was written before the mirror of `owner`.
fn former_writer<'a>(
    mirrors: &'a [MirrorRecord],
    owner: &MirrorOwner,
    image: &ImageName,
) -> Option<&'a MirrorRecord> {
    let is_candidate = |other: &&MirrorRecord| {
        other.image == *image
            && other.mode == Mode::ReadWrite
            && other.id != owner.id
            // The owner's mirror has taken the place of a directory that was deleted.
            && (&other.host, &other.path) != (&owner.host, &owner.path)
    };
    mirrors.iter().filter(is_candidate).max_by_key(|other| other.attached)
}

#[cfg(test)]
mod tests {
    use cairn_store::{MirrorId, MirrorOwner, MirrorRecord, Mode, Root};

    use super::former_writer;

    fn mirror(id: u8, path: &str, mode: Mode, attached: u64) -> MirrorRecord {
        MirrorRecord {
            id: MirrorId::from_bytes([id; 16]),
            image: "vm1".parse().unwrap(),
            host: MirrorOwner::this_process(MirrorId::from_bytes([0; 16]), "").unwrap().host,
            path: path.into(),
            mode,
            parent: 1,
            root: Root::default(),
            attached,
            seen: attached,
            is_ephemeral: false,
            writer: None,
        }
    }

    /// The id of the former writer that mirror 1 at /one finds.
    fn found(mirrors: &[MirrorRecord]) -> Option<MirrorId> {
        let owner = MirrorOwner::this_process(MirrorId::from_bytes([1; 16]), "/one").unwrap();
        former_writer(mirrors, &owner, &"vm1".parse().unwrap()).map(|former| former.id)
    }

    #[test]
    fn the_former_writer_is_the_mirror_that_was_attached_for_writing_last() {
        let own = mirror(1, "/one", Mode::ReadWrite, 20);
        let earlier = mirror(2, "/two", Mode::ReadWrite, 10);
        let later = mirror(3, "/three", Mode::ReadWrite, 15);
        assert_eq!(found(&[own.clone(), later.clone(), earlier]), Some(later.id));
        assert_eq!(found(&[own]), None);
    }

    #[test]
    fn a_reader_another_image_and_a_deleted_directory_are_no_former_writers() {
        let reader = mirror(2, "/two", Mode::ReadOnly, 10);
        let deleted = mirror(3, "/one", Mode::ReadWrite, 10);
        let image = "vm2".parse().unwrap();
        let stranger = MirrorRecord { image, ..mirror(4, "/four", Mode::ReadWrite, 10) };
        assert_eq!(found(&[reader, deleted, stranger]), None);
    }
}
