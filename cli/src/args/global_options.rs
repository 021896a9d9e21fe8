//! The options that every command accepts: which help shows them, and empty variables.

use clap::Command;
use clap::builder::Resettable;

/// The ids of the global options that a command and its subcommands do not use. The command accepts
/// them, so that a wrapper can pass them to every command. Its help does not show them.
const UNUSED: [(&str, &[&str]); 19] = [
    ("create", &["bytes"]),
    ("clone", &["bytes"]),
    ("export", &["bytes"]),
    ("rm", &["bytes"]),
    ("tag", &["bytes"]),
    ("pin", &["bytes"]),
    ("unpin", &["bytes"]),
    ("meta", &["bytes"]),
    ("policy", &["bytes"]),
    ("prune", &["bytes"]),
    ("mirrors forget", &["bytes"]),
    ("checkpoint", &["store", "keys", "insecure", "bytes"]),
    ("status", &["store", "keys", "insecure"]),
    ("stats", &["store", "keys", "insecure"]),
    ("serve", &["store", "bytes"]),
    ("supervise", &["bytes"]),
    ("keys", &["store", "insecure", "bytes"]),
    // It names its directory as an argument.
    ("keys init", &["keys"]),
    ("catalog", &["bytes"]),
];

/// Hides the global options that a command does not use from its help.
pub(super) fn without_unused_options(mut command: Command) -> Command {
    let options: Vec<_> = command.get_arguments().cloned().collect();
    for (path, unused) in UNUSED {
        // A subcommand that has an argument of this id does not inherit the global one.
        let hidden = options
            .iter()
            .filter(|option| unused.contains(&option.get_id().as_str()))
            .map(|option| option.clone().hide(true));
        command = change_subcommand(command, path, |subcommand| subcommand.args(hidden));
    }
    command
}

/// Changes the subcommand at the end of this path of names.
fn change_subcommand(
    command: Command,
    path: &str,
    change: impl FnOnce(Command) -> Command,
) -> Command {
    match path.split_once(' ') {
        Some((name, rest)) => {
            command.mut_subcommand(name, |subcommand| change_subcommand(subcommand, rest, change))
        }
        None => command.mut_subcommand(path, change),
    }
}

/// Ignores the environment variables of these options that are set and empty: a file for systemd may
/// set a variable to nothing.
pub(super) fn without_empty_variables(mut command: Command, options: &[&'static str]) -> Command {
    for option in options {
        command = command.mut_arg(option, |arg| {
            let variable = arg.get_env().and_then(std::env::var_os);
            match variable.is_some_and(|value| value.is_empty()) {
                true => arg.env(Resettable::Reset),
                false => arg,
            }
        });
    }
    command
}
