//! Which connections a server keeps when there are too many.
//!
//! ```text
//! accepted ──► unauthenticated: few ── handshake ──► authenticated: many ──► served
//!                └─ too many: the oldest of              └─ too many: the newest of
//!                   the busiest host ends                   the busiest host ends
//! ```
//!
//! The *busiest* host is the one with the most connections of this kind.
//!
//! - Anybody can open connections and send nothing, so a connection that has not authenticated is
//!   only as good as its age is low: the oldest has had the most time. A host that floods the
//!   server ends its own connections, not those of others.
//! - An authenticated connection that has worked for long is worth more than one that has just
//!   begun. A host keeps what it has while another host has more, and never takes the place of a
//!   host that has fewer.
//! - A connection that has not authenticated never ends one that has.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tracing::Level;

use crate::sys;

/// The most authenticated connections of a server, however many files its process may open. With
/// TLS a connection takes some tens of KiB.
pub(crate) const MAX_CONNECTIONS: usize = 32_768;

/// The most connections that have not authenticated.
const MAX_UNAUTHENTICATED: usize = 64;

/// The interval between two warnings that there are too many connections.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Files that a process needs besides its connections.
const OTHER_FILES: usize = 256;

/// The fewest authenticated connections of a server, however few files its process may open.
const FEWEST_CONNECTIONS: usize = 64;

/// A server that admits fewer authenticated connections warns of it. Only a large cluster needs more.
const FEW_CONNECTIONS: usize = 1024;

/// The connections of a server.
pub(crate) struct Admission {
    numbers: AtomicU64,
    unauthenticated: Group,
    authenticated: Group,
    /// When the server last warned that there are too many connections.
    warned: Mutex<Option<Instant>>,
}

/// Connections of one kind, by number. A higher number is younger.
struct Group {
    max: usize,
    all: Mutex<BTreeMap<u64, Member>>,
}

struct Member {
    host: IpAddr,
    /// Dropping it ends the connection.
    _end: oneshot::Sender<()>,
}

/// A connection that has not authenticated.
pub(crate) struct Unauthenticated {
    admission: Arc<Admission>,
    number: u64,
    host: IpAddr,
    ended: oneshot::Receiver<()>,
}

/// An authenticated connection. It gives up its place when this is dropped.
pub(crate) struct Authenticated {
    admission: Arc<Admission>,
    number: u64,
    ended: oneshot::Receiver<()>,
}

impl Admission {
    /// Admits `max` authenticated connections, or fewer if the process may not open that many
    /// files. Raises the process's limit of open files as far as the system permits.
    pub(crate) fn new(max: usize) -> Arc<Admission> {
        let files = sys::raise_open_files().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read how many files this process may open");
            u64::MAX
        });
        let admitted = within(max, files);
        log_limit(files, admitted, max);
        Admission::with_limits(MAX_UNAUTHENTICATED, admitted)
    }

    pub(crate) fn with_limits(unauthenticated: usize, authenticated: usize) -> Arc<Admission> {
        Arc::new(Admission {
            numbers: AtomicU64::new(0),
            unauthenticated: Group::new(unauthenticated),
            authenticated: Group::new(authenticated),
            warned: Mutex::default(),
        })
    }

    /// Warns that a connection must end, but not each time.
    fn warn(&self, host: IpAddr) {
        let mut warned = self.warned.lock().expect("no code panics with this lock held");
        if warned.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL) {
            *warned = Some(Instant::now());
            let most = self.authenticated.max;
            tracing::warn!(
                most,
                busiest = %host,
                "too many connections: those of the busiest host are refused; raise the limit of \
                 open files (LimitNOFILE), or use fewer disks on that host"
            );
        }
    }

    /// Adds a connection that was accepted from this address. If there are too many, ends the
    /// oldest of the busiest host.
    pub(crate) fn admit(self: &Arc<Admission>, from: IpAddr) -> Unauthenticated {
        let (number, host) = (self.numbers.fetch_add(1, Ordering::Relaxed), host(from));
        let mut all = self.unauthenticated.lock();
        if let Some(busiest) = self.unauthenticated.busiest(&all, host)
            && let Some(oldest) = first(all.iter(), &busiest)
        {
            all.remove(&oldest);
        }
        let ended = add(&mut all, number, host);
        drop(all);
        Unauthenticated { admission: self.clone(), number, host, ended }
    }
}

/// The authenticated connections that a process may have that may open this many files.
fn within(max: usize, files: u64) -> usize {
    let files = usize::try_from(files).unwrap_or(usize::MAX);
    let free = files.saturating_sub(OTHER_FILES + MAX_UNAUTHENTICATED);
    max.min(free.max(FEWEST_CONNECTIONS))
}

