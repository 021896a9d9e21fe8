//! `cairn`, the operator's command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    cairn_cli::run()
}
