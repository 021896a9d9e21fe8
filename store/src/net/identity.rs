//! Identity in a cluster: TLS 1.3 with certificates on both sides, from a private authority.
//!
//! | file | is |
//! |---|---|
//! | `ca.pem` | the authority's certificate, on every machine |
//! | `ca.key` | the authority's key, which stays with the operator |
//! | `peer.pem`, `peer.key` | certificate and key of peers |
//! | `catalog.pem`, `catalog.key` | certificate and key of catalogs |
//! | `client.pem`, `client.key` | certificate and key of clients |
//! | `etcd-ca.pem` | the authority of the etcd, if the catalog is in an etcd |
//! | `etcd.pem`, `etcd.key` | certificate and key of a client of that etcd |
//!
//! A certificate names its role as a host name, for example `peer.cairn`. A client that connects to
//! a peer accepts only a peer there. A server checks the role of each client. Addresses are not in
//! the certificates, because machines come and go: a process that has the key of a role has that
//! role.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::batched_reader::BatchedReader;
use crate::error::{Error, Result};
use crate::sys;

/// How long a TLS handshake may take.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// What a process is in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Stores fragments.
    Peer,
    /// Stores documents.
    Catalog,
    /// Uses peers and the catalog.
    Client,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Peer, Role::Catalog, Role::Client];

    /// The role in a word, which is also the name of its key files.
    pub fn name(self) -> &'static str {
        match self {
            Role::Peer => "peer",
            Role::Catalog => "catalog",
            Role::Client => "client",
        }
    }

    /// The host name that certificates of the role have.
    fn host(self) -> String {
        format!("{}.cairn", self.name())
    }
}

/// Creates an authority and a certificate for each role, in a directory that does not exist or is
/// empty.
pub fn init(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|error| Error::io("creating", directory, error))?;
    let mut found = fs::read_dir(directory).map_err(|e| Error::io("reading", directory, e))?;
    if found.next().is_some() {
        let (path, reason) = (directory.to_owned(), "keys are never replaced".into());
        return Err(Error::NotEmpty { path, reason });
    }
    let failed = |error: rcgen::Error| Error::BadKeys(format!("cannot create keys: {error}"));
    let authority = KeyPair::generate().map_err(failed)?;
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.distinguished_name.push(DnType::CommonName, "cairn cluster");
    let certificate = params.self_signed(&authority).map_err(failed)?;
    write(directory, "ca.pem", &certificate.pem(), 0o644)?;
    write(directory, "ca.key", &authority.serialize_pem(), 0o600)?;
    let issuer = Issuer::new(params, authority);
    for role in Role::ALL {
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = CertificateParams::new([role.host()]).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, role.host());
        let certificate = params.signed_by(&key, &issuer).map_err(failed)?;
        write(directory, &format!("{}.pem", role.name()), &certificate.pem(), 0o644)?;
        write(directory, &format!("{}.key", role.name()), &key.serialize_pem(), 0o600)?;
    }
    sys::sync_dir(directory)
}

fn write(directory: &Path, name: &str, text: &str, mode: u32) -> Result<()> {
    let path = directory.join(name);
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(&path);
    file.and_then(|mut file: File| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(|error| Error::io("writing", &path, error))
}

/// The receiving direction of a connection.
pub(crate) type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// The sending direction of a connection.
pub(crate) type Writer = Box<dyn AsyncWrite + Send + Unpin>;

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
                 for plain TCP, which anybody in the network can read and change"
                    .into(),
            )),
        }
    }
}

/// How connections are secured: with TLS, or not at all.
#[derive(Clone)]
pub struct Security(Option<Tls>);

#[derive(Clone)]
struct Tls {
    connector: TlsConnector,
    acceptor: TlsAcceptor,
    etcd: Option<Arc<EtcdKeys>>,
}

/// The keys for connections to an etcd, which has an authority of its own. All in PEM format.
pub(crate) struct EtcdKeys {
    pub(crate) authority: Vec<u8>,
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

impl Security {
    /// No security: plain TCP.
    pub const INSECURE: Security = Security(None);

    /// TLS with the keys of this role and the authority's certificate, both in `directory`.
    pub fn load(directory: &Path, role: Role) -> Result<Security> {
        let read = |name: String| {
            let path = directory.join(name);
            fs::read(&path).map_err(|error| Error::io("reading", &path, error))
        };
        let authority = read("ca.pem".into())?;
        let certificate = read(format!("{}.pem", role.name()))?;
        let key = read(format!("{}.key", role.name()))?;
        let etcd = match fs::exists(directory.join("etcd-ca.pem")) {
            Ok(true) => Some(Arc::new(EtcdKeys {
                authority: read("etcd-ca.pem".into())?,
                certificate: read("etcd.pem".into())?,
                key: read("etcd.key".into())?,
            })),
            _ => None,
        };
        let tls = tls(&authority, &certificate, &key).map_err(|error| {
            let (name, path) = (role.name(), directory.display());
            Error::BadKeys(format!("the {name}'s keys in {path} cannot be used: {error}"))
        })?;
        Ok(Security(Some(Tls { etcd, ..tls })))
    }

    /// The keys for an etcd; `None` for plain connections. Fails if connections are to be secure
    /// and there are no keys for etcd.
    pub(crate) fn etcd(&self) -> Result<Option<Arc<EtcdKeys>>> {
        match &self.0 {
            None => Ok(None),
            Some(Tls { etcd: Some(keys), .. }) => Ok(Some(keys.clone())),
            Some(_) => {
                let reason = "there are no keys for etcd; put etcd-ca.pem, etcd.pem and etcd.key \
                              beside the other keys";
                Err(Error::BadKeys(reason.into()))
            }
        }
    }

