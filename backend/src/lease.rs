//! Renews the mirror's lease or reference, and follows the size of the image.

use std::sync::Arc;
use std::time::Duration;
use std::{io, thread};

use cairn_store::{ErrorKind, LEASE_SECONDS, Mode};

use crate::grow::{GrowError, Grower};
use crate::image::Image;

/// The interval between two renewals of a writer.
const RENEW_INTERVAL: Duration = Duration::from_secs(LEASE_SECONDS / 3);

/// The interval between two renewals of a reader, which has no lease.
const READER_INTERVAL: Duration = Duration::from_secs(LEASE_SECONDS);

/// Starts the thread that renews the lease. If another writer has taken over the image, or the
/// reference to the parent has ended, no more checkpoints are taken, and the guest's disk goes on: a
/// read of content that is gone fails.
pub(crate) fn spawn(image: Arc<Image>, grower: Arc<Grower>, mode: Mode) -> io::Result<()> {
    thread::Builder::new().name("lease".into()).spawn(move || match mode {
        Mode::ReadWrite => renew_writer(&image, &grower),
        Mode::ReadOnly => renew_reader(&image),
    })?;
    Ok(())
}

fn renew_reader(image: &Image) {
    loop {
        thread::sleep(READER_INTERVAL);
        match image.attachment.renew() {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                tracing::warn!(%error, "cannot renew the mirror's reference; retrying");
            }
            Err(error) => {
                tracing::error!(%error, "the mirror's content may be removed from the repository");
                return;
            }
        }
    }
}

fn renew_writer(image: &Image, grower: &Grower) {
    loop {
        thread::sleep(RENEW_INTERVAL);
        match grower.follow_image() {
            Ok(_) => {}
            Err(GrowError::Catalog(error)) if error.kind() == ErrorKind::Conflict => {
                tracing::error!(%error, "no more checkpoints can be taken");
                image.poison(error.to_string());
                return;
            }
            Err(GrowError::Catalog(error)) => {
                tracing::warn!(%error, "cannot renew the lease; retrying");
            }
            Err(error) => tracing::error!(%error, "the disk cannot grow with its image"),
        }
    }
}
