//! Peers as processes, and clients that store data on them.

pub(crate) mod copy;
pub(crate) mod data;
pub(crate) mod link;
pub(crate) mod persist;

use std::ffi::OsStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cairn_store::cluster::{Cluster, ClusterBlobs, Connection, Member};
use cairn_store::net::identity::{Role, Security};

use crate::proc;
use crate::server::peer::Peer;
use crate::site::{Area, Site};
use link::Link;

/// The number of peers of a measurement.
pub(crate) const PEERS: usize = 8;

/// Peers that are initially empty.
pub(crate) struct Testbed {
    peers: Vec<Peer>,
    security: Security,
    // Dropped after the servers.
    _area: Area,
}

impl Testbed {
    /// Starts [`PEERS`] peers on loopback or behind a link, with or without TLS.
    pub(crate) fn start(site: &Site, link: Option<&Link>, tls: bool) -> Result<Testbed> {
        Testbed::with_peers(PEERS, site, link, tls)
    }

    /// Starts `count` peers on loopback or behind a link, with or without TLS.
    pub(crate) fn with_peers(
        count: usize,
        site: &Site,
        link: Option<&Link>,
        tls: bool,
    ) -> Result<Testbed> {
        let area = site.area()?;
        let keys = area.path("keys");
        let keys = tls.then_some(&*keys);
        if let Some(keys) = keys {
            make_keys(site, &["init".as_ref(), keys.as_os_str()])?;
        }
        let at = link.map_or((None, "127.0.0.1"), |link| (Some(link.namespace()), link::FAR));
        let peers = (0..count).map(|number| {
            let own = area.path(&format!("peer{number}-keys"));
            if let Some(keys) = keys {
                let sign = ["sign".as_ref(), "--keys".as_ref(), keys.as_os_str(), own.as_os_str()];
                make_keys(site, &sign)?;
            }
            Peer::start(site, &area, number, at, keys.map(|_| &*own))
        });
        let peers = peers.collect::<Result<_>>()?;
        let security = match keys {
            Some(keys) => {
                Security::load(keys, Role::Client).context("reading the keys of the client")?
            }
            None => Security::INSECURE,
        };
        Ok(Testbed { peers, security, _area: area })
    }

    /// A client with its own connections.
    pub(crate) fn client(&self) -> Result<ClusterBlobs> {
        let members = self.peers.iter().map(|peer| peer.member.clone()).collect();
        let cluster = Cluster::new(members, self.security.clone());
        ClusterBlobs::new(cluster).context("starting a client")
    }

    /// Stops a peer permanently. Returns it and the remaining peers.
    pub(crate) fn lose(&mut self) -> (Member, Vec<Member>) {
        let lost = self.peers.remove(0).member.clone();
        (lost, self.peers.iter().map(|peer| peer.member.clone()).collect())
    }

    /// The security of connections.
    pub(crate) fn security(&self) -> &Security {
        &self.security
    }

    /// The CPU time of this process, and that of all peers.
    pub(crate) fn cpu_time(&self) -> Result<(Duration, Duration)> {
        let peers: Result<Vec<_>> =
            self.peers.iter().map(|peer| proc::cpu_time(peer.pid())).collect();
        Ok((proc::cpu_time(std::process::id())?, peers?.iter().sum()))
    }

    /// Bytes stored on the peers.
    pub(crate) fn used(&self, client: &ClusterBlobs) -> Result<u64> {
        let mut used = 0;
        for peer in &self.peers {
            let usage = async {
                Connection::open(&peer.member.address, &self.security).await?.usage().await
            };
            used += client.runtime().block_on(usage).context("asking a peer for its usage")?.used;
        }
        Ok(used)
    }
}

/// Runs `cairn keys` with these arguments.
fn make_keys(site: &Site, arguments: &[&OsStr]) -> Result<()> {
    let made = std::process::Command::new(&site.cairn)
        .arg("keys")
        .args(arguments)
        .output()
        .context("starting cairn")?;
    match made.status.success() {
        true => Ok(()),
        false => bail!("cairn keys failed: {}", String::from_utf8_lossy(&made.stderr)),
    }
}
