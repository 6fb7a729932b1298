//! The destination of the guest's output: a terminal, or a socket and a log.
//!
//! Owns the waiting for either. It must not know the serial port's registers.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use devices::legacy::output::PolledWriter;
use devices::legacy::serial::{Pending, Serial};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::socket::SocketOutput;
use super::{Console, ConsoleLoss, InputPump, TerminalConsole};
use crate::event_loop::{EventLoop, Token};

/// How long the last output of the guest may take to be written.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(crate) enum ConsoleOutput {
    /// A duplicate of the terminal, for waiting: output that it does not accept now stays in the
    /// serial port.
    Terminal(OwnedFd),
    /// Accepts everything at once.
    Socket(SocketOutput),
}

/// Result of [`ConsoleOutput::attach`] for a [`Console`].
pub(crate) struct Attached {
    pub(crate) console_output: ConsoleOutput,
    pub(crate) input: InputPump,
    /// The serial port's writer; it never blocks.
    pub(crate) writer: Box<dyn Write + Send>,
}

impl ConsoleOutput {
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
                    console_output: Self::Terminal(output.try_clone()?),
                    input,
                    writer: Box::new(PolledWriter::new(File::from(output))),
                }
            }
            Console::Socket(socket) => Attached {
                writer: socket.writer(),
                console_output: Self::Socket(SocketOutput::new(socket, events)?),
                input,
            },
        })
    }

    /// For [`Token::ConsoleOutput`]: the guest has written output that could not be written at
    /// once.
    ///
    /// # Errors
    /// The terminal cannot be registered with epoll.
    pub(crate) fn output(
        &mut self,
        serial: &Serial,
        input: &mut InputPump,
        events: &EventLoop,
    ) -> io::Result<()> {
        match self {
            Self::Terminal(output) if serial.write_out() == Pending::Output => {
                match events.add_writable(output.as_raw_fd(), Token::ConsoleWritable) {
                    // It is registered already.
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

    /// For [`Token::ConsoleWritable`]: the console is writable.
    ///
    /// # Errors
    /// The terminal is still registered.
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

    /// For [`Token::ConsoleConnection`]: a client connects to the console.
    pub(crate) fn connection(&mut self, input: &mut InputPump, events: &EventLoop) {
        if let Self::Socket(socket) = self {
            socket.connection(input, events);
        }
    }

    /// Runs after [`Token::ConsoleInput`] was handled.
    pub(crate) fn input_read(&mut self, input: &mut InputPump, events: &EventLoop) {
        if let Self::Socket(socket) = self {
            socket.input_read(input, events);
        }
    }

    /// The losses so far; a terminal loses nothing.
    pub(crate) fn loss(&self) -> ConsoleLoss {
        match self {
            Self::Terminal(_) => ConsoleLoss::default(),
            Self::Socket(socket) => socket.loss(),
        }
    }

    /// Gives a slow terminal or client a little time for the guest's last output.
    pub(crate) fn finish(&mut self, serial: &Serial, input: &mut InputPump, events: &EventLoop) {
        let output = match self {
            Self::Terminal(output) => output,
            Self::Socket(socket) => return socket.finish(input, events, LAST_OUTPUT),
        };
        let start = Instant::now();
        while serial.write_out() == Pending::Output {
            let left = LAST_OUTPUT.saturating_sub(start.elapsed());
            if left.is_zero() {
                tracing::warn!("the console is too slow: dropping the guest's last output");
                return;
            }
            let left = Timespec::try_from(left).unwrap_or_default();
            // After an error, try again.
            let _ = poll(&mut [PollFd::new(output, PollFlags::OUT)], Some(&left));
        }
    }
}
