//! Why the drain of a peer has not finished.
//!
//! Repair moves the fragments of a draining peer to other peers. Whether it can follows from the
//! members and from the redundancy of the images, which are in the catalog.

use cairn_store::cluster::membership::{Health, Peer};
use cairn_store::{Image, Repository};

use crate::args::Style;
use crate::failure::{Doing, Outcome};
use crate::output::count;

/// The images of the repository, if one of the peers is draining. Otherwise nobody needs them.
pub(crate) fn images_for(repository: &Repository, peers: &[Peer]) -> Outcome<Vec<Image>> {
    match peers.iter().any(|peer| peer.draining) {
        true => repository.catalog().images().doing(|| "listing the images".into()),
        false => Ok(Vec::new()),
    }
}

/// What the drain of a peer waits for, and what to do about it. It is empty if the peer is empty.
/// `None` if the peer is not draining.
pub(crate) fn waits_for(
    peer: &Peer,
    peers: &[Peer],
    images: &[Image],
    style: Style,
) -> Option<Vec<String>> {
    if !peer.draining || peer.health == Health::Lost {
        return None;
    }
    let Some(stats) = peer.stats else {
        return Some(vec!["it is down, so nothing is known about what it holds".into()]);
    };
    if stats.fragments == 0 {
        return Some(Vec::new());
    }
    let is_other = |other: &&Peer| other.id != peer.id && !other.draining;
    let others = |health| peers.iter().filter(is_other).filter(move |one| one.health == health);
    let (up, down): (Vec<_>, Vec<_>) =
        (others(Health::Up).collect(), others(Health::Down).collect());
    let mut reasons = Vec::new();
    let widest = images.iter().max_by_key(|image| image.policy.redundancy.width());
    let members = up.len() + down.len();
    if let Some((image, needed)) = widest.map(|image| (image, image.policy.redundancy.width()))
        && needed > members
    {
        reasons.push(format!(
            "image {} needs {}, and {}; add peers, or cancel the drain with --undo",
            image.name,
            count(needed as u64, "peer"),
            match members {
                1 => "1 other peer is a member".into(),
                members => format!("{members} other peers are members"),
            },
        ));
    }
    if !down.is_empty() {
        let ids: Vec<_> = down.iter().map(|peer| peer.id.to_string()[..8].to_owned()).collect();
        reasons.push(format!(
            "repair waits for peers that are down: {}; start them, or run `cairn peers lose` for a \
             peer that will not return",
            ids.join(" ")
        ));
    }
    let free = |peer: &&Peer| {
        peer.stats.map_or(0, |stats| stats.capacity.saturating_sub(stats.used + stats.reserved))
    };
    let free: u64 = up.iter().map(free).sum();
    if free < stats.used {
        reasons.push(format!(
            "it holds {}, and the other peers have space for {}; add peers, or make space",
            style.size(stats.used),
            style.size(free)
        ));
    }
    if reasons.is_empty() {
        reasons.push(format!(
            "repair moves or deletes {}; copies of which the other peers have enough, and content \
             of no snapshot, are deleted by the first repair after no client has stored them or \
             asked for them for a day",
            count(stats.fragments, "fragment")
        ));
    }
    Some(reasons)
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use cairn_store::cluster::membership::PeerStats;
    use cairn_store::encoding::Redundancy;
    use cairn_store::{Geometry, PeerId};

    use super::{Health, Image, Peer, Style, waits_for};

    fn peer(n: u8, health: Health, free: u64) -> Peer {
        let stats =
            PeerStats { capacity: 100 + free, used: 100, fragments: 7, ..Default::default() };
        Peer {
            id: PeerId::from_bytes([n; 16]),
            address: format!("10.0.0.{n}:7500"),
            domain: String::new(),
            weight: 1,
            health,
            draining: health == Health::Draining,
            joined: 0,
            down_since: None,
            stats: (health != Health::Down).then_some(stats),
            wrong: 0,
        }
    }

    fn image(redundancy: &str) -> Image {
        let redundancy: Redundancy = redundancy.parse().unwrap();
        Image {
            name: "vm".parse().unwrap(),
            geometry: Geometry::new(1 << 20, 65536).unwrap(),
            created: 0,
            snapshots: 1,
            pinned: 0,
            obsolete: 0,
            newest: Some(1),
            origin: None,
            policy: redundancy.into(),
        }
    }

    #[test]
    fn a_drain_waits_for_members_for_peers_that_are_down_and_for_space() {
        let style = Style { json: false, bytes: true };
        let reasons = |others: &[Peer], redundancy| {
            let drained = peer(1, Health::Draining, 0);
            let all = [&[drained.clone()][..], others].concat();
            waits_for(&drained, &all, &[image("none"), image(redundancy)], style).unwrap()
        };
        let up = |n| peer(n, Health::Up, 1000);
        let found = reasons(&[up(2), up(3)], "replicas=3");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("image vm needs 3 peers, and 2 other peers are"), "{found:?}");
        let found = reasons(&[up(2), peer(3, Health::Down, 0)], "replicas=2");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("that are down: 03030303;"), "{found:?}");
        let found = reasons(&[peer(2, Health::Up, 60), peer(3, Health::Up, 30)], "replicas=2");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("it holds 100, and the other peers have space for 90;"));
        // Lost and draining peers take nothing.
        let useless = [up(2), peer(3, Health::Lost, 1000), peer(4, Health::Draining, 1000)];
        assert!(
            reasons(&useless, "replicas=2")[0]
                .contains("needs 2 peers, and 1 other peer is a member;")
        );
        assert!(
            reasons(&[up(2), up(3)], "replicas=2")[0]
                .starts_with("repair moves or deletes 7 fragments; copies of which")
        );
    }

    #[test]
    fn a_peer_that_is_empty_or_not_draining_waits_for_nothing() {
        let style = Style { json: false, bytes: true };
        let waits_for =
            |peer: &Peer| super::waits_for(peer, from_ref(peer), &[image("none")], style);
        assert_eq!(waits_for(&peer(1, Health::Up, 0)), None);
        let mut drained = peer(1, Health::Draining, 0);
        drained.stats.as_mut().unwrap().fragments = 0;
        assert_eq!(waits_for(&drained), Some(Vec::new()));
        drained.stats = None;
        assert!(waits_for(&drained).unwrap()[0].contains("it is down"));
    }
}
