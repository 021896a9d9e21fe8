//! The command line of `cairn-blk`.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use cairn_store::Durability;
use clap::builder::Resettable;
use clap::{Arg, ArgAction, ArgGroup, Command, CommandFactory, FromArgMatches, Parser};

const EXAMPLES: &str = "\
Examples:
  Serve the newest snapshot of vm1 from an empty mirror:
    cairn-blk --store dir:/srv/cairn --image vm1 --mirror /var/lib/cairn/vm1 \\
      --socket-path /run/cairn/vm1.sock --control /run/cairn/vm1.ctl --vsock /run/cairn/vm1.vsock

  QEMU, with shared memory:
    qemu-system-x86_64 -machine q35,memory-backend=mem \\
      -object memory-backend-memfd,id=mem,size=4G,share=on \\
      -chardev socket,id=c0,path=/run/cairn/vm1.sock,reconnect=1 \\
      -device vhost-user-blk-pci,chardev=c0,num-queues=2 ...

Exit codes:
  0  clean stop
  1  failed
  2  wrong usage, or keys that are missing or cannot be used
  3  the repository, image, snapshot or a directory does not exist
  4  the image or the mirror is in use, or the mirror does not fit the image
  5  stored data, or the mirror's map, is corrupt
  6  unavailable (disk full, no answer)";

/// Serves one Cairn disk to QEMU or Cloud Hypervisor over vhost-user-blk.
///
/// Reads come from a local mirror. Data that is not in the mirror yet is fetched from the
/// repository when the guest reads it. Writes go to the mirror. A checkpoint freezes the state of
/// the disk at once, and is stored in the background.
#[derive(Debug, Parser)]
#[command(name = "cairn-blk", version, after_help = EXAMPLES, max_term_width = 100)]
#[command(group(ArgGroup::new("socket").args(["socket_path", "fd"]).required(true)))]
pub struct Args {
    /// The repository: dir:PATH, or a cluster: cairn://HOST:PORT (a catalog server) or
    /// etcd://HOST:PORT[,HOST:PORT...] (etcd).
    #[arg(long, env = "CAIRN_STORE", value_name = "URL")]
    pub store: String,

    /// The keys for a cluster: a directory with ca.pem, client.pem and client.key.
    #[arg(long, value_name = "DIR", env = "CAIRN_KEYS")]
    pub keys: Option<PathBuf>,

    /// Use plain TCP for a cluster. Everybody on the network can then read and change the data.
    /// CAIRN_KEYS is ignored.
    #[arg(long, conflicts_with = "keys")]
    pub insecure: bool,

    /// When a checkpoint is published: `pessimistic` waits for its full redundancy; `optimistic`
    /// publishes it as available once it can be read, and makes it stable in the background.
    #[arg(long, value_name = "HOW", default_value = "pessimistic", value_parser = durability)]
    pub durability: Durability,

    /// The image to serve: its newest snapshot, or IMAGE@N, or IMAGE@LABEL.
    #[arg(long, value_name = "IMAGE[@N]")]
    pub image: String,

    /// The directory of the local mirror. It is created if it is missing.
    #[arg(long, value_name = "DIR")]
    pub mirror: PathBuf,

    /// The directory for state that must survive the death of this process, on a tmpfs [default:
    /// cairn in $XDG_RUNTIME_DIR, or /run/cairn].
    #[arg(long, value_name = "DIR", env = "CAIRN_LIVE")]
    pub live: Option<PathBuf>,

    /// The unix socket to listen on for the hypervisor.
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,

    /// The number of an inherited socket to use instead, listening or connected.
    #[arg(long, value_name = "FDNUM")]
    pub fd: Option<i32>,

    /// The unix socket for `cairn checkpoint` and `cairn status`, accessible to this user only.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// The path to which the hypervisor appends _PORT for the guest's vsock connections.
    #[arg(long, value_name = "PATH")]
    pub vsock: Option<PathBuf>,

    /// The vsock port on which the guest reaches this process.
    #[arg(long, value_name = "PORT", default_value_t = cairn_agent::DEFAULT_PORT)]
    pub vsock_port: u32,

    /// Listen on the host kernel's vsock too, for the guest with this context id only.
    #[arg(long, value_name = "CID", value_parser = clap::value_parser!(u32).range(3..))]
    pub guest_cid: Option<u32>,

