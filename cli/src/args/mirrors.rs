//! The subcommands of `cairn mirrors`.

use cairn_store::MirrorId;
use cairn_store::maintenance::unused_mirrors::LEAST_UNUSED_SECONDS;
use clap::{ArgGroup, Args, Subcommand};

use crate::time::parse_age;

#[derive(Debug, Subcommand)]
pub(crate) enum Mirrors {
    /// List the mirrors: the default
    #[command(after_help = "Examples:\n  cairn mirrors ls\n  cairn mirrors --json")]
    Ls,
    /// Remove mirrors that no longer exist from the catalog
    #[command(
        after_help = "Changes in the directory of a forgotten mirror, after its last snapshot, can no longer \
                      be used. A mirror whose process writes is never forgotten.\n\n\
                      --unseen compares clocks of several hosts: a mirror stays if it was last used in the \
                      future. If the clock of this host may be wrong, use --dry-run first.\n\n\
                      Examples:\n  cairn mirrors forget 0f3b5c8a9d1e4f60b2a7c4d8e9f01234\n  \
                      cairn mirrors forget --unseen 30d --dry-run\n  cairn mirrors forget --unseen 30d"
    )]
    Forget(Forget),
}

/// Which mirrors are forgotten.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("which").args(["id", "unseen"]).required(true)))]
pub(crate) struct Forget {
    /// The mirror
    pub(crate) id: Option<MirrorId>,
    /// All mirrors that no process has used for this long: a number with a suffix h, d or w, such as
    /// 30d; at least 2h
    #[arg(long, value_name = "AGE", value_parser = parse_unseen)]
    pub(crate) unseen: Option<u64>,
    /// Print what would be forgotten, and forget nothing
    #[arg(long, conflicts_with = "id")]
    pub(crate) dry_run: bool,
}

fn parse_unseen(text: &str) -> Result<u64, String> {
    let age = parse_age(text)?;
    match age < LEAST_UNUSED_SECONDS {
        true => Err("expected 2h or more: a running process notes once an hour that it uses its \
                     mirror"
            .into()),
        false => Ok(age),
    }
}
