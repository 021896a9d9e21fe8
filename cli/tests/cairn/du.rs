//! `cairn du`: what it says is what a removal and a collection free.

use std::fs;

use serde_json::Value;

use crate::lab::{Lab, random};
use crate::support::{Place, Timeline};

const MIB: usize = 1 << 20;

/// A field of the line with this name.
fn of(found: &Value, name: &str, field: &str) -> u64 {
    let one = found.as_array().unwrap().iter().find(|one| one["name"] == name);
    one.unwrap_or_else(|| panic!("{name} is not in {found}"))[field].as_u64().unwrap()
}

#[test]
fn a_removal_and_a_collection_free_what_du_says() {
    let place = Place::new();
    let base = random(1, 4 * MIB);
    for (image, own) in [("a", 2), ("b", 3), ("job/c", 1)] {
        let mut disk = base.clone();
        disk.extend(random(10 + own as u64, own * MIB));
        fs::write(place.path("disk.raw"), disk).unwrap();
        place.ok(&["import", "disk.raw", image]);
    }
    place.ok(&["clone", "b@1", "copy"]);
    let all = place.json(&["du"]);
    assert_eq!(all.as_array().unwrap().len(), 4, "{all}");
    assert_eq!(of(&all, "a", "unique_bytes"), 2 * MIB as u64);
    assert_eq!(of(&all, "a", "shared_bytes"), 4 * MIB as u64);
    assert_eq!(of(&all, "b", "unique_bytes"), 0, "its clone has everything");
    assert_eq!(of(&all, "job/c", "unique_bytes"), MIB as u64);
    assert_eq!(place.json(&["du", "job/"]).as_array().unwrap().len(), 1);
    let b = place.json(&["du", "b"]);
    assert_eq!(
        (&b[0]["name"], &b[1]["name"], &b[1]["number"]),
        (&"b".into(), &"b@1".into(), &1.into())
    );

    for image in ["a", "b", "copy", "job/c"] {
        let said = of(&place.json(&["du", image]), image, "frees_bytes");
        place.ok(&["rm", image]);
        let freed = place.json(&["gc", "--grace", "0"])["freed_bytes"].as_u64().unwrap();
        assert_eq!(freed, said, "{image}");
        assert_eq!(freed == 0, image == "b", "{image}");
    }
    assert_eq!(place.json(&["du"]), serde_json::json!([]));
}

#[test]
fn what_a_mirror_needs_is_shared_until_the_mirror_is_gone() {
    let place = Place::new();
    fs::write(place.path("disk.raw"), random(1, MIB)).unwrap();
    place.ok(&["import", "disk.raw", "vm"]);
    let timeline = Timeline::attach(&place, "vm");
    // An empty snapshot. The mirror continues from it.
    assert_eq!(timeline.take(1), 2);
    let snapshot = |name| place.json(&["du", name])[0].clone();
    assert_eq!(snapshot("vm@1")["unique_bytes"], MIB);
    assert_eq!(snapshot("vm@2")["unique_bytes"], 0);
    timeline.detach();
    place.ok(&["clone", "vm@1", "other"]);
    let timeline = Timeline::attach(&place, "other");
    place.ok(&["rm", "vm"]);
    let held = snapshot("other");
    assert_eq!((&held["unique_bytes"], &held["frees_bytes"]), (&0.into(), &0.into()), "{held}");
    timeline.detach();
    assert_eq!(snapshot("other")["unique_bytes"], MIB);
    let text = place.ok(&["du", "other"]);
    assert!(text.starts_with("NAME "), "{text}");
    assert!(text.contains("other@1") && text.contains("1 MiB"), "{text}");
    assert_eq!(place.run(&["du", "vm"]).code, 3);
    assert_eq!(place.run(&["du", "other@9"]).code, 3);
    assert_eq!(place.run(&["du", "folder/"]).code, 3);
}

#[test]
fn in_a_cluster_the_freed_space_is_not_known() {
    let lab = Lab::new(3);
    lab.random_disk("disk.raw", 1, MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=2"]);
    lab.ok(&["clone", "vm@1", "copy"]);
    let found = lab.json(&["du", "vm@1"]);
    assert_eq!((&found[0]["unique_bytes"], &found[0]["shared_bytes"]), (&0.into(), &MIB.into()));
    assert_eq!(found[0]["frees_bytes"], Value::Null);
    lab.ok(&["rm", "copy"]);
    assert_eq!(lab.json(&["du"])[0]["unique_bytes"], MIB);
}
