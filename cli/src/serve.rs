//! `serve` runs a peer or the catalog server.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use cairn_store::cluster::membership::{Announcement, check_no_data};
use cairn_store::cluster::peer;
use cairn_store::cluster::peer::PeerStore;
use cairn_store::cluster::peer::heartbeat::{Heartbeat, log_waiting};
use cairn_store::cluster::peer::scrubber::{DEFAULT_SCRUB_INTERVAL, Scrubber};
use cairn_store::documents;
use cairn_store::documents::{CatalogStore, Documents, remote};
use cairn_store::maintenance::supervisor::Supervisor;
use cairn_store::net::identity::{Access, Identity, Role, Security};
use cairn_store::{Repository, host_name};
use serde_json::json;
use tokio::net::TcpListener;

use crate::args::{Serve, Style};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{print, print_json};
use crate::service::{run, signals, start_log};

fn wrong_usage(role: Role, why: &str) -> Failure {
    Failure::new(Exit::Usage, format!("starting a {}", role.name()), why)
}

fn security(access: &Access<'_>, role: Role) -> Outcome<Security> {
    access.security(role).doing(|| format!("starting a {}", role.name()))
}

/// Serves until a signal stops the process.
pub(crate) fn serve(args: &Serve, access: &Access<'_>, style: Style) -> Outcome {
    match &args.catalog {
        None if args.no_catalog => serve_peer(args, None, access, style),
        None => {
            let why = "no catalog is named, so no cluster would use the peer; name it with --catalog \
                       HOST:PORT. To run the catalog server itself, use --catalog alone. \
                       --no-catalog starts a peer of no cluster, for tests";
            Err(wrong_usage(Role::Peer, why))
        }
        Some(None) => serve_catalog(args, access, style),
        Some(Some(address)) => {
            documents::check_address(address).doing(|| "starting a peer".into())?;
            serve_peer(args, Some(address), access, style)
        }
    }
}

fn serve_peer(args: &Serve, catalog: Option<&str>, access: &Access<'_>, style: Style) -> Outcome {
    if args.supervisor.is_set() {
        let why = "--lost-after, --repair-rate, --prune-interval, --gc-interval and --gc-grace are \
                   for the catalog server and for `cairn supervise`; omit them for a peer";
        return Err(wrong_usage(Role::Peer, why));
    }
    let security = security(access, Role::Peer)?;
    start_log();
    let Serve { data, listen, capacity, .. } = args;
    let own = security.identity().and_then(Identity::peer);
    let documents = catalog.map(|catalog| {
        documents::open(catalog, &security).doing(|| format!("joining the catalog at {catalog}"))
    });
    let documents = documents.transpose()?;
    if let (Some(id), Some(catalog), Some(documents)) = (own, catalog, &documents)
        && !PeerStore::is_in(data).doing(|| opening(data))?
    {
        let check = || check_no_data(&**documents, &id);
        log_waiting(catalog, check).doing(|| opening(data))?;
    }
    let store = PeerStore::open_as(data, *capacity, own).doing(|| opening(data))?;
    let store = Arc::new(store);
    let interval = args.scrub_interval.map_or(Some(DEFAULT_SCRUB_INTERVAL), |wanted| wanted.0);
    let scrubber = interval.map(|interval| Scrubber::start(store.clone(), interval)).transpose();
    let scrubber = scrubber.doing(|| "starting the scrub".into())?;
    run(Role::Peer, async {
        let (listener, address) = bind(listen).await?;
        let stop = signals();
        let heartbeat = match (catalog, documents) {
            (Some(catalog), Some(documents)) => {
                let announcement = announcement(args, &store, address)?;
                Some(start_heartbeat(catalog, documents, announcement, &store, &security)?)
            }
            _ => None,
        };
        match style.json {
            true => print_json(&json!({ "peer": store.id().to_string(), "listen": address }))?,
            false => print(&format!("peer {} listens at {address}\n", store.id()))?,
        }
        let served = peer::serve(listener, store, security.clone(), stop).await;
        // This tells the catalog that the peer leaves.
        blocking(move || drop((heartbeat, scrubber))).await?;
        served.doing(|| "serving fragments".into())
    })
}

/// Runs a blocking function on a thread of its own.
async fn blocking<T: Send + 'static>(function: impl FnOnce() -> T + Send + 'static) -> Outcome<T> {
    let ended = tokio::task::spawn_blocking(function).await;
    ended.map_err(std::io::Error::other).doing(|| "waiting for a thread".into())
}

/// Keeps a peer a member of the cluster until the heartbeat is dropped.
fn start_heartbeat(
    catalog: &str,
    documents: Arc<dyn Documents>,
    announcement: Announcement,
    store: &Arc<PeerStore>,
    security: &Security,
) -> Outcome<Heartbeat> {
    let (address, security) = (catalog.to_owned(), security.clone());
    let open = move || documents::open(&address, &security);
    Heartbeat::start(catalog.to_owned(), documents, open, announcement, store.clone())
        .doing(|| format!("joining the catalog at {catalog}"))
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

fn serve_catalog(args: &Serve, access: &Access<'_>, style: Style) -> Outcome {
    let is_for_peers = args.capacity.is_some()
        || args.domain.is_some()
        || args.advertise.is_some()
        || args.scrub_interval.is_some();
    if is_for_peers {
        let why = "--capacity, --domain, --advertise and --scrub-interval are for peers; omit \
                   them for a catalog server";
        return Err(wrong_usage(Role::Catalog, why));
    }
    let security = security(access, Role::Catalog)?;
    // The supervisor runs in this process. Peers do not serve a catalog.
    let supervisor = access.security(Role::Supervisor).doing(|| "starting a catalog".into())?;
    start_log();
    let store = CatalogStore::open(&args.data).doing(|| opening(&args.data))?;
    let store = Arc::new(store);
    let doing = || "starting the supervisor".to_owned();
    let repository = Repository::of_cluster(store.documents().clone(), &supervisor).doing(doing)?;
    let supervisor = Supervisor::start(repository, args.supervisor.config()).doing(doing)?;
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

async fn bind(listen: &str) -> Outcome<(TcpListener, SocketAddr)> {
    let doing = || format!("listening at {listen}");
    let listener = TcpListener::bind(listen).await.map_err(|error| {
        let exit = match error.kind() {
            io::ErrorKind::AddrInUse => Exit::Conflict,
            io::ErrorKind::PermissionDenied => Exit::Failure,
            // The host has no such address, or cannot resolve the name, perhaps not yet.
            _ => Exit::Unavailable,
        };
        Failure::new(exit, doing(), error)
    })?;
    let address = listener.local_addr().doing(doing)?;
    Ok((listener, address))
}
