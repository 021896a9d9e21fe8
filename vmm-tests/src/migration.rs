//! Migration of a running guest from one QEMU to another on this host.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use crate::guest::Guest;
use crate::lab::Lab;

const LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Bytes that are sent in a second. It is less than a busy guest changes in a second.
const BANDWIDTH: u64 = 20 << 20;
/// A limit for the pause of the guest that is so short that a busy guest does not move, in
/// milliseconds.
const DOWNTIME_TO_STAY_MS: u64 = 1;
/// A limit for the pause of the guest that is so long that every guest moves, in milliseconds.
const DOWNTIME_TO_MOVE_MS: u64 = 20_000;

/// A migration in progress. QEMU sends the guest's memory repeatedly, because the guest runs and
/// changes it.
#[derive(Debug)]
pub struct Migration {
    source: Guest,
    target: Guest,
}

impl Migration {
    /// Starts another QEMU, `name`, with the same disks, and starts sending the guest's memory to
    /// it.
    ///
    /// A guest that keeps changing its memory does not move before [`Migration::finish`].
    pub fn begin(lab: &Lab, mut source: Guest, name: &str, disks: &[&Path]) -> Result<Migration> {
        let channel = lab.path(&format!("{name}.incoming"));
        let target = Guest::start_incoming(lab, name, disks, &channel)?;
        let uri = format!("unix:{}", channel.display());
        let monitor = source.monitor();
        let parameters =
            json!({ "max-bandwidth": BANDWIDTH, "downtime-limit": DOWNTIME_TO_STAY_MS });
        monitor.execute("migrate-set-parameters", parameters)?;
        monitor.execute("migrate", json!({ "uri": uri }))?;
        Ok(Migration { source, target })
    }

    /// How many times all changed pages were sent.
    pub fn passes(&mut self) -> Result<u64> {
        // QEMU collects the changes once before each pass.
        let begun = self.progress()?["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
        Ok(begun.saturating_sub(1))
    }

    /// Lets the guest move, stops the source QEMU, and returns the guest in the target.
    pub fn finish(mut self) -> Result<Guest> {
        let end = Instant::now() + LIMIT;
        let parameters = json!({ "downtime-limit": DOWNTIME_TO_MOVE_MS });
        self.source.monitor().execute("migrate-set-parameters", parameters)?;
        loop {
            let progress = self.progress()?;
            if progress["status"] == "completed" {
                break;
            }
            ensure!(Instant::now() < end, "the guest has not moved within {LIMIT:?}: {progress}");
            thread::sleep(POLL_INTERVAL);
        }
        self.source.quit()?;
        while self.target.monitor().execute("query-status", json!({}))?["running"] != true {
            ensure!(Instant::now() < end, "the guest has moved but does not run");
            thread::sleep(POLL_INTERVAL);
        }
        Ok(self.target)
    }

    /// The progress that QEMU reports. Fails if the migration has failed.
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
