//! Progress bars, on standard error and only where it is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar over `total` units, hidden where standard error is no terminal.
fn bar(total: u64, template: &str, message: &str) -> ProgressBar {
    let target =
        if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    bar.set_style(ProgressStyle::with_template(template).expect("templates are constant").progress_chars("=> "));
    bar.set_message(message.to_owned());
    bar
}

/// A bar that is gone when its work is done or given up.
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar that counts in parts of a whole.
    pub fn parts(message: &str) -> Self {
        Self(bar(1, "{msg} [{bar:30}] {percent:>3}% {eta}", message))
    }

    /// Moves the bar.
    pub fn set(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Progress of one download.
pub struct DownloadBar(Progress);

impl DownloadBar {
    /// A bar for `file`.
    pub fn new(file: &str) -> Self {
        Self(Progress(bar(0, "{msg} [{bar:24}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}", file)))
    }
}

impl hf_hub::api::Progress for DownloadBar {
    fn init(&mut self, size: usize, _file: &str) {
        self.0.set(0, size as u64);
    }

    fn update(&mut self, size: usize) {
        self.0.0.inc(size as u64);
    }

    fn finish(&mut self) {
        self.0.clear();
    }
}
