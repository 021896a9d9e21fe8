//! A progress bar for work that takes long, on a terminal.

use std::io::{self, IsTerminal};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Shorter work shows nothing.
const DELAY: Duration = Duration::from_secs(2);

/// Bytes of a file that are done. It shows itself only when that is of use.
pub(crate) struct Progress {
    total: u64,
    start: Instant,
    bar: Option<Mutex<ProgressBar>>,
}

impl Progress {
    /// `total` is 0 when it is not known.
    pub(crate) fn new(total: u64) -> Self {
        let bar = io::stderr().is_terminal().then(|| Mutex::new(ProgressBar::hidden()));
        Self { total, start: Instant::now(), bar }
    }

    /// The first `position` bytes are done.
    pub(crate) fn set(&self, position: u64) {
        let Some(bar) = &self.bar else { return };
        if self.start.elapsed() < DELAY {
            return;
        }
        let mut bar = bar.lock().expect("no thread panics while it draws");
        if bar.is_hidden() {
            *bar = visible(self.total).with_elapsed(self.start.elapsed());
        }
        bar.set_position(position);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.lock().expect("no thread panics while it draws").finish_and_clear();
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