    /// Secures a connection to a server, which must have this role.
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        role: Role,
    ) -> io::Result<(Reader, Writer)> {
        let Some(tls) = &self.0 else { return Ok(plain(stream)) };
        let name = ServerName::try_from(role.host()).map_err(io::Error::other)?;
        let stream = timeout(TLS_HANDSHAKE_TIMEOUT, tls.connector.connect(name, stream)).await??;
        let (reader, writer) = tokio::io::split(stream);
        Ok((Box::new(reader), Box::new(writer)))
    }

    /// Secures a connection from a client, which must have one of these roles. Returns the client's
    /// role; `None` on plain TCP.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
        roles: &[Role],
    ) -> io::Result<(Reader, Writer, Option<Role>)> {
        let Some(tls) = &self.0 else {
            let (reader, writer) = plain(stream);
            return Ok((reader, writer, None));
        };
        let stream = timeout(TLS_HANDSHAKE_TIMEOUT, tls.acceptor.accept(stream)).await??;
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let certificate = certificate.map(ParsedCertificate::try_from).transpose();
        let certificate = certificate.map_err(io::Error::other)?;
        let has = |role: &Role| {
            let name = ServerName::try_from(role.host());
            certificate.as_ref().zip(name.ok()).is_some_and(|(certificate, name)| {
                rustls::client::verify_server_name(certificate, &name).is_ok()
            })
        };
        let Some(role) = roles.iter().find(|role| has(role)) else {
            return Err(io::Error::other("the client's certificate is of another role"));
        };
        let (reader, writer) = tokio::io::split(stream);
        Ok((Box::new(reader), Box::new(writer), Some(*role)))
    }
}

fn plain(stream: TcpStream) -> (Reader, Writer) {
    let (reader, writer) = stream.into_split();
    (Box::new(BatchedReader::new(reader)), Box::new(writer))
}

fn tls(
    authority: &[u8],
    certificate: &[u8],
    key: &[u8],
) -> std::result::Result<Tls, Box<dyn std::error::Error>> {
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(authority) {
        roots.add(root?)?;
    }
    let roots = Arc::new(roots);
    let chain =
        CertificateDer::pem_slice_iter(certificate).collect::<std::result::Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(key)?;
    let verifier =
        WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
    let server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain.clone(), key.clone_key())?;
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    Ok(Tls { connector: Arc::new(client).into(), acceptor: Arc::new(server).into(), etcd: None })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::{Role, Security, init};

    fn keys() -> TempDir {
        let dir = TempDir::new().unwrap();
        init(dir.path()).unwrap();
        dir
    }

    /// Whether a client and a server can connect and exchange a byte.
    async fn can_connect(
        client: Security,
        wanted: Role,
        server: Security,
        allowed: &'static [Role],
    ) -> bool {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (mut reader, mut writer, _) = server.accept(stream, allowed).await?;
            let mut byte = [0];
            reader.read_exact(&mut byte).await?;
            writer.write_all(&byte).await?;
            writer.flush().await
        });
        let asked = async {
            let stream = TcpStream::connect(address).await?;
            let (mut reader, mut writer) = client.connect(stream, wanted).await?;
            writer.write_all(&[7]).await?;
            writer.flush().await?;
            let mut byte = [0];
            reader.read_exact(&mut byte).await?;
            std::io::Result::Ok(byte == [7])
        };
        let asked = asked.await.is_ok_and(|answered| answered);
        serving.await.unwrap().is_ok() && asked
    }

    #[tokio::test]
    async fn only_processes_of_one_cluster_connect_each_in_its_role() {
        let (ours, theirs) = (keys(), keys());
        let load = |dir: &TempDir, role| Security::load(dir.path(), role).unwrap();
        let ours = |role| load(&ours, role);
        let theirs = |role| load(&theirs, role);
        const ALL: &[Role] = &Role::ALL;
        assert!(can_connect(ours(Role::Client), Role::Peer, ours(Role::Peer), ALL).await);
        assert!(can_connect(ours(Role::Peer), Role::Catalog, ours(Role::Catalog), ALL).await);
        assert!(
            !can_connect(ours(Role::Client), Role::Peer, ours(Role::Client), ALL).await,
            "not a peer"
        );
        assert!(
            !can_connect(ours(Role::Client), Role::Catalog, ours(Role::Peer), ALL).await,
            "not a catalog"
        );
        assert!(
            !can_connect(theirs(Role::Client), Role::Peer, ours(Role::Peer), ALL).await,
            "another cluster"
        );
        assert!(
            !can_connect(ours(Role::Client), Role::Peer, theirs(Role::Peer), ALL).await,
            "another cluster"
        );
        let only = &[Role::Client];
        assert!(
            !can_connect(ours(Role::Peer), Role::Catalog, ours(Role::Catalog), only).await,
            "a peer"
        );
        assert!(
            !can_connect(Security::INSECURE, Role::Peer, ours(Role::Peer), ALL).await,
            "plain TCP"
        );
        assert!(can_connect(Security::INSECURE, Role::Peer, Security::INSECURE, ALL).await);
    }

    #[test]
    fn keys_are_private_and_never_replaced() {
        let dir = keys();
        for name in ["ca.key", "peer.key", "catalog.key", "client.key"] {
            let mode = dir.path().join(name).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        assert!(init(dir.path()).is_err());
        std::fs::write(dir.path().join("peer.key"), "nonsense").unwrap();
        let error = Security::load(dir.path(), Role::Peer).map(drop).unwrap_err().to_string();
        assert!(error.contains("the peer's keys"), "{error}");
    }
}
