//! The parts that all long-running commands share: they run until a signal stops them.

use std::io::IsTerminal;

use cairn_store::net::identity::Role;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::failure::{Doing, Outcome};

/// Starts logging to standard error.
pub(crate) fn start_log() {
    let filter = EnvFilter::try_from_env("CAIRN_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// Runs a server of this role.
pub(crate) fn run(role: Role, serving: impl Future<Output = Outcome>) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.doing(|| format!("starting a {}", role.name()))?.block_on(serving)
}

/// A future that ends when a signal asks the process to stop. Signals are caught as soon as this
/// function returns, before the future is polled.
pub(crate) fn signals() -> impl Future<Output = ()> {
    let mut ends = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
    async move {
        let [terminate, interrupt] = &mut ends;
        if let (Ok(terminate), Ok(interrupt)) = (terminate, interrupt) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        } else {
            std::future::pending().await
        }
    }
}
