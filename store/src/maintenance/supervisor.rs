//! The supervisor of a cluster: it declares peers lost and starts repairs.
//!
//! It runs in the process of a served catalog, or as `cairn supervise`, with the keys of the role
//! supervisor. A peer never runs one, because its keys must not reach what other peers hold.
//!
//! Several processes may run a supervisor. Only the one that holds the document `leader/supervisor`
//! acts. The document expires when it is not renewed in time, so there may be two acting
//! supervisors for a moment. Each action is correct even if both perform it.
//!
//! | task | when |
//! |---|---|
//! | note since when a peer is down, and declare it lost | every `POLL_INTERVAL` |
//! | repair after a change of the members | when they have been the same for `SETTLE_TIME` |
//! | repair everything | every `FULL_SCAN_INTERVAL` |
//! | repair again: something was left, a peer found bad fragments, or a snapshot is only *available* | after a growing interval |

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::repair::{has_available, repair_while};
use crate::cluster::membership;
use crate::cluster::membership::Health;
use crate::cluster::membership::loss_detector::{LookTime, LossDetector};
use crate::documents::{Documents, try_lock, unlock};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::repository::Repository;
use crate::sys;

/// Seconds until the leader's document expires without a renewal.
const LEASE_SECONDS: u32 = 10;

/// How often the supervisor reads the members and renews its document.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// How long the members must stay the same before a repair starts: peers of one rack start one
/// after the other.
const SETTLE_TIME: Duration = Duration::from_secs(6);

/// The interval between repairs when nothing has changed.
const FULL_SCAN_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// The retry interval at the start, and again when a peer is back or the members change. Each
/// repair doubles it, so the first retry comes after twice this time.
const FIRST_RETRY: Duration = Duration::from_secs(10);

/// The longest retry interval.
const LONGEST_RETRY: Duration = Duration::from_secs(600);

/// The settings of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupervisorConfig {
    /// How long a peer may be down before it is declared lost.
    pub lost_after: Duration,
    /// The most bytes a second that repair reads and writes; `None` for no limit.
    pub rate: Option<u64>,
}

/// What a repair depends on: of each peer its id, weight, domain, whether it is lost, and whether
/// it is draining. A peer that only goes down changes nothing.
type Situation = Vec<(PeerId, u64, String, bool, bool)>;

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
    /// Starts a supervisor for the cluster of this repository. It acts while no other supervisor
    /// does.
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
        let (watcher, repairer) = (shared.clone(), shared.clone());
        let watch = thread::Builder::new().name("watch".into());
        let repair = thread::Builder::new().name("repair".into());
        let threads = vec![
            watch
                .spawn(move || watcher.watch(&PeerId::from_bytes(me).to_string()))
                .map_err(failed)?,
            repair.spawn(move || repairer.repair()).map_err(failed)?,
        ];
        Ok(Supervisor { shared, threads })
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
    fn documents(&self) -> Option<&dyn Documents> {
        self.repository.cluster().map(|(_, documents)| documents)
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
        while self.pause(POLL_INTERVAL) {
            let Some(documents) = self.documents() else { return };
            let is_leader = try_lock(documents, membership::SUPERVISOR, me, LEASE_SECONDS);
            self.leads.store(*is_leader.as_ref().unwrap_or(&false), Ordering::SeqCst);
            let declared = match is_leader {
                Ok(true) => detector.look(documents, LookTime::now()),
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
        if self.leads.load(Ordering::SeqCst)
            && let Some(documents) = self.documents()
        {
            let _ = unlock(documents, membership::SUPERVISOR, me);
        }
    }

    /// Repairs when the members have changed and when the last repair is long ago. Repairs again
    /// while something is left to do, after a peer has found bad fragments, and soon when a peer is
    /// back.
    fn repair(&self) {
        let mut done: Option<(Situation, Instant)> = None;
        let mut seen: Option<(Situation, Instant)> = None;
        let (mut left, mut wait, mut down) = (false, FIRST_RETRY, 0);
        // The bad fragments that each peer has reported last, and their sum at the last repair.
        let (mut bad, mut bad_at_repair) = (HashMap::new(), 0);
        while self.pause(POLL_INTERVAL) {
            if !self.leads.load(Ordering::SeqCst) {
                (done, seen) = (None, None);
                continue;
            }
            let Some(documents) = self.documents() else { return };
            let Ok((situation, now_down)) = situation(documents, &mut bad) else { continue };
            let found: u64 = bad.values().sum();
            if now_down < std::mem::replace(&mut down, now_down) {
                wait = FIRST_RETRY;
            }
            if seen.as_ref().is_none_or(|(before, _)| *before != situation) {
                seen = Some((situation.clone(), Instant::now()));
                wait = FIRST_RETRY;
            }
            let is_settled = seen.as_ref().is_some_and(|(_, since)| since.elapsed() >= SETTLE_TIME);
            let is_due = done.as_ref().is_none_or(|(before, at)| {
                let again = left
                    || found != bad_at_repair
                    || has_available(&self.repository).unwrap_or(false);
                *before != situation
                    || at.elapsed() >= FULL_SCAN_INTERVAL
                    || (at.elapsed() >= wait && again)
            });
            if !is_settled || !is_due {
                continue;
            }
            let repaired = repair_while(
                &self.repository,
                self.config.rate,
                &|| self.should_continue(),
                &|_| (),
            );
            left = match repaired {
                Ok(report) => {
                    tracing::info!(
                        blobs = report.blobs,
                        under = report.under,
                        rebuilt = report.rebuilt,
                        moved = report.moved,
                        "a repair ended"
                    );
                    report.is_incomplete()
                }
                // The holder of the repair lease may have died. Then the lease expires soon, and a
                // longer interval would leave blobs without their redundancy for no reason.
                Err(Error::RepairRuns) => continue,
                Err(error) => {
                    tracing::warn!(%error, "a repair failed");
                    true
                }
            };
            (done, bad_at_repair) = (Some((situation, Instant::now())), found);
            wait = (wait * 2).min(LONGEST_RETRY);
        }
    }

    fn should_continue(&self) -> bool {
        self.leads.load(Ordering::SeqCst) && !self.stop.load(Ordering::SeqCst)
    }
}

/// The situation, and the number of peers that are down. Updates the number of bad fragments that
/// each peer has found: only a peer that is up reports it.
fn situation(
    documents: &dyn Documents,
    bad: &mut HashMap<PeerId, u64>,
) -> Result<(Situation, usize)> {
    let (peers, _) = membership::peers(documents)?;
    bad.extend(peers.iter().filter_map(|peer| Some((peer.id, peer.stats?.bad))));
    let down = peers.iter().filter(|peer| peer.health == Health::Down).count();
    let one = |peer: membership::Peer| {
        (peer.id, peer.weight, peer.domain, peer.health == Health::Lost, peer.draining)
    };
    Ok((peers.into_iter().map(one).collect(), down))
}
