//! A node daemon (`bellhop serve`) of a test: directories, process, log, and what its VMs leave on
//! the host.
//!
//! Its log is a pipe with room for one line. A reader that stops holds the daemon at its next line.
//! So a test can stop the daemon between any two steps that it logs, without test code in the
//! daemon:
//!
//! ```text
//!   daemon ── line n+1 ──> pipe (1 packet) ── line n ──> reader ── allowed? ──> lines
//!      └── blocked in write(2) at line n+2 as long as the reader waits
//! ```
//! This module owns the daemon's process and directories; both go with it. It must not know what a
//! step is.

use crate::api::Client;
use crate::emulator;
use crate::error::{Error, Result};
use crate::evidence;
use crate::files;
use crate::guest::BellhopArguments;
use crate::process::die_with_parent;
use crate::tiny;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an action may take; it is emulated twice.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// How long to wait for an answer if other work is waiting.
const SOON: Duration = Duration::from_millis(200);

/// Room for one packet in the pipe, in bytes: a page.
const ONE_PACKET: usize = 4096;

/// How many lines an error shows.
const SHOWN: usize = 60;

/// Waits until the condition holds.
///
/// # Errors
/// [`Error::Invalid`] with `what` after [`PATIENCE`].
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
    let start = Instant::now();
    while !is_so() {
        if start.elapsed() > PATIENCE {
            return Err(Error::invalid(what, "it did not come true in time"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The daemon's log, and how far the daemon may run.
#[derive(Debug, Default)]
struct Log {
    said: Mutex<Said>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Said {
    lines: Vec<String>,
    /// How many more lines are read; `None`: all.
    allowed: Option<usize>,
}

impl Log {
    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allow(&self, lines: Option<usize>) {
        self.said().allowed = lines;
        self.changed.notify_all();
    }

    /// Reads lines while the daemon has its end open.
    fn read(&self, pipe: &OwnedFd) {
        let mut packet = vec![0; ONE_PACKET];
        loop {
            // Polls without reading.
            let mut fds = [PollFd::new(pipe, PollFlags::IN)];
            if poll(&mut fds, None).is_err() {
                continue;
            }
            let mut said = self.said();
            while said.allowed == Some(0) {
                said = self
                    .changed
                    .wait(said)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            match rustix::io::read(pipe, &mut packet) {
                Ok(0) | Err(_) => return,
                Ok(count) => {
                    let text = String::from_utf8_lossy(packet.get(..count).unwrap_or_default());
                    said.lines.push(text.trim_end().to_owned());
                    said.allowed = said.allowed.map(|allowed| allowed.saturating_sub(1));
                }
            }
        }
    }
}

/// A daemon with its own directories. Dropping it kills the daemon and its VMs.
#[derive(Debug)]
pub struct Node {
    directory: PathBuf,
    arguments: Vec<String>,
    child: Option<Child>,
    log: Arc<Log>,
    /// Its API on the Unix socket.
    pub api: Client,
}

/// A VM with the lab's small guest and these NICs, as the body of a request.
///
/// # Errors
/// [`Error::Missing`] outside of the lab.
pub fn small(nics: &Value) -> Result<Value> {
    let arguments = BellhopArguments::small()?;
    let spec = json!({
        "kernel": arguments.kernel_image(),
        "initramfs": arguments.ramdisk(),
        "cmdline": arguments.kernel_words(),
        "memory": "128M",
        "nics": nics,
    });
    Ok(json!({ "spec": spec }))
}

impl Node {
    /// Starts a daemon that logs at the level `debug`.
    ///
    /// # Errors
    /// [`Error::Missing`] outside the lab, [`Error::File`], [`Error::Start`]; [`Error::Invalid`] if
    /// it does not serve.
    pub fn start(test: &str) -> Result<Self> {
        Self::start_with(test, &[])
    }

    /// Like [`Self::start`], with more arguments for `bellhop serve`.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(test: &str, arguments: &[&str]) -> Result<Self> {
        crate::sim::require_lab()?;
        let name = format!("lab-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&directory);
        files::create_directory(&directory)?;
        let mut node = Self {
            api: Client::new(&directory.join("run/node.socket")),
            directory,
            arguments: arguments.iter().map(|&one| one.to_owned()).collect(),
            child: None,
            log: Arc::default(),
        };
        node.start_again()?;
        Ok(node)
    }

    /// Starts it again, with the same directories and a new log.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_again(&mut self) -> Result<()> {
        self.spawn(None)?;
        let served = until("the daemon serves", || {
            self.api.get("/v1/version").is_ok() || self.has_ended()
        });
        if self.has_ended() {
            Err(Error::invalid("the daemon's start", self.said()))
        } else {
            served
        }
    }

    /// Starts it again and kills it after this many log lines. Returns whether it logged that many
    /// before it served.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn die_while_starting(&mut self, lines: usize) -> Result<bool> {
        self.spawn(Some(lines))?;
        let mut held = false;
        until("the daemon is held or serves", || {
            held = self.is_held();
            held || self.answers() || self.has_ended()
        })?;
        self.kill();
        Ok(held)
    }

    /// True if it answers soon. A held daemon has its socket but does not answer.
    fn answers(&self) -> bool {
        let ask = || -> std::io::Result<bool> {
            let mut stream = UnixStream::connect(self.api.socket())?;
            stream.set_read_timeout(Some(SOON))?;
            stream
                .write_all(b"GET /v1/version HTTP/1.1\r\nhost: lab\r\nconnection: close\r\n\r\n")?;
            Ok(stream.read(&mut [0; 16])? > 0)
        };
        ask().unwrap_or(false)
    }

    /// Starts the process, with this many log lines allowed.
    fn spawn(&mut self, lines: Option<usize>) -> Result<()> {
        let program = std::env::var_os("BELLHOP").ok_or_else(|| {
            Error::missing("BELLHOP is not set", "run the test with `cargo lab test`")
        })?;
        let pipe = |error: rustix::io::Errno| Error::system("make a pipe")(error);
        let (reader, writer) = pipe_with(PipeFlags::DIRECT | PipeFlags::CLOEXEC).map_err(pipe)?;
        fcntl_setpipe_size(&writer, ONE_PACKET).map_err(pipe)?;
        let mut command = Command::new(&program);
        command
            .args(["--log-level", "debug", "serve"])
            .arg("--state-dir")
            .arg(self.state())
            .arg("--runtime-dir")
            .arg(self.runtime())
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(writer);
        let child = die_with_parent(&mut command)
            .spawn()
            .map_err(|source| Error::Start {
                program: program.to_string_lossy().into_owned(),
                source,
            })?;
        // Closes the command's copy of the pipe's writing end.
        drop(command);
        self.child = Some(child);
        self.log = Arc::default();
        self.log.allow(lines);
        let log = Arc::clone(&self.log);
        std::thread::spawn(move || log.read(&reader));
        Ok(())
    }

    fn has_ended(&mut self) -> bool {
        match &mut self.child {
            Some(child) => matches!(child.try_wait(), Ok(Some(_))),
            None => true,
        }
    }

    /// True if the daemon runs.
    pub fn lives(&mut self) -> bool {
        !self.has_ended()
    }

    /// The daemon's process ID; 0 without one.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// The directory with all its files.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    fn runtime(&self) -> PathBuf {
        self.directory.join("run")
    }

    /// The last lines of its log.
    #[must_use]
    pub fn said(&self) -> String {
        let said = self.log.said();
        let from = said.lines.len().saturating_sub(SHOWN);
        said.lines.get(from..).unwrap_or_default().join("\n")
    }

    /// How many lines it has logged.
    #[must_use]
    pub fn lines(&self) -> usize {
        self.log.said().lines.len()
    }

    /// Reads no more of its log than this many lines: it stops after the next one.
    pub fn hold_after(&self, lines: usize) {
        self.log.allow(Some(lines));
    }

    /// Reads all of its log again.
    pub fn resume(&self) {
        self.log.allow(None);
    }

    /// True if one of its threads waits for room in its log.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let tasks = files::list(Path::new(&format!("/proc/{}/task", self.pid())));
        tasks.unwrap_or_default().iter().any(|task| {
            let place = fs::read_to_string(task.join("wchan")).unwrap_or_default();
            place.contains("pipe_write")
        })
    }

    /// Ends it with SIGKILL; its VMs continue.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.resume();
    }

    /// Ends it with SIGTERM; its VMs continue. Returns true if it exited with success.
    pub fn terminate(&mut self) -> bool {
        self.resume();
        let Some(mut child) = self.child.take() else {
            return false;
        };
        let pid = rustix::process::Pid::from_child(&child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        child.wait().is_ok_and(|status| status.success())
    }

    /// The daemon's report of a VM; `None` if there is no such VM.
    ///
    /// # Errors
    /// Those of [`Client::ask`]; [`Error::Invalid`] for any answer other than 200 and 404.
    pub fn vm(&self, name: &str) -> Result<Option<Value>> {
        let answer = self.api.ask("GET", &format!("/v1/vms/{name}"), None)?;
        match answer.status {
            200 => Ok(Some(answer.body)),
            404 => Ok(None),
            other => Err(Error::invalid(
                format!("the answer to GET /v1/vms/{name}"),
                format!("{other} {}", answer.body),
            )),
        }
    }

    /// Waits until a VM is in this phase; returns the daemon's report of it.
    ///
    /// # Errors
    /// As [`Self::vm`]; after [`PATIENCE`], [`Error::Invalid`] with the report and the log.
    pub fn await_phase(&self, name: &str, phase: &str) -> Result<Value> {
        let start = Instant::now();
        loop {
            let last = self.vm(name)?;
            match last {
                Some(vm) if vm["status"]["phase"] == phase => return Ok(vm),
                last if start.elapsed() > PATIENCE => {
                    let what = format!("it is {last:?}\n{}", self.said());
                    return Err(Error::invalid(
                        format!("{name}, which is to be {phase}"),
                        what,
                    ));
                }
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// A VM whose guest does nothing ([`tiny`]), with these NICs, as the body of a request.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn tiny(&self, nics: &Value) -> Result<Value> {
        let kernel = tiny::write_kernel(&std::env::temp_dir())?;
        let spec = json!({ "kernel": kernel, "memory": "32M", "nics": nics });
        Ok(json!({ "spec": spec }))
    }

    /// The processes that are marked as VMMs of this node, including zombies: VM name and process
    /// ID.
    #[must_use]
    pub fn processes(&self) -> BTreeSet<(String, u32)> {
        marked(&self.runtime().join("vms"))
    }

    /// What this node has on the host now.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn traces(&self) -> Result<Traces> {
        let mut all = BTreeSet::new();
        for place in [self.state(), self.runtime()] {
            list(&place, &mut all);
        }
        // The daemon creates these directories and the lock when it first needs them.
        all.retain(|file| {
            let name = file.file_name().unwrap_or_default();
            !["vms", "nics", "lock", "snapshots"]
                .iter()
                .any(|known| name == *known)
        });
        let devices = files::list(Path::new("/sys/bus/vdpa/devices"))?;
        let descriptors = files::list(Path::new(&format!("/proc/{}/fd", self.pid())));
        Ok(Traces {
            devices: devices.into_iter().collect(),
            files: all,
            processes: self.processes(),
            descriptors: descriptors.map_or(0, |all| all.len()),
        })
    }

    /// Waits until the traces equal `before`. Workers of the daemon may hold a descriptor for a
    /// moment, perhaps when `before` was taken, so fewer descriptors are accepted.
    ///
    /// # Errors
    /// As [`Self::traces`]; [`Error::Invalid`] with the difference.
    pub fn same(&self, before: &Traces, when: &str) -> Result<()> {
        self.await_same(before, when, true)
    }

    /// Like [`Self::same`], after a restart of the daemon: the number of its descriptors does not
    /// count.
    ///
    /// # Errors
    /// As [`Self::same`].
    pub fn same_but_descriptors(&self, before: &Traces, when: &str) -> Result<()> {
        self.await_same(before, when, false)
    }

    fn await_same(&self, before: &Traces, when: &str, counted: bool) -> Result<()> {
        let start = Instant::now();
        loop {
            let mut now = self.traces()?;
            if !counted || now.descriptors < before.descriptors {
                now.descriptors = before.descriptors;
            }
            if now == *before {
                return Ok(());
            }
            if start.elapsed() > Duration::from_secs(20) {
                let what = format!("before: {before:#?}\nnow: {now:#?}\n{}", self.said());
                return Err(Error::invalid(when, what));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.resume();
        if std::thread::panicking() {
            eprintln!("the daemon's log ends with:\n{}", self.said());
            eprintln!("{}", evidence::of_running(self.pid()));
            for directory in files::list(&self.state().join("vms")).unwrap_or_default() {
                let log = directory.join("vmm.log");
                let text = files::read_text(&log).unwrap_or_default();
                let end = files::last_lines(&text, SHOWN);
                eprintln!("{}:\n{end}{}", log.display(), emulator::marked(&text));
            }
        }
        // Deletes what a failed test has left.
        if self.child.is_some() {
            let all = self.api.get("/v1/vms").unwrap_or_default();
            for vm in all["items"].as_array().into_iter().flatten() {
                let name = vm["name"].as_str().unwrap_or_default();
                let path = format!("/v1/vms/{name}?force=true");
                let _ = self.api.ask("DELETE", &path, None);
            }
        }
        self.kill();
        for (_, pid) in self.processes() {
            let pid = i32::try_from(pid).ok();
            if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// What a node's VMs may leave behind on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traces {
    /// All vDPA devices.
    pub devices: BTreeSet<PathBuf>,
    /// Everything in the node's directories.
    pub files: BTreeSet<PathBuf>,
    /// VM names and process IDs.
    pub processes: BTreeSet<(String, u32)>,
    /// How many descriptors the daemon has open.
    pub descriptors: usize,
}

fn list(directory: &Path, all: &mut BTreeSet<PathBuf>) {
    for entry in files::list(directory).unwrap_or_default() {
        if fs::symlink_metadata(&entry).is_ok_and(|metadata| metadata.is_dir()) {
            list(&entry, all);
        }
        all.insert(entry);
    }
}

/// Processes whose environment names a path below this directory.
fn marked(below: &Path) -> BTreeSet<(String, u32)> {
    let mark = format!("BELLHOP_VM={}/", below.display());
    let mut found = BTreeSet::new();
    for entry in files::list(Path::new("/proc")).unwrap_or_default() {
        let name = entry.file_name().unwrap_or_default().to_string_lossy();
        let Ok(pid) = name.parse() else {
            continue;
        };
        let environment = fs::read(entry.join("environ")).unwrap_or_default();
        for variable in environment.split(|byte| *byte == 0) {
            if let Some(vm) = variable.strip_prefix(mark.as_bytes()) {
                found.insert((String::from_utf8_lossy(vm).into_owned(), pid));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_writer_stops_where_its_log_is_not_read() {
        let (reader, writer) = pipe_with(PipeFlags::DIRECT | PipeFlags::CLOEXEC).unwrap();
        fcntl_setpipe_size(&writer, ONE_PACKET).unwrap();
        let log = Arc::new(Log::default());
        log.allow(Some(3));
        let reading = Arc::clone(&log);
        let reader = std::thread::spawn(move || reading.read(&reader));
        let written = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&written);
        let writer = std::thread::spawn(move || {
            let mut pipe = fs::File::from(writer);
            for line in 0..10 {
                pipe.write_all(format!("line {line}\n").as_bytes()).unwrap();
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        // Three were read and one lies in the pipe.
        until("four lines", || written.load(Ordering::SeqCst) == 4).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(written.load(Ordering::SeqCst), 4);
        assert_eq!(log.said().lines, ["line 0", "line 1", "line 2"]);
        log.allow(None);
        writer.join().unwrap();
        reader.join().unwrap();
        assert_eq!(log.said().lines.len(), 10);
    }
}
