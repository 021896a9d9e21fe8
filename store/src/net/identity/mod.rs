//! Identity in a cluster: TLS 1.3 with certificates on both sides, from a private authority.
//!
//! | file | is | made by |
//! |---|---|---|
//! | `ca.pem` | the authority's certificate, on every machine | `cairn keys init` |
//! | `ca.key` | the authority's key, which stays with the operator | `cairn keys init` |
//! | `certificates.json` | the certificates that the authority signed, and which are revoked | all `cairn keys` |
//! | `revoked.crl.pem` | the list of revoked certificates, on every machine | all `cairn keys` |
//! | `catalog`, `supervisor` and `client`, each `.pem` and `.key` | certificate and key of the role | `cairn keys init` |
//! | `peer.pem`, `peer.key` | certificate and key of one peer | `cairn keys sign` |
//! | `mac.key` | secrets for seals, of clients and supervisors | `cairn keys init` |
//! | `etcd-ca.pem` | the authority of the etcd, if the catalog is in an etcd | the operator |
//! | `etcd.pem`, `etcd.key` | certificate and key of a client of that etcd | the operator |
//!
//! A certificate names its role as a host name, for example `client.cairn`. The certificate of a
//! peer also names the peer's id: `ID.peer.cairn`. A client accepts only the member that it wants to
//! reach. A server checks the identity of each client. Addresses are not in the certificates,
//! because machines move: a process that has the key of an identity has that identity.
//!
//! | module | responsibility |
//! |---|---|
//! | `mod` | roles and identities, and their names in certificates |
//! | `authority` | creates, signs and revokes certificates |
//! | `mac_keys` | the secrets that seals are made with |
//! | `tls` | the TLS configuration of a process, which follows the list of revoked certificates |
//! | `security` | secures connections, and says which process is at the other end |

mod authority;
mod mac_keys;
mod security;
#[cfg(test)]
mod tests;
mod tls;

use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use webpki::EndEntityCert;

pub use authority::{init, retire_mac_keys, revoke, rotate_mac_key, sign, sign_new_peer};
pub use security::{Access, Security};
pub(crate) use security::{Reader, Remote, Secured, Writer};

use crate::id::PeerId;

/// The file with the list of revoked certificates.
const REVOKED: &str = "revoked.crl.pem";

/// What a process is in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Stores documents.
    Catalog,
    /// Repairs, and does all other scheduled work.
    Supervisor,
    /// Uses peers and the catalog.
    Client,
    /// Stores fragments.
    Peer,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 4] = [Role::Catalog, Role::Supervisor, Role::Client, Role::Peer];

    /// The role in a word, which is also the name of its key files.
    pub fn name(self) -> &'static str {
        match self {
            Role::Catalog => "catalog",
            Role::Supervisor => "supervisor",
            Role::Client => "client",
            Role::Peer => "peer",
        }
    }

    /// Whether a process of the role makes and verifies seals. A peer does not, so that it cannot
    /// forge what it stores.
    fn has_mac_key(self) -> bool {
        matches!(self, Role::Client | Role::Supervisor)
    }

    /// The host name that certificates of the role have.
    fn host(self) -> String {
        format!("{}.cairn", self.name())
    }
}

/// The identity that a certificate gives to a process: its role and, for a peer, its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A catalog.
    Catalog,
    /// A supervisor.
    Supervisor,
    /// A client.
    Client,
    /// The peer with this id.
    Peer(PeerId),
}

impl Identity {
    /// The role.
    pub fn role(self) -> Role {
        match self {
            Identity::Catalog => Role::Catalog,
            Identity::Supervisor => Role::Supervisor,
            Identity::Client => Role::Client,
            Identity::Peer(_) => Role::Peer,
        }
    }

    /// The id, if this is a peer.
    pub fn peer(self) -> Option<PeerId> {
        match self {
            Identity::Peer(id) => Some(id),
            _ => None,
        }
    }

    /// The host names in the certificate.
    fn hosts(self) -> Vec<String> {
        let role = self.role().host();
        match self.peer() {
            Some(id) => vec![format!("{id}.{role}"), role],
            None => vec![role],
        }
    }

    /// The identity that a certificate names. A certificate with other or further names has none.
    fn of(certificate: &CertificateDer<'_>) -> Option<Identity> {
        let certificate = EndEntityCert::try_from(certificate).ok()?;
        let names: Vec<&str> = certificate.valid_dns_names().collect();
        let id = names.iter().find_map(|name| name.strip_suffix(".peer.cairn")?.parse().ok());
        let possible = [Identity::Catalog, Identity::Supervisor, Identity::Client];
        let mut possible = possible.into_iter().chain(id.map(Identity::Peer));
        possible.find(|one| one.hosts() == names)
    }
}
