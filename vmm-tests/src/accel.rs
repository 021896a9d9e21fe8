//! Chooses between hardware virtualisation and emulation.

use std::env;
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::console::Console;
use crate::process::Process;
use crate::qemu::{self, Accel, Machine, Version};
use crate::tools::Tools;

/// How long a guest of the probe may take to boot. With KVM it takes a second or two.
const PROBE_LIMIT: Duration = Duration::from_secs(8);

/// Chooses what works on this machine: the value of `CAIRN_VMM_ACCEL` (`kvm` or `tcg`), or the
/// result of a probe.
///
/// The existence of `/dev/kvm` does not prove that a guest runs on it: with nested virtualisation
/// it may hang at its first instruction. So the probe boots a guest. The result is stored beside
/// the kernel.
pub(crate) fn choose(tools: &Tools) -> Result<Accel> {
    static CHOSEN: OnceLock<Accel> = OnceLock::new();
    if let Some(accel) = CHOSEN.get() {
        return Ok(*accel);
    }
    let accel = match env::var("CAIRN_VMM_ACCEL").as_deref() {
        Ok("kvm") => Accel::Kvm,
        Ok("tcg") => Accel::Tcg,
        Ok(other) => bail!("CAIRN_VMM_ACCEL is {other:?}, expected kvm or tcg"),
        Err(_) => cached_or_probed(tools)?,
    };
    Ok(*CHOSEN.get_or_init(|| accel))
}

fn cached_or_probed(tools: &Tools) -> Result<Accel> {
    let cache = tools.kernel.with_file_name("accel");
    match fs::read_to_string(&cache).as_deref() {
        Ok("kvm") => return Ok(Accel::Kvm),
        Ok("tcg") => return Ok(Accel::Tcg),
        _ => {}
    }
    let usable = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let (accel, name) =
        if usable && boots(tools)? { (Accel::Kvm, "kvm") } else { (Accel::Tcg, "tcg") };
    fs::write(cache, name)?;
    Ok(accel)
}

/// Returns whether a guest boots with KVM.
fn boots(tools: &Tools) -> Result<bool> {
    let directory = tempfile::tempdir()?;
    let file = |name: &str| -> PathBuf { directory.path().join(name) };
    let machine = Machine {
        kernel_log: file("kernel"),
        shell: file("shell"),
        monitor: file("monitor"),
        ..Machine::default()
    };
    let arguments = qemu::arguments(&machine, tools, Accel::Kvm, Version::installed()?);
    let mut process = Process::start("the probe", qemu::PROGRAM.as_ref(), arguments, file("log"))?;
    let up = process
        .wait_for_listener(&machine.shell, PROBE_LIMIT)
        .and_then(|()| Console::connect(&machine.shell))
        .and_then(|mut console| {
            console.wait_ready(PROBE_LIMIT)?;
            console.run("true", PROBE_LIMIT)
        });
    Ok(up.is_ok())
}
