//! Keeps a client's view of the members up to date.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use std::collections::HashMap;

use super::ClusterBlobs;
use super::cluster::Cluster;
use crate::blobs::Blobs;
use crate::clock::now;
use crate::cluster::membership;
use crate::documents::Names;
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::net::identity::Security;

/// How often the members are looked at, if nothing tells of a change.
const LOOK: Duration = Duration::from_secs(2);

/// The catalog's address in the address of a cluster.
pub(crate) fn cluster_address(url: &str) -> Result<&str> {
    let address = match url.strip_prefix("cairn://") {
        Some(address) => Some(address.trim_end_matches('/')),
        None => url.starts_with("etcd://").then_some(url),
    };
    let address = address.filter(|address| !address.is_empty());
    address.ok_or_else(|| Error::BadUrl { url: url.into() })
}

/// A thread that tells a cluster who its members are, and the catalog whom it suspects. It ends with this.
pub(crate) struct Follower {
    cluster: Cluster,
    security: Security,
    names: Arc<dyn Names>,
    noted: Arc<Noted>,
    stop: Arc<AtomicBool>,
}

/// How often each peer was wrong, as far as the catalog was told.
type Noted = Mutex<HashMap<PeerId, u64>>;

impl Follower {
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// How its connections are kept safe.
    pub(crate) fn security(&self) -> &Security {
        &self.security
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A program that exports one disk ends before the thread looks.
        if let Err(error) = tell(&*self.names, &self.cluster, &self.noted) {
            tracing::debug!(%error, "the catalog does not learn who was wrong");
        }
    }
}

/// Makes a place for blobs of the peers that are members, and follows them.
pub(crate) fn follow(
    names: &Arc<dyn Names>,
    security: &Security,
) -> Result<(Arc<dyn Blobs>, Follower)> {
    let (peers, mut revision) = membership::peers(&**names)?;
    let members = peers.iter().filter_map(membership::Peer::member).collect();
    let cluster = Cluster::new(members, security.clone());
    let blobs = Arc::new(ClusterBlobs::new(cluster.clone())?);
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, cluster_, weak) = (stop.clone(), cluster.clone(), Arc::downgrade(names));
    let noted = Arc::new(Noted::default());
    let told = noted.clone();
    let run = move || {
        while !stopped.load(Ordering::Relaxed)
            && let Some(names) = Weak::upgrade(&weak)
        {
            match step(&*names, &cluster_, &told, &mut revision) {
                Ok(()) => {}
                Err(error) => {
                    tracing::debug!(%error, "the members are not known at the moment");
                    thread::sleep(LOOK);
                }
            }
        }
    };
    thread::Builder::new()
        .name("members".into())
        .spawn(run)
        .map_err(|error| Error::io("starting", "a thread".as_ref(), error))?;
    let (security, names) = (security.clone(), names.clone());
    Ok((blobs, Follower { cluster, security, names, noted, stop }))
}

fn step(names: &dyn Names, cluster: &Cluster, noted: &Noted, revision: &mut u64) -> Result<()> {
    names.wait("members", *revision, LOOK)?;
    let (peers, seen) = membership::peers(names)?;
    *revision = seen;
    cluster.set_members(peers.iter().filter_map(membership::Peer::member).collect());
    tell(names, cluster, noted)
}

/// Tells the catalog who was wrong since it was told the last time.
fn tell(names: &dyn Names, cluster: &Cluster, noted: &Noted) -> Result<()> {
    let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
    for (peer, count) in cluster.suspects() {
        let before = noted.get(&peer).copied().unwrap_or(0);
        if count > before {
            membership::suspect(names, &peer, count - before, now())?;
            noted.insert(peer, count);
        }
    }
    Ok(())
}
