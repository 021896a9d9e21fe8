//! The checkpoint: connect, flush, freeze, ask, thaw, and only then talk about it.

use std::thread;
use std::time::{Duration, Instant};

use cairn_agent::{Accepted, Checkpoint, Event, Follow, Request, Stable, Wait};

use crate::args::CheckpointOptions;
use crate::connection::{Connection, Deadline};
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::freeze::Freezer;
use crate::{report, sys};

pub(crate) fn run(options: &CheckpointOptions) -> Result<(), Error> {
    let wait = Wait::from(options.wait);
    let request = Request::Checkpoint(Checkpoint {
        label: options.label.clone(),
        consistency: options.consistency(),
        wait,
    });
    let limit = options.disks.timeout();

    // The watchdog is forked in here, before there are connections that it would keep open.
    let mut freezer = Freezer::prepare(&options.freeze, limit)?;
    // A host that cannot be reached is found out while nothing is frozen.
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
    let answers = cut(&mut connections, &request, deadline);
    let thawed = freezer.thaw();
    let frozen = (!options.freeze.is_empty()).then(|| begin.elapsed());

    let mut trouble = Trouble::default();
    for (connection, answer) in connections.iter_mut().zip(answers) {
        let outcome = answer.and_then(|accepted| {
            let stable = match wait {
                Wait::Accepted => None,
                Wait::Stable => Some(await_stable(connection, &accepted)?),
            };
            let taken = report::Taken {
                disk: connection.endpoint().to_string(),
                frozen_us: frozen.map(|time| time.as_micros() as u64),
                accepted,
                stable,
            };
            Ok(report::checkpoint(&taken, options.json)?)
        });
        trouble.note(outcome);
    }
    trouble.note(thawed);
    trouble.into_result()
}

/// Asks all disks, then collects what each one says: as many answers as connections.
///
/// Everyone is asked before anyone is listened to, so that the cuts are made side by side and the
/// freeze lasts as long as the slowest of them.
fn cut(
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

/// How long a process that has gone may take to come back.
const RETURN: Duration = Duration::from_secs(60);

/// How long to wait before a connection is tried again.
const RECONNECT: Duration = Duration::from_millis(100);

/// Takes as long as the repository does: nothing of the guest waits for it. The checkpoint is followed over
/// the end of the connection, since the next process goes on with it.
fn await_stable(connection: &mut Connection, accepted: &Accepted) -> Result<Stable, Error> {
    let mut deadline = Instant::now() + RETURN;
    loop {
        let begin = Instant::now();
        let error = match connection.receive(None) {
            Ok(Event::Stable(stable)) if stable.snapshot == accepted.snapshot => return Ok(stable),
            Ok(other) => return Err(connection.unexpected(other)),
            Err(error @ (Error::Closed(_) | Error::Transport { .. })) => error,
            Err(error) => return Err(error),
        };
        // A hypervisor may take a connection for a process that is not there.
        if begin.elapsed() > 10 * RECONNECT {
            deadline = Instant::now() + RETURN;
        }
        *connection =
            follow(connection.endpoint(), accepted.number, deadline).map_err(|_| error)?;
    }
}

/// Asks the next process what becomes of a checkpoint.
fn follow(endpoint: &Endpoint, number: u64, deadline: Instant) -> Result<Connection, Error> {
    loop {
        thread::sleep(RECONNECT);
        let asked = Connection::open(endpoint.clone()).and_then(|mut next| {
            next.send(&Request::Follow(Follow { number }), Deadline::after(RETURN))?;
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

/// The first error decides the exit code; the others are printed where they occur.
#[derive(Default)]
struct Trouble(Option<Error>);

impl Trouble {
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
