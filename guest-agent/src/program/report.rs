//! The output of the agent: names and tables for people, one JSON object a line for programs.

use std::io::{self, Write};

use crate::{Accepted, Marked, Snapshots, Stable, Status};
use serde::Serialize;

/// A checkpoint of one disk, as `--json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Taken {
    /// The endpoint of the disk.
    pub(crate) disk: String,
    /// From the first freeze to the last thaw, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) frozen_us: Option<u64>,
    pub(crate) accepted: Accepted,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stable: Option<Stable>,
    /// The snapshots that were marked as obsolete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) obsolete: Option<Vec<String>>,
}

pub(crate) fn checkpoint(taken: &Taken, json: bool) -> io::Result<()> {
    if json { print_json(taken) } else { print(&taken.accepted.snapshot) }
}

pub(crate) fn status(status: &Status, json: bool) -> io::Result<()> {
    if json {
        return print_json(status);
    }
    let mut lines = vec![
        format!("image     {} (from {})", status.image, status.parent),
        format!("size      {} bytes, chunks of {}", status.size, status.chunk_size),
        format!("local     {} bytes", status.present_bytes),
        format!("changed   {} bytes since the last checkpoint", status.dirty_bytes),
    ];
    if status.read_only {
        lines.push("access    read-only".to_owned());
    }
    for commit in &status.pending {
        lines.push(format!(
            "pending   {}: {} of {} chunks stored",
            commit.snapshot, commit.done, commit.chunks
        ));
    }
    if let Some(failed) = &status.last_failed {
        lines.push(format!("failed    {}: {}", failed.snapshot, failed.reason));
    }
    if let Some(error) = &status.checkpoint_error {
        lines.push(format!("error     {error}"));
    }
    print(&lines.join("\n"))
}

pub(crate) fn snapshots(list: &Snapshots, json: bool) -> io::Result<()> {
    if json {
        return print_json(list);
    }
    if list.omitted > 0 {
        print(&format!("({} older snapshots left out)", list.omitted))?;
    }
    for line in &list.snapshots {
        let label = line.label.as_deref().unwrap_or("-");
        print(&format!("{}\t{}\t{}\t{label}", line.snapshot, utc(line.time), line.state))?;
    }
    Ok(())
}

pub(crate) fn marked(marked: &Marked, json: bool) -> io::Result<()> {
    if json {
        return print_json(marked);
    }
    marked.snapshots.iter().try_for_each(|name| print(&format!("{name} is marked as obsolete")))
}

fn print_json(value: &impl Serialize) -> io::Result<()> {
    print(&serde_json::to_string(value)?)
}

fn print(text: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}

/// `seconds` since 1970 as `YYYY-MM-DDThh:mm:ssZ`.
///
/// The calendar is divided into eras of 400 years that begin on 1 March, so that the leap day is
/// the last day of its year.
fn utc(seconds: u64) -> String {
    const DAYS_FROM_MARCH_OF_YEAR_0: u64 = 719_468;
    const DAYS_PER_ERA: u64 = 146_097;
    let days = seconds / 86_400 + DAYS_FROM_MARCH_OF_YEAR_0;
    let (era, day) = (days / DAYS_PER_ERA, days % DAYS_PER_ERA);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + carry;
    let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn times_are_written_as_utc() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(utc(1_767_225_600), "2026-01-01T00:00:00Z");
    }
}
