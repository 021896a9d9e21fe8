//! The failure of a command: what it was doing, why it failed, and the exit code for scripts.

use std::fmt;
use std::io;
use std::process::ExitCode;

use cairn_store::ErrorKind;
use serde_json::json;

/// The exit codes that `cairn --help` documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Failure = 1,
    Usage = 2,
    NotFound = 3,
    Conflict = 4,
    Corrupt = 5,
    Unavailable = 6,
}

impl Exit {
    fn word(self) -> &'static str {
        match self {
            Exit::Failure => "failure",
            Exit::Usage => "usage",
            Exit::NotFound => "notfound",
            Exit::Conflict => "conflict",
            Exit::Corrupt => "corrupt",
            Exit::Unavailable => "unavailable",
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// The failure of a command.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    doing: String,
    why: String,
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(exit: Exit, doing: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { exit, doing: doing.into(), why: why.to_string() }
    }

    /// The failure with one more sentence.
    pub(crate) fn and(self, more: impl fmt::Display) -> Self {
        Self { why: format!("{}; {more}", self.why), ..self }
    }

    /// Prints the failure on standard error.
    pub(crate) fn report(&self, json: bool) {
        if json {
            let error =
                json!({ "kind": self.exit.word(), "doing": self.doing, "message": self.why });
            eprintln!("{}", json!({ "error": error }));
        } else {
            eprintln!("cairn: {}: {}", self.doing, self.why);
        }
    }
}

/// Adds what was being done to an error.
pub(crate) trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Outcome<T>;
}

impl<T> Doing<T> for cairn_store::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Outcome<T> {
        self.map_err(|error| {
            let exit = match error.kind() {
                // Trying again does not help.
                _ if error.is_not_writable() => Exit::Failure,
                ErrorKind::Invalid => Exit::Usage,
                ErrorKind::NotFound => Exit::NotFound,
                ErrorKind::Conflict => Exit::Conflict,
                ErrorKind::Corrupt => Exit::Corrupt,
                ErrorKind::Unavailable => Exit::Unavailable,
            };
            Failure::new(exit, what(), error)
        })
    }
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Outcome<T> {
        self.map_err(|error| {
            let exit = match error.kind() {
                io::ErrorKind::NotFound => Exit::NotFound,
                io::ErrorKind::AlreadyExists => Exit::Conflict,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Exit::Unavailable,
                _ => Exit::Failure,
            };
            Failure::new(exit, what(), error)
        })
    }
}
