//! `serve`: a peer that keeps fragments for others; and `keys`, by which it knows them.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use cairn_store::cluster::identity::{self, Role, Security};
use cairn_store::cluster::peer::{self, PeerStore};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::args::Style;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{print, print_json};

/// Makes the keys of a cluster.
pub(crate) fn init_keys(directory: &Path, style: Style) -> Outcome {
    identity::init(directory).doing(|| format!("making keys in {}", directory.display()))?;
    match style.json {
        true => print_json(&json!({ "keys": directory })),
        false => print(&format!(
            "{0}: an authority, and keys for each role\n\
             Copy ca.pem and a role's two files to the machines that have it; keep ca.key for yourself.\n",
            directory.display()
        )),
    }
}

/// How a peer's connections are kept safe. Nobody is insecure by accident.
pub(crate) fn security(keys: Option<&Path>, insecure: bool) -> Outcome<Security> {
    match keys {
        Some(keys) => Security::load(keys, Role::Peer)
            .doing(|| format!("reading the keys in {}", keys.display())),
        None if insecure => Ok(Security::INSECURE),
        None => {
            let why = "name its keys with --keys (`cairn keys init` makes them), or add --insecure for plain \
                       TCP, which anybody in the network can read and write";
            Err(Failure::new(Exit::Usage, "starting a peer", why))
        }
    }
}

pub(crate) fn serve(
    data: &Path,
    listen: &str,
    capacity: Option<u64>,
    security: Security,
    style: Style,
) -> Outcome {
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
        peer::serve(listener, store, security, stop).await.doing(|| "serving fragments".into())
    })
}
