//! The agent's side in the lab host: runs one command after the other.
//!
//! Threads: this one reads frames. Each command has one that feeds its input, one or two that carry
//! its output, and one that waits for its end. One more reports that the host runs. A process that
//! a command leaves in the background keeps running, but its output no longer reaches the outside.
//!
//! The server owns the children and the port's writing end.

use super::protocol::{ALIVE, CHUNK, Ending, Execute, Frame, Hello};
use super::request::{self, Requests};
use rustix::process::{Pid, Signal, ioctl_tiocsctty, kill_process_group, setsid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long the agent waits for output after a command's end, in case a background process holds
/// the stream open.
const DRAIN: Duration = Duration::from_millis(500);

/// The port's writing end, shared by the threads.
type Port = Arc<Mutex<File>>;

/// Why the agent stopped serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The outside requested to switch the machine off.
    PowerOff,
}

/// Greets, then serves commands until the outside switches the host off. `evidence` describes the
/// guests of a command that exceeds its time limit.
///
/// # Errors
/// The port's error; `InvalidData` when the outside does not speak the protocol.
pub fn serve(port: File, hello: Hello, evidence: fn() -> String) -> io::Result<Stopped> {
    let writer = Arc::new(Mutex::new(port.try_clone()?));
    let mut reader = port;
    let requests = Requests::listen(Path::new(request::SOCKET))?;
    send(&writer, &Frame::Hello(hello))?;
    let outside = Arc::clone(&writer);
    requests.forward(move |frame| send(&outside, frame))?;
    say_alive(&writer);
    let mut running: Option<Running> = None;
    loop {
        let frame = Frame::read(&mut reader)?;
        match (frame, &mut running) {
            (Frame::PowerOff, _) => return Ok(Stopped::PowerOff),
            (Frame::Execute(execute), running) => {
                // The previous command has ended: the outside saw its Exited.
                drop(running.take());
                match start(&execute, &writer) {
                    Ok(command) => *running = Some(command),
                    Err(error) => {
                        let code = if error.kind() == io::ErrorKind::NotFound {
                            127
                        } else {
                            126
                        };
                        let ending = Ending::NotStarted(code, error.to_string());
                        send(&writer, &Frame::Exited(ending))?;
                    }
                }
            }
            (Frame::Stdin(bytes), Some(command)) => command.feed(Some(bytes)),
            (Frame::StdinEnd, Some(command)) => command.feed(None),
            (Frame::Signal(number), Some(command)) => command.signal(number),
            (Frame::TimeUp, Some(_)) => {
                for piece in evidence().as_bytes().chunks(CHUNK) {
                    send(&writer, &Frame::Stderr(piece.to_vec()))?;
                }
            }
            (Frame::WindowSize(columns, rows), Some(command)) => command.resize(columns, rows),
            (Frame::Answer(number, outcome), _) => requests.answer(number, outcome),
            // Input and signals may cross with the command's end.
            (
                Frame::Stdin(_)
                | Frame::StdinEnd
                | Frame::Signal(_)
                | Frame::TimeUp
                | Frame::WindowSize(..),
                None,
            ) => {}
            (
                Frame::Hello(_)
                | Frame::Stdout(_)
                | Frame::Stderr(_)
                | Frame::StdinTaken(_)
                | Frame::Alive
                | Frame::Exited(_)
                | Frame::Request(..)
                | Frame::Setup(_),
                _,
            ) => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the outside sent a frame that has no place here",
                ));
            }
        }
    }
}

/// A started command, which may have ended meanwhile.
#[derive(Debug)]
struct Running {
    group: Pid,
    input: Option<Sender<Option<Vec<u8>>>>,
    terminal: Option<OwnedFd>,
    ended: Arc<AtomicBool>,
    /// The files of [`Execute::held`].
    _held: Vec<File>,
}

impl Running {
    fn feed(&mut self, bytes: Option<Vec<u8>>) {
        if let Some(input) = &self.input {
            // The feeding thread ends early when the command closes its input.
            let _ = input.send(bytes);
        }
    }

    fn signal(&self, number: i32) {
        // After the agent reported the end, other processes may have the group's number.
        if self.ended.load(Ordering::SeqCst) {
            return;
        }
        if let Some(signal) = Signal::from_named_raw(number) {
            let _ = kill_process_group(self.group, signal);
        }
    }

    fn resize(&self, columns: u16, rows: u16) {
        if let Some(terminal) = &self.terminal {
            let _ = tcsetwinsize(terminal, window(columns, rows));
        }
    }
}

