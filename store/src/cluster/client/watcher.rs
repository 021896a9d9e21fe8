//! Keeps a client's view of the members up to date.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use std::collections::HashMap;

use super::ClusterBlobs;
use super::cluster::Cluster;
use crate::clock::now;
use crate::cluster::membership;
use crate::documents::Documents;
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::net::identity::Security;

/// How often the members are looked at, if nothing tells of a change.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// A thread that tells a cluster who its members are, and the catalog whom it suspects. It ends with this.
pub(crate) struct MembershipWatcher {
    cluster: Cluster,
    security: Security,
    documents: Arc<dyn Documents>,
    reported: Arc<ReportedSuspects>,
    stop: Arc<AtomicBool>,
}

/// How often each peer was wrong, as far as the catalog was told.
type ReportedSuspects = Mutex<HashMap<PeerId, u64>>;

impl MembershipWatcher {
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// How its connections are kept safe.
    pub(crate) fn security(&self) -> &Security {
        &self.security
    }
}

impl Drop for MembershipWatcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A program that exports one disk ends before the thread looks.
        if let Err(error) = report_suspects(&*self.documents, &self.cluster, &self.reported) {
            tracing::debug!(%error, "the catalog does not learn who was wrong");
        }
    }
}

/// Makes a place for blobs of the peers that are members, and follows them.
pub(crate) fn watch_members(
    documents: &Arc<dyn Documents>,
    security: &Security,
) -> Result<(Arc<ClusterBlobs>, MembershipWatcher)> {
    let (peers, mut revision) = membership::peers(&**documents)?;
    let members = peers.iter().filter_map(membership::Peer::member).collect();
    let cluster = Cluster::new(members, security.clone());
    let blobs = Arc::new(ClusterBlobs::new(cluster.clone())?);
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, cluster_, weak) = (stop.clone(), cluster.clone(), Arc::downgrade(documents));
    let reported = Arc::new(ReportedSuspects::default());
    let reported_ = reported.clone();
    let run = move || {
        while !stopped.load(Ordering::Relaxed)
            && let Some(documents) = Weak::upgrade(&weak)
        {
            match step(&*documents, &cluster_, &reported_, &mut revision) {
                Ok(()) => {}
                Err(error) => {
                    tracing::debug!(%error, "the members are not known at the moment");
                    thread::sleep(POLL_INTERVAL);
                }
            }
        }
    };
    thread::Builder::new()
        .name("members".into())
        .spawn(run)
        .map_err(|error| Error::io("starting", "a thread".as_ref(), error))?;
    let (security, documents) = (security.clone(), documents.clone());
    Ok((blobs, MembershipWatcher { cluster, security, documents, reported, stop }))
}

fn step(
    documents: &dyn Documents,
    cluster: &Cluster,
    reported: &ReportedSuspects,
    revision: &mut u64,
) -> Result<()> {
    documents.wait("members", *revision, POLL_INTERVAL)?;
    let (peers, seen) = membership::peers(documents)?;
    *revision = seen;
    cluster.set_members(peers.iter().filter_map(membership::Peer::member).collect());
    report_suspects(documents, cluster, reported)
}

/// Tells the catalog who was wrong since it was told the last time.
fn report_suspects(
    documents: &dyn Documents,
    cluster: &Cluster,
    reported: &ReportedSuspects,
) -> Result<()> {
    let mut reported = reported.lock().unwrap_or_else(PoisonError::into_inner);
    for (peer, count) in cluster.suspects() {
        let before = reported.get(&peer).copied().unwrap_or(0);
        if count > before {
            membership::suspect(documents, &peer, count - before, now())?;
            reported.insert(peer, count);
        }
    }
    Ok(())
}
