//! Runs commands in a guest over a virtio console.
//!
//! The other end is `guest/init`, which describes the protocol. Each answer begins with the id of
//! its command and its length, so the output of a command cannot be mistaken for an answer.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// The result of a command in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The exit code.
    pub code: i32,
    /// Standard output and standard error, in the order of writing.
    pub text: String,
}

#[derive(Debug)]
pub(crate) struct Console {
    stream: UnixStream,
    received: Vec<u8>,
    commands: u64,
}

impl Console {
    pub(crate) fn connect(path: &Path) -> Result<Console> {
        let stream = UnixStream::connect(path).context("cannot reach the guest's console")?;
        Ok(Console { stream, received: Vec::new(), commands: 0 })
    }

    /// Waits until the guest has booted.
    pub(crate) fn wait_ready(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while self.line(deadline)? != "READY" {}
        Ok(())
    }

    pub(crate) fn run(&mut self, command: &str, limit: Duration) -> Result<Output> {
        let id = self.send(command)?;
        let deadline = Instant::now() + limit;
        let answer = self.line(deadline)?;
        let Some((code, length)) = parse(&answer, id) else {
            bail!("the guest sent {answer:?} instead of an answer; has it rebooted?");
        };
        let text = self.take(length, deadline)?;
        Ok(Output { code, text: String::from_utf8_lossy(&text).into_owned() })
    }

    /// Sends a command without waiting for an answer, which may never come. Returns its id.
    pub(crate) fn send(&mut self, command: &str) -> Result<u64> {
        ensure!(!command.contains('\n'), "a command is one line: {command:?}");
        self.commands += 1;
        writeln!(self.stream, "{} {command}", self.commands)?;
        Ok(self.commands)
    }

    fn line(&mut self, deadline: Instant) -> Result<String> {
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            self.receive(deadline)?;
        }
    }

    fn take(&mut self, length: usize, deadline: Instant) -> Result<Vec<u8>> {
        while self.received.len() < length {
            self.receive(deadline)?;
        }
        Ok(self.received.drain(..length).collect())
    }

    fn receive(&mut self, deadline: Instant) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "the guest did not answer in time");
        self.stream.set_read_timeout(Some(left))?;
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => bail!("QEMU closed the guest's console"),
            Ok(count) => self.received.extend_from_slice(&buffer[..count]),
            // The caller checks the deadline.
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return Err(e).context("cannot read the guest's console"),
        }
        Ok(())
    }
}

/// Parses the exit code and the length from `ID CODE BYTES`, if the answer is for the command `id`.
fn parse(line: &str, id: u64) -> Option<(i32, usize)> {
    let mut words = line.split(' ');
    let (first, code, length) = (words.next()?, words.next()?, words.next()?);
    let is_ours = first.parse() == Ok(id) && words.next().is_none();
    if is_ours { Some((code.parse().ok()?, length.parse().ok()?)) } else { None }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn an_answer_to_another_command_is_refused() {
        assert_eq!(parse("3 0 17", 3), Some((0, 17)));
        assert_eq!(parse("2 0 17", 3), None);
        assert_eq!(parse("READY", 3), None);
        assert_eq!(parse("3 0 17 8", 3), None);
    }
}
