//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use crate::{Consistency, DEFAULT_PORT, Wait, is_valid_label};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::program::endpoint::Endpoint;

/// Takes checkpoints of this guest's disks from inside the guest.
#[derive(Debug, Parser)]
#[command(name = "cairn-agent", version, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed
  2  wrong usage
  4  busy, or the label is in use
  6  the host cannot be reached or does not answer in time";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Take a checkpoint and print its name, image@N, one line for each disk
    #[command(
        after_help = "Examples:\n  cairn-agent checkpoint --freeze / --label before-upgrade --wait stable\n  \
                            cairn-agent checkpoint --application --set-meta step=40 --keep-last 2\n  \
                            cairn-agent checkpoint --port 7400 --port 7401"
    )]
    Checkpoint(CheckpointOptions),
    /// Show the properties and the state of the disk
    #[command(after_help = "Example:\n  cairn-agent status --json")]
    Status(Query),
    /// List the snapshots of the disk's image, oldest first
    #[command(after_help = "Example:\n  cairn-agent list")]
    List(Query),
    /// Tell the host that a snapshot of the disk, taken from inside the guest, is not needed any more
    #[command(after_help = "The host removes it at its next prune, unless it is pinned, its last \
                            stable snapshot, or kept by the host's policy. The host must run \
                            cairn-blk with --guest-may-remove.\n\n\
                            Example:\n  cairn-agent obsolete 3")]
    Obsolete(ObsoleteOptions),
}

#[derive(Debug, Args)]
pub(crate) struct CheckpointOptions {
    /// Freeze the file system at MOUNT until the checkpoint is accepted; repeatable, frozen in this
    /// order
    #[arg(long, value_name = "MOUNT")]
    pub(crate) freeze: Vec<PathBuf>,

    /// Flush every file system first, not only the frozen ones (the default without --freeze)
    #[arg(long)]
    pub(crate) sync: bool,

    /// Record that the application has written its whole state and writes nothing more
    #[arg(long)]
    pub(crate) application: bool,

    /// A second name for the snapshot, unique in its image
    #[arg(long, value_parser = label)]
    pub(crate) label: Option<String>,

    /// A value that is kept with the snapshot; repeatable
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) set_meta: Vec<(String, String)>,

    /// Once the snapshot is stable, tell the host that all but the last N snapshots taken from inside
    /// the guest are not needed any more. Implies --wait stable
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) keep_last: Option<u64>,

    /// When to return: when the checkpoint is accepted, or when the snapshot is durable in the
    /// repository, however long that takes
    #[arg(long, value_enum, default_value = "accepted")]
    pub(crate) wait: Until,

    #[command(flatten)]
    pub(crate) disks: Disks,

    /// Print one JSON object for each disk
    #[arg(long)]
    pub(crate) json: bool,
}

impl CheckpointOptions {
    /// The consistency that the options justify.
    pub(crate) fn consistency(&self) -> Consistency {
        if self.application {
            Consistency::Application
        } else if self.freeze.is_empty() {
            Consistency::Crash
        } else {
            Consistency::Filesystem
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ObsoleteOptions {
    /// The snapshot's number
    #[arg(value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) number: u64,

    #[command(flatten)]
    pub(crate) query: Query,
}

#[derive(Debug, Args)]
pub(crate) struct Query {
    #[command(flatten)]
    pub(crate) disks: Disks,

    /// Print one JSON object for each disk
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which disks to ask, and how long to wait for an answer.
#[derive(Debug, Args)]
pub(crate) struct Disks {
    /// The vsock port of a disk on the host; repeatable, one for each disk [default: 7400]
    #[arg(long, value_name = "PORT")]
    port: Vec<u32>,

    /// The unix socket of a disk, if there is no vsock; repeatable
    #[arg(long, value_name = "PATH")]
    unix: Vec<PathBuf>,

    /// Seconds to wait for an answer, and the longest time that a file system stays frozen
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u32).range(1..=3600))]
    timeout: u32,
}

impl Disks {
    pub(crate) fn endpoints(&self) -> Vec<Endpoint> {
        if self.port.is_empty() && self.unix.is_empty() {
            return vec![Endpoint::Vsock(DEFAULT_PORT)];
        }
        let vsock = self.port.iter().copied().map(Endpoint::Vsock);
        vsock.chain(self.unix.iter().cloned().map(Endpoint::Unix)).collect()
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout.into())
    }
}

/// [`Wait`] on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Until {
    Accepted,
    Stable,
}

impl From<Until> for Wait {
    fn from(until: Until) -> Wait {
        match until {
            Until::Accepted => Wait::Accepted,
            Until::Stable => Wait::Stable,
        }
    }
}

fn label(text: &str) -> Result<String, String> {
    if is_valid_label(text) {
        return Ok(text.to_owned());
    }
    Err("use letters, digits, '.', '_' and '-', at most 64, not digits only, \
         not starting with '-' or '.'"
        .to_owned())
}

/// Parses `KEY=VALUE`. The host checks both.
fn pair(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = parts.ok_or("write it as KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use crate::{Consistency, DEFAULT_PORT};
    use clap::{CommandFactory, Parser};

    use super::{Arguments, CheckpointOptions, Command};
    use crate::program::endpoint::Endpoint;

    fn checkpoint(line: &str) -> Result<CheckpointOptions, clap::Error> {
        let words = ["cairn-agent", "checkpoint"].into_iter().chain(line.split_whitespace());
        match Arguments::try_parse_from(words)?.command {
            Command::Checkpoint(options) => Ok(options),
            other => panic!("parsed as {other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn without_a_port_the_first_disk_is_used() {
        let options = checkpoint("").unwrap();
        assert_eq!(options.disks.endpoints(), [Endpoint::Vsock(DEFAULT_PORT)]);
    }

    #[test]
    fn each_port_is_one_disk() {
        let options = checkpoint("--port 7400 --port 7401").unwrap();
        assert_eq!(options.disks.endpoints(), [Endpoint::Vsock(7400), Endpoint::Vsock(7401)]);
    }

    #[test]
    fn the_recorded_consistency_follows_from_the_options() {
        assert_eq!(checkpoint("").unwrap().consistency(), Consistency::Crash);
        assert_eq!(checkpoint("--sync").unwrap().consistency(), Consistency::Crash);
        assert_eq!(checkpoint("--freeze /mnt").unwrap().consistency(), Consistency::Filesystem);
        assert_eq!(
            checkpoint("--freeze /mnt --application").unwrap().consistency(),
            Consistency::Application
        );
    }

    #[test]
    fn a_freeze_without_a_time_limit_is_refused() {
        assert!(checkpoint("--timeout 0").is_err());
        assert!(checkpoint("--timeout 1").is_ok());
    }

    #[test]
    fn metadata_is_a_key_and_a_value() {
        let options = checkpoint("--set-meta step=4 --set-meta a=b=c --keep-last 2").unwrap();
        let set = [("step", "4"), ("a", "b=c")].map(|(key, value)| (key.into(), value.into()));
        assert_eq!(options.set_meta, set);
        assert!(checkpoint("--set-meta step").is_err());
        assert!(checkpoint("--set-meta =4").is_err());
        assert!(checkpoint("--keep-last 0").is_err());
    }

    #[test]
    fn a_label_that_looks_like_a_number_is_refused() {
        assert!(checkpoint("--label 7").is_err());
        assert!(checkpoint("--label before-upgrade").is_ok());
    }
}
