//! Generates the manual pages and the shell completions of all programs.
//!
//! ```text
//! command lines of cairn, cairn-blk, cairn-agent ─┬─► page ──► OUT/man/NAME.1
//!                      help text ──► sections ────┘
//!                                                 └─► OUT/bash, OUT/zsh, OUT/fish
//! ```
//!
//! It is a program of its own, so that the programs that are installed do not contain a generator.

mod page;
mod sections;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Command, Parser};
use clap_complete::Shell;

/// Generates the manual pages and the shell completions of cairn, cairn-blk and cairn-agent.
#[derive(Debug, Parser)]
#[command(name = "docgen", version, after_help = "Example:\n  docgen target/docs")]
struct Args {
    /// The directory for the results: the subdirectories man, bash, zsh and fish are replaced
    out: PathBuf,
}

fn main() -> ExitCode {
    let out = Args::parse().out;
    match generate(&out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("docgen: writing the pages and completions to {}: {error}", out.display());
            ExitCode::FAILURE
        }
    }
}

/// The command lines of all programs.
fn programs() -> [Command; 3] {
    [
        cairn_cli::command_line(),
        cairn_backend::args::command_line(),
        cairn_agent::program::command_line(),
    ]
}

/// Writes all pages and completions. Files of an earlier run are removed first, because a page of a
/// command that does not exist any more must not be installed.
fn generate(out: &Path) -> io::Result<()> {
    let directory = |name: &str| {
        let path = out.join(name);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir_all(&path)?,
        }
        Ok(path)
    };
    let pages = directory("man")?;
    for program in programs() {
        for page in page::of_program(program) {
            fs::write(pages.join(page.file), page.text)?;
        }
    }
    for (shell, name) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
        let directory = directory(name)?;
        for mut program in programs() {
            let name = program.get_name().to_owned();
            clap_complete::generate_to(shell, &mut program, name, &directory)?;
        }
    }
    // bash-completion looks for a file with the name of the program.
    for program in programs() {
        let name = program.get_name();
        fs::rename(out.join("bash").join(format!("{name}.bash")), out.join("bash").join(name))?;
    }
    Ok(())
}
