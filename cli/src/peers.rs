//! The machines of a cluster: `peers`, `repair`, `catalog rebuild`.

use cairn_store::Repository;
use cairn_store::cluster::membership;
use cairn_store::cluster::membership::{Health, Peer};
use cairn_store::cluster::repair::Report;
use cairn_store::documents::Documents;
use cairn_store::maintenance;
use serde_json::{Value, json};

use crate::args::{Peers, Style};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{Align, Table, or_dash, print, print_json};
use crate::progress::Progress;
use crate::time::utc;

/// The documents of a cluster, or that there is none.
fn documents(repository: &Repository) -> Outcome<&dyn Documents> {
    repository.cluster().map(|(_, documents)| documents).ok_or_else(|| {
        let why =
            "this repository is in a directory; name a cluster with --store cairn://HOST:PORT";
        Failure::new(Exit::Usage, "looking for peers", why)
    })
}

pub(crate) fn list(repository: &Repository, style: Style) -> Outcome {
    let documents = documents(repository)?;
    let doing = || "listing the peers".into();
    let (mut peers, _) = membership::peers(documents).doing(doing)?;
    peers.sort_by(|one, other| (&one.domain, &one.address).cmp(&(&other.domain, &other.address)));
    let health = membership::last_repair(documents).doing(doing)?;
    if style.json {
        let peers: Vec<Value> = peers.iter().map(peer_json).collect();
        return print_json(&json!({ "peers": peers, "repair": health }));
    }
    let mut table = Table::new(&[
        ("PEER", Align::Left),
        ("ADDRESS", Align::Left),
        ("DOMAIN", Align::Left),
        ("STATE", Align::Left),
        ("USED", Align::Right),
        ("FREE", Align::Right),
        ("FRAGMENTS", Align::Right),
        ("LOAD", Align::Right),
        ("WRONG", Align::Right),
        ("SINCE", Align::Left),
    ]);
    for peer in &peers {
        let stats = peer.stats;
        let size =
            |of: fn(&membership::PeerStats) -> u64| or_dash(stats.map(|p| style.size(of(&p))));
        table.row([
            peer.id.to_string().chars().take(8).collect(),
            peer.address.clone(),
            peer.domain.clone(),
            peer.health.as_str().into(),
            size(|stats| stats.used),
            size(|stats| stats.capacity.saturating_sub(stats.used + stats.reserved)),
            or_dash(stats.map(|stats| stats.fragments)),
            or_dash(stats.map(|stats| format!("{:.2}", stats.load as f64 / 100.0))),
            peer.wrong.to_string(),
            utc(peer.down_since.unwrap_or(peer.joined)),
        ]);
    }
    table.print()?;
    let verdict = match health {
        None => "no repair has looked at the blobs yet\n".to_owned(),
        Some(health) if health.unreadable > 0 => format!(
            "{} of {} blobs cannot be read, as of the repair of {}\n",
            health.unreadable,
            health.blobs,
            utc(health.time)
        ),
        Some(health) => format!(
            "the worst of {} blobs survives {} more losses; {} have less than their redundancy, as of the \
             repair of {}\n",
            health.blobs,
            or_dash(health.survives),
            health.under,
            utc(health.time)
        ),
    };
    print(&verdict)
}

fn peer_json(peer: &Peer) -> Value {
    json!({
        "peer": peer.id.to_string(),
        "address": peer.address,
        "domain": peer.domain,
        "state": peer.health.as_str(),
        "weight": peer.weight,
        "joined": peer.joined,
        "down_since": peer.down_since,
        "capacity": peer.stats.map(|stats| stats.capacity),
        "used": peer.stats.map(|stats| stats.used),
        "reserved": peer.stats.map(|stats| stats.reserved),
        "fragments": peer.stats.map(|stats| stats.fragments),
        "load": peer.stats.map(|stats| stats.load as f64 / 100.0),
        "wrong": peer.wrong,
    })
}

pub(crate) fn change(repository: &Repository, action: &Peers, style: Style) -> Outcome {
    let documents = documents(repository)?;
    let (Peers::Drain { peer, .. } | Peers::Lose { peer } | Peers::Forget { peer }) = action;
    let doing = || format!("looking for peer {peer}");
    let found = find(&membership::peers(documents).doing(doing)?.0, peer)?;
    let doing = || format!("changing peer {peer}");
    let told = match action {
        Peers::Drain { undo, .. } => {
            membership::drain(documents, &found.id, !undo).doing(doing)?;
            if *undo {
                "has its share again"
            } else {
                "is being emptied; `cairn peers` shows how far"
            }
        }
        Peers::Lose { .. } => {
            membership::lose(documents, &found.id).doing(doing)?;
            "is given up, and repair makes up for what it held; it is back if it is started, or still runs"
        }
        Peers::Forget { .. } => {
            let is_empty = found.stats.is_some_and(|stats| stats.fragments == 0);
            if found.health != Health::Lost && !is_empty {
                let why =
                    "it holds fragments; drain it first, or give it up with `cairn peers lose`";
                return Err(Failure::new(Exit::Conflict, doing(), why));
            }
            membership::forget(documents, &found.id).doing(doing)?;
            "is removed from the list; it joins again if it is started"
        }
    };
    match style.json {
        true => print_json(&json!({ "peer": found.id.to_string() })),
        false => print(&format!("peer {} {told}\n", found.id)),
    }
}