/// Logs that the limit of open files limits the connections, if it does.
fn log_limit(files: u64, admitted: usize, max: usize) {
    let text = format!(
        "admitting {admitted} connections, not {max}, because this process may open {files} files; \
         if more clients connect, raise the limit of open files (LimitNOFILE, or `ulimit -n`)"
    );
    match limit_level(admitted, max) {
        Some(Level::WARN) => tracing::warn!("{text}"),
        Some(_) => tracing::info!("{text}"),
        None => {}
    }
}

/// How urgent it is that a server admits fewer connections than it would; `None` if it does not.
fn limit_level(admitted: usize, max: usize) -> Option<Level> {
    match admitted {
        _ if admitted >= max => None,
        ..FEW_CONNECTIONS => Some(Level::WARN),
        _ => Some(Level::INFO),
    }
}

/// The host of an address. A host with IPv6 usually has a network of 64 bits to itself.
fn host(from: IpAddr) -> IpAddr {
    match from.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
        address => address,
    }
}

impl Group {
    fn new(max: usize) -> Group {
        Group { max, all: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Member>> {
        self.all.lock().expect("no code panics with this lock held")
    }

    /// The hosts with the most connections, counted with one more from `newcomer`; `None` if there
    /// is room for that one.
    fn busiest(&self, all: &BTreeMap<u64, Member>, newcomer: IpAddr) -> Option<Vec<IpAddr>> {
        if all.len() < self.max {
            return None;
        }
        let mut counts = HashMap::from([(newcomer, 1)]);
        for member in all.values() {
            *counts.entry(member.host).or_insert(0) += 1;
        }
        let most = counts.values().max().copied();
        Some(counts.into_iter().filter(|(_, n)| Some(*n) == most).map(|(host, _)| host).collect())
    }
}

/// The first of these connections that comes from one of these hosts.
fn first<'a>(
    mut all: impl Iterator<Item = (&'a u64, &'a Member)>,
    hosts: &[IpAddr],
) -> Option<u64> {
    all.find(|(_, member)| hosts.contains(&member.host)).map(|(number, _)| *number)
}

fn add(all: &mut BTreeMap<u64, Member>, number: u64, host: IpAddr) -> oneshot::Receiver<()> {
    let (end, ended) = oneshot::channel();
    all.insert(number, Member { host, _end: end });
    ended
}

impl Unauthenticated {
    /// Waits for the handshake. Its result is `None` if the client was refused. Fails if the
    /// connection must make room for others.
    pub(crate) async fn complete<T>(
        mut self,
        handshake: impl Future<Output = io::Result<Option<T>>>,
    ) -> io::Result<Option<(T, Authenticated)>> {
        let done = tokio::select! {
            done = handshake => done?,
            // Nothing is ever sent: the sender is dropped.
            _ = &mut self.ended => {
                return Err(io::Error::other("too many unauthenticated connections"));
            }
        };
        let Some(done) = done else { return Ok(None) };
        match self.authenticate() {
            Some(authenticated) => Ok(Some((done, authenticated))),
            None => Err(io::Error::other("too many connections, and most are from its host")),
        }
    }

