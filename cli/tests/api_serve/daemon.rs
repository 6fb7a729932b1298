//! A test's own daemon, a kernel of a few instructions, and the leftovers on the host.

#[path = "../program/mod.rs"]
mod program;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub(crate) use self::program::program;

/// The timeout of a wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the condition holds.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Instructions of a guest, 32-bit.
pub(crate) mod asm {
    /// Writes one character on the serial port, then halts without using CPU time.
    pub(crate) const IDLE: &[u8] = &[
        0x66, 0xba, 0xf8, 0x03, 0xb0, b'!', 0xee, // mov dx, 0x3f8; mov al, '!'; out dx, al
        0xfa, 0xf4, 0xeb, 0xfc, // cli; hlt, and again after a non-maskable interrupt
    ];
    /// Powers off.
    pub(crate) const POWER_OFF: &[u8] = &[0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe];
    /// Waits for the power button, then powers off.
    #[allow(dead_code, reason = "not every test presses it")]
    pub(crate) const BUTTON: &[u8] = &[
        0x66, 0xba, 0x20, 0x06, // mov dx, 0x620
        0xec, 0xa8, 0x01, 0x74, 0xfb, // in al, dx; test al, 1; jz to the in
        0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe,
    ];
    /// No handlers: a triple fault.
    pub(crate) const CRASH: &[u8] = &[0x0f, 0x0b];
}

/// An ELF with a PVH note whose code is at 1 MiB.
pub(crate) fn kernel(code: &[u8]) -> Vec<u8> {
    const BASE: u32 = 0x10_0000;
    const NOTE: u64 = 64 + 2 * 56;
    const CODE: u64 = 0x100;
    let base = u64::from(BASE);
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for half in [2_u16, 62] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1_u32.to_le_bytes());
    for word in [base, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 2, 64, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    let length = u64::try_from(code.len()).unwrap();
    for (kind, offset, address, size) in [(1_u32, CODE, base, length), (4, NOTE, 0, 20)] {
        elf.extend(kind.to_le_bytes());
        elf.extend(7_u32.to_le_bytes());
        for word in [offset, address, address, size, size, 4] {
            elf.extend(word.to_le_bytes());
        }
    }
    for word in [4_u32, 4, 18] {
        elf.extend(word.to_le_bytes()); // name, descriptor, XEN_ELFNOTE_PHYS32_ENTRY
    }
    elf.extend(b"Xen\0");
    elf.extend(BASE.to_le_bytes());
    elf.resize(usize::try_from(CODE).unwrap(), 0);
    elf.extend(code);
    elf
}

/// A client of the API on a socket.
#[derive(Debug, Clone)]
pub(crate) struct Client(PathBuf);

impl Client {
    #[allow(dead_code, reason = "not every test has others than the daemon")]
    pub(crate) fn new(socket: &Path) -> Self {
        Self(socket.to_owned())
    }

    /// The socket.
    #[allow(dead_code, reason = "only programs that a test starts need it")]
    pub(crate) fn socket(&self) -> &Path {
        &self.0
    }

    /// Sends a request; returns the status and the body, null if empty. None without an answer.
    pub(crate) fn try_ask(&self, method: &str, path: &str, body: &Value) -> Option<(u16, Value)> {
        let mut stream = UnixStream::connect(&self.0).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
        let text = || Value::String(body.to_owned());
        let body = match body {
            "" => Value::Null,
            body => serde_json::from_str(body).unwrap_or_else(|_| text()),
        };
        Some((status, body))
    }

    #[track_caller]
    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        self.try_ask(method, path, body).unwrap()
    }

    /// Sends a request, and expects this status.
    #[track_caller]
    pub(crate) fn expect(&self, status: u16, method: &str, path: &str, body: &Value) -> Value {
        let (found, answer) = self.ask(method, path, body);
        assert_eq!(found, status, "{method} {path}: {answer:#}");
        answer
    }

    #[track_caller]
    pub(crate) fn get(&self, path: &str) -> Value {
        self.expect(200, "GET", path, &Value::Null)
    }
}

/// A daemon with directories of its own.
#[derive(Debug)]
pub(crate) struct Daemon {
    directory: PathBuf,
    child: Option<Child>,
    pub(crate) api: Client,
}

impl Daemon {
    pub(crate) fn start(test: &str) -> Self {
        let name = format!("bellhop-serve-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let mut daemon = Self {
            api: Client(directory.join("run/node.socket")),
            directory,
            child: None,
        };
        daemon.start_again();
        daemon
    }

    /// A VM that runs this code, for the body of a request.
    pub(crate) fn machine(&self, code: &[u8]) -> Value {
        let path = self.directory.join(format!("kernel-{}", code.len()));
        fs::write(&path, kernel(code)).unwrap();
        json!({ "spec": { "kernel": path, "memory": "64M" } })
    }

