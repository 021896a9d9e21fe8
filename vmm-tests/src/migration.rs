//! A running guest that moves from one QEMU to another on this host.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use crate::guest::Guest;
use crate::lab::Lab;

const LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Bytes that are sent in a second: so few that a busy guest changes more.
const BANDWIDTH: u64 = 20 << 20;
/// How long the guest may stand still, in milliseconds: so short that a busy guest stays where it is.
const STAY: u64 = 1;
/// As above, but so long that any guest moves.
const MOVE: u64 = 20_000;

/// A guest on its way. Its memory is sent again and again while it runs and changes it.
#[derive(Debug)]
pub struct Migration {
    source: Guest,
    target: Guest,
}

impl Migration {
    /// Starts another QEMU, `name`, on the same disks, and begins to send it the guest's memory.
    ///
    /// A guest that keeps changing its memory stays where it is until [`Migration::finish`].
    pub fn begin(lab: &Lab, mut source: Guest, name: &str, disks: &[&Path]) -> Result<Migration> {
        let channel = lab.path(&format!("{name}.incoming"));
        let target = Guest::expect(lab, name, disks, &channel)?;
        let uri = format!("unix:{}", channel.display());
        let monitor = source.monitor();
        let parameters = json!({ "max-bandwidth": BANDWIDTH, "downtime-limit": STAY });
        monitor.execute("migrate-set-parameters", parameters)?;
        monitor.execute("migrate", json!({ "uri": uri }))?;
        Ok(Migration { source, target })
    }

    /// How many times all pages that had changed were sent.
    pub fn passes(&mut self) -> Result<u64> {
        // The changes are collected once before each pass.
        let begun = self.progress()?["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
        Ok(begun.saturating_sub(1))
    }

    /// Lets the guest move, ends the QEMU that it came from, and returns it in the other one.
    pub fn finish(mut self) -> Result<Guest> {
        let end = Instant::now() + LIMIT;
        let parameters = json!({ "downtime-limit": MOVE });
        self.source.monitor().execute("migrate-set-parameters", parameters)?;
        loop {
            let progress = self.progress()?;
            if progress["status"] == "completed" {
                break;
            }
            ensure!(Instant::now() < end, "the guest has not moved in {LIMIT:?}: {progress}");
            thread::sleep(POLL);
        }
        self.source.quit()?;
        while self.target.monitor().execute("query-status", json!({}))?["running"] != true {
            ensure!(Instant::now() < end, "the guest has moved but does not run");
            thread::sleep(POLL);
        }
        Ok(self.target)
    }

    /// What QEMU says, unless it says that the migration has failed.
    fn progress(&mut self) -> Result<Value> {
        let progress = self.source.monitor().execute("query-migrate", json!({}))?;
        match progress["status"].as_str() {
            Some("failed" | "cancelling" | "cancelled") | None => bail!(
                "the migration failed: {progress}\nfrom: {}\nto: {}",
                self.source.log_tail(),
                self.target.log_tail()
            ),
            _ => Ok(progress),
        }
    }
}
