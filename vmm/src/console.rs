//! The other end of the serial console: the interface to a terminal, and the path of input from it
//! to the serial port.
//!
//! [`ConsoleInput`] is the terminal's side, which handles raw mode and escape sequences. The other
//! side is the serial port's receive FIFO. This module owns the bytes in between; it must not know
//! the serial port's registers.
//!
//! A FIFO of 16 bytes fills quickly; a backlog holds the rest. If that is full too, this module
//! stops reading from the terminal until the guest has made room. So pasting a page loses nothing.
//! Thanks to the backlog, the sequence that leaves the console is still read while a hung guest
//! reads nothing.
//!
//! ```text
//!                        readable, backlog has room
//!                          +------+
//!                          v      |
//!             attach --> reading ----------------------+
//!             ^            ^    |                      | end of file, an error,
//!    another  |            |    | backlog full         | or detach
//!    source   |            |    v                      v
//!             |   took some of  full                 closed (the backlog is still offered)
//!             |   the backlog                          |
//!             +----------------------------------------+
//! ```
//! A machine without a terminal has its console on a Unix socket and in a log file: see
//! [`ConsoleSocket`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::event_loop::{EventLoop, Token};

mod ends;
mod history;
mod log_file;
mod output;
mod socket;

pub use ends::{Console, TerminalConsole};
pub(crate) use output::{Attached, ConsoleOutput};
pub use socket::{ConsoleLoss, ConsoleSocket};

/// Result of a read from the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsoleRead {
    /// Number of bytes for the guest; 0 if all input was for the terminal itself.
    Bytes(usize),
    /// The user leaves the console: the machine stops.
    Leave,
    /// There will be no more input.
    Closed,
}

/// A source of console input.
pub trait ConsoleInput: Send + AsFd {
    /// Reads the available input, at most `buffer.len()` bytes. Called when the descriptor is
    /// readable, or at any time if epoll does not support it (a regular file).
    ///
    /// # Errors
    /// The input is broken; it will not be read again.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead>;
}

/// Accepts bytes into the serial port's receive FIFO.
pub(crate) trait Receiver {
    /// Offers `bytes` and returns the number of accepted ones. If that is less than all,
    /// [`Token::ConsoleRoom`] follows once there is room again.
    fn receive(&self, bytes: &[u8]) -> usize;
}

/// Bytes read from the terminal at once.
const CHUNK: usize = 256;
/// Limit of the bytes that wait for the guest.
const BACKLOG: usize = 4096;

/// How the pump detects input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readiness {
    /// The event loop reports it.
    Waited,
    /// Always readable: a regular file.
    Always,
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Reading,
    Full,
    Closed,
}

/// The current source of bytes.
struct Source {
    input: Box<dyn ConsoleInput>,
    readiness: Readiness,
}

impl Source {
    fn unregister(&self, events: &EventLoop) {
        if self.readiness == Readiness::Waited
            && let Err(error) = events.remove(self.input.as_fd().as_raw_fd())
        {
            tracing::warn!(%error, "cannot stop waiting for console input");
        }
    }
}

/// Moves bytes from a [`ConsoleInput`] to a [`Receiver`].
pub(crate) struct InputPump {
    /// `None` exactly when the phase is [`Phase::Closed`].
    source: Option<Source>,
    phase: Phase,
    backlog: VecDeque<u8>,
}

vdpa::opaque_debug!(InputPump, this => phase: this.phase, backlog: this.backlog.len());

/// Whether the user wants to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Pumped {
    /// Continue.
    Stay,
    /// Stop the machine.
    Leave,
}

impl InputPump {
    /// Creates a pump without a source.
    pub(crate) fn idle() -> Self {
        Self {
            source: None,
            phase: Phase::Closed,
            backlog: VecDeque::new(),
        }
    }

