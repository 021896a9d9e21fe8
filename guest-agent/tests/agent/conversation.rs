//! The agent's requests, its output and its exit codes.

use std::io::Write;
use std::net::Shutdown;
use std::path::Path;
use std::time::{Duration, Instant};

use cairn_agent::{
    Checkpoint, Consistency, Event, Failed, MAX_LINE, Marked, Obsolete, Refusal, RefusalKind,
    Request, SnapshotLine, Snapshots, Wait,
};

use crate::host::{Host, accepted, agent, say, stable};

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_checkpoint_prints_the_name_of_its_snapshot() {
    let host = Host::accepting("vm1");
    let output = agent("checkpoint --label nightly", &[&host.socket()]);
    assert_eq!(text(&output.stdout), "vm1@7\n");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        host.request(),
        Request::Checkpoint(Checkpoint {
            label: Some("nightly".to_owned()),
            consistency: Consistency::Crash,
            wait: Wait::Accepted,
            ..Checkpoint::default()
        })
    );
}

#[test]
fn json_contains_both_the_accepted_and_the_stable_event() {
    let host = Host::accepting("vm1");
    let output = agent("checkpoint --wait stable --json", &[&host.socket()]);
    let taken: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(taken["accepted"]["pause_us"], 12);
    assert_eq!(taken["stable"]["stored_bytes"], 512);
    assert!(taken.get("frozen_us").is_none(), "nothing was frozen: {taken}");
}

