//! The authority of a cluster. It signs certificates and revokes them.
//!
//! Its directory stays with the operator, because `ca.key` is in it. `certificates.json` has an
//! entry for each certificate. The entry is durable before the certificate exists, so every
//! certificate that anybody can have can be revoked.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};
use serde::{Deserialize, Serialize};

use super::{Identity, REVOKED, Role, mac_keys};
use crate::clock::now;
use crate::encoding::SealKeyId;
use crate::error::{Error, Result};
use crate::id::{CertificateSerial, PeerId};
use crate::sys;

const AUTHORITY: &str = "ca.pem";
const AUTHORITY_KEY: &str = "ca.key";
const REGISTER: &str = "certificates.json";
const FORMAT: &str = "cairn-certificates";
const VERSION: u64 = 1;

/// The mode of a file with a private key.
const PRIVATE: u32 = 0o600;
/// The mode of other files.
const PUBLIC: u32 = 0o644;

/// All certificates of an authority.
#[derive(Serialize, Deserialize)]
struct Register {
    format: String,
    version: u64,
    certificates: Vec<Entry>,
}

/// A certificate.
#[derive(Serialize, Deserialize)]
struct Entry {
    serial: String,
    role: Role,
    /// The id of the peer, if the role is peer.
    peer: Option<String>,
    /// When it was signed: seconds since 1970.
    signed: u64,
    /// When it was revoked: seconds since 1970.
    revoked: Option<u64>,
}

/// Creates an authority, and the keys of catalog, supervisor and client, in a directory that does
/// not exist or is empty.
pub fn init(directory: &Path) -> Result<()> {
    make_empty(directory)?;
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = authority_params().self_signed(&key).map_err(failed)?;
    create(directory, AUTHORITY, &certificate.pem(), PUBLIC)?;
    create(directory, AUTHORITY_KEY, &key.serialize_pem(), PRIVATE)?;
    let certificates = Vec::new();
    let register = Register { format: FORMAT.into(), version: VERSION, certificates };
    replace(directory, REGISTER, &register.to_text())?;
    let mut authority = Authority::open(directory)?;
    for identity in [Identity::Catalog, Identity::Supervisor, Identity::Client] {
        authority.sign(identity, directory)?;
    }
    authority.write_list()?;
    mac_keys::create(directory)?;
    sys::sync_dir(directory)
}

/// Adds a key for seals to the authority's directory: the new one makes seals, the old ones still
/// verify. Returns the id of the new key, and how many there were before.
pub fn rotate_mac_key(keys: &Path) -> Result<(SealKeyId, usize)> {
    let _authority = Authority::open(keys)?;
    mac_keys::rotate(keys)
}

/// Removes the keys for seals from the authority's directory that only verify. Returns the id of the
/// key that is left, and how many were removed.
pub fn retire_mac_keys(keys: &Path) -> Result<(SealKeyId, usize)> {
    let _authority = Authority::open(keys)?;
    mac_keys::retire(keys)
}

/// Signs a certificate for a new peer. Returns the peer's id. See [`sign`].
pub fn sign_new_peer(keys: &Path, out: &Path) -> Result<PeerId> {
    let id = sys::random().map_err(|error| Error::io("reading random bytes for", out, error))?;
    let id = PeerId::from_bytes(id);
    sign(keys, Identity::Peer(id), out).map(|()| id)
}

/// Creates a key for this identity, signed by the authority in the directory `keys`. The directory
/// `out`, which does not exist or is empty, gets everything that a process of this identity needs.
pub fn sign(keys: &Path, identity: Identity, out: &Path) -> Result<()> {
    let mut authority = Authority::open(keys)?;
    make_empty(out)?;
    let certificate = keys.join(AUTHORITY);
    let text = fs::read_to_string(&certificate);
    let text = text.map_err(|error| Error::io("reading", &certificate, error))?;
    create(out, AUTHORITY, &text, PUBLIC)?;
    create(out, REVOKED, &authority.write_list()?, PUBLIC)?;
    if identity.role().has_mac_key() {
        mac_keys::copy(keys, out)?;
    }
    authority.sign(identity, out)?;
    sys::sync_dir(out)
}

/// Revokes all certificates of a role or of a peer. `name` is `catalog`, `supervisor`, `client`, or
/// the beginning of a peer's id. Returns how many certificates are revoked, and the list of revoked
/// certificates, which has to be copied to all machines.
pub fn revoke(keys: &Path, name: &str) -> Result<(usize, PathBuf)> {
    let mut authority = Authority::open(keys)?;
    let count = authority.revoke(name)?;
    // This also repairs a list that an interrupted command has left behind.
    authority.write_list()?;
    if count == 0 {
        return Err(Error::BadArgument(format!(
            "no certificate in use belongs to '{name}'; name catalog, supervisor, client, or the \
             beginning of a peer's id. {} lists all certificates",
            keys.join(REGISTER).display()
        )));
    }
    Ok((count, keys.join(REVOKED)))
}

/// An authority that is locked by this process.
struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    register: Register,
    _lock: File,
}

