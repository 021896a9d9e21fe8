//! What a stolen key can do, over real sockets: the table of `docs/security.md`, action by action.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cairn_store::cluster::membership::{Announcement, PeerStats, send_heartbeat};
use cairn_store::cluster::peer::{self, PeerStore};
use cairn_store::cluster::protocol::{PeerTime, StampBound};
use cairn_store::cluster::{Cluster, Connection, Member, MemberState};
use cairn_store::collection::CollectionNumber;
use cairn_store::documents::{CatalogStore, Change, Documents, Query, RemoteDocuments, remote};
use cairn_store::encoding::Redundancy;
use cairn_store::encoding::fragment::{Fragment, encode};
use cairn_store::net::identity::{Identity, Role, Security, init, sign, sign_new_peer};
use cairn_store::{BlobId, PeerId, Result};
use tempfile::TempDir;

/// The owner of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thief {
    /// No key, or one of another cluster.
    Nobody,
    Peer,
    Client,
    Supervisor,
    Catalog,
    /// The authority's key, which signs any other key.
    Authority,
}

use Thief::{Authority, Catalog, Client, Nobody, Peer, Supervisor};

const THIEVES: [Thief; 6] = [Nobody, Peer, Client, Supervisor, Catalog, Authority];

/// The thief's peer is *own*, and another one is *other*.
#[derive(Clone, Copy, Debug)]
enum Action {
    ReadOwn,
    ReadMembers,
    ReadImages,
    WaitForChanges,
    ChangeOwn,
    ChangeOther,
    ChangeSuspects,
    ChangeLeader,
    ChangeHealth,
    ChangeSnapshots,
    ChangeImages,
    ChangeMirrors,
    RemoveEverything,
    ReadFragments,
    ListFragments,
    StoreFragments,
    DeleteFragments,
    ForgeContent,
    ServeAsOwn,
    ServeAsOther,
    ServeAsCatalog,
}

/// Which keys are enough for an action.
const TABLE: [(Action, &[Thief]); 21] = [
    (Action::ReadOwn, &[Peer, Client, Supervisor, Authority]),
    (Action::ReadMembers, &[Client, Supervisor, Authority]),
    (Action::ReadImages, &[Client, Supervisor, Authority]),
    (Action::WaitForChanges, &[Client, Supervisor, Authority]),
    (Action::ChangeOwn, &[Peer, Client, Supervisor, Authority]),
    (Action::ChangeOther, &[Client, Supervisor, Authority]),
    (Action::ChangeSuspects, &[Client, Supervisor, Authority]),
    (Action::ChangeLeader, &[Client, Supervisor, Authority]),
    (Action::ChangeHealth, &[Client, Supervisor, Authority]),
    (Action::ChangeSnapshots, &[Client, Supervisor, Authority]),
    (Action::ChangeImages, &[Client, Supervisor, Authority]),
    (Action::ChangeMirrors, &[Client, Authority]),
    (Action::RemoveEverything, &[Client, Authority]),
    (Action::ReadFragments, &[Client, Supervisor, Authority]),
    (Action::ListFragments, &[Client, Supervisor, Authority]),
    (Action::StoreFragments, &[Client, Supervisor, Authority]),
    (Action::DeleteFragments, &[Client, Supervisor, Authority]),
    (Action::ForgeContent, &[Client, Supervisor, Authority]),
    (Action::ServeAsOwn, &[Peer, Authority]),
    (Action::ServeAsOther, &[Authority]),
    (Action::ServeAsCatalog, &[Catalog, Authority]),
];

/// A catalog and a peer that run, and the keys of the cluster.
struct Site {
    dir: TempDir,
    catalog: String,
    /// The address of the peer `other`.
    peer: String,
    own: PeerId,
    other: PeerId,
}

