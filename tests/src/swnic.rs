//! NICs without hardware (`bellhop swnic`) for tests and measurements in the lab host.

use crate::error::{Error, Result};
use crate::files;
use crate::process::die_with_parent;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long it may take to end.
const LIMIT: Duration = Duration::from_secs(20);

/// A running `bellhop swnic`. Dropping it has it delete its devices.
#[derive(Debug)]
pub struct Swnic {
    child: Child,
    name: String,
    shown: Value,
    /// Reads its messages, with which the pipe would fill.
    messages: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
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
        let messages = Arc::new(Mutex::new(String::new()));
        let reader = child.stderr.take().map(|stream| {
            let messages = Arc::clone(&messages);
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(|line| line.ok()) {
                    let mut messages = messages.lock().unwrap_or_else(PoisonError::into_inner);
                    messages.push_str(&line);
                    messages.push('\n');
                }
            })
        });
        Ok(Self {
            child,
            name: name.to_owned(),
            shown: shown["swnic"][name].clone(),
            messages,
            reader,
        })
    }

    /// Its messages so far.
    pub fn messages(&self) -> String {
        let messages = self.messages.lock();
        messages.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The vhost-vdpa device.
    pub fn path(&self) -> &Path {
        Path::new(self.shown["path"].as_str().unwrap_or_default())
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
        if let Some(reader) = self.reader.take() {
            // It has not panicked.
            let _ = reader.join();
        }
        Ok((status, self.messages()))
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

/// A bridge with an MTU of 9000 bytes, on which nothing filters frames. It is deleted when dropped.
#[derive(Debug)]
pub struct Bridge(&'static str);

impl Bridge {
    /// Creates it.
    ///
    /// # Errors
    /// [`Error::Missing`] outside of the lab; those of [`ip`].
    pub fn add(name: &'static str) -> Result<Self> {
        crate::sim::require_lab()?;
        run("modprobe", &["tun"])?;
        ip(&["link", "add", name, "type", "bridge"])?;
        let bridge = Self(name);
        ip(&["link", "set", name, "up", "mtu", "9000"])?;
        Ok(bridge)
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.0
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        if let Err(error) = ip(&["link", "del", self.0]) {
            eprintln!("lab: left behind: the bridge {} ({error})", self.0);
        }
    }
}

/// Runs iproute2's `ip`.
///
/// # Errors
/// [`Error::Start`]; [`Error::Invalid`] if it fails.
pub fn ip(words: &[&str]) -> Result<()> {
    run("ip", words)
}

/// Runs a program.
fn run(program: &str, words: &[&str]) -> Result<()> {
    let status = Command::new(program).args(words).status();
    let status = status.map_err(Error::system("start a program"))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::invalid(
        format!("{program} {}", words.join(" ")),
        format!("{status}"),
    ))
}
