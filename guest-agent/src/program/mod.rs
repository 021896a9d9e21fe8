//! The program `cairn-agent`, which takes checkpoints of a guest's disks from inside the guest.
//!
//! ```text
//! args ──► checkpoint ──► connection ── vsock ──► cairn-blk on the host
//!              │
//!              ├──► freeze ──► watchdog    thaws when this process cannot
//!              └──► report ──► stdout      only after the thaw
//! ```

use std::process::ExitCode;

use crate::{Event, Obsolete, Request};
use clap::{CommandFactory, Parser};

use args::{Arguments, Command, Query};
use connection::{Connection, Deadline};
use error::Error;

mod args;
mod checkpoint;
mod connection;
mod endpoint;
mod error;
mod freeze;
mod report;
mod sys;
mod watchdog;

/// The command line, for the manual pages and the completions.
pub fn command_line() -> clap::Command {
    Arguments::command()
}

/// Runs the program with the arguments of this process. Returns its exit code.
pub fn run() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Checkpoint(options) => checkpoint::run(&options),
        Command::Status(query) => ask(&query, &Request::Status),
        Command::List(query) => ask(&query, &Request::List),
        Command::Obsolete(options) => {
            let request = Obsolete { number: Some(options.number), keep_last: None };
            ask(&options.query, &Request::Obsolete(request))
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cairn-agent: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Sends one request to each disk in turn and prints the answers.
fn ask(query: &Query, request: &Request) -> Result<(), Error> {
    for endpoint in query.disks.endpoints() {
        let deadline = Deadline::after(query.disks.timeout());
        let mut connection = Connection::open(endpoint)?;
        connection.send(request, deadline)?;
        match connection.receive(Some(deadline))? {
            Event::Status(status) => report::status(&status, query.json)?,
            Event::Snapshots(list) => report::snapshots(&list, query.json)?,
            Event::Marked(marked) => report::marked(&marked, query.json)?,
            other => return Err(connection.unexpected(other)),
        }
    }
    Ok(())
}
