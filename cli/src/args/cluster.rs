//! The commands that run and administer a cluster.

use std::path::PathBuf;
use std::time::Duration;

use cairn_store::PeerId;
use cairn_store::maintenance::supervisor::SupervisorConfig;
use clap::{Args, Subcommand, ValueEnum};

use super::{parse_address, parse_seconds};
use crate::size::parse_size;
use crate::time::{Interval, parse_interval, parse_period};

/// The options of `cairn serve`.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// The data directory of the peer or of the catalog server; created if it does not exist
    #[arg(long, value_name = "DIR")]
    pub(crate) data: PathBuf,
    /// The ADDRESS:PORT to listen at; port 0 selects a free port
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    pub(crate) listen: String,
    /// Without a value: run the catalog server. With a value: run a peer of the catalog at
    /// HOST:PORT or etcd://HOST:PORT[,HOST:PORT...]
    #[arg(long, value_name = "ADDR", num_args = 0..=1)]
    pub(crate) catalog: Option<Option<String>>,
    /// Run a peer that joins no cluster, for tests and benchmarks. No command uses such a peer
    #[arg(long, conflicts_with = "catalog")]
    pub(crate) no_catalog: bool,
    /// Store at most this many bytes [default: all free space of its file system]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) capacity: Option<u64>,
    /// The failure domain of the peer, such as a rack: peers of one domain may fail together
    /// [default: the name of the host]
    #[arg(long, value_name = "NAME")]
    pub(crate) domain: Option<String>,
    /// The ADDRESS:PORT at which others reach the peer [default: the address of --listen]
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    pub(crate) advertise: Option<String>,
    /// Read and verify everything that the peer holds once in this time: seconds, or a number with
    /// a suffix m, h or d; `off` never does [default: 14d]
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    pub(crate) scrub_interval: Option<Interval>,
    #[command(flatten)]
    pub(crate) supervisor: SupervisorOptions,
}

/// The interval between prunes.
const PRUNE_INTERVAL: Duration = Duration::from_secs(3600);

/// The interval between collections, and their grace period.
const DAY: Duration = Duration::from_secs(86_400);

/// The options of a supervisor.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SupervisorOptions {
    /// Treat a peer as lost, and rebuild its fragments on other peers, after it has been down for
    /// this many seconds [default: 900]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub(crate) lost_after: Option<Duration>,
    /// Transfer at most this many bytes a second for repair in the background [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) repair_rate: Option<u64>,
    /// Remove the snapshots that retention policies do not keep once in this time: seconds, or a
    /// number with a suffix m, h or d; `off` never does [default: 1h]
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    pub(crate) prune_interval: Option<Interval>,
    /// Delete the data that nothing refers to, as `cairn gc` does, once in this time; `off` never does
    /// [default: 24h]
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    pub(crate) gc_interval: Option<Interval>,
    /// Keep data that was stored or used within this time, as --grace of `cairn gc` does; 0 for no
    /// grace period [default: 24h]
    #[arg(long, value_name = "TIME", value_parser = parse_period)]
    pub(crate) gc_grace: Option<Duration>,
}

impl SupervisorOptions {
    /// The settings of a supervisor with these options.
    pub(crate) fn config(&self) -> SupervisorConfig {
        let lost_after = self.lost_after.unwrap_or(Duration::from_secs(900));
        let prune_interval = self.prune_interval.unwrap_or(Interval(Some(PRUNE_INTERVAL))).0;
        let collection_interval = self.gc_interval.unwrap_or(Interval(Some(DAY))).0;
        let collection_grace = self.gc_grace.unwrap_or(DAY);
        SupervisorConfig {
            lost_after,
            rate: self.repair_rate,
            prune_interval,
            collection_interval,
            collection_grace,
        }
    }

    /// Whether an option for clusters is set.
    pub(crate) fn is_for_cluster(&self) -> bool {
        self.lost_after.is_some() || self.repair_rate.is_some()
    }

