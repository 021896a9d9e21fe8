//! The repair lease: one repair runs at a time. Two repairs that see different members could each
//! drop what the other keeps.
//!
//! A repair holds a document that expires, and renews it from a thread of its own. A repair that
//! cannot renew the document stops well before it expires: each deletion asks the lease right before
//! it is sent ([`RepairLease::permit`]), and the peer refuses it after
//! [`DELETION_TIMEOUT`]. So no deletion of a repair is
//! carried out after another repair has started. After a kill the next repair starts when the
//! document has expired.
//!
//! | | value |
//! |---|---|
//! | the document expires after | [`LEASE_SECONDS`] |
//! | it is renewed every | [`RENEW_INTERVAL`] |
//! | it counts as held until | [`SAFE_HOLD`] after the last renewal that was granted |

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::cluster::repair::{DELETION_TIMEOUT, DeletionPermit};
use crate::documents::{Documents, try_lock, unlock};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::sys;

/// The key of the document.
const LEASE_KEY: &str = "leader/repair";

/// Seconds until the document expires without a renewal.
const LEASE_SECONDS: u32 = 30;

/// The interval between two renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);

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
}

impl SharedState {
    fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().expect("no code panics with the state locked")
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
        let state = LeaseState { renewed, is_lost: false, is_ended: false };
        let shared = SharedState { state: Mutex::new(state), wake: Condvar::new() };
        let lease = RepairLease { documents, me, shared: Arc::new(shared) };
        match lease.renew()? {
            true => Ok(lease),
            false => Err(Error::RepairRuns),
        }
    }

    /// Whether no other repair can hold the lease.
    pub(super) fn is_held(&self) -> bool {
        self.shared.is_held()
    }

    /// Permits deletions while the lease is held.
    pub(super) fn permit(&self) -> DeletionPermit {
        let shared = self.shared.clone();
        Arc::new(move || shared.is_held())
    }

    /// Requests the document again. Returns whether this repair holds it.
    fn renew(&self) -> Result<bool> {
        let asked = sys::time_since_boot();
        let is_ours = try_lock(self.documents, LEASE_KEY, &self.me, LEASE_SECONDS)?;
        if is_ours {
            self.shared.state().renewed = asked;
        }
        Ok(is_ours)
    }

    fn renew_until_ended(&self) {
        let mut state = self.shared.state();
        loop {
            let is_waiting = |state: &mut LeaseState| !state.is_ended;
            let woken = self.shared.wake.wait_timeout_while(state, RENEW_INTERVAL, is_waiting);
            state = woken.expect("no code panics with the state locked").0;
            if state.is_ended {
                return;
            }
            drop(state);
            // While the catalog is away the lease stays valid until its time is up.
            let is_lost = matches!(self.renew(), Ok(false)) || !self.is_held();
            state = self.shared.state();
            if is_lost {
                state.is_lost = true;
                return;
            }
        }
    }
}

impl Drop for RepairLease<'_> {
    fn drop(&mut self) {
        // A permit may outlive the lease.
        self.shared.state().is_lost = true;
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

    use super::{Documents, Error, LEASE_KEY, RENEW_INTERVAL, RepairLease};
    use crate::documents::{Change, Query, SqliteDocuments};

    fn documents(dir: &TempDir) -> SqliteDocuments {
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        SqliteDocuments::open(&path).unwrap()
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
            assert!(permit());
            Ok(permit)
        });
        assert!(!permit.unwrap()());
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
            assert!(!permit(), "nothing is deleted without the lease");
            Ok(())
        })
        .unwrap();
        let view = documents.read(&[Query::key(LEASE_KEY)]).unwrap();
        let holder: Option<String> = view.get(LEASE_KEY).unwrap();
        assert_eq!(holder.as_deref(), Some("another repair"), "the other lease is left alone");
    }
}
