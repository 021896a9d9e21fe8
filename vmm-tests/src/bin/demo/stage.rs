//! The output of the demo: steps with their times, then measurements, then checks.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::Result;

const WIDTH: usize = 78;

/// Prints the demo and collects its results.
pub(crate) struct Stage {
    colour: bool,
    steps: usize,
    measurements: Vec<(String, String)>,
    checks: Vec<Check>,
}

struct Check {
    name: &'static str,
    /// `None` until the demo has reached the check.
    passed: Option<bool>,
}

#[derive(Clone, Copy)]
enum Ink {
    Bold = 1,
    Dim = 2,
    Red = 31,
    Green = 32,
}

impl Stage {
    pub(crate) fn open(title: &str, checks: &[&'static str]) -> Stage {
        let checks = checks.iter().map(|&name| Check { name, passed: None }).collect();
        let colour = io::stdout().is_terminal();
        let stage = Stage { colour, steps: 0, measurements: Vec::new(), checks };
        stage.heading(title);
        stage
    }

    /// Prints the text of a step, executes it, and prints how long it took.
    pub(crate) fn step<T>(&mut self, text: &str, action: impl FnOnce() -> Result<T>) -> Result<T> {
        self.steps += 1;
        print!("{:>4}  {text:<WIDTH$}", self.steps);
        // The text is visible while the step runs.
        let _ = io::stdout().flush();
        let begin = Instant::now();
        let outcome = action();
        println!("{}", self.paint(Ink::Dim, &format!("{:>9}", seconds(begin.elapsed()))));
        outcome
    }

    /// Prints a command and its output.
    pub(crate) fn show(&self, command: &str, text: &str) {
        println!("\n      {}", self.paint(Ink::Bold, &format!("$ {command}")));
        text.lines().for_each(|line| println!("      {line}"));
        println!();
    }

    pub(crate) fn measure(&mut self, name: &str, value: String) {
        self.measurements.push((name.to_owned(), value));
    }

    pub(crate) fn check(&mut self, name: &'static str, passed: bool) {
        let known = self.checks.iter_mut().find(|check| check.name == name);
        known.expect("every check is passed to `open`").passed = Some(passed);
    }

    /// Prints why the demo cannot continue.
    pub(crate) fn interrupt(&self, reason: &str) {
        println!("\n{}", self.paint(Ink::Red, reason));
    }

    /// Prints the measurements and the checks. Returns whether every check was reached and passed.
    pub(crate) fn close(self) -> bool {
        if !self.measurements.is_empty() {
            self.heading("Measurements");
        }
        for (name, value) in &self.measurements {
            println!("      {name:<44}{value:>24}");
        }
        self.heading("Checks");
        for Check { name, passed } in &self.checks {
            let result = match passed {
                Some(true) => self.paint(Ink::Green, "yes"),
                Some(false) => self.paint(Ink::Red, "NO"),
                None => self.paint(Ink::Red, "not reached"),
            };
            println!("      {name:<65}{result}");
        }
        println!();
        self.checks.iter().all(|check| check.passed == Some(true))
    }

    fn heading(&self, text: &str) {
        println!("\n  {}\n", self.paint(Ink::Bold, text));
    }

    fn paint(&self, ink: Ink, text: &str) -> String {
        if self.colour { format!("\x1b[{}m{text}\x1b[0m", ink as u8) } else { text.to_owned() }
    }
}

pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["B", "KiB", "MiB", "GiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

pub(crate) fn milliseconds(microseconds: u64) -> String {
    format!("{:.2} ms", microseconds as f64 / 1000.0)
}

pub(crate) fn seconds(duration: Duration) -> String {
    format!("{:.2} s", duration.as_secs_f64())
}
