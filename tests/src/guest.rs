//! A guest that a test runs with Bellhop in the lab host.
//!
//! ```text
//!            start                "@lab ready"
//!   (none) ────────▶ booting ─────────────────▶ ready ──▶ ended (wait_exit)
//!                     │   ▲                       │ dropped: killed
//!  silent or crashed  │   │ again, counted        ▼
//!                     └───┘ (at most ATTEMPTS)  (gone)
//! ```
//!
//! Owns the VMM's process, its serial console and the console's log. Speaks
//! with the guest's init (`lab-guest`), one command at a time.

use crate::error::{Error, Result};
use crate::files;
use crate::libtest::GUEST_RETRY;
use crate::process::die_with_parent;
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a boot is tried.
const ATTEMPTS: u32 = 3;

/// Bellhop's exit code when a vCPU could not go on. An emulated processor loses
/// one of many vCPUs now and then while they come up (a triple fault on its first
/// instructions); a mistake of Bellhop's would crash every attempt.
const CRASHED: i32 = 3;

/// What the guest's init prefixes its lines with.
const MARK: &str = "@lab ";

/// Lines of the console in an error.
const SHOWN: usize = 30;

/// How much of a console is remembered, in bytes; the end matters.
const REMEMBERED: usize = 1 << 20;

/// What Bellhop is to run. Defaults: the lab's small kernel, its ramdisk,
/// 1 processor, 256 MiB.
#[derive(Debug, Clone)]
pub struct BellhopArguments {
    program: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    cmdline: String,
    processors: u32,
    memory: String,
    devices: Vec<String>,
    silence: Duration,
    show: Option<&'static str>,
}

impl BellhopArguments {
    /// The lab's small guest kernel.
    ///
    /// # Errors
    /// [`Error::Missing`] outside of the lab.
    pub fn small() -> Result<Self> {
        Self::with("GUEST_KERNEL", "GUEST_INITRAMFS")
    }

    /// Debian's stock kernel.
    ///
    /// # Errors
    /// [`Error::Missing`] outside of the lab.
    pub fn stock() -> Result<Self> {
        Self::with("GUEST_KERNEL_STOCK", "GUEST_INITRAMFS_STOCK")
    }

    fn with(kernel: &str, initramfs: &str) -> Result<Self> {
        crate::sim::require_lab()?;
        Ok(Self {
            program: variable("BELLHOP")?,
            kernel: in_memory(&variable(kernel)?)?,
            initramfs: in_memory(&variable(initramfs)?)?,
            // Each character of the serial console costs two exits of an
            // emulated processor: warnings only. A later `loglevel=7` wins.
            cmdline: "console=ttyS0 loglevel=4 panic=-1 lab".into(),
            processors: 1,
            memory: "256M".into(),
            devices: Vec::new(),
            silence: Duration::from_secs(60),
            show: None,
        })
    }

    /// The number of processors.
    pub fn processors(mut self, count: u32) -> Self {
        self.processors = count;
        self
    }

    /// The memory, as the `--memory` flag takes it.
    pub fn memory(mut self, size: &str) -> Self {
        size.clone_into(&mut self.memory);
        self
    }

    /// Another VMM that takes the same flags.
    pub fn program(mut self, path: &Path) -> Self {
        path.clone_into(&mut self.program);
        self
    }

    /// Another kernel; its ramdisk stays the lab's.
    pub fn kernel(mut self, path: &Path) -> Self {
        path.clone_into(&mut self.kernel);
        self
    }

    /// More words for the guest's kernel command line.
    pub fn cmdline(mut self, words: &str) -> Self {
        self.cmdline.push(' ');
        self.cmdline.push_str(words);
        self
    }

    /// A NIC on a vhost-vdpa device.
    pub fn vdpa(self, path: &Path) -> Self {
        self.argument("--vdpa", &format!("path={}", path.display()))
    }

    /// A disk on a raw file.
    pub fn disk(self, path: &Path) -> Self {
        self.argument("--disk", &format!("path={}", path.display()))
    }

    /// Any other flag with its value.
    pub fn argument(mut self, flag: &str, value: &str) -> Self {
        self.devices.push(flag.to_owned());
        self.devices.push(value.to_owned());
        self
    }

