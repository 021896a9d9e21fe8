//! A link with limited speed: a pair of interfaces, one of them in a network namespace.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The speed of the link in bits per second.
pub(crate) const RATE: f64 = 1e9;

/// The address of the end of this process.
const NEAR: &str = "10.231.77.1";
/// The address of the end in the namespace.
pub(crate) const FAR: &str = "10.231.77.2";

/// A link from this process to a network namespace. Dropping it removes both.
pub(crate) struct Link {
    /// The name of the namespace and of the interface of this process.
    name: String,
}

/// The traffic at the end of this process, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traffic {
    /// Sent bytes, counted by the interface.
    pub(crate) sent: u64,
    /// Received bytes, counted by the interface.
    pub(crate) received: u64,
    /// Sent bytes, counted by the limit: including the headers of all packets.
    pub(crate) limited: u64,
}

impl Link {
    pub(crate) fn new() -> Result<Link> {
        let link = Link { name: format!("cb{}", std::process::id()) };
        let (near, far) = (link.name.clone(), format!("{}p", link.name));
        run(&format!("ip netns add {near}"))?;
        run(&format!("ip link add {near} type veth peer name {far}"))?;
        run(&format!("ip link set {far} netns {near}"))?;
        run(&format!("ip addr add {NEAR}/30 dev {near}"))?;
        run(&format!("ip link set {near} up"))?;
        let inside = format!("ip netns exec {near}");
        run(&format!("{inside} ip addr add {FAR}/30 dev {far}"))?;
        run(&format!("{inside} ip link set {far} up"))?;
        run(&format!("{inside} ip link set lo up"))?;
        let limit = "root tbf rate 1gbit burst 512kb latency 50ms";
        run(&format!("tc qdisc add dev {near} {limit}"))?;
        run(&format!("{inside} tc qdisc add dev {far} {limit}"))?;
        Ok(link)
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.name
    }

    pub(crate) fn traffic(&self) -> Result<Traffic> {
        let count = |what: &str| -> Result<u64> {
            let path = format!("/sys/class/net/{}/statistics/{what}", self.name);
            let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
            text.trim().parse().with_context(|| format!("no number in {path}"))
        };
        let shown = run(&format!("tc -s qdisc show dev {}", self.name))?;
        let mut words = shown.split_whitespace().skip_while(|word| *word != "Sent");
        let limited = words.nth(1).and_then(|word| word.parse().ok());
        let limited =
            limited.with_context(|| format!("no byte count in the output of tc: {shown}"))?;
        Ok(Traffic { sent: count("tx_bytes")?, received: count("rx_bytes")?, limited })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = run(&format!("ip link del {}", self.name));
        let _ = run(&format!("ip netns del {}", self.name));
    }
}

fn run(line: &str) -> Result<String> {
    let mut words = line.split(' ');
    let program = words.next().unwrap_or_default();
    let output = Command::new(program)
        .args(words)
        .output()
        .with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
