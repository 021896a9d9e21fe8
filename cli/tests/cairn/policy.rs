//! Retention policies and prunes.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use cairn_store::SnapshotEdit;
use serde_json::{Value, json};

use crate::lab::{Lab, wait_until};
use crate::support::{Place, Timeline};

const DAY: u64 = 86_400;

/// 2026-03-01 12:00 UTC, a Sunday.
const NOON: u64 = 1_772_366_400;

/// The action and the reason for each snapshot of a prune.
fn actions(pruned: &Value) -> BTreeMap<String, (String, String)> {
    let text = |one: &Value, field: &str| one[field].as_str().unwrap().to_owned();
    let all = pruned.as_array().unwrap().iter();
    all.map(|one| (text(one, "snapshot"), (text(one, "action"), text(one, "reason")))).collect()
}

fn snapshots(place: &Place, image: &str) -> Vec<u64> {
    let all = place.json(&["ls", image]);
    all.as_array().unwrap().iter().map(|one| one["number"].as_u64().unwrap()).collect()
}

#[test]
fn a_prune_keeps_what_the_policy_names_and_says_why() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    let timeline = Timeline::attach(&place, "vm1");
    // Two snapshots a day, of eight days: 2 to 17.
    for day in (0..8).rev() {
        timeline.take(NOON - day * DAY - 3600);
        timeline.take(NOON - day * DAY);
    }
    let pending = timeline.pending(NOON + 60);
    place.ok(&["pin", "vm1@4"]);
    assert_eq!(
        place.ok(&["policy", "set", "vm1", "--keep-last", "1", "--keep-daily", "3"]),
        "vm1: keep-last 1, keep-daily 3\n"
    );
    let before = snapshots(&place, "vm1");
    let plan = place.json(&["prune", "vm1", "--dry-run"]);
    assert_eq!(snapshots(&place, "vm1"), before, "a dry run removes nothing");
    let plan = actions(&plan);
    let one = |number: u64| {
        let (action, reason) = &plan[&format!("vm1@{number}")];
        (action.as_str(), reason.as_str())
    };
    assert_eq!(one(17), ("keep", "keep-last"));
    assert_eq!(one(15), ("keep", "keep-daily (2026-02-28)"));
    assert_eq!(one(13), ("keep", "keep-daily (2026-02-27)"));
    assert_eq!(one(11), ("keep", "keep-daily (2026-02-26)"));
    assert_eq!(one(4), ("keep", "pinned"));
    assert_eq!(one(16), ("remove", "no rule keeps it"));
    assert_eq!(one(1), ("remove", "no rule keeps it"), "it was taken today, but others are newer");
    assert_eq!(one(pending), ("keep", "it is being stored"));
    let text = place.ok(&["prune", "vm1", "--dry-run"]);
    assert!(text.starts_with("SNAPSHOT  TIME"), "{text}");
    assert!(text.ends_with("would remove 12 of 18 snapshots\n"), "{text}");
    let text = place.ok(&["prune"]);
    assert!(text.ends_with("removed 12 of 18 snapshots\n"), "{text}");
    assert_eq!(snapshots(&place, "vm1"), [4, 11, 13, 15, 17, pending]);
    assert!(place.ok(&["prune"]).ends_with("removed 0 of 6 snapshots\n"));
}

#[test]
fn without_a_policy_and_with_keep_all_nothing_goes() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    let timeline = Timeline::attach(&place, "vm1");
    timeline.take_all(&[NOON, NOON + DAY, NOON + 2 * DAY]);
    for _ in 0..2 {
        let pruned = place.json(&["prune"]);
        for (name, (action, reason)) in actions(&pruned) {
            assert_eq!((&*action, &*reason), ("keep", "keep-all"), "{name}");
        }
        place.ok(&["policy", "set", "/", "--keep-all"]);
    }
}

#[test]
fn the_last_stable_snapshot_and_the_parent_of_a_mirror_stay_whatever_the_policy_is() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    let timeline = Timeline::attach(&place, "vm1");
    let parent = timeline.take(NOON - 400 * DAY);
    place.ok(&["policy", "set", "vm1", "--keep-within", "1d"]);
    let pruned = actions(&place.json(&["prune", "vm1"]));
    let reason = &pruned[&format!("vm1@{parent}")].1;
    assert!(reason.starts_with("the parent of mirror"), "{reason}");
    // A minute ago by the clock of this host, and long ago.
    assert_eq!(snapshots(&place, "vm1"), [1, parent]);
    timeline.take(NOON - 300 * DAY);
    timeline.detach();
    place.ok(&["prune", "vm1"]);
    assert_eq!(snapshots(&place, "vm1"), [1, 3], "the last stable one is a year old");

    place.ok(&["create", "vm2", "1M"]);
    let timeline = Timeline::attach(&place, "vm2");
    let [old, last] = [timeline.take(NOON - 400 * DAY), timeline.take(NOON - 399 * DAY)];
    let failed = timeline.fail(NOON - 398 * DAY);
    timeline.detach();
    place.ok(&["rm", "vm2@1"]);
    place.ok(&["policy", "set", "vm2", "--keep-within", "1h"]);
    let pruned = actions(&place.json(&["prune", "vm2"]));
    assert_eq!(pruned[&format!("vm2@{old}")].0, "removed");
    assert_eq!(pruned[&format!("vm2@{last}")].1, "the last stable snapshot");
    assert_eq!(snapshots(&place, "vm2"), [last, failed]);
}

