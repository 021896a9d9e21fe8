//! The list of mirrors.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cairn_store::{MirrorId, MirrorOwner, Mode, Repository};

use cairn_store::documents::{Change, Documents, Query, SqliteDocuments};
use serde_json::Value;

use crate::lab::random;
use crate::support::{Place, Timeline};

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

#[test]
fn a_mirror_of_a_removed_snapshot_shows_what_only_it_keeps() {
    const CHUNK: usize = 256 << 10;
    let place = Place::new();
    fs::write(place.path("disk.raw"), random(1, 4 * CHUNK)).unwrap();
    place.ok(&["import", "disk.raw", "vm1"]);
    let repository =
        Repository::open(&format!("dir:{}", place.path("repository").display())).unwrap();
    let first = repository.catalog().resolve(&"vm1".parse().unwrap()).unwrap();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([1; 16]), "/reader").unwrap();
    let reader = repository.attach(&owner, &first, Mode::ReadOnly).unwrap();
    let timeline = Timeline::attach_to(&repository, "vm1");
    timeline.take_changed(&repository, 1_000_000, (2, &random(2, CHUNK)));
    let alone = || place.json(&["mirrors"])[0]["alone_bytes"].clone();
    assert_eq!(alone(), 0, "the snapshot exists");

    place.ok(&["pin", "vm1@2"]);
    place.ok(&["rm", "vm1@1"]);
    timeline.detach();
    assert_eq!(alone(), CHUNK);
    let table = place.ok(&["mirrors"]);
    let (heading, row) = table.split_once('\n').unwrap();
    let end = heading.find("ALONE").unwrap() + "ALONE".len();
    assert!(row[..end].ends_with(" 256 KiB"), "{table}");

    let freed = || place.json(&["gc", "--grace", "0"])["freed_bytes"].as_u64().unwrap();
    assert_eq!(freed(), 0);
    let text = place.ok(&["gc", "--grace", "0"]);
    assert!(text.contains("/reader continues vm1@1, which was removed"), "{text}");
    assert!(text.contains("1 pinned snapshot of vm1"), "{text}");
    reader.release(None).unwrap();
    place.ok(&["mirrors", "forget", &owner.id.to_string()]);
    assert!(freed() >= CHUNK as u64);
    assert_eq!(place.json(&["mirrors"]), Value::Array(Vec::new()));
}

/// Changes when a mirror was last used, as the catalog knows it.
fn set_seen(place: &Place, id: &str, seen: u64) {
    let documents = SqliteDocuments::open(&place.path("repository/catalog.db")).unwrap();
    let key = format!("mirrors/{id}");
    let mut mirror: Value =
        documents.read(&[Query::key(&key)]).unwrap().get(&key).unwrap().unwrap();
    (mirror["seen"], mirror["attached"]) = (seen.into(), 0.into());
    assert!(documents.commit(&Change::default().put(key, &mirror)).unwrap());
}

#[test]
fn mirrors_that_no_process_has_used_for_long_are_forgotten_and_no_others() {
    let place = Place::new();
    for image in ["vm1", "vm2", "vm3", "vm4", "vm5"] {
        place.ok(&["create", image, "1M"]);
    }
    let url = format!("dir:{}", place.path("repository").display());
    let repository = Repository::open(&url).unwrap();
    let attach = |id: u8, image: &str, mode| {
        let newest = repository.catalog().resolve(&image.parse().unwrap()).unwrap();
        let owner = MirrorOwner::this_process(MirrorId::from_bytes([id; 16]), "/m").unwrap();
        repository.attach(&owner, &newest, mode).unwrap()
    };
    let id = |id: u8| MirrorId::from_bytes([id; 16]).to_string();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let long_ago = now - 31 * 86_400;
    let running = attach(1, "vm1", Mode::ReadWrite);
    let reader = attach(2, "vm2", Mode::ReadOnly);
    for (number, image) in [(3, "vm3"), (4, "vm4"), (5, "vm5")] {
        attach(number, image, Mode::ReadWrite).release(None).unwrap();
    }
    for (number, seen) in
        [(1, long_ago), (2, long_ago), (3, long_ago), (4, now - 29 * 86_400), (5, now + 86_400)]
    {
        set_seen(&place, &id(number), seen);
    }
    // A running reader notes that it uses its mirror.
    reader.renew().unwrap();
    let all = |args: &[&str]| {
        let list = place.json(&[&["mirrors", "forget", "--unseen", "30d"], args].concat());
        let mut list = list.as_array().unwrap().clone();
        list.sort_by_key(|one| one["id"].to_string());
        list.iter()
            .map(|one| (one["action"].clone(), one["reason"].as_str().unwrap().to_owned()))
            .collect::<Vec<_>>()
    };
    let plan = all(&["--dry-run"]);
    assert_eq!(place.json(&["mirrors", "ls"]).as_array().unwrap().len(), 5, "nothing is changed");
    let text = place.ok(&["mirrors", "forget", "--unseen", "30d", "--dry-run"]);
    assert!(text.ends_with("would forget 1 of 5 mirrors\n"), "{text}");
    let done = all(&[]);
    let actions = |all: &[(Value, String)]| {
        all.iter().map(|(action, _)| action.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(actions(&plan), ["keep", "keep", "forget", "keep", "keep"]);
    assert_eq!(actions(&done), ["keep", "keep", "forgot", "keep", "keep"]);
    let pid = std::process::id();
    let reasons =
        [format!("process {pid} writes"), "last used 0 s ago".into(), "last used 31 d ago".into()];
    for (reason, wanted) in done.iter().map(|(_, reason)| reason).zip(reasons) {
        assert!(*reason == wanted || reason.starts_with("last used") && wanted.contains(" s ago"));
    }
    assert!(done[4].1.contains("in the future"), "{}", done[4].1);
    let left = place.json(&["mirrors"]);
    assert!(left.as_array().unwrap().iter().all(|one| one["id"] != id(3)), "{left}");
    drop((running, reader));
}
