//! The checkpoint: connect, flush, freeze, request, thaw. Only then does the agent print anything.

use std::thread;
use std::time::{Duration, Instant};

use crate::{Accepted, Checkpoint, Event, Follow, Obsolete, Request, Stable, Wait};

use crate::program::args::CheckpointOptions;
use crate::program::connection::{Connection, Deadline};
use crate::program::endpoint::Endpoint;
use crate::program::error::Error;
use crate::program::freeze::Freezer;
use crate::program::{report, sys};

pub(crate) fn run(options: &CheckpointOptions) -> Result<(), Error> {
    // Nothing older is given up before the new snapshot is safe.
    let wait = options.keep_last.map_or(Wait::from(options.wait), |_| Wait::Stable);
    let request = Request::Checkpoint(Checkpoint {
        label: options.label.clone(),
        consistency: options.consistency(),
        wait,
        metadata: options.set_meta.iter().cloned().collect(),
    });
    let limit = options.disks.timeout();

    // This forks the watchdog, before there are connections that it would keep open.
    let mut freezer = Freezer::prepare(&options.freeze, limit)?;
    // Connecting before the freeze detects an unreachable host while nothing is frozen.
    let endpoints = options.disks.endpoints();
    let mut connections =
        endpoints.into_iter().map(Connection::open).collect::<Result<Vec<_>, _>>()?;
    if options.sync || options.freeze.is_empty() {
        sys::sync_all();
    }
    freezer.flush()?;

    let deadline = Deadline::after(limit);
    let begin = Instant::now();
    freezer.freeze()?;
    let answers = request_all(&mut connections, &request, deadline);
    let thawed = freezer.thaw();
    let frozen = (!options.freeze.is_empty()).then(|| begin.elapsed());

    let take = |(connection, answer): (&mut Connection, Result<Accepted, Error>)| {
        let accepted = answer?;
        let stable = match wait {
            Wait::Accepted => None,
            Wait::Stable => Some(await_stable(connection, &accepted)?),
        };
        let disk = connection.endpoint().to_string();
        let frozen_us = frozen.map(|time| time.as_micros() as u64);
        Ok(report::Taken { disk, frozen_us, accepted, stable, obsolete: None })
    };
    let all: Vec<Result<report::Taken, Error>> =
        connections.iter_mut().zip(answers).map(take).collect();
    // Only together are the snapshots of all disks as good as the older ones.
    let is_complete = thawed.is_ok() && all.iter().all(Result::is_ok);
    let keep_last = options.keep_last.filter(|_| is_complete);

    let mut errors = FirstError::default();
    for (connection, taken) in connections.iter_mut().zip(all) {
        let outcome = taken.and_then(|mut taken| {
            let marked = keep_last.map(|keep| mark_older(connection, keep, limit));
            let failed = match marked.transpose() {
                Ok(obsolete) => {
                    taken.obsolete = obsolete;
                    None
                }
                Err(error) => Some(error),
            };
            // The checkpoint is there, whatever became of the older ones.
            report::checkpoint(&taken, options.json)?;
            failed.map_or(Ok(()), Err)
        });
        errors.note(outcome);
    }
    errors.note(thawed);
    errors.into_result()
}

/// Sends `request` to all disks, then receives one answer from each.
///
/// All requests are sent before the first answer is read. So the disks take their checkpoints in
/// parallel, and the freeze lasts only as long as the slowest one.
fn request_all(
    connections: &mut [Connection],
    request: &Request,
    deadline: Deadline,
) -> Vec<Result<Accepted, Error>> {
    let asked: Vec<_> = connections.iter_mut().map(|c| c.send(request, deadline)).collect();
    let answer = |(connection, asked): (&mut Connection, Result<(), Error>)| {
        asked?;
        match connection.receive(Some(deadline))? {
            Event::Accepted(accepted) => Ok(accepted),
            other => Err(connection.unexpected(other)),
        }
    };
    connections.iter_mut().zip(asked).map(answer).collect()
}

/// Marks all but the last `keep_last` snapshots that were taken from inside the guest as obsolete.
/// Returns their names. The host may have ended a connection that has waited for other disks.
fn mark_older(
    connection: &mut Connection,
    keep_last: u64,
    limit: Duration,
) -> Result<Vec<String>, Error> {
    match ask_to_mark_older(connection, keep_last, limit) {
        Err(Error::Closed(_) | Error::Transport { .. }) => {
            *connection = Connection::open(connection.endpoint().clone())?;
            ask_to_mark_older(connection, keep_last, limit)
        }
        marked => marked,
    }
}

fn ask_to_mark_older(
    connection: &mut Connection,
    keep_last: u64,
    limit: Duration,
) -> Result<Vec<String>, Error> {
    let request = Obsolete { keep_last: Some(keep_last), number: None };
    let deadline = Deadline::after(limit);
    connection.send(&Request::Obsolete(request), deadline)?;
    match connection.receive(Some(deadline))? {
        Event::Marked(marked) => Ok(marked.snapshots),
        other => Err(connection.unexpected(other)),
    }
}

/// How long a process that has ended may take to be replaced.
const RESTART_LIMIT: Duration = Duration::from_secs(60);

/// The pause between two attempts to connect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// Waits until the snapshot is stable. There is no time limit, because the guest does not wait for
/// it. If the connection ends, the function follows the checkpoint on a new connection: the next
/// process continues to store it.
fn await_stable(connection: &mut Connection, accepted: &Accepted) -> Result<Stable, Error> {
    let mut deadline = Instant::now() + RESTART_LIMIT;
    loop {
        let begin = Instant::now();
        let error = match connection.receive(None) {
            Ok(Event::Stable(stable)) if stable.snapshot == accepted.snapshot => return Ok(stable),
            Ok(other) => return Err(connection.unexpected(other)),
            Err(error @ (Error::Closed(_) | Error::Transport { .. })) => error,
            Err(error) => return Err(error),
        };
        // A hypervisor may accept a connection although no process serves the disk. Such a
        // connection ends at once and does not extend the deadline.
        if begin.elapsed() > 10 * RECONNECT_INTERVAL {
            deadline = Instant::now() + RESTART_LIMIT;
        }
        *connection =
            follow(connection.endpoint(), accepted.number, deadline).map_err(|_| error)?;
    }
}

/// Connects to the next process and asks it to follow the checkpoint.
fn follow(endpoint: &Endpoint, number: u64, deadline: Instant) -> Result<Connection, Error> {
    loop {
        thread::sleep(RECONNECT_INTERVAL);
        let asked = Connection::open(endpoint.clone()).and_then(|mut next| {
            next.send(&Request::Follow(Follow { number }), Deadline::after(RESTART_LIMIT))?;
            Ok(next)
        });
        if asked.is_ok() && Instant::now() < deadline {
            return asked;
        }
        if Instant::now() >= deadline {
            return asked.and(Err(Error::Closed(endpoint.clone())));
        }
    }
}

/// The first of several errors. It determines the exit code; the others are printed when they
/// occur.
#[derive(Default)]
struct FirstError(Option<Error>);

impl FirstError {
    fn note(&mut self, outcome: Result<(), Error>) {
        match (outcome, &self.0) {
            (Ok(()), _) => {}
            (Err(error), None) => self.0 = Some(error),
            (Err(error), Some(_)) => eprintln!("cairn-agent: {error}"),
        }
    }

    fn into_result(self) -> Result<(), Error> {
        self.0.map_or(Ok(()), Err)
    }
}