    /// Prints the console's lines on standard error as they come, with a prefix.
    pub fn show(mut self, prefix: &'static str) -> Self {
        self.show = Some(prefix);
        self
    }

    /// How long the console may be silent during boot.
    pub fn silence(mut self, limit: Duration) -> Self {
        self.silence = limit;
        self
    }

    /// The guest's kernel, for other VMMs' command lines.
    pub fn kernel_image(&self) -> &Path {
        &self.kernel
    }

    /// The guest's ramdisk.
    pub fn ramdisk(&self) -> &Path {
        &self.initramfs
    }

    /// The guest's kernel command line.
    pub fn kernel_words(&self) -> &str {
        &self.cmdline
    }

    /// The command line that starts the VMM.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("run")
            .arg("--kernel")
            .arg(&self.kernel)
            .arg("--initramfs")
            .arg(&self.initramfs)
            .args(["--cmdline", &self.cmdline])
            .args(["--cpus", &self.processors.to_string()])
            .args(["--memory", &self.memory])
            .args(&self.devices);
        command
    }
}

fn variable(name: &str) -> Result<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).ok_or_else(|| {
        Error::missing(
            format!("{name} is not set"),
            "run the test with `cargo lab test`",
        )
    })
}

/// A copy of a file in the lab host's /tmp, which is memory: its other files
/// come from the outside, which costs a second or two at each boot of a guest.
/// Names in the cache have their content's hash, so a copy never gets old.
fn in_memory(path: &Path) -> Result<PathBuf> {
    if std::env::var_os("BELLHOP_LAB").is_none_or(|lab| lab != "host") {
        return Ok(path.to_path_buf());
    }
    let directory = std::env::temp_dir().join("lab-images");
    files::create_directory(&directory)?;
    let copy = directory.join(path.to_string_lossy().replace('/', "_"));
    if !copy.exists() {
        // A test that was killed must not leave half a kernel behind.
        let partial = directory.join(format!("partial-{}", std::process::id()));
        files::copy(path, &partial)?;
        files::rename(&partial, &copy)?;
    }
    Ok(copy)
}

/// A running guest; killed when dropped, unless it is somebody else's.
#[derive(Debug)]
pub struct Guest {
    /// None: its VMM is not this process's child.
    child: Option<Child>,
    pid: u32,
    input: Input,
    /// The init's lines without their mark.
    lines: Receiver<String>,
    /// Those that it said to another VMM before.
    earlier: VecDeque<String>,
    console: Arc<Mutex<Console>>,
    begun: Arc<Mutex<Begun>>,
    /// The threads that read the console; they end with its streams.
    readers: Vec<JoinHandle<()>>,
    ready: Value,
    started: Instant,
    ready_after: Duration,
    retries: u32,
}

/// Where the guest's console takes what is typed.
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

/// What the guest's console has of a line that has not ended.
#[derive(Debug, Default)]
struct Begun {
    line: Vec<u8>,
    /// The first line that ended here: it may have begun elsewhere.
    first: Option<String>,
}

/// What the guest has printed, and the VMM's messages between it.
#[derive(Debug, Default)]
struct Console {
    text: String,
    /// When something was printed last.
    last: Option<Instant>,
}

impl Guest {
    /// Starts the VMM and waits until the guest's init is ready. A boot whose
    /// console falls silent is killed and tried again, and so is one that
    /// crashes; each retry is printed, and the test runner counts it.
    ///
    /// # Errors
    /// [`Error::Start`]; [`Error::Guest`] with the end of the console when the
    /// VMM ends or no attempt succeeds.
    pub fn start(arguments: &BellhopArguments) -> Result<Self> {
        Self::start_shown(|| arguments.command(), arguments.silence, arguments.show)
    }

