//! The lab's side of the agent: runs a command in the host and forwards standard streams, signals
//! and the exit status.
//!
//! Threads: one reads this process's standard input, one its signals, and one keeps the time. The
//! calling thread reads frames. The client owns this process's terminal while the command has one
//! and restores it on every path.

use super::protocol::{ALIVE, CHUNK, Ending, Execute, Frame, STDIN_WINDOW};
use crate::error::{Error, Result, report};
use crate::host::LabHost;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How long a command may take to end after its time is up.
const GRACE: Duration = Duration::from_secs(5);

/// How long the agent may collect evidence, and the command may take to end by SIGKILL.
const EVIDENCE: Duration = Duration::from_secs(30);

/// A host that sends nothing for this long hangs: it sends [`Frame::Alive`] every [`ALIVE`]. The
/// limit is generous because an emulated host on a busy machine stalls now and then.
const SILENCE: Duration = Duration::from_secs(120);

const _: () = assert!(SILENCE.as_secs() > 5 * ALIVE.as_secs());

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The command ended by itself or by a signal.
    Ended(Ending),
    /// The time was up, and the client ended the command.
    TimedOut,
}

impl Outcome {
    /// The exit code as a shell gives it, or 124 like timeout(1).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Ended(ending) => ending.exit_code(),
            Self::TimedOut => 124,
        }
    }
}

/// What happens to the command's standard streams.
pub enum Streams<'a> {
    /// The command uses this process's streams and receives its signals.
    Own,
    /// Standard input is empty. The closure receives each line that the command prints.
    Lines(&'a mut dyn FnMut(Printed, &str)),
}

/// The stream that the command printed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Printed {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

impl std::fmt::Debug for Streams<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Own => "Own",
            Self::Lines(_) => "Lines",
        })
    }
}

/// The columns and rows of this process's terminal, if standard input and output are one.
pub fn terminal_size() -> Option<(u16, u16)> {
    let stdin = rustix::stdio::stdin();
    if !rustix::termios::isatty(stdin) || !rustix::termios::isatty(rustix::stdio::stdout()) {
        return None;
    }
    let size = tcgetwinsize(stdin).ok()?;
    Some((size.ws_col, size.ws_row))
}

/// Runs a command in the host to its end.
///
/// # Errors
/// [`Error::HostLost`] when the host goes away or falls silent.
pub fn run(
    host: &mut LabHost,
    execute: Execute,
    timeout: Option<Duration>,
    mut streams: Streams<'_>,
) -> Result<Outcome> {
    let raw = match execute.terminal {
        Some(_) => Some(RawTerminal::enter()?),
        None => None,
    };
    host.port()
        .set_read_timeout(Some(SILENCE))
        .map_err(Error::system("limit the wait for the lab host"))?;
    let port = Port::of(host)?;
    if let Err(error) = port.send(&Frame::Execute(execute)) {
        return Err(host.lost(&error));
    }
    let window = Arc::new(Window::default());
    match streams {
        Streams::Own => {
            pass_input(port.clone(), Arc::clone(&window));
            pass_signals(&port)?;
        }
        Streams::Lines(_) => {
            if let Err(error) = port.send(&Frame::StdinEnd) {
                return Err(host.lost(&error));
            }
        }
    }
    let timer = timeout.map(|timeout| Timer::start(port.clone(), timeout));
    let mut output = Vec::new();
    let mut errors = Vec::new();
    let ending = loop {
        match Frame::read(host.port()) {
            Ok(Frame::Stdout(bytes)) => match &mut streams {
                Streams::Own => write_own(&mut io::stdout().lock(), &bytes),
                Streams::Lines(line) => {
                    deliver_lines(&mut output, &bytes, |text| line(Printed::Output, text));
                }
            },
            Ok(Frame::Stderr(bytes)) => match &mut streams {
                Streams::Own => write_own(&mut io::stderr().lock(), &bytes),
                Streams::Lines(line) => {
                    deliver_lines(&mut errors, &bytes, |text| line(Printed::Error, text));
                }
            },
            Ok(Frame::StdinTaken(count)) => window.taken(count),
            Ok(Frame::Alive) => {}
            Ok(Frame::Exited(ending)) => break Ok(ending),
            Ok(Frame::Request(number, request)) => {
                let outcome = host.obey(&request).map_err(|error| report(&error));
                if let Err(error) = port.send(&Frame::Answer(number, outcome)) {
                    break Err(error);
                }
            }
            Ok(_) => {
                break Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "unexpected frame",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let why = format!("it has said nothing for {} s", SILENCE.as_secs());
                break Err(io::Error::other(why));
            }
            Err(error) => break Err(error),
        }
    };
    // Also when the host was lost: the last line names the test that ran.
    if let Streams::Lines(line) = &mut streams {
        for (printed, rest) in [(Printed::Output, output), (Printed::Error, errors)] {
            if !rest.is_empty() {
                line(printed, &String::from_utf8_lossy(&rest));
            }
        }
    }
    drop(raw);
    // The timer cuts the connection when even SIGKILL did not help.
    if timer.is_some_and(|timer| timer.stop()) {
        return Ok(Outcome::TimedOut);
    }
    let ending = ending.map_err(|error| host.lost(&error))?;
    if let Ending::NotStarted(_, why) = &ending {
        eprintln!("lab: cannot start the command: {why}");
    }
    Ok(Outcome::Ended(ending))
}