impl Authority {
    fn open(directory: &Path) -> Result<Authority> {
        let path = directory.join(AUTHORITY_KEY);
        let io_error = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::BadKeys(format!(
                "there is no {}; name the directory that `cairn keys init` has created",
                path.display()
            )),
            _ => Error::BadKeys(format!("reading {}: {error}", path.display())),
        };
        let lock = File::open(&path).map_err(io_error)?;
        lock.lock().map_err(io_error)?;
        let key = fs::read_to_string(&path).map_err(io_error)?;
        let key = KeyPair::from_pem(&key)
            .map_err(|error| Error::BadKeys(format!("{}: {error}", path.display())))?;
        let issuer = Issuer::new(authority_params(), key);
        let register = Register::read(&directory.join(REGISTER))?;
        Ok(Authority { directory: directory.to_owned(), issuer, register, _lock: lock })
    }

    /// Creates a key and a certificate in the directory `out`.
    fn sign(&mut self, identity: Identity, out: &Path) -> Result<()> {
        let mut serial: [u8; 16] =
            sys::random().map_err(|error| Error::io("reading random bytes for", out, error))?;
        // A serial number is positive, and without leading zeros all have the same length.
        serial[0] = serial[0] & 0x7f | 0x40;
        let role = identity.role();
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = CertificateParams::new(identity.hosts()).map_err(failed)?;
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        params.distinguished_name.push(DnType::CommonName, identity.hosts().swap_remove(0));
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        self.register.certificates.push(Entry {
            serial: CertificateSerial::from_bytes(serial).to_string(),
            role,
            peer: identity.peer().map(|id| id.to_string()),
            signed: now(),
            revoked: None,
        });
        replace(&self.directory, REGISTER, &self.register.to_text())?;
        create(out, &format!("{}.pem", role.name()), &certificate.pem(), PUBLIC)?;
        create(out, &format!("{}.key", role.name()), &key.serialize_pem(), PRIVATE)
    }

    /// Marks certificates as revoked. Returns how many.
    fn revoke(&mut self, name: &str) -> Result<usize> {
        let is_named = |entry: &Entry| match &entry.peer {
            Some(peer) => !name.is_empty() && peer.starts_with(name),
            None => entry.role.name() == name,
        };
        let named = self.register.certificates.iter().filter(|entry| is_named(entry));
        let mut peers: Vec<_> = named.filter_map(|entry| entry.peer.as_ref()).collect();
        peers.sort();
        peers.dedup();
        if peers.len() > 1 {
            let what =
                format!("the ids of several peers begin with '{name}'; write more of the id");
            return Err(Error::BadArgument(what));
        }
        let mut count = 0;
        let time = now();
        for entry in &mut self.register.certificates {
            if is_named(entry) && entry.revoked.is_none() {
                entry.revoked = Some(time);
                count += 1;
            }
        }
        replace(&self.directory, REGISTER, &self.register.to_text()).map(|()| count)
    }

    /// Writes the list of revoked certificates, and returns it.
    fn write_list(&self) -> Result<String> {
        let time = |seconds| date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
        let mut revoked_certs = Vec::new();
        for entry in &self.register.certificates {
            let Some(revoked) = entry.revoked else { continue };
            let serial: CertificateSerial = entry.serial.parse()?;
            revoked_certs.push(RevokedCertParams {
                serial_number: SerialNumber::from_slice(serial.as_bytes()),
                revocation_time: time(revoked),
                reason_code: None,
                invalidity_date: None,
            });
        }
        let now = now();
        let params = CertificateRevocationListParams {
            this_update: time(now),
            // Nothing checks this: a list counts until it is replaced.
            next_update: date_time_ymd(4096, 1, 1),
            crl_number: SerialNumber::from(now),
            issuing_distribution_point: None,
            revoked_certs,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(&self.issuer).and_then(|list| list.pem()).map_err(failed)?;
        replace(&self.directory, REVOKED, &list).map(|()| list)
    }
}

impl Register {
    fn read(path: &Path) -> Result<Register> {
        let text = fs::read(path).map_err(|error| Error::io("reading", path, error))?;
        let corrupt = |reason: String| Error::corrupt(path.display().to_string(), reason);
        let register: Register =
            serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
        if register.format != FORMAT {
            return Err(corrupt("it is not a list of certificates".into()));
        }
        Error::check_format(path, register.version, VERSION)?;
        Ok(register)
    }

    fn to_text(&self) -> String {
        serde_json::to_string_pretty(self).expect("a register is plain data") + "\n"
    }
}

/// The properties of the authority's certificate. They are the same for each cluster, so that the
/// key alone is enough to sign.
fn authority_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, "cairn cluster");
    params
}

fn failed(error: rcgen::Error) -> Error {
    Error::BadKeys(format!("cannot create keys: {error}"))
}

/// Creates a directory. Fails if it exists and is not empty.
fn make_empty(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|error| Error::io("creating", directory, error))?;
    let mut found = fs::read_dir(directory).map_err(|e| Error::io("reading", directory, e))?;
    match found.next() {
        None => Ok(()),
        Some(_) => {
            let (path, reason) = (directory.to_owned(), "keys are never replaced".into());
            Err(Error::NotEmpty { path, reason })
        }
    }
}

/// Writes a file that does not exist.
fn create(directory: &Path, name: &str, text: &str, mode: u32) -> Result<()> {
    let path = directory.join(name);
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(&path);
    file.and_then(|mut file: File| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(|error| Error::io("writing", &path, error))
}

/// Replaces a file atomically.
fn replace(directory: &Path, name: &str, text: &str) -> Result<()> {
    let (path, new) = (directory.join(name), directory.join(format!("{name}.new")));
    let written = File::create(&new)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&new, &path));
    written.map_err(|error| Error::io("writing", &path, error))?;
    sys::sync_dir(directory)
}