/// The peer that is called this: by its address, or by the beginning of its id.
fn find(peers: &[Peer], name: &str) -> Outcome<Peer> {
    let called = |peer: &&Peer| peer.address == name || peer.id.to_string().starts_with(name);
    let found: Vec<&Peer> = peers.iter().filter(called).collect();
    match found[..] {
        [peer] => Ok(peer.clone()),
        [] => Err(cairn_store::Error::NoPeer { peer: name.into() })
            .doing(|| "looking for a peer".into()),
        _ => {
            let why = format!("'{name}' is the beginning of several ids; write more of it");
            Err(Failure::new(Exit::Usage, "looking for a peer", why))
        }
    }
}

pub(crate) fn repair(repository: &Repository, rate: Option<u64>, style: Style) -> Outcome {
    documents(repository)?;
    let progress = Progress::new(0);
    let report = maintenance::repair_all(repository, rate, &|bytes| progress.set(bytes))
        .doing(|| "repairing the cluster".into())?;
    drop(progress);
    let unreadable: Vec<String> = report.unreadable.iter().map(ToString::to_string).collect();
    if style.json {
        print_json(&report_json(&report))?;
    } else {
        print(&format!(
            "{} blobs, {} had less than their redundancy: {} fragments made again, {} moved, {} dropped, {} sent\n",
            report.blobs,
            report.under,
            report.rebuilt,
            report.moved,
            report.dropped,
            style.size(report.bytes),
        ))?;
    }
    if !unreadable.is_empty() {
        let why = format!(
            "{} blobs cannot be read until more peers are back: {}",
            unreadable.len(),
            unreadable[..unreadable.len().min(5)].join(" ")
        );
        return Err(Failure::new(Exit::Corrupt, "repairing the cluster", why));
    }
    if report.unread > 0 {
        let why = format!(
            "{} nodes of trees could not be read for a while, and what is below them was not looked at; repair again",
            report.unread
        );
        return Err(Failure::new(Exit::Unavailable, "repairing the cluster", why));
    }
    if !report.failures.is_empty() {
        let why = format!("{} steps failed: {}", report.failures.len(), report.failures[0]);
        return Err(Failure::new(Exit::Unavailable, "repairing the cluster", why));
    }
    Ok(())
}

fn report_json(report: &Report) -> Value {
    json!({
        "blobs": report.blobs,
        "under": report.under,
        "left": report.left,
        "waiting": report.waiting,
        "rebuilt": report.rebuilt,
        "moved": report.moved,
        "dropped": report.dropped,
        "bytes": report.bytes,
        "survives": report.survives,
        "unreadable": report.unreadable.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "unread": report.unread,
        "failures": report.failures.len(),
    })
}

pub(crate) fn rebuild(repository: &Repository, style: Style) -> Outcome {
    documents(repository)?;
    let rebuilt = maintenance::rebuild_catalog(repository)
        .doing(|| "restoring the names from the peers".into())?;
    if style.json {
        return print_json(&json!({
            "images": rebuilt.images,
            "snapshots": rebuilt.snapshots,
            "left": rebuilt.left,
        }));
    }
    let mut text =
        format!("{} images with {} snapshots are restored\n", rebuilt.images, rebuilt.snapshots);
    if !rebuilt.left.is_empty() {
        text += &format!("left alone, for the catalog has them: {}\n", rebuilt.left.join(" "));
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use cairn_store::PeerId;

    use super::{Health, Peer, find};

    fn peer(n: u8) -> Peer {
        Peer {
            id: PeerId::from_bytes([n; 16]),
            address: format!("10.0.0.{n}:7500"),
            domain: String::new(),
            weight: 1,
            health: Health::Up,
            draining: false,
            joined: 0,
            down_since: None,
            stats: None,
            wrong: 0,
        }
    }

    #[test]
    fn a_peer_is_called_by_its_address_or_the_beginning_of_its_id() {
        let all = [peer(0x12), peer(0x13), peer(0x20)];
        let id = |name| find(&all, name).map(|peer| peer.id).ok();
        assert_eq!(id("12"), Some(all[0].id));
        assert_eq!(id("2"), Some(all[2].id));
        assert_eq!(id("10.0.0.19:7500"), Some(all[1].id));
        assert_eq!(id("1"), None, "two of them");
        assert_eq!(id("30"), None);
    }
}
