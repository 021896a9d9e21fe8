//! `cairn-agent` takes checkpoints of a guest's disks from inside the guest.

use std::process::ExitCode;

fn main() -> ExitCode {
    cairn_agent::program::run()
}
