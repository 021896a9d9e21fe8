//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Compares Cairn with other programs.
///
/// Prints tables, and writes them with charts as JSON, Markdown and SVG to the directory of
/// results.
#[derive(Debug, Parser)]
#[command(name = "cairn-bench", version, max_term_width = 100)]
pub(crate) struct Args {
    /// What to measure.
    #[arg(value_enum)]
    pub(crate) case: Case,

    /// Fewer rounds, shorter measurements, less data: to test the benchmark, not for results.
    #[arg(long)]
    pub(crate) quick: bool,

    /// Rounds over all contenders [default: 3, or 2 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: Option<u32>,

    /// The directory for the results.
    #[arg(long, value_name = "DIR", default_value = "bench/results")]
    pub(crate) out: PathBuf,

    /// The directory for the disks under test, whose file system is measured [default: next to the
    /// programs].
    #[arg(long, value_name = "DIR")]
    pub(crate) scratch: Option<PathBuf>,

    /// Measure only workloads of `disk` and contenders of `checkpoint` or `redundancy` with this
    /// text in their names. Goals that need another contender are omitted.
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Vec<String>,

    /// An additional argument for each cairn-blk.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub(crate) blk_arg: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// Guest I/O without a checkpoint, compared with a raw file and qemu-storage-daemon.
    Disk,
    /// Guest writes during a checkpoint, compared with QEMU's incremental backup and other
    /// strategies.
    Checkpoint,
    /// The cost of a checkpoint for images of different sizes.
    Cost,
    /// Storing data on peers with replicas and with Reed-Solomon codes, compared with a copy over
    /// TCP.
    Redundancy,
    /// Eight clients that store data on peers at the same time, compared with one.
    Clients,
    /// Rebuilding the fragments of a lost peer over a limited link.
    Rebuild,
    /// Exporting a snapshot over a limited link, and to the local disk, compared with a plain writer.
    Export,
    /// A catalog of a million snapshots, compared with one of a thousand.
    Scale,
    /// A disk image and a second version of it in a repository, compared with restic and borg.
    Backup,
    /// Collections: marking, commits beside them, and space.
    Gc,
    /// `cairn verify` of a repository in a directory, compared with reading and hashing the same bytes.
    Verify,
    /// All cases.
    All,
}

impl Case {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Case::Disk => "disk",
            Case::Checkpoint => "checkpoint",
            Case::Cost => "cost",
            Case::Redundancy => "redundancy",
            Case::Clients => "clients",
            Case::Rebuild => "rebuild",
            Case::Export => "export",
            Case::Scale => "scale",
            Case::Backup => "backup",
            Case::Gc => "gc",
            Case::Verify => "verify",
            Case::All => "all",
        }
    }

    pub(crate) fn each(&self) -> &[Case] {
        match self {
            Case::All => &[
                Case::Disk,
                Case::Checkpoint,
                Case::Cost,
                Case::Redundancy,
                Case::Clients,
                Case::Rebuild,
                Case::Export,
                Case::Scale,
                Case::Backup,
                Case::Gc,
                Case::Verify,
            ],
            one => std::slice::from_ref(one),
        }
    }
}

impl Args {
    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 2 } else { 3 })
    }

    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Args;

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }
}
