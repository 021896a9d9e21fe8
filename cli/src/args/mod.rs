//! The command line.

mod cluster;
mod global_options;
mod mirrors;
mod names;

use std::path::PathBuf;
use std::time::Duration;

use cairn_agent::Wait;
use cairn_store::encoding::{Compression, Redundancy};
use cairn_store::{ImageName, Scope, SnapshotRef};
use clap::builder::Resettable;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

pub(crate) use self::cluster::{Catalog, Keys, Peers, Serve, SignRole, SupervisorOptions};
use self::global_options::{without_empty_variables, without_unused_options};
pub(crate) use self::mirrors::{Forget, Mirrors};
pub(crate) use self::names::{Ls, Policy, Rules, SortBy};
use crate::image_format::Format;
use crate::size::{parse_percent, parse_size};
use crate::subject::Subject;
use crate::time::parse_period;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed, or a checkpoint did not become stable
  2  wrong usage, or keys that are missing or cannot be used
  3  the repository, image, snapshot, mirror or socket does not exist
  4  in use, busy, or not possible in its present state
  5  stored data is corrupt or missing
  6  unavailable (disk full, no answer), or timed out

Sizes are bytes, or have a suffix K, M, G or T (powers of 1024).";

/// The heading of the options that every command accepts.
const GLOBAL: &str = "Global options";

/// Manages disk images of virtual machines, their snapshots, and checkpoints of running disks.
#[derive(Debug, Parser)]
#[command(name = "cairn", version, after_help = EXIT_CODES, max_term_width = 100)]
pub(crate) struct Cli {
    /// The repository: dir:PATH, or a cluster: cairn://HOST:PORT (a catalog server) or
    /// etcd://HOST:PORT[,HOST:PORT...] (etcd)
    #[arg(long, global = true, help_heading = GLOBAL, env = "CAIRN_STORE", value_name = "URL")]
    pub(crate) store: Option<String>,
    /// The directory with the keys for a cluster: ca.pem, and the certificate and key of the role;
    /// for the commands of `keys`, the directory of the authority
    #[arg(long, global = true, help_heading = GLOBAL, env = "CAIRN_KEYS", value_name = "DIR")]
    pub(crate) keys: Option<PathBuf>,
    /// Connect to a cluster without TLS: everyone on the network can read and change the data.
    /// CAIRN_KEYS is ignored
    #[arg(long, global = true, help_heading = GLOBAL, conflicts_with = "keys")]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) style: Style,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Parses the arguments of this process.
    pub(crate) fn from_process() -> Result<Cli, clap::Error> {
        let mut command = without_empty_variables(Cli::command(), &["store", "keys"]);
        if std::env::args_os().any(|arg| arg == "--insecure") {
            // What is typed overrides the environment. `--keys` beside it is still an error.
            command = command.mut_arg("keys", |keys| keys.env(Resettable::Reset));
        }
        let mut command = without_unused_options(command);
        let matches: ArgMatches = command.try_get_matches_from_mut(std::env::args_os())?;
        Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    }
}

/// The command line, for the manual pages and the completions. It is the same in every environment.
pub fn command_line() -> clap::Command {
    without_unused_options(Cli::command())
}