    /// Registers `input` with the loop, and reads it from now on. An earlier source is closed;
    /// bytes already read from it stay in the backlog.
    ///
    /// # Errors
    /// The descriptor can't be registered (a regular file need not be).
    pub(crate) fn attach(
        &mut self,
        input: Box<dyn ConsoleInput>,
        events: &EventLoop,
    ) -> io::Result<()> {
        self.detach(events);
        let readiness = match events.add(input.as_fd().as_raw_fd(), Token::ConsoleInput) {
            Ok(()) => Readiness::Waited,
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => Readiness::Always,
            Err(error) => return Err(error),
        };
        self.source = Some(Source { input, readiness });
        self.phase = Phase::Reading;
        self.update(events);
        Ok(())
    }

    /// Closes the source.
    pub(crate) fn detach(&mut self, events: &EventLoop) {
        if let Some(source) = self.source.take()
            && self.phase == Phase::Reading
        {
            source.unregister(events);
        }
        self.phase = Phase::Closed;
    }

    /// Whether there will be no more input.
    pub(crate) fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    fn is_always_readable(&self) -> bool {
        let readiness = self.source.as_ref().map(|source| source.readiness);
        readiness == Some(Readiness::Always)
    }

    /// The terminal has input. For [`Token::ConsoleInput`] only: otherwise the read might block.
    pub(crate) fn readable(&mut self, receiver: &dyn Receiver, events: &EventLoop) -> Pumped {
        let pumped = self.read(events);
        self.offer(receiver, events);
        pumped
    }

    /// The serial port has room. Also called once when the machine begins to run.
    pub(crate) fn room(&mut self, receiver: &dyn Receiver, events: &EventLoop) -> Pumped {
        self.offer(receiver, events);
        // A file needs no wait: it is read as fast as the guest accepts it.
        while self.is_always_readable() && self.phase == Phase::Reading && self.backlog.is_empty() {
            if self.read(events) == Pumped::Leave {
                return Pumped::Leave;
            }
            self.offer(receiver, events);
        }
        Pumped::Stay
    }

    /// Drops bytes that the guest has not seen, after a reset.
    pub(crate) fn reset(&mut self, events: &EventLoop) {
        self.backlog.clear();
        self.update(events);
    }

    /// Reads once into the backlog.
    fn read(&mut self, events: &EventLoop) -> Pumped {
        let mut buffer = [0; CHUNK];
        let room = BACKLOG.saturating_sub(self.backlog.len());
        let Some(free) = buffer.get_mut(..room.min(CHUNK)) else {
            return Pumped::Stay;
        };
        let Some(source) = &mut self.source else {
            return Pumped::Stay;
        };
        if self.phase != Phase::Reading || free.is_empty() {
            return Pumped::Stay;
        }
        match source.input.read(free) {
            Ok(ConsoleRead::Bytes(count)) => self.backlog.extend(free.iter().take(count)),
            Ok(ConsoleRead::Leave) => {
                self.detach(events);
                return Pumped::Leave;
            }
            Ok(ConsoleRead::Closed) => self.detach(events),
            Err(error) if is_transient(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "console input failed; closing it");
                self.detach(events);
            }
        }
        Pumped::Stay
    }

    /// Offers the backlog to the serial port.
    fn offer(&mut self, receiver: &dyn Receiver, events: &EventLoop) {
        loop {
            let (bytes, _) = self.backlog.as_slices();
            if bytes.is_empty() {
                break;
            }
            let taken = receiver.receive(bytes).min(bytes.len());
            let all = taken == bytes.len();
            self.backlog.drain(..taken);
            if !all {
                break;
            }
        }
        self.update(events);
    }

    /// Updates phase and registration from the backlog.
    fn update(&mut self, events: &EventLoop) {
        let full = self.backlog.len() >= BACKLOG;
        let Some(source) = &self.source else {
            return;
        };
        match (self.phase, full) {
            (Phase::Reading, true) => {
                self.phase = Phase::Full;
                source.unregister(events);
            }
            (Phase::Full, false) => {
                self.phase = Phase::Reading;
                if source.readiness == Readiness::Waited
                    && let Err(error) =
                        events.add(source.input.as_fd().as_raw_fd(), Token::ConsoleInput)
                {
                    tracing::warn!(%error, "cannot wait for console input; closing it");
                    self.phase = Phase::Closed;
                    self.source = None;
                }
            }
            (Phase::Reading, false) | (Phase::Full, true) | (Phase::Closed, _) => {}
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests;
