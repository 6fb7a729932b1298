//! A guest that a test runs with Bellhop in the lab host.
//!
//! ```text
//!            start                "@lab ready"
//!   (none) ────────▶ booting ─────────────────▶ ready ──▶ ended (wait_exit)
//!                     │   ▲                       │ dropped: killed
//!    known fault of   │   │ once more, counted    ▼
//!    the emulation    └───┘                     (gone)
//! ```
//!
//! It owns the VMM's process, its serial console and the console's log. It sends commands to the
//! guest's init (`lab-guest`), one at a time.

mod arguments;
mod console;

pub use arguments::BellhopArguments;

use crate::emulator;
use crate::error::{Error, Result};
use crate::evidence;
use crate::files;
use crate::kvm_trace;
use crate::notice::{Kind, notice};
use crate::process::die_with_parent;
use console::{Begun, Console, read_console, said_in};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bellhop's exit code when a vCPU cannot continue: the guest crashed.
pub const CRASHED: i32 = 3;

/// After a wait of this length the test gives a guest up and takes evidence of it. A test that
/// waits for less may expect silence.
const GIVEN_UP: Duration = Duration::from_secs(10);

/// After each wait of this length the test looks for a vCPU in an endless loop.
const STUCK_CHECK: Duration = Duration::from_secs(30);

/// A vCPU in an endless loop is in it at this many moments, a second apart.
const STUCK_SAMPLES: u32 = 5;

/// A boot may take this many times the allowed silence.
const BOOT_LIMITS: u32 = 2;

/// Lines of the console in an error.
const SHOWN: usize = 30;

/// A running guest. Dropping it kills it, unless another process owns its VMM.
#[derive(Debug)]
pub struct Guest {
    /// `None`: its VMM is not this process's child.
    child: Option<Child>,
    pid: u32,
    input: Input,
    /// The init's lines without their mark.
    lines: Receiver<String>,
    /// Lines that the init printed under an earlier VMM.
    earlier: VecDeque<String>,
    console: Arc<Mutex<Console>>,
    begun: Arc<Mutex<Begun>>,
    /// The threads that read the console. They end with its streams.
    readers: Vec<JoinHandle<()>>,
    ready: Value,
    started: Instant,
    ready_after: Duration,
    retries: u32,
}

/// Where the guest's console reads its input.
#[derive(Debug)]
enum Input {
    Pipe(ChildStdin),
    Socket(UnixStream),
}

impl Input {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Pipe(pipe) => pipe.write_all(bytes).and_then(|()| pipe.flush()),
            Self::Socket(socket) => socket.write_all(bytes),
        }
    }
}

impl Guest {
    /// Starts the VMM and waits until the guest's init is ready. A boot that a known fault of the
    /// emulation ends ([`emulator::fault`]) is retried once; the test runner counts it.
    ///
    /// # Errors
    /// [`Error::Start`]; [`Error::Guest`] with the end of the console when the VMM ends or no
    /// attempt succeeds.
    pub fn start(arguments: &BellhopArguments) -> Result<Self> {
        Self::start_shown(|| arguments.command(), arguments.silence, arguments.show)
    }

