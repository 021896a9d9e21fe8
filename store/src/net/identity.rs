//! Who is who in a cluster: TLS 1.3 with certificates on both sides, from a private authority.
//!
//! ```text
//! ca.pem, ca.key            the authority: ca.key stays with the operator
//! peer.pem, peer.key        for the machines of a role: ca.pem and these two
//! catalog.pem, catalog.key
//! client.pem, client.key
//! etcd-ca.pem, etcd.pem, etcd.key   if the catalog is in an etcd: its authority, and a client's keys there
//! ```
//!
//! A certificate names its role as a host, `peer.cairn` and so on. A client that connects to a peer accepts nobody
//! else there, and a server looks at the name of who connects. Addresses are not in the certificates: machines come and
//! go, and whoever has a role's key has that role.

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

/// How long two sides may take to make themselves known.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// What a process is in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Holds fragments.
    Peer,
    /// Holds the names.
    Catalog,
    /// Uses both.
    Client,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Peer, Role::Catalog, Role::Client];

    /// The role in a word, as its files are called.
    pub fn name(self) -> &'static str {
        match self {
            Role::Peer => "peer",
            Role::Catalog => "catalog",
            Role::Client => "client",
        }
    }

    /// The role as certificates name it.
    fn host(self) -> String {
        format!("{}.cairn", self.name())
    }
}

/// Makes an authority and a certificate for each role, in a directory that is new or empty.
pub fn init(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|error| Error::io("making", directory, error))?;
    let mut found = fs::read_dir(directory).map_err(|e| Error::io("reading", directory, e))?;
    if found.next().is_some() {
        let (path, reason) = (directory.to_owned(), "no key may be replaced".into());
        return Err(Error::NotEmpty { path, reason });
    }
    let failed = |error: rcgen::Error| Error::BadKeys(format!("cannot make keys: {error}"));
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

/// One direction of a connection.
pub(crate) type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// The other.
pub(crate) type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// What a user says about keys.
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    keys: Option<&'a Path>,
    insecure: bool,
}

impl<'a> Access<'a> {
    /// With the keys in a directory, or explicitly with none.
    pub fn new(keys: Option<&'a Path>, insecure: bool) -> Access<'a> {
        Access { keys, insecure }
    }

    /// How a process of this role keeps its connections safe. Nobody is insecure by accident.
    pub fn security(&self, role: Role) -> Result<Security> {
        match self.keys {
            Some(keys) => Security::load(keys, role),
            None if self.insecure => Ok(Security::INSECURE),
            None => Err(Error::BadKeys(
                "no keys are named; use --keys DIR (`cairn keys init` makes them), or --insecure for plain TCP, \
                 which anybody in the network can read and write"
                    .into(),
            )),
        }
    }
}

/// How connections are kept safe.
#[derive(Clone)]
pub struct Security(Option<Tls>);

#[derive(Clone)]
struct Tls {
    connector: TlsConnector,
    acceptor: TlsAcceptor,
    etcd: Option<Arc<EtcdKeys>>,
}

/// What makes connections to an etcd safe. It has an authority of its own.
pub(crate) struct EtcdKeys {
    pub(crate) authority: Vec<u8>,
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

impl Security {
    /// Not at all: plain TCP.
    pub const INSECURE: Security = Security(None);

    /// With the keys of this role in `directory`, and the authority's certificate.
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

    /// The keys for an etcd, if there are any; fails unless plain connections are allowed instead.
    pub(crate) fn etcd(&self) -> Result<Option<Arc<EtcdKeys>>> {
        match &self.0 {
            None => Ok(None),
            Some(Tls { etcd: Some(keys), .. }) => Ok(Some(keys.clone())),
            Some(_) => {
                let why = "there are no keys for etcd; put etcd-ca.pem, etcd.pem and etcd.key beside the others";
                Err(Error::BadKeys(why.into()))
            }
        }
    }

    /// Makes a connection safe, to a server that must have this role.
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        role: Role,
    ) -> io::Result<(Reader, Writer)> {
        let Some(tls) = &self.0 else { return Ok(plain(stream)) };
        let name = ServerName::try_from(role.host()).map_err(io::Error::other)?;
        let stream = timeout(HANDSHAKE, tls.connector.connect(name, stream)).await??;
        let (reader, writer) = tokio::io::split(stream);
        Ok((Box::new(reader), Box::new(writer)))
    }

    /// Makes a connection safe that a client has made, which must have one of these roles. Returns which; nothing
    /// if nobody has to prove one.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
        roles: &[Role],
    ) -> io::Result<(Reader, Writer, Option<Role>)> {
        let Some(tls) = &self.0 else {
            let (reader, writer) = plain(stream);
            return Ok((reader, writer, None));
        };
        let stream = timeout(HANDSHAKE, tls.acceptor.accept(stream)).await??;
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
            return Err(io::Error::other("a certificate of another role"));
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

    /// Whether a client and a server come together, and can talk.
    async fn meet(
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
    async fn only_members_of_a_cluster_come_together_each_in_its_role() {
        let (ours, theirs) = (keys(), keys());
        let load = |dir: &TempDir, role| Security::load(dir.path(), role).unwrap();
        let ours = |role| load(&ours, role);
        let theirs = |role| load(&theirs, role);
        const ALL: &[Role] = &Role::ALL;
        assert!(meet(ours(Role::Client), Role::Peer, ours(Role::Peer), ALL).await);
        assert!(meet(ours(Role::Peer), Role::Catalog, ours(Role::Catalog), ALL).await);
        assert!(!meet(ours(Role::Client), Role::Peer, ours(Role::Client), ALL).await, "no peer");
        assert!(
            !meet(ours(Role::Client), Role::Catalog, ours(Role::Peer), ALL).await,
            "no catalog"
        );
        assert!(!meet(theirs(Role::Client), Role::Peer, ours(Role::Peer), ALL).await, "a stranger");
        assert!(!meet(ours(Role::Client), Role::Peer, theirs(Role::Peer), ALL).await, "a stranger");
        let only = &[Role::Client];
        assert!(!meet(ours(Role::Peer), Role::Catalog, ours(Role::Catalog), only).await, "a peer");
        assert!(!meet(Security::INSECURE, Role::Peer, ours(Role::Peer), ALL).await, "in the open");
        assert!(meet(Security::INSECURE, Role::Peer, Security::INSECURE, ALL).await);
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