/// Writes output and ignores errors. The command continues, as it would behind a closed pipe that
/// it ignores.
fn write_own(stream: &mut impl io::Write, bytes: &[u8]) {
    let _ = stream.write_all(bytes).and_then(|()| stream.flush());
}

fn deliver_lines(pending: &mut Vec<u8>, bytes: &[u8], mut line: impl FnMut(&str)) {
    pending.extend_from_slice(bytes);
    while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
        let rest = pending.split_off(end + 1);
        line(String::from_utf8_lossy(pending).trim_end_matches('\n'));
        *pending = rest;
    }
}

/// The port's writing end, shared by threads.
#[derive(Debug, Clone)]
struct Port {
    stream: Arc<Mutex<UnixStream>>,
}

impl Port {
    fn of(host: &mut LabHost) -> Result<Self> {
        let stream = host
            .port()
            .try_clone()
            .map_err(Error::system("duplicate the agent's port"))?;
        Ok(Self {
            stream: Arc::new(Mutex::new(stream)),
        })
    }

    fn send(&self, frame: &Frame) -> io::Result<()> {
        let mut stream = self
            .stream
            .lock()
            .map_err(|_| io::Error::other("a thread panicked while it wrote to the port"))?;
        frame.write(&mut *stream)
    }

    fn cut(&self) {
        if let Ok(stream) = self.stream.lock() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// How many bytes of standard input are in flight.
#[derive(Debug, Default)]
struct Window {
    used: Mutex<usize>,
    changed: Condvar,
}

impl Window {
    /// Waits for room, then takes it. False when a thread panicked.
    fn take(&self, count: usize) -> bool {
        let Ok(used) = self.used.lock() else {
            return false;
        };
        let Ok(mut used) = self
            .changed
            .wait_while(used, |used| *used + count > STDIN_WINDOW)
        else {
            return false;
        };
        *used += count;
        true
    }

    fn taken(&self, count: u32) {
        if let Ok(mut used) = self.used.lock() {
            *used = used.saturating_sub(usize::try_from(count).unwrap_or(usize::MAX));
            self.changed.notify_all();
        }
    }
}

/// Forwards standard input. The thread ends with the process: a read from a terminal cannot be
/// cancelled.
fn pass_input(port: Port, window: Arc<Window>) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        loop {
            let frame = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => Frame::StdinEnd,
                Ok(count) => Frame::Stdin(buffer.get(..count).unwrap_or_default().to_vec()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => Frame::StdinEnd,
            };
            if let Frame::Stdin(bytes) = &frame
                && !window.take(bytes.len())
            {
                return;
            }
            if port.send(&frame).is_err() || frame == Frame::StdinEnd {
                return;
            }
        }
    });
}

