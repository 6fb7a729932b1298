//! The serial console's other end: what a machine needs of a terminal, and the
//! way of input from it to the serial port.
//!
//! [`ConsoleInput`] is the terminal's side (raw mode and escape sequences are
//! its business), the serial port's receive FIFO the other. This module owns
//! the bytes in between; it must not know the serial port's registers. A FIFO of 16 bytes is soon full; what doesn't fit waits
//! in a backlog, and when that is full too, nothing more is read from the terminal
//! until the guest has made room: nothing is lost when somebody pastes a
//! page. The backlog is there so that the sequence that leaves the console is
//! still read while a hung guest takes nothing.
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
//! A machine without a terminal has its console on a Unix socket and in a log file: see [`ConsoleSocket`].

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::event_loop::{EventLoop, Token};

mod history;
mod log_file;
mod screen;
mod socket;

pub(crate) use screen::{Attached, Screen};
pub use socket::{ConsoleLoss, ConsoleSocket};

/// What a read from the terminal gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsoleRead {
    /// So many bytes for the guest; 0 if all that came was for the terminal itself.
    Bytes(usize),
    /// The user wants to leave: the machine stops.
    Leave,
    /// There will be no more input.
    Closed,
}

/// Where console input comes from.
pub trait ConsoleInput: Send + AsFd {
    /// Takes what there is, at most `buffer.len()` bytes. Called when the
    /// descriptor is readable, or at any time if it can't be waited for (a
    /// regular file).
    ///
    /// # Errors
    /// The input is broken; it will not be read again.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead>;
}

/// The other end of the serial console.
#[derive(Debug)]
pub enum Console {
    /// A terminal, or what stands for one.
    Terminal(TerminalConsole),
    /// A Unix socket and a log file.
    Socket(ConsoleSocket),
}

/// The two ends of a terminal.
pub struct TerminalConsole {
    /// Keyboard; `None`: the guest never sees input.
    pub input: Option<Box<dyn ConsoleInput>>,
    /// Screen. A descriptor and not a writer, because nothing may buffer what
    /// the guest writes, and the machine waits for it when it is slow. Its file may
    /// be blocking; the machine never writes when that would block.
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

/// Takes bytes into the serial port's receive FIFO; returns how many fitted.
pub(crate) trait Receiver {
    /// Offers `bytes`; the first `n` of them are taken. If `n` is less than
    /// all, [`Token::ConsoleRoom`] comes once there is room again.
    fn receive(&self, bytes: &[u8]) -> usize;
}

/// Bytes read from the terminal at once.
const CHUNK: usize = 256;
/// Bytes that wait for the guest at most.
const BACKLOG: usize = 4096;

/// How it is learned that there is something to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readiness {
    /// The event loop tells.
    Waited,
    /// There is at any time: a regular file.
    Always,
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Reading,
    Full,
    Closed,
}

/// Where bytes come from now.
struct Source {
    input: Box<dyn ConsoleInput>,
    readiness: Readiness,
}

impl Source {
    fn unregister(&self, events: &EventLoop) {
        if self.readiness == Readiness::Waited
            && let Err(error) = events.remove(self.input.as_fd().as_raw_fd())
        {
            tracing::warn!(%error, "console input is still waited for");
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

impl fmt::Debug for InputPump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InputPump")
            .field("phase", &self.phase)
            .field("backlog", &self.backlog.len())
            .finish_non_exhaustive()
    }
}

/// Whether the user wants to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Pumped {
    /// Go on.
    Stay,
    /// Stop the machine.
    Leave,
}

impl InputPump {
    /// Without a source.
    pub(crate) fn idle() -> Self {
        Self {
            source: None,
            phase: Phase::Closed,
            backlog: VecDeque::new(),
        }
    }

    /// Registers `input` with the loop; it is read from now on. An earlier source is closed, what came
    /// from it waits still.
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

    fn waits_for_nobody(&self) -> bool {
        let readiness = self.source.as_ref().map(|source| source.readiness);
        readiness == Some(Readiness::Always)
    }

    /// The terminal has input. For [`Token::ConsoleInput`] only: else the
    /// read might block.
    pub(crate) fn readable(&mut self, receiver: &dyn Receiver, events: &EventLoop) -> Pumped {
        let pumped = self.read(events);
        self.offer(receiver, events);
        pumped
    }

    /// The serial port has room. Also called once when the machine begins to run.
    pub(crate) fn room(&mut self, receiver: &dyn Receiver, events: &EventLoop) -> Pumped {
        self.offer(receiver, events);
        // A file waits for nobody: it is read as fast as the guest takes it.
        while self.waits_for_nobody() && self.phase == Phase::Reading && self.backlog.is_empty() {
            if self.read(events) == Pumped::Leave {
                return Pumped::Leave;
            }
            self.offer(receiver, events);
        }
        Pumped::Stay
    }

    /// Drops what the guest has not seen: it was reset.
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
                tracing::warn!(%error, "console input is broken and closed");
                self.detach(events);
            }
        }
        Pumped::Stay
    }

    /// Gives the serial port what it takes of the backlog.
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

    /// Makes phase and registration follow the backlog.
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
                    tracing::warn!(%error, "console input cannot be waited for and is closed");
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
