//! Where the guest's output goes: a terminal, or a socket and a log.
//!
//! Owns the waiting for whichever it is. It must not know the serial port's registers.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use devices::legacy::output::PolledWriter;
use devices::legacy::serial::{Pending, Serial};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::socket::SocketScreen;
use super::{Console, ConsoleLoss, InputPump, TerminalConsole};
use crate::event_loop::{EventLoop, Token};

/// How long the last output of the guest may take to be written.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(crate) enum Screen {
    /// A duplicate of the terminal, to wait for: what it does not take now waits in the serial port.
    Terminal(OwnedFd),
    /// It takes everything at once.
    Socket(SocketScreen),
}

/// What [`Screen::attach`] makes of a [`Console`].
pub(crate) struct Attached {
    pub(crate) screen: Screen,
    pub(crate) input: InputPump,
    /// What the serial port writes to; it never blocks.
    pub(crate) writer: Box<dyn Write + Send>,
}

impl Screen {
    /// Registers `console` with the loop.
    ///
    /// # Errors
    /// No descriptor is left, or the console cannot be waited for.
    pub(crate) fn attach(console: Console, events: &EventLoop) -> io::Result<Attached> {
        let mut input = InputPump::idle();
        Ok(match console {
            Console::Terminal(TerminalConsole {
                input: keyboard,
                output,
            }) => {
                if let Some(keyboard) = keyboard {
                    input.attach(keyboard, events)?;
                }
                Attached {
                    screen: Self::Terminal(output.try_clone()?),
                    input,
                    writer: Box::new(PolledWriter::new(File::from(output))),
                }
            }
            Console::Socket(socket) => Attached {
                writer: socket.writer(),
                screen: Self::Socket(SocketScreen::new(socket, events)?),
                input,
            },
        })
    }

    /// For [`Token::ConsoleOutput`]: the guest said something that could not be written at once.
    ///
    /// # Errors
    /// The terminal cannot be waited for.
    pub(crate) fn output(
        &mut self,
        serial: &Serial,
        input: &mut InputPump,
        events: &EventLoop,
    ) -> io::Result<()> {
        match self {
            Self::Terminal(output) if serial.write_out() == Pending::Output => {
                match events.add_writable(output.as_raw_fd(), Token::ConsoleWritable) {
                    // It is waited for already.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                    result => result,
                }
            }
            Self::Terminal(_) => Ok(()),
            Self::Socket(socket) => {
                socket.output(input, events);
                Ok(())
            }
        }
    }

    /// For [`Token::ConsoleWritable`]: more can be written.
    ///
    /// # Errors
    /// The terminal is waited for still.
    pub(crate) fn writable(
        &mut self,
        serial: &Serial,
        input: &mut InputPump,
        events: &EventLoop,
    ) -> io::Result<()> {
        match self {
            Self::Terminal(output) if serial.write_out() == Pending::Nothing => {
                events.remove(output.as_raw_fd())
            }
            Self::Terminal(_) => Ok(()),
            Self::Socket(socket) => {
                socket.writable(input, events);
                Ok(())
            }
        }
    }

    /// For [`Token::ConsoleConnection`]: somebody wants the console.
    pub(crate) fn connection(&mut self, input: &mut InputPump, events: &EventLoop) {
        if let Self::Socket(socket) = self {
            socket.connection(input, events);
        }
    }

    /// After [`Token::ConsoleInput`] was handled.
    pub(crate) fn input_read(&mut self, input: &mut InputPump, events: &EventLoop) {
        if let Self::Socket(socket) = self {
            socket.input_read(input, events);
        }
    }

    /// What was lost; a terminal loses nothing.
    pub(crate) fn loss(&self) -> ConsoleLoss {
        match self {
            Self::Terminal(_) => ConsoleLoss::default(),
            Self::Socket(socket) => socket.loss(),
        }
    }

    /// Gives a slow terminal or client a little time for what the guest said last.
    pub(crate) fn finish(&mut self, serial: &Serial, input: &mut InputPump, events: &EventLoop) {
        let output = match self {
            Self::Terminal(output) => output,
            Self::Socket(socket) => return socket.finish(input, events, LAST_OUTPUT),
        };
        let start = Instant::now();
        while serial.write_out() == Pending::Output {
            let left = LAST_OUTPUT.saturating_sub(start.elapsed());
            if left.is_zero() {
                tracing::warn!("the console is too slow: the last output of the guest is lost");
                return;
            }
            let left = Timespec::try_from(left).unwrap_or_default();
            // An error means to try again.
            let _ = poll(&mut [PollFd::new(output, PollFlags::OUT)], Some(&left));
        }
    }
}
