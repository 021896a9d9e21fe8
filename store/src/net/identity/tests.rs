use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::{Identity, Role, Secured, Security, init, revoke, sign, sign_new_peer};
use crate::error::Error;
use crate::id::PeerId;

/// An authority in the directory `keys`, with room for the keys of peers beside it.
struct Authority {
    dir: TempDir,
}

impl Authority {
    fn new() -> Authority {
        let authority = Authority { dir: TempDir::new().unwrap() };
        init(&authority.path("keys")).unwrap();
        authority
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Signs the keys of a new peer in a directory of this name.
    fn sign_peer(&self, name: &str) -> PeerId {
        sign_new_peer(&self.path("keys"), &self.path(name)).unwrap()
    }

    fn role(&self, role: Role) -> Security {
        Security::load(&self.path("keys"), role).unwrap()
    }

    fn peer(&self, name: &str) -> Security {
        Security::load(&self.path(name), Role::Peer).unwrap()
    }
}

/// The two ends of a connection.
async fn open(
    client: &Security,
    wanted: Role,
    server: &Security,
    allowed: &[Role],
) -> std::io::Result<(Secured, Secured)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let connecting = async {
        let stream = TcpStream::connect(listener.local_addr()?).await?;
        client.connect(stream, wanted).await
    };
    let accepting = async {
        let (stream, _) = listener.accept().await?;
        server.accept(stream, allowed).await
    };
    let (mut connected, mut accepted) = tokio::try_join!(connecting, accepting)?;
    // With TLS 1.3 a client learns only with the first answer whether it was accepted.
    connected.writer.write_all(&[7]).await?;
    connected.writer.flush().await?;
    let mut byte = [0];
    accepted.reader.read_exact(&mut byte).await?;
    accepted.writer.write_all(&byte).await?;
    accepted.writer.flush().await?;
    connected.reader.read_exact(&mut byte).await?;
    assert_eq!(byte, [7]);
    Ok((connected, accepted))
}

/// Whether a client and a server can connect and exchange a byte.
async fn can_connect(client: &Security, wanted: Role, server: &Security, allowed: &[Role]) -> bool {
    open(client, wanted, server, allowed).await.is_ok()
}

#[tokio::test]
async fn only_processes_of_one_cluster_connect_each_in_its_role() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let id = ours.sign_peer("peer");
    theirs.sign_peer("peer");
    let [client, catalog] = [Role::Client, Role::Catalog].map(|role| ours.role(role));
    let peer = ours.peer("peer");
    let plain = &Security::INSECURE;
    let all = &Role::ALL;
    let (connected, accepted) = open(&client, Role::Peer, &peer, all).await.unwrap();
    assert_eq!(connected.remote.identity(), Some(Identity::Peer(id)));
    assert_eq!(accepted.remote.identity(), Some(Identity::Client));
    let (connected, accepted) = open(&peer, Role::Catalog, &catalog, all).await.unwrap();
    assert_eq!(connected.remote.identity(), Some(Identity::Catalog));
    assert_eq!(accepted.remote.identity(), Some(Identity::Peer(id)));
    assert!(!can_connect(&client, Role::Peer, &client, all).await, "not a peer");
    assert!(!can_connect(&client, Role::Catalog, &peer, all).await, "not a catalog");
    let theirs = (theirs.role(Role::Client), theirs.peer("peer"));
    assert!(!can_connect(&theirs.0, Role::Peer, &peer, all).await, "another cluster");
    assert!(!can_connect(&client, Role::Peer, &theirs.1, all).await, "another cluster");
    let only = &[Role::Client];
    assert!(!can_connect(&peer, Role::Catalog, &catalog, only).await, "a peer");
    assert!(!can_connect(plain, Role::Peer, &peer, all).await, "plain TCP");
    let (connected, accepted) = open(plain, Role::Peer, plain, all).await.unwrap();
    assert_eq!((connected.remote.identity(), accepted.remote.identity()), (None, None));
}

