//! The results of a case: tables, goals, charts, and all data as JSON.

pub(crate) mod chart;
pub(crate) mod goals;
mod svg;
pub(crate) mod table;

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use self::goals::Goal;
use self::table::Table;

/// The results of a case.
pub(crate) struct Report {
    pub(crate) tables: Vec<Table>,
    pub(crate) goals: Vec<Goal>,
    /// All measured values, round by round.
    pub(crate) data: Value,
    /// The charts: name and SVG.
    pub(crate) charts: Vec<(String, String)>,
}

impl Report {
    pub(crate) fn passed(&self) -> bool {
        self.goals.iter().all(|goal| goal.passed)
    }

    /// The tables as text for a terminal.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for table in &self.tables {
            let _ = writeln!(text, "\n{}", table.text());
        }
        let _ = writeln!(text, "\n{}", goals::table(&self.goals).text());
        text
    }

    fn markdown(&self) -> String {
        let mut text = String::new();
        for table in &self.tables {
            let _ = writeln!(text, "{}", table.markdown());
        }
        let _ = writeln!(text, "{}", goals::table(&self.goals).markdown());
        text
    }

    /// Writes `CASE.json`, `CASE.md` and the charts.
    pub(crate) fn save(&self, directory: &Path, case: &str) -> Result<()> {
        fs::create_dir_all(directory)
            .with_context(|| format!("creating the directory {}", directory.display()))?;
        let write = |name: String, content: String| {
            let path = directory.join(name);
            fs::write(&path, content).with_context(|| format!("writing {}", path.display()))
        };
        let all = json!({ "case": case, "goals": self.goals, "measured": self.data });
        write(format!("{case}.json"), serde_json::to_string_pretty(&all)?)?;
        write(format!("{case}.md"), self.markdown())?;
        for (name, svg) in &self.charts {
            write(format!("{case}-{name}.svg"), svg.clone())?;
        }
        Ok(())
    }
}
