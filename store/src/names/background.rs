//! A thread that speaks to a catalog for callers who wait.
//!
//! Who calls may be in a runtime of its own, so nothing here runs on the caller's thread.

use std::sync::mpsc;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::error::{Error, ErrorKind, Result};

/// The thread. It ends, with all that it does, when this is dropped.
pub(super) struct Background {
    handle: Handle,
    _stop: oneshot::Sender<()>,
}

impl Background {
    pub(super) fn start(address: &str) -> Result<Background> {
        let failed = |error: std::io::Error| unavailable(address, &error.to_string());
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new()
            .name("catalog".into())
            .spawn(move || runtime.block_on(async { drop(stopped.await) }))
            .map_err(failed)?;
        Ok(Background { handle, _stop: stop })
    }

    /// Does something there, and waits for it.
    pub(super) fn run<T: Send + 'static>(
        &self,
        doing: impl Future<Output = T> + Send + 'static,
    ) -> T {
        let (sender, done) = mpsc::sync_channel(1);
        self.handle.spawn(async move {
            // It is always taken.
            let _ = sender.send(doing.await);
        });
        done.recv().expect("the thread lives as long as this, and nothing panics in it")
    }
}

/// The error of a catalog that cannot be reached.
pub(super) fn unavailable(address: &str, reason: &str) -> Error {
    let kind = ErrorKind::Unavailable;
    Error::Catalog { address: address.into(), kind, reason: reason.into() }
}
