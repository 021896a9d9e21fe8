//! The arguments of the commands that name, list and keep snapshots.

use cairn_store::{Scope, SnapshotRef, SnapshotState};
use clap::{Args, Subcommand, ValueEnum};

use crate::time::{parse_age, parse_utc_offset};

/// The options of `cairn ls`.
#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// List this image's snapshots, or with a slash at the end, the images in this folder
    #[arg(value_name = "IMAGE|FOLDER/")]
    pub(crate) scope: Option<Scope>,
    /// List the snapshots of all these images. Each of the filters lists snapshots, too
    #[arg(long)]
    pub(crate) snapshots: bool,
    /// Only with a label like this; `*` stands for any characters, `?` for one
    #[arg(long, value_name = "PATTERN")]
    pub(crate) label: Option<String>,
    /// Only in this state: pending, available, stable, failed or removing
    #[arg(long)]
    pub(crate) state: Option<SnapshotState>,
    /// Only younger than this: a number with a suffix s, m, h, d or w
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    pub(crate) newer_than: Option<u64>,
    /// Only snapshots that are at least this old
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    pub(crate) older_than: Option<u64>,
    /// Only with this key in the metadata, or with this value of it; repeatable
    #[arg(long, value_name = "KEY[=VALUE]")]
    pub(crate) meta: Vec<String>,
    /// Only pinned snapshots
    #[arg(long)]
    pub(crate) pinned: bool,
    /// Only snapshots that their guests have marked as obsolete
    #[arg(long)]
    pub(crate) obsolete: bool,
    /// The order
    #[arg(long, value_enum, default_value = "name", value_name = "BY")]
    pub(crate) sort: SortBy,
    /// The opposite order
    #[arg(long)]
    pub(crate) reverse: bool,
    /// At most this many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub(crate) limit: Option<u64>,
    /// Only those after this image or snapshot in the order of names: the last one of a page
    #[arg(long, value_name = "NAME")]
    pub(crate) after: Option<SnapshotRef>,
}

/// The order of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortBy {
    /// The name, then the number
    Name,
    /// The time of the request, or of an image's creation
    Time,
    /// The bytes that changed
    Changed,
    /// The bytes that were stored
    Stored,
}

/// The commands of `cairn policy`.
#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
    /// Set the policy of an image, a folder of images, or all images
    #[command(
        after_help = "The rules select in this order: last, within, hourly, daily, weekly, monthly, yearly. \
                      Hourly and the rules after it keep the newest snapshot of each period, and count only \
                      periods in which no earlier rule keeps a snapshot.\n\n\
                      A policy replaces the one that the images had, as a whole: that of the image, else of \
                      the longest folder, else of /.\n\n\
                      Examples:\n  cairn policy set vm1 --keep-last 2\n  \
                      cairn policy set job42/ --keep-within 7d --keep-weekly 8\n  \
                      cairn policy set / --keep-hourly 24 --keep-daily 7 --keep-yearly 10"
    )]
    Set {
        /// An image, a folder with a slash at its end, or / for all images
        #[arg(value_name = "IMAGE|FOLDER/")]
        scope: Scope,
        #[command(flatten)]
        rules: Rules,
    },
    /// List the policies, or show which one applies to an image or a folder
    #[command(
        after_help = "Examples:\n  cairn policy show\n  cairn policy show job42/node3\n  cairn policy show job42/"
    )]
    Show {
        /// An image, a folder with a slash at its end, or / for all images
        #[arg(value_name = "IMAGE|FOLDER/")]
        scope: Option<Scope>,
    },
    /// Remove a policy
    #[command(
        after_help = "The images have the policy of the next larger folder from then on, or none: then all \
                      snapshots are kept.\n\n\
                      Example:\n  cairn policy rm job42/"
    )]
    Rm {
        /// The image or folder that the policy is set on, or /
        #[arg(value_name = "IMAGE|FOLDER/")]
        scope: Scope,
    },
}

/// The rules of a policy.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Rules {
    /// Keep all snapshots: the default without any policy
    #[arg(long)]
    pub(crate) keep_all: bool,
    /// Keep the newest N snapshots
    #[arg(long, value_name = "N")]
    pub(crate) keep_last: Option<u32>,
    /// Keep snapshots younger than this: a number with a suffix s, m, h, d or w
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    pub(crate) keep_within: Option<u64>,
    /// Keep the newest snapshot of each of N hours
    #[arg(long, value_name = "N")]
    pub(crate) keep_hourly: Option<u32>,
    /// Keep the newest snapshot of each of N days
    #[arg(long, value_name = "N")]
    pub(crate) keep_daily: Option<u32>,
    /// Keep the newest snapshot of each of N weeks, which start on Monday
    #[arg(long, value_name = "N")]
    pub(crate) keep_weekly: Option<u32>,
    /// Keep the newest snapshot of each of N months
    #[arg(long, value_name = "N")]
    pub(crate) keep_monthly: Option<u32>,
    /// Keep the newest snapshot of each of N years
    #[arg(long, value_name = "N")]
    pub(crate) keep_yearly: Option<u32>,
    /// The clock by which hours and days begin: a fixed offset from UTC, such as +01:00. It does not
    /// change in summer
    #[arg(long, value_name = "OFFSET", default_value = "+00:00", value_parser = parse_utc_offset,
          allow_hyphen_values = true)]
    pub(crate) utc_offset: i16,
}
