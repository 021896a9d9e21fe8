//! Reads CPU time and memory from /proc, and runs programs to their end.

use std::fs;
use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::sys;

/// The CPU time of a process in user space and in the kernel, including its ended threads.
pub(crate) fn cpu_time(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let ticks = ticks_of(&stat).with_context(|| format!("no CPU time in {path}: {stat}"))?;
    Ok(Duration::from_secs_f64(ticks as f64 / sys::clock_ticks()))
}

/// The sum of `utime` and `stime`, fields 14 and 15. The second field is a name in parentheses,
/// which may contain spaces.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// The number of cores that other programs use, measured for half a second in which this program
/// sleeps.
pub(crate) fn busy_cores() -> Result<f64> {
    let read = || -> Result<u64> {
        let stat = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
        busy_ticks_of(&stat).with_context(|| format!("no CPU time in /proc/stat: {stat}"))
    };
    let before = read()?;
    let time = Duration::from_millis(500);
    std::thread::sleep(time);
    Ok((read()? - before) as f64 / sys::clock_ticks() / time.as_secs_f64())
}

/// The sum of the times in the first line, without the fourth and fifth one, which are idle times.
fn busy_ticks_of(stat: &str) -> Option<u64> {
    let times = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let times: Vec<u64> = times.take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
    let idle = times.get(3)? + times.get(4)?;
    Some(times.iter().sum::<u64>() - idle)
}

/// The memory of a process in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) resident: u64,
    pub(crate) peak: u64,
}

pub(crate) fn memory(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let field = |name: &str| {
        kib_of(&status, name).map(|kib| kib << 10).with_context(|| format!("no {name} in {path}"))
    };
    Ok(Memory { resident: field("VmRSS:")?, peak: field("VmHWM:")? })
}

fn kib_of(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Runs a program, and returns its output if it succeeds.
pub(crate) fn succeed(mut command: Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().context("starting a program")?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let _ = io::stderr().write_all(&output.stderr);
    bail!("{command:?} failed: {}", output.status)
}

#[cfg(test)]
mod tests {
    use super::{busy_ticks_of, kib_of, ticks_of};

    #[test]
    fn cpu_time_is_found_after_a_name_with_parentheses() {
        let stat = "7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20";
        assert_eq!(ticks_of(stat), Some(300));
    }

    #[test]
    fn idle_time_is_not_busy() {
        assert_eq!(busy_ticks_of("cpu  1 2 4 8 16 32 64 128 256 0\n"), Some(231));
    }

    #[test]
    fn memory_is_found_by_its_name() {
        assert_eq!(kib_of("VmHWM:\t  20 kB\nVmRSS:\t  12 kB\n", "VmRSS:"), Some(12));
    }
}
