//! A running guest.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::accel;
use crate::console::{Console, Output};
use crate::lab::Lab;
use crate::monitor::Monitor;
use crate::process::Process;
use crate::qemu::{self, Machine, Version};

const BOOT_LIMIT: Duration = Duration::from_secs(60);
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
const START_LIMIT: Duration = Duration::from_secs(10);

/// A virtual machine: QEMU, its vsock device, and a console that runs commands in it.
#[derive(Debug)]
pub struct Guest {
    name: String,
    console: Console,
    monitor: Monitor,
    begin: Instant,
    boot_time: Duration,
    // QEMU comes before the vsock device that serves it, because fields are dropped in this order.
    qemu: Process,
    _vsock: Option<Process>,
}

impl Guest {
    /// Boots a guest with the disks at the vhost-user sockets `disks`, and waits until it is ready.
    ///
    /// Its agent reaches the backends that were started for a guest with this `name`.
    pub fn boot(lab: &Lab, name: &str, disks: &[&Path]) -> Result<Guest> {
        let bridge = lab.path(&format!("{name}.vsock-device"));
        let vsock = start_vsock(lab, name, &bridge)?;
        let machine = Machine { vsock: Some(bridge), ..machine(lab, name, disks) };
        Guest::start(lab, name, &machine, Some(vsock))?.wait_booted()
    }

    /// Boots a guest like [`Guest::boot`], but without a vsock device, which cannot migrate. The
    /// guest's agent cannot reach a backend.
    pub fn boot_migratable(lab: &Lab, name: &str, disks: &[&Path]) -> Result<Guest> {
        Guest::start(lab, name, &machine(lab, name, disks), None)?.wait_booted()
    }

    /// Starts a QEMU that waits at the socket `channel` for a guest from another QEMU.
    pub(crate) fn start_incoming(
        lab: &Lab,
        name: &str,
        disks: &[&Path],
        channel: &Path,
    ) -> Result<Guest> {
        lab.remove(channel)?;
        let incoming = Some(channel.to_path_buf());
        let machine = Machine { incoming, ..machine(lab, name, disks) };
        let mut guest = Guest::start(lab, name, &machine, None)?;
        guest.qemu.wait_for_listener(channel, START_LIMIT)?;
        Ok(guest)
    }

    /// Starts QEMU without waiting for the guest.
    fn start(lab: &Lab, name: &str, machine: &Machine, vsock: Option<Process>) -> Result<Guest> {
        let tools = lab.tools();
        let accel = accel::choose(tools)?;
        lab.remove(&machine.shell)?;
        lab.remove(&machine.monitor)?;
        let begin = Instant::now();
        let arguments = qemu::arguments(machine, tools, accel, Version::installed()?);
        let log = log(lab, name, "qemu");
        let mut qemu = Process::start("QEMU", qemu::PROGRAM.as_ref(), arguments, log)?;
        qemu.wait_for_listener(&machine.shell, START_LIMIT)?;
        let console = Console::connect(&machine.shell)?;
        qemu.wait_for_listener(&machine.monitor, START_LIMIT)?;
        let monitor = Monitor::connect(&machine.monitor)?;
        let name = name.to_owned();
        Ok(Guest { name, console, monitor, begin, boot_time: Duration::ZERO, qemu, _vsock: vsock })
    }

    fn wait_booted(mut self) -> Result<Guest> {
        self.console
            .wait_ready(BOOT_LIMIT)
            .with_context(|| format!("{} did not boot:\n{}", self.name, self.qemu.log_tail()))?;
        self.boot_time = self.begin.elapsed();
        Ok(self)
    }

    /// The time from the start of QEMU until the guest was ready.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Runs a command, which must succeed, and returns its output.
    pub fn run(&mut self, command: &str) -> Result<String> {
        let output = self.attempt(command)?;
        ensure!(
            output.code == 0,
            "`{command}` ended with {} in {}:\n{}",
            output.code,
            self.name,
            output.text
        );
        Ok(output.text)
    }

    /// Runs a command and returns its exit code and output.
    pub fn attempt(&mut self, command: &str) -> Result<Output> {
        self.console
            .run(command, COMMAND_LIMIT)
            .with_context(|| format!("running `{command}` in {}", self.name))
    }

    /// Resets the machine from inside and waits until it is ready again. QEMU keeps running.
    ///
    /// Data that is not synced is lost, as with a reset button.
    pub fn reboot(&mut self) -> Result<()> {
        self.console.send("reboot -f")?;
        self.console.wait_ready(BOOT_LIMIT).context("after a reboot")
    }

    /// Syncs, and switches the machine off.
    pub fn power_off(mut self) -> Result<()> {
        self.run("sync")?;
        self.console.send("poweroff -f")?;
        self.qemu.wait(START_LIMIT)?;
        Ok(())
    }

    /// Kills QEMU, as if the machine lost its power.
    pub fn kill(mut self) -> Result<()> {
        self.qemu.kill()
    }

    /// Makes QEMU quit, whatever the guest does.
    pub(crate) fn quit(mut self) -> Result<()> {
        self.monitor.execute("quit", json!({}))?;
        let status = self.qemu.wait(START_LIMIT)?;
        ensure!(status.success(), "QEMU ended with {status}:\n{}", self.qemu.log_tail());
        Ok(())
    }

    pub(crate) fn monitor(&mut self) -> &mut Monitor {
        &mut self.monitor
    }

    /// The last lines of QEMU's log.
    pub(crate) fn log_tail(&self) -> String {
        self.qemu.log_tail()
    }
}

fn log(lab: &Lab, name: &str, part: &str) -> PathBuf {
    lab.path(&format!("{name}.{part}.log"))
}

/// A machine with its own files and sockets.
fn machine(lab: &Lab, name: &str, disks: &[&Path]) -> Machine {
    Machine {
        disks: disks.iter().map(|disk| disk.to_path_buf()).collect(),
        vsock: None,
        kernel_log: log(lab, name, "kernel"),
        shell: lab.path(&format!("{name}.shell")),
        monitor: lab.path(&format!("{name}.monitor")),
        incoming: None,
    }
}

/// Starts the process of the vsock device for the guest `name`, with QEMU's socket at `bridge`.
fn start_vsock(lab: &Lab, name: &str, bridge: &Path) -> Result<Process> {
    let host_side = lab.vsock(name);
    lab.remove(bridge)?;
    lab.remove(&host_side)?;
    let vm = format!("guest-cid=4,socket={},uds-path={}", bridge.display(), host_side.display());
    let program = &lab.tools().vsock;
    let log = log(lab, name, "vsock");
    let mut vsock = Process::start("the vsock device", program, ["--vm", &vm], log)?;
    vsock.wait_for_listener(bridge, START_LIMIT)?;
    Ok(vsock)
}