#[test]
fn the_longest_folder_wins_and_a_prune_of_a_folder_leaves_other_images_alone() {
    let place = Place::new();
    for image in ["job1/a", "job1/deep/b", "job2/a", "vm"] {
        place.ok(&["create", image, "1M"]);
        let timeline = Timeline::attach(&place, image);
        timeline.take_all(&[NOON, NOON + DAY, NOON + 2 * DAY, NOON + 3 * DAY]);
        timeline.detach();
    }
    place.ok(&["policy", "set", "/", "--keep-last", "4"]);
    place.ok(&["policy", "set", "job1/", "--keep-last", "3"]);
    place.ok(&["policy", "set", "job1/deep/", "--keep-last", "2"]);
    place.ok(&["policy", "set", "vm", "--keep-last", "1"]);
    let listed = place.json(&["policy", "show"]);
    let scopes: Vec<_> = listed.as_array().unwrap().iter().map(|one| &one["scope"]).collect();
    assert_eq!(json!(scopes), json!(["/", "job1/", "job1/deep/", "vm"]));
    let shown = place.json(&["policy", "show", "job1/deep/b"]);
    assert_eq!((&shown["scope"], &shown["policy"]["last"]), (&"job1/deep/".into(), &2.into()));
    assert_eq!(place.json(&["policy", "show", "job2/a"])["scope"], "/");
    assert!(place.ok(&["policy", "show", "vm"]).contains("policy:  keep-last 1"));
    place.ok(&["prune", "job1/"]);
    let left = |image: &str| snapshots(&place, image).len();
    let all = || [left("job1/a"), left("job1/deep/b"), left("job2/a"), left("vm")];
    assert_eq!(all(), [3, 2, 5, 5]);
    place.ok(&["policy", "rm", "job1/deep/"]);
    assert_eq!(place.json(&["policy", "show", "job1/deep/b"])["scope"], "job1/");
    place.ok(&["prune"]);
    assert_eq!(all(), [3, 2, 4, 1]);
    // The policy of an image goes with it.
    place.ok(&["rm", "vm"]);
    place.ok(&["create", "vm", "1M"]);
    assert_eq!(place.json(&["policy", "show", "vm"])["scope"], "/");
}

#[test]
fn a_policy_that_makes_no_sense_is_refused_with_the_reason() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    for (args, code, text) in [
        (&["set", "vm1"][..], 2, "at least one rule"),
        (&["set", "vm1", "--keep-all", "--keep-last", "1"], 2, "--keep-all"),
        (&["set", "vm1", "--keep-last", "0"], 2, "keeps nothing"),
        (&["set", "vm1", "--keep-last", "-1"], 2, ""),
        (&["set", "vm1", "--keep-daily", "99999999999"], 2, ""),
        (&["set", "vm1", "--keep-within", "0d"], 2, "such as 7d"),
        (&["set", "vm1", "--keep-within", "a week"], 2, "such as 7d"),
        (&["set", "vm1", "--keep-within", "7"], 2, "such as 7d"),
        (&["set", "vm1", "--keep-daily", "1", "--utc-offset", "+25:00"], 2, "+01:00"),
        (&["set", "vm2", "--keep-last", "1"], 3, "vm2"),
        (&["set", "a b", "--keep-last", "1"], 2, "letters"),
        (&["set", "//", "--keep-last", "1"], 2, "letters"),
        (&["rm", "vm1"], 3, "no policy is set on 'vm1'"),
        (&["show", "vm2"], 3, "vm2"),
    ] {
        let run = place.run(&[&["policy"], args].concat());
        assert!(run.code == code && run.stderr.contains(text), "{args:?}: {}", run.stderr);
    }
    for (args, code) in
        [(&["prune", "vm2"][..], 3), (&["prune", "job/"], 3), (&["prune", "x y"], 2)]
    {
        assert_eq!(place.run(args).code, code, "{args:?}");
    }
    assert_eq!(place.json(&["policy", "show"]), json!([]));
    let offset = ["policy", "set", "/", "--keep-daily", "7", "--utc-offset", "-05:30"];
    assert_eq!(place.ok(&offset), "/: keep-daily 7, at UTC-05:30\n");
    assert_eq!(place.ok(&["prune"]).lines().count(), 3);
}

