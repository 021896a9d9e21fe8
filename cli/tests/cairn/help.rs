//! The help of each command.

use crate::support::Place;

/// The options that every command accepts.
const GLOBAL: [&str; 5] = ["--store", "--keys", "--insecure", "--json", "--bytes"];

/// The global options that the help of a command shows.
fn shown(place: &Place, command: &[&str]) -> Vec<&'static str> {
    let help = place.ok(&[command, &["--help"]].concat());
    let is_listed = |option: &&str| {
        help.lines().any(|line| line.split_whitespace().next().is_some_and(|word| word == *option))
    };
    GLOBAL.into_iter().filter(is_listed).collect()
}

#[test]
fn help_shows_only_the_global_options_that_a_command_uses() {
    let place = Place::new();
    let repository = &["--store", "--keys", "--insecure", "--json"][..];
    let sizes = &GLOBAL[..];
    let disk = &["--json", "--bytes"][..];
    for (command, wanted) in [
        (&["create"][..], repository),
        (&["import"], sizes),
        (&["ls"], sizes),
        (&["show"], sizes),
        (&["clone"], repository),
        (&["export"], repository),
        (&["rm"], repository),
        (&["tag"], repository),
        (&["pin"], repository),
        (&["unpin"], repository),
        (&["meta"], repository),
        (&["policy"], repository),
        (&["policy", "set"], repository),
        (&["prune"], repository),
        (&["mirrors"], sizes),
        (&["mirrors", "forget"], repository),
        (&["checkpoint"], &["--json"]),
        (&["status"], disk),
        (&["stats"], disk),
        (&["serve"], &["--keys", "--insecure", "--json"]),
        (&["supervise"], repository),
        (&["keys"], &["--keys", "--json"]),
        (&["keys", "init"], &["--json"]),
        (&["keys", "sign"], &["--keys", "--json"]),
        (&["keys", "rotate-mac"], &["--keys", "--json"]),
        (&["keys", "revoke"], &["--keys", "--json"]),
        (&["peers"], sizes),
        (&["repair"], sizes),
        (&["verify"], sizes),
        (&["du"], sizes),
        (&["diff"], sizes),
        (&["catalog"], repository),
        (&["catalog", "rebuild"], repository),
    ] {
        assert_eq!(shown(&place, command), wanted, "{command:?}");
    }
    assert_eq!(shown(&place, &[]), GLOBAL);
}

#[test]
fn help_and_the_error_without_a_repository_name_all_kinds_of_repositories() {
    let place = Place::new();
    let mut command = place.command(&["ls"]);
    let output = command.env_remove("CAIRN_STORE").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    for text in [place.ok(&["--help"]), error] {
        for kind in ["dir:PATH", "cairn://HOST:PORT", "etcd://HOST:PORT"] {
            assert!(text.contains(kind), "{kind} is not in: {text}");
        }
    }
}

#[test]
fn the_help_of_a_command_for_keys_says_which_directory_it_needs() {
    let place = Place::new();
    for command in ["sign", "revoke", "rotate-mac", "retire-mac"] {
        let help = place.ok(&["keys", command, "--help"]);
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = "for the commands of `keys`, the directory of the authority";
        assert!(help.contains(text), "{command}: {help}");
    }
}

/// A wrapper may pass the same options to every command.
#[test]
fn a_global_option_that_a_command_does_not_use_is_accepted_anywhere() {
    let place = Place::new();
    place.ok(&["--store", "dir:elsewhere", "--bytes", "keys", "init", "one"]);
    place.ok(&["keys", "init", "other", "--store", "dir:elsewhere", "--insecure"]);
    assert!(!place.path("elsewhere").exists());
    place.ok(&["create", "vm1", "64K", "--bytes"]);
    assert!(place.ok(&["--bytes", "ls"]).contains("65536"));
    assert!(place.ok(&["ls", "--bytes"]).contains("65536"));
    place.ok(&["create", "vm1", "64K", "--store", "dir:second"]);
    place.ok(&["--store", "dir:third", "create", "vm1", "64K"]);
    assert!(place.path("second").exists() && place.path("third").exists());
}

#[test]
fn no_line_of_a_help_text_is_longer_than_100_columns() {
    let place = Place::new();
    let help = place.ok(&["--help"]);
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands = commands.take_while(|line| !line.is_empty());
    let names = commands.filter_map(|line| line.split_whitespace().next());
    let names: Vec<&str> = names.filter(|name| *name != "help").collect();
    assert!(names.contains(&"import") && names.len() > 15, "{names:?}");
    let nested = [
        ["peers", "drain"],
        ["peers", "lose"],
        ["keys", "sign"],
        ["catalog", "rebuild"],
        ["mirrors", "ls"],
        ["mirrors", "forget"],
        ["policy", "set"],
        ["policy", "show"],
        ["policy", "rm"],
    ];
    let all = names.iter().map(|name| vec![*name]).chain(nested.map(|one| one.to_vec()));
    for command in all.chain([Vec::new()]) {
        for option in ["-h", "--help"] {
            let help = place.ok(&[&command[..], &[option]].concat());
            for line in help.lines() {
                assert!(line.chars().count() <= 100, "{command:?} {option}: {line}");
            }
        }
    }
}
