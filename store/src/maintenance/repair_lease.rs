//! That one repairs at a time: two who see different members might each drop what the other one keeps.
//!
//! Who repairs holds a document that lasts for some seconds, and renews it. If it cannot, it stops well before the
//! document is gone: what it has begun to delete is deleted, or given up, when another one begins. After a kill the next one
//! waits no longer than the document lasts.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::documents::{Documents, try_lock, unlock};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::sys;

/// The document of the one who repairs.
const LEASE_KEY: &str = "leader/repair";

/// How long it lasts, in seconds.
const LEASE_SECONDS: u32 = 30;

/// How often it is renewed.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);

/// How long it counts as held after it was renewed. What is left of the term is more than a deletion takes
/// ([`DELETION_TIMEOUT`](crate::cluster::repair::DELETION_TIMEOUT)).
const SAFE_HOLD: Duration = Duration::from_secs(12);

/// The turn of the one who repairs.
pub(super) struct RepairLease<'a> {
    documents: &'a dyn Documents,
    me: String,
    state: Mutex<LeaseState>,
    wake: Condvar,
}

struct LeaseState {
    /// When it was asked for that was granted last.
    renewed: Instant,
    /// Somebody else has it.
    is_lost: bool,
    /// It is not needed any more.
    is_ended: bool,
}

impl RepairLease<'_> {
    /// Does this while nobody else repairs. It has to end soon when the turn is not [held](RepairLease::is_held) any more.
    pub(super) fn with<R>(
        documents: &dyn Documents,
        work: impl FnOnce(&RepairLease) -> Result<R>,
    ) -> Result<R> {
        let lease = RepairLease::take(documents)?;
        thread::scope(|scope| {
            let renewing = thread::Builder::new().name("turn".into());
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
        let state = LeaseState { renewed: Instant::now(), is_lost: false, is_ended: false };
        let lease = RepairLease { documents, me, state: Mutex::new(state), wake: Condvar::new() };
        match lease.renew()? {
            true => Ok(lease),
            false => Err(Error::RepairRuns),
        }
    }

    /// Whether nobody else can have it.
    pub(super) fn is_held(&self) -> bool {
        let state = self.state();
        !state.is_lost && state.renewed.elapsed() < SAFE_HOLD
    }

    /// Asks for it once more. Returns whether it is still ours.
    fn renew(&self) -> Result<bool> {
        let asked = Instant::now();
        let is_ours = try_lock(self.documents, LEASE_KEY, &self.me, LEASE_SECONDS)?;
        if is_ours {
            self.state().renewed = asked;
        }
        Ok(is_ours)
    }

    fn renew_until_ended(&self) {
        let mut state = self.state();
        loop {
            let waits = |state: &mut LeaseState| !state.is_ended;
            let woken = self.wake.wait_timeout_while(state, RENEW_INTERVAL, waits);
            state = woken.expect("no code panics with the state locked").0;
            if state.is_ended {
                return;
            }
            drop(state);
            // While the catalog is away it may be ours all the same, until the time is up.
            let is_lost = matches!(self.renew(), Ok(false)) || !self.is_held();
            state = self.state();
            if is_lost {
                state.is_lost = true;
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().expect("no code panics with the state locked")
    }
}

impl Drop for RepairLease<'_> {
    fn drop(&mut self) {
        // If that is not possible, its time ends.
        let _ = unlock(self.documents, LEASE_KEY, &self.me);
    }
}

/// Ends the renewal, also when the work panics.
struct EndRenewal<'a>(&'a RepairLease<'a>);

impl Drop for EndRenewal<'_> {
    fn drop(&mut self) {
        self.0.state().is_ended = true;
        self.0.wake.notify_all();
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
    fn one_repairs_at_a_time() {
        let dir = TempDir::new().unwrap();
        let documents = documents(&dir);
        let repaired = RepairLease::with(&documents, |lease| {
            let other = RepairLease::with(&documents, |_| Ok(()));
            assert!(matches!(other, Err(Error::RepairRuns)));
            assert!(lease.renew().unwrap() && lease.is_held());
            Ok(7)
        });
        assert_eq!(repaired.unwrap(), 7);
        // It is free at once, however the work ended.
        let failed =
            RepairLease::with(&documents, |_| Err::<(), _>(Error::BadArgument("no".into())));
        assert!(matches!(failed, Err(Error::BadArgument(_))));
        let panicked = std::panic::catch_unwind(|| {
            let _ = RepairLease::with(&documents, |_| -> super::Result<()> {
                panic!("as it is meant to")
            });
        });
        assert!(panicked.is_err());
        RepairLease::with(&documents, |_| Ok(())).unwrap();
    }

    #[test]
    fn a_turn_that_is_anothers_is_noticed() {
        let dir = TempDir::new().unwrap();
        let documents = documents(&dir);
        RepairLease::with(&documents, |lease| {
            let stolen = Change::default().put_for(60, LEASE_KEY, &"somebody else".to_owned());
            assert!(documents.commit(&stolen).unwrap());
            let end = Instant::now() + RENEW_INTERVAL * 4;
            while lease.is_held() {
                assert!(Instant::now() < end, "nobody has noticed");
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(())
        })
        .unwrap();
        let view = documents.read(&[Query::key(LEASE_KEY)]).unwrap();
        let holder: Option<String> = view.get(LEASE_KEY).unwrap();
        assert_eq!(holder.as_deref(), Some("somebody else"), "it is left alone");
    }
}
