//! A thread that speaks to a catalog for callers who wait.
//!
//! Who calls may be in a runtime of its own, so nothing here runs on the caller's thread.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use crate::error::{Error, ErrorKind, Result};

/// The bounds of the time between two tries.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

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

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum CallError {
    /// It may pass.
    Transient(String),
    /// To try again does not help.
    Permanent(ErrorKind, String),
}

impl CallError {
    pub(super) fn late() -> CallError {
        CallError::Transient("it does not answer in time".into())
    }
}

/// Tries again and again as long as the catalog is away, within a time. Who `waits` for long has that time from the
/// first trouble on.
pub(super) async fn retry<T, F: Future<Output = Result<T, CallError>>>(
    address: &str,
    retry_timeout: Duration,
    waits: bool,
    attempt: impl Fn() -> F,
) -> Result<T> {
    let mut end = (!waits).then(|| Instant::now() + retry_timeout);
    let mut pause = PAUSE.0;
    loop {
        let tried = match end.filter(|_| !waits) {
            None => attempt().await,
            Some(end) => {
                timeout_at(end, attempt()).await.unwrap_or_else(|_| Err(CallError::late()))
            }
        };
        let reason = match tried {
            Ok(answer) => return Ok(answer),
            Err(CallError::Permanent(kind, reason)) => {
                return Err(Error::Catalog { address: address.into(), kind, reason });
            }
            Err(CallError::Transient(reason)) => reason,
        };
        let end = *end.get_or_insert(Instant::now() + retry_timeout);
        if Instant::now() + pause >= end {
            return Err(unavailable(address, &format!("it is away: {reason}")));
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}