fn window(columns: u16, rows: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

fn send(port: &Port, frame: &Frame) -> io::Result<()> {
    let mut port = port
        .lock()
        .map_err(|_| io::Error::other("a thread panicked while it wrote to the port"))?;
    frame.write(&mut *port)
}

/// Reports at intervals that the host runs, until the port breaks.
fn say_alive(port: &Port) {
    let port = Arc::clone(port);
    std::thread::spawn(move || {
        while send(&port, &Frame::Alive).is_ok() {
            std::thread::sleep(ALIVE);
        }
    });
}

fn start(execute: &Execute, port: &Port) -> io::Result<Running> {
    let (program, arguments) = execute
        .arguments
        .split_first()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no command given"))?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .envs(&execute.environment)
        .current_dir(&execute.directory);
    let held = execute
        .held
        .iter()
        .map(File::open)
        .collect::<io::Result<Vec<File>>>()?;
    let ended = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    match execute.terminal {
        Some((columns, rows)) => {
            let terminal = on_terminal(&mut command, columns, rows)?;
            let child = command.spawn()?;
            // `command` holds copies of the terminal, which would keep the output from ending.
            drop(command);
            let group = group_of(&child)?;
            let output = File::from(terminal.try_clone()?);
            let input = File::from(terminal.try_clone()?);
            feed_input(input, receiver, port, false);
            watch(
                child,
                vec![carry(output, port, &ended, Frame::Stdout)],
                port,
                &ended,
            );
            Ok(Running {
                group,
                input: Some(sender),
                terminal: Some(terminal),
                ended,
                _held: held,
            })
        }
        None => {
            command
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut child = command.spawn()?;
            let group = group_of(&child)?;
            if let Some(input) = child.stdin.take() {
                feed_input(input, receiver, port, true);
            }
            let mut carriers = Vec::new();
            if let Some(output) = child.stdout.take() {
                carriers.push(carry(output, port, &ended, Frame::Stdout));
            }
            if let Some(output) = child.stderr.take() {
                carriers.push(carry(output, port, &ended, Frame::Stderr));
            }
            watch(child, carriers, port, &ended);
            Ok(Running {
                group,
                input: Some(sender),
                terminal: None,
                ended,
                _held: held,
            })
        }
    }
}

fn group_of(child: &Child) -> io::Result<Pid> {
    i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::other("the child has no process id"))
}

/// Gives the command a new terminal; returns its controlling side.
fn on_terminal(command: &mut Command, columns: u16, rows: u16) -> io::Result<OwnedFd> {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&terminal)?;
    unlockpt(&terminal)?;
    tcsetwinsize(&terminal, window(columns, rows))?;
    let name = ptsname(&terminal, Vec::new())?;
    let path = std::path::PathBuf::from(name.to_string_lossy().into_owned());
    let side = File::options().read(true).write(true).open(path)?;
    command
        .stdin(side.try_clone()?)
        .stdout(side.try_clone()?)
        .stderr(side);
    // SAFETY: needed because only the child itself can start a session and take
    // the terminal. The closure runs between fork and exec and makes two system
    // calls: it takes no lock and allocates nothing. Standard input is the
    // terminal by then.
    unsafe {
        command.pre_exec(|| {
            setsid()?;
            ioctl_tiocsctty(rustix::stdio::stdin())?;
            Ok(())
        });
    }
    Ok(terminal)
}

/// Writes input to the command and reports how much was taken.
fn feed_input(
    mut input: impl Write + Send + 'static,
    receiver: Receiver<Option<Vec<u8>>>,
    port: &Port,
    close: bool,
) {
    let port = Arc::clone(port);
    std::thread::spawn(move || {
        while let Ok(Some(bytes)) = receiver.recv() {
            let taken = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            // If the command has closed its input, the bytes count as taken and are dropped.
            let _ = input.write_all(&bytes).and_then(|()| input.flush());
            if send(&port, &Frame::StdinTaken(taken)).is_err() {
                return;
            }
        }
        if !close {
            // End of file on a terminal is a character.
            let _ = input.write_all(&[4]);
        }
    });
}

/// Carries output until it ends, or until the agent has reported the command's end.
fn carry(
    mut output: impl Read + Send + 'static,
    port: &Port,
    ended: &Arc<AtomicBool>,
    wrap: fn(Vec<u8>) -> Frame,
) -> Receiver<()> {
    let (sender, receiver) = mpsc::channel();
    let port = Arc::clone(port);
    let ended = Arc::clone(ended);
    std::thread::spawn(move || {
        let _done = sender;
        let mut buffer = vec![0; CHUNK];
        loop {
            match output.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    let Some(bytes) = buffer.get(..count) else {
                        return;
                    };
                    let Ok(mut port) = port.lock() else { return };
                    // Checked under the port's lock: nothing follows Exited.
                    if ended.load(Ordering::SeqCst)
                        || wrap(bytes.to_vec()).write(&mut *port).is_err()
                    {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A terminal that its last user has closed gives EIO.
                Err(_) => return,
            }
        }
    });
    receiver
}

/// Waits for the command's end and the rest of its output, then reports the end.
fn watch(mut child: Child, carriers: Vec<Receiver<()>>, port: &Port, ended: &Arc<AtomicBool>) {
    let port = Arc::clone(port);
    let ended = Arc::clone(ended);
    std::thread::spawn(move || {
        let ending = match child.wait() {
            Ok(status) => match status.signal() {
                Some(signal) => Ending::Signal(signal),
                None => Ending::Code(status.code().unwrap_or(1)),
            },
            Err(error) => Ending::NotStarted(126, error.to_string()),
        };
        let deadline = Instant::now() + DRAIN;
        for carrier in carriers {
            // A carrier that ends drops its sender, which wakes this receiver.
            let _ = carrier.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        let Ok(mut port) = port.lock() else { return };
        ended.store(true, Ordering::SeqCst);
        let _ = Frame::Exited(ending).write(&mut *port);
    });
}
