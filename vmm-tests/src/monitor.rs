//! A client of QMP, the control protocol of QEMU: one line of JSON for each command and each
//! answer.

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
        ensure!(greeting.get("QMP").is_some(), "QEMU's greeting is {greeting}");
        monitor.execute("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Executes a command, which must succeed, and returns its answer.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.answer(command, arguments).with_context(|| format!("executing `{command}` in QEMU"))
    }

    fn answer(&mut self, command: &str, arguments: Value) -> Result<Value> {
        // One write: QEMU acts as soon as the JSON is complete, and may end before it reads a
        // separate line end.
        let message = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream.get_mut().write_all(message.as_bytes())?;
        loop {
            let mut message = self.receive()?;
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            // A message that is neither an answer nor an error is an event.
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
