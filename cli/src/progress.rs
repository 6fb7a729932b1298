//! A line of progress on a terminal, or lines in a log.

use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// The interval of lines if standard error is not a terminal.
const PERIOD: Duration = Duration::from_secs(10);

/// A line on standard error if that is a terminal; each text replaces it, and a drop clears it.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    interactive: bool,
    shown: bool,
    /// The time of the last line without a terminal; none: such lines are disabled.
    written: Option<Instant>,
}

impl ProgressLine {
    pub(crate) fn new() -> Self {
        Self {
            interactive: io::stderr().is_terminal(),
            shown: false,
            written: None,
        }
    }

    /// The same, with a line every 10 seconds if there is no terminal.
    pub(crate) fn with_lines() -> Self {
        Self {
            written: Some(Instant::now()),
            ..Self::new()
        }
    }

    /// Only lines, for several VMs at once.
    pub(crate) fn of_several() -> Self {
        Self {
            interactive: false,
            ..Self::with_lines()
        }
    }

    pub(crate) fn show(&mut self, text: impl fmt::Display) {
        if self.interactive {
            // A closed terminal must not end the running work.
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
            self.shown = true;
        } else if self
            .written
            .is_some_and(|written| written.elapsed() >= PERIOD)
        {
            let _ = writeln!(io::stderr(), "{text}");
            self.written = Some(Instant::now());
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