#[tokio::test]
async fn a_revoked_certificate_connects_to_nothing_and_others_still_do() {
    let ours = Authority::new();
    let id = ours.sign_peer("stolen").to_string();
    ours.sign_peer("other");
    let all = &Role::ALL;
    // The thief keeps the files as they were.
    let (stolen, other) = (ours.peer("stolen"), ours.peer("other"));
    let [client, catalog] = [Role::Client, Role::Catalog].map(|role| ours.role(role));
    let (connected, accepted) = open(&client, Role::Peer, &stolen, all).await.unwrap();
    let (to_catalog, from_peer) = open(&stolen, Role::Catalog, &catalog, all).await.unwrap();
    let (good, _other_end) = open(&client, Role::Peer, &other, all).await.unwrap();
    assert_eq!(revoke(&ours.path("keys"), &id[..8]).unwrap().0, 1);
    // All processes that see the list, without a restart.
    assert!(!can_connect(&client, Role::Peer, &stolen, all).await, "as a server");
    assert!(!can_connect(&stolen, Role::Catalog, &catalog, all).await, "as a client");
    assert!(can_connect(&client, Role::Peer, &other, all).await);
    assert!(can_connect(&other, Role::Catalog, &catalog, all).await);
    // Open connections, too.
    let limit = Duration::from_secs(60);
    timeout(limit, connected.remote.revoked()).await.expect("the client sees that");
    timeout(limit, from_peer.remote.revoked()).await.expect("the catalog sees that");
    let some_time = Duration::from_millis(300);
    assert!(timeout(some_time, good.remote.revoked()).await.is_err(), "another peer");
    assert!(timeout(some_time, accepted.remote.revoked()).await.is_err(), "the client is good");
    drop(to_catalog);
    // The peer's own keys with the list are refused at the start.
    fs::copy(ours.path("keys/revoked.crl.pem"), ours.path("stolen/revoked.crl.pem")).unwrap();
    let error = Security::load(&ours.path("stolen"), Role::Peer).map(drop).unwrap_err().to_string();
    assert!(error.contains("Revoked"), "{error}");
    // The peer gets new keys, which have its id.
    let peer = Identity::Peer(id.parse().unwrap());
    sign(&ours.path("keys"), peer, &ours.path("again")).unwrap();
    let again = ours.peer("again");
    assert_eq!(again.identity(), Some(peer));
    assert!(can_connect(&client, Role::Peer, &again, all).await);
    assert!(!can_connect(&client, Role::Peer, &stolen, all).await);
}

#[tokio::test]
async fn a_damaged_list_of_revoked_certificates_lets_nobody_in() {
    let ours = Authority::new();
    ours.sign_peer("peer");
    let (client, peer) = (ours.role(Role::Client), ours.peer("peer"));
    let all = &Role::ALL;
    let list = ours.path("peer/revoked.crl.pem");
    let text = fs::read(&list).unwrap();
    for damaged in [&b""[..], b"nonsense", &text[..text.len() / 2]] {
        fs::write(&list, damaged).unwrap();
        assert!(!can_connect(&client, Role::Peer, &peer, all).await);
        let error = Security::load(&ours.path("peer"), Role::Peer).map(drop).unwrap_err();
        assert!(error.to_string().contains("the peer's keys"), "{error}");
    }
    fs::write(&list, text).unwrap();
    assert!(can_connect(&client, Role::Peer, &peer, all).await);
}

#[test]
fn a_process_without_a_list_of_revoked_certificates_does_not_start() {
    let ours = Authority::new();
    ours.sign_peer("peer");
    let load = |role: Role| {
        let directory = if role == Role::Peer { "peer" } else { "keys" };
        Security::load(&ours.path(directory), role).map(drop)
    };
    fs::remove_file(ours.path("keys/revoked.crl.pem")).unwrap();
    fs::remove_file(ours.path("peer/revoked.crl.pem")).unwrap();
    for role in Role::ALL {
        let error = load(role).unwrap_err();
        assert!(matches!(error, Error::BadKeys(_)), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("revoked.crl.pem") && text.contains("cairn keys init"), "{text}");
    }
}

