//! The commands of README's "Day two", run as they are printed.

use std::fs;
use std::path::Path;
use std::process::Command;

use cairn_store::Repository;

use crate::lab::random;
use crate::support::{Place, Timeline};

const CHUNK: usize = 256 << 10;

/// 2026-11-14 12:00 UTC.
const FIRST_NOON: u64 = 1_794_657_600;
const HALF_DAY: u64 = 43_200;

/// A command, and what it prints.
#[derive(Debug, Default)]
struct Step {
    command: String,
    output: String,
}

/// The steps of the first block of code behind a heading.
fn steps(text: &str, heading: &str) -> Vec<Step> {
    let section = text.split_once(&format!("\n## {heading}\n")).expect("the heading is there").1;
    let block = section.split("```\n").nth(1).expect("a block of code");
    let mut steps: Vec<Step> = Vec::new();
    for line in block.lines() {
        match (line.strip_prefix("$ "), steps.last_mut()) {
            (Some(command), _) => steps.push(Step { command: command.into(), ..Step::default() }),
            (None, Some(step)) => step.output += &format!("{line}\n"),
            (None, None) => panic!("output without a command: {line}"),
        }
    }
    steps
}

/// The text with every number replaced by `0`, every unit of size by `MiB`, and every run of spaces
/// and rules by one: what stays the same if a format of the repository changes its overhead.
fn shape(text: &str) -> String {
    let line = |line: &str| {
        let words = line.split_whitespace().map(|word| {
            let mut shape = String::new();
            let mut digits = false;
            for letter in word.chars() {
                let is_digit = letter.is_ascii_digit() || (digits && letter == '.');
                if !is_digit {
                    shape.push(letter);
                } else if !digits {
                    shape.push('0');
                }
                digits = is_digit;
            }
            match shape.trim_end_matches([',', '.', ')']) {
                "B" | "KiB" | "MiB" => shape.replace("KiB", "MiB").replace('B', "MiB"),
                _ => shape,
            }
        });
        words.collect::<Vec<_>>().join(" ").replace("MiMiB", "MiB")
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The image vm1 with snapshots of five days: 1 was imported, 2 to 9 were taken at noon and at
/// midnight.
fn prepare(place: &Place) {
    fs::write(place.path("disk.raw"), random(1, 64 * CHUNK)).unwrap();
    place.ok(&["import", "disk.raw", "vm1"]);
    let url = format!("dir:{}", place.path("repository").display());
    let repository = Repository::open(&url).unwrap();
    let timeline = Timeline::attach_to(&repository, "vm1");
    for number in 0..8u64 {
        let content = random(100 + number, CHUNK);
        let time = FIRST_NOON + number * HALF_DAY;
        timeline.take_changed(&repository, time, (number * 3, &content));
    }
    timeline.detach();
}

fn run(place: &Place, command: &str) -> String {
    let programs = Path::new(env!("CARGO_BIN_EXE_cairn")).parent().unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(place.dir.path()).env("PATH", path);
    let output = shell.env("CAIRN_STORE", "dir:repository").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn day_two_works_as_printed() {
    let place = Place::new();
    prepare(&place);
    let readme = include_str!("../../../README.md");
    let steps = steps(readme, "Day two");
    assert_eq!(steps.len(), 10, "{steps:?}");
    for command in ["policy", "prune", "gc", "verify", "du", "diff"] {
        assert!(steps.iter().any(|step| step.command.starts_with(&format!("cairn {command} "))));
    }
    let mut transcript = String::new();
    let mut wrong = Vec::new();
    for Step { command, output } in steps {
        let found = run(&place, &command);
        transcript += &format!("$ {command}\n{found}");
        if shape(&found) != shape(&output) {
            wrong.push(command);
        }
    }
    assert!(wrong.is_empty(), "{wrong:?} print something else. The block should be:\n{transcript}");
}

#[test]
fn numbers_may_differ_and_words_may_not() {
    let printed = "collection 1: kept 4.5 MiB in 20 objects\nvm1@2  -";
    assert_eq!(shape(printed), shape("collection 12:  kept 900 KiB in 3 objects\nvm1@10 -"));
    assert_eq!(shape("freed 0 B"), shape("freed 1.5 MiB"));
    assert_ne!(shape(printed), shape("collection 1: freed 4.5 MiB in 20 objects\nvm1@2  -"));
    assert_ne!(shape(printed), shape("collection 1: kept 4.5 MiB in 20 objects"));
    assert_ne!(shape("vm1@2  -"), shape("vm1@2  golden"));
}