/// Forwards signals to the command instead of dying of them.
fn pass_signals(port: &Port) -> Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGWINCH] {
        let (mut reader, writer) = UnixStream::pair().map_err(Error::system("create a socket"))?;
        signal_hook::low_level::pipe::register(signal, writer)
            .map_err(Error::system("handle a signal"))?;
        let port = port.clone();
        std::thread::spawn(move || {
            let mut byte = [0; 1];
            while reader.read_exact(&mut byte).is_ok() {
                let frame = if signal == SIGWINCH {
                    match terminal_size() {
                        Some((columns, rows)) => Frame::WindowSize(columns, rows),
                        None => continue,
                    }
                } else {
                    Frame::Signal(signal)
                };
                if port.send(&frame).is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// Ends the command when its time is up. The agent prints evidence first. Then the command gets
/// SIGTERM, and SIGKILL after [`GRACE`]. After [`EVIDENCE`] the whole host ends.
#[derive(Debug)]
struct Timer {
    state: Arc<(Mutex<TimerState>, Condvar)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimerState {
    Running,
    Up,
    Stopped,
}

impl Timer {
    fn start(port: Port, timeout: Duration) -> Self {
        let state = Arc::new((Mutex::new(TimerState::Running), Condvar::new()));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            // True when the command ended first.
            let stopped_within = |time| {
                let (state, changed) = &*shared;
                state.lock().is_ok_and(|guard| {
                    changed
                        .wait_timeout_while(guard, time, |state| *state != TimerState::Stopped)
                        .is_ok_and(|(state, _)| *state == TimerState::Stopped)
                })
            };
            if stopped_within(timeout) {
                return;
            }
            if let Ok(mut state) = shared.0.lock() {
                *state = TimerState::Up;
            }
            eprintln!("lab: the command's {} s are over", timeout.as_secs());
            let _ = port.send(&Frame::TimeUp);
            for (signal, time) in [(15, GRACE), (9, EVIDENCE)] {
                let _ = port.send(&Frame::Signal(signal));
                if stopped_within(time) {
                    return;
                }
            }
            port.cut();
        });
        Self { state }
    }

    fn is_up(&self) -> bool {
        self.state
            .0
            .lock()
            .is_ok_and(|state| *state == TimerState::Up)
    }

    /// Stops the timer; true when the time was already up.
    fn stop(self) -> bool {
        let up = self.is_up();
        if let Ok(mut state) = self.state.0.lock() {
            *state = TimerState::Stopped;
        }
        self.state.1.notify_all();
        up
    }
}

/// This process's terminal in raw mode; dropping it restores the old mode.
#[derive(Debug)]
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> Result<Self> {
        let stdin = rustix::stdio::stdin();
        let before = tcgetattr(stdin).map_err(Error::system("read the terminal's settings"))?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin, OptionalActions::Now, &raw)
            .map_err(Error::system("set the terminal to raw mode"))?;
        Ok(Self { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_delivered_whole() {
        let mut lines = Vec::new();
        let mut pending = Vec::new();
        for piece in [&b"a\nb"[..], b"c\n", b"\nd"] {
            deliver_lines(&mut pending, piece, |line| lines.push(line.to_owned()));
        }
        assert_eq!(lines, ["a", "bc", ""]);
        assert_eq!(pending, b"d");
    }

    #[test]
    fn exit_codes() {
        assert_eq!(Outcome::TimedOut.exit_code(), 124);
        assert_eq!(Outcome::Ended(Ending::Signal(15)).exit_code(), 143);
    }
}