#[tokio::test]
async fn a_list_of_revoked_certificates_that_vanishes_stays_in_force() {
    let ours = Authority::new();
    let id = ours.sign_peer("stolen").to_string();
    ours.sign_peer("other");
    let (stolen, other) = (ours.peer("stolen"), ours.peer("other"));
    revoke(&ours.path("keys"), &id).unwrap();
    let client = ours.role(Role::Client);
    fs::remove_file(ours.path("keys/revoked.crl.pem")).unwrap();
    assert!(can_connect(&client, Role::Peer, &other, &Role::ALL).await);
    assert!(!can_connect(&client, Role::Peer, &stolen, &Role::ALL).await);
}

#[test]
fn a_name_that_fits_several_peers_or_none_revokes_nothing() {
    let ours = Authority::new();
    let keys = ours.path("keys");
    let mut ids = (0..17).map(|number| ours.sign_peer(&number.to_string()).to_string());
    let mut ids: Vec<_> = ids.by_ref().collect();
    ids.sort();
    let common = ids.windows(2).find(|two| two[0][..1] == two[1][..1]).expect("17 ids, 16 digits");
    for bad in ["", &common[0][..1], "nobody", "peer"] {
        let error = revoke(&keys, bad).unwrap_err();
        assert!(error.to_string().contains("peer"), "{error}");
    }
    assert_eq!(revoke(&keys, &ids[0]).unwrap().0, 1);
    assert!(revoke(&keys, &ids[0]).is_err(), "nothing is left to revoke");
    assert_eq!(revoke(&keys, "client").unwrap().0, 1);
    assert!(Security::load(&keys, Role::Client).is_err());
    for role in [Role::Catalog, Role::Supervisor] {
        assert!(Security::load(&keys, role).is_ok(), "{role:?}");
    }
    assert!(revoke(&ours.path("0"), &ids[1]).is_err(), "there is no ca.key");
}

#[test]
fn keys_are_private_and_never_replaced() {
    let ours = Authority::new();
    ours.sign_peer("peer");
    for name in [
        "keys/ca.key",
        "keys/catalog.key",
        "keys/client.key",
        "keys/supervisor.key",
        "peer/peer.key",
    ] {
        let mode = ours.path(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    assert!(!ours.path("keys/peer.key").exists(), "no key is shared by peers");
    assert!(!ours.path("peer/ca.key").exists());
    assert!(init(&ours.path("keys")).is_err());
    assert!(sign_new_peer(&ours.path("keys"), &ours.path("peer")).is_err());
    let missing = Security::load(&ours.path("keys"), Role::Peer).map(drop).unwrap_err().to_string();
    assert!(missing.contains("cairn keys sign"), "{missing}");
    let missing = Security::load(&ours.path("peer"), Role::Client).map(drop).unwrap_err();
    assert!(missing.to_string().contains("cairn keys init"), "{missing}");
    fs::write(ours.path("peer/peer.key"), "nonsense").unwrap();
    let error = Security::load(&ours.path("peer"), Role::Peer).map(drop).unwrap_err().to_string();
    assert!(error.contains("the peer's keys"), "{error}");
}

#[test]
fn a_certificate_of_another_role_or_authority_is_refused_at_the_start() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let refused = |from: &Authority, name: &str| {
        for end in ["pem", "key"] {
            let to = ours.path(&format!("keys/client.{end}"));
            fs::copy(from.path(&format!("keys/{name}.{end}")), to).unwrap();
        }
        Security::load(&ours.path("keys"), Role::Client).map(drop).unwrap_err().to_string()
    };
    let error = refused(&ours, "catalog");
    assert!(error.contains("that of a catalog"), "{error}");
    let error = refused(&theirs, "client");
    assert!(error.contains("UnknownIssuer") || error.contains("BadSignature"), "{error}");
}
