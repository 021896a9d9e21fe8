//! Renders manual pages.

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use crate::sections::{self, Part};

/// A manual page.
pub(crate) struct Page {
    pub(crate) file: String,
    pub(crate) text: Vec<u8>,
}

/// The pages of a program: its own, and one for each command.
pub(crate) fn of_program(program: Command) -> Vec<Page> {
    // Every page documents its own command, so none is needed for `help`.
    let mut program = program.disable_help_subcommand(true);
    // Gives the commands their full names and the global options.
    program.build();
    let mut pages = Vec::new();
    add(&program, None, &mut pages);
    pages
}

fn add(command: &Command, parent: Option<&str>, pages: &mut Vec<Page>) {
    let name = full_name(command);
    pages.push(Page { file: format!("{name}.1"), text: render(command, parent) });
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        add(sub, Some(&name), pages);
    }
}

/// The name of a command's page, such as `cairn-policy-set`.
fn full_name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

fn render(command: &Command, parent: Option<&str>) -> Vec<u8> {
    const WRITES: &str = "writing to memory does not fail";
    let version = env!("CARGO_PKG_VERSION");
    // The usage of the help names the values, which the synopsis of clap_mangen leaves out.
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim().to_owned();
    let man = Man::new(command.clone().override_usage(usage));
    // The title of clap_mangen lacks the quotes of its empty date.
    let title = format!(".TH {} 1 \"\" \"Cairn {version}\" \"Cairn Manual\"\n", full_name(command));
    let mut text = title.into_bytes();
    man.render_name_section(&mut text).expect(WRITES);
    man.render_synopsis_section(&mut text).expect(WRITES);
    man.render_description_section(&mut text).expect(WRITES);
    man.render_options_section(&mut text).expect(WRITES);
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text).expect(WRITES);
    }
    let mut rest = Roff::new();
    let help = command.get_after_long_help().or(command.get_after_help());
    for (kind, parts) in sections::split(&help.map(ToString::to_string).unwrap_or_default()) {
        rest.control("SH", [kind.heading()]);
        for (at, part) in parts.iter().enumerate() {
            add_part(&mut rest, part, at == 0);
        }
    }
    rest.control("SH", ["SEE ALSO"]);
    rest.text(see_also(command, parent));
    rest.to_writer(&mut text).expect(WRITES);
    text
}

fn add_part(roff: &mut Roff, part: &Part, is_first: bool) {
    if !is_first {
        roff.control("PP", []);
    }
    match part {
        Part::Text(text) => {
            roff.text([roman(text)]);
        }
        Part::Lines(lines) => {
            roff.control("nf", []);
            for line in lines {
                match line.is_empty() {
                    true => roff.control("sp", []),
                    false => roff.text([roman(line)]),
                };
            }
            roff.control("fi", []);
        }
    }
}

/// The programs, or the command that a command is part of.
fn see_also(command: &Command, parent: Option<&str>) -> Vec<Inline> {
    let programs = ["cairn", "cairn-blk", "cairn-agent"];
    let own = full_name(command);
    let names: Vec<&str> = match parent {
        Some(parent) => vec![parent],
        None => programs.into_iter().filter(|name| *name != own).collect(),
    };
    let mut text = Vec::new();
    for name in names {
        if !text.is_empty() {
            text.push(roman(", "));
        }
        text.extend([bold(name), roman("(1)")]);
    }
    text
}
