//! How the client handles answers of a server. The server in these tests sends given lines.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Place, Run};

const ACCEPTED: &str =
    r#"{"event":"accepted","snapshot":"vm1@3","number":3,"dirty_bytes":4096,"pause_us":80}"#;
const STABLE: &str = r#"{"event":"stable","snapshot":"vm1@3","number":3,"dirty_bytes":4096,"stored_bytes":0,"elapsed_ms":5}"#;

/// Serves one connection: reads a request, then calls `answer`. Returns the request.
fn serve(
    place: &Place,
    answer: impl FnOnce(&mut UnixStream) + Send + 'static,
) -> JoinHandle<String> {
    let listener = UnixListener::bind(place.path("ctl")).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut request).unwrap();
        answer(&mut stream);
        request
    })
}

/// Runs a command with a server that answers with these lines. Returns the request and the result.
fn exchange(lines: &[&str], args: &[&str]) -> (Value, Run) {
    let place = Place::new();
    let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let server = serve(&place, move |stream| {
        let _ = stream.write_all(text.as_bytes());
    });
    let run = place.run(&[args, &["--control", "ctl"]].concat());
    (serde_json::from_str(&server.join().unwrap()).unwrap(), run)
}

#[test]
fn a_checkpoint_prints_the_name_of_its_snapshot() {
    let (request, run) = exchange(&[ACCEPTED], &["checkpoint", "--label", "x"]);
    assert_eq!((run.code, run.stdout.as_slice()), (0, b"vm1@3\n".as_slice()), "{}", run.stderr);
    assert_eq!(request["op"], "checkpoint");
    assert_eq!((&request["label"], &request["wait"]), (&"x".into(), &"accepted".into()));
}

/// An image never shrinks.
#[test]
fn an_image_does_not_grow_for_the_disk_of_another_image_or_a_disk_that_cannot_grow() {
    let status = |image: &str, read_only: bool| {
        json!({
            "event": "status", "protocol": 1, "image": image, "parent": format!("{image}@1"),
            "size": 1 << 20, "chunk_size": 1 << 18, "read_only": read_only, "connected": false,
            "dirty_bytes": 0, "present_bytes": 0, "pending": [],
        })
    };
    for (image, read_only, word) in [("vm2", false, "'vm2'"), ("vm1", true, "read-only")] {
        let place = Place::new();
        place.ok(&["create", "vm1", "1M"]);
        let text = format!("{}\n", status(image, read_only));
        let server = serve(&place, move |stream| stream.write_all(text.as_bytes()).unwrap());
        let run = place.run(&["resize", "vm1", "2M", "--control", "ctl"]);
        assert!(run.code == 2 && run.stderr.contains(word), "{}", run.stderr);
        assert!(server.join().unwrap().contains("status"));
        assert_eq!(place.json(&["ls"])[0]["size"], 1 << 20);
    }
}

#[test]
fn waiting_for_stable_continues_after_accepted() {
    let (request, run) =
        exchange(&[ACCEPTED, STABLE], &["checkpoint", "--wait", "stable", "--json"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(request["wait"], "stable");
    let event: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!((&event["event"], &event["elapsed_ms"]), (&"stable".into(), &5.into()));
}

#[test]
fn a_checkpoint_is_followed_on_a_new_connection_if_the_first_one_ends() {
    let place = Place::new();
    let listener = UnixListener::bind(place.path("ctl")).unwrap();
    let server = thread::spawn(move || {
        [ACCEPTED, STABLE].map(|answer| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut request).unwrap();
            writeln!(stream, "{answer}").unwrap();
            serde_json::from_str::<Value>(&request).unwrap()
        })
    });
    let run = place.run(&["checkpoint", "--control", "ctl", "--wait", "stable"]);
    assert_eq!((run.code, run.stdout.as_slice()), (0, b"vm1@3\n".as_slice()), "{}", run.stderr);
    let [_, second] = server.join().unwrap();
    assert_eq!((&second["op"], &second["number"]), (&"follow".into(), &3.into()));
}

#[test]
fn a_checkpoint_that_fails_exits_with_1_and_prints_the_reason() {
    let failed = r#"{"event":"failed","snapshot":"vm1@3","number":3,"reason":"the disk is full"}"#;
    let (_, run) = exchange(&[ACCEPTED, failed], &["checkpoint", "--wait", "stable"]);
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("vm1@3 failed: the disk is full"), "{}", run.stderr);
    assert!(run.stdout.is_empty());
}

