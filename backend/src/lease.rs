//! Renews the writer's lease, and follows the size of the image.

use std::sync::Arc;
use std::time::Duration;
use std::{io, thread};

use cairn_store::{ErrorKind, LEASE_SECONDS};

use crate::grow::{GrowError, Grower};
use crate::image::Image;

/// Starts the thread that renews the lease. If another writer has taken over the image, no more
/// checkpoints are taken, and the guest's disk goes on.
pub(crate) fn spawn(image: Arc<Image>, grower: Arc<Grower>) -> io::Result<()> {
    thread::Builder::new().name("lease".into()).spawn(move || {
        loop {
            thread::sleep(Duration::from_secs(LEASE_SECONDS / 3));
            match grower.follow_image() {
                Ok(_) => {}
                // A reader has no lease, and keeps its size.
                Err(GrowError::ReadOnly) => return,
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
    })?;
    Ok(())
}
