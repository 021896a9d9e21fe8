//! The one who looks after a cluster: calls peers lost, and has everything repaired.
//!
//! Several processes may be able to; the one that holds the document `leader/supervisor` does. It loses it when it does
//! not renew it in time, so there may be two for a moment: what each of them does is right whoever else does it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::repair::{has_available, repair_while};
use crate::clock::now;
use crate::cluster::membership;
use crate::cluster::membership::Health;
use crate::documents::{Documents, try_lock, unlock};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::repository::Repository;
use crate::sys;

const LEADER_KEY: &str = "leader/supervisor";

/// How long the document lasts, in seconds.
const LEASE_SECONDS: u32 = 10;

/// How often the members are looked at.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// How long the members must be the same before anything is moved: peers of one rack start one after the other.
const SETTLE_TIME: Duration = Duration::from_secs(6);

/// How often everything is looked at though nothing has changed.
const FULL_SCAN_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// How soon a repair that left something to do is begun again; then twice as long each time,
const FIRST_RETRY: Duration = Duration::from_secs(10);

/// up to this.
const LONGEST_RETRY: Duration = Duration::from_secs(600);

/// How a keeper does its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupervisorConfig {
    /// How long a peer may be down before it is lost.
    pub lost_after: Duration,
    /// The most bytes a second that repair sends.
    pub rate: Option<u64>,
}

/// What decides whether there is something to repair: the members, but for those that are only down.
type Situation = Vec<(PeerId, u64, String, bool, bool)>;

/// The threads of a keeper. They end with this.
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
    /// Starts looking after the cluster of this repository, whenever nobody else does.
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
        let (one, other) = (shared.clone(), shared.clone());
        let watch = thread::Builder::new().name("watch".into());
        let repair = thread::Builder::new().name("repair".into());
        let threads = vec![
            watch.spawn(move || one.watch(&PeerId::from_bytes(me).to_string())).map_err(failed)?,
            repair.spawn(move || other.repair()).map_err(failed)?,
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

    /// Sleeps, and tells whether to go on.
    fn pause(&self, time: Duration) -> bool {
        let (lock, wake) = &self.sleep;
        let guard = lock.lock().expect("nothing is done with this lock held");
        let stopped = |_: &mut ()| !self.stop.load(Ordering::SeqCst);
        let _ = wake.wait_timeout_while(guard, time, stopped);
        !self.stop.load(Ordering::SeqCst)
    }

    /// Leads, if nobody else does, and watches over the members.
    fn watch(&self, me: &str) {
        while self.pause(POLL_INTERVAL) {
            let Some(documents) = self.documents() else { return };
            let led = try_lock(documents, LEADER_KEY, me, LEASE_SECONDS);
            self.leads.store(*led.as_ref().unwrap_or(&false), Ordering::SeqCst);
            let watched = match led {
                Ok(true) => membership::watch_over(documents, self.config.lost_after, now()),
                Ok(false) => Ok(Vec::new()),
                Err(error) => Err(error),
            };
            match watched {
                Ok(lost) => lost.iter().for_each(|peer| {
                    tracing::warn!(%peer, "a peer is lost; what it held is made again");
                }),
                Err(error) => tracing::debug!(%error, "the members cannot be watched"),
            }
        }
        if self.leads.load(Ordering::SeqCst)
            && let Some(documents) = self.documents()
        {
            let _ = unlock(documents, LEADER_KEY, me);
        }
    }

    /// Repairs when the members have changed, and then and now in any case; again while something is left to do,
    /// and soon when a peer is back.
    fn repair(&self) {
        let mut done: Option<(Situation, Instant)> = None;
        let mut seen: Option<(Situation, Instant)> = None;
        let (mut left, mut wait, mut down) = (false, FIRST_RETRY, 0);
        while self.pause(POLL_INTERVAL) {
            if !self.leads.load(Ordering::SeqCst) {
                (done, seen) = (None, None);
                continue;
            }
            let Some(documents) = self.documents() else { return };
            let Ok((situation, now_down)) = situation(documents) else { continue };
            if now_down < std::mem::replace(&mut down, now_down) {
                wait = FIRST_RETRY;
            }
            if seen.as_ref().is_none_or(|(before, _)| *before != situation) {
                seen = Some((situation.clone(), Instant::now()));
                wait = FIRST_RETRY;
            }
            let calm = seen.as_ref().is_some_and(|(_, since)| since.elapsed() >= SETTLE_TIME);
            let due = done.as_ref().is_none_or(|(before, at)| {
                let again = left || has_available(&self.repository).unwrap_or(false);
                *before != situation
                    || at.elapsed() >= FULL_SCAN_INTERVAL
                    || (at.elapsed() >= wait && again)
            });
            if !calm || !due {
                continue;
            }
            let repaired =
                repair_while(&self.repository, self.config.rate, &|| self.goes_on(), &|_| ());
            left = match repaired {
                Ok(report) => {
                    tracing::info!(
                        blobs = report.blobs,
                        under = report.under,
                        rebuilt = report.rebuilt,
                        moved = report.moved,
                        "repair has ended"
                    );
                    report.is_incomplete()
                }
                // Who had the turn may have died with it: then it is free in a while, and waiting longer each time would
                // leave blobs without their redundancy for no reason.
                Err(Error::RepairRuns) => continue,
                Err(error) => {
                    tracing::warn!(%error, "repair has failed");
                    true
                }
            };
            done = Some((situation, Instant::now()));
            wait = (wait * 2).min(LONGEST_RETRY);
        }
    }

    fn goes_on(&self) -> bool {
        self.leads.load(Ordering::SeqCst) && !self.stop.load(Ordering::SeqCst)
    }
}

/// The situation, and how many peers are down.
fn situation(documents: &dyn Documents) -> Result<(Situation, usize)> {
    let (peers, _) = membership::peers(documents)?;
    let down = peers.iter().filter(|peer| peer.health == Health::Down).count();
    let one = |peer: membership::Peer| {
        (peer.id, peer.weight, peer.domain, peer.health == Health::Lost, peer.draining)
    };
    Ok((peers.into_iter().map(one).collect(), down))
}
