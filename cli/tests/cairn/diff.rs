//! `cairn diff`.

use std::fs;

use serde_json::{Value, json};

use crate::support::Place;

const CHUNK: usize = 256 << 10;

/// Writes a disk of chunks, each filled with a byte.
fn write(place: &Place, name: &str, chunks: &[u8], more: usize) {
    let mut disk = Vec::new();
    chunks.iter().for_each(|byte| disk.resize(disk.len() + CHUNK, *byte));
    disk.resize(disk.len() + more, 7);
    fs::write(place.path(name), disk).unwrap();
}

fn range(offset: usize, length: usize, content: &str) -> Value {
    json!({ "offset": offset, "length": length, "content": content })
}

#[test]
fn changed_ranges_are_joined_and_their_content_is_told() {
    let place = Place::new();
    write(&place, "one.raw", &[1, 2, 3, 4, 0, 6], 0);
    write(&place, "two.raw", &[1, 9, 8, 0, 0, 6], 4096);
    place.ok(&["import", "one.raw", "one"]);
    place.ok(&["import", "two.raw", "two"]);
    place.ok(&["clone", "one@1", "copy"]);
    let found = place.json(&["diff", "one", "two@1"]);
    let data = range(CHUNK, 2 * CHUNK, "data");
    let ranges = json!([data, range(3 * CHUNK, CHUNK, "zero"), range(6 * CHUNK, 4096, "data")]);
    assert_eq!(found["ranges"], ranges, "{found}");
    assert_eq!((&found["from"], &found["to"]), (&"one@1".into(), &"two@1".into()));
    assert_eq!(found["data_bytes"], 2 * CHUNK + 4096);
    assert_eq!((&found["range_count"], &found["zero_bytes"]), (&3.into(), &CHUNK.into()));
    assert_eq!((&found["from_size"], &found["chunk_size"]), (&(6 * CHUNK).into(), &CHUNK.into()));

    let back = place.json(&["diff", "two", "one"]);
    assert_eq!(back["ranges"][1], range(6 * CHUNK, 4096, "gone"), "{back}");
    assert_eq!((&back["data_bytes"], &back["gone_bytes"]), (&(3 * CHUNK).into(), &4096.into()));

    let text = place.ok(&["diff", "one", "two"]);
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    assert_eq!(lines[0], "OFFSET  LENGTH  CONTENT");
    assert_eq!(
        lines[1..4],
        ["262144  524288  data", "786432  262144  zero", "1572864    4096  data"]
    );
    assert_eq!(lines[4..], ["one@1 to two@1: 3 ranges, 516 KiB data, 256 KiB zero"]);
    assert!(place.ok(&["diff", "copy", "one"]).ends_with("copy@1 and one@1 are equal\n"));
    let same = place.json(&["diff", "copy", "one"]);
    assert_eq!((&same["ranges"], &same["range_count"]), (&json!([]), &0.into()));
}

#[test]
fn snapshots_that_cannot_be_compared_are_refused() {
    let place = Place::new();
    write(&place, "one.raw", &[1, 2], 0);
    place.ok(&["import", "one.raw", "one"]);
    place.ok(&["import", "one.raw", "small", "--chunk-size", "64K"]);
    let run = place.run(&["diff", "one", "small"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("262144 and 65536 bytes"), "{}", run.stderr);
    assert_eq!(place.run(&["diff", "one", "two"]).code, 3);
    assert_eq!(place.run(&["diff", "one@1", "one@2"]).code, 3);
    assert_eq!(place.run(&["diff", "one"]).code, 2);
}
