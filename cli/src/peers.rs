//! `peers`, `repair` and `catalog rebuild`: the administration of a cluster.

use cairn_store::cluster::membership;
use cairn_store::cluster::membership::{Health, LastRepair, Peer};
use cairn_store::cluster::repair::Report;
use cairn_store::documents::Documents;
use cairn_store::maintenance;
use cairn_store::{Repository, now};
use serde_json::{Value, json};

use crate::args::{Peers, Style};
use crate::drain;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{Align, Table, count, or_dash, print, print_json};
use crate::progress::Progress;
use crate::time::{ago, utc};

/// The documents of the cluster. Fails if the repository is in a directory.
fn documents(repository: &Repository) -> Outcome<&dyn Documents> {
    repository.cluster().map(|(_, documents)| documents).ok_or_else(|| {
        let why = "this repository is in a directory; name a cluster with --store \
                   cairn://HOST:PORT or etcd://HOST:PORT";
        Failure::new(Exit::Usage, "looking for peers", why)
    })
}

pub(crate) fn list(repository: &Repository, style: Style) -> Outcome {
    let documents = documents(repository)?;
    let doing = || "listing the peers".into();
    let (mut peers, _) = membership::peers(documents).doing(doing)?;
    peers.sort_by(|one, other| (&one.domain, &one.address).cmp(&(&other.domain, &other.address)));
    let health = membership::last_repair(documents).doing(doing)?;
    let images = drain::images_for(repository, &peers)?;
    let waits_for = |peer: &Peer| drain::waits_for(peer, &peers, &images, style);
    if style.json {
        let peers: Vec<Value> = peers.iter().map(|peer| peer_json(peer, waits_for(peer))).collect();
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
        ("BAD", Align::Right),
        ("SCRUBBED", Align::Left),
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
            or_dash(stats.map(|stats| stats.bad)),
            or_dash(stats.map(|stats| scrubbed(stats.scrubbed, now()))),
            utc(peer.down_since.unwrap_or(peer.joined)),
        ]);
    }
    table.print()?;
    for peer in &peers {
        for reason in waits_for(peer).unwrap_or_default() {
            print(&format!("the drain of {} waits: {reason}\n", &peer.id.to_string()[..8]))?;
        }
    }
    print(&format!("{}\n", summary(health.as_ref())))
}

/// How long ago a peer had last read and verified all its fragments.
fn scrubbed(time: Option<u64>, now: u64) -> String {
    time.map_or_else(|| "never".into(), |time| ago(time, now))
}

/// What the last repair found, in one line.
fn summary(repair: Option<&LastRepair>) -> String {
    let Some(repair) = repair else { return "no repair has finished yet".into() };
    let blobs = count(repair.blobs, "blob");
    let found = match repair.survives {
        None => "no snapshot had blobs".into(),
        Some(_) if repair.unreadable > 0 => {
            format!("{} of {blobs} cannot be read", repair.unreadable)
        }
        Some(survives) => format!(
            "{blobs}: each survives the loss of at least {}; {} less than the full redundancy",
            count(survives.max(0).cast_unsigned(), "more peer"),
            match repair.under {
                1 => "1 has".into(),
                under => format!("{under} have"),
            },
        ),
    };
    format!("{found}, as of the repair of {}", utc(repair.time))
}

fn peer_json(peer: &Peer, drain_waits_for: Option<Vec<String>>) -> Value {
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
        "bad": peer.stats.map(|stats| stats.bad),
        "scrubbed": peer.stats.and_then(|stats| stats.scrubbed),
        "drain_waits_for": drain_waits_for,
    })
}

pub(crate) fn change(repository: &Repository, action: &Peers, style: Style) -> Outcome {
    let documents = documents(repository)?;
    let (Peers::Drain { peer, .. } | Peers::Lose { peer } | Peers::Forget { peer }) = action;
    let doing = || format!("looking for peer {peer}");
    let (peers, _) = membership::peers(documents).doing(doing)?;
    let found = find(&peers, peer)?;
    let mut waits_for = None;
    let doing = || format!("changing peer {peer}");
    let result = match action {
        Peers::Drain { undo, .. } => {
            membership::drain(documents, &found.id, !undo).doing(doing)?;
            let drained = Peer { draining: !undo, ..found.clone() };
            let images = drain::images_for(repository, std::slice::from_ref(&drained))?;
            waits_for = drain::waits_for(&drained, &peers, &images, style);
            if *undo {
                "is no longer drained; it receives its share of the data again"
            } else {
                "is being drained; it is empty when `cairn peers` shows 0 fragments"
            }
        }
        Peers::Lose { .. } => {
            membership::lose(documents, &found.id).doing(doing)?;
            "is lost; repair rebuilds its fragments on other peers. If it runs or starts again, it \
             is a member again"
        }
        Peers::Forget { .. } => {
            if let Some(why) = why_not_forget(&found) {
                return Err(Failure::new(Exit::Conflict, doing(), why));
            }
            membership::forget(documents, &found.id).doing(doing)?;
            "is removed from the list; it joins again if it runs or is started"
        }
    };
    match style.json {
        true => print_json(&json!({ "peer": found.id.to_string(), "drain_waits_for": waits_for })),
        false => {
            let reasons = waits_for.unwrap_or_default();
            let reasons: String = reasons.iter().map(|one| format!("it waits: {one}\n")).collect();
            print(&format!("peer {} {result}\n{reasons}", found.id))
        }
    }
}

