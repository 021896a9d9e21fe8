//! That one repairs at a time: two who see different members might each drop what the other one keeps.
//!
//! Who repairs holds a document that lasts for some seconds, and renews it. If it cannot, it stops well before the
//! document is gone: what it has begun to delete is deleted, or given up, when another one begins. After a kill the next one
//! waits no longer than the document lasts.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::documents::{Names, hold, let_go};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::sys;

/// The document of the one who repairs.
const REPAIRS: &str = "leader/repair";

/// How long it lasts, in seconds.
const TERM: u32 = 30;

/// How often it is renewed.
const RENEWAL: Duration = Duration::from_secs(3);

/// How long it counts as held after it was renewed. What is left of the term is more than a deletion takes
/// ([`DELETION`](crate::cluster::repair::DELETION)).
const HELD: Duration = Duration::from_secs(12);

/// The turn of the one who repairs.
pub(super) struct Turn<'a> {
    names: &'a dyn Names,
    me: String,
    state: Mutex<State>,
    wake: Condvar,
}

struct State {
    /// When it was asked for that was granted last.
    renewed: Instant,
    /// Somebody else has it.
    is_lost: bool,
    /// It is not needed any more.
    is_over: bool,
}

impl Turn<'_> {
    /// Does this while nobody else repairs. It has to end soon when the turn is not [held](Turn::is_held) any more.
    pub(super) fn with<R>(names: &dyn Names, work: impl FnOnce(&Turn) -> Result<R>) -> Result<R> {
        let turn = Turn::take(names)?;
        thread::scope(|scope| {
            let renewing = thread::Builder::new().name("turn".into());
            let _over = Over(&turn);
            renewing
                .spawn_scoped(scope, || turn.renew_until_over())
                .map_err(|error| Error::io("starting", "a thread".as_ref(), error))?;
            work(&turn)
        })
    }

    fn take(names: &dyn Names) -> Result<Turn<'_>> {
        let me = sys::random().map(PeerId::from_bytes);
        let me = me.map_err(|e| Error::io("reading", "/dev/urandom".as_ref(), e))?.to_string();
        let state = State { renewed: Instant::now(), is_lost: false, is_over: false };
        let turn = Turn { names, me, state: Mutex::new(state), wake: Condvar::new() };
        match turn.renew()? {
            true => Ok(turn),
            false => Err(Error::RepairRuns),
        }
    }

    /// Whether nobody else can have it.
    pub(super) fn is_held(&self) -> bool {
        let state = self.state();
        !state.is_lost && state.renewed.elapsed() < HELD
    }

    /// Asks for it once more. Returns whether it is still ours.
    fn renew(&self) -> Result<bool> {
        let asked = Instant::now();
        let is_ours = hold(self.names, REPAIRS, &self.me, TERM)?;
        if is_ours {
            self.state().renewed = asked;
        }
        Ok(is_ours)
    }

    fn renew_until_over(&self) {
        let mut state = self.state();
        loop {
            let waits = |state: &mut State| !state.is_over;
            let woken = self.wake.wait_timeout_while(state, RENEWAL, waits);
            state = woken.expect("no code panics with the state locked").0;
            if state.is_over {
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics with the state locked")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // If that is not possible, its time ends.
        let _ = let_go(self.names, REPAIRS, &self.me);
    }
}

/// Ends the renewal, also when the work panics.
struct Over<'a>(&'a Turn<'a>);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.state().is_over = true;
        self.0.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tempfile::TempDir;

    use super::{Error, Names, RENEWAL, REPAIRS, Turn};
    use crate::documents::{Change, Embedded, Wanted};

    fn names(dir: &TempDir) -> Embedded {
        let path = dir.path().join("catalog.db");
        Embedded::create(&path).unwrap();
        Embedded::open(&path).unwrap()
    }

    #[test]
    fn one_repairs_at_a_time() {
        let dir = TempDir::new().unwrap();
        let names = names(&dir);
        let repaired = Turn::with(&names, |turn| {
            let other = Turn::with(&names, |_| Ok(()));
            assert!(matches!(other, Err(Error::RepairRuns)));
            assert!(turn.renew().unwrap() && turn.is_held());
            Ok(7)
        });
        assert_eq!(repaired.unwrap(), 7);
        // It is free at once, however the work ended.
        let failed = Turn::with(&names, |_| Err::<(), _>(Error::BadArgument("no".into())));
        assert!(matches!(failed, Err(Error::BadArgument(_))));
        let panicked = std::panic::catch_unwind(|| {
            let _ = Turn::with(&names, |_| -> super::Result<()> { panic!("as it is meant to") });
        });
        assert!(panicked.is_err());
        Turn::with(&names, |_| Ok(())).unwrap();
    }

    #[test]
    fn a_turn_that_is_anothers_is_noticed() {
        let dir = TempDir::new().unwrap();
        let names = names(&dir);
        Turn::with(&names, |turn| {
            let stolen = Change::default().put_for(60, REPAIRS, &"somebody else".to_owned());
            assert!(names.commit(&stolen).unwrap());
            let end = Instant::now() + RENEWAL * 4;
            while turn.is_held() {
                assert!(Instant::now() < end, "nobody has noticed");
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(())
        })
        .unwrap();
        let view = names.read(&[Wanted::key(REPAIRS)]).unwrap();
        let holder: Option<String> = view.get(REPAIRS).unwrap();
        assert_eq!(holder.as_deref(), Some("somebody else"), "it is left alone");
    }
}
