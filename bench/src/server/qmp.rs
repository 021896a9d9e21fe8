//! A client of QMP, the control protocol of QEMU.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// The longest wait for an answer or an event.
const TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) struct Qmp {
    reader: BufReader<UnixStream>,
    /// Events that arrived before the answer to a command.
    events: VecDeque<Value>,
}

impl Qmp {
    pub(crate) fn connect(path: &Path) -> Result<Qmp> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut qmp = Qmp { reader: BufReader::new(stream), events: VecDeque::new() };
        qmp.receive().context("reading the greeting of the monitor")?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.reader.get_mut().write_all(line.as_bytes()).context("writing to the monitor")?;
        loop {
            let mut answer = self.receive()?;
            if answer.get("event").is_some() {
                self.events.push_back(answer);
            } else if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            } else {
                bail!("{command} was refused: {answer}");
            }
        }
    }

    /// Waits for the next event with this name and returns its data. Drops other events before it.
    pub(crate) fn wait_for(&mut self, name: &str) -> Result<Value> {
        loop {
            let mut event = match self.events.pop_front() {
                Some(event) => event,
                None => self.receive()?,
            };
            if event["event"] == name {
                return Ok(event["data"].take());
            }
        }
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.reader.read_line(&mut line).context("reading from the monitor")?;
        serde_json::from_str(&line).with_context(|| format!("not a message: {line:?}"))
    }
}
