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
}

impl Table {
    pub(crate) fn new(heading: &[(&str, Align)]) -> Self {
        let columns = heading.iter().map(|(_, align)| *align).collect();
        Self { columns, rows: vec![heading.iter().map(|(title, _)| (*title).into()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn print(&self) -> Outcome {
        print(&self.render())
    }

    fn render(&self) -> String {
        let mut widths = vec![0; self.columns.len()];
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        let mut text = String::new();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).zip(&self.columns);
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
    use super::{Align, Table};

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
    }
}
