//! The supervisor of a repository: it declares peers lost, and starts repairs, prunes and collections.
//!
//! It runs in the process of a served catalog, or as `cairn supervise`, with the keys of the role
//! supervisor. A peer never runs one, because its keys must not reach what other peers hold. In a
//! directory there are no peers, and it prunes and collects.
//!
//! Several processes may run a supervisor. Only the one that holds the document `leader/supervisor`
//! acts. The document expires when it is not renewed in time, so there may be two acting
//! supervisors for a moment. Each action is correct even if both perform it.
//!
//! | task | when |
//! |---|---|
//! | note since when a peer is down, and declare it lost | every `POLL_INTERVAL` |
//! | repair | when `RepairSchedule` says so |
//! | prune | every `prune_interval`; the document `health/prune` has the time of the last one |
//! | collect | when `collection_schedule` says so |

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::collection::{CollectionOptions, collect_while};
use super::collection_schedule::is_collection_due;
use super::prune::{PruneOptions, prune};
use super::repair::{has_available, repair_while};
use super::repair_schedule::RepairSchedule;
use crate::clock::now;
use crate::cluster::membership;
use crate::cluster::membership::loss_detector::{LookTime, LossDetector};
use crate::documents::{Change, Documents, Query, try_lock, unlock};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::name::Scope;
use crate::repository::Repository;
use crate::sys;

/// Seconds until the leader's document expires without a renewal.
const LEASE_SECONDS: u32 = 10;

/// How often the supervisor reads the members and renews its document.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The settings of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupervisorConfig {
    /// How long a peer may be down before it is declared lost.
    pub lost_after: Duration,
    /// The most bytes a second that repair reads and writes; `None` for no limit.
    pub rate: Option<u64>,
    /// The interval between prunes; `None` for no prunes.
    pub prune_interval: Option<Duration>,
    /// The interval between collections; `None` for no collections.
    pub collection_interval: Option<Duration>,
    /// How long a collection keeps what nothing refers to.
    pub collection_grace: Duration,
}

/// The threads of a supervisor. They end when this is dropped.
pub struct Supervisor {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    repository: Repository,
    config: SupervisorConfig,
    leads: AtomicBool,
    stop: AtomicBool,
    sleep: (Mutex<()>, Condvar),
}

impl Supervisor {
    /// Starts a supervisor for this repository. It acts while no other supervisor does.
    pub fn start(repository: Repository, config: SupervisorConfig) -> Result<Supervisor> {
        let failed = |error| Error::io("starting", "a thread".as_ref(), error);
        let me: [u8; 16] = sys::random().map_err(failed)?;
        let shared = Arc::new(Shared {
            repository,
            config,
            leads: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleep: Default::default(),
        });
        let me = PeerId::from_bytes(me).to_string();
        let mut supervisor = Supervisor { shared, threads: Vec::new() };
        supervisor.spawn("watch", move |shared| shared.watch(&me)).map_err(failed)?;
        if supervisor.shared.repository.cluster().is_some() {
            supervisor.spawn("repair", Shared::repair).map_err(failed)?;
        }
        supervisor.spawn("prune", Shared::prune).map_err(failed)?;
        supervisor.spawn("collect", Shared::collect).map_err(failed)?;
        Ok(supervisor)
    }

