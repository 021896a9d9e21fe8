//! The thread of a network client, and its retries.
//!
//! Calls block. The caller may be in an async runtime of its own or in none, so all I/O runs on
//! this thread.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use crate::error::{Error, ErrorKind, Result};

/// The interval between the first two attempts. It doubles after each attempt.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The longest interval between two attempts.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A thread with a runtime. Dropping this ends the thread and every task that runs on it.
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

    /// Runs `task` on the thread and waits for its result.
    pub(super) fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> T {
        let (sender, done) = mpsc::sync_channel(1);
        self.handle.spawn(async move {
            // The receiver waits below, so this cannot fail.
            let _ = sender.send(task.await);
        });
        done.recv().expect("the thread lives as long as this value, and no task panics")
    }
}

/// The error of a catalog that cannot be reached.
pub(super) fn unavailable(address: &str, reason: &str) -> Error {
    let kind = ErrorKind::Unavailable;
    Error::Catalog { address: address.into(), kind, reason: reason.into() }
}

/// The reason of a call that got no random bytes for its token.
pub(super) fn no_random(error: &std::io::Error) -> String {
    format!("cannot read random bytes: {error}")
}

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum CallError {
    /// A retry may succeed.
    Transient(String),
    /// A retry cannot succeed.
    Permanent(ErrorKind, String),
}

impl CallError {
    pub(super) fn timed_out() -> CallError {
        CallError::Transient("it does not answer in time".into())
    }
}

/// Retries `attempt` while it fails with a transient error, for `retry_timeout`. The time starts
/// with the call, or, if the request `waits` for a change, with the first error.
pub(super) async fn retry<T, F: Future<Output = Result<T, CallError>>>(
    address: &str,
    retry_timeout: Duration,
    waits: bool,
    attempt: impl Fn() -> F,
) -> Result<T> {
    let mut end = (!waits).then(|| Instant::now() + retry_timeout);
    let mut pause = MIN_RETRY_INTERVAL;
    loop {
        let tried = match end.filter(|_| !waits) {
            None => attempt().await,
            Some(end) => {
                timeout_at(end, attempt()).await.unwrap_or_else(|_| Err(CallError::timed_out()))
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
            return Err(unavailable(address, &format!("it is unreachable: {reason}")));
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_RETRY_INTERVAL);
    }
}
