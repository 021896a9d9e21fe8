//! The list of mirrors.

use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cairn_store::{MirrorId, MirrorOwner, Mode, Repository};

use crate::support::Place;

/// Waits until the clock shows another second, because the catalog stores times in whole seconds.
fn next_second() {
    let time = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let begin = time();
    while time() == begin {
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn mirrors_that_another_one_replaced_in_their_directory_are_marked_until_they_are_forgotten() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    let url = format!("dir:{}", place.path("repository").display());
    let repository = Repository::open(&url).unwrap();
    let first = repository.catalog().resolve(&"vm1".parse().unwrap()).unwrap();
    let attach = |id: u8, path: &str| {
        let owner = MirrorOwner::this_process(MirrorId::from_bytes([id; 16]), path).unwrap();
        repository.attach(&owner, &first, Mode::ReadWrite).unwrap()
    };
    attach(9, "/mirrors/a-longer-path").release(None).unwrap();
    for id in [1, 2] {
        attach(id, "/mirrors/vm1").release(None).unwrap();
        next_second();
    }
    let running = attach(3, "/mirrors/vm1");
    let ids = [1, 2, 3, 9].map(|id: u8| MirrorId::from_bytes([id; 16]).to_string());

    let marks = || {
        let mut marks: Vec<_> = place.json(&["mirrors"]).as_array().unwrap().clone();
        marks.sort_by_key(|one| one["id"].to_string());
        let marks = marks.iter().map(|one| one["maybe_stale"].as_bool().unwrap());
        marks.collect::<Vec<_>>()
    };
    assert_eq!(marks(), [true, true, false, false]);

    let table = place.ok(&["mirrors"]);
    let (rows, advice) = table.split_once("\n\n").unwrap();
    let rows: Vec<_> = rows.lines().collect();
    let column = rows[0].find("NOTE").unwrap();
    let directory = rows[0].find("DIRECTORY").unwrap();
    for row in &rows[1..] {
        let is_marked = ids[..2].iter().any(|id| row.starts_with(id));
        let mark = if is_marked { "stale?" } else { "-" };
        assert_eq!(row[column..directory].trim_end(), mark, "{table}");
        assert!(row[directory..].starts_with("/mirrors/"), "{table}");
    }
    for (id, is_named) in ids.iter().zip([true, true, false, false]) {
        let command = format!("cairn mirrors forget {id}\n");
        assert_eq!(advice.contains(&command), is_named, "{table}");
    }

    let output = place.ok(&["mirrors", "forget", &ids[0]]);
    assert!(output.contains(&ids[0]) && output.contains("can no longer be used"), "{output}");
    assert_eq!(place.run(&["mirrors", "forget", &ids[2]]).code, 4, "it is in use");
    assert_eq!(marks(), [true, false, false]);
    place.ok(&["mirrors", "forget", &ids[1]]);
    assert!(!place.ok(&["mirrors"]).contains("stale?"));
    running.release(None).unwrap();
}
