//! Import and export.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::support::Place;

#[test]
fn an_exported_disk_equals_the_imported_one_and_is_as_sparse() {
    let place = Place::new();
    let disk = place.disk("in.raw");
    let run = place.run(&["import", "in.raw", "vm1"]);
    assert_eq!((run.code, run.stdout.as_slice()), (0, b"vm1@1\n".as_slice()), "{}", run.stderr);
    assert!(run.stderr.contains("size 3 MiB") && run.stderr.contains("stored"), "{}", run.stderr);

    place.ok(&["export", "vm1@1", "out.raw"]);
    assert!(fs::read(place.path("out.raw")).unwrap() == disk);
    let blocks = |name| fs::metadata(place.path(name)).unwrap().blocks();
    assert!(blocks("out.raw") <= blocks("in.raw"), "{} {}", blocks("out.raw"), blocks("in.raw"));
}

#[test]
fn disks_are_imported_from_standard_input_and_exported_to_standard_output() {
    let place = Place::new();
    let disk = place.disk("in.raw");
    let run = place.run_with_input(&["import", "-", "vm1", "--chunk-size", "64K"], &disk);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let run = place.run(&["export", "vm1", "-"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout == disk);
}

#[test]
fn a_stream_and_a_file_of_equal_content_have_one_root() {
    let place = Place::new();
    let disk = place.disk("in.raw");
    place.ok(&["import", "in.raw", "file"]);
    place.run_with_input(&["import", "-", "stream"], &disk);
    let (file, stream) = (place.json(&["show", "file"]), place.json(&["show", "stream"]));
    assert_eq!(file["root"], stream["root"]);
    assert_eq!(stream["stored_bytes"], 0, "equal chunks are stored once");
    assert!(file["stored_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn a_disk_is_padded_with_zeros_to_a_multiple_of_a_sector() {
    let place = Place::new();
    for len in [1_usize, 511, 512, 513, 262_144, 262_145, 1_000_001] {
        let disk = (0..len).map(|n| (n % 250) as u8 + 1).collect::<Vec<_>>();
        let mut expected = disk.clone();
        expected.resize(len.next_multiple_of(512), 0);
        fs::write(place.path("in.raw"), &disk).unwrap();
        let (file, stream) = (format!("file{len}"), format!("stream{len}"));
        let note = format!("the source has {len} bytes, and the image {}", expected.len());
        for run in [
            place.run(&["import", "in.raw", &file]),
            place.run_with_input(&["import", "-", &stream], &disk),
        ] {
            assert_eq!(run.code, 0, "{}", run.stderr);
            assert_eq!(run.stderr.contains(&note), len % 512 != 0, "{len}: {}", run.stderr);
        }
        for image in [file, stream] {
            place.ok(&["export", &image, "out.raw", "--force"]);
            assert!(fs::read(place.path("out.raw")).unwrap() == expected, "{image}");
        }
    }
}

#[test]
fn an_import_that_fails_leaves_no_image() {
    let place = Place::new();
    fs::write(place.path("empty"), "").unwrap();
    assert_eq!(place.run(&["import", "empty", "vm1"]).code, 2);
    assert_eq!(place.run(&["import", "missing.raw", "vm1"]).code, 3);
    assert_eq!(place.run_with_input(&["import", "-", "vm1"], b"").code, 2);
    assert_eq!(place.json(&["ls"]).as_array().unwrap().len(), 0);

    place.disk("in.raw");
    place.ok(&["import", "in.raw", "vm1"]);
    assert_eq!(place.run(&["import", "in.raw", "vm1"]).code, 4);
}

#[test]
fn an_interrupted_import_leaves_no_image_and_can_be_repeated() {
    let place = Place::new();
    place.ok(&["create", "other", "1M"]);
    let mut child =
        place.command(&["import", "-", "vm1"]).stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, &[7; 1 << 20]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(place.run(&["show", "vm1"]).code, 3);
    assert_eq!(place.run_with_input(&["import", "-", "vm1"], &[7; 1 << 20]).code, 0);
    assert_eq!(fs::read_dir(place.path("repository/segments")).unwrap().count(), 1);
}

#[test]
fn export_does_not_overwrite_unless_it_is_forced() {
    let place = Place::new();
    let disk = place.disk("in.raw");
    place.ok(&["import", "in.raw", "vm1"]);
    fs::write(place.path("out.raw"), "precious").unwrap();
    let run = place.run(&["export", "vm1", "out.raw"]);
    assert_eq!(run.code, 4);
    assert!(run.stderr.contains("--force"), "{}", run.stderr);
    assert_eq!(fs::read(place.path("out.raw")).unwrap(), b"precious");
    place.ok(&["export", "vm1", "out.raw", "--force"]);
    assert!(fs::read(place.path("out.raw")).unwrap() == disk);
    assert_eq!(place.run(&["export", "vm1", "."]).code, 2);
    assert_eq!(place.run(&["export", "vm1", "missing/out.raw"]).code, 3);
}

#[test]
fn a_corrupt_chunk_ends_the_export_and_leaves_no_file() {
    let place = Place::new();
    place.disk("in.raw");
    place.ok(&["import", "in.raw", "vm1"]);
    let mut content = fs::read(place.segment()).unwrap();
    content[9000] ^= 1;
    fs::write(place.segment(), content).unwrap();

    for target in ["out.raw", "-"] {
        let run = place.run(&["export", "vm1", target]);
        assert_eq!(run.code, 5, "{}", run.stderr);
        assert!(run.stderr.contains("segments/00000001 is corrupt"), "{}", run.stderr);
    }
    assert!(!place.path("out.raw").exists());
}

#[test]
fn a_missing_segment_is_reported_as_corrupt() {
    let place = Place::new();
    place.disk("in.raw");
    place.ok(&["import", "in.raw", "vm1"]);
    fs::remove_file(place.segment()).unwrap();
    let run = place.run(&["export", "vm1", "out.raw", "--json"]);
    assert_eq!(run.code, 5);
    let error: serde_json::Value = serde_json::from_str(&run.stderr).unwrap();
    assert_eq!(error["error"]["kind"], "corrupt");
}

#[test]
fn an_empty_image_exports_as_zeros() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    place.ok(&["export", "vm1", "out.raw"]);
    let file = fs::metadata(place.path("out.raw")).unwrap();
    assert_eq!((file.len(), file.blocks()), (1 << 20, 0));
}