    fn spawn(&mut self, more: &[&Path]) {
        let child = Command::new(program())
            .args(["--log-level", "info", "serve", "--state-dir"])
            .arg(self.directory.join("state"))
            .arg("--runtime-dir")
            .arg(self.directory.join("run"))
            .args(more)
            .stdin(Stdio::null())
            .stderr(Stdio::from(self.log()))
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    fn log(&self) -> fs::File {
        let mut options = fs::File::options();
        let path = self.directory.join("daemon.log");
        options.create(true).append(true).open(path).unwrap()
    }

    fn serves(&self) {
        until("the daemon serves", || {
            let version = self.api.try_ask("GET", "/v1/version", &Value::Null);
            version.is_some_and(|(status, _)| status == 200)
        });
    }

    pub(crate) fn start_again(&mut self) {
        self.spawn(&[]);
        self.serves();
    }

    /// Starts it with an observer of its steps.
    pub(crate) fn start_observed(&mut self) -> Shown {
        let path = self.directory.join("steps.socket");
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        self.spawn(&[Path::new("--step-observer"), &path]);
        let mut shown = Shown(BufReader::new(listener.accept().unwrap().0));
        // Its steps for existing VMs come first.
        std::thread::scope(|scope| {
            let served = scope.spawn(|| self.serves());
            while !served.is_finished() {
                if shown.waits() {
                    shown.next();
                    shown.resume();
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        shown
    }

    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Ends it with SIGTERM.
    pub(crate) fn end(&mut self) {
        let mut child = self.child.take().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success());
    }

    #[track_caller]
    pub(crate) fn await_phase(&self, vm: &str, phase: &str) -> Value {
        let path = format!("/v1/vms/{vm}");
        let mut last = Value::Null;
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            last = self.api.get(&path);
            if last["status"]["phase"] == phase {
                return last;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let log = fs::read_to_string(self.directory.join("daemon.log")).unwrap();
        panic!("{vm} is not {phase}: {last:#}\n{log}");
    }

    /// The number of processes with this daemon's mark.
    #[allow(dead_code, reason = "not every test counts them")]
    pub(crate) fn machines(&self) -> usize {
        marked(&self.directory).len()
    }

    /// Kills all processes with this daemon's mark.
    pub(crate) fn kill_machines(&self) {
        for pid in marked(&self.directory) {
            signal(pid, rustix::process::Signal::KILL);
        }
        until("they are gone", || marked(&self.directory).is_empty());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        for pid in marked(&self.directory) {
            signal(pid, rustix::process::Signal::KILL);
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    let _ = rustix::process::kill_process(pid, signal);
}

/// The steps of a daemon.
#[derive(Debug)]
pub(crate) struct Shown(BufReader<UnixStream>);

impl Shown {
    /// Whether a step is waiting.
    pub(crate) fn waits(&mut self) -> bool {
        self.0.get_ref().set_nonblocking(true).unwrap();
        let waits = !self.0.fill_buf().unwrap_or_default().is_empty();
        self.0.get_ref().set_nonblocking(false).unwrap();
        waits
    }

    /// The next step.
    pub(crate) fn next(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Lets the step continue.
    pub(crate) fn resume(&mut self) {
        // The daemon may have ended.
        let _ = self.0.get_mut().write_all(b"\n");
    }
}

/// Possible leftovers of a daemon and its VMs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Traces {
    files: BTreeSet<PathBuf>,
    machines: BTreeSet<u32>,
}

impl Traces {
    pub(crate) fn now(daemon: &Daemon) -> Self {
        let mut files = BTreeSet::new();
        for below in ["run/vms", "state/vms"] {
            let entries = fs::read_dir(daemon.directory.join(below));
            files.extend(
                entries
                    .into_iter()
                    .flatten()
                    .map(|entry| entry.unwrap().path()),
            );
        }
        Self {
            files,
            machines: marked(&daemon.directory),
        }
    }

    /// Asserts that there are none.
    #[track_caller]
    pub(crate) fn none(daemon: &Daemon) {
        let now = Self::now(daemon);
        let empty = now.files.is_empty() && now.machines.is_empty();
        assert!(empty, "{now:#?}");
    }
}

/// Processes whose environment names this directory.
fn marked(directory: &Path) -> BTreeSet<u32> {
    let mark = format!("BELLHOP_VM={}/", directory.display());
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").unwrap() {
        let entry = entry.unwrap();
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        if variables.any(|variable| variable.starts_with(mark.as_bytes())) {
            found.insert(pid);
        }
    }
    found
}
