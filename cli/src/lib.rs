//! `cairn`, the operator's command line. It parses arguments, calls the repository or a running
//! disk, and prints the result.
//!
//! ```text
//! args ──► images, ls, names, policy, mirrors, import, export, verify, du, diff ─► cairn-store
//!      ├─► serve, supervise, peers, keys ────────────► cairn-store's servers and cluster
//!      └─► control ──► socket of cairn-blk
//! ```

mod args;
mod buffer;
mod collect;
mod control;
mod diff;
mod drain;
mod du;
mod export;
mod failure;
mod image_format;
mod images;
mod import;
mod keys;
mod ls;
mod mirrors;
mod names;
mod output;
mod peers;
mod policy;
mod progress;
mod serve;
mod service;
mod size;
mod sparse;
mod subject;
mod supervise;
mod time;
mod verify;

use std::process::ExitCode;

use cairn_store::Repository;
use cairn_store::maintenance::collection::CollectionOptions;
use cairn_store::net::identity::Access;

pub use crate::args::command_line;
use crate::args::{Catalog, Cli, Command, Mirrors};
use crate::failure::{Doing, Exit, Failure, Outcome};

/// Runs the program with the arguments of this process. Returns its exit code.
pub fn run() -> ExitCode {
    let cli = match Cli::from_process() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let json = cli.style.json;
    match execute(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.report(json);
            failure.exit.into()
        }
    }
}

fn execute(cli: Cli) -> Outcome {
    let style = cli.style;
    let url = || {
        let why = "no repository is named; use --store with dir:PATH, cairn://HOST:PORT or \
                   etcd://HOST:PORT, or set CAIRN_STORE";
        cli.store.as_deref().ok_or_else(|| Failure::new(Exit::Usage, "opening the repository", why))
    };
    let access = Access::new(cli.keys.as_deref(), cli.insecure);
    let open = || {
        let url = url()?;
        Repository::open_anywhere(url, &access).doing(|| format!("opening {url}"))
    };
    let open_or_create = || {
        let url = url()?;
        Repository::open_or_create_anywhere(url, &access).doing(|| format!("opening {url}"))
    };
    match cli.command {
        Command::Create { image, size, options } => {
            // Checked first, so that a wrong size creates no repository.
            let geometry = images::geometry(size, options.chunk_size)?;
            let (repository, note) = images::config(open_or_create()?, &options)?;
            images::create(&repository, &image, geometry, note.as_deref(), style)
        }
        Command::Import { file, image, format, options } => {
            let (repository, note) = images::config(open_or_create()?, &options)?;
            let chunk_size = options.chunk_size;
            let options = import::Options { chunk_size, format, note, style };
            import::import(&repository, &file, &image, &options)
        }
        Command::Ls(args) => ls::ls(&open()?, &args, style),
        Command::Show { snapshot } => images::show(&open()?, &snapshot, style),
        Command::Clone { snapshot, image } => images::clone(&open()?, &snapshot, &image, style),
        Command::Resize { image, size, control } => {
            images::resize(&open()?, &image, size, control.as_deref(), style)
        }
        Command::Export { snapshot, file, base, force, restart } => {
            let options = export::Options { base, force, restart, style };
            export::export(&open()?, &snapshot, &file, &options)
        }
        Command::Rm { name, force } => images::rm(&open()?, &name, force, style),
        Command::Tag { snapshot, label, remove } => {
            names::tag(&open()?, &snapshot, label, remove, style)
        }
        Command::Pin { snapshot } => names::pin(&open()?, &snapshot, true, style),
        Command::Unpin { snapshot } => names::pin(&open()?, &snapshot, false, style),
        Command::Meta { snapshot, set, unset } => {
            names::meta(&open()?, &snapshot, &set, unset, style)
        }
        Command::Policy(command) => policy::run(&open()?, &command, style),
        Command::Prune { scope, dry_run } => policy::prune(&open()?, &scope, dry_run, style),
        Command::Mirrors { action: None | Some(Mirrors::Ls) } => mirrors::list(&open()?, style),
        Command::Mirrors { action: Some(Mirrors::Forget(args)) } => {
            mirrors::forget(&open()?, &args, style)
        }
        Command::Checkpoint { control, label, set_meta, wait, timeout } => {
            let names = (label, &set_meta[..]);
            control::checkpoint(&control.socket, names, wait.into(), timeout, style)
        }
        Command::Status { control } => control::status(&control.socket, style),
        Command::Serve(args) => serve::serve(&args, &access, style),
        Command::Peers { action: None } => peers::list(&open()?, style),
        Command::Peers { action: Some(action) } => peers::change(&open()?, &action, style),
        Command::Repair { rate } => peers::repair(&open()?, rate, style),
        Command::Gc { dry_run, grace, give_up, accept_older_catalog } => {
            let options = CollectionOptions { dry_run, grace, give_up, accept_older_catalog };
            collect::gc(&open()?, &options, style)
        }
        Command::Verify { subjects, sample, seed, repair } => {
            let options = verify::Options { sample: sample.map(|one| (one, seed)), repair };
            verify::verify(&open()?, &subjects, &options, style)
        }
        Command::Du { subjects } => du::du(&open()?, &subjects, style),
        Command::Diff { from, to } => diff::diff(&open()?, &from, &to, style),
        Command::Catalog(Catalog::Rebuild { force }) => peers::rebuild(&open()?, force, style),
        Command::Supervise { options } => supervise::supervise(url()?, &access, &options, style),
        Command::Keys(command) => keys::run(&command, cli.keys.as_deref(), style),
        Command::Stats { control } => control::stats(&control.socket, style),
    }
}

/// Prints the help, the version, or an error in the command line. The command line could not be
/// parsed, so the function searches it for `--json`.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || !std::env::args_os().any(|arg| arg == "--json") {
        error.exit();
    }
    let message = error.to_string();
    let message = message.trim_start_matches("error: ").lines().next().unwrap_or_default();
    Failure::new(Exit::Usage, "parsing the command line", message).report(true);
    Exit::Usage.into()
}