/// The format of the output.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Style {
    /// Print JSON, for errors too
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub(crate) json: bool,
    /// Print sizes in bytes
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub(crate) bytes: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create an empty image
    #[command(after_help = "Example:\n  cairn --store dir:/srv/cairn create vm1 20G")]
    Create {
        /// The image's name
        image: ImageName,
        /// The disk's size
        #[arg(value_parser = parse_size)]
        size: u64,
        #[command(flatten)]
        options: ImageOptions,
    },
    /// Create an image from a disk: raw, qcow2, VMDK or VHDX
    #[command(
        after_help = "The format is recognised by the content. A disk that is not raw is first converted with \
                      qemu-img (Debian: qemu-utils) to a sparse raw copy in /var/tmp, or in TMPDIR. An image \
                      that names other files, such as a backing file, is refused.\n\n\
                      Examples:\n  cairn import debian.raw debian\n  \
                      cairn import old.qcow2 vm1\n  \
                      cairn import guest-data.img vm2 --format raw\n  \
                      ssh host 'cat /dev/vg0/vm3' | cairn import - vm3"
    )]
    Import {
        /// The file or block device; `-` is standard input, which must be raw
        file: PathBuf,
        /// The image's name
        image: ImageName,
        /// The format of the file [default: recognised by its content]
        #[arg(long, value_enum)]
        format: Option<Format>,
        #[command(flatten)]
        options: ImageOptions,
    },
    /// List images, or the snapshots of one
    #[command(
        after_help = "A listing in the order of names is printed while it is read, however long it is.\n\n\
                      Examples:\n  cairn ls\n  cairn ls vm1 --json\n  \
                      cairn ls job42/ --snapshots --newer-than 7d --meta step\n  \
                      cairn ls --label 'release-*' --sort time --reverse --limit 10\n  \
                      cairn ls vm1 --limit 100 --after vm1@100"
    )]
    Ls(Ls),
    /// Show the properties of a snapshot
    #[command(after_help = "Examples:\n  cairn show vm1\n  cairn show vm1@3\n  \
                            cairn show vm1@before-upgrade")]
    Show {
        /// IMAGE, IMAGE@NUMBER or IMAGE@LABEL
        snapshot: SnapshotRef,
    },
    /// Create an image from a snapshot of another image, without copying data
    #[command(after_help = "Example:\n  cairn clone debian@1 vm2")]
    Clone {
        /// The snapshot that the new image starts with
        snapshot: SnapshotRef,
        /// The new image's name
        image: ImageName,
    },
    /// Make the disk of an image larger, also while it is in use
    #[command(after_help = "A disk only grows. Its snapshots keep the sizes that they have.\n\n\
                            A disk that runs grows within 20 seconds, and at once with --control. The \
                            guest then sees the new size and can enlarge its partitions and file \
                            systems.\n\n\
                            Examples:\n  cairn resize vm1 40G\n  \
                            cairn resize vm1 40G --control /run/vm1.ctl")]
    Resize {
        /// The image's name
        image: ImageName,
        /// The disk's size
        #[arg(value_parser = parse_size)]
        size: u64,
        /// The control socket of the disk's cairn-blk, which then grows at once
        #[arg(long, value_name = "SOCKET")]
        control: Option<PathBuf>,
    },
    /// Write a snapshot to a raw disk file or a block device
    #[command(
        after_help = "A file is sparse, and gets its name when it is complete. Until then its content is in \
                      FILE.cairn-part. An export that was interrupted is continued by the same command. The \
                      snapshot may be removed meanwhile.\n\n\
                      With --base, the file must hold that snapshot exactly: only its size is checked, and only \
                      what differs is written, in place. If that is interrupted, run the same command again: \
                      until then the file holds neither snapshot.\n\n\
                      Examples:\n  cairn export vm1@3 vm1.raw\n  \
                      cairn export vm1 - | ssh host 'cat > vm1.raw'\n  \
                      cairn export vm1@4 vm1.raw --base vm1@3\n  \
                      cairn export vm1@3 /dev/vg0/vm1 --force"
    )]
    Export {
        /// The snapshot
        snapshot: SnapshotRef,
        /// The file to create, or a block device; `-` is standard output
        file: PathBuf,
        /// The snapshot that the file holds: write only what differs
        #[arg(long, value_name = "IMAGE@N", conflicts_with_all = ["force", "restart"])]
        base: Option<SnapshotRef>,
        /// Replace the file if it exists, or the content of the block device
        #[arg(long)]
        force: bool,
        /// Discard what an interrupted export has left
        #[arg(long)]
        restart: bool,
    },
    /// Remove a snapshot, or an image with all its snapshots
    #[command(after_help = "The names are removed. The data stays until `cairn gc`.\n\n\
                            Examples:\n  cairn rm vm1@3\n  cairn rm vm1")]
    Rm {
        /// IMAGE@NUMBER or IMAGE@LABEL for a snapshot, IMAGE for the image with all its snapshots
        name: SnapshotRef,
        /// Remove the image although stopped mirrors refer to it
        #[arg(long)]
        force: bool,
    },
    /// Give a snapshot a label, or take one away
    #[command(
        after_help = "A label is a further name of the snapshot, unique in its image. A snapshot has up to \
                            8 labels.\n\n\
                            Examples:\n  cairn tag vm1@3 before-upgrade\n  \
                            cairn tag vm1@3 before-upgrade --remove"
    )]
    Tag {
        /// The snapshot
        snapshot: SnapshotRef,
        /// The label
        label: String,
        /// Take the label away
        #[arg(long)]
        remove: bool,
    },
    /// Keep a snapshot: neither a policy nor `cairn rm` removes it
    #[command(after_help = "Example:\n  cairn pin vm1@3")]
    Pin {
        /// The snapshot
        snapshot: SnapshotRef,
    },
    /// Let a pinned snapshot be removed again
    #[command(after_help = "Example:\n  cairn unpin vm1@3")]
    Unpin {
        /// The snapshot
        snapshot: SnapshotRef,
    },
    /// Show or change the metadata of a snapshot: values under keys
    #[command(after_help = "A snapshot has up to 16 keys, and a value up to 256 bytes.\n\n\
                            Examples:\n  cairn meta vm1@3\n  cairn meta vm1@3 owner=ann step=40\n  \
                            cairn meta vm1@3 --unset step")]
    Meta {
        /// The snapshot
        snapshot: SnapshotRef,
        /// Values to set
        #[arg(value_name = "KEY=VALUE")]
        set: Vec<String>,
        /// A key to remove; repeatable
        #[arg(long, value_name = "KEY")]
        unset: Vec<String>,
    },
    /// Set, show or remove retention policies
    #[command(
        subcommand,
        after_help = "A policy says which snapshots `cairn prune` keeps. Without one, all are kept.\n\n\
                      Examples:\n  cairn policy set vm1 --keep-last 2\n  cairn policy show\n  \
                      cairn policy rm vm1"
    )]
    Policy(Policy),
    /// Remove the snapshots that retention policies do not keep
    #[command(
        after_help = "The command says for every snapshot why it stays or goes. It never removes a pinned snapshot, \
                      the last stable one of an image, the parent of a mirror, or one that is being stored or \
                      read. The supervisor does the same every hour.\n\n\
                      Examples:\n  cairn prune --dry-run\n  cairn prune vm1\n  cairn prune job42/ --json"
    )]
    Prune {
        /// The image, or the folder of images with a slash at its end [default: all images]
        #[arg(value_name = "IMAGE|FOLDER/", default_value = "/", hide_default_value = true)]
        scope: Scope,
        /// Print what would be done, and remove nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// List the mirrors that refer to images, or forget those that no longer exist
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "A mirror keeps the content of the snapshot that it continues, even if the snapshot was \
                      removed, until it is forgotten. One of `cairn-blk --ephemeral` is forgotten when its \
                      process stops, or 10 minutes after its process was last heard of.\n\n\
                      ALONE is what only this mirror keeps: forgetting it and a collection free that. It \
                      is counted if the snapshot was removed, which reads the tree nodes of all \
                      snapshots.\n\n\
                      Examples:\n  cairn mirrors\n  cairn mirrors forget --unseen 30d --dry-run\n  \
                      cairn mirrors forget 0f3b5c8a9d1e4f60b2a7c4d8e9f01234"
    )]
    Mirrors {
        #[command(subcommand)]
        action: Option<Mirrors>,
    },
    /// Take a checkpoint of a running disk and print its name
    #[command(
        after_help = "The name is printed when the checkpoint is accepted. Other commands find the snapshot a \
                            moment later, or at once with --wait stable.\n\n\
                            Examples:\n  cairn checkpoint --control /run/vm1.ctl\n  \
                            cairn checkpoint --control /run/vm1.ctl --label before-upgrade \
                            --wait stable"
    )]
    Checkpoint {
        #[command(flatten)]
        control: Control,
        /// A second name for the snapshot
        #[arg(long)]
        label: Option<String>,
        /// A value to keep with the snapshot; repeatable
        #[arg(long, value_name = "KEY=VALUE")]
        set_meta: Vec<String>,
        /// Return when the checkpoint is accepted, or when the snapshot is stable
        #[arg(long, value_enum, default_value = "accepted", value_name = "WHAT")]
        wait: WaitFor,
        /// Give up after this many seconds [default: 30, or 3600 with --wait stable]
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        timeout: Option<Duration>,
    },
    /// Show the properties and the state of a running disk
    #[command(after_help = "Example:\n  cairn status --control /run/vm1.ctl")]
    Status {
        #[command(flatten)]
        control: Control,
    },
    /// Run a peer, which stores data of a cluster, or the catalog server
    #[command(
        after_help = "With --catalog ADDR the process is a peer of that catalog. With --catalog alone it is \
                      the catalog server. One of the two is needed.\n\n\
                      Examples:\n  cairn serve --catalog --data /srv/cairn-catalog --listen 10.0.0.1:7400 \
                            --keys /etc/cairn\n  \
                            cairn serve --data /srv/cairn-peer --listen 10.0.0.5:7500 \\\n    \
                            --catalog 10.0.0.1:7400 --capacity 500G --keys /etc/cairn"
    )]
    Serve(Serve),
    /// Prune and collect regularly; in a cluster, also declare peers lost and repair
    #[command(
        after_help = "A catalog server supervises its cluster itself. A cluster whose catalog is an etcd, and a \
                      repository in a directory, need this command. Several supervisors may run: one of them \
                      acts at a time.\n\n\
                      Examples:\n  cairn supervise --store etcd://10.0.0.1:2379,10.0.0.2:2379 --keys /etc/cairn\n  \
                      cairn supervise --store dir:/srv/cairn --gc-interval 12h"
    )]
    Supervise {
        #[command(flatten)]
        options: SupervisorOptions,
    },
    /// Create, sign and revoke the keys of a cluster
    #[command(
        subcommand,
        after_help = "Examples:\n  cairn keys init cluster-keys\n  \
                      cairn keys sign --keys cluster-keys peer1-keys\n  \
                      cairn keys revoke --keys cluster-keys 3f8a"
    )]
    Keys(Keys),
    /// List the peers of a cluster, or drain or remove a peer
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "The last line shows how many more peers the cluster can lose without losing data, as of \
                      the last repair.\n\n\
                      Examples:\n  cairn --store cairn://10.0.0.1:7400 peers\n  cairn peers drain 3f8a\n  \
                      cairn peers lose 3f8a"
    )]
    Peers {
        #[command(subcommand)]
        action: Option<Peers>,
    },
    /// Check the redundancy of all data, and rebuild missing fragments
    #[command(after_help = "The catalog server does the same in the background.\n\n\
                            Fragments of a peer that is down are rebuilt only when the peer is lost: after \
                            --lost-after of the catalog server, or at once with `cairn peers lose`.\n\n\
                            Examples:\n  cairn repair\n  cairn repair --rate 100M")]
    Repair {
        /// Transfer at most this many bytes a second
        #[arg(long, value_name = "BYTES", value_parser = parse_size)]
        rate: Option<u64>,
    },
    /// Delete the data that no snapshot, mirror or running command needs
    #[command(
        after_help = "Removing a snapshot removes its name. This command deletes the data that only removed \
                      snapshots had. It may run beside everything else: what a running import or checkpoint \
                      needs stays.\n\n\
                      With --grace, data stays that was stored, or used by a commit, within that time. Ages are \
                      measured from one collection to the next, so the first collection frees nothing unless \
                      the period is 0.\n\n\
                      Nothing is deleted if a part of a snapshot's tree cannot be read. What --give-up names can \
                      still be listed, but not read: remove it with `cairn rm`, or later collections fail.\n\n\
                      The supervisor does the same every day: --gc-interval of `cairn supervise` and of the catalog \
                      server.\n\n\
                      Examples:\n  cairn gc --dry-run --grace 0\n  cairn gc\n  cairn gc --grace 0 --json"
    )]
    Gc {
        /// Print what would be deleted, and delete nothing
        #[arg(long)]
        dry_run: bool,
        /// Keep what was stored or used within this time, such as 24h; 0 for no grace period
        #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_period)]
        grace: Duration,
        /// Give up a snapshot whose tree cannot be read: what only the unreadable part refers to is
        /// deleted; repeatable
        #[arg(long, value_name = "IMAGE@N")]
        give_up: Vec<SnapshotRef>,
        /// Collect although the catalog was restored from a copy that is older than the data
        #[arg(long)]
        accept_older_catalog: bool,
    },
    /// Read all data of snapshots and verify it
    #[command(
        after_help = "Each chunk is read once, whichever snapshots share it. In a directory the disk itself is \
                      read. In a cluster every fragment is read and compared with its blob, and fragments that \
                      are missing are reported with the peer that should have them.\n\n\
                      With --sample, a random part of the chunks is read, and all tree nodes. The same \
                      seed selects the same chunks.\n\n\
                      `cairn ls` and `cairn show` say when a snapshot was last verified: completely, with \
                      nothing wrong, and with no damage found since.\n\n\
                      With --repair, fragments that are missing or damaged are rebuilt from the others. A \
                      directory has no other fragments: store damaged data again, for example by importing a \
                      copy of the disk.\n\n\
                      The exit code is 5 if data or fragments are damaged or missing, and 6 if something \
                      could not be read now, for example because peers are down.\n\n\
                      Examples:\n  cairn verify\n  cairn verify vm1 job42/ --repair\n  \
                      cairn verify vm1@3 vm2@before-upgrade --json\n  cairn verify --sample 5%"
    )]
    Verify {
        /// IMAGE for all its snapshots, IMAGE@NUMBER or IMAGE@LABEL for one, FOLDER/ for all images
        /// in a folder [default: all snapshots of all images]
        #[arg(value_name = "IMAGE[@SNAPSHOT]|FOLDER/")]
        subjects: Vec<Subject>,
        /// Read this part of the chunks only, chosen at random
        #[arg(long, value_name = "P%", value_parser = parse_percent)]
        sample: Option<f64>,
        /// Choose the same part as the run that has printed this seed
        #[arg(long, value_name = "N", requires = "sample")]
        seed: Option<u64>,
        /// Repair the fragments that are missing or damaged
        #[arg(long)]
        repair: bool,
    },
    /// Show what images and snapshots take, and what removing one frees
    #[command(
        after_help = "UNIQUE is data that nothing else refers to: no other snapshot or image, no mirror, and no \
                      command that reads. SHARED is data that something else refers to, too. In a snapshot, \
                      chunks that occur several times count there, too. Both are sizes of chunks, before \
                      compression and redundancy.\n\n\
                      FREES is the space in the files of a repository in a directory that `cairn gc --grace 0` \
                      gives back after the image or snapshot was removed, tree nodes included. In a cluster it \
                      is not known: it depends on how well the data was compressed.\n\n\
                      Each line is about one removal. Two removals together can free more: what \
                      only the two share.\n\n\
                      Examples:\n  cairn du\n  cairn du vm1\n  cairn du job42/ vm1@3 --json"
    )]
    Du {
        /// IMAGE for the image and each of its snapshots, IMAGE@NUMBER or IMAGE@LABEL for one
        /// snapshot, FOLDER/ for all images in a folder [default: all images]
        #[arg(value_name = "IMAGE[@SNAPSHOT]|FOLDER/")]
        subjects: Vec<Subject>,
    },
    /// List the ranges in which two snapshots differ
    #[command(
        after_help = "The snapshots may be of different images, if their chunks have the same size, and of \
                      disks of different sizes. Equal parts of the two are not read. A range consists of whole \
                      chunks, cut at the end of the disk. Offsets and lengths are bytes.\n\n\
                      CONTENT says what the second snapshot has in the range: data, zero, or gone if its disk \
                      is smaller.\n\n\
                      Examples:\n  cairn diff vm1@3 vm1@7\n  cairn diff debian@1 vm2 --json"
    )]
    Diff {
        /// The first snapshot
        from: SnapshotRef,
        /// The second snapshot
        to: SnapshotRef,
    },
    /// Restore the catalog of a cluster from its peers
    #[command(
        subcommand,
        after_help = "Example:\n  cairn --store cairn://10.0.0.1:7400 catalog rebuild"
    )]
    Catalog(Catalog),
    /// Show the counters of a running disk
    #[command(after_help = "Example:\n  cairn stats --control /run/vm1.ctl --json")]
    Stats {
        #[command(flatten)]
        control: Control,
    },
}

