//! Each exit code of the table in `docs/operations.md`. Code 1 is tested in `control`, code 5 in
//! `verify`.

use std::net::TcpListener;

use crate::support::Place;

/// Checks the exit code and the message of a command.
fn assert_fails(place: &Place, args: &[&str], code: i32, text: &str) {
    let run = place.run(args);
    assert_eq!(run.code, code, "{args:?}: {}", run.stderr);
    assert!(run.stderr.contains(text), "no {text:?} for {args:?}: {}", run.stderr);
}

#[test]
fn wrong_usage_exits_with_2() {
    let place = Place::new();
    for args in [&["--no-such-option"][..], &["import"], &["create", "vm1", "lots"]] {
        assert_fails(&place, args, 2, "");
    }
    assert_fails(&place, &["--store", "ftp://x", "ls"], 2, "ftp://x");
    assert_fails(&place, &["create", "a b", "1M"], 2, "a b");
}

#[test]
fn an_address_without_a_port_exits_with_2() {
    let place = Place::new();
    let catalog = ["serve", "--catalog", "--data", "data", "--insecure", "--listen"];
    let peer = ["serve", "--catalog", "127.0.0.1:1", "--data", "data", "--insecure"];
    for wrong in ["127.0.0.1", "nowhere", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000", ":80"]
    {
        assert_fails(&place, &[&catalog[..], &[wrong]].concat(), 2, "ADDRESS:PORT");
        let advertised = [&peer[..], &["--listen", "127.0.0.1:0", "--advertise", wrong]].concat();
        assert_fails(&place, &advertised, 2, "ADDRESS:PORT");
    }
    assert!(!place.path("data").exists());
}

#[test]
fn keys_that_are_missing_or_cannot_be_read_exit_with_2() {
    let place = Place::new();
    std::fs::write(place.path("file"), "").unwrap();
    for keys in ["nowhere", "file"] {
        let serve = ["serve", "--catalog", "--data", "data", "--listen", "127.0.0.1:0"];
        assert_fails(&place, &[&serve[..], &["--keys", keys]].concat(), 2, keys);
        assert_fails(&place, &["--store", "cairn://127.0.0.1:1", "--keys", keys, "ls"], 2, keys);
        assert_fails(&place, &["keys", "sign", "--keys", keys, "new"], 2, keys);
        assert_fails(&place, &["keys", "revoke", "--keys", keys, "client"], 2, keys);
    }
    assert!(!place.path("data").exists() && !place.path("new").exists());
}

#[test]
fn keys_without_the_list_of_revoked_keys_exit_with_2() {
    let place = Place::new();
    place.ok(&["keys", "init", "keys"]);
    place.ok(&["keys", "sign", "--keys", "keys", "peer"]);
    for keys in ["keys", "peer"] {
        std::fs::remove_file(place.path(keys).join("revoked.crl.pem")).unwrap();
    }
    let serve = ["serve", "--data", "data", "--listen", "127.0.0.1:0", "--keys"];
    let advice = "copy it from the directory that `cairn keys init` has created";
    assert_fails(&place, &[&serve[..], &["keys", "--catalog"]].concat(), 2, advice);
    assert_fails(&place, &[&serve[..], &["peer", "--catalog", "127.0.0.1:1"]].concat(), 2, advice);
    assert_fails(&place, &["--store", "cairn://127.0.0.1:1", "--keys", "keys", "ls"], 2, advice);
    assert!(!place.path("data").exists());
}

#[test]
fn a_damaged_key_for_seals_exits_with_2() {
    let place = Place::new();
    place.ok(&["keys", "init", "keys"]);
    let good = std::fs::read_to_string(place.path("keys/mac.key")).unwrap();
    let advice = "copy it from the directory that `cairn keys init` has created";
    for damaged in ["", "nonsense", "{}", &good.replace("cairn-mac", "other"), &good[..99]] {
        std::fs::write(place.path("keys/mac.key"), damaged).unwrap();
        assert_fails(
            &place,
            &["--store", "cairn://127.0.0.1:1", "--keys", "keys", "ls"],
            2,
            advice,
        );
    }
}

#[test]
fn something_that_does_not_exist_exits_with_3() {
    let place = Place::new();
    assert_fails(&place, &["ls"], 3, "there is no repository");
    place.ok(&["create", "vm1", "1M"]);
    assert_fails(&place, &["ls", "vm2"], 3, "vm2");
    assert_fails(&place, &["show", "vm1@7"], 3, "vm1@7");
    assert_fails(&place, &["status", "--control", "nowhere.sock"], 3, "nowhere.sock");
}

#[test]
fn something_that_is_in_use_exits_with_4() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    assert_fails(&place, &["create", "vm1", "1M"], 4, "vm1");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let serve = ["serve", "--catalog", "--data", "data", "--insecure", "--listen", &address];
    assert_fails(&place, &serve, 4, &address);
}

