//! Keeps the writer's lease alive.

use std::sync::Arc;
use std::time::Duration;
use std::{io, thread};

use cairn_store::{ErrorKind, LEASE_SECONDS};

use crate::device::Device;

/// Starts the thread that renews the lease. If another writer has taken the image over, checkpoints
/// end; the guest's disk goes on.
pub(crate) fn spawn(device: Arc<Device>) -> io::Result<()> {
    thread::Builder::new().name("lease".into()).spawn(move || {
        loop {
            thread::sleep(Duration::from_secs(LEASE_SECONDS / 3));
            match device.attachment.renew() {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    tracing::error!(%error, "no more checkpoints");
                    device.poison(error.to_string());
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "the lease could not be renewed; trying again")
                }
            }
        }
    })?;
    Ok(())
}
