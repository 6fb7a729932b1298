//! The kinds of other ends that a serial console can have.

use std::fmt;
use std::os::fd::OwnedFd;

use super::{ConsoleInput, ConsoleSocket};

/// The other end of the serial console.
#[derive(Debug)]
pub enum Console {
    /// A terminal or a substitute.
    Terminal(TerminalConsole),
    /// A Unix socket and a log file.
    Socket(ConsoleSocket),
}

/// The two ends of a terminal.
pub struct TerminalConsole {
    /// Keyboard; `None`: the guest never gets input.
    pub input: Option<Box<dyn ConsoleInput>>,
    /// Screen. A descriptor and not a writer, because nothing may buffer the guest's output, and
    /// the machine waits for it when it is slow. Its file may be blocking; the machine never writes
    /// when that would block.
    pub output: OwnedFd,
}

impl fmt::Debug for TerminalConsole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TerminalConsole")
            .field("input", &self.input.is_some())
            .field("output", &self.output)
            .finish()
    }
}
