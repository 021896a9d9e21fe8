//! A progress bar for long operations, on a terminal.

use std::io::{self, IsTerminal};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// An operation that takes less time shows no bar.
const DELAY: Duration = Duration::from_secs(2);

/// A count of processed bytes. The bar appears only on a terminal, and only after a delay.
pub(crate) struct Progress {
    total: u64,
    start: Instant,
    bar: Option<Mutex<ProgressBar>>,
}

impl Progress {
    /// Starts at 0. A `total` of 0 means that the total is unknown.
    pub(crate) fn new(total: u64) -> Self {
        let bar = io::stderr().is_terminal().then(|| Mutex::new(ProgressBar::hidden()));
        Self { total, start: Instant::now(), bar }
    }

    /// Reports that the first `position` bytes are processed.
    pub(crate) fn set(&self, position: u64) {
        let Some(bar) = &self.bar else { return };
        if self.start.elapsed() < DELAY {
            return;
        }
        let mut bar = bar.lock().expect("no thread panics while it draws the bar");
        if bar.is_hidden() {
            *bar = visible(self.total).with_elapsed(self.start.elapsed());
        }
        bar.set_position(position);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.lock().expect("no thread panics while it draws the bar").finish_and_clear();
        }
    }
}

/// What an operation of unknown length is doing. It appears only on a terminal, and only after a
/// delay.
pub(crate) struct Activity {
    start: Instant,
    bar: Option<Mutex<ProgressBar>>,
}

impl Activity {
    pub(crate) fn new() -> Activity {
        let bar = io::stderr().is_terminal().then(|| Mutex::new(ProgressBar::hidden()));
        Activity { start: Instant::now(), bar }
    }

    /// Shows what the operation is doing.
    pub(crate) fn set(&self, text: impl FnOnce() -> String) {
        let Some(bar) = &self.bar else { return };
        if self.start.elapsed() < DELAY {
            return;
        }
        let mut bar = bar.lock().expect("no thread panics while it draws the bar");
        if bar.is_hidden() {
            let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed}");
            let style = style.expect("the template is fixed");
            *bar = ProgressBar::new_spinner().with_style(style).with_elapsed(self.start.elapsed());
        }
        bar.set_message(text());
        bar.tick();
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.lock().expect("no thread panics while it draws the bar").finish_and_clear();
        }
    }
}

fn visible(total: u64) -> ProgressBar {
    let (bar, template) = match total {
        0 => (ProgressBar::new_spinner(), "{spinner} {bytes} {binary_bytes_per_sec}"),
        total => (
            ProgressBar::new(total),
            "[{bar:40}] {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left",
        ),
    };
    bar.with_style(ProgressStyle::with_template(template).expect("the template is fixed"))
}
