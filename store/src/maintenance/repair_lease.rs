//! The repair lease: one repair runs at a time. Two repairs that see different members could each
//! drop what the other keeps.
//!
//! A repair holds a document that expires, and renews it from a thread of its own. A repair that
//! cannot renew the document stops well before it expires.
//!
//! Clocks of this process prove nothing about a deletion: the machine may be suspended, and a virtual
//! machine may be paused, between any two steps. So each deletion is done in this order:
//!
//! 1. The peer's clock is read.
//! 2. The lease is renewed ([`RepairLease::permit`]). Deletions that wait at the same time share one
//!    renewal.
//! 3. The deletion is sent. The peer refuses it when its clock is [`DELETION_TIMEOUT`] after the first
//!    step.
//!
//! The document expires [`LEASE_SECONDS`] after the second step, which is later. So no deletion of a
//! repair is carried out after another repair has started. After a kill the next repair starts when the
//! document has expired.
//!
//! | | value |
//! |---|---|
//! | the document expires after | [`LEASE_SECONDS`] |
//! | it is renewed every | [`RENEW_INTERVAL`] |
//! | it counts as held until | [`SAFE_HOLD`] after the last renewal that was granted |

use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use tokio::sync::Notify;

use crate::cluster::repair::{DELETION_TIMEOUT, DeletionPermit, PermitFuture};
use crate::documents::{Documents, renew_lock, try_lock, unlock};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::sys;

/// The key of the document.
const LEASE_KEY: &str = "leader/repair";

/// Seconds until the document expires without a renewal.
const LEASE_SECONDS: u32 = 30;

/// The interval between two renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);

/// The pause after a renewal that failed.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// How long the lease counts as held after a renewal. The rest of [`LEASE_SECONDS`] is longer than
/// a deletion takes ([`DELETION_TIMEOUT`]).
const SAFE_HOLD: Duration = Duration::from_secs(12);

const _: () = assert!(
    SAFE_HOLD.as_secs() + DELETION_TIMEOUT.as_secs() + 5 <= LEASE_SECONDS as u64,
    "a deletion that is sent while the lease is held ends before the lease can pass to another"
);

/// The lease of a running repair.
pub(super) struct RepairLease<'a> {
    documents: &'a dyn Documents,
    me: String,
    shared: Arc<SharedState>,
}

/// The state that the lease shares with its renewal and with its permits.
struct SharedState {
    state: Mutex<LeaseState>,
    wake: Condvar,
    /// Notified when a renewal has ended and when the lease is lost.
    renewed: Notify,
}

impl SharedState {
    fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().expect("no code panics with the state locked")
    }

    /// Waits for a renewal that begins after this call. Returns whether it was granted.
    async fn confirm(&self) -> bool {
        let wanted = {
            let mut state = self.state();
            state.wanted = state.begun + 1;
            state.wanted
        };
        self.wake.notify_all();
        loop {
            let mut renewed = pin!(self.renewed.notified());
            // Before the check, so that no notification is missed.
            renewed.as_mut().enable();
            {
                let state = self.state();
                if state.is_lost || state.granted >= wanted {
                    return !state.is_lost;
                }
            }
            renewed.await;
        }
    }

    fn is_held(&self) -> bool {
        let state = self.state();
        !state.is_lost && sys::time_since_boot().saturating_sub(state.renewed) < SAFE_HOLD
    }
}

struct LeaseState {
    /// When the last renewal that was granted was requested, by a clock that does not stop while the
    /// machine is suspended.
    renewed: Duration,
    /// The number of renewals that were begun.
    begun: u64,
    /// Of these, the last one that was granted.
    granted: u64,
    /// The renewal that somebody waits for.
    wanted: u64,
    /// Another repair holds the lease, a renewal came too late, or the lease was given back.
    is_lost: bool,
    /// The work has ended.
    is_ended: bool,
}