#[test]
fn refusals_have_the_exit_code_of_their_kind() {
    for (kind, code) in
        [("invalid", 2), ("conflict", 4), ("busy", 4), ("denied", 1), ("unavailable", 6)]
    {
        let line = format!(r#"{{"event":"error","kind":"{kind}","message":"not like this"}}"#);
        let (_, run) = exchange(&[&line], &["checkpoint"]);
        assert_eq!(run.code, code, "{kind}");
        assert!(run.stderr.contains("not like this"), "{}", run.stderr);
    }
}

#[test]
fn an_answer_that_does_not_match_the_request_is_a_failure() {
    for line in ["", "hello", "{}", r#"{"event":"party"}"#, STABLE, &"x".repeat(100_000)] {
        let (_, run) = exchange(&[line], &["status"]);
        assert_eq!(run.code, 1, "{line:.20}: {}", run.stderr);
        assert!(run.stderr.contains("does not match the request"), "{}", run.stderr);
    }
}

#[test]
fn a_connection_that_closes_early_is_unavailable() {
    for lines in [&[][..], &[ACCEPTED]] {
        let (_, run) = exchange(lines, &["checkpoint", "--wait", "stable", "--timeout", "5"]);
        assert_eq!(run.code, 6, "{}", run.stderr);
        assert!(run.stderr.contains("closed"), "{}", run.stderr);
    }
}

#[test]
fn a_server_that_answers_too_slowly_is_given_up_at_the_time_limit() {
    let place = Place::new();
    // Single bytes must not extend the time limit.
    let server = serve(&place, |stream| {
        while stream.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(50));
        }
    });
    let start = Instant::now();
    let run = place.run(&["checkpoint", "--control", "ctl", "--timeout", "0.5"]);
    assert_eq!(run.code, 6);
    assert!(run.stderr.contains("within 0.5 s"), "{}", run.stderr);
    assert!(start.elapsed() < Duration::from_secs(10));
    server.join().unwrap();
}

#[test]
fn a_socket_without_a_server_and_a_missing_socket_have_different_exit_codes() {
    let place = Place::new();
    assert_eq!(place.run(&["status", "--control", "ctl"]).code, 3);
    drop(UnixListener::bind(place.path("ctl")).unwrap());
    let run = place.run(&["status", "--control", "ctl"]);
    assert_eq!(run.code, 6);
    assert!(run.stderr.contains("is cairn-blk running?"), "{}", run.stderr);
}

#[test]
fn status_and_stats_are_printed_for_people_and_for_scripts() {
    let status = r#"{"event":"status","protocol":1,"image":"vm1","parent":"vm1@2","size":1073741824,"chunk_size":262144,"read_only":false,"connected":true,"dirty_bytes":524288,"present_bytes":0,"pending":[{"snapshot":"vm1@3","chunks":9,"done":4}],"last_failed":{"snapshot":"vm1@1","number":1,"reason":"no space"},"queues":[{"queue":0,"in_flight":3,"reads":20,"writes":0,"flushes":0,"discards":0,"errors":0,"read_latency":{"count":20,"p50_us":95,"p99_us":320,"max_us":4100},"write_latency":{"count":0,"p50_us":0,"p99_us":0,"max_us":0},"flush_latency":{"count":0,"p50_us":0,"p99_us":0,"max_us":0}}]}"#;
    let (request, run) = exchange(&[status], &["status"]);
    assert_eq!(request, serde_json::json!({ "op": "status" }));
    let text = String::from_utf8(run.stdout).unwrap();
    for part in [
        "image:       vm1",
        "size:        1 GiB",
        "changed:     512 KiB",
        "vm1@3 (4 of 9 chunks)",
        "failed:      vm1@1: no space",
        "queue  in flight  reads  p50 us  p99   max  writes",
        "    0          3     20      95  320  4100       0",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let (_, run) = exchange(&[status], &["status", "--json"]);
    let value: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(value["pending"][0]["done"], 4);

    let stats = r#"{"event":"stats","reads":7,"writes":0,"flushes":0,"discards":0,"errors":0,"read_bytes":28672,"written_bytes":0,"fetched_chunks":0,"fetched_bytes":0,"fetch_errors":0,"copies":0,"copied_bytes":0,"spilled":0,"parked":0,"checkpoints":0,"stable":0,"failed":0}"#;
    let (request, run) = exchange(&[stats], &["stats"]);
    assert_eq!(request, serde_json::json!({ "op": "stats" }));
    let text = String::from_utf8(run.stdout).unwrap();
    assert!(text.contains("reads:            7") && text.contains("28 KiB"), "{text}");
}
