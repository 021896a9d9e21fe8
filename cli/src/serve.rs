//! `serve`: a peer that keeps fragments for others.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use cairn_store::cluster::peer::{self, PeerStore};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::args::Style;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{print, print_json};

pub(crate) fn serve(
    data: &Path,
    listen: &str,
    capacity: Option<u64>,
    insecure: bool,
    style: Style,
) -> Outcome {
    if !insecure {
        let why = "a peer speaks plain TCP only so far, which anybody in the network can read and write; \
                   add --insecure if that is what you want";
        return Err(Failure::new(Exit::Usage, "starting a peer", why));
    }
    let filter = EnvFilter::try_from_env("CAIRN_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let store = PeerStore::open(data, capacity).doing(|| format!("opening {}", data.display()))?;
    let store = Arc::new(store);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.doing(|| "starting a peer".into())?;
    runtime.block_on(async {
        let doing = || format!("listening at {listen}");
        let listener = TcpListener::bind(listen).await.doing(doing)?;
        let address = listener.local_addr().doing(doing)?;
        let mut ends = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
        let stop = async {
            let [terminate, interrupt] = &mut ends;
            if let (Ok(terminate), Ok(interrupt)) = (terminate, interrupt) {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
            } else {
                std::future::pending().await
            }
        };
        match style.json {
            true => print_json(&json!({ "peer": store.id().to_string(), "listen": address }))?,
            false => print(&format!("peer {} listens at {address}\n", store.id()))?,
        }
        peer::serve(listener, store, stop).await.doing(|| "serving fragments".into())
    })
}