impl RepairLease<'_> {
    /// Takes the lease and does `work`. Fails with [`Error::RepairRuns`] if another repair holds
    /// it. The work must end soon after [`RepairLease::is_held`] returns false.
    pub(super) fn with<R>(
        documents: &dyn Documents,
        work: impl FnOnce(&RepairLease) -> Result<R>,
    ) -> Result<R> {
        let lease = RepairLease::take(documents)?;
        thread::scope(|scope| {
            let renewing = thread::Builder::new().name("repair-lease".into());
            let _end = EndRenewal(&lease);
            renewing
                .spawn_scoped(scope, || lease.renew_until_ended())
                .map_err(|error| Error::io("starting", "a thread".as_ref(), error))?;
            work(&lease)
        })
    }

    fn take(documents: &dyn Documents) -> Result<RepairLease<'_>> {
        let me = sys::random().map(PeerId::from_bytes);
        let me = me.map_err(|e| Error::io("reading", "/dev/urandom".as_ref(), e))?.to_string();
        let renewed = sys::time_since_boot();
        let (begun, granted, wanted) = (0, 0, 0);
        let (is_lost, is_ended) = (false, false);
        let state = LeaseState { renewed, begun, granted, wanted, is_lost, is_ended };
        let (wake, renewed) = (Condvar::new(), Notify::new());
        let shared = SharedState { state: Mutex::new(state), wake, renewed };
        let lease = RepairLease { documents, me, shared: Arc::new(shared) };
        match lease.request(try_lock)? {
            true => Ok(lease),
            false => Err(Error::RepairRuns),
        }
    }

    /// Whether no other repair can hold the lease.
    pub(super) fn is_held(&self) -> bool {
        self.shared.is_held()
    }

    /// Permits deletions while the lease is held: see the module's text.
    pub(super) fn permit(&self) -> DeletionPermit {
        let shared = self.shared.clone();
        Arc::new(move || -> PermitFuture {
            let shared = shared.clone();
            Box::pin(async move { shared.confirm().await })
        })
    }

    /// Requests the document again. Returns whether this repair has held it all the time: if it was
    /// away in between, another repair may have held the lease and given it back.
    fn renew(&self) -> Result<bool> {
        self.request(renew_lock)
    }

    /// Requests the document with `request`. Returns whether this repair holds it.
    fn request(
        &self,
        request: impl FnOnce(&dyn Documents, &str, &str, u32) -> Result<bool>,
    ) -> Result<bool> {
        let (asked, number) = {
            let mut state = self.shared.state();
            state.begun += 1;
            (sys::time_since_boot(), state.begun)
        };
        let is_ours = request(self.documents, LEASE_KEY, &self.me, LEASE_SECONDS)?;
        if is_ours {
            let mut state = self.shared.state();
            (state.renewed, state.granted) = (asked, number);
        }
        Ok(is_ours)
    }

    fn renew_until_ended(&self) {
        let mut state = self.shared.state();
        loop {
            let is_waiting =
                |state: &mut LeaseState| !state.is_ended && state.granted >= state.wanted;
            let woken = self.shared.wake.wait_timeout_while(state, RENEW_INTERVAL, is_waiting);
            state = woken.expect("no code panics with the state locked").0;
            if state.is_ended {
                return;
            }
            drop(state);
            // While the catalog is away the lease stays valid until its time is up.
            let renewed = self.renew();
            let is_lost = matches!(renewed, Ok(false)) || !self.is_held();
            if renewed.is_err() && !is_lost {
                thread::sleep(RETRY_DELAY);
            }
            state = self.shared.state();
            state.is_lost |= is_lost;
            self.shared.renewed.notify_waiters();
            if is_lost {
                return;
            }
        }
    }
}

impl Drop for RepairLease<'_> {
    fn drop(&mut self) {
        // A permit may outlive the lease.
        self.shared.state().is_lost = true;
        self.shared.renewed.notify_waiters();
        // If this fails, the document expires.
        let _ = unlock(self.documents, LEASE_KEY, &self.me);
    }
}

/// Ends the renewals when it is dropped, even if the work panics.
struct EndRenewal<'a>(&'a RepairLease<'a>);

