//! Output: JSON, aligned tables, and lists of fields.

use std::io::{self, ErrorKind, Write};

use serde_json::Value;

use crate::args::Style;
use crate::failure::{Doing, Outcome};
use crate::size::human_size;

/// A number with its noun, which gets an "s" unless there is one.
pub(crate) fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Prints text. A reader that closes the pipe early is not a failure.
pub(crate) fn print(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.doing(|| "writing the output".into()),
    }
}

/// Prints one JSON value on a line.
pub(crate) fn print_json(value: &Value) -> Outcome {
    print(&format!("{value}\n"))
}

impl Style {
    /// A size as this style shows it.
    pub(crate) fn size(self, bytes: u64) -> String {
        if self.bytes { bytes.to_string() } else { human_size(bytes) }
    }
}

/// The text with `?` in place of each control character. Text of a peer may contain sequences that
/// change the operator's terminal.
fn printable(text: &str) -> String {
    text.chars().map(|one| if one.is_control() { '?' } else { one }).collect()
}

/// The alignment of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A heading and rows. Each column is as wide as its longest cell.
pub(crate) struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
    /// The widths of the rows that were printed.
    widths: Vec<usize>,
}

impl Table {
    pub(crate) fn new(heading: &[(&str, Align)]) -> Self {
        let columns = heading.iter().map(|(_, align)| *align).collect();
        let rows = vec![heading.iter().map(|(title, _)| (*title).into()).collect()];
        Self { columns, rows, widths: vec![0; heading.len()] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| printable(&cell)).collect());
    }

    /// Prints the rest of the rows.
    pub(crate) fn print(mut self) -> Outcome {
        print(&self.render())
    }

    /// The next part of the table. Its columns are at least as wide as those before.
    fn render(&mut self) -> String {
        let rows = std::mem::take(&mut self.rows);
        for row in &rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        let mut text = String::new();
        for row in &rows {
            let cells = row.iter().zip(&self.widths).zip(&self.columns);
            let line = cells.map(|((cell, &width), align)| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
            text += line.collect::<Vec<_>>().join("  ").trim_end();
            text.push('\n');
        }
        text
    }
}

/// Elements of a long listing that are printed together.
const PRINTED_TOGETHER: usize = 1000;

/// A listing that is printed in parts: as one JSON array, or as a table. A column of a table is as
/// wide as its longest cell so far.
pub(crate) struct Listing {
    json: Option<JsonListing>,
    table: Table,
    /// The first failure to print. Nothing is printed after it.
    printed: Outcome,
}

#[derive(Default)]
struct JsonListing {
    /// The text before the array.
    head: String,
    elements: Vec<String>,
    has_printed: bool,
}

impl Listing {
    pub(crate) fn new(style: Style, heading: &[(&str, Align)]) -> Self {
        let json = style.json.then(JsonListing::default);
        Self { json, table: Table::new(heading), printed: Ok(()) }
    }

    /// Adds an element, and prints a part if there are enough of them.
    pub(crate) fn add<const N: usize>(
        &mut self,
        json: impl FnOnce() -> Value,
        row: impl FnOnce() -> [String; N],
    ) {
        if self.printed.is_err() {
            return;
        }
        let text = match &mut self.json {
            Some(all) => {
                all.elements.push(json().to_string());
                (all.elements.len() >= PRINTED_TOGETHER).then(|| all.render())
            }
            None => {
                self.table.row(row());
                (self.table.rows.len() >= PRINTED_TOGETHER).then(|| self.table.render())
            }
        };
        if let Some(text) = text {
            self.printed = print(&text);
        }
    }

    /// Prints this text before the array.
    pub(crate) fn within(mut self, head: String) -> Self {
        if let Some(json) = &mut self.json {
            json.head = head;
        }
        self
    }

    /// Prints the rest.
    pub(crate) fn end(self) -> Outcome {
        self.end_with("")
    }

    /// Prints the rest, and this text behind the array.
    pub(crate) fn end_with(self, tail: &str) -> Outcome {
        self.printed?;
        match self.json {
            Some(all) => print(&all.finish(tail)),
            None => self.table.print(),
        }
    }
}

impl JsonListing {
    /// The next part of the array, without its end.
    fn render(&mut self) -> String {
        let elements = std::mem::take(&mut self.elements);
        if elements.is_empty() {
            return String::new();
        }
        let begin = match std::mem::replace(&mut self.has_printed, true) {
            true => ",".to_owned(),
            false => format!("{}[", self.head),
        };
        format!("{begin}{}", elements.join(","))
    }

    /// The last part, and the text behind the array.
    fn finish(mut self, tail: &str) -> String {
        let rest = self.render();
        let empty = if self.has_printed { String::new() } else { format!("{}[", self.head) };
        format!("{rest}{empty}]{tail}\n")
    }
}

/// Prints named values, one on each line.
pub(crate) fn print_fields(fields: &[(&str, String)]) -> Outcome {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let line = |(name, value): &(&str, String)| {
        format!("{:<width$}  {value}", format!("{name}:"), width = width + 1).trim_end().to_owned()
    };
    let lines = fields.iter().map(line).collect::<Vec<_>>();
    print(&(lines.join("\n") + "\n"))
}

/// The value, or a dash if there is none.
pub(crate) fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::{Align, JsonListing, Table};

    #[test]
    fn columns_are_as_wide_as_their_longest_cell() {
        let mut table =
            Table::new(&[("NAME", Align::Left), ("SIZE", Align::Right), ("X", Align::Left)]);
        table.row(["a".into(), "20 GiB".into(), "-".into()]);
        table.row(["longer".into(), "1 B".into(), String::new()]);
        assert_eq!(
            table.render(),
            "NAME      SIZE  X\n\
             a       20 GiB  -\n\
             longer     1 B\n"
        );
        table.row(["b".into(), "2 B".into(), "y".into()]);
        assert_eq!(table.render(), "b          2 B  y\n", "as wide as the part before");
    }

    #[test]
    fn control_characters_in_a_cell_do_not_reach_the_terminal() {
        let mut table = Table::new(&[("DOMAIN", Align::Left), ("STATE", Align::Left)]);
        table.row(["\x1b[2J\nfoo".into(), "up".into()]);
        assert_eq!(table.render(), "DOMAIN    STATE\n?[2J?foo  up\n");
    }

    #[test]
    fn an_array_that_is_printed_in_parts_is_one_array() {
        let mut listing = JsonListing::default();
        let mut text = String::new();
        for part in [&["1", "2"][..], &[], &["3"]] {
            listing.elements.extend(part.iter().map(ToString::to_string));
            text += &listing.render();
        }
        assert_eq!(text + &listing.finish(""), "[1,2,3]\n");
        assert_eq!(JsonListing::default().finish(""), "[]\n");
    }

    #[test]
    fn an_array_may_be_a_part_of_an_object() {
        for (elements, text) in
            [(&[][..], "{\"a\":[],\"b\":1}\n"), (&["1"], "{\"a\":[1],\"b\":1}\n")]
        {
            let mut listing = JsonListing { head: "{\"a\":".into(), ..JsonListing::default() };
            listing.elements.extend(elements.iter().map(|one: &&str| one.to_string()));
            assert_eq!(listing.finish(",\"b\":1}"), text);
        }
    }
}