/// Prunes and removals at the same time leave a stable snapshot, and nothing half removed.
#[test]
fn prunes_beside_removals_leave_a_stable_snapshot() {
    let place = Place::new();
    for round in 0..3 {
        let image = format!("vm{round}");
        place.ok(&["create", &image, "1M"]);
        let timeline = Timeline::attach(&place, &image);
        let all: Vec<u64> = (0..8).map(|day| timeline.take(NOON - day * DAY)).collect();
        timeline.detach();
        place.ok(&["policy", "set", &image, "--keep-last", "1"]);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| place.ok(&["prune", &image]));
            }
            scope.spawn(|| {
                for number in all.iter().rev() {
                    let run = place.run(&["rm", &format!("{image}@{number}")]);
                    assert!([0, 3, 4].contains(&run.code), "{}", run.stderr);
                }
            });
        });
        let left = place.json(&["ls", &image]);
        let left = left.as_array().unwrap();
        assert!(left.iter().any(|one| one["state"] == "stable"), "{left:?}");
        assert!(left.iter().all(|one| one["state"] == "stable"), "{left:?}");
    }
}

#[test]
fn ages_are_measured_by_the_clock_of_this_host() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    let timeline = Timeline::attach(&place, "vm1");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let [old, young, future] =
        [now - 3 * DAY, now - 3600, now + 9 * DAY].map(|at| timeline.take(at));
    timeline.detach();
    place.ok(&["policy", "set", "/", "--keep-within", "2d"]);
    place.ok(&["prune"]);
    assert_eq!(snapshots(&place, "vm1"), [1, young, future]);
    assert!(!snapshots(&place, "vm1").contains(&old));
}

/// What an edit has changed survives the loss of the catalog, and what a prune has removed does not
/// come back with it. The supervisor has its own keys.
#[test]
fn edits_and_prunes_survive_a_catalog_that_is_lost() {
    let mut lab = Lab::with(3, true, "600");
    lab.ok(&["create", "job/a", "1M"]);
    let timeline = Timeline::attach_to(&lab.repository(), "job/a");
    timeline.take_all(&[NOON, NOON + DAY, NOON + 2 * DAY, NOON + 3 * DAY]);
    let obsolete = timeline.take_from(NOON + 4 * DAY, true);
    timeline.take(NOON + 5 * DAY);
    timeline.detach();
    lab.ok(&["tag", "job/a@2", "golden"]);
    lab.ok(&["tag", "job/a@2", "old"]);
    lab.ok(&["tag", "job/a@2", "old", "--remove"]);
    lab.ok(&["meta", "job/a@3", "owner=ann"]);
    lab.ok(&["meta", "job/a@3", "owner=bob"]);
    lab.ok(&["pin", "job/a@2"]);
    let rebuild = |lab: &mut Lab| {
        let before = lab.json(&["ls", "job/a"]);
        lab.replace_catalog(3);
        let text = lab.ok(&["catalog", "rebuild"]);
        assert!(text.contains("the policies are lost: / keeps all"), "{text}");
        assert_eq!(lab.json(&["policy", "show"])[0]["scope"], "/", "no peer knows of policies");
        assert_eq!(lab.json(&["ls", "job/a"]), before);
        assert_eq!(lab.json(&["show", "job/a@golden"])["number"], 2);
        assert_eq!(lab.run(&["show", "job/a@old"]).code, 3);
        assert_eq!(lab.run(&["rm", "job/a@2"]).code, 4, "it is pinned");
    };
    rebuild(&mut lab);
    // Without a policy, the guest's wish is enough.
    let name = format!("job/a@{obsolete}");
    let numbers = |lab: &Lab| {
        let all = lab.json(&["ls", "job/a"]);
        let all = all.as_array().unwrap().iter().map(|one| one["number"].as_u64().unwrap());
        all.collect::<Vec<_>>()
    };
    let repository = lab.repository();
    let marked = repository.edit_snapshot(&name.parse().unwrap(), &SnapshotEdit::Obsolete).unwrap();
    assert!(marked.is_obsolete);
    let kept = lab.ok(&["prune", "/"]);
    assert!(kept.contains("removed 0 of "), "the lost policy may have kept it: {kept}");
    lab.ok(&["policy", "rm", "/"]);
    wait_until("the supervisor has removed it", || numbers(&lab) == [1, 2, 3, 4, 5, 7]);
    lab.ok(&["policy", "set", "job/", "--keep-last", "2"]);
    wait_until("the supervisor has pruned", || numbers(&lab) == [2, 5, 7]);
    rebuild(&mut lab);
}