    /// Whether any option is set.
    pub(crate) fn is_set(&self) -> bool {
        let intervals = [self.prune_interval, self.gc_interval];
        self.is_for_cluster() || intervals.iter().any(Option::is_some) || self.gc_grace.is_some()
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Peers {
    /// Move all fragments of a peer to other peers
    #[command(after_help = "Example:\n  cairn peers drain 3f8a")]
    Drain {
        /// The beginning of the peer's id, or its address
        peer: String,
        /// Cancel the drain: the peer receives its share of the data again
        #[arg(long)]
        undo: bool,
    },
    /// Declare a peer lost, so that its fragments are rebuilt on other peers at once
    #[command(
        after_help = "Use it when the peer or its disk will not return. A lost peer that starts again is a \
                            member again, with everything it holds.\n\n\
                            Example:\n  cairn peers lose 3f8a"
    )]
    Lose {
        /// The beginning of the peer's id, or its address
        peer: String,
    },
    /// Remove a peer from the list: one that is lost, or one that is running and empty
    #[command(
        after_help = "A peer that is down must be declared lost first, with `cairn peers lose`.\n\n\
                            Example:\n  cairn peers forget 3f8a"
    )]
    Forget {
        /// The beginning of the peer's id, or its address
        peer: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Catalog {
    /// Restore the images and snapshots of which the peers have records
    #[command(
        after_help = "What the catalog has is not changed. The command refuses to run while peers \
                      are missing, because they may know of further snapshots and of removals. Run \
                      it again with the missing peers, and it adds the rest.\n\n\
                      Examples:\n  cairn --store cairn://10.0.0.1:7400 catalog rebuild\n  \
                      cairn --store cairn://10.0.0.1:7400 catalog rebuild --force"
    )]
    Rebuild {
        /// Restore what the peers that answer know. Removed snapshots may return
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Keys {
    /// Create a private certificate authority, and the keys of catalog, supervisor and clients
    #[command(after_help = "Example:\n  cairn keys init cluster-keys")]
    Init {
        /// A directory that does not exist or is empty
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Create the keys of a new peer, or of another process, signed by the authority in --keys
    #[command(after_help = "Examples:\n  cairn keys sign --keys cluster-keys peer1-keys\n  \
                            cairn keys sign --keys cluster-keys --role client client2-keys")]
    Sign {
        /// A directory that does not exist or is empty; it gets ca.pem, revoked.crl.pem, the
        /// certificate and key of the role, and mac.key for a client or a supervisor
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// The role of the process that uses the keys
        #[arg(long, value_enum, default_value = "peer")]
        role: SignRole,
        /// Create keys for the peer that has this id, in place of its former keys, not for a new
        /// peer
        #[arg(long, value_name = "ID")]
        peer: Option<PeerId>,
    },
    /// Add a key to mac.key that proves what clients store from now on
    #[command(
        after_help = "mac.key in the directory --keys takes effect when it is copied into the directory of keys on \
                      each machine that runs clients or a supervisor, and they are restarted. The old keys in it \
                      still prove what was stored before.\n\n\
                      Example:\n  cairn keys rotate-mac --keys cluster-keys"
    )]
    RotateMac,
    /// Remove all keys from mac.key but the newest, so that a stolen old key proves nothing
    #[command(
        after_help = "First copy the file that `cairn keys rotate-mac` has written to all machines, restart clients \
                      and supervisors, and run `cairn repair` while all peers are up. When it exits with 0, all \
                      records have seals of the newest key. What the removed keys prove of chunks is lost: they \
                      can still be read, and the next repair reads and seals all of them again.\n\n\
                      Example:\n  cairn keys retire-mac --keys cluster-keys"
    )]
    RetireMac,
    /// Revoke all keys of a peer or of a role that were created so far
    #[command(
        after_help = "The list of revoked certificates, revoked.crl.pem in the directory --keys, takes effect \
                      on each machine when it is copied into the directory of keys there.\n\n\
                      Examples:\n  cairn keys revoke --keys cluster-keys 3f8a\n  \
                      cairn keys revoke --keys cluster-keys client"
    )]
    Revoke {
        /// The beginning of a peer's id, or catalog, supervisor or client
        name: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SignRole {
    Peer,
    Client,
    Supervisor,
    Catalog,
}
