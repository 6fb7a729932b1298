//! Consoles of running VMs, each shared by many clients.
//!
//! Owns the connection to each VM's process, the last output, and the right to write.
//!
//! ```text
//!                  ┌──> Output, the last 256 KiB ──> clients, each at its own position
//!   VM's process ──┤    (the oldest bytes go; a client that still needs them learns how many)
//!                  └<── the one client that writes; another takes its place only on request
//! ```
//! The process serves one connection, and sends its last 64 KiB first. The daemon connects with the
//! first client, and disconnects after the last one. Meanwhile other programs on this host cannot
//! use the console's socket.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bellhop_api::node::Role;
use parking_lot::Mutex;
use rustix::net::Shutdown;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout_at};
use vmm::http::budget::{Budget, BudgetPlace};
use vmm::http::socket::connect_directly;

use crate::error::Error;
use crate::machines::spec::VmName;

/// Clients at a time, of all consoles.
const CLIENTS_MAX: usize = 64;
/// Bytes kept of each console: how far a client may lag.
const KEPT: usize = 256 * 1024;
/// Bytes that a client gets as history.
const HISTORY: u64 = 64 * 1024;
/// The size of a read, in bytes.
const CHUNK: usize = 16 * 1024;
/// How long the process may take to begin with its last output.
const FIRST: Duration = Duration::from_millis(250);
/// The silence after its last output.
const QUIET: Duration = Duration::from_millis(50);
/// How long its last output may take in all.
const OPENING: Duration = Duration::from_secs(1);
/// The beginning of the line with which a process refuses a second connection.
const REFUSAL: &[u8] = b"[bellhop: ";

/// The state of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// The process sends its last output.
    #[default]
    Opening,
    /// New output follows.
    Open,
    /// The process has closed it.
    Closed,
}

/// The output of a guest.
#[derive(Debug, Default)]
pub(crate) struct Output {
    kept: VecDeque<u8>,
    /// Bytes received so far.
    end: u64,
    phase: Phase,
}

impl Output {
    fn append(&mut self, bytes: &[u8]) {
        self.kept.extend(bytes);
        let excess = self.kept.len().saturating_sub(KEPT);
        self.kept.drain(..excess);
        self.end = self.end.saturating_add(bytes.len() as u64);
    }

    /// The position of the oldest kept byte.
    fn begin(&self) -> u64 {
        self.end.saturating_sub(self.kept.len() as u64)
    }

    /// How many bytes behind `position` are gone, and at most `most` bytes after them.
    pub(crate) fn read(&self, position: u64, most: usize) -> (u64, Vec<u8>) {
        let begin = self.begin();
        let skipped = usize::try_from(position.saturating_sub(begin)).unwrap_or(usize::MAX);
        let bytes = self.kept.iter().skip(skipped).take(most);
        (begin.saturating_sub(position), bytes.copied().collect())
    }

    /// Whether there will be no more.
    pub(crate) fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }
}

/// The client that writes.
struct Writer {
    by: String,
    /// Receives the name of the client that takes its place. Closed: this client has left.
    taken: oneshot::Sender<String>,
}

/// A connection to the console of a VM's process. Dropping it disconnects.
pub(crate) struct Console {
    stream: Arc<UnixStream>,
    output: watch::Sender<Output>,
    writer: Mutex<Option<Writer>>,
}

vdpa::opaque_debug!(Console);

impl Drop for Console {
    fn drop(&mut self) {
        // The process sees the end now, so that it accepts the next connection.
        let _ = rustix::net::shutdown(&*self.stream, Shutdown::Both);
    }
}

impl Console {
    async fn connect(socket: &Path) -> io::Result<Arc<Self>> {
        let console = Self {
            stream: Arc::new(connect_directly(socket).await?),
            output: watch::Sender::default(),
            writer: Mutex::default(),
        };
        tokio::spawn(receive(console.stream.clone(), console.output.clone()));
        Ok(Arc::new(console))
    }

    /// Its output, and the position at which a new client begins.
    pub(crate) fn output(&self, history: bool) -> (watch::Receiver<Output>, u64) {
        let output = self.output.subscribe();
        let position = {
            let output = output.borrow();
            let kept = if history { HISTORY } else { 0 };
            output.end.saturating_sub(kept).max(output.begin())
        };
        (output, position)
    }

    /// Makes the client `by` the one that writes. It loses this right when another client takes it:
    /// the receiver gets that client's name. It returns the right by dropping the receiver.
    ///
    /// # Errors
    /// Another client writes, and `take` is false.
    pub(crate) fn claim(&self, by: &str, take: bool) -> Result<oneshot::Receiver<String>, Error> {
        let mut writer = self.writer.lock();
        let held = writer.take().filter(|held| !held.taken.is_closed());
        match held {
            Some(held) if !take => {
                let message = format!("{} writes to this console", held.by);
                *writer = Some(held);
                return Err(Error::conflict("console_in_use", message).hint(
                    "GET /v1/vms/{name}/console?read_only=true shows it; ?take=true disconnects \
                     the other client",
                ));
            }
            Some(held) => {
                // An error means that it has left meanwhile.
                let _ = held.taken.send(by.to_owned());
            }
            None => {}
        }
        let (taken, receiver) = oneshot::channel();
        let by = by.to_owned();
        *writer = Some(Writer { by, taken });
        Ok(receiver)
    }

