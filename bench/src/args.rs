//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Measures Cairn beside other programs, in one run.
///
/// Prints tables, and writes them as JSON and Markdown, with charts, into the directory of results.
#[derive(Debug, Parser)]
#[command(name = "cairn-bench", version, max_term_width = 100)]
pub(crate) struct Args {
    /// What to measure.
    #[arg(value_enum)]
    pub(crate) case: Case,

    /// Fewer rounds, shorter measurements, less data: to see whether it works, not for figures.
    #[arg(long)]
    pub(crate) quick: bool,

    /// Rounds over all contenders [default: 3, or 2 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: Option<u32>,

    /// Where the results go.
    #[arg(long, value_name = "DIR", default_value = "bench/results")]
    pub(crate) out: PathBuf,

    /// Where the disks under test are; its file system is what is measured [default: next to the
    /// programs].
    #[arg(long, value_name = "DIR")]
    pub(crate) scratch: Option<PathBuf>,

    /// Only measure what has this in its name: a workload of `disk`, a contender of `checkpoint` or
    /// `redundancy`. For work on one figure; goals that lack a contender are left out.
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Vec<String>,

    /// Another argument for each cairn-blk.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub(crate) blk_arg: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// Guest I/O without a checkpoint, beside a raw file and qemu-storage-daemon.
    Disk,
    /// Guest writes while a checkpoint is taken, beside QEMU's incremental backup and other strategies.
    Checkpoint,
    /// A checkpoint's price for images of different sizes.
    Cost,
    /// Persisting to peers with copies and with Reed-Solomon codes, beside a copy over TCP.
    Redundancy,
    /// Eight clients that persist to peers at once, beside one.
    Clients,
    /// Making again what a lost peer held, over a limited link.
    Rebuild,
    /// All of them.
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
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }
}
