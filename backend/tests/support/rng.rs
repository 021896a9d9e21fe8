//! Repeating a random run: its seed, and how a failure reports it.

use std::env;

/// Prints how to repeat a run when the test that holds it panics.
pub(crate) struct Repeat(pub(crate) u64);

impl Drop for Repeat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("repeat this run with CAIRN_SEED={}", self.0);
        }
    }
}

/// The number in the environment variable `name`, if it is set.
pub(crate) fn number_from_env(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}
