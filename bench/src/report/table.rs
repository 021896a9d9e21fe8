//! Tables for the terminal and for Markdown.

/// A table. The first column contains names, the others numbers.
pub(crate) struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, head: &[&str]) -> Table {
        let head = head.iter().map(|name| name.to_string()).collect();
        Table { title: title.into(), rows: vec![head] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.rows[0].len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    fn widths(&self) -> Vec<usize> {
        let column = |at: usize| self.rows.iter().map(move |row| row[at].chars().count());
        (0..self.rows[0].len()).map(|at| column(at).max().unwrap_or(0)).collect()
    }

    pub(crate) fn text(&self) -> String {
        let widths = self.widths();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, &width))| match at {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join("  ")
        };
        let mut lines: Vec<String> = self.rows.iter().map(line).collect();
        lines.insert(1, "-".repeat(lines[0].chars().count()));
        format!("{}\n{}", self.title, lines.join("\n"))
    }

    pub(crate) fn markdown(&self) -> String {
        let line = |row: &Vec<String>| format!("| {} |\n", row.join(" | "));
        let mut rows = self.rows.iter();
        let head = rows.next().map(line).unwrap_or_default();
        let rule = format!("|---|{}\n", "---:|".repeat(self.rows[0].len() - 1));
        format!("**{}**\n\n{head}{rule}{}", self.title, rows.map(line).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn numbers_are_aligned_to_the_right() {
        let mut table = Table::new("T", &["name", "n"]);
        table.row(["a".into(), "10".into()]);
        assert_eq!(table.text(), "T\nname   n\n--------\na     10");
        assert_eq!(table.markdown(), "**T**\n\n| name | n |\n|---|---:|\n| a | 10 |\n");
    }
}
