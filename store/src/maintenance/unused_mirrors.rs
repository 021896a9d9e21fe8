//! Forgets the mirrors that no process has used for a long time, such as those of hosts that are gone.
//!
//! A process that serves a mirror notes once an hour that it uses it, so `seen` in the mirror's document
//! is at most an hour too early while the catalog can be reached. The clocks of two hosts are compared.
//! So a mirror stays whose time lies in the future, and one whose writer has a live lease.

use crate::catalog::{MirrorUse, UnusedRule};
use crate::clock::now;
use crate::error::Result;
use crate::repository::Repository;
use crate::snapshot::MirrorRecord;

/// The least time without use, in seconds: twice the interval in which a use is noted.
pub const LEAST_UNUSED_SECONDS: u64 = 7200;

/// Which mirrors are forgotten.
#[derive(Clone, Copy, Debug)]
pub struct ForgetOptions {
    /// Seconds for which no process has used them, at least [`LEAST_UNUSED_SECONDS`].
    pub unseen: u64,
    /// Seconds since 1970, UTC.
    pub now: u64,
    /// Whether nothing is changed.
    pub is_dry_run: bool,
}

impl ForgetOptions {
    /// Forgets the mirrors that no process has used for `unseen` seconds.
    pub fn new(unseen: u64) -> ForgetOptions {
        ForgetOptions { unseen, now: now(), is_dry_run: false }
    }
}

/// Forgets the unused mirrors. Passes every mirror to `each`, with whether it is in use. Those that
/// are unused are gone then, unless it is a dry run.
pub fn forget_unused(
    repository: &Repository,
    options: &ForgetOptions,
    each: &mut dyn FnMut(&MirrorRecord, MirrorUse) -> Result<()>,
) -> Result<()> {
    let least = options.unseen.max(LEAST_UNUSED_SECONDS);
    let rule = UnusedRule { least, now: options.now };
    for mirror in repository.catalog().mirrors()? {
        let judged = match rule.judge(&mirror) {
            MirrorUse::Unused(ago) if !options.is_dry_run => {
                match repository.forget_unused_mirror(&mirror.id, &rule)? {
                    None => MirrorUse::Unused(ago),
                    // It was attached since it was listed.
                    Some(used) => used,
                }
            }
            judged => judged,
        };
        each(&mirror, judged)?;
    }
    Ok(())
}