impl Drop for EndRenewal<'_> {
    fn drop(&mut self) {
        self.0.shared.state().is_ended = true;
        self.0.shared.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tempfile::TempDir;
    use tokio::runtime::Builder;
    use tokio::task::JoinSet;

    use super::{DeletionPermit, Documents, Error, LEASE_KEY, RENEW_INTERVAL, RepairLease};
    use crate::documents::{Change, Query, SqliteDocuments};

    fn documents(dir: &TempDir) -> SqliteDocuments {
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        SqliteDocuments::open(&path).unwrap()
    }

    fn is_permitted(permit: &DeletionPermit) -> bool {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(permit())
    }

    /// The lease passes to another repair while this one is stopped, and its clock with it.
    #[test]
    fn a_deletion_is_not_permitted_at_any_time_after_another_repair_has_the_lease() {
        let dir = TempDir::new().unwrap();
        let documents = documents(&dir);
        RepairLease::with(&documents, |lease| {
            let permit = lease.permit();
            assert!(is_permitted(&permit));
            let stolen = Change::default().put_for(60, LEASE_KEY, &"another repair".to_owned());
            assert!(documents.commit(&stolen).unwrap());
            assert!(lease.is_held(), "its clock says so");
            assert!(!is_permitted(&permit));
            Ok(())
        })
        .unwrap();
    }

    /// While this repair is stopped, the lease passes to another repair, which gives it back.
    #[test]
    fn a_lease_that_was_away_in_between_is_lost() {
        let dir = TempDir::new().unwrap();
        let documents = documents(&dir);
        RepairLease::with(&documents, |lease| {
            let permit = lease.permit();
            assert!(is_permitted(&permit));
            assert!(documents.commit(&Change::default().remove(Query::key(LEASE_KEY))).unwrap());
            assert!(!is_permitted(&permit));
            assert!(!lease.is_held());
            let other = RepairLease::with(&documents, |_| Ok(7));
            assert_eq!(other.unwrap(), 7, "this repair did not take it again");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn deletions_share_renewals() {
        let dir = TempDir::new().unwrap();
        let documents = documents(&dir);
        RepairLease::with(&documents, |lease| {
            let permit = lease.permit();
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            let all = runtime.block_on(async {
                let mut asked = JoinSet::new();
                (0..1000).for_each(|_| drop(asked.spawn(permit())));
                asked.join_all().await
            });
            assert!(all.into_iter().all(|is_permitted| is_permitted));
            let renewals = lease.shared.state().begun;
            assert!(renewals < 100, "{renewals}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn one_repair_runs_at_a_time() {
        let dir = TempDir::new().unwrap();
        let documents = documents(&dir);
        let repaired = RepairLease::with(&documents, |lease| {
            let other = RepairLease::with(&documents, |_| Ok(()));
            assert!(matches!(other, Err(Error::RepairRuns)));
            assert!(lease.renew().unwrap() && lease.is_held());
            Ok(7)
        });
        assert_eq!(repaired.unwrap(), 7);
        // Nothing is deleted after the lease was given back.
        let permit = RepairLease::with(&documents, |lease| {
            let permit = lease.permit();
            assert!(is_permitted(&permit));
            Ok(permit)
        });
        assert!(!is_permitted(&permit.unwrap()));
        // The lease is free at once, however the work ended.
        let failed =
            RepairLease::with(&documents, |_| Err::<(), _>(Error::BadArgument("no".into())));
        assert!(matches!(failed, Err(Error::BadArgument(_))));
        let panicked = std::panic::catch_unwind(|| {
            let _ = RepairLease::with(&documents, |_| -> super::Result<()> {
                panic!("this panic is part of the test")
            });
        });
        assert!(panicked.is_err());
        RepairLease::with(&documents, |_| Ok(())).unwrap();
    }

    #[test]
    fn a_lease_that_another_repair_took_is_noticed() {
        let dir = TempDir::new().unwrap();
        let documents = documents(&dir);
        RepairLease::with(&documents, |lease| {
            let stolen = Change::default().put_for(60, LEASE_KEY, &"another repair".to_owned());
            assert!(documents.commit(&stolen).unwrap());
            let end = Instant::now() + RENEW_INTERVAL * 4;
            let permit = lease.permit();
            while lease.is_held() {
                assert!(Instant::now() < end, "the loss of the lease was not noticed");
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(!is_permitted(&permit), "nothing is deleted without the lease");
            Ok(())
        })
        .unwrap();
        let view = documents.read(&[Query::key(LEASE_KEY)]).unwrap();
        let holder: Option<String> = view.get(LEASE_KEY).unwrap();
        assert_eq!(holder.as_deref(), Some("another repair"), "the other lease is left alone");
    }
}