#[test]
fn metadata_is_sent_with_the_request() {
    let host = Host::accepting("vm1");
    agent("checkpoint --set-meta step=4 --set-meta owner=ann=x", &[&host.socket()]);
    let Request::Checkpoint(checkpoint) = host.request() else { panic!() };
    let sent: Vec<_> = checkpoint.metadata.iter().map(|(key, value)| (&**key, &**value)).collect();
    assert_eq!(sent, [("owner", "ann=x"), ("step", "4")]);
    let output = agent("checkpoint --set-meta step", &[&host.socket()]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// A host that stores checkpoints, and lets its guest give up snapshots or not.
fn marking(is_allowed: bool) -> Host {
    Host::answering(move |request, stream| match request {
        Request::Checkpoint(checkpoint) => {
            assert_eq!(checkpoint.wait, Wait::Stable, "nothing is given up before that");
            say(stream, &accepted("vm1"));
            say(stream, &stable("vm1"));
        }
        Request::Obsolete(_) if is_allowed => {
            say(stream, &Event::Marked(Marked { snapshots: vec!["vm1@3".into()] }));
        }
        Request::Obsolete(_) => {
            let (kind, message) = (RefusalKind::Denied, "because of the test".into());
            say(stream, &Event::Error(Refusal { kind, message }));
        }
        other => panic!("{other:?}"),
    })
}

#[test]
fn older_snapshots_are_given_up_once_the_new_one_is_stable() {
    let host = marking(true);
    let output = agent("checkpoint --keep-last 2 --json", &[&host.socket()]);
    let taken: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(taken["obsolete"], serde_json::json!(["vm1@3"]));
    host.request();
    assert_eq!(host.request(), Request::Obsolete(Obsolete { keep_last: Some(2), number: None }));
    let output = agent("obsolete 3", &[&host.socket()]);
    assert_eq!(text(&output.stdout), "vm1@3 is marked as obsolete\n");
    assert_eq!(host.request(), Request::Obsolete(Obsolete { keep_last: None, number: Some(3) }));
}

/// The older snapshots of the first disk and the new ones of the second do not belong together.
#[test]
fn nothing_is_given_up_unless_the_snapshots_of_all_disks_are_stable() {
    let good = marking(true);
    let bad = Host::answering(|request, stream| {
        assert!(matches!(request, Request::Checkpoint(_)), "{request:?}");
        say(stream, &accepted("data"));
        let reason = "because of the test".into();
        say(stream, &Event::Failed(Failed { number: 7, snapshot: "data@7".into(), reason }));
    });
    let output = agent("checkpoint --keep-last 1 --json", &[&good.socket(), &bad.socket()]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let taken: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(taken.get("obsolete").is_none(), "{taken}");
    assert!(matches!(good.request(), Request::Checkpoint(_)));
    assert!(good.has_no_request(), "the next request would be that to give up");
}

#[test]
fn a_checkpoint_is_reported_although_the_host_lets_nothing_be_given_up() {
    let host = marking(false);
    let output = agent("checkpoint --keep-last 2", &[&host.socket()]);
    assert_eq!(text(&output.stdout), "vm1@7\n");
    assert!(text(&output.stderr).contains("because of the test"), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_checkpoint_is_followed_on_a_new_connection_if_the_first_one_ends() {
    let host = Host::answering(|request, stream| match request {
        Request::Checkpoint(_) => {
            say(stream, &accepted("vm1"));
            stream.shutdown(Shutdown::Both).unwrap();
        }
        Request::Follow(follow) => {
            assert_eq!(follow.number, 7);
            say(stream, &stable("vm1"));
        }
        other => panic!("{other:?}"),
    });
    let output = agent("checkpoint --wait stable --json", &[&host.socket()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let taken: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(taken["stable"]["snapshot"], "vm1@7");
}

#[test]
fn one_checkpoint_spans_several_disks() {
    let (system, data) = (Host::accepting("system"), Host::accepting("data"));
    let output = agent("checkpoint --application", &[&system.socket(), &data.socket()]);
    assert_eq!(text(&output.stdout), "system@7\ndata@7\n");
    for host in [system, data] {
        let Request::Checkpoint(checkpoint) = host.request() else { panic!() };
        assert_eq!(checkpoint.consistency, Consistency::Application);
    }
}

#[test]
fn the_checkpoint_of_one_disk_is_reported_even_if_another_disk_refuses() {
    let good = Host::accepting("good");
    let bad = refusing(RefusalKind::Busy);
    let output = agent("checkpoint", &[&bad.socket(), &good.socket()]);
    assert_eq!(text(&output.stdout), "good@7\n");
    assert!(text(&output.stderr).contains("because of the test"), "{output:?}");
    assert_eq!(output.status.code(), Some(4));
}

#[test]
fn no_disk_is_asked_if_one_cannot_be_reached() {
    let host = Host::accepting("vm1");
    let output = agent("checkpoint", &[&host.socket(), Path::new("/no/such/socket")]);
    assert_eq!(output.status.code(), Some(6));
    assert_eq!(text(&output.stdout), "");
    // The first request that the host gets is that of the next agent.
    agent("checkpoint --label second", &[&host.socket()]);
    let Request::Checkpoint(checkpoint) = host.request() else { panic!() };
    assert_eq!(checkpoint.label.as_deref(), Some("second"));
}

#[test]
fn the_exit_code_of_a_refusal_depends_on_its_kind() {
    for (kind, code) in [
        (RefusalKind::Invalid, 2),
        (RefusalKind::Conflict, 4),
        (RefusalKind::Busy, 4),
        (RefusalKind::Denied, 1),
        (RefusalKind::Unavailable, 6),
    ] {
        let output = agent("checkpoint", &[&refusing(kind).socket()]);
        assert_eq!(output.status.code(), Some(code), "{kind:?}: {output:?}");
    }
}

#[test]
fn a_snapshot_that_is_not_stored_is_a_failure_with_its_reason() {
    let host = Host::answering(|_, stream| {
        say(stream, &accepted("vm1"));
        say(
            stream,
            &Event::Failed(Failed {
                snapshot: "vm1@7".to_owned(),
                number: 7,
                reason: "the repository is full".to_owned(),
            }),
        );
    });
    let output = agent("checkpoint --wait stable", &[&host.socket()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("vm1@7 was not stored: the repository is full"));
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn a_host_that_never_answers_is_given_up_at_the_time_limit() {
    let host = Host::silent();
    let begin = Instant::now();
    let output = agent("checkpoint --timeout 1", &[&host.socket()]);
    assert_eq!(output.status.code(), Some(6));
    assert!(begin.elapsed() >= Duration::from_secs(1));
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn an_answer_that_is_not_an_event_or_has_no_end_is_refused() {
    let nonsense = Host::answering(|_, stream| drop(writeln!(stream, "HTTP/1.1 400")));
    let endless = Host::answering(|_, stream| drop(stream.write_all(&vec![b'x'; MAX_LINE + 8192])));
    let long = Host::answering(|_, stream| {
        // Blanks before a valid answer make the line one byte too long.
        let answer = serde_json::to_vec(&accepted("vm1")).unwrap();
        let blanks = vec![b' '; MAX_LINE - answer.len()];
        drop(stream.write_all(&[&blanks[..], &answer, b"\n"].concat()));
    });
    let wrong = Host::answering(|_, stream| {
        say(stream, &Event::Snapshots(Snapshots { snapshots: Vec::new(), omitted: 0 }));
    });
    for host in [nonsense, endless, long, wrong] {
        let output = agent("checkpoint --timeout 5", &[&host.socket()]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains("does not speak this protocol"), "{output:?}");
    }
}

#[test]
fn the_list_has_one_snapshot_a_line() {
    let host = Host::answering(|request, stream| {
        assert_eq!(*request, Request::List);
        let line = |number: u64, label: Option<&str>| SnapshotLine {
            snapshot: format!("vm1@{number}"),
            label: label.map(str::to_owned),
            state: "stable".to_owned(),
            time: 0,
        };
        let snapshots = vec![line(1, None), line(2, Some("nightly"))];
        say(stream, &Event::Snapshots(Snapshots { snapshots, omitted: 0 }));
    });
    let output = agent("list", &[&host.socket()]);
    assert_eq!(
        text(&output.stdout),
        "vm1@1\t1970-01-01T00:00:00Z\tstable\t-\nvm1@2\t1970-01-01T00:00:00Z\tstable\tnightly\n"
    );
}

fn refusing(kind: RefusalKind) -> Host {
    Host::answering(move |_, stream| {
        let message = "because of the test".to_owned();
        say(stream, &Event::Error(Refusal { kind, message }));
    })
}
