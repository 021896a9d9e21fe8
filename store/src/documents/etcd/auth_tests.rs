//! A real etcd with TLS and with users.

use std::fs;
use std::path::Path;
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Permission, TlsOptions, UserAddOptions};
use rcgen::{CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::EtcdDocuments;
use super::tests::{Process, count, try_increment};
use crate::cluster::membership::{Announcement, PeerStats, leave, peers, send_heartbeat};
use crate::documents::{Change, Documents, ETCD, Query};
use crate::id::PeerId;
use crate::net::identity::{Identity, Role, Security, init, sign, sign_new_peer};

/// Makes a certificate with this common name for `hosts`. Returns its parameters, its key and its
/// text.
fn certificate(
    name: &str,
    hosts: &[&str],
    issuer: Option<&Issuer<'_, KeyPair>>,
) -> (CertificateParams, KeyPair, String) {
    let key = KeyPair::generate().unwrap();
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let mut params = CertificateParams::new(hosts).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    let text = match issuer {
        Some(issuer) => params.signed_by(&key, issuer).unwrap().pem(),
        None => {
            params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.self_signed(&key).unwrap().pem()
        }
    };
    (params, key, text)
}

/// The authority of an etcd with TLS.
struct EtcdAuthority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl EtcdAuthority {
    fn new() -> EtcdAuthority {
        let (params, key, certificate) = certificate("etcd", &[], None);
        EtcdAuthority { issuer: Issuer::new(params, key), certificate }
    }

    /// Creates `NAME.pem` and `NAME.key` in a directory, and the authority's certificate.
    fn sign(&self, directory: &Path, name: &str, common_name: &str, hosts: &[&str]) {
        let (_, key, text) = certificate(common_name, hosts, Some(&self.issuer));
        fs::write(directory.join("etcd-ca.pem"), &self.certificate).unwrap();
        fs::write(directory.join(format!("{name}.pem")), text).unwrap();
        fs::write(directory.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }

    /// Starts an etcd that accepts only clients with certificates. Its keys are in `directory`.
    fn start_etcd(&self, directory: &Path) -> Process {
        self.sign(directory, "server", "server", &["127.0.0.1", "localhost"]);
        let file = |name: &str| directory.join(name).display().to_string();
        let more = [
            ("--cert-file", file("server.pem")),
            ("--key-file", file("server.key")),
            ("--trusted-ca-file", file("etcd-ca.pem")),
        ];
        let mut more: Vec<String> =
            more.into_iter().flat_map(|(name, file)| [name.into(), file]).collect();
        more.push("--client-cert-auth".into());
        Process::start_with(&more)
    }
}

#[test]
fn an_etcd_with_keys_accepts_only_clients_with_keys() {
    let keys = TempDir::new().unwrap();
    let directory = keys.path().join("keys");
    init(&directory).unwrap();
    let without = Security::load(&directory, Role::Client).unwrap();
    let authority = EtcdAuthority::new();
    authority.sign(&directory, "etcd", "client", &["client"]);
    let process = authority.start_etcd(keys.path());
    let security = Security::load(&directory, Role::Client).unwrap();
    let documents = crate::documents::open(&process.address(), &security).unwrap();
    assert!(try_increment(&*documents));
    assert_eq!(count(&*documents), 1);
    let error = EtcdDocuments::new(&process.address(), &without).map(drop).unwrap_err().to_string();
    assert!(error.contains("etcd-ca.pem"), "{error}");
    let retry_timeout = Duration::from_secs(2);
    let plain =
        EtcdDocuments::with_retry_timeout(&process.address(), &Security::INSECURE, retry_timeout)
            .unwrap();
    assert!(plain.read(&[]).is_err());
}

/// Runs the `etcdctl` commands of `docs/security.md` for a peer with this id, as the user root.
async fn run_documented_commands(address: &str, root: ConnectOptions, id: &PeerId) {
    let address = address.strip_prefix(ETCD).unwrap();
    let client = Client::connect([address], Some(root)).await.unwrap();
    let mut auth = client.auth_client();
    let text = include_str!("../../../../docs/security.md").replace("$ID", &id.to_string());
    let mut count = 0;
    for command in text.lines().filter_map(|line| line.strip_prefix("etcdctl ")) {
        let words: Vec<&str> = command.split(' ').collect();
        match words[..] {
            ["role", "add", role] => drop(auth.role_add(role).await.unwrap()),
            ["role", "grant-permission", role, "--prefix", "read", key] => {
                let permission = Permission::read(key).with_prefix();
                auth.role_grant_permission(role, permission).await.unwrap();
            }
            ["role", "grant-permission", role, "--prefix", "readwrite", key] => {
                let permission = Permission::read_write(key).with_prefix();
                auth.role_grant_permission(role, permission).await.unwrap();
            }
            ["role", "grant-permission", role, "readwrite", key] => {
                let permission = Permission::read_write(key);
                auth.role_grant_permission(role, permission).await.unwrap();
            }
            ["user", "add", user, "--no-password"] => {
                let options = UserAddOptions::new().with_no_pwd();
                auth.user_add(user, "", Some(options)).await.unwrap();
            }
            ["user", "grant-role", user, role] => {
                auth.user_grant_role(user, role).await.unwrap();
            }
            ["auth", "enable"] => drop(auth.auth_enable().await.unwrap()),
            _ => panic!("unknown: etcdctl {command}"),
        }
        count += 1;
    }
    assert_eq!(count, 30, "commands in the documentation");
}

#[test]
fn with_the_users_of_the_documentation_a_peer_changes_only_its_own_documents() {
    let dir = TempDir::new().unwrap();
    let of = |name: &str| dir.path().join(name);
    init(&of("client")).unwrap();
    let id = sign_new_peer(&of("client"), &of("peer")).unwrap();
    sign(&of("client"), Identity::Supervisor, &of("supervisor")).unwrap();
    let authority = EtcdAuthority::new();
    for name in ["root", "server"] {
        fs::create_dir(of(name)).unwrap();
    }
    let process = authority.start_etcd(&of("server"));
    let peer_name = format!("cairn-peer-{id}");
    let names = [
        ("root", "root"),
        ("client", "cairn-client"),
        ("supervisor", "cairn-supervisor"),
        ("peer", &peer_name),
    ];
    for (directory, common_name) in names {
        authority.sign(&of(directory), "etcd", common_name, &["client"]);
    }
    let read = |name: &str| fs::read(of("root").join(name)).unwrap();
    let tls = TlsOptions::new()
        .ca_certificate(Certificate::from_pem(read("etcd-ca.pem")))
        .identity(etcd_client::Identity::from_pem(read("etcd.pem"), read("etcd.key")));
    let root = ConnectOptions::new().with_tls(tls);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(run_documented_commands(&process.address(), root, &id));

    let open = |directory: &str, role| {
        let security = Security::load(&of(directory), role).unwrap();
        let retry_timeout = Duration::from_secs(60);
        EtcdDocuments::with_retry_timeout(&process.address(), &security, retry_timeout).unwrap()
    };
    let client = open("client", Role::Client);
    assert!(client.commit(&Change::default().put("images/vm1", &1)).unwrap());
    // A peer in good order.
    let peer = open("peer", Role::Peer);
    let announcement = Announcement { id, address: "10.0.0.1:7500".into(), domain: "rack".into() };
    let stats = PeerStats {
        capacity: 9,
        used: 0,
        reserved: 0,
        fragments: 0,
        load: 0,
        bad: 0,
        scrubbed: None,
    };
    for _ in 0..2 {
        send_heartbeat(&peer, &announcement, &stats, 1).unwrap();
    }
    assert_eq!(peers(&client).unwrap().0.len(), 1);
    leave(&peer, &id).unwrap();
    // A hostile one, and a supervisor.
    let supervisor = open("supervisor", Role::Supervisor);
    let change = |key: &str| Change::default().put(key, &1);
    let may_change = |documents: &EtcdDocuments, key: &str| documents.commit(&change(key)).is_ok();
    let own = format!("members/{id}");
    for (key, by_peer, by_supervisor) in [
        (&*own, true, true),
        (&format!("{own}/more"), false, true),
        ("members/00", false, true),
        ("alive/00", false, false),
        ("suspects/00", false, true),
        ("leader/supervisor", false, true),
        ("health/losses", false, true),
        ("snapshots/vm1/1", false, true),
        ("drafts/vm1", false, true),
        ("images/vm1", false, true),
        ("labels/vm1/x", false, true),
        ("collection", false, true),
        ("collections", false, true),
        ("commits/x", false, true),
        ("policies/vm1", false, false),
        ("readers/x", false, false),
        ("leases/vm1", false, false),
    ] {
        assert_eq!(may_change(&peer, key), by_peer, "{key}");
        assert_eq!(may_change(&supervisor, key), by_supervisor, "{key}");
        assert!(may_change(&client, key), "{key}");
    }
    for query in [Query::prefix("images/"), Query::prefix("members/"), Query::key("images/vm1")] {
        assert!(peer.read(std::slice::from_ref(&query)).is_err(), "{query:?}");
        supervisor.read(&[query]).unwrap();
    }
    let relying = Change { relies_on: vec![("images/vm1".into(), 1)], ..change(&own) };
    assert!(peer.commit(&relying).is_err(), "this would tell a version");
}
