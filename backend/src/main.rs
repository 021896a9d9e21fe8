//! `cairn-blk`: serves one Cairn disk over vhost-user-blk.

use std::io::IsTerminal;
use std::process::ExitCode;

use cairn_backend::args::{Args, CAPABILITIES, wants_capabilities};
use cairn_backend::start;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    if wants_capabilities(std::env::args_os()) {
        println!("{CAPABILITIES}");
        return ExitCode::SUCCESS;
    }
    let args = Args::from_process();
    let filter = EnvFilter::try_from_env("CAIRN_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    abort_on_panic();
    match start::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cairn-blk: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Aborts the process when a thread panics. The thread has broken an invariant that the guest's
/// data depend on. The hypervisor then sees a closed connection, and not a disk that half works.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}
