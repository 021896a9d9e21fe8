//! A peer: `cairn serve` with an empty directory.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};
use cairn_store::cluster::{Member, MemberState};
use serde_json::Value;

use super::Server;
use crate::site::{Area, Site};

pub(crate) struct Peer {
    server: Server,
    pub(crate) member: Member,
}

impl Peer {
    /// Starts the peer with this number, in a network namespace if one is named, and with TLS if
    /// there are keys.
    pub(crate) fn start(
        site: &Site,
        area: &Area,
        number: usize,
        (namespace, host): (Option<&str>, &str),
        keys: Option<&Path>,
    ) -> Result<Peer> {
        let mut command = site.cairn_in(namespace);
        command.args([
            "serve",
            "--no-catalog",
            "--json",
            "--listen",
            &format!("{host}:0"),
            "--data",
        ]);
        command.arg(area.path(&format!("peer{number}")));
        match keys {
            Some(keys) => command.arg("--keys").arg(keys),
            None => command.arg("--insecure"),
        };
        let log = area.path(&format!("peer{number}.log"));
        let file =
            std::fs::File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().context("starting a peer")?;
        let out = child.stdout.take().context("the output of a peer is not captured")?;
        let server = Server { child, log };
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).context("reading the output of a peer")?;
        let started: Value = serde_json::from_str(&line)
            .with_context(|| format!("a peer did not start:\n{}", server.log()))?;
        let text = |name: &str| started[name].as_str().unwrap_or_default().to_owned();
        let id = text("peer").parse().context("parsing the id of a peer")?;
        let (address, domain) = (text("listen"), number.to_string());
        let member = Member { id, address, weight: 1, domain, state: MemberState::Up };
        Ok(Peer { server, member })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.pid()
    }
}
