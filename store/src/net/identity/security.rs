//! Connections of a process: secured with TLS, or plain TCP.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::tls::{Tls, TlsConfig, read};
use super::{Identity, Role, mac_keys};
use crate::encoding::SealKeys;
use crate::error::{Error, Result};
use crate::net::batched_reader::BatchedReader;

/// How long a TLS handshake may take.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often an open connection looks at the list of revoked certificates.
const REVOCATION_INTERVAL: Duration =
    if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(5) };

/// The receiving direction of a connection.
pub(crate) type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// The sending direction of a connection.
pub(crate) type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// A connection after its TLS handshake, or a plain one.
pub(crate) struct Secured {
    pub(crate) reader: Reader,
    pub(crate) writer: Writer,
    pub(crate) remote: Remote,
}

/// The process at the other end of a connection.
pub(crate) struct Remote(Option<RemoteCertificate>);

struct RemoteCertificate {
    identity: Identity,
    certificate: CertificateDer<'static>,
    tls: Arc<Tls>,
    /// The configuration that has verified the certificate.
    verified_by: Arc<TlsConfig>,
}

impl Remote {
    /// The identity of the process; `None` on plain TCP.
    pub(crate) fn identity(&self) -> Option<Identity> {
        self.0.as_ref().map(|remote| remote.identity)
    }

    /// Returns when the certificate of the process has been revoked. Never returns on plain TCP.
    pub(crate) async fn revoked(mut self) {
        let Some(remote) = &mut self.0 else { return std::future::pending().await };
        loop {
            sleep(REVOCATION_INTERVAL).await;
            // A list that cannot be read stops new connections. Open ones continue.
            let Ok(config) = remote.tls.config() else { continue };
            if !Arc::ptr_eq(&config, &remote.verified_by) {
                if config.verify(&remote.certificate).is_err() {
                    return;
                }
                remote.verified_by = config;
            }
        }
    }
}

/// The user's choice of keys, or of none.
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    keys: Option<&'a Path>,
    insecure: bool,
}

impl<'a> Access<'a> {
    /// Access with the keys in a directory, or explicitly `insecure`.
    pub fn new(keys: Option<&'a Path>, insecure: bool) -> Access<'a> {
        Access { keys, insecure }
    }

    /// How a process of this role secures its connections. Plain TCP is never chosen by default.
    pub fn security(&self, role: Role) -> Result<Security> {
        match self.keys {
            Some(keys) => Security::load(keys, role),
            None if self.insecure => Ok(Security::INSECURE),
            None => Err(Error::BadKeys(
                "no keys are named; use --keys DIR (`cairn keys init` creates keys), or --insecure \
                 for plain TCP, which anybody on the network can read and change"
                    .into(),
            )),
        }
    }
}

/// How connections are secured: with TLS, or not at all.
#[derive(Clone)]
pub struct Security {
    keys: Option<Keys>,
    seals: SealKeys,
}

#[derive(Clone)]
struct Keys {
    tls: Arc<Tls>,
    etcd: Option<Arc<EtcdKeys>>,
}

/// The keys for connections to an etcd, which has an authority of its own. All in PEM format.
pub(crate) struct EtcdKeys {
    pub(crate) authority: Vec<u8>,
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

impl Security {
    /// No security: plain TCP, and no seals.
    pub const INSECURE: Security = Security { keys: None, seals: SealKeys::OFF };

    /// Plain TCP with seals.
    #[cfg(test)]
    pub(crate) fn insecure_with(seals: SealKeys) -> Security {
        Security { keys: None, seals }
    }

    /// TLS with the keys of this role, the authority's certificate and the list of revoked
    /// certificates, all in `directory`. Fails without the list, because a revoked key would be
    /// accepted.
    pub fn load(directory: &Path, role: Role) -> Result<Security> {
        let tls = Arc::new(Tls::load(directory, role)?);
        let etcd = match fs::exists(directory.join("etcd-ca.pem")) {
            Ok(true) => Some(Arc::new(EtcdKeys {
                authority: read(directory, "etcd-ca.pem", role)?,
                certificate: read(directory, "etcd.pem", role)?,
                key: read(directory, "etcd.key", role)?,
            })),
            _ => None,
        };
        let seals = match role.has_mac_key() {
            true => mac_keys::load(directory)?,
            false => SealKeys::new(&[]),
        };
        Ok(Security { keys: Some(Keys { tls, etcd }), seals })
    }

    /// The keys that make and verify seals.
    pub fn seals(&self) -> &SealKeys {
        &self.seals
    }

    /// The identity of this process; `None` without keys.
    pub fn identity(&self) -> Option<Identity> {
        self.keys.as_ref().map(|keys| keys.tls.identity())
    }

    /// The keys for an etcd; `None` for plain connections. Fails if connections are to be secure
    /// and there are no keys for etcd.
    pub(crate) fn etcd(&self) -> Result<Option<Arc<EtcdKeys>>> {
        match &self.keys {
            None => Ok(None),
            Some(Keys { etcd: Some(keys), .. }) => Ok(Some(keys.clone())),
            Some(_) => {
                let reason = "there are no keys for etcd; put etcd-ca.pem, etcd.pem and etcd.key \
                              beside the other keys";
                Err(Error::BadKeys(reason.into()))
            }
        }
    }

    /// Secures a connection to a server, which must have this role.
    pub(crate) async fn connect(&self, stream: TcpStream, role: Role) -> io::Result<Secured> {
        let Some(Keys { tls, .. }) = &self.keys else { return Ok(plain(stream)) };
        let config = tls.config()?;
        let name = ServerName::try_from(role.host()).map_err(io::Error::other)?;
        let connecting = config.connector.connect(name, stream);
        let stream = timeout(TLS_HANDSHAKE_TIMEOUT, connecting).await??;
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).cloned();
        secured(stream, certificate, &[role], tls, config)
    }

    /// Secures a connection from a client, which must have one of these roles.
    pub(crate) async fn accept(&self, stream: TcpStream, roles: &[Role]) -> io::Result<Secured> {
        let Some(Keys { tls, .. }) = &self.keys else { return Ok(plain(stream)) };
        let config = tls.config()?;
        let stream = timeout(TLS_HANDSHAKE_TIMEOUT, config.acceptor.accept(stream)).await??;
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).cloned();
        secured(stream, certificate, roles, tls, config)
    }
}

fn plain(stream: TcpStream) -> Secured {
    let (reader, writer) = stream.into_split();
    let (reader, writer) = (Box::new(BatchedReader::new(reader)), Box::new(writer));
    Secured { reader, writer, remote: Remote(None) }
}

/// A connection after its handshake. Fails unless the other end has one of these roles.
fn secured(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    certificate: Option<CertificateDer<'static>>,
    roles: &[Role],
    tls: &Arc<Tls>,
    verified_by: Arc<TlsConfig>,
) -> io::Result<Secured> {
    let certificate = certificate.ok_or_else(|| io::Error::other("there is no certificate"))?;
    let identity = Identity::of(&certificate).filter(|one| roles.contains(&one.role()));
    let Some(identity) = identity else {
        return Err(io::Error::other("the certificate of the other end is of another role"));
    };
    let remote = RemoteCertificate { identity, certificate, tls: tls.clone(), verified_by };
    let (reader, writer) = tokio::io::split(stream);
    let (reader, writer) = (Box::new(reader), Box::new(writer));
    Ok(Secured { reader, writer, remote: Remote(Some(remote)) })
}
