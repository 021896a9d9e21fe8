//! A running guest.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::accel::Accel;
use crate::console::{Console, Output};
use crate::lab::Lab;
use crate::process::Process;
use crate::qemu::{self, Machine, Version};

const BOOT_LIMIT: Duration = Duration::from_secs(60);
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
const START_LIMIT: Duration = Duration::from_secs(10);

/// A virtual machine: QEMU, its vsock device and a way to run commands in it.
#[derive(Debug)]
pub struct Guest {
    name: String,
    console: Console,
    boot_time: Duration,
    // QEMU first: fields are dropped in this order, and the device serves it.
    qemu: Process,
    _vsock: Process,
}

impl Guest {
    /// Boots a guest whose disks are the vhost-user sockets `disks`, and waits until it is up.
    ///
    /// Its agent reaches the backends that were started for a guest of this `name`.
    pub fn boot(lab: &Lab, name: &str, disks: &[&Path]) -> Result<Guest> {
        let tools = lab.tools();
        let log = |part: &str| lab.path(&format!("{name}.{part}.log"));
        let accel = Accel::choose(tools)?;

        let bridge = lab.path(&format!("{name}.vsock-device"));
        let host_side = lab.vsock(name);
        lab.remove(&bridge)?;
        lab.remove(&host_side)?;
        let vm =
            format!("guest-cid=4,socket={},uds-path={}", bridge.display(), host_side.display());
        let mut vsock =
            Process::start("the vsock device", &tools.vsock, ["--vm", &vm], log("vsock"))?;
        vsock.wait_for_listener(&bridge, START_LIMIT)?;

        let machine = Machine {
            disks: disks.iter().map(|disk| disk.to_path_buf()).collect(),
            vsock: Some(bridge),
            kernel_log: log("kernel"),
            shell: lab.path(&format!("{name}.shell")),
        };
        lab.remove(&machine.shell)?;
        let begin = Instant::now();
        let arguments = qemu::arguments(&machine, tools, accel, Version::installed()?);
        let mut qemu = Process::start("QEMU", qemu::PROGRAM.as_ref(), arguments, log("qemu"))?;
        qemu.wait_for_listener(&machine.shell, START_LIMIT)?;
        let mut console = Console::connect(&machine.shell)?;
        console
            .wait_ready(BOOT_LIMIT)
            .with_context(|| format!("{name} does not boot:\n{}", qemu.log_tail()))?;
        let boot_time = begin.elapsed();
        Ok(Guest { name: name.to_owned(), console, boot_time, qemu, _vsock: vsock })
    }

    /// From the start of QEMU to the first command.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Runs a command, which must succeed, and returns what it printed.
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

    /// Runs a command and returns how it went.
    pub fn attempt(&mut self, command: &str) -> Result<Output> {
        self.console
            .run(command, COMMAND_LIMIT)
            .with_context(|| format!("running `{command}` in {}", self.name))
    }

    /// Resets the machine from inside and waits until it is up again. QEMU stays.
    ///
    /// What is not synced is lost, as with a reset button.
    pub fn reboot(&mut self) -> Result<()> {
        self.console.send("reboot -f")?;
        self.console.wait_ready(BOOT_LIMIT).context("after a reboot")
    }

    /// Switches off in good order.
    pub fn power_off(mut self) -> Result<()> {
        self.run("sync")?;
        self.console.send("poweroff -f")?;
        self.qemu.wait(START_LIMIT)?;
        Ok(())
    }

    /// Pulls the plug.
    pub fn kill(mut self) -> Result<()> {
        self.qemu.kill()
    }
}
