//! Goals: the value to reach, the measured value, and whether it is enough.

use serde::Serialize;

use super::table::Table;

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) measured: String,
    pub(crate) wanted: String,
    pub(crate) passed: bool,
}

impl Goal {
    /// A goal for a ratio that must be at least `wanted`.
    pub(crate) fn at_least(what: impl Into<String>, ratio: f64, wanted: f64) -> Goal {
        Goal {
            what: what.into(),
            measured: format!("{ratio:.3} x"),
            wanted: format!(">= {wanted:.3} x"),
            passed: ratio >= wanted,
        }
    }

    /// A goal for a ratio that must be at most `wanted`.
    pub(crate) fn at_most(what: impl Into<String>, ratio: f64, wanted: f64) -> Goal {
        Goal {
            what: what.into(),
            measured: format!("{ratio:.3} x"),
            wanted: format!("<= {wanted:.3} x"),
            passed: ratio <= wanted,
        }
    }

    /// A goal for a value in `unit` that must be at most `limit`.
    pub(crate) fn limit(what: impl Into<String>, value: f64, limit: f64, unit: &str) -> Goal {
        Goal {
            what: what.into(),
            measured: format!("{value:.0} {unit}"),
            wanted: format!("<= {limit:.0} {unit}"),
            passed: value <= limit,
        }
    }
}

pub(crate) fn table(goals: &[Goal]) -> Table {
    let mut table = Table::new("Goals", &["goal", "measured", "wanted", ""]);
    for goal in goals {
        let result = if goal.passed { "PASS" } else { "MISS" };
        table.row([&goal.what, &goal.measured, &goal.wanted, result].map(String::from));
    }
    table
}
