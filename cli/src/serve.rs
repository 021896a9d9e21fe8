//! `serve` runs a peer or the catalog server. `keys` creates the keys of a cluster.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use cairn_store::cluster::membership::Announcement;
use cairn_store::cluster::peer;
use cairn_store::cluster::peer::PeerStore;
use cairn_store::cluster::peer::heartbeat::Heartbeat;
use cairn_store::cluster::peer::scrubber::{DEFAULT_SCRUB_INTERVAL, Scrubber};
use cairn_store::documents;
use cairn_store::documents::{CatalogStore, remote};
use cairn_store::maintenance::supervisor::{Supervisor, SupervisorConfig};
use cairn_store::net::identity;
use cairn_store::net::identity::{Access, Role, Security};
use cairn_store::{Repository, host_name};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::args::{Serve, Style};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{print, print_json};

/// Creates the keys of a cluster.
pub(crate) fn init_keys(directory: &Path, style: Style) -> Outcome {
    identity::init(directory).doing(|| format!("creating keys in {}", directory.display()))?;
    match style.json {
        true => print_json(&json!({ "keys": directory })),
        false => print(&format!(
            "{0}: a certificate authority, and keys for each role\n\
             Copy ca.pem and the two files of a role to the machines with that role. Keep ca.key \
             private.\n",
            directory.display()
        )),
    }
}

fn wrong_usage(role: Role, why: &str) -> Failure {
    Failure::new(Exit::Usage, format!("starting a {}", role.name()), why)
}

fn security(access: &Access<'_>, role: Role) -> Outcome<Security> {
    access.security(role).doing(|| format!("starting a {}", role.name()))
}

/// Serves until a signal stops the process.
pub(crate) fn serve(args: &Serve, access: &Access<'_>, style: Style) -> Outcome {
    match &args.catalog {
        None => serve_peer(args, None, access, style),
        Some(None) => serve_catalog(args, &security(access, Role::Catalog)?, style),
        Some(Some(address)) => {
            documents::check_address(address).doing(|| "starting a peer".into())?;
            serve_peer(args, Some(address), access, style)
        }
    }
}

fn serve_peer(args: &Serve, catalog: Option<&str>, access: &Access<'_>, style: Style) -> Outcome {
    let security = security(access, Role::Peer)?;
    // The supervisor deletes fragments on other peers, which a peer's keys do not allow.
    let supervisor = access.security(Role::Client).unwrap_or_else(|_| security.clone());
    start_log();
    let Serve { data, listen, capacity, .. } = args;
    let store = PeerStore::open(data, *capacity).doing(|| opening(data))?;
    let store = Arc::new(store);
    let interval = args.scrub_interval.map_or(Some(DEFAULT_SCRUB_INTERVAL), |wanted| wanted.0);
    let scrubber = interval.map(|interval| Scrubber::start(store.clone(), interval)).transpose();
    let scrubber = scrubber.doing(|| "starting the scrub".into())?;
    run(Role::Peer, async {
        let (listener, address) = bind(listen).await?;
        let stop = signals();
        let member = match catalog {
            Some(catalog) => {
                let announcement = announcement(args, &store, address)?;
                let (catalog, config) = (catalog.to_owned(), config(args));
                let (store, security) = (store.clone(), security.clone());
                // Joining may wait for the catalog, so it must not block the runtime.
                let join =
                    move || join(&catalog, announcement, store, &security, &supervisor, config);
                Some(blocking(join).await??)
            }
            None => None,
        };
        match style.json {
            true => print_json(&json!({ "peer": store.id().to_string(), "listen": address }))?,
            false => print(&format!("peer {} listens at {address}\n", store.id()))?,
        }
        let served = peer::serve(listener, store, security.clone(), stop).await;
        // This tells the catalog that the peer leaves.
        blocking(move || drop((member, scrubber))).await?;
        served.doing(|| "serving fragments".into())
    })
}

/// Runs a blocking function on a thread of its own.
async fn blocking<T: Send + 'static>(function: impl FnOnce() -> T + Send + 'static) -> Outcome<T> {
    let ended = tokio::task::spawn_blocking(function).await;
    ended.map_err(std::io::Error::other).doing(|| "waiting for a thread".into())
}

/// Keeps a peer a member of the cluster until it is dropped.
struct Membership {
    _heartbeat: Heartbeat,
    _supervisor: Option<Supervisor>,
}

fn join(
    catalog: &str,
    announcement: Announcement,
    store: Arc<PeerStore>,
    security: &Security,
    supervisor: &Security,
    config: SupervisorConfig,
) -> Outcome<Membership> {
    let doing = || format!("joining the catalog at {catalog}");
    let documents = documents::open(catalog, security).doing(doing)?;
    let (address, own) = (catalog.to_owned(), security.clone());
    let open = move || documents::open(&address, &own);
    let heartbeat = Heartbeat::start(documents.clone(), open, announcement, store).doing(doing)?;
    // Without a catalog server, one of the peers runs the supervisor.
    let supervisor = match catalog.starts_with("etcd://") {
        true => {
            let repository = Repository::of_cluster(documents, supervisor).doing(doing)?;
            Some(Supervisor::start(repository, config).doing(doing)?)
        }
        false => None,
    };
    Ok(Membership { _heartbeat: heartbeat, _supervisor: supervisor })
}

fn config(args: &Serve) -> SupervisorConfig {
    SupervisorConfig { lost_after: args.lost_after, rate: args.repair_rate }
}

fn announcement(args: &Serve, store: &PeerStore, listens: SocketAddr) -> Outcome<Announcement> {
    let address = match &args.advertise {
        Some(address) => address.clone(),
        None if listens.ip().is_unspecified() => {
            let why = "it listens at all addresses; name one that others can reach with \
                       --advertise HOST:PORT";
            return Err(wrong_usage(Role::Peer, why));
        }
        None => listens.to_string(),
    };
    let domain = match &args.domain {
        Some(domain) => domain.clone(),
        None => host_name().doing(|| "reading the name of this host".into())?,
    };
    Ok(Announcement { id: store.id(), address, domain })
}

fn serve_catalog(args: &Serve, security: &Security, style: Style) -> Outcome {
    let is_for_peers = args.capacity.is_some()
        || args.domain.is_some()
        || args.advertise.is_some()
        || args.scrub_interval.is_some();
    if is_for_peers {
        let why = "--capacity, --domain, --advertise and --scrub-interval are for peers; omit \
                   them for a catalog server";
        return Err(wrong_usage(Role::Catalog, why));
    }
    start_log();
    let store = CatalogStore::open(&args.data).doing(|| opening(&args.data))?;
    let store = Arc::new(store);
    let doing = || "starting the supervisor".to_owned();
    let repository = Repository::of_cluster(store.documents().clone(), security).doing(doing)?;
    let supervisor = Supervisor::start(repository, config(args)).doing(doing)?;
    let served = run(Role::Catalog, async {
        let (listener, address) = bind(&args.listen).await?;
        let stop = signals();
        match style.json {
            true => print_json(&json!({ "catalog": store.id().to_string(), "listen": address }))?,
            false => print(&format!("catalog {} listens at {address}\n", store.id()))?,
        }
        let served = remote::serve(listener, store, security.clone(), stop);
        served.await.doing(|| "serving the catalog".into())
    });
    drop(supervisor);
    served
}

fn opening(data: &Path) -> String {
    format!("opening {}", data.display())
}

/// Starts logging to standard error.
fn start_log() {
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

/// A future that ends when a signal asks the process to stop. Signals are caught as soon as this
/// function returns, before the future is polled.
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