    /// Like [`Self::start`], for any VMM whose standard input and output are the guest's serial
    /// console. `command` creates a new command for each attempt.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_command(command: impl Fn() -> Command, silence: Duration) -> Result<Self> {
        Self::start_shown(command, silence, None)
    }

    fn start_shown(
        command: impl Fn() -> Command,
        silence: Duration,
        show: Option<&'static str>,
    ) -> Result<Self> {
        let mut retries = 0;
        loop {
            let mut guest = Self::spawn(command(), show)?;
            let (what, evidence) = match guest.boot(silence) {
                Boot::Ready(ready) => {
                    guest.ready = ready;
                    guest.ready_after = guest.started.elapsed();
                    guest.retries = retries;
                    return Ok(guest);
                }
                Boot::Ended => {
                    let status = guest.wait_exit(Duration::from_secs(5))?;
                    let evidence = if status.code() == Some(CRASHED) {
                        guest.console()
                    } else {
                        String::new()
                    };
                    (format!("ended during its boot ({status})"), evidence)
                }
                Boot::Silent => (
                    format!("was silent or not ready in {} s", silence.as_secs()),
                    evidence::of(guest.pid),
                ),
            };
            // Only a known fault of the emulation allows a second attempt; any other error is
            // final.
            match emulator::fault(&evidence) {
                Some(fault) if retries == 0 => {
                    notice(Kind::Retried, format!("a guest {what}: {fault}"));
                    retries += 1;
                }
                _ => {
                    let mut error = guest.failed(what);
                    if let Error::Guest { console, .. } = &mut error {
                        console.push('\n');
                        console.push_str(&files::last_lines(&evidence, SHOWN));
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Attaches to the guest of a running VMM (process `pid`) by the socket of its console. Returns
    /// when the init is ready; the console replays earlier output. There is no second boot: only
    /// the VMM's owner could start one. The guest continues when this is dropped.
    ///
    /// # Errors
    /// [`Error::File`] if no process serves the console; [`Error::Guest`] when it ends or falls
    /// silent.
    pub fn attach(console: &Path, pid: u32, silence: Duration) -> Result<Self> {
        let mut guest = Self::attached(console, pid)?;
        guest.ready = guest.wait_ready(silence)?;
        guest.ready_after = guest.started.elapsed();
        Ok(guest)
    }

    /// Like [`Self::attach`], for a guest that has arrived from another VMM. Its init was ready
    /// long ago, so this waits until it answers.
    ///
    /// # Errors
    /// As [`Self::attach`].
    pub fn attach_arrived(console: &Path, pid: u32, limit: Duration) -> Result<Self> {
        let mut guest = Self::attached(console, pid)?;
        guest.answers(limit)?;
        Ok(guest)
    }

    fn attached(console: &Path, pid: u32) -> Result<Self> {
        let started = Instant::now();
        let failed = |what| Error::file(what, console);
        let stream = UnixStream::connect(console).map_err(failed("connect to"))?;
        let output = stream.try_clone().map_err(failed("duplicate"))?;
        let text = Arc::new(Mutex::new(Console::default()));
        let begun = Arc::new(Mutex::new(Begun::default()));
        let (sender, lines) = mpsc::channel();
        let said = Some((sender, Arc::clone(&begun)));
        let readers = vec![read_console(output, Arc::clone(&text), said, None)];
        Ok(Self {
            begun,
            earlier: VecDeque::new(),
            child: None,
            pid,
            input: Input::Socket(stream),
            lines,
            console: text,
            readers,
            ready: Value::Null,
            started,
            ready_after: Duration::ZERO,
            retries: 0,
        })
    }

    /// Starts a VMM whose guest resumes from a saved state instead of booting, and waits until its
    /// init answers.
    ///
    /// # Errors
    /// [`Error::Start`]; [`Error::Guest`] with the end of the console when it does not answer in
    /// time.
    pub fn start_restored(command: Command, limit: Duration) -> Result<Self> {
        let mut guest = Self::wait_for(command)?;
        guest.answers(limit)?;
        Ok(guest)
    }

    /// Starts a VMM whose guest will arrive from another one: [`Guest::answers`] waits for it.
    ///
    /// # Errors
    /// [`Error::Start`].
    pub fn wait_for(command: Command) -> Result<Self> {
        Self::spawn(command, None)
    }

    /// Waits until the guest's init answers.
    ///
    /// # Errors
    /// [`Error::Guest`] with the end of the console when it does not answer in time.
    pub fn answers(&mut self, limit: Duration) -> Result<()> {
        self.ready = self.command_within("info", limit)?;
        self.ready_after = self.started.elapsed();
        Ok(())
    }

    /// Takes over from the VMM that the guest has left, which has ended. Lines of the init that are
    /// still unread come first. A line that began there and ended here is whole.
    ///
    /// # Errors
    /// Those of [`Guest::wait_exit`].
    pub fn comes_from(&mut self, mut before: Self) -> Result<()> {
        before.wait_exit(Duration::ZERO)?;
        self.earlier = std::mem::take(&mut before.earlier);
        self.earlier.extend(before.lines.try_iter());
        self.ready = before.ready.take();
        let mut there = before.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let mut half = std::mem::take(&mut there.line);
        let mut here = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        match &here.first {
            Some(rest) if said_in(rest).is_none() => {
                half.extend_from_slice(rest.as_bytes());
                self.earlier
                    .extend(said_in(&String::from_utf8_lossy(&half)));
            }
            Some(_) => {}
            None => {
                half.append(&mut here.line);
                here.line = half;
            }
        }
        Ok(())
    }

    /// The init's next line.
    fn line_within(&mut self, limit: Duration) -> std::result::Result<String, RecvTimeoutError> {
        match self.earlier.pop_front() {
            Some(line) => Ok(line),
            None => self.lines.recv_timeout(limit),
        }
    }

    /// Runs a VMM that ends by itself, without input on its console. Returns how it ended and
    /// everything that it and its guest printed.
    ///
    /// # Errors
    /// [`Error::Start`]; [`Error::Guest`] when it takes longer than the limit.
    pub fn run_to_end(
        arguments: &BellhopArguments,
        limit: Duration,
    ) -> Result<(ExitStatus, String)> {
        let mut guest = Self::spawn(arguments.command(), arguments.show)?;
        let status = guest.wait_exit(limit)?;
        Ok((status, guest.console()))
    }

    fn spawn(mut command: Command, show: Option<&'static str>) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        let start = |source| Error::Start {
            program: program.clone(),
            source,
        };
        let started = Instant::now();
        let mut child = die_with_parent(&mut command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(start)?;
        let missing = || start(std::io::Error::other("a pipe is missing"));
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = child.stdout.take().ok_or_else(missing)?;
        let errors = child.stderr.take().ok_or_else(missing)?;
        let console = Arc::new(Mutex::new(Console::default()));
        let begun = Arc::new(Mutex::new(Begun::default()));
        let (sender, lines) = mpsc::channel();
        let said = Some((sender, Arc::clone(&begun)));
        let readers = vec![
            read_console(output, Arc::clone(&console), said, show),
            read_console(errors, Arc::clone(&console), None, show),
        ];
        Ok(Self {
            begun,
            earlier: VecDeque::new(),
            pid: child.id(),
            child: Some(child),
            input: Input::Pipe(input),
            lines,
            console,
            readers,
            ready: Value::Null,
            started,
            ready_after: Duration::ZERO,
            retries: 0,
        })
    }

    fn boot(&mut self, silence: Duration) -> Boot {
        let begun = Instant::now();
        loop {
            match self.line_within(Duration::from_millis(200)) {
                Ok(line) => {
                    if let Some(ready) = line
                        .strip_prefix("ready ")
                        .and_then(|json| serde_json::from_str(json).ok())
                    {
                        return Boot::Ready(ready);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Boot::Ended,
                Err(RecvTimeoutError::Timeout) => {
                    let last = self.console.lock().ok().and_then(|console| console.last);
                    // A hung kernel may report the hang again and again, and is then not silent.
                    if last.unwrap_or(self.started).elapsed() > silence
                        || begun.elapsed() > BOOT_LIMITS * silence
                    {
                        return Boot::Silent;
                    }
                }
            }
        }
    }

    /// The content of the init's greeting: `uptime_ms`, `cpus_online`, `memory_kib`, `nics`,
    /// `disks`, `hwrng`, `problems`, `kernel`.
    pub fn ready(&self) -> &Value {
        &self.ready
    }

    /// Time from the VMM's start to the init's first line.
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// Boots that hung before this one.
    pub fn retries(&self) -> u32 {
        self.retries
    }

    /// The VMM's process ID.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends the guest a command and returns its answer.
    ///
    /// # Errors
    /// [`Error::Guest`] when it answers with an error, does not answer within five minutes, or has
    /// ended.
    pub fn command(&mut self, line: &str) -> Result<Value> {
        self.command_within(line, Duration::from_secs(300))
    }

    /// Like [`Self::command`], with its own time limit.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn command_within(&mut self, line: &str, limit: Duration) -> Result<Value> {
        self.send(line)?;
        self.answer(line, limit)
    }

    /// Starts a command that reports when it listens (`echo`, `flood` to a peer) and returns when
    /// it does. Its result is the next [`Self::answer`].
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn listen(&mut self, line: &str) -> Result<()> {
        let said = self.command_within(line, Duration::from_secs(30))?;
        match said.get("listening") {
            Some(_) => Ok(()),
            None => Err(self.failed(format!("answered {line:?} with {said}"))),
        }
    }

    /// Waits for the answer to an earlier line.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn answer(&mut self, line: &str, limit: Duration) -> Result<Value> {
        let begun = Instant::now();
        let answer = loop {
            let left = limit.saturating_sub(begun.elapsed());
            match self.line_within(left.min(STUCK_CHECK)) {
                Ok(answer) => break answer,
                Err(RecvTimeoutError::Timeout) if left > STUCK_CHECK && !stuck() => {}
                Err(RecvTimeoutError::Timeout) => {
                    let waited = begun.elapsed();
                    let what = format!("did not answer {line:?} in {} s", waited.as_secs());
                    return Err(self.lost(what, waited));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.failed(format!("ended instead of answering {line:?}")));
                }
            }
        };
        let value: Value = serde_json::from_str(&answer)
            .map_err(|_| self.failed(format!("answered {line:?} with {answer:?}")))?;
        match value.get("error") {
            Some(error) => Err(self.failed(format!("refused {line:?}: {error}"))),
            None => Ok(value),
        }
    }

    /// Sends a line without waiting for its answer.
    ///
    /// # Errors
    /// [`Error::Guest`] when the VMM has closed the console.
    pub fn send(&mut self, line: &str) -> Result<()> {
        self.input
            .write(format!("{line}\n").as_bytes())
            .map_err(|error| self.failed(format!("does not take {line:?}: {error}")))
    }

    /// Waits until the init is ready again after a `reboot`.
    ///
    /// # Errors
    /// [`Error::Guest`] when the console falls silent or the VMM ends.
    pub fn wait_ready(&mut self, silence: Duration) -> Result<Value> {
        match self.boot(silence) {
            Boot::Ready(ready) => {
                self.ready.clone_from(&ready);
                Ok(ready)
            }
            Boot::Ended => Err(self.failed("ended instead of booting again".into())),
            Boot::Silent => Err(self.lost("fell silent while booting again".into(), silence)),
        }
    }

    /// Switches the guest off and waits for the VMM's end.
    ///
    /// # Errors
    /// [`Error::Guest`] when the VMM does not end within 30 seconds.
    pub fn power_off(mut self) -> Result<ExitStatus> {
        self.command("poweroff")?;
        self.wait_exit(Duration::from_secs(30))
    }

    /// Waits for the VMM's end.
    ///
    /// # Errors
    /// [`Error::Guest`] when it takes longer than the limit, or is not this process's child.
    pub fn wait_exit(&mut self, limit: Duration) -> Result<ExitStatus> {
        let started = Instant::now();
        loop {
            let Some(child) = &mut self.child else {
                return Err(self.failed("is the child of another process".into()));
            };
            let waited = child.try_wait();
            match waited.map_err(Error::system("wait for the VMM"))? {
                Some(status) => {
                    // Its last output is still in the pipes.
                    for reader in self.readers.drain(..) {
                        let _ = reader.join();
                    }
                    return Ok(status);
                }
                None if started.elapsed() > limit => {
                    let what = format!("did not end in {} s", limit.as_secs());
                    return Err(self.lost(what, limit));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// All output so far, including the VMM's own messages.
    pub fn console(&self) -> String {
        self.console
            .lock()
            .map(|console| console.text.clone())
            .unwrap_or_default()
    }

    /// Like [`Self::failed`], after a wait of this length, with evidence about the VMM and KVM.
    fn lost(&self, what: String, waited: Duration) -> Error {
        let mut error = self.failed(what);
        if let Error::Guest { console, .. } = &mut error
            && waited >= GIVEN_UP
        {
            console.push('\n');
            console.push_str(&evidence::of(self.pid));
        }
        error
    }

    fn failed(&self, what: String) -> Error {
        let mut console = files::last_lines(&self.console(), SHOWN);
        console.push_str(&emulator::marked(&console));
        Error::Guest { what, console }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The harness shows this with the test's panic. A known fault of the emulation explains any
        // assertion about a guest, not only a missing answer.
        if std::thread::panicking() {
            eprintln!("{}", self.failed("is killed by a panic of its test".into()));
            eprintln!("{}", evidence::of_running(self.pid));
        }
        match (&mut self.child, &self.input) {
            // A process that has already ended is no error.
            (Some(child), _) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            // This also ends the socket's reader.
            (None, Input::Socket(socket)) => {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
            (None, Input::Pipe(_)) => {}
        }
    }
}

/// True if a vCPU of this lab host stays in an endless loop. This known fault of the emulation does
/// not end by itself.
fn stuck() -> bool {
    (0..STUCK_SAMPLES).all(|_| {
        std::thread::sleep(Duration::from_secs(1));
        kvm_trace::counters().is_ok_and(|text| emulator::fault(&text).is_some())
    })
}

enum Boot {
    Ready(Value),
    Ended,
    Silent,
}

#[cfg(test)]
mod tests;