/// Why a peer cannot be removed from the list, if it cannot.
fn why_not_forget(peer: &Peer) -> Option<String> {
    let id = peer.id.to_string();
    let id = &id[..8];
    match (peer.health, peer.stats) {
        (Health::Lost, _) => None,
        // Only a heartbeat tells how many fragments a peer holds, and a peer that is down sends
        // none.
        (_, None) => Some(format!(
            "it is down, so it is not known whether it is empty; if it was drained, or if it will \
             not return, run `cairn peers lose {id}` first"
        )),
        (_, Some(stats)) if stats.fragments == 0 => None,
        (_, Some(stats)) => Some(format!(
            "it holds {}; move them with `cairn peers drain {id}`, or give them up with \
             `cairn peers lose {id}`",
            count(stats.fragments, "fragment")
        )),
    }
}

/// The peer with this address, or with an id that begins with `name`.
fn find(peers: &[Peer], name: &str) -> Outcome<Peer> {
    let matches = |peer: &&Peer| peer.address == name || peer.id.to_string().starts_with(name);
    let found: Vec<&Peer> = peers.iter().filter(matches).collect();
    match found[..] {
        [peer] => Ok(peer.clone()),
        [] => Err(cairn_store::Error::NoPeer { peer: name.into() })
            .doing(|| "looking for a peer".into()),
        _ => {
            let why = format!("several ids begin with '{name}'; write more of the id");
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
        print(&report_text(&report, style))?;
    }
    if !unreadable.is_empty() {
        let why = format!(
            "{} cannot be read until more peers are back: {}",
            count(unreadable.len() as u64, "blob"),
            unreadable[..unreadable.len().min(5)].join(" ")
        );
        return Err(Failure::new(Exit::Corrupt, "repairing the cluster", why));
    }
    if report.unread > 0 {
        let why = format!(
            "{} could not be read, so the data below was not checked; repair again",
            count(report.unread, "tree node")
        );
        return Err(Failure::new(Exit::Unavailable, "repairing the cluster", why));
    }
    if !report.failures.is_empty() {
        let why = format!(
            "{} failed, the first one: {}",
            count(report.failures.len() as u64, "step"),
            report.failures[0]
        );
        return Err(Failure::new(Exit::Unavailable, "repairing the cluster", why));
    }
    Ok(())
}

/// What a repair found and did.
fn report_text(report: &Report, style: Style) -> String {
    let mut text = format!(
        "{} checked, {} with less than the full redundancy: {} rebuilt, {} moved, {} dropped, {} \
         transferred\n",
        count(report.blobs, "blob"),
        report.under,
        count(report.rebuilt, "fragment"),
        report.moved,
        report.dropped,
        style.size(report.bytes),
    );
    if report.resealed > 0 {
        let copies = if report.resealed == 1 { "copy" } else { "copies" };
        text += &format!("{} {copies} of records sealed with the newest key\n", report.resealed);
    }
    if report.waiting > 0 {
        text += &format!(
            "{} for peers that are down, because most peers return; to rebuild the fragments of a \
             peer that will not, run `cairn peers lose PEER`\n",
            match report.waiting {
                1 => "1 blob waits".into(),
                waiting => format!("{waiting} blobs wait"),
            },
        );
    }
    if !report.wrong.is_empty() {
        let peers: Vec<String> =
            report.suspects().keys().map(|peer| peer.to_string()[..8].to_owned()).collect();
        text += &format!(
            "{} had the right checksum and another content, on peers {}; they are not used, and \
             the log names the blobs\n",
            count(report.wrong.len() as u64, "fragment"),
            peers.join(" "),
        );
    }
    let others = report.left.saturating_sub(report.waiting);
    if others > 0 {
        text += &format!(
            "{} still less than the full redundancy for other reasons\n",
            match others {
                1 => "1 blob has".into(),
                others => format!("{others} blobs have"),
            },
        );
    }
    text
}

fn report_json(report: &Report) -> Value {
    let suspects: Vec<String> = report.suspects().keys().map(ToString::to_string).collect();
    json!({
        "blobs": report.blobs,
        "under": report.under,
        "left": report.left,
        "waiting": report.waiting,
        "rebuilt": report.rebuilt,
        "moved": report.moved,
        "dropped": report.dropped,
        "resealed": report.resealed,
        "damaged": report.damaged,
        "wrong": report.wrong.len(),
        "suspects": suspects,
        "bytes": report.bytes,
        "survives": report.survives,
        "unreadable": report.unreadable.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "unread": report.unread,
        "failures": report.failures.len(),
    })
}

pub(crate) fn rebuild(repository: &Repository, force: bool, style: Style) -> Outcome {
    documents(repository)?;
    let rebuilt = maintenance::rebuild_catalog(repository, force)
        .doing(|| "restoring the catalog from the peers".into())?;
    if style.json {
        return print_json(&json!({
            "images": rebuilt.images,
            "snapshots": rebuilt.snapshots,
            "removed": rebuilt.removed,
            "left": rebuilt.left,
            "policies_lost": rebuilt.keeps_all,
        }));
    }
    let mut text =
        format!("images restored: {}, snapshots restored: {}\n", rebuilt.images, rebuilt.snapshots);
    if rebuilt.removed > 0 {
        text += &format!(
            "removed again, because the catalog was an older copy: {} snapshots\n",
            rebuilt.removed
        );
    }
    if !rebuilt.left.is_empty() {
        let names = rebuilt.left.join(" ");
        text += &format!("not restored, because another image has the name: {names}\n");
    }
    if rebuilt.keeps_all {
        text += "the policies are lost: / keeps all snapshots until you set it again\n";
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use cairn_store::cluster::membership::{LastRepair, PeerStats};
    use cairn_store::cluster::repair::WrongFragment;
    use cairn_store::{BlobId, PeerId};

    use super::{Health, Peer, Report, Style, find, report_text, summary, why_not_forget};

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
    fn a_peer_is_found_by_its_address_or_by_the_beginning_of_its_id() {
        let all = [peer(0x12), peer(0x13), peer(0x20)];
        let id = |name| find(&all, name).map(|peer| peer.id).ok();
        assert_eq!(id("12"), Some(all[0].id));
        assert_eq!(id("2"), Some(all[2].id));
        assert_eq!(id("10.0.0.19:7500"), Some(all[1].id));
        assert_eq!(id("1"), None, "two peers match");
        assert_eq!(id("30"), None);
    }

    #[test]
    fn a_peer_is_forgotten_if_it_is_lost_or_known_to_be_empty() {
        let with = |health, fragments: Option<u64>| {
            let stats = |fragments| PeerStats { capacity: 9, fragments, ..PeerStats::default() };
            Peer { health, draining: true, stats: fragments.map(stats), ..peer(0x12) }
        };
        assert_eq!(why_not_forget(&with(Health::Lost, None)), None);
        assert_eq!(why_not_forget(&with(Health::Draining, Some(0))), None);
        let why = why_not_forget(&with(Health::Draining, Some(1))).unwrap();
        assert!(why.contains("holds 1 fragment;") && why.contains("peers drain 12121212"), "{why}");
        let why = why_not_forget(&with(Health::Down, None)).unwrap();
        assert!(why.contains("is down") && why.contains("cairn peers lose 12121212"), "{why}");
        assert!(!why.contains("holds"), "{why}");
    }

    #[test]
    fn the_summary_says_how_many_more_losses_are_survived() {
        assert_eq!(summary(None), "no repair has finished yet");
        let repair = |blobs, under, unreadable, survives| {
            summary(Some(&LastRepair { time: 0, blobs, under, unreadable, survives }))
        };
        let time = "as of the repair of 1970-01-01 00:00:00Z";
        assert_eq!(repair(0, 0, 0, None), format!("no snapshot had blobs, {time}"));
        assert_eq!(
            repair(9, 1, 0, Some(1)),
            format!(
                "9 blobs: each survives the loss of at least 1 more peer; 1 has less than the full \
                 redundancy, {time}"
            )
        );
        assert_eq!(
            repair(1, 0, 0, Some(2)),
            format!(
                "1 blob: each survives the loss of at least 2 more peers; 0 have less than the full \
                 redundancy, {time}"
            )
        );
        assert_eq!(repair(9, 9, 2, Some(-1)), format!("2 of 9 blobs cannot be read, {time}"));
    }

    #[test]
    fn the_report_of_a_repair_says_that_it_waits_for_peers_that_are_down() {
        let style = Style { json: false, bytes: true };
        let mut report = Report::default();
        report.blobs = 9;
        let text = report_text(&report, style);
        assert_eq!(text.lines().count(), 1, "{text}");
        (report.under, report.left, report.waiting) = (5, 5, 4);
        let text = report_text(&report, style);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("9 blobs checked, 5 with less"), "{text}");
        assert!(lines[1].starts_with("4 blobs wait for peers that are down"), "{text}");
        assert!(lines[1].contains("cairn peers lose"), "{text}");
        assert!(lines[2].starts_with("1 blob has still less"), "{text}");
    }

    #[test]
    fn the_report_of_a_repair_names_the_peers_with_wrong_fragments() {
        let mut report = Report::default();
        let blob = BlobId::from_bytes([9; 32]);
        for (n, index) in [(0x12, 0), (0x12, 1), (0x34, 2)] {
            let peer = PeerId::from_bytes([n; 16]);
            report.wrong.insert(WrongFragment { peer, blob, encoding: blob, index });
        }
        let text = report_text(&report, Style { json: false, bytes: true });
        let line = text.lines().nth(1).unwrap();
        assert!(line.starts_with("3 fragments had the right checksum"), "{text}");
        assert!(line.contains("on peers 12121212 34343434;"), "{text}");
    }
}
