//! A catalog: `cairn serve --catalog` with a directory that may have documents.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde_json::Value;

use super::Server;
use crate::site::{Area, Site};

pub(crate) struct Catalog {
    server: Server,
    pub(crate) address: String,
}

impl Catalog {
    /// Starts the catalog in this directory, on plain TCP.
    pub(crate) fn start(site: &Site, area: &Area, data: &Path) -> Result<Catalog> {
        let mut command = Command::new(&site.cairn);
        command.args(["serve", "--json", "--insecure", "--listen", "127.0.0.1:0", "--catalog"]);
        command.arg("--data").arg(data);
        let log = area.path("catalog.log");
        let file =
            std::fs::File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().context("starting a catalog")?;
        let out = child.stdout.take().context("the output of a catalog is not captured")?;
        let server = Server { child, log };
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).context("reading the output of a catalog")?;
        let started: Value = serde_json::from_str(&line)
            .with_context(|| format!("a catalog did not start:\n{}", server.log()))?;
        let address = started["listen"].as_str().unwrap_or_default().to_owned();
        Ok(Catalog { server, address })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.pid()
    }
}