    /// Turns this into an authenticated connection. If there are too many, ends the newest of the
    /// busiest host, which may be this one.
    fn authenticate(self) -> Option<Authenticated> {
        let group = &self.admission.authenticated;
        let mut all = group.lock();
        if let Some(busiest) = group.busiest(&all, self.host) {
            if busiest.contains(&self.host) {
                self.admission.warn(self.host);
                return None;
            }
            let newest = first(all.iter().rev(), &busiest)?;
            self.admission.warn(all[&newest].host);
            all.remove(&newest);
        }
        let ended = add(&mut all, self.number, self.host);
        drop(all);
        Some(Authenticated { admission: self.admission.clone(), number: self.number, ended })
    }
}

impl Drop for Unauthenticated {
    fn drop(&mut self) {
        self.admission.unauthenticated.lock().remove(&self.number);
    }
}

impl Authenticated {
    /// Serves the connection until it must make room for others.
    pub(crate) async fn serve(
        mut self,
        connection: impl Future<Output = io::Result<()>>,
    ) -> io::Result<()> {
        tokio::select! {
            served = connection => served,
            _ = &mut self.ended => {
                Err(io::Error::other("too many connections, and most are from its host"))
            }
        }
    }
}

impl Drop for Authenticated {
    fn drop(&mut self) {
        self.admission.authenticated.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use proptest::collection::vec;
    use proptest::prelude::{prop_assert, proptest};
    use tokio::sync::oneshot::error::TryRecvError;

    use tracing::Level;

    use super::{
        Admission, Authenticated, FEWEST_CONNECTIONS, Unauthenticated, host, limit_level, within,
    };

    fn address(host: u8) -> IpAddr {
        [10, 0, 0, host].into()
    }

    fn admit(admission: &Arc<Admission>, host: u8) -> Unauthenticated {
        admission.admit(address(host))
    }

    fn is_open(connection: &mut Unauthenticated) -> bool {
        connection.ended.try_recv() == Err(TryRecvError::Empty)
    }

    fn is_served(connection: &mut Authenticated) -> bool {
        connection.ended.try_recv() == Err(TryRecvError::Empty)
    }

    #[test]
    fn only_a_limit_to_few_connections_is_a_warning() {
        assert_eq!(limit_level(32_768, 32_768), None);
        assert_eq!(limit_level(19_680, 32_768), Some(Level::INFO));
        assert_eq!(limit_level(1024, 32_768), Some(Level::INFO));
        assert_eq!(limit_level(1023, 32_768), Some(Level::WARN));
    }

    #[test]
    fn the_oldest_unauthenticated_connection_of_the_busiest_host_ends() {
        let admission = Admission::with_limits(4, 4);
        let mut honest = admit(&admission, 1);
        let mut flood: Vec<_> = (0..100).map(|_| admit(&admission, 2)).collect();
        assert!(is_open(&mut honest), "one host's connections do not end another's");
        let open: Vec<_> = flood.iter_mut().map(is_open).collect();
        assert!(open[..97].iter().all(|open| !open) && open[97..].iter().all(|open| *open));
        let mut others: Vec<_> = (3..5).map(|host| admit(&admission, host)).collect();
        assert!(is_open(&mut honest) && others.iter_mut().all(is_open), "each host has one");
        let mut last = admit(&admission, 9);
        assert!(!is_open(&mut honest), "among equals the oldest ends");
        assert!(is_open(&mut last));
        drop(others);
        assert!((10..13).map(|host| admit(&admission, host)).all(|mut one| is_open(&mut one)));
    }

    #[test]
    fn an_authenticated_host_keeps_its_place_while_another_has_more() {
        let admission = Admission::with_limits(4, 4);
        let served = |host| admit(&admission, host).authenticate();
        let mut old = served(1).unwrap();
        let mut greedy: Vec<_> = (0..3).map(|_| served(2).unwrap()).collect();
        assert!(served(2).is_none(), "the busiest host gets no more");
        let mut new = served(3).unwrap();
        assert!(is_served(&mut old) && is_served(&mut new));
        let kept: Vec<_> = greedy.iter_mut().map(is_served).collect();
        assert_eq!(kept, [true, true, false], "the newest of the busiest host ended");
        assert!(served(1).is_none(), "a host does not displace a host that has as many");
        let flood: Vec<_> = (0..100).map(|_| admit(&admission, 4)).collect();
        assert!(is_served(&mut old) && is_served(&mut new), "strangers end no served connection");
        drop((flood, greedy));
        assert!(served(1).is_some(), "a place is free again");
    }

    #[test]
    fn hosts_are_told_apart_by_what_they_cannot_choose() {
        let of = |text: &str| host(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }

    #[test]
    fn connections_leave_files_for_the_rest_of_the_process() {
        assert_eq!(within(4096, u64::MAX), 4096);
        assert_eq!(within(4096, 1024), 1024 - 256 - 64);
        assert_eq!(within(4096, 10), FEWEST_CONNECTIONS);
        assert_eq!(within(8, 10), 8);
    }

    proptest! {
        /// Whatever comes and goes: the limits hold, and a connection that was just accepted is
        /// open.
        #[test]
        fn the_limits_hold_and_the_newest_stranger_is_open(
            steps in vec((0u8..4, 0u8..3, 0usize..100), 1..200),
        ) {
            let admission = Admission::with_limits(3, 5);
            let (mut strangers, mut clients) = (Vec::new(), Vec::new());
            for (host, what, which) in steps {
                match what {
                    0 => {
                        let mut one = admit(&admission, host);
                        prop_assert!(is_open(&mut one));
                        strangers.push(one);
                    }
                    1 if !strangers.is_empty() => {
                        let one: Unauthenticated = strangers.swap_remove(which % strangers.len());
                        clients.extend(one.authenticate());
                    }
                    2 if !clients.is_empty() => drop(clients.swap_remove(which % clients.len())),
                    _ => {}
                }
                prop_assert!(strangers.iter_mut().map(is_open).filter(|open| *open).count() <= 3);
                prop_assert!(clients.iter_mut().map(is_served).filter(|one| *one).count() <= 5);
                prop_assert!(admission.unauthenticated.lock().len() <= 3);
                prop_assert!(admission.authenticated.lock().len() <= 5);
            }
        }
    }
}
