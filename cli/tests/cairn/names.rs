//! Labels, pins, metadata, and listings with filters.

use serde_json::{Value, json};

use crate::support::{Place, Timeline};

/// The names in a listing.
fn names(listing: &Value) -> Vec<&str> {
    let name = |one: &'_ Value| if one["snapshot"].is_null() { "name" } else { "snapshot" };
    listing.as_array().unwrap().iter().map(|one| one[name(one)].as_str().unwrap()).collect()
}

#[test]
fn a_label_is_given_used_and_taken_away() {
    let place = Place::new();
    place.ok(&["create", "job42/node3", "1M"]);
    Timeline::attach(&place, "job42/node3").take(1_700_000_000);
    assert_eq!(place.ok(&["tag", "job42/node3@1", "golden"]), "job42/node3@1\n");
    place.ok(&["tag", "job42/node3@golden", "v1.0"]);
    assert_eq!(place.json(&["show", "job42/node3@v1.0"])["labels"], json!(["golden", "v1.0"]));
    let taken = place.run(&["tag", "job42/node3@2", "golden"]);
    assert!(taken.code == 4 && taken.stderr.contains("golden"), "{}", taken.stderr);
    place.ok(&["tag", "job42/node3@1", "golden", "--remove"]);
    place.ok(&["tag", "job42/node3@2", "golden"]);
    assert_eq!(place.json(&["show", "job42/node3@golden"])["number"], 2);
    for (args, code) in [
        (&["tag", "job42/node3@1", "golden", "--remove"][..], 3),
        (&["tag", "job42/node3@7", "x"], 3),
        (&["tag", "job42/node3@1", "7"], 2),
        (&["tag", "job42/node3@1", "a b"], 2),
        (&["tag", "job42/node3@1"], 2),
        (&["tag", "job42@1", "x"], 3),
    ] {
        assert_eq!(place.run(args).code, code, "{args:?}");
    }
}

#[test]
fn a_pinned_snapshot_is_not_removed_and_neither_is_its_image() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    let timeline = Timeline::attach(&place, "vm1");
    timeline.take(1_700_000_000);
    timeline.detach();
    place.ok(&["pin", "vm1@1"]);
    place.ok(&["pin", "vm1@1"]);
    let refused = place.run(&["rm", "vm1@1"]);
    assert!(
        refused.code == 4 && refused.stderr.contains("cairn unpin vm1@1"),
        "{}",
        refused.stderr
    );
    for args in [&["rm", "vm1"][..], &["rm", "vm1", "--force"]] {
        let refused = place.run(args);
        assert!(refused.code == 4 && refused.stderr.contains("--pinned"), "{}", refused.stderr);
    }
    assert_eq!(names(&place.json(&["ls", "vm1", "--pinned"])), ["vm1@1"]);
    assert_eq!(place.json(&["ls"])[0]["pinned"], 1);
    place.ok(&["unpin", "vm1@1"]);
    place.ok(&["rm", "vm1@1"]);
    place.ok(&["rm", "vm1"]);
}

#[test]
fn metadata_is_set_shown_and_removed_and_odd_bytes_are_refused() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    assert_eq!(place.ok(&["meta", "vm1@1"]), "");
    place.ok(&["meta", "vm1@1", "owner=ann", "note=a=b ü"]);
    assert_eq!(place.ok(&["meta", "vm1@1"]), "note=a=b ü\nowner=ann\n");
    place.ok(&["meta", "vm1@1", "owner=bob", "--unset", "note"]);
    assert_eq!(place.json(&["meta", "vm1@1"]), json!({ "owner": "bob" }));
    let long = format!("a={}", "x".repeat(257));
    for pair in ["owner", "=x", "a b=x", "a=x\ny", "a=\u{1b}[2J", &long] {
        let refused = place.run(&["meta", "vm1@1", pair]);
        assert_eq!(refused.code, 2, "{pair:?}");
        assert!(!refused.stderr.contains('\u{1b}'), "{:?}", refused.stderr);
    }
    let many: Vec<String> = (0..16).map(|key| format!("k{key}=v")).collect();
    let many: Vec<&str> =
        ["meta", "vm1@1"].into_iter().chain(many.iter().map(|one| &**one)).collect();
    assert_eq!(place.run(&many).code, 2, "with 'owner', there are too many");
    assert_eq!(place.json(&["meta", "vm1@1"]), json!({ "owner": "bob" }), "nothing has changed");
}

