//! NICs without hardware (`bellhop swnic`) for tests and measurements in the lab host.

use crate::error::{Error, Result};
use crate::files;
use crate::process::die_with_parent;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use vdpa_mgmt::nic::server;

/// How long it may take to end.
const LIMIT: Duration = Duration::from_secs(20);

/// A running `bellhop swnic`. Dropping it has it delete its devices.
#[derive(Debug)]
pub struct Swnic {
    child: Child,
    name: String,
    shown: Value,
}

/// `bellhop swnic NAME …` with its output and messages in pipes.
///
/// # Errors
/// [`Error::Missing`] outside of the lab.
pub fn command(name: &str, words: &[&str]) -> Result<Command> {
    let program = std::env::var_os("BELLHOP")
        .ok_or_else(|| Error::missing("BELLHOP is not set", "run this with `cargo lab`"))?;
    let mut command = Command::new(program);
    command.args(["swnic", name, "-j"]).args(words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    die_with_parent(&mut command);
    Ok(command)
}

/// The processes of any NIC without hardware, as [`Swnic::processes`].
///
/// # Errors
/// [`Error::Invalid`] if it has none.
pub fn processes(name: &str) -> Result<[Pid; 2]> {
    let none = || Error::invalid(name, "it has no process");
    let server = server::holder(name);
    let server = server.map_err(Error::system("find the process of a NIC"))?;
    let server = server.ok_or_else(none)?;
    let number = server.as_raw_pid();
    let children = std::fs::read_to_string(format!("/proc/{number}/task/{number}/children"));
    let children = children.unwrap_or_default();
    let worker = children
        .split_whitespace()
        .next()
        .and_then(|pid| pid.parse().ok());
    let worker = worker.and_then(Pid::from_raw).ok_or_else(none)?;
    Ok([server, worker])
}

/// Waits until another worker than this one serves a NIC, in its sandbox.
///
/// # Errors
/// [`Error::Invalid`] if it does not get one.
pub fn await_other_worker(name: &str, than: Pid) -> Result<()> {
    let begin = Instant::now();
    let serves = |worker: Pid| {
        let status = std::fs::read_to_string(format!("/proc/{worker}/status"));
        worker != than && status.is_ok_and(|status| status.contains("Seccomp:\t2"))
    };
    while !processes(name).is_ok_and(|[_, worker]| serves(worker)) {
        if begin.elapsed() > LIMIT {
            return Err(Error::invalid(name, "no other worker follows"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl Swnic {
    /// Starts it, and waits for its device.
    ///
    /// # Errors
    /// [`Error::Start`]; [`Error::Invalid`] with its messages if it has no device.
    pub fn start(name: &str, words: &[&str]) -> Result<Self> {
        let mut child = command(name, words)?
            .spawn()
            .map_err(Error::system("start bellhop swnic"))?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            // Without a line the command has failed, and the messages have the reason.
            let _ = BufReader::new(output).read_line(&mut line);
        }
        let Ok(shown) = serde_json::from_str::<Value>(&line) else {
            let output = child.wait_with_output();
            let output = output.map_err(Error::system("wait for bellhop swnic"))?;
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(Error::invalid("bellhop swnic", why));
        };
        Ok(Self {
            child,
            name: name.to_owned(),
            shown: shown["swnic"][name].clone(),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process that keeps the tap and the device, and its worker, which moves the frames.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it has none.
    pub fn processes(&self) -> Result<[Pid; 2]> {
        processes(&self.name)
    }

    /// Checks that its worker has no privileges, a system call filter, and limits of its memory.
    ///
    /// # Errors
    /// As [`Swnic::processes`]; [`Error::Invalid`] with what the worker lacks.
    pub fn worker_is_confined(&self) -> Result<()> {
        let [_, worker] = self.processes()?;
        let status = files::read_text(Path::new(&format!("/proc/{worker}/status")))?;
        for line in [
            "Uid:\t65534\t65534\t65534\t65534",
            "CapEff:\t0000000000000000",
            "CapBnd:\t0000000000000000",
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
        ] {
            if !status.contains(line) {
                return Err(Error::invalid("the worker", format!("no {line}: {status}")));
            }
        }
        let limits = files::read_text(Path::new(&format!("/proc/{worker}/limits")))?;
        for (name, most) in [("data", 256 << 20), ("file", 32 << 20)] {
            let wanted = format!("Max {name} size {most} {most} bytes");
            let has = |line: &str| line.split_whitespace().eq(wanted.split(' '));
            if !limits.lines().any(has) {
                return Err(Error::invalid(
                    "the worker",
                    format!("no {wanted}: {limits}"),
                ));
            }
        }
        let score = files::read_text(Path::new(&format!("/proc/{worker}/oom_score_adj")))?;
        if score.trim() != "100" {
            return Err(Error::invalid("its oom_score_adj", score));
        }
        Ok(())
    }

    /// The processor time of each thread of its worker, in the order of the queue pairs.
    ///
    /// # Errors
    /// As [`Swnic::processes`]; [`Error::Invalid`] if the worker ends.
    pub fn pair_times(&self) -> Result<Vec<Duration>> {
        let [_, worker] = self.processes()?;
        let mut times = BTreeMap::new();
        let directory = format!("/proc/{worker}/task");
        for task in files::list(Path::new(&directory))? {
            let name = files::read_text(&task.join("comm"))?;
            // The first thread has the name of the program.
            let pair = name.trim().strip_prefix("pair").map_or(Ok(0), str::parse);
            let pair: u16 = pair.map_err(|_| Error::invalid("the name of a thread", &name))?;
            let text = files::read_text(&task.join("schedstat"))?;
            let time = text.split(' ').next().and_then(|time| time.parse().ok());
            let time = time.ok_or_else(|| Error::invalid("schedstat", &text))?;
            times.insert(pair, Duration::from_nanos(time));
        }
        Ok(times.into_values().collect())
    }

    /// As the function [`await_other_worker`].
    ///
    /// # Errors
    /// [`Error::Invalid`] if it does not get one.
    pub fn await_other_worker(&self, than: Pid) -> Result<()> {
        await_other_worker(&self.name, than)
    }

    /// A statistic of its tap, such as `rx_packets`: `rx` is what the guest has sent.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Invalid`] for anything but a number.
    pub fn statistic(&self, name: &str) -> Result<u64> {
        let tap = Path::new("/sys/class/net").join(&self.name);
        let text = files::read_text(&tap.join("statistics").join(name))?;
        let number = text.trim().parse();
        number.map_err(|_| Error::invalid(name, text))
    }

    /// The log of its worker.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn log(&self) -> Result<String> {
        let directory = Path::new(server::DIRECTORY);
        files::read_text(&directory.join(format!("{}.log", self.name)))
    }

    /// The vhost-vdpa device.
    pub fn path(&self) -> &Path {
        Path::new(self.shown["path"].as_str().unwrap_or_default())
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).map_err(Error::system("send a signal"))
    }

    /// Waits for the end; returns the messages.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it does not end.
    pub fn end(mut self) -> Result<(ExitStatus, String)> {
        let failed = || Error::system("wait for bellhop swnic");
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().map_err(failed())? {
                break status;
            }
            if begin.elapsed() > LIMIT {
                return Err(Error::invalid(&self.name, "it does not end"));
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut text = String::new();
        if let Some(mut messages) = self.child.stderr.take() {
            messages.read_to_string(&mut text).map_err(failed())?;
        }
        Ok((status, text))
    }
}

impl Drop for Swnic {
    fn drop(&mut self) {
        let begin = Instant::now();
        let _ = self.signal(Signal::TERM);
        while matches!(self.child.try_wait(), Ok(None)) {
            if begin.elapsed() > LIMIT {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
