//! `bellhop vm console`: connects this terminal to the console of a running VM.
//!
//! The VM's process serves the console on a Unix socket; bytes pass unchanged. Ctrl-A X or the end
//! of the VM ends the connection. Standard input that is not a terminal is forwarded to its end;
//! output continues after that.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use bellhop_common::client::{Address, Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use vmm::console::{ConsoleInput, ConsoleRead};

use super::vm;
use crate::terminal::Terminal;

/// The size of a read, in bytes.
const CHUNK: usize = 4096;
/// The maximum of typed bytes that a guest has not read yet; more are dropped, so that Ctrl-A X is
/// still found.
const TYPED_MAX: usize = 1 << 20;

/// Connect this terminal with a VM's serial console
///
/// Ctrl-A X leaves, the VM goes on; Ctrl-A Ctrl-A sends one Ctrl-A. The last 64 KiB of what was said are shown first.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
One at a time can have a VM's console; who comes second is told so. What the guest has said before, 16 MiB of it
at least, is in the VM's console log (`bellhop vm show`) and the file beside it that ends in .1.

Examples:
  bellhop vm console web
  echo reboot | bellhop vm console web")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
) -> Result<Code, Error> {
    let name = &arguments.name;
    if !matches!(which.address(), Address::Socket(_)) {
        return Err(Error::failed(format!(
            "consoles are on the node itself: run this there, for example with \
             `ssh -t NODE bellhop vm console {name}`"
        )));
    }
    let (view, _) = vm(node, name)?;
    if view.pid.is_none() {
        return Err(Error::conflict(format!(
            "the VM {name} does not run; `bellhop vm start {name}` starts it"
        )));
    }
    let path = view.console.socket;
    let refused = format!("cannot connect with the console at {}", path.display());
    let stream = UnixStream::connect(&path).map_err(Error::context(refused))?;
    let terminal = Terminal::attach().map_err(Error::context("cannot take the terminal"))?;
    let interactive = terminal.as_ref().is_some_and(Terminal::is_interactive);
    if interactive {
        eprintln!("The console of {name}; Ctrl-A X leaves.");
    }
    let end = connect(terminal, &stream, &mut io::stdout().lock());
    if interactive {
        // The cursor is where the guest left it.
        eprintln!();
    }
    match end.map_err(Error::context("the connection with the console broke"))? {
        End::Left => {}
        End::Closed if interactive => eprintln!("The console was closed."),
        End::Closed => {}
    }
    Ok(Code::Success)
}

/// Why the connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The user ended it.
    Left,
    /// The other end is closed.
    Closed,
}

/// Forwards bytes in both directions until one end closes.
pub(super) fn connect<I: ConsoleInput + AsFd>(
    mut input: Option<I>,
    stream: &UnixStream,
    output: &mut impl Write,
) -> io::Result<End> {
    // A console that does not read must not block the user's escape.
    stream.set_nonblocking(true)?;
    let mut waiting: Vec<u8> = Vec::new();
    let mut buffer = [0; CHUNK];
    loop {
        let (from_user, from_stream) = wait(input.as_ref(), stream, waiting.is_empty())?;
        if from_stream {
            match read(stream, &mut buffer)? {
                Some(0) => return Ok(End::Closed),
                Some(count) => {
                    output.write_all(buffer.get(..count).unwrap_or_default())?;
                    output.flush()?;
                }
                None => {}
            }
        }
        if from_user && let Some(user) = &mut input {
            match user.read(&mut buffer)? {
                ConsoleRead::Bytes(count) => {
                    // Files and pipes never reach it: they wait until their bytes are sent.
                    if waiting.len() < TYPED_MAX {
                        waiting.extend_from_slice(buffer.get(..count).unwrap_or_default());
                    }
                }
                ConsoleRead::Closed => input = None,
                ConsoleRead::Leave => {
                    // Sends the bytes before the escape as far as the socket has room.
                    let _ = send(stream, &mut waiting);
                    let _ = stream.shutdown(Shutdown::Both);
                    return Ok(End::Left);
                }
            }
        }
        if !waiting.is_empty() && !send(stream, &mut waiting)? {
            return Ok(End::Closed);
        }
    }
}

/// Waits for input. Returns whether the user has some, and whether the console has. Without room
/// for more, it still reads from an interactive user, who may type the escape.
fn wait<I: ConsoleInput + AsFd>(
    input: Option<&I>,
    stream: &UnixStream,
    has_room: bool,
) -> io::Result<(bool, bool)> {
    let wanted = if has_room {
        PollFlags::IN
    } else {
        PollFlags::IN | PollFlags::OUT
    };
    let listens = has_room || rustix::termios::isatty(rustix::stdio::stdin());
    let mut fds = vec![PollFd::new(stream, wanted)];
    if let Some(input) = input.filter(|_| listens) {
        fds.push(PollFd::new(input, PollFlags::IN));
    }
    loop {
        match poll(&mut fds, None) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => break,
        }
    }
    let ready =
        |fd: Option<&PollFd<'_>>, flags| fd.is_some_and(|fd| fd.revents().intersects(flags));
    let gone = PollFlags::HUP | PollFlags::ERR;
    Ok((
        ready(fds.get(1), PollFlags::IN | gone | PollFlags::NVAL),
        ready(fds.first(), PollFlags::IN | gone),
    ))
}

fn read(mut stream: &UnixStream, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match io::Read::read(&mut stream, buffer) {
        Ok(count) => Ok(Some(count)),
        Err(error) if is_gone(&error) => Ok(Some(0)),
        Err(error) if is_transient(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sends as much as the socket has room for. Returns whether the other end is open.
fn send(mut stream: &UnixStream, waiting: &mut Vec<u8>) -> io::Result<bool> {
    while !waiting.is_empty() {
        match stream.write(waiting) {
            Ok(count) => {
                waiting.drain(..count.min(waiting.len()));
            }
            Err(error) if is_transient(&error) => break,
            // Its earlier output is still unread; the read finds the end.
            Err(error) if is_gone(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}
