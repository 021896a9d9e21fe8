//! QEMU's own control channel, QMP: a line of JSON for each command, and one for its answer.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    pub(crate) fn connect(path: &Path) -> Result<Monitor> {
        let stream = UnixStream::connect(path).context("cannot reach QEMU's monitor")?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut monitor = Monitor { stream: BufReader::new(stream) };
        let greeting = monitor.receive()?;
        ensure!(greeting.get("QMP").is_some(), "QEMU greets with {greeting}");
        monitor.execute("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Carries out a command, which must succeed, and returns its answer.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.answer(command, arguments).with_context(|| format!("telling QEMU to `{command}`"))
    }

    fn answer(&mut self, command: &str, arguments: Value) -> Result<Value> {
        // In one piece: QEMU acts when the command is complete, and may be gone before a line's end.
        let message = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream.get_mut().write_all(message.as_bytes())?;
        loop {
            let mut message = self.receive()?;
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            // What is neither an answer nor an error is news that nobody asked for.
            if let Some(error) = message.get("error") {
                bail!("{error}");
            }
        }
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        let length = self.stream.read_line(&mut line)?;
        ensure!(length > 0, "QEMU closed its monitor");
        Ok(serde_json::from_str(&line)?)
    }
}