    /// The interval, in milliseconds, in which a guest may take one checkpoint, after a burst of 16;
    /// 0 means no limit. The control socket has no limit.
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(0..=86_400_000)
    )]
    pub guest_checkpoint_interval: u32,

    /// Let the guest mark snapshots that were taken from inside it as obsolete. A prune then removes
    /// them, unless they are pinned or the image's policy keeps them.
    #[arg(long)]
    pub guest_may_remove: bool,

    /// The number of virtqueues. Each has a thread of its own.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=64)
    )]
    pub num_queues: u16,

    /// The number of entries of a virtqueue, a power of two.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = queue_size)]
    pub queue_size: u16,

    /// Memory, in MiB, for old blocks that the guest overwrites while a checkpoint is stored.
    /// Further old blocks go to a file in the mirror's directory.
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    pub cow_memory: u32,

    /// The size limit, in MiB, of that file [default: the size of the disk, or half of the free
    /// space if that is less].
    #[arg(long, value_name = "MIB")]
    pub cow_disk: Option<u64>,

    /// How long, in seconds, a guest's write may wait for space for an old block while no
    /// checkpoint makes progress. Then the newest checkpoint fails, and its changes go into the
    /// next one.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..=86400)
    )]
    pub cow_stall: u32,

    /// The most bytes of checkpoints to store per second; 0 means no limit. In any case storing
    /// slows down while the guest uses its disk.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub commit_rate: u64,

    /// How long, in seconds, to retry storing a checkpoint while the repository fails. Then the
    /// checkpoint fails, and its changes go into the next one.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub commit_retry: u32,

    /// How long, in seconds, a guest's request may wait for data that cannot be fetched. Then the
    /// request fails.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub fetch_retry: u32,

    /// How long, in microseconds, a worker polls for the guest's next request before it sleeps; 0
    /// disables polling [default: 50 while the host has at least two processors for each running
    /// queue, and two more unless the guest polls too; else 0].
    #[arg(
        long,
        value_name = "US",
        overrides_with = "poll_us",
        value_parser = clap::value_parser!(u32).range(0..=1_000_000)
    )]
    pub poll_us: Option<u32>,

    /// Let the catalog forget the mirror when the process stops, and 10 minutes after it was last
    /// heard of. So it keeps no data of removed snapshots for longer. After that the mirror can only be
    /// started again while the snapshot that it continues exists.
    #[arg(long)]
    pub ephemeral: bool,

    /// Serve the disk read-only. Many processes can serve one image like this.
    #[arg(long)]
    pub read_only: bool,
}

impl Args {
    /// Parses the arguments of this process. If they are wrong, prints why and ends the process.
    pub fn from_process() -> Args {
        let mut command = command_line();
        // A file for systemd may set a variable to nothing.
        for option in ["store", "keys", "live"] {
            command = command.mut_arg(option, |arg| {
                let variable = arg.get_env().and_then(std::env::var_os);
                match variable.is_some_and(|value| value.is_empty()) {
                    true => arg.env(Resettable::Reset),
                    false => arg,
                }
            });
        }
        if std::env::args_os().any(|arg| arg == "--insecure") {
            // What is typed overrides the environment. `--keys` beside it is still an error.
            command = command.mut_arg("keys", |keys| keys.env(Resettable::Reset));
        }
        let matches = command.clone().get_matches();
        Args::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit())
    }

    /// The directory that holds the live directories.
    pub(crate) fn live(&self) -> PathBuf {
        let runtime = || std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
        self.live
            .clone()
            .unwrap_or_else(|| runtime().map_or("/run".into(), PathBuf::from).join("cairn"))
    }

    /// How long a worker polls before it sleeps, and up to how many running queues it does so.
    pub(crate) fn poll(&self) -> (Duration, usize) {
        const DEFAULT_POLL_US: u32 = 50;
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        // The guest and its hypervisor need processors too. With two processors, polling for a guest
        // that sleeps costs more than it gains.
        let spare = (processors / 2).saturating_sub(1);
        let max_queues = if self.poll_us.is_some() { usize::MAX } else { spare };
        (Duration::from_micros(self.poll_us.unwrap_or(DEFAULT_POLL_US).into()), max_queues)
    }
}

fn durability(text: &str) -> Result<Durability, String> {
    match text {
        "pessimistic" => Ok(Durability::Pessimistic),
        "optimistic" => Ok(Durability::Optimistic),
        _ => Err("use pessimistic or optimistic".into()),
    }
}

fn queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(size) if size.is_power_of_two() && (8..=1024).contains(&size) => Ok(size),
        _ => Err("use a power of two from 8 to 1024".into()),
    }
}

/// The command line, also for the manual page and the completions.
pub fn command_line() -> Command {
    // [`wants_capabilities`] finds this option before the arguments are parsed.
    let capabilities = Arg::new("print-capabilities")
        .long("print-capabilities")
        .action(ArgAction::SetTrue)
        .help("Print what the program can do, as QEMU's convention for backend programs wants it, and exit");
    Args::command().arg(capabilities)
}

/// Whether `--print-capabilities` is among the arguments. It needs none of the other arguments.
pub fn wants_capabilities(mut args: impl Iterator<Item = std::ffi::OsString>) -> bool {
    args.any(|arg| arg == "--print-capabilities")
}

/// The capabilities of the program, in the form of QEMU's convention for backend programs.
pub const CAPABILITIES: &str = r#"{"type": "block", "features": ["read-only"]}"#;

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{Args, command_line};

    #[test]
    fn the_arguments_are_consistent() {
        command_line().debug_assert();
    }

    #[test]
    fn the_help_names_all_kinds_of_repositories() {
        let help = command_line().render_long_help().to_string();
        for kind in ["dir:PATH", "cairn://HOST:PORT", "etcd://HOST:PORT"] {
            assert!(help.contains(kind), "no {kind}");
        }
    }

    #[test]
    fn one_socket_is_needed_and_only_one() {
        let base = ["cairn-blk", "--store", "dir:s", "--image", "a", "--mirror", "m"];
        let parse = |more: &[&str]| Args::try_parse_from(base.iter().chain(more));
        assert!(parse(&[]).is_err());
        assert!(parse(&["--fd", "3"]).is_ok());
        assert!(parse(&["--socket-path", "s"]).is_ok());
        assert!(parse(&["--socket-path", "s", "--fd", "3"]).is_err());
        assert!(parse(&["--fd", "3", "--queue-size", "100"]).is_err());
    }
}