impl Site {
    fn start() -> Site {
        let dir = TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name);
        init(&path("keys")).unwrap();
        init(&path("foreign")).unwrap();
        let own = sign_new_peer(&path("keys"), &path("own")).unwrap();
        let other = sign_new_peer(&path("keys"), &path("other")).unwrap();
        let keys = Security::load(&path("keys"), Role::Catalog).unwrap();
        let catalog = serve_catalog(&path("catalog"), keys);
        let peer = serve_peer(&path("data"), other, load(&path("other"), Role::Peer));
        let site = Site { dir, catalog, peer, own, other };
        for id in [own, other] {
            let address = site.peer.clone();
            let announcement = Announcement { id, address, domain: "rack".into() };
            let stats = PeerStats {
                capacity: 1,
                used: 0,
                reserved: 0,
                fragments: 0,
                load: 0,
                bad: 0,
                scrubbed: None,
            };
            let client = site.documents(&load(&site.path("keys"), Role::Client), true);
            send_heartbeat(&client, &announcement, &stats, 1).unwrap();
        }
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The keys with which a thief tries an action; each of them may be enough.
    fn keys(&self, thief: Thief, action: Action) -> Vec<Security> {
        let of = |name: &str, role| load(&self.path(name), role);
        match thief {
            Nobody => vec![Security::INSECURE, of("foreign", Role::Client)],
            Peer => vec![of("own", Role::Peer)],
            Client => vec![of("keys", Role::Client)],
            Supervisor => vec![of("keys", Role::Supervisor)],
            Catalog => vec![of("keys", Role::Catalog)],
            Authority => {
                let identity = match action {
                    Action::ServeAsOwn => Identity::Peer(self.own),
                    Action::ServeAsOther => Identity::Peer(self.other),
                    Action::ServeAsCatalog => Identity::Catalog,
                    _ => Identity::Client,
                };
                let signed = format!("{action:?}");
                sign(&self.path("keys"), identity, &self.path(&signed)).unwrap();
                vec![of(&signed, identity.role())]
            }
        }
    }

    /// The catalog's documents. A client that is to be refused does not try for long.
    fn documents(&self, security: &Security, should_succeed: bool) -> RemoteDocuments {
        let retry_timeout = Duration::from_secs(if should_succeed { 60 } else { 3 });
        RemoteDocuments::with_retry_timeout(&self.catalog, security, retry_timeout).unwrap()
    }

    /// Carries out an action. Returns whether that was possible.
    fn succeeds(&self, action: Action, security: &Security, should_succeed: bool) -> bool {
        let documents = || self.documents(security, should_succeed);
        let read = |query: Query| documents().read(&[query]).is_ok();
        let change = |change: Change| documents().commit(&change).is_ok();
        let put = |key: String| change(Change::default().put(key, &1));
        match action {
            Action::ReadOwn => read(Query::key(format!("members/{}", self.own))),
            Action::ReadMembers => read(Query::key(format!("members/{}", self.other))),
            Action::ReadImages => ["images/", "snapshots/", "mirrors/", "leases/"]
                .into_iter()
                .any(|folder| read(Query::prefix(folder))),
            Action::WaitForChanges => documents().wait("images", 0, Duration::ZERO).is_ok(),
            Action::ChangeOwn => put(format!("members/{}", self.own)),
            Action::ChangeOther => {
                put(format!("members/{}", self.other)) || put(format!("alive/{}", self.other))
            }
            Action::ChangeSuspects => put(format!("suspects/{}", self.own)),
            Action::ChangeLeader => put("leader/repair".into()),
            Action::ChangeHealth => put("health/losses".into()),
            Action::ChangeSnapshots => put("snapshots/vm/1".into()),
            Action::ChangeImages => put("images/vm".into()) && put("labels/vm/x".into()),
            Action::ChangeMirrors => {
                ["mirrors/x", "leases/vm", "policies/vm"].map(|key| put(key.into())).contains(&true)
            }
            // Relies on a document that does not exist, so that nothing is removed.
            Action::RemoveEverything => change(
                Change { relies_on: vec![("never".into(), 1)], ..Change::default() }
                    .remove(Query::prefix("")),
            ),
            Action::ReadFragments => self.ask(security, async |peer| {
                peer.fetch(&fragment().description.blob).await.map(drop)
            }),
            Action::ListFragments => self.ask(security, async |peer| {
                let blob = BlobId::from_bytes([0; 32]);
                peer.list(&blob, 4096).await?;
                peer.records(&blob).await?;
                peer.have(&[blob], Some(CollectionNumber::FIRST)).await.map(drop)
            }),
            Action::StoreFragments => {
                self.ask(security, async |peer| peer.put(fragment(), CollectionNumber::FIRST).await)
            }
            Action::DeleteFragments => self.ask(security, async |peer| {
                peer.delete(&[], 0, StampBound::ANY, PeerTime(u64::MAX)).await.map(drop)
            }),
            Action::ForgeContent => self.is_known(security),
            Action::ServeAsOwn => self.reads_from(self.own, security),
            Action::ServeAsOther => self.reads_from(self.other, security),
            Action::ServeAsCatalog => {
                let address = serve_catalog(&self.new_directory(), security.clone());
                let client = load(&self.path("keys"), Role::Client);
                let retry_timeout = Duration::from_secs(if should_succeed { 60 } else { 3 });
                let documents =
                    RemoteDocuments::with_retry_timeout(&address, &client, retry_timeout).unwrap();
                documents.read(&[Query::prefix("")]).is_ok()
            }
        }
    }