    /// Sends input to the guest; waits while it has no room.
    ///
    /// # Errors
    /// The process has closed the connection.
    pub(crate) async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits until the last output of the process is there.
    async fn opened(&self) -> Result<(), Error> {
        let mut output = self.output.subscribe();
        let opened = output.wait_for(|output| output.phase != Phase::Opening);
        // This object has the sender, so it does not fail.
        let Ok(output) = opened.await else {
            return Ok(());
        };
        if output.is_closed() {
            let kept = output.kept.iter().copied().collect::<Vec<_>>();
            return Err(closed(&kept));
        }
        Ok(())
    }
}

/// Why a process closed a new connection.
fn closed(output: &[u8]) -> Error {
    if output.starts_with(REFUSAL) {
        let line = String::from_utf8_lossy(output);
        let message = line.trim_matches(|c: char| c.is_whitespace() || c == '[' || c == ']');
        let message = message.trim_start_matches("bellhop: ").to_owned();
        return Error::conflict("console_in_use", message);
    }
    let message = "the VM's process closed its console";
    Error::conflict("ending", message)
}

/// Receives the output of a process until either side closes the connection.
async fn receive(stream: Arc<UnixStream>, output: watch::Sender<Output>) {
    let mut buffer = vec![0; CHUNK];
    let end = Instant::now() + OPENING;
    let mut wait = FIRST;
    loop {
        let limit = end.min(Instant::now() + wait);
        match timeout_at(limit, read(&stream, &mut buffer)).await {
            Ok(Some(bytes)) => output.send_modify(|output| output.append(bytes)),
            Ok(None) => return output.send_modify(|output| output.phase = Phase::Closed),
            Err(_) => break,
        }
        wait = QUIET;
    }
    output.send_modify(|output| output.phase = Phase::Open);
    while let Some(bytes) = read(&stream, &mut buffer).await {
        output.send_modify(|output| output.append(bytes));
    }
    output.send_modify(|output| output.phase = Phase::Closed);
}

/// The next bytes; `None` at the end. Cancel-safe.
async fn read<'a>(stream: &UnixStream, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let count = loop {
        stream.readable().await.ok()?;
        match stream.try_read(buffer) {
            Ok(count) => break count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return None,
        }
    };
    buffer.get(..count).filter(|bytes| !bytes.is_empty())
}

/// The consoles of all VMs.
#[derive(Debug)]
pub(crate) struct Consoles {
    connections: tokio::sync::Mutex<BTreeMap<VmName, Weak<Console>>>,
    clients: Budget,
}

impl Default for Consoles {
    fn default() -> Self {
        Self {
            connections: tokio::sync::Mutex::default(),
            clients: Budget::new(CLIENTS_MAX),
        }
    }
}

impl Consoles {
    /// A place for one more client with this role.
    ///
    /// # Errors
    /// There are too many.
    pub(crate) fn place(&self, role: Role, read_only: bool) -> Result<BudgetPlace, Error> {
        // Readers leave places for clients that write, also those of their own role.
        let role = if read_only {
            role.min(Role::Operate)
        } else {
            role
        };
        self.clients.try_take(role).ok_or_else(|| {
            let message = format!("too many clients with the role {role} already use consoles");
            Error::unavailable("too_many_readers", message).hint("try again later")
        })
    }

    /// The number of clients.
    #[cfg(test)]
    pub(crate) fn clients(&self) -> usize {
        CLIENTS_MAX - self.clients.free()
    }

    /// The console of `vm`, whose process listens on `socket`.
    ///
    /// # Errors
    /// The process cannot be connected to, or another program on this host uses its socket.
    pub(crate) async fn attach(&self, vm: &VmName, socket: &Path) -> Result<Arc<Console>, Error> {
        let console = {
            let mut connections = self.connections.lock().await;
            connections.retain(|_, console| console.strong_count() > 0);
            let known = connections.get(vm).and_then(Weak::upgrade);
            let known = known.filter(|console| !console.output.borrow().is_closed());
            match known {
                Some(console) => console,
                None => {
                    let console = Console::connect(socket).await.map_err(|error| {
                        let message = format!("cannot connect to the console of {vm}");
                        Error::conflict("not_running", message).because(error)
                    })?;
                    connections.insert(vm.clone(), Arc::downgrade(&console));
                    console
                }
            }
        };
        console.opened().await?;
        Ok(console)
    }
}

#[cfg(test)]
mod tests;