#[test]
fn snapshots_are_listed_by_folder_label_age_state_metadata_and_pin() {
    let place = Place::new();
    for image in ["job1/a", "job1/b", "job10/a", "vm"] {
        place.ok(&["create", image, "1M"]);
    }
    let timeline = Timeline::attach(&place, "job1/a");
    timeline.take(1_700_000_000);
    timeline.fail(1_700_000_100);
    timeline.take(1_700_000_200);
    place.ok(&["tag", "job1/a@2", "release-1"]);
    place.ok(&["tag", "vm@1", "release-2"]);
    place.ok(&["pin", "job1/b@1"]);
    place.ok(&["meta", "job1/b@1", "step=4"]);
    let list = |args: &[&str]| {
        let listing = place.json(&[&["ls"], args].concat());
        names(&listing).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(list(&["job1/"]), ["job1/a", "job1/b"]);
    let all = ["job1/a@1", "job1/a@2", "job1/a@3", "job1/a@4", "job1/b@1"];
    assert_eq!(list(&["job1/", "--snapshots"]), all);
    assert_eq!(list(&["--label", "release-*"]), ["job1/a@2", "vm@1"]);
    assert_eq!(list(&["job1/", "--label", "release-?"]), ["job1/a@2"]);
    assert_eq!(list(&["--state", "failed"]), ["job1/a@3"]);
    assert_eq!(list(&["--older-than", "52w"]), ["job1/a@2", "job1/a@3", "job1/a@4"]);
    assert_eq!(list(&["job1/a", "--newer-than", "1h"]), ["job1/a@1"]);
    assert_eq!(list(&["--meta", "step=4"]), ["job1/b@1"]);
    assert_eq!(list(&["--meta", "step"]), ["job1/b@1"]);
    assert_eq!(list(&["--meta", "step=5"]).len(), 0);
    assert_eq!(list(&["--pinned"]), ["job1/b@1"]);
    assert_eq!(list(&["--obsolete"]).len(), 0);
    assert_eq!(list(&["job1/a", "--sort", "time", "--limit", "2"]), ["job1/a@2", "job1/a@3"]);
    let newest = ["job1/a@1", "job1/a@4", "job1/a@3"];
    assert_eq!(list(&["job1/a", "--sort", "time", "--reverse", "--limit", "3"]), newest);
    assert_eq!(list(&["job1/a", "--sort", "changed", "--reverse"])[0], "job1/a@4");
    let text = place.ok(&["ls", "job1/b"]);
    assert!(text.lines().nth(1).unwrap().ends_with("-       pinned, step=4"), "{text}");
    for (args, code) in [
        (&["ls", "job2/"][..], 3),
        (&["ls", "job2/", "--pinned"], 3),
        (&["ls", "job1"], 3),
        (&["ls", "/a"], 2),
        (&["ls", "--state", "lost"], 2),
        (&["ls", "--newer-than", "soon"], 2),
        (&["ls", "--older-than", "7"], 2),
        (&["ls", "--meta", "a b"], 2),
        (&["ls", "--sort", "stored"], 2),
        (&["ls", "--limit", "0"], 2),
        (&["ls", "--after", "vm@1"], 2),
        (&["ls", "vm", "--after", "3"], 2),
        (&["ls", "vm", "--after", "vm@1", "--sort", "time"], 2),
    ] {
        assert_eq!(place.run(args).code, code, "{args:?}");
    }
}

#[test]
fn the_pages_of_a_listing_are_the_whole_listing() {
    let place = Place::new();
    for image in ["a", "a/b", "b", "c"] {
        place.ok(&["create", image, "1M"]);
        let timeline = Timeline::attach(&place, image);
        timeline.take_all(&[1_700_000_000, 1_700_000_001, 1_700_000_002]);
    }
    for whole in [&["ls"][..], &["ls", "--snapshots"], &["ls", "a/", "--snapshots"], &["ls", "b"]] {
        let all = place.json(whole);
        for limit in ["1", "2", "5"] {
            let mut found: Vec<Value> = Vec::new();
            loop {
                let mut args = [whole, &["--limit", limit]].concat();
                let after = found.last().map(|one| names(&json!([one]))[0].to_owned());
                args.extend(after.iter().flat_map(|after| ["--after", after]));
                let page = place.json(&args);
                let page = page.as_array().unwrap();
                assert!(page.len() <= limit.parse().unwrap());
                if page.is_empty() {
                    break;
                }
                found.extend(page.iter().cloned());
            }
            assert_eq!(json!(found), all, "{whole:?} in pages of {limit}");
        }
    }
}