    /// Whether a client believes that content is stored which a thief has made up on the disk of a
    /// peer, with the keys that the thief has.
    fn is_known(&self, security: &Security) -> bool {
        let directory = self.new_directory();
        let blob = BlobId::of(b"content that others will store");
        let (mut description, blocks) = encode(&blob, b"forged", Redundancy::NONE);
        description.seal = security.seals().seal(&description);
        let store = PeerStore::open_as(&directory, None, Some(self.own)).unwrap();
        let fragment = Fragment { description, index: 0, block: blocks.share(0) };
        store.put(&[fragment]).unwrap().remove(0).unwrap();
        store.flush().unwrap();
        drop(store);
        let address = serve_peer(&directory, self.own, load(&self.path("own"), Role::Peer));
        let (domain, state) = ("rack".into(), MemberState::Up);
        let member = Member { id: self.own, address, weight: 1, domain, state };
        let cluster = Cluster::new(vec![member], load(&self.path("keys"), Role::Client));
        block_on(cluster.known(&[blob], &Redundancy::NONE.into())) == [true]
    }

    fn new_directory(&self) -> PathBuf {
        tempfile::tempdir_in(self.dir.path()).unwrap().keep()
    }

    /// Whether a peer answers a request of this client.
    fn ask(&self, security: &Security, ask: impl AsyncFnOnce(Connection) -> Result<()>) -> bool {
        block_on(async { ask(Connection::open(&self.peer, security).await?).await }).is_ok()
    }

    /// Whether a client that looks for the peer `id` reads from a server with these keys. The server
    /// says that it is this peer.
    fn reads_from(&self, id: PeerId, security: &Security) -> bool {
        let address = serve_peer(&self.new_directory(), id, security.clone());
        let (domain, state) = ("rack".into(), MemberState::Up);
        let member = Member { id, address, weight: 1, domain, state };
        let client = load(&self.path("keys"), Role::Client);
        let content = b"content";
        let put = async {
            let cluster = Cluster::new(vec![member], client);
            let redundancy: Redundancy = "none".parse()?;
            cluster.put(&BlobId::of(content), content, &redundancy.into()).await
        };
        block_on(put).is_ok()
    }
}

fn load(directory: &Path, role: Role) -> Security {
    Security::load(directory, role).unwrap()
}

fn fragment() -> Fragment {
    let content = vec![7; 1000];
    let (description, blocks) = encode(&BlobId::of(&content), &content, Redundancy::NONE);
    let block = blocks.share(0);
    Fragment { description, index: 0, block }
}

fn block_on<T>(task: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(task)
}

/// Serves on a thread until the test ends. Returns the address.
fn in_background<F: Future<Output = std::io::Result<()>>>(
    serve: impl FnOnce(tokio::net::TcpListener) -> F + Send + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        block_on(async {
            listener.set_nonblocking(true).unwrap();
            serve(tokio::net::TcpListener::from_std(listener).unwrap()).await.unwrap();
        });
    });
    address
}

fn serve_catalog(data: &Path, security: Security) -> String {
    let store = Arc::new(CatalogStore::open(data).unwrap());
    in_background(|listener| remote::serve(listener, store, security, std::future::pending()))
}

fn serve_peer(data: &Path, id: PeerId, security: Security) -> String {
    let store = Arc::new(PeerStore::open_as(data, None, Some(id)).unwrap());
    in_background(|listener| peer::serve(listener, store, security, std::future::pending()))
}

#[test]
fn a_stolen_key_can_do_what_the_table_says_and_nothing_else() {
    let site = &Site::start();
    let wrong: Vec<String> = thread::scope(|scope| {
        let tries = TABLE.iter().flat_map(|row| THIEVES.map(|thief| (row, thief)));
        let tries: Vec<_> = tries
            .map(|((action, enough), thief)| {
                scope.spawn(move || {
                    let expected = enough.contains(&thief);
                    let keys = site.keys(thief, *action);
                    let can = keys.iter().any(|key| site.succeeds(*action, key, expected));
                    (can != expected).then(|| format!("{thief:?} can {action:?}: {can}"))
                })
            })
            .collect();
        tries.into_iter().filter_map(|one| one.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
