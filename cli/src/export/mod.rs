//! `export`: writes a snapshot to a raw disk file, a block device, or standard output. Every chunk is
//! verified against its id.
//!
//! | file | holds |
//! |---|---|
//! | `part` | a new file, which gets its name when it is complete; an interrupted export continues |
//! | `update` | a file that holds another snapshot, and gets only what differs |
//! | `device` | a block device |
//! | `stream` | standard output |
//! | `jobs` | what is to be written |
//! | `copy` | many reads in flight, and how far the copy is |
//! | `disk` | writing data with direct I/O, and zeros as holes |
//! | `record` | the record of an export that has not ended |

mod copy;
mod device;
mod disk;
mod jobs;
mod part;
mod record;
mod stream;
mod update;

use std::borrow::Cow;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use cairn_store::{ReaderLease, Repository, Snapshot, SnapshotRef};

use crate::args::Style;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::images::print_name;

pub(crate) struct Options {
    /// A snapshot that the file holds.
    pub(crate) base: Option<SnapshotRef>,
    pub(crate) force: bool,
    pub(crate) restart: bool,
    pub(crate) style: Style,
}

/// The name of standard output.
const STREAM: &str = "-";

/// The kinds of targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Stream,
    File,
    Device,
}

pub(crate) fn export(
    repository: &Repository,
    name: &SnapshotRef,
    path: &Path,
    options: &Options,
) -> Outcome {
    let doing = || format!("exporting {name} to {}", path.display());
    // The name of a link leads to the file, which gets the content.
    let path = match path == Path::new(STREAM) {
        true => Cow::Borrowed(path),
        false => fs::canonicalize(path).map_or(Cow::Borrowed(path), Cow::Owned),
    };
    let target = check_target(&path, options, doing)?;
    let (snapshot, lease) = begin(repository, name, &doing)?;
    let base = options.base.as_ref().map(|base| begin(repository, base, &doing)).transpose()?;
    let exported = match (target, &base) {
        (Target::Stream, _) => stream::export(repository, &snapshot, &doing),
        (_, Some((base, _))) => {
            update::update(repository, [base, &snapshot], &path, options, &doing)
        }
        (Target::File, None) => part::export(repository, &snapshot, &path, options, &doing),
        (Target::Device, None) => device::export(repository, &snapshot, &path, &doing),
    };
    let leases = base.as_ref().map(|(_, lease)| lease).into_iter().chain([&lease]);
    let is_protected = leases.into_iter().all(ReaderLease::is_held);
    exported.map_err(|failure| match is_protected {
        true => failure,
        false => failure.and(
            "this process was stopped, or had no contact to the catalog, for so long that its lease \
             on the snapshot has expired: if the snapshot was removed, its content may be gone",
        ),
    })?;
    // What was written is right even if the lease has expired: each chunk has the hash that is its
    // name.
    match options.style.json && target != Target::Stream {
        true => print_name(&snapshot, options.style),
        false => Ok(()),
    }
}

/// Finds a snapshot, and keeps its content readable until the lease is dropped, even if the snapshot
/// is removed.
fn begin(
    repository: &Repository,
    name: &SnapshotRef,
    doing: &impl Fn() -> String,
) -> Outcome<(Snapshot, ReaderLease)> {
    let snapshot = repository.catalog().resolve(name).doing(doing)?;
    snapshot.require_content().doing(doing)?;
    let lease = repository.begin_reading(&snapshot, &doing()).doing(doing)?;
    Ok((snapshot, lease))
}

/// Refuses a target that cannot work, before hours of copying.
fn check_target(path: &Path, options: &Options, doing: impl Fn() -> String) -> Outcome<Target> {
    let refuse = |exit: Exit, why: &str| Err(Failure::new(exit, doing(), why));
    if path == Path::new(STREAM) {
        return match options.base {
            Some(_) => refuse(Exit::Usage, "--base is for a file that holds the base, not for -"),
            None => Ok(Target::Stream),
        };
    }
    let found = fs::metadata(path).map(|metadata| metadata.file_type());
    if found.is_err() && path.is_symlink() {
        return refuse(
            Exit::Conflict,
            "it is a link to a file that does not exist; remove the link",
        );
    }
    match (found, &options.base) {
        (Ok(kind), Some(_)) if kind.is_file() => Ok(Target::File),
        (Ok(kind), Some(_)) if kind.is_block_device() => Ok(Target::Device),
        (Ok(kind), None) if kind.is_block_device() && !options.force => {
            refuse(Exit::Conflict, "it is a block device; use --force to replace what is on it")
        }
        (Ok(kind), None) if kind.is_block_device() => Ok(Target::Device),
        (Ok(kind), None) if kind.is_file() && !options.force => {
            refuse(Exit::Conflict, "the file exists; use --force to replace it")
        }
        (Ok(kind), None) if kind.is_file() => Ok(Target::File),
        (Ok(_), _) => refuse(
            Exit::Usage,
            "it is neither a regular file nor a block device; export to - and redirect standard \
             output to it",
        ),
        (Err(_), Some(_)) => refuse(
            Exit::NotFound,
            "the file does not exist; leave out --base to create it with the whole disk",
        ),
        (Err(_), None) => Ok(Target::File),
    }
}
