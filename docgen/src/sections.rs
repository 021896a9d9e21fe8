//! Splits the text behind a command's options into the sections of its manual page.

/// A section of a manual page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Notes,
    ExitStatus,
    Examples,
}

impl Kind {
    pub(crate) fn heading(self) -> &'static str {
        match self {
            Kind::Notes => "NOTES",
            Kind::ExitStatus => "EXIT STATUS",
            Kind::Examples => "EXAMPLES",
        }
    }

    /// The section that a line begins.
    fn of_line(line: &str) -> Option<Kind> {
        match line {
            "Example:" | "Examples:" => Some(Kind::Examples),
            "Exit codes:" => Some(Kind::ExitStatus),
            _ => None,
        }
    }
}

/// A paragraph of a section.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Text whose lines may be broken anywhere.
    Text(String),
    /// Lines that are printed as they are.
    Lines(Vec<String>),
}

/// The parts of a help text, with the sections that they belong to, in the order of a manual page. A
/// line such as `Examples:` begins a section, which ends at the next line that is not indented.
pub(crate) fn split(help: &str) -> Vec<(Kind, Vec<Part>)> {
    let mut sections =
        [Kind::Notes, Kind::ExitStatus, Kind::Examples].map(|kind| (kind, Vec::new()));
    let mut current = Kind::Notes;
    // Whether the next line of text begins a paragraph.
    let mut is_new = true;
    for line in help.lines() {
        if let Some(kind) = Kind::of_line(line) {
            (current, is_new) = (kind, true);
            continue;
        }
        if line.is_empty() {
            is_new = true;
            continue;
        }
        let indented = line.starts_with("  ");
        if !indented && current != Kind::Notes {
            (current, is_new) = (Kind::Notes, true);
        }
        let parts = &mut sections[current as usize].1;
        match (parts.last_mut(), indented) {
            (Some(Part::Lines(lines)), true) => {
                if is_new {
                    lines.push(String::new());
                }
                lines.push(line[2..].to_owned());
            }
            (_, true) => parts.push(Part::Lines(vec![line[2..].to_owned()])),
            (Some(Part::Text(text)), false) if !is_new => {
                text.push(' ');
                text.push_str(line);
            }
            (_, false) => parts.push(Part::Text(line.to_owned())),
        }
        is_new = false;
    }
    sections.into_iter().filter(|(_, parts)| !parts.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::{Kind, Part, split};

    fn text(text: &str) -> Part {
        Part::Text(text.into())
    }

    fn lines<const N: usize>(lines: [&str; N]) -> Part {
        Part::Lines(lines.map(String::from).into())
    }

    #[test]
    fn paragraphs_become_notes_and_examples_keep_their_lines() {
        let help = "One,\ntwo.\n\nThree.\n\nExamples:\n  a \\\n    b\n\n  c";
        assert_eq!(
            split(help),
            [
                (Kind::Notes, vec![text("One, two."), text("Three.")]),
                (Kind::Examples, vec![lines(["a \\", "  b", "", "c"])]),
            ]
        );
    }

    #[test]
    fn text_behind_a_section_is_a_note() {
        let help = "Exit codes:\n  0  done\n  1  failed\n\nSizes are bytes.";
        assert_eq!(
            split(help),
            [
                (Kind::Notes, vec![text("Sizes are bytes.")]),
                (Kind::ExitStatus, vec![lines(["0  done", "1  failed"])]),
            ]
        );
    }
}
