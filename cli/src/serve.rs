//! `serve`: a peer that keeps fragments for others, or the catalog; and `keys`, by which they know each other.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use cairn_store::cluster::identity::{self, Role, Security};
use cairn_store::cluster::peer::{self, PeerStore};
use cairn_store::names::{self, CatalogStore, served};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::args::{Serve, Style};
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

/// How the connections of a server are kept safe. Nobody is insecure by accident.
fn security(args: &Serve, role: Role) -> Outcome<Security> {
    match &args.keys {
        Some(keys) => {
            Security::load(keys, role).doing(|| format!("reading the keys in {}", keys.display()))
        }
        None if args.insecure => Ok(Security::INSECURE),
        None => {
            let why = "name its keys with --keys (`cairn keys init` makes them), or add --insecure for plain \
                       TCP, which anybody in the network can read and write";
            Err(wrong_usage(role, why))
        }
    }
}

fn wrong_usage(role: Role, why: &str) -> Failure {
    Failure::new(Exit::Usage, format!("starting a {}", role.name()), why)
}

/// Serves until a signal ends it.
pub(crate) fn serve(args: &Serve, style: Style) -> Outcome {
    match &args.catalog {
        None => serve_peer(args, style),
        Some(None) => serve_catalog(args, style),
        Some(Some(address)) => {
            names::check_address(address).doing(|| "starting a peer".into())?;
            let why = "a peer cannot join a catalog yet; start it without --catalog";
            Err(wrong_usage(Role::Peer, why))
        }
    }
}

fn serve_peer(args: &Serve, style: Style) -> Outcome {
    let security = security(args, Role::Peer)?;
    log();
    let Serve { data, listen, capacity, .. } = args;
    let store = PeerStore::open(data, *capacity).doing(|| opening(data))?;
    let store = Arc::new(store);
    run(Role::Peer, async {
        let (listener, address) = bind(listen).await?;
        let stop = signals();
        match style.json {
            true => print_json(&json!({ "peer": store.id().to_string(), "listen": address }))?,
            false => print(&format!("peer {} listens at {address}\n", store.id()))?,
        }
        let served = peer::serve(listener, store, security, stop);
        served.await.doing(|| "serving fragments".into())
    })
}

fn serve_catalog(args: &Serve, style: Style) -> Outcome {
    if args.capacity.is_some() {
        return Err(wrong_usage(Role::Catalog, "--capacity is for peers; leave it out"));
    }
    let security = security(args, Role::Catalog)?;
    log();
    let store = CatalogStore::open(&args.data).doing(|| opening(&args.data))?;
    let store = Arc::new(store);
    run(Role::Catalog, async {
        let (listener, address) = bind(&args.listen).await?;
        let stop = signals();
        match style.json {
            true => print_json(&json!({ "catalog": store.id().to_string(), "listen": address }))?,
            false => print(&format!("catalog {} listens at {address}\n", store.id()))?,
        }
        let served = served::serve(listener, store, security, stop);
        served.await.doing(|| "serving the catalog".into())
    })
}

fn opening(data: &Path) -> String {
    format!("opening {}", data.display())
}

/// What happens is told on the standard error.
fn log() {
    let filter = EnvFilter::try_from_env("CAIRN_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

fn run(role: Role, serving: impl Future<Output = Outcome>) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.doing(|| format!("starting a {}", role.name()))?.block_on(serving)
}

async fn bind(listen: &str) -> Outcome<(TcpListener, SocketAddr)> {
    let doing = || format!("listening at {listen}");
    let listener = TcpListener::bind(listen).await.doing(doing)?;
    let address = listener.local_addr().doing(doing)?;
    Ok((listener, address))
}

/// Ends with a signal that asks the process to end. They are caught as soon as this returns.
fn signals() -> impl Future<Output = ()> {
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
