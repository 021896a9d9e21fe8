//! The TLS configuration of a process: its certificate, its authority, and the list of revoked
//! certificates.
//!
//! The list may change while the process runs. Each new connection looks at the file, and a changed
//! list makes a new configuration. A list that cannot be read lets no connection through, because
//! it is unknown which certificates are revoked. For the same reason, a process without a list does
//! not start. A list that is removed later stays in force.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{error, fs};

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{Identity, REVOKED, Role};
use crate::error::{Error, Result};

type AnyError = Box<dyn error::Error + Send + Sync>;

/// The keys of a process, and the configuration that follows from them.
pub(super) struct Tls {
    identity: Identity,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    /// The file with the list of revoked certificates.
    list: PathBuf,
    current: Mutex<Current>,
}

struct Current {
    /// The version of the list that the configuration has.
    version: FileVersion,
    config: Arc<TlsConfig>,
}

/// Tells two versions of a file apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

/// A configuration. It does not change.
pub(super) struct TlsConfig {
    pub(super) connector: TlsConnector,
    pub(super) acceptor: TlsAcceptor,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl TlsConfig {
    /// Fails unless the authority signed the certificate and has not revoked it.
    pub(super) fn verify(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        // Certificates of Cairn are not restricted to clients or servers.
        self.verifier.verify_client_cert(certificate, &[], UnixTime::now()).map(drop)
    }
}

impl Tls {
    /// Reads the keys of this role from a directory.
    pub(super) fn load(directory: &Path, role: Role) -> Result<Tls> {
        let name = role.name();
        let authority = read(directory, "ca.pem", role)?;
        let certificate = read(directory, &format!("{name}.pem"), role)?;
        let key = read(directory, &format!("{name}.key"), role)?;
        let list = directory.join(REVOKED);
        let version = version_at_start(&list)?;
        let tls = Tls::new(&authority, &certificate, &key, role, list, version);
        tls.map_err(|error| {
            let path = directory.display();
            Error::BadKeys(format!("the {name}'s keys in {path} cannot be used: {error}"))
        })
    }

    fn new(
        authority: &[u8],
        certificate: &[u8],
        key: &[u8],
        role: Role,
        list: PathBuf,
        version: FileVersion,
    ) -> Result<Tls, AnyError> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(authority) {
            roots.add(root?)?;
        }
        let roots = Arc::new(roots);
        let chain = CertificateDer::pem_slice_iter(certificate).collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_slice(key)?;
        let own = chain.first().ok_or("there is no certificate")?;
        let identity = Identity::of(own).ok_or("the certificate names no role of Cairn")?;
        if identity.role() != role {
            let role = identity.role().name();
            return Err(format!("the certificate is that of a {role}").into());
        }
        let config = Arc::new(config(&roots, &chain, &key, &list)?);
        config.verify(own)?;
        let current = Mutex::new(Current { version, config });
        Ok(Tls { identity, roots, chain, key, list, current })
    }

    /// The identity of this process.
    pub(super) fn identity(&self) -> Identity {
        self.identity
    }

    /// The configuration with the list of revoked certificates as it is at this moment.
    pub(super) fn config(&self) -> io::Result<Arc<TlsConfig>> {
        let found = version_of(&self.list)?;
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(version) = found.filter(|found| *found != current.version) {
            let made = config(&self.roots, &self.chain, &self.key, &self.list);
            let config = made.map_err(|error| {
                let path = self.list.display();
                tracing::error!(%error, "{path} cannot be used, so no connection is made");
                io::Error::other(format!("{path} cannot be used: {error}; copy it again"))
            })?;
            tracing::info!("the list of revoked certificates has changed");
            *current = Current { version, config: Arc::new(config) };
        }
        Ok(current.config.clone())
    }
}

/// Reads a file of the keys.
pub(super) fn read(directory: &Path, name: &str, role: Role) -> Result<Vec<u8>> {
    let path = directory.join(name);
    fs::read(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let command = if role == Role::Peer { "sign" } else { "init" };
            let (path, role) = (path.display(), role.name());
            Error::BadKeys(format!(
                "there is no {path}; `cairn keys {command}` creates the keys of a {role}"
            ))
        }
        _ => Error::BadKeys(format!("reading {}: {error}", path.display())),
    })
}

/// The version of the list of revoked certificates, which a process must have to start.
fn version_at_start(list: &Path) -> Result<FileVersion> {
    let path = list.display();
    match version_of(list) {
        Ok(Some(version)) => Ok(version),
        Ok(None) => Err(Error::BadKeys(format!(
            "there is no {path}, so it is unknown which keys are revoked; copy it from the \
             directory that `cairn keys init` has created"
        ))),
        Err(error) => Err(Error::BadKeys(format!("reading {path}: {error}"))),
    }
}

/// The version of a file; `None` if there is no file.
fn version_of(path: &Path) -> io::Result<Option<FileVersion>> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some(FileVersion {
            inode: found.ino(),
            len: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A configuration with the list of revoked certificates in this file.
fn config(
    roots: &Arc<RootCertStore>,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
    list: &Path,
) -> Result<TlsConfig, AnyError> {
    let provider = Arc::new(ring::default_provider());
    let lists = revoked(list)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .with_crls(lists.clone())
        .build()?;
    let server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier.clone())
        .with_single_cert(chain.to_vec(), key.clone_key())?;
    let of_servers = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
        .with_crls(lists)
        .build()?;
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_webpki_verifier(of_servers)
        .with_client_auth_cert(chain.to_vec(), key.clone_key())?;
    Ok(TlsConfig {
        connector: Arc::new(client).into(),
        acceptor: Arc::new(server).into(),
        verifier,
    })
}

/// The lists in a file. A file without one is an error: it may be half written.
fn revoked(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, AnyError> {
    let text = fs::read(path)?;
    let lists =
        CertificateRevocationListDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>()?;
    if lists.is_empty() {
        return Err("it has no list of revoked certificates".into());
    }
    Ok(lists)
}
