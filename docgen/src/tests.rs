//! The pages against the command lines, and against the programs that read them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command as Process;

use clap::Command;
use tempfile::TempDir;

use crate::page;
use crate::sections::{self, Kind, Part};
use crate::{generate, programs};

/// All commands with their pages. A command comes with its global options.
fn commands() -> Vec<(Command, String)> {
    fn collect(command: &Command, all: &mut Vec<Command>) {
        all.push(command.clone());
        command.get_subcommands().for_each(|sub| collect(sub, all));
    }
    let mut found = Vec::new();
    for program in programs() {
        let pages = page::of_program(program.clone()).into_iter();
        let mut pages: BTreeMap<String, String> =
            pages.map(|page| (page.file, String::from_utf8(page.text).unwrap())).collect();
        let mut program = program.disable_help_subcommand(true);
        program.build();
        let mut all = Vec::new();
        collect(&program, &mut all);
        for command in all {
            let file = format!("{}.1", command.get_display_name().unwrap_or(command.get_name()));
            let page = pages.remove(&file).unwrap_or_else(|| panic!("no page {file}"));
            found.push((command, page));
        }
        assert!(pages.is_empty(), "pages without a command: {:?}", pages.keys());
    }
    found
}

/// The text of a page without the marks of the formatter, in one line.
fn plain(page: &str) -> String {
    let text = page.replace("\\-", "-").replace("\\&", "").replace("\\*(Aq", "'");
    let text = text.replace("\\fB", "").replace("\\fI", "").replace("\\fR", "");
    text.replace("\\\\", "\\").replace("\\e", "\\").split_whitespace().collect::<Vec<_>>().join(" ")
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn every_command_and_every_visible_option_is_described() {
    let commands = commands();
    assert!(commands.len() > 40, "{} commands", commands.len());
    for (command, page) in commands {
        let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
        let page = plain(&page);
        let about = command.get_about().unwrap_or_else(|| panic!("{name} has no description"));
        assert!(
            page.contains(&format!("{name} - {}", words(&about.to_string()))),
            "{name}: {page}"
        );
        for option in command.get_arguments() {
            let id = option.get_id();
            let entry = option.get_long().map(|long| format!("--{long}"));
            let Some(help) = option.get_long_help().or(option.get_help()) else {
                panic!("{name}: no description of {id}");
            };
            let help = words(&help.to_string());
            assert_eq!(page.contains(&help), !option.is_hide_set(), "{name}: {id}: {page}");
            let listed = entry.is_none_or(|entry| page.contains(&entry));
            assert!(listed || option.is_hide_set(), "{name}: no entry for {id}: {page}");
        }
    }
}

#[test]
fn every_command_has_an_example_and_its_page_has_all_lines_of_it() {
    for (command, page) in commands() {
        let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let sections = sections::split(&help);
        let examples = sections.iter().find(|(kind, _)| *kind == Kind::Examples);
        // A program with commands has its examples there.
        let is_group = ["cairn", "cairn-agent"].contains(&name.as_str());
        assert!(is_group || examples.is_some(), "{name} has no example");
        for part in examples.into_iter().flat_map(|(_, parts)| parts) {
            let Part::Lines(lines) = part else { panic!("{name}: text among the examples") };
            let program = name.split_inclusive('-').next().unwrap_or_default();
            let program = program.trim_end_matches('-');
            assert!(lines.iter().any(|line| line.contains(program)), "{name}: {lines:?}");
            for line in lines {
                assert!(plain(&page).contains(&words(line)), "{name}: {line} is not in {page}");
            }
        }
    }
}

/// Runs a program that checks a file, if it is installed. It must succeed and print nothing.
fn check(program: &[&str], file: &Path) {
    let mut process = Process::new(program[0]);
    match process.args(&program[1..]).arg(file).output() {
        Ok(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && errors.is_empty(), "{program:?} {file:?}: {errors}");
        }
        Err(error) => eprintln!("not checked with {}: {error}", program[0]),
    }
}

#[test]
fn pages_and_completions_are_understood_by_their_readers() {
    let out = TempDir::new().unwrap();
    generate(out.path()).unwrap();
    let files = |directory: &str| {
        let entries = fs::read_dir(out.path().join(directory)).unwrap();
        let files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= programs().len(), "{directory}: {files:?}");
        files
    };
    for page in files("man") {
        check(&["groff", "-man", "-Tutf8", "-ww", "-z"], &page);
    }
    for (shell, directory) in [("bash", "bash"), ("zsh", "zsh"), ("fish", "fish")] {
        for file in files(directory) {
            check(&[shell, "-n"], &file);
        }
    }
}

#[test]
fn a_page_of_an_earlier_run_is_removed() {
    let out = TempDir::new().unwrap();
    generate(out.path()).unwrap();
    let old = out.path().join("man/cairn-former.1");
    fs::write(&old, "").unwrap();
    generate(out.path()).unwrap();
    assert!(!old.exists());
    assert!(out.path().join("man/cairn-import.1").exists());
}