    fn spawn(
        &mut self,
        name: &str,
        work: impl FnOnce(&Shared) + Send + 'static,
    ) -> std::io::Result<()> {
        let shared = self.shared.clone();
        let thread = thread::Builder::new().name(name.into()).spawn(move || work(&shared))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.sleep.1.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn documents(&self) -> &dyn Documents {
        self.repository.documents()
    }

    /// Sleeps for `time`, or until the supervisor stops. Returns whether to continue.
    fn pause(&self, time: Duration) -> bool {
        let (lock, wake) = &self.sleep;
        let guard = lock.lock().expect("no code panics with this lock held");
        let runs = |_: &mut ()| !self.stop.load(Ordering::SeqCst);
        let _ = wake.wait_timeout_while(guard, time, runs);
        !self.stop.load(Ordering::SeqCst)
    }

    /// Renews or takes the leader's document. While it is held, declares peers lost.
    fn watch(&self, me: &str) {
        let mut detector = LossDetector::new(self.config.lost_after);
        let (documents, has_peers) = (self.documents(), self.repository.cluster().is_some());
        while self.pause(POLL_INTERVAL) {
            let is_leader = try_lock(documents, membership::SUPERVISOR, me, LEASE_SECONDS);
            self.leads.store(*is_leader.as_ref().unwrap_or(&false), Ordering::SeqCst);
            let declared = match is_leader {
                Ok(true) if has_peers => detector.look(documents, LookTime::now()),
                Ok(true) => Ok(Vec::new()),
                Ok(false) => {
                    detector.forget();
                    Ok(Vec::new())
                }
                Err(error) => Err(error),
            };
            match declared {
                Ok(lost) => lost.iter().for_each(|peer| {
                    tracing::warn!(%peer, "declared a peer lost; repair replaces what it held");
                }),
                Err(error) => tracing::debug!(%error, "failed to update the members"),
            }
        }
        if self.leads.load(Ordering::SeqCst) {
            let _ = unlock(documents, membership::SUPERVISOR, me);
        }
    }

    /// Repairs when the members have changed and when the last repair is long ago. Repairs again
    /// while something is left to do, after a peer has found bad fragments, and soon when a peer is
    /// back.
    fn repair(&self) {
        let mut schedule = RepairSchedule::new();
        while self.pause(POLL_INTERVAL) {
            if !self.leads.load(Ordering::SeqCst) {
                schedule.forget();
                continue;
            }
            let documents = self.documents();
            let Ok((peers, _)) = membership::peers(documents) else { continue };
            schedule.note(&peers, Instant::now());
            let has_available = || has_available(&self.repository).unwrap_or(false);
            if schedule.is_due(Instant::now(), has_available)
                && let Some(is_incomplete) = self.repair_once()
            {
                schedule.note_repair(is_incomplete, Instant::now());
            }
        }
    }

    /// Runs a repair. Returns whether something is left to do, or `None` if another repair runs.
    fn repair_once(&self) -> Option<bool> {
        let should_continue = || self.should_continue();
        match repair_while(&self.repository, self.config.rate, &should_continue, &|_| ()) {
            Ok(report) => {
                tracing::info!(
                    blobs = report.blobs,
                    under = report.under,
                    rebuilt = report.rebuilt,
                    moved = report.moved,
                    "a repair ended"
                );
                Some(report.is_incomplete())
            }
            // The holder of the repair lease may have died. Then the lease expires soon, and a
            // longer interval would leave blobs without their redundancy for no reason.
            Err(Error::RepairRuns) => None,
            Err(error) => {
                tracing::warn!(%error, "a repair failed");
                Some(true)
            }
        }
    }

    /// Prunes when the last prune of any supervisor is long ago.
    fn prune(&self) {
        let Some(interval) = self.config.prune_interval else { return };
        while self.pause(POLL_INTERVAL) {
            if !self.leads.load(Ordering::SeqCst) {
                continue;
            }
            match begin_prune(self.documents(), interval, now()) {
                Ok(true) => self.prune_once(),
                Ok(false) => {}
                Err(error) => tracing::debug!(%error, "failed to read when the last prune was"),
            }
        }
    }

    fn prune_once(&self) {
        let should_continue = || self.should_continue();
        let options = PruneOptions {
            is_brief: true,
            should_continue: &should_continue,
            ..PruneOptions::default()
        };
        let mut removed = 0_u64;
        let pruned = prune(&self.repository, &Scope::All, &options, &mut |one| {
            if one.is_removed {
                removed += 1;
                tracing::info!(snapshot = %one.name, reason = %one.reason, "pruned a snapshot");
            }
            Ok(())
        });
        match pruned {
            Ok(()) => tracing::info!(removed, "a prune ended"),
            Err(error) => tracing::warn!(%error, removed, "a prune failed"),
        }
    }

    /// Collects when the last collection of anybody is long ago.
    fn collect(&self) {
        let Some(interval) = self.config.collection_interval else { return };
        // Whether a collection was due while a repair, or another collection, was running.
        let mut is_waiting = false;
        while self.pause(POLL_INTERVAL) {
            if !self.leads.load(Ordering::SeqCst) {
                is_waiting = false;
                continue;
            }
            if is_waiting || self.is_collection_due(interval) {
                is_waiting = !self.collect_once();
            }
        }
    }

    fn is_collection_due(&self, interval: Duration) -> bool {
        let is_due = is_collection_due(&self.repository, interval, now());
        is_due.unwrap_or_else(|error| {
            tracing::debug!(%error, "failed to read when the last collection was");
            false
        })
    }

    /// Runs a collection. Returns `false` if a repair or another collection runs.
    fn collect_once(&self) -> bool {
        let grace = self.config.collection_grace;
        let options = CollectionOptions { grace, ..CollectionOptions::default() };
        let collected =
            collect_while(&self.repository, &options, &|| self.should_continue(), &|_| ());
        match collected {
            Ok(report) => tracing::info!(
                number = report.number.0,
                freed = report.freed.bytes,
                kept = report.live.bytes,
                waiting = report.waiting.bytes,
                "a collection ended"
            ),
            Err(Error::RepairRuns) => return false,
            Err(error) => tracing::warn!(%error, "a collection failed"),
        }
        true
    }

    fn should_continue(&self) -> bool {
        self.leads.load(Ordering::SeqCst) && !self.stop.load(Ordering::SeqCst)
    }
}

/// The document with the time of the last prune, in seconds since 1970.
const LAST_PRUNE: &str = "health/prune";

/// Notes that a prune begins now, if the last one is at least `interval` ago. Returns whether it is. A
/// prune in the future is that of a clock that was set back since.
fn begin_prune(documents: &dyn Documents, interval: Duration, now: u64) -> Result<bool> {
    let view = documents.read(&[Query::key(LAST_PRUNE)])?;
    let last: Option<u64> = view.get(LAST_PRUNE)?;
    if last.is_some_and(|last| last <= now && now - last < interval.as_secs().max(1)) {
        return Ok(false);
    }
    let mut change = Change::default().put(LAST_PRUNE, &now);
    change.relies_on.push((LAST_PRUNE.into(), view.version(LAST_PRUNE)));
    documents.commit(&change)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::begin_prune;
    use crate::documents::SqliteDocuments;

    #[test]
    fn a_prune_begins_once_in_each_interval_also_after_the_clock_was_set_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        let documents = SqliteDocuments::open(&path).unwrap();
        let hour = Duration::from_secs(3600);
        for (now, begins) in [
            (10_000, true),
            (10_001, false),
            (13_599, false),
            (13_600, true),
            (13_600, false),
            // The clock was ahead by a day until here.
            (100_000, true),
            (17_200, true),
            (17_201, false),
        ] {
            assert_eq!(begin_prune(&documents, hour, now).unwrap(), begins, "{now}");
        }
    }
}
