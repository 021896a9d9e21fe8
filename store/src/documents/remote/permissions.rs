//! What each role may read and change in a served catalog.
//!
//! | caller | reads | changes |
//! |---|---|---|
//! | client, or anybody on plain TCP | everything | everything |
//! | supervisor | everything | `members`, `suspects`, `leader`, `health`, `images`, `snapshots`, `labels`, `available`, `drafts`, `collection`, `collections`, `commits` |
//! | peer *X* | `members/X`, `alive/X` | `members/X`, `alive/X` |
//!
//! A peer is not trusted. What it writes about itself may be wrong, so readers of its documents
//! must not rely on them.

use super::wire::Request;
use crate::documents::{Change, Query, folder};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::net::identity::{Identity, Role};

/// The roles that a catalog serves.
pub(super) const CALLERS: [Role; 3] = [Role::Client, Role::Supervisor, Role::Peer];

/// The folders that a supervisor may change: it declares peers lost, repair makes snapshots stable
/// and gives up creations that were interrupted, and a prune removes snapshots. A collection raises
/// its number, and ends the commits of dead processes. Policies, mirrors and leases are not in them.
const SUPERVISOR_FOLDERS: [&str; 12] = [
    "members",
    "suspects",
    "leader",
    "health",
    "images",
    "snapshots",
    "labels",
    "available",
    "drafts",
    "collection",
    "collections",
    "commits",
];

/// The longest document that a peer may write, in bytes. All clients read it.
const MAX_PEER_DOCUMENT: usize = 4096;

/// Fails if the caller may not send this request. On plain TCP there is no caller.
pub(super) fn check(caller: Option<Identity>, request: &Request) -> Result<()> {
    match caller {
        None | Some(Identity::Client) => Ok(()),
        Some(Identity::Supervisor) => match request {
            Request::Commit(_, change) => check_supervisor(change),
            Request::Read(_)
            | Request::Scan(_)
            | Request::Last(..)
            | Request::Changed(..)
            | Request::Wait(..) => Ok(()),
        },
        Some(Identity::Peer(id)) => check_peer(&id, request),
        Some(Identity::Catalog) => refuse("a catalog may not use another catalog".into()),
    }
}

fn check_supervisor(change: &Change) -> Result<()> {
    let may_change = |key: &str| SUPERVISOR_FOLDERS.contains(&folder(key));
    let removed = change.removes.iter().find_map(|query| match query {
        Query::Key(key) => (!may_change(key)).then_some(key),
        // A prefix without a slash can match keys in other folders.
        Query::Prefix(prefix) => (!may_change(prefix) || !prefix.contains('/')).then_some(prefix),
    });
    let put = change.puts.iter().map(|put| &put.key).find(|key| !may_change(key));
    match removed.or(put) {
        None => Ok(()),
        Some(key) => {
            let folders = SUPERVISOR_FOLDERS.join(", ");
            refuse(format!("a supervisor may not change '{key}', only the folders {folders}"))
        }
    }
}

fn check_peer(id: &PeerId, request: &Request) -> Result<()> {
    let own = [format!("members/{id}"), format!("alive/{id}")];
    let is_own = |key: &str| own.iter().any(|own| own == key);
    let foreign = |query: &Query| match query {
        Query::Key(key) if is_own(key) => None,
        Query::Key(key) | Query::Prefix(key) => Some(key.clone()),
    };
    let change = match request {
        Request::Read(queries) => {
            return match queries.iter().find_map(foreign) {
                None => Ok(()),
                Some(key) => refuse(format!("a peer may not read '{key}', only its own documents")),
            };
        }
        Request::Last(prefix, ..) | Request::Changed(prefix, _) => {
            return refuse(format!("a peer may not list '{prefix}'"));
        }
        Request::Scan(_) => return refuse("a peer may not scan documents".into()),
        // Even the time of a change would tell the peer something about others.
        Request::Wait(..) => return refuse("a peer may not wait for changes".into()),
        Request::Commit(_, change) => change,
    };
    let removed = change.removes.iter().find_map(foreign);
    let put = change.puts.iter().map(|put| &put.key).find(|key| !is_own(key)).cloned();
    // Whether a change is carried out tells which version such a document has.
    let relied_on = change.relies_on.iter().map(|(key, _)| key).find(|key| !is_own(key)).cloned();
    if let Some(key) = removed.or(put).or(relied_on) {
        return refuse(format!("a peer may not change '{key}', only its own documents"));
    }
    match change.puts.iter().find(|put| put.value.len() > MAX_PEER_DOCUMENT) {
        Some(put) => {
            let (what, limit) = ("a document of a peer, in bytes,", MAX_PEER_DOCUMENT);
            Err(Error::TooLarge { what, actual: put.value.len(), limit })
        }
        None => Ok(()),
    }
}