    /// As [`Self::start`] for any VMM whose standard input and output are the
    /// guest's serial console. `command` makes a new command for each attempt.
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
        let mut last = String::new();
        for retries in 0..ATTEMPTS {
            let mut guest = Self::spawn(command(), show)?;
            match guest.boot(silence) {
                Boot::Ready(ready) => {
                    guest.ready = ready;
                    guest.ready_after = guest.started.elapsed();
                    guest.retries = retries;
                    return Ok(guest);
                }
                Boot::Ended => {
                    // An error is an error: only hangs and crashes are tried again.
                    let status = guest.wait_exit(Duration::from_secs(5))?;
                    if status.code() != Some(CRASHED) || retries + 1 == ATTEMPTS {
                        return Err(guest.failed(format!("ended during its boot ({status})")));
                    }
                    last = guest.console();
                    println!(
                        "{GUEST_RETRY}: attempt {} of {ATTEMPTS}: the guest crashed: {}",
                        retries + 1,
                        files::last_lines(&last, 1)
                    );
                }
                Boot::Silent => {
                    // The guest may have hung before its first line.
                    println!(
                        "{GUEST_RETRY}: attempt {} of {ATTEMPTS}: the console was silent for {} s",
                        retries + 1,
                        silence.as_secs()
                    );
                    last = guest.console();
                }
            }
        }
        Err(Error::Guest {
            what: format!("did not boot in {ATTEMPTS} attempts"),
            console: files::last_lines(&last, SHOWN),
        })
    }

    /// The guest of a VMM that runs already (its process is `pid`), by the socket of its console. Returns when the
    /// init is ready; what it said before is repeated by the console. A boot is not tried again: it is
    /// the VMM's owner who could. When this is dropped, the guest goes on.
    ///
    /// # Errors
    /// [`Error::File`] if nobody serves the console; [`Error::Guest`] when it ends or falls silent.
    pub fn attach(console: &Path, pid: u32, silence: Duration) -> Result<Self> {
        let started = Instant::now();
        let failed = |what| Error::file(what, console);
        let stream = UnixStream::connect(console).map_err(failed("connect to"))?;
        let output = stream.try_clone().map_err(failed("duplicate"))?;
        let text = Arc::new(Mutex::new(Console::default()));
        let begun = Arc::new(Mutex::new(Begun::default()));
        let (sender, lines) = mpsc::channel();
        let said = Some((sender, Arc::clone(&begun)));
        let readers = vec![read_console(output, Arc::clone(&text), said, None)];
        let mut guest = Self {
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
        };
        guest.ready = guest.wait_ready(silence)?;
        guest.ready_after = guest.started.elapsed();
        Ok(guest)
    }

    /// Starts a VMM whose guest does not boot but goes on where it was saved, and waits until its
    /// init answers.
    ///
    /// # Errors
    /// [`Error::Start`]; [`Error::Guest`] with the end of the console when it does not answer in that time.
    pub fn start_restored(command: Command, limit: Duration) -> Result<Self> {
        let mut guest = Self::wait_for(command)?;
        guest.answers(limit)?;
        Ok(guest)
    }

    /// Starts a VMM whose guest is to come from another one: [`Guest::answers`] waits for it.
    ///
    /// # Errors
    /// [`Error::Start`].
    pub fn wait_for(command: Command) -> Result<Self> {
        Self::spawn(command, None)
    }

    /// Waits until the guest's init answers.
    ///
    /// # Errors
    /// [`Error::Guest`] with the end of the console when it does not in that time.
    pub fn answers(&mut self, limit: Duration) -> Result<()> {
        self.ready = self.command_within("info", limit)?;
        self.ready_after = self.started.elapsed();
        Ok(())
    }

    /// The guest has come from another VMM, which has ended. What its init said there and nobody has read yet comes
    /// first, and a line that it began there and ended here is whole.
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

    /// Runs a VMM that is to end by itself, without a word to its console.
    /// Returns how it ended and everything that it and its guest printed.
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
                    if last.unwrap_or(self.started).elapsed() > silence {
                        return Boot::Silent;
                    }
                }
            }
        }
    }

    /// What the init said when it was ready: `uptime_ms`, `cpus_online`,
    /// `memory_kib`, `nics`, `disks`, `hwrng`, `problems`, `kernel`.
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

    /// The VMM's process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Has the guest obey a command and returns its answer.
    ///
    /// # Errors
    /// [`Error::Guest`] when it answers with an error, not at all within five
    /// minutes, or has ended.
    pub fn command(&mut self, line: &str) -> Result<Value> {
        self.command_within(line, Duration::from_secs(300))
    }

    /// As [`Self::command`] with a time limit of its own.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn command_within(&mut self, line: &str, limit: Duration) -> Result<Value> {
        self.send(line)?;
        self.answer(line, limit)
    }

    /// Starts a command that says when it listens (`echo`, `flood` to a peer)
    /// and returns when it does. Its result is the next [`Self::answer`].
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

    /// Waits for the answer to a line that was sent before.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn answer(&mut self, line: &str, limit: Duration) -> Result<Value> {
        let answer = match self.line_within(limit) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                let limit = limit.as_secs();
                return Err(self.failed(format!("did not answer {line:?} in {limit} s")));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(self.failed(format!("ended instead of answering {line:?}")));
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
            Boot::Silent => Err(self.failed("fell silent while booting again".into())),
        }
    }

    /// Switches the guest off and waits for the VMM's end.
    ///
    /// # Errors
    /// [`Error::Guest`] when it does not end in 30 seconds.
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
                return Err(self.failed("is somebody else's to wait for".into()));
            };
            let waited = child.try_wait();
            match waited.map_err(Error::system("wait for the VMM"))? {
                Some(status) => {
                    // What it said last is still in the pipes.
                    for reader in self.readers.drain(..) {
                        let _ = reader.join();
                    }
                    return Ok(status);
                }
                None if started.elapsed() > limit => {
                    let limit = limit.as_secs();
                    return Err(self.failed(format!("did not end in {limit} s")));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Everything printed so far, the VMM's own messages included.
    pub fn console(&self) -> String {
        self.console
            .lock()
            .map(|console| console.text.clone())
            .unwrap_or_default()
    }

    fn failed(&self, what: String) -> Error {
        Error::Guest {
            what,
            console: files::last_lines(&self.console(), SHOWN),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        match (&mut self.child, &self.input) {
            // Already ended is fine.
            (Some(child), _) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            // So that its reader ends as well.
            (None, Input::Socket(socket)) => {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
            (None, Input::Pipe(_)) => {}
        }
    }
}

enum Boot {
    Ready(Value),
    Ended,
    Silent,
}

/// Remembers what comes, and passes the init's lines on.
fn read_console(
    stream: impl Read + Send + 'static,
    console: Arc<Mutex<Console>>,
    said: Option<(Sender<String>, Arc<Mutex<Begun>>)>,
    show: Option<&'static str>,
) -> JoinHandle<()> {
    let (lines, begun) = said.unzip();
    let begun = begun.unwrap_or_default();
    std::thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        loop {
            // Whatever is there counts as a sign of life, also half a line.
            let (bytes, ended) = match stream.fill_buf() {
                Ok([]) | Err(_) => return,
                Ok(bytes) => match bytes.iter().position(|byte| *byte == b'\n') {
                    Some(end) => (bytes.get(..=end).unwrap_or_default(), true),
                    None => (bytes, false),
                },
            };
            let count = bytes.len();
            let (Ok(mut console), Ok(mut begun)) = (console.lock(), begun.lock()) else {
                return;
            };
            begun.line.extend_from_slice(bytes);
            stream.consume(count);
            console.last = Some(Instant::now());
            // A guest that never ends a line must not fill the memory.
            if !ended && begun.line.len() < REMEMBERED {
                continue;
            }
            let text = String::from_utf8_lossy(&begun.line).into_owned();
            begun.line.clear();
            if begun.first.is_none() {
                begun.first = Some(text.clone());
            }
            drop(begun);
            remember(&mut console.text, &text);
            drop(console);
            if let (Some(prefix), false) = (show, text.contains(MARK) || text.trim().is_empty()) {
                eprintln!("{prefix} {}", text.trim_end());
            }
            if let (Some(lines), Some(said)) = (&lines, said_in(&text)) {
                // Nobody may be listening any more.
                let _ = lines.send(said);
            }
        }
    })
}

/// What the guest's init says in a line.
fn said_in(line: &str) -> Option<String> {
    let (_, said) = line.split_once(MARK)?;
    Some(said.trim_end().to_owned())
}

/// Appends, and forgets the beginning where it gets too much.
fn remember(text: &mut String, more: &str) {
    text.push_str(more);
    if text.len() > 2 * REMEMBERED {
        let mut cut = text.len() - REMEMBERED;
        while !text.is_char_boundary(cut) {
            cut += 1;
        }
        text.drain(..cut);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> impl Fn() -> Command {
        move || {
            let mut command = Command::new("sh");
            command.args(["-c", text]);
            command
        }
    }

    #[test]
    fn a_guest_is_commanded() {
        let mut guest = Guest::start_command(
            script(
                "echo booting; echo '[1.0] x @lab ready {\"cpus_online\":2}'; read l; \
                 echo \"@lab {\\\"got\\\":\\\"$l\\\"}\"; read l; echo '@lab {\"error\":\"no\"}'; exit 3",
            ),
            Duration::from_secs(20),
        )
        .unwrap();
        assert_eq!(guest.ready()["cpus_online"], 2);
        assert_eq!(guest.command("info").unwrap()["got"], "info");
        let error = guest.command("more").unwrap_err().to_string();
        assert!(
            error.contains("refused") && error.contains("booting"),
            "{error}"
        );
        let status = guest.wait_exit(Duration::from_secs(20)).unwrap();
        assert_eq!(status.code(), Some(3));
        assert_eq!(guest.retries(), 0);
    }

    #[test]
    fn a_silent_boot_is_tried_again_and_then_given_up() {
        let error = Guest::start_command(script("echo one; sleep 100"), Duration::from_millis(300))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("3 attempts") && error.contains("one"),
            "{error}"
        );
    }

    #[test]
    fn a_crash_is_tried_again_and_then_given_up() {
        let error = Guest::start_command(script("echo fault >&2; exit 3"), Duration::from_secs(20))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("exit status: 3") && error.contains("fault"),
            "{error}"
        );
        let mark = std::env::temp_dir().join(format!("lab-crash-{}", std::process::id()));
        let once = format!(
            "test -e {0} || {{ touch {0}; exit 3; }}; echo '@lab ready {{}}'; read l",
            mark.display()
        );
        let guest = Guest::start_command(script(&once), Duration::from_secs(20)).unwrap();
        std::fs::remove_file(mark).unwrap();
        assert_eq!(guest.retries(), 1);
    }

    #[test]
    fn a_vmm_that_ends_is_not_tried_again() {
        let error = Guest::start_command(script("echo no >&2; exit 2"), Duration::from_secs(20))
            .unwrap_err()
            .to_string();
        assert!(error.contains("exit status: 2"), "{error}");
    }

    #[test]
    fn a_console_on_a_socket_is_a_guest() {
        let path = std::env::temp_dir().join(format!("lab-attach-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let vmm = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut writer = stream.try_clone().unwrap();
            writer
                .write_all(b"noise\n@lab ready {\"cpus_online\":1}\n")
                .unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            assert_eq!(line, "info\n");
            writer.write_all(b"@lab {\"answer\":42}\n").unwrap();
            // Until the other end goes.
            BufReader::new(&stream).read_line(&mut line).unwrap();
        });
        let mut guest = Guest::attach(&path, 7, Duration::from_secs(20)).unwrap();
        assert_eq!((guest.pid(), &guest.ready()["cpus_online"]), (7, &1.into()));
        assert_eq!(guest.command("info").unwrap()["answer"], 42);
        assert!(guest.wait_exit(Duration::ZERO).is_err());
        drop(guest);
        vmm.join().unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_line_that_is_cut_by_a_move_is_whole() {
        let limit = Duration::from_secs(20);
        for (begun, rest) in [
            (
                "@lab {\\\"n\\\":1}\\n@la",
                "b {\\\"n\\\":2}\\n@lab {\\\"n\\\":3}",
            ),
            (
                "@lab {\\\"n\\\":1}\\n@lab {\\\"n\\\":2}\\n",
                "@lab {\\\"n\\\":3}",
            ),
        ] {
            let mut before = Guest::wait_for(script(&format!("printf \"{begun}\""))()).unwrap();
            before.wait_exit(limit).unwrap();
            let last = format!("printf \"{rest}\"; read l; echo");
            let mut after = Guest::wait_for(script(&last)()).unwrap();
            after.comes_from(before).unwrap();
            after.send("").unwrap();
            for number in 1..=3 {
                assert_eq!(after.answer("", limit).unwrap()["n"], number);
            }
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut text = String::new();
        for _ in 0..40 {
            remember(&mut text, &"ä".repeat(100_000));
        }
        assert!(text.len() <= 2 * REMEMBERED);
    }
}
