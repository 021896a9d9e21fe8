//! Threads that ask the catalog. A query may take minutes while the catalog is unavailable, so the
//! operator's queries have a thread of their own: they never wait behind a guest's. A guest's queries
//! are limited, because the catalog serves all disks.

use std::sync::Mutex;
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::time::{Duration, Instant};
use std::{io, thread};

use tokio::sync::oneshot;

use super::{MAX_CONNECTIONS, Origin};
use crate::rate_limit::RateLimit;

/// The most queries of guests that wait. Further ones are refused.
pub(crate) const MAX_WAITING_OF_GUEST: usize = 8;

/// The number of queries that a guest may ask at once, after a time without any. Each checkpoint that
/// can wait may be followed by a client that asks once when this process has started, and by a
/// listing.
const GUEST_QUERY_BURST: u32 = 32;

/// The interval in which a guest may ask one query, after a burst.
const GUEST_QUERY_INTERVAL: Duration = Duration::from_millis(100);

type Job = Box<dyn FnOnce() + Send>;

/// Why a query was not asked.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum NotAsked {
    /// Too many queries wait.
    #[error("too many queries wait for the catalog; try again later")]
    Full,
    /// The guest has asked too often. It may ask again after this time.
    #[error("a guest asks the catalog too often; try again in {} ms", .0.as_millis() + 1)]
    TooOften(Duration),
    /// The thread has ended.
    #[error("the query failed")]
    Ended,
}

/// A thread that asks the catalog, and a bounded queue before it.
pub(crate) struct CatalogLane {
    jobs: SyncSender<Job>,
    limit: Mutex<RateLimit>,
}

impl CatalogLane {
    /// Starts the thread. It is started with the process and stays: later the system may be out of
    /// threads.
    fn start(name: &str, max_waiting: usize, limit: RateLimit) -> io::Result<CatalogLane> {
        let (sender, jobs) = mpsc::sync_channel::<Job>(max_waiting);
        thread::Builder::new().name(name.into()).spawn(move || {
            // A query that panics ends the process, as any panic does.
            for job in jobs {
                job();
            }
        })?;
        Ok(CatalogLane { jobs: sender, limit: Mutex::new(limit) })
    }

    /// Runs a query on the thread, after those that wait already.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        query: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NotAsked> {
        let taken =
            self.limit.lock().expect("no code panics with this lock held").take(Instant::now());
        taken.map_err(NotAsked::TooOften)?;
        let (reply, answer) = oneshot::channel();
        let job = Box::new(move || drop(reply.send(query())));
        self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => NotAsked::Full,
            TrySendError::Disconnected(_) => NotAsked::Ended,
        })?;
        answer.await.map_err(|_| NotAsked::Ended)
    }
}

/// The lanes of the operator and of the guest.
pub(crate) struct CatalogLanes {
    host: CatalogLane,
    guest: CatalogLane,
}

impl CatalogLanes {
    /// Starts both threads.
    pub(crate) fn start() -> io::Result<CatalogLanes> {
        let now = Instant::now();
        let no_limit = RateLimit::new(1, Duration::ZERO, now);
        let guest_limit = RateLimit::new(GUEST_QUERY_BURST, GUEST_QUERY_INTERVAL, now);
        Ok(CatalogLanes {
            // Each connection has at most one query, so none of the operator's is refused.
            host: CatalogLane::start("catalog-host", MAX_CONNECTIONS, no_limit)?,
            guest: CatalogLane::start("catalog-guest", MAX_WAITING_OF_GUEST, guest_limit)?,
        })
    }

    /// The lane for queries of this origin.
    pub(crate) fn of(&self, origin: Origin) -> &CatalogLane {
        match origin {
            Origin::Host => &self.host,
            Origin::Guest => &self.guest,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::{CatalogLane, CatalogLanes, MAX_WAITING_OF_GUEST, NotAsked};
    use crate::control::Origin;
    use crate::rate_limit::RateLimit;

    /// A lane without a limit of the rate.
    fn lane(max_waiting: usize) -> CatalogLane {
        let no_limit = RateLimit::new(1, Duration::ZERO, Instant::now());
        CatalogLane::start("test", max_waiting, no_limit).unwrap()
    }

    #[tokio::test]
    async fn queries_of_a_guest_that_hang_do_not_delay_the_operator() {
        let lanes = CatalogLanes::start().unwrap();
        let (release, hang) = mpsc::channel::<()>();
        let (begun, has_begun) = mpsc::channel();
        let hanging = lanes.of(Origin::Guest).ask(move || {
            begun.send(()).unwrap();
            hang.recv().is_err()
        });
        tokio::pin!(hanging);
        assert!(futures_poll(&mut hanging).await, "it hangs");
        has_begun.recv_timeout(Duration::from_secs(10)).unwrap();
        let mut waiting: Vec<_> = (0..MAX_WAITING_OF_GUEST)
            .map(|_| Box::pin(lanes.of(Origin::Guest).ask(|| true)))
            .collect();
        for query in &mut waiting {
            futures_poll(query).await;
        }
        let asked = lanes.of(Origin::Host).ask(|| 7);
        let answer = tokio::time::timeout(Duration::from_secs(10), asked).await;
        assert_eq!(answer.expect("the operator does not wait"), Ok(7));
        assert_eq!(lanes.of(Origin::Guest).ask(|| true).await, Err(NotAsked::Full));
        drop(release);
    }

    #[tokio::test]
    async fn queries_beyond_the_bound_are_refused_and_those_that_wait_are_answered() {
        let lane = lane(2);
        let (release, hang) = mpsc::channel::<()>();
        let (begun, has_begun) = mpsc::channel();
        let hanging = lane.ask(move || {
            begun.send(()).unwrap();
            hang.recv().unwrap();
            0
        });
        tokio::pin!(hanging);
        assert!(futures_poll(&mut hanging).await, "it hangs");
        has_begun.recv().unwrap();
        let (first, second) = (lane.ask(|| 1), lane.ask(|| 2));
        tokio::pin!(first, second);
        assert!(futures_poll(&mut first).await && futures_poll(&mut second).await);
        assert_eq!(lane.ask(|| 3).await, Err(NotAsked::Full));
        release.send(()).unwrap();
        assert_eq!((hanging.await, first.await, second.await), (Ok(0), Ok(1), Ok(2)));
    }

    /// Polls once. Returns whether the future is pending.
    async fn futures_poll<F: Future + Unpin>(future: &mut F) -> bool {
        tokio::select! {
            biased;
            _ = future => false,
            () = std::future::ready(()) => true,
        }
    }
}
