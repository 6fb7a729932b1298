//! `bellhop vm console`: connects this terminal to the console of a running VM.
//!
//! The daemon serves the console as a WebSocket; bytes pass unchanged. The escape key and X, or the
//! end of the VM, ends the connection. Standard input that is not a terminal is forwarded to its
//! end; output continues after that.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bellhop_common::client::{Closed, Node, with_query};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use vmm::console::{ConsoleInput, ConsoleRead};

use super::{logs, of_vm, until, vm};
use crate::terminal::{EscapeKey, Terminal};

/// The size of a read, in bytes.
const CHUNK: usize = 4096;
/// The maximum of typed bytes that a guest has not read yet; more are dropped, so that the escape
/// is still found.
const TYPED_MAX: usize = 1 << 20;
/// The daemon's code for the end of the VM (RFC 6455, section 7.4.1: "going away").
const VM_ENDED: u16 = 1001;
/// How long the daemon may take to notice the end of a VM's process.
const NOTICED: Duration = Duration::from_secs(2);

/// Connect this terminal to a VM's serial console
///
/// Ctrl-A X leaves, the VM keeps running; Ctrl-A Ctrl-A sends one Ctrl-A. The last 64 KiB of output
/// come first.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
One client writes to a console, and any number of clients read it with --read-only. The daemon
rejects a second writer unless it uses --take. All output, 16 MiB of it at least, is in the VM's
console log.

Examples:
  bellhop vm console web
  bellhop vm console web --read-only
  bellhop vm console web --take --escape ^]
  bellhop vm console web --log
  echo reboot | bellhop vm console web")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// Show the output only
    #[arg(long)]
    read_only: bool,

    /// Disconnect the writing client, and replace it
    #[arg(long, conflicts_with = "read_only")]
    take: bool,

    /// The key before X that leaves the console: a character, or ^A to ^Z, ^[, ^] or ^_
    #[arg(long, value_name = "CHAR", default_value = "^A")]
    escape: EscapeKey,

    /// Print the console's log, at most its last 1 MiB; also for a stopped VM
    #[arg(long, conflicts_with_all = ["read_only", "take"])]
    log: bool,
}

pub(super) fn execute(arguments: &Arguments, node: &Node) -> Result<Code, Error> {
    let name = &arguments.name;
    if arguments.log {
        return logs::console(name, node);
    }
    let given = |option: bool| option.then(|| true.to_string());
    let query = [
        ("read_only", given(arguments.read_only)),
        ("take", given(arguments.take)),
        ("history", given(true)),
    ];
    let console = node.web_socket(&with_query(&format!("{}/console", of_vm(name)), query))?;
    let terminal = Terminal::attach(arguments.escape);
    let terminal = terminal.map_err(Error::context("cannot use the terminal"))?;
    let interactive = terminal.as_ref().is_some_and(Terminal::is_interactive);
    // Input of a reader is only for the escape.
    let terminal = terminal.filter(|_| interactive || !arguments.read_only);
    let input = terminal.map(|terminal| Input {
        terminal,
        read_only: arguments.read_only,
    });
    if interactive {
        eprintln!("The console of {name}; {} X leaves.", arguments.escape);
    }
    let end = connect(input, console.stream(), &mut io::stdout().lock());
    if interactive {
        // The cursor is where the guest left it.
        eprintln!();
    }
    let end = end.map_err(Error::context("the connection to the console broke"))?;
    let closed = console.close();
    match end {
        End::Left => Ok(Code::Success),
        End::Closed => ended(name, closed, node),
    }
}

/// Reports why the daemon closed the console: the end of the VM is no error.
fn ended(name: &str, closed: Option<Closed>, node: &Node) -> Result<Code, Error> {
    match closed {
        Some(Closed { code: VM_ENDED, .. }) => {
            let phase = until(NOTICED, || {
                let (view, _) = vm(node, name)?;
                Ok(view.status.pid.is_none().then_some(view.status.phase))
            });
            match phase {
                Ok(Some(phase)) => eprintln!("The VM {name} ended: it is {phase}."),
                // It is deleted, runs again, or the daemon is gone.
                Ok(None) | Err(_) => eprintln!("The VM {name} closed its console."),
            }
            Ok(Code::Success)
        }
        Some(Closed { reason, .. }) => Err(Error::conflict(format!(
            "the daemon closed the console of {name}: {reason}"
        ))),
        None => Err(Error::failed("the connection to the console broke")),
    }
}

/// The terminal as input of a console.
struct Input {
    terminal: Terminal,
    read_only: bool,
}

impl AsFd for Input {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.terminal.as_fd()
    }
}

impl ConsoleInput for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead> {
        Ok(match self.terminal.read(buffer)? {
            ConsoleRead::Bytes(_) if self.read_only => ConsoleRead::Bytes(0),
            read => read,
        })
    }
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
