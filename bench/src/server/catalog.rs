//! A catalog with peers: `cairn serve --catalog` with a directory that may have documents, and
//! `cairn serve --catalog ADDRESS` with empty ones.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Server;
use crate::proc::succeed;
use crate::site::{Area, Site};

pub(crate) struct Catalog {
    server: Server,
    _peers: Vec<Server>,
    pub(crate) address: String,
}

/// Where servers listen: a network namespace, if one is named, and an address.
pub(crate) type Host<'a> = (Option<&'a str>, &'a str);

/// How long the peers may take to join.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// This machine.
pub(crate) const LOOPBACK: Host<'static> = (None, "127.0.0.1");

impl Catalog {
    /// Starts the catalog in this directory and its peer, on plain TCP.
    pub(crate) fn start(site: &Site, area: &Area, data: &Path) -> Result<Catalog> {
        Catalog::with_peers(1, site, area, data, LOOPBACK)
    }

    /// Starts the catalog in this directory and its peers, on plain TCP.
    pub(crate) fn with_peers(
        count: usize,
        site: &Site,
        area: &Area,
        data: &Path,
        host: Host<'_>,
    ) -> Result<Catalog> {
        let name = data.file_name().and_then(|name| name.to_str()).unwrap_or("catalog");
        let log = area.path(&format!("{name}.log"));
        let (server, address) = serve(site, &log, data, None, host)?;
        let peers = (0..count).map(|number| {
            let peer = format!("{name}-peer{number}");
            let log = area.path(&format!("{peer}.log"));
            Ok(serve(site, &log, &area.path(&peer), Some(&address), host)?.0)
        });
        let _peers = peers.collect::<Result<_>>()?;
        Ok(Catalog { server, _peers, address })
    }

    /// Waits until this many peers have joined.
    pub(crate) fn wait_for_peers(&self, site: &Site, count: usize) -> Result<()> {
        let begin = Instant::now();
        while self.cairn(site, &["peers", "--json"])?.matches("\"state\":\"up\"").count() < count {
            ensure!(begin.elapsed() < JOIN_LIMIT, "the peers do not join the catalog");
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Runs `cairn` with the catalog as its repository. Returns its output.
    pub(crate) fn cairn(&self, site: &Site, words: &[&str]) -> Result<String> {
        self.cairn_in(site, None, words)
    }

    /// The same in a network namespace, if one is named.
    pub(crate) fn cairn_in(
        &self,
        site: &Site,
        namespace: Option<&str>,
        words: &[&str],
    ) -> Result<String> {
        let mut command = site.cairn_in(namespace);
        command.args(["--store", &format!("cairn://{}", self.address), "--insecure"]).args(words);
        succeed(command)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.pid()
    }
}

/// Starts a catalog, or a peer of the catalog at an address. Returns the address where it listens.
fn serve(
    site: &Site,
    log: &Path,
    data: &Path,
    catalog: Option<&str>,
    (namespace, host): Host<'_>,
) -> Result<(Server, String)> {
    let mut command = site.cairn_in(namespace);
    command.args(["serve", "--json", "--insecure", "--listen", &format!("{host}:0")]);
    command.arg("--data").arg(data).arg("--catalog").args(catalog);
    let file = std::fs::File::create(log).with_context(|| format!("creating {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
    let mut child = command.spawn().context("starting a server")?;
    let out = child.stdout.take().context("the output of a server is not captured")?;
    let server = Server { child, log: log.into() };
    let mut line = String::new();
    BufReader::new(out).read_line(&mut line).context("reading the output of a server")?;
    let started: Value = serde_json::from_str(&line)
        .with_context(|| format!("a server did not start:\n{}", server.log()))?;
    let address = started["listen"].as_str().unwrap_or_default().to_owned();
    Ok((server, address))
}
