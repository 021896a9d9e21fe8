//! A client of QEMU's monitor protocol.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) struct Qmp {
    reader: BufReader<UnixStream>,
    /// Events that came while an answer was awaited.
    events: VecDeque<Value>,
}

impl Qmp {
    pub(crate) fn connect(path: &Path) -> Result<Qmp> {
        let stream =
            UnixStream::connect(path).with_context(|| format!("connect to {}", path.display()))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut qmp = Qmp { reader: BufReader::new(stream), events: VecDeque::new() };
        qmp.receive().context("read the monitor's greeting")?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.reader.get_mut().write_all(line.as_bytes()).context("write to the monitor")?;
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

    /// The data of the next event of this name. Others before it are dropped.
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
        self.reader.read_line(&mut line).context("read from the monitor")?;
        serde_json::from_str(&line).with_context(|| format!("not a message: {line:?}"))
    }
}