/// The properties of a new image.
#[derive(Debug, Args)]
pub(crate) struct ImageOptions {
    /// The chunk size, a power of two from 64K to 4M
    #[arg(long, value_name = "SIZE", default_value = "256K", value_parser = parse_size)]
    pub(crate) chunk_size: u64,
    /// The redundancy of its chunks in a cluster: none, replicas=N or rs=K+M [default: depends on
    /// the number of peers, rs=4+4 with 8 or more, replicas=3 with 3 or more]
    #[arg(long, value_name = "HOW")]
    pub(crate) redundancy: Option<Redundancy>,
    /// The compression of its chunks in a cluster: auto, zstd, lz4 or none
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub(crate) compress: Compression,
}

/// The control socket of a running disk.
#[derive(Debug, Args)]
pub(crate) struct Control {
    /// The control socket of the disk's cairn-blk
    #[arg(long = "control", value_name = "SOCKET")]
    pub(crate) socket: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WaitFor {
    Accepted,
    Stable,
}

impl From<WaitFor> for Wait {
    fn from(wait: WaitFor) -> Self {
        match wait {
            WaitFor::Accepted => Wait::Accepted,
            WaitFor::Stable => Wait::Stable,
        }
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 1e9 => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds greater than 0".into()),
    }
}

/// Checks that an address has a port, and returns it unchanged.
fn parse_address(text: &str) -> Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text.into()),
        _ => Err("expected ADDRESS:PORT, such as 10.0.0.1:7400".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Cli, CommandFactory};

    #[test]
    fn the_command_line_is_well_formed() {
        super::command_line().debug_assert();
    }

    #[test]
    fn every_command_has_an_example() {
        let all = Cli::command();
        let policy =
            all.find_subcommand("policy").into_iter().flat_map(|one| one.get_subcommands());
        for command in all.get_subcommands().chain(policy) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("cairn") && help.contains("Example"), "{}", command.get_name());
        }
    }
}