fn refuse(what: String) -> Result<()> {
    Err(Error::NotPermitted { what })
}

#[cfg(test)]
mod tests {
    use super::{Change, Identity, MAX_PEER_DOCUMENT, PeerId, Query, Request, check};

    const ID: PeerId = PeerId::from_bytes([7; 16]);

    fn own(folder: &str) -> String {
        format!("{folder}/{ID}")
    }

    #[test]
    fn a_peer_may_read_and_change_only_its_own_documents() {
        let caller = Some(Identity::Peer(ID));
        let commit = |change: Change| check(caller, &Request::Commit(None, change));
        let change = Change::default;
        let relying = |key: String| Change { relies_on: vec![(key, 1)], ..Change::default() };
        let text = |len: usize| "x".repeat(len);
        for good in [
            change(),
            relying(own("members")).put(own("members"), &1).put_for(7, own("alive"), &1),
            change().remove(Query::key(own("alive"))).put(own("members"), &text(4000)),
        ] {
            commit(good).unwrap();
        }
        for bad in [
            change().put("members/00", &1),
            change().put(own("members"), &1).put(own("suspects"), &1),
            change().put("leader/repair", &1),
            change().put("health/losses", &1),
            change().put("images/vm1", &1),
            change().put(format!("{}/more", own("members")), &1),
            change().put(own("members"), &text(MAX_PEER_DOCUMENT)),
            change().remove(Query::key("images/vm1")),
            change().remove(Query::prefix(own("members"))),
            change().remove(Query::prefix("")),
            relying("images/vm1".into()).put(own("members"), &1),
            change().put("", &1),
        ] {
            assert!(commit(bad.clone()).is_err(), "{bad:?}");
        }
        let read = |queries: Vec<Query>| check(caller, &Request::Read(queries));
        assert!(check(caller, &Request::Scan(vec![Query::key(own("members"))])).is_err());
        read(vec![]).unwrap();
        read(vec![Query::key(own("members")), Query::key(own("alive"))]).unwrap();
        for bad in ["", "members/", "alive/", "images/", "mirrors/", "snapshots/"] {
            assert!(read(vec![Query::key(own("members")), Query::prefix(bad)]).is_err(), "{bad}");
        }
        assert!(read(vec![Query::prefix(own("members"))]).is_err());
        assert!(read(vec![Query::key("images/vm1")]).is_err());
        assert!(check(caller, &Request::Wait("members".into(), 0, 1)).is_err());
        assert!(check(caller, &Request::Last(own("members"), "z".into(), 1)).is_err());
        assert!(check(caller, &Request::Changed(own("members"), 0)).is_err());
    }

    #[test]
    fn a_supervisor_reads_everything_and_changes_no_policy_lease_or_mirror() {
        let caller = Some(Identity::Supervisor);
        let commit = |change: Change| check(caller, &Request::Commit(None, change));
        let change = Change::default;
        check(caller, &Request::Read(vec![Query::prefix("")])).unwrap();
        check(caller, &Request::Wait("members".into(), 0, 1)).unwrap();
        for good in [
            change().put("leader/supervisor", &1).put("health/losses", &1).put("members/x", &1),
            change().remove(Query::prefix("suspects/")).put("snapshots/vm1/1", &1),
            change().put("images/vm1", &1).remove(Query::key("labels/vm1/x")),
            change().put("collection", &1).put("collections", &1),
            change().remove(Query::key("commits/x")),
        ] {
            commit(good).unwrap();
        }
        for bad in [
            change().put("policies/vm1", &1),
            change().put("health/x", &1).put("healthy/x", &1),
            change().put("leases/vm1", &1),
            change().remove(Query::key("readers/x")),
            change().remove(Query::key("mirrors/x")),
            change().remove(Query::prefix("members")),
            change().remove(Query::prefix("")),
        ] {
            assert!(commit(bad.clone()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_client_and_anybody_on_plain_tcp_may_do_everything() {
        let change = Change::default().put("images/vm1", &1).remove(Query::prefix(""));
        for caller in [None, Some(Identity::Client)] {
            check(caller, &Request::Commit(None, change.clone())).unwrap();
            check(caller, &Request::Read(vec![Query::prefix("")])).unwrap();
        }
        assert!(check(Some(Identity::Catalog), &Request::Read(vec![])).is_err());
    }
}
