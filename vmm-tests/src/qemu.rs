//! The command line of QEMU for a test guest.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::tools::Tools;

pub(crate) const PROGRAM: &str = "qemu-system-x86_64";

/// The size of the guest's memory: 512 MiB and two pages. It must not be a multiple of 64 pages.
/// For such a size, QEMU before 9.0 uses a faster code path for migration that ignores the state
/// cached by emulated processors, so an emulated guest would lose changes.
const MEMORY: &str = "524296K";

/// How QEMU executes the guest's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accel {
    Kvm,
    Tcg,
}

impl Accel {
    fn qemu_option(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg,thread=multi",
        }
    }
}

/// The properties in which guests differ.
#[derive(Debug, Default)]
pub(crate) struct Machine {
    /// The vhost-user-blk sockets of the guest's disks `vda`, `vdb`, …, in this order.
    pub(crate) disks: Vec<PathBuf>,
    /// The vhost-user socket of the vsock device.
    pub(crate) vsock: Option<PathBuf>,
    /// The file for the kernel's messages.
    pub(crate) kernel_log: PathBuf,
    /// The socket of the command channel.
    pub(crate) shell: PathBuf,
    /// The socket of QEMU's monitor.
    pub(crate) monitor: PathBuf,
    /// The socket at which QEMU waits for a guest that migrates from another QEMU, instead of
    /// booting one.
    pub(crate) incoming: Option<PathBuf>,
}

/// The arguments of QEMU for `machine`.
pub(crate) fn arguments(
    machine: &Machine,
    tools: &Tools,
    accel: Accel,
    version: Version,
) -> Vec<String> {
    let mut line = Vec::new();
    let mut option = |name: &str, value: String| line.extend([format!("-{name}"), value]);
    let show = |path: &Path| path.display().to_string();

    option("accel", accel.qemu_option().to_owned());
    option("cpu", "max".to_owned());
    option("smp", "2".to_owned());
    // The backend reads and writes the guest's memory directly.
    option("object", format!("memory-backend-memfd,id=mem,size={MEMORY},share=on"));
    option("machine", "q35,memory-backend=mem".to_owned());
    option("display", "none".to_owned());
    option("monitor", "none".to_owned());
    option("qmp", format!("unix:{},server=on,wait=off", show(&machine.monitor)));
    option("net", "none".to_owned());
    option("kernel", show(&tools.kernel));
    option("initrd", show(&tools.initramfs));
    // If the guest's kernel cleared memory before a disk read fills it, lost changes would not be
    // detected.
    option("append", "console=ttyS0 quiet panic=-1 init_on_alloc=0".to_owned());
    option("serial", format!("file:{}", show(&machine.kernel_log)));
    option("chardev", format!("socket,id=shell,path={},server=on,wait=off", show(&machine.shell)));
    option("device", "virtio-serial-pci".to_owned());
    option("device", "virtconsole,chardev=shell".to_owned());
    for (index, socket) in machine.disks.iter().enumerate() {
        // Without this option the guest's disk hangs forever when the backend restarts.
        let reconnect = version.reconnect_option();
        let socket = show(socket);
        option("chardev", format!("socket,id=disk{index},path={socket},{reconnect}"));
        option("device", format!("vhost-user-blk-pci,chardev=disk{index},num-queues=2"));
    }
    if let Some(socket) = &machine.vsock {
        option("chardev", format!("socket,id=vsock,path={}", show(socket)));
        option("device", "vhost-user-vsock-pci,chardev=vsock".to_owned());
    }
    if let Some(channel) = &machine.incoming {
        option("incoming", format!("unix:{}", show(channel)));
    }
    line
}

/// The major and minor version of QEMU, on which its command line depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(u32, u32);

impl Version {
    pub(crate) fn installed() -> Result<Version> {
        let output = Command::new(PROGRAM)
            .arg("--version")
            .output()
            .context("cannot run QEMU: `make setup` installs it")?;
        let text = String::from_utf8_lossy(&output.stdout);
        Version::parse(&text).with_context(|| format!("no version of QEMU in {text:?}"))
    }

    fn parse(text: &str) -> Option<Version> {
        let mut numbers = text.split("version ").nth(1)?.split(|c: char| !c.is_ascii_digit());
        Some(Version(numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    /// The option that makes QEMU reconnect after a second. Version 9.2 has another name and unit
    /// for it.
    fn reconnect_option(self) -> &'static str {
        if self >= Version(9, 2) { "reconnect-ms=1000" } else { "reconnect=1" }
    }
}

#[cfg(test)]
mod tests {
    use super::Version;

    #[test]
    fn the_option_to_reconnect_depends_on_the_version() {
        let debian = Version::parse("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)\n").unwrap();
        assert_eq!(debian.reconnect_option(), "reconnect=1");
        let recent = Version::parse("QEMU emulator version 10.0.2\n").unwrap();
        assert_eq!(recent.reconnect_option(), "reconnect-ms=1000");
    }
}
