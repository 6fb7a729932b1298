//! A line of progress on a terminal.

use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};

/// A line of standard error, if that is a terminal, which each text replaces; gone when dropped.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    interactive: bool,
    shown: bool,
}

impl ProgressLine {
    pub(crate) fn new() -> Self {
        Self {
            interactive: io::stderr().is_terminal(),
            shown: false,
        }
    }

    pub(crate) fn show(&mut self, text: impl fmt::Display) {
        if self.interactive {
            // A terminal that went away must not end what is under way.
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
            self.shown = true;
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
