//! `keys` creates, signs and revokes the certificates of a cluster.

use std::path::Path;

use cairn_store::net::identity::{self, Identity, Role};
use serde_json::json;

use crate::args::{Keys, SignRole, Style};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{print, print_json};

/// Runs a `keys` command. `keys` is the directory of the authority.
pub(crate) fn run(command: &Keys, keys: Option<&Path>, style: Style) -> Outcome {
    let authority = |doing: &str| {
        let why = "no authority is named; use --keys DIR with the directory that `cairn keys init` \
                   has created";
        keys.ok_or_else(|| Failure::new(Exit::Usage, doing, why))
    };
    match command {
        Keys::Init { directory } => init(directory, style),
        Keys::Sign { directory, role, peer } => {
            let keys = authority("signing a certificate")?;
            let identity = match (role, peer) {
                (SignRole::Peer, id) => id.map(Identity::Peer),
                (_, Some(_)) => {
                    let why = "--peer is for the keys of a peer; omit it or --role";
                    return Err(Failure::new(Exit::Usage, "signing a certificate", why));
                }
                (SignRole::Client, None) => Some(Identity::Client),
                (SignRole::Supervisor, None) => Some(Identity::Supervisor),
                (SignRole::Catalog, None) => Some(Identity::Catalog),
            };
            sign(keys, identity, directory, style)
        }
        Keys::RetireMac => retire_mac(authority("removing old keys for seals")?, style),
        Keys::RotateMac => rotate_mac(authority("replacing the key for seals")?, style),
        Keys::Revoke { name } => revoke(authority("revoking a certificate")?, name, style),
    }
}

/// Creates the authority of a cluster.
fn init(directory: &Path, style: Style) -> Outcome {
    identity::init(directory).doing(|| format!("creating keys in {}", directory.display()))?;
    match style.json {
        true => print_json(&json!({ "keys": directory })),
        false => print(&format!(
            "{0}: a certificate authority, and the keys of catalog, supervisor and client\n\
             Keep ca.key private. Create the keys of each peer with `cairn keys sign --keys {0} \
             DIR`.\n",
            directory.display()
        )),
    }
}

/// Creates the keys of an identity, or of a new peer.
fn sign(keys: &Path, identity: Option<Identity>, directory: &Path, style: Style) -> Outcome {
    let doing = || format!("creating keys in {}", directory.display());
    let identity = match identity {
        Some(identity) => identity::sign(keys, identity, directory).map(|()| identity),
        None => identity::sign_new_peer(keys, directory).map(Identity::Peer),
    };
    let identity = identity.doing(doing)?;
    let (role, peer) = (identity.role().name(), identity.peer().map(|id| id.to_string()));
    if style.json {
        return print_json(&json!({ "keys": directory, "role": role, "peer": peer }));
    }
    let whose = match &peer {
        Some(id) => format!("peer {id}; copy it to the machine of this peer only"),
        None => format!("a {role}"),
    };
    print(&format!("{}: the keys of {whose}\n", directory.display()))
}

/// Adds a key for seals.
fn rotate_mac(keys: &Path, style: Style) -> Outcome {
    let doing = || format!("adding a key to {}", keys.join("mac.key").display());
    let (id, before) = identity::rotate_mac_key(keys).doing(doing)?;
    if style.json {
        return print_json(&json!({ "key": id.to_string(), "keys": before + 1 }));
    }
    print(&format!(
        "new key: {id}\nCopy {} to all machines of clients and supervisors, and restart these.\n",
        keys.join("mac.key").display()
    ))
}

/// Removes the old keys for seals.
fn retire_mac(keys: &Path, style: Style) -> Outcome {
    let file = keys.join("mac.key");
    let doing = || format!("removing old keys from {}", file.display());
    let (id, retired) = identity::retire_mac_keys(keys).doing(doing)?;
    if style.json {
        return print_json(&json!({ "key": id.to_string(), "retired": retired }));
    }
    let next = match retired {
        0 => format!("{} has no other key.", file.display()),
        _ => format!(
            "Copy {} to all machines of clients and supervisors, and restart these.",
            file.display()
        ),
    };
    print(&format!("key: {id}\nretired: {retired}\n{next}\n"))
}

fn revoke(keys: &Path, name: &str, style: Style) -> Outcome {
    let (count, list) = identity::revoke(keys, name).doing(|| format!("revoking {name}"))?;
    if style.json {
        return print_json(&json!({ "revoked": count, "list": list }));
    }
    let next = match Role::ALL.iter().any(|role| role.name() == name) {
        true => format!("create new keys with `cairn keys sign --role {name}`"),
        false => "declare the peer lost with `cairn peers lose`".to_owned(),
    };
    print(&format!(
        "revoked: {count}\nCopy {} into the directory of keys on all machines, and {next}.\n",
        list.display()
    ))
}