#[test]
fn a_catalog_that_does_not_answer_and_an_address_of_another_host_exit_with_6() {
    let place = Place::new();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let url = format!("cairn://{free}");
    assert_fails(&place, &["--store", &url, "--insecure", "ls"], 6, &free);
    let serve = ["serve", "--catalog", "--data", "data", "--insecure", "--listen", "192.0.2.1:80"];
    assert_fails(&place, &serve, 6, "192.0.2.1:80");
}

#[test]
fn insecure_overrides_the_keys_of_the_environment() {
    let place = Place::new();
    let run = |args: &[&str]| {
        let output = place.command(args).env("CAIRN_KEYS", "nowhere").output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let url = format!("cairn://{free}");
    for args in [["--insecure", "ls"], ["ls", "--insecure"]] {
        let (code, text) = run(&[&["--store", &url][..], &args].concat());
        assert!(code == Some(6) && text.contains(&free), "{code:?} {text}");
    }
    let (code, text) = run(&["--store", &url, "ls"]);
    assert!(code == Some(2) && text.contains("nowhere"), "{text}");
    let (code, text) = run(&["--store", &url, "--insecure", "--keys", "nowhere", "ls"]);
    assert!(code == Some(2) && text.contains("cannot be used with"), "{text}");
}

/// A unit of systemd that sets an empty variable does not name anything.
#[test]
fn an_empty_variable_counts_as_unset() {
    let place = Place::new();
    let run = |args: &[&str]| {
        let mut command = place.command(args);
        let output = command.env("CAIRN_STORE", "").env("CAIRN_KEYS", "").output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = run(&["ls"]);
    assert!(code == Some(2) && text.contains("no repository is named"), "{text}");
    let (code, text) = run(&["--store", "cairn://127.0.0.1:1", "ls"]);
    assert!(code == Some(2) && text.contains("no keys are named"), "{text}");
    let (code, text) = run(&["--store", "dir:here", "--insecure", "create", "vm1", "1M"]);
    assert_eq!(code, Some(0), "{text}");
}

/// As another user, with permission to read only.
#[test]
fn a_repository_that_may_not_be_written_is_named_and_exits_with_1() {
    let place = Place::new();
    place.disk("in.raw");
    place.ok(&["import", "in.raw", "vm1"]);
    let all = |mode: &str, path: &str| {
        let mut chmod = std::process::Command::new("chmod");
        let status = chmod.args(["-R", mode]).arg(place.path(path)).status().unwrap();
        assert!(status.success());
    };
    all("a+rX,a-w", ".");
    let url = format!("dir:{}", place.path("repository").display());
    let mut nobody = std::process::Command::new("setpriv");
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]);
    nobody.args([env!("CARGO_BIN_EXE_cairn"), "--store", &url, "ls"]);
    let run: crate::support::Run = nobody.output().unwrap().into();
    all("u+w", ".");
    if run.stderr.contains("setpriv") {
        eprintln!("skipped: only root may become another user");
        return;
    }
    assert!(run.code == 1 && run.stderr.contains("may write to"), "{} {}", run.code, run.stderr);
}
