//! [`MembershipWatcher`]: keeps a client's view of the members up to date.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use super::ClusterBlobs;
use super::cluster::Cluster;
use crate::clock::now;
use crate::cluster::membership;
use crate::cluster::membership::view::MembersView;
use crate::documents::Documents;
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::net::identity::Security;

/// The longest wait for a change of the members before the client looks for a supervisor again.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// A thread that updates the members of a [`Cluster`] and reports suspect peers to the catalog. The
/// thread stops when this is dropped.
pub(crate) struct MembershipWatcher {
    cluster: Cluster,
    security: Security,
    documents: Arc<dyn Documents>,
    reported: Arc<ReportedSuspects>,
    members: Arc<MemberUpdates>,
    stop: Arc<AtomicBool>,
}

/// Lets one thread at a time read the members and update the cluster, so that no older list replaces
/// a newer one.
struct MemberUpdates(Mutex<MembersView>);

impl MemberUpdates {
    fn view(&self) -> MutexGuard<'_, MembersView> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the members of the cluster, which may have changed.
    fn update(
        &self,
        documents: &dyn Documents,
        cluster: &Cluster,
        has_changed: bool,
    ) -> Result<()> {
        let mut view = self.view();
        if let Some(members) = view.update(documents, has_changed)? {
            cluster.set_members(members);
        }
        Ok(())
    }
}

/// For each peer, the number of wrong blocks that were reported to the catalog.
type ReportedSuspects = Mutex<HashMap<PeerId, u64>>;

impl MembershipWatcher {
    /// Returns the client of the cluster.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Reads the members from the catalog, and updates the cluster at once.
    pub(crate) fn update(&self) -> Result<()> {
        self.members.update(&*self.documents, &self.cluster, true)
    }

    /// Returns the keys of the cluster's connections.
    pub(crate) fn security(&self) -> &Security {
        &self.security
    }
}

impl Drop for MembershipWatcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A short-lived program, such as an export, ends before the thread reports.
        if let Err(error) = report_suspects(&*self.documents, &self.cluster, &self.reported) {
            tracing::debug!(%error, "cannot report suspect peers to the catalog");
        }
    }
}

/// Creates a blob store on the current members, and starts a thread that follows changes of them.
pub(crate) fn watch_members(
    documents: &Arc<dyn Documents>,
    security: &Security,
) -> Result<(Arc<ClusterBlobs>, MembershipWatcher)> {
    let mut view = MembersView::default();
    let members = view.update(&**documents, true)?.unwrap_or_default();
    let cluster = Cluster::new(members, security.clone());
    let blobs = Arc::new(ClusterBlobs::new(cluster.clone())?);
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, thread_cluster, weak) =
        (stop.clone(), cluster.clone(), Arc::downgrade(documents));
    let reported = Arc::new(ReportedSuspects::default());
    let thread_reported = reported.clone();
    let members = Arc::new(MemberUpdates(Mutex::new(view)));
    let thread_members = members.clone();
    let run = move || {
        while !stopped.load(Ordering::Relaxed)
            && let Some(documents) = Weak::upgrade(&weak)
        {
            let shared = (&thread_cluster, &*thread_members, &*thread_reported);
            match step(&*documents, shared) {
                Ok(()) => {}
                Err(error) => {
                    tracing::debug!(%error, "cannot read the members; retrying");
                    thread::sleep(POLL_INTERVAL);
                }
            }
        }
    };
    thread::Builder::new()
        .name("members".into())
        .spawn(run)
        .map_err(|error| Error::io("starting", "the members thread".as_ref(), error))?;
    let (security, documents) = (security.clone(), documents.clone());
    Ok((blobs, MembershipWatcher { cluster, security, documents, reported, members, stop }))
}

/// Waits for a change of the members, updates the cluster, and reports suspect peers.
fn step(
    documents: &dyn Documents,
    (cluster, members, reported): (&Cluster, &MemberUpdates, &ReportedSuspects),
) -> Result<()> {
    let revision = members.view().revision();
    let has_changed = documents.wait("members", revision, POLL_INTERVAL)?;
    members.update(documents, cluster, has_changed)?;
    report_suspects(documents, cluster, reported)
}

/// Reports to the catalog the wrong blocks that each peer sent since the last report.
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
