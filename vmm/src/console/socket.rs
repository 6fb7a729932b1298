//! The serial console on a Unix socket, with a log: for machines without a terminal.
//!
//! Owns the socket, the log file and the one client. It must not know the serial port, nor how a
//! client interprets the bytes: they pass unchanged in both directions, without an escape.
//! ```text
//!                   +──> log file, always               (as fast as the disk)
//!   vCPU ─> History ┤
//!                   +──> the client, if there is one    (as fast as it reads)
//!   serial port <── InputPump <── the client
//! ```
//! **No client stalls the guest.** Its output goes into the [`History`]; from there the vmm thread
//! forwards it. A reader that lags behind by more than the history's length loses the bytes
//! between, and learns how many. Input is never lost while its client stays connected. Bytes that
//! the guest does not read wait in the pump, and then in the client's socket.
//!
//! **One client at a time**, because two clients typing into one login would be a mistake. A second
//! one receives a line with the holder's process ID, and is disconnected. A new client first gets
//! the last 64 KiB of output.
//!
//! ```text
//!             connects: gets the last 64 KiB
//!   no client ───────────────────────────────> client <──+ another one connects: receives the
//!       ^                                        │   │   │ holder's process ID, is disconnected
//!       │  closes, or a write to it fails        │   +───+
//!       +────────────────────────────────────────+
//!          one that only stops writing stays, until it closes
//! ```
//! Connections wait in the kernel until a machine runs.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use super::history::{History, HistoryWriter};
use super::log_file::LogFile;
use super::{ConsoleInput, ConsoleRead, InputPump};
use crate::event_loop::{EventLoop, Token};
use crate::http::socket::{self, SocketFile};
use crate::rotating_file::SIZE_MAX;
use crate::{Error, ErrorKind};

/// Bytes of earlier output that a new client gets.
const REPLAY: u64 = 64 * 1024;
/// Bytes forwarded at once.
const CHUNK: usize = 4096;
/// Chunks forwarded before other events get their turn.
const CHUNKS_MAX: usize = 64;

struct Inner {
    listener: UnixListener,
    _file: SocketFile,
    log: Option<Mutex<LogFile>>,
    history: Arc<History>,
}

/// A serial console on a Unix socket, mode 0600. Dropping the last clone removes its file. See the
/// module.
#[derive(Clone)]
pub struct ConsoleSocket(Arc<Inner>);

vdpa::opaque_debug!(ConsoleSocket, this => log: this.0.log);

/// Bytes that a console on a socket has lost since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConsoleLoss {
    /// Missing in the log: the write failed.
    pub log: u64,
    /// Missing at clients: they did not read.
    pub clients: u64,
}

impl ConsoleSocket {
    /// Listens on `path`, and writes all output to `log` as well. The log has at most 16 MiB; an
    /// older one beside it has a name that ends in `.1`. Both have mode 0600.
    ///
    /// # Errors
    /// A socket that a process serves is left alone, and so is a file that is neither a socket nor
    /// a regular file.
    pub fn new(path: &Path, log: Option<&Path>) -> Result<Self, Error> {
        Self::with_limit(path, log, SIZE_MAX)
    }

    fn with_limit(path: &Path, log: Option<&Path>, limit: u64) -> Result<Self, Error> {
        let log = log
            .map(|path| LogFile::open(path, limit))
            .transpose()?
            .map(Mutex::new);
        let (listener, file) =
            socket::listen(path).map_err(|source| Error::transparent(ErrorKind::Host, source))?;
        Ok(Self(Arc::new(Inner {
            listener,
            _file: file,
            log,
            history: History::new()
                .map_err(|source| Error::host("cannot create the console").because(source))?,
        })))
    }

    /// The writer for the serial port: it accepts everything at once.
    pub(crate) fn writer(&self) -> Box<dyn io::Write + Send> {
        Box::new(HistoryWriter(self.0.history.clone()))
    }

    fn log(&self) -> Option<MutexGuard<'_, LogFile>> {
        self.0.log.as_ref().map(Mutex::lock)
    }
}

/// The client's writing half, for the [`InputPump`].
struct ClientInput(OwnedFd);

impl AsFd for ClientInput {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ConsoleInput for ClientInput {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead> {
        // The kernel closes passed descriptors: the call leaves no room for them.
        let (count, _) = rustix::net::recv(&self.0, buffer, RecvFlags::DONTWAIT)?;
        Ok(match count {
            0 => ConsoleRead::Closed,
            count => ConsoleRead::Bytes(count),
        })
    }
}

/// The connected client.
struct Client {
    stream: UnixStream,
    pid: Option<i32>,
    /// Its position in the history.
    position: u64,
    /// Bellhop's own message to it, sent between the guest's bytes.
    note: Vec<u8>,
    /// Whether the event loop reports when it is writable.
    awaited: bool,
}

impl Client {
    /// Whether the client has closed its end for good.
    fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::empty())];
        let gone = PollFlags::HUP | PollFlags::ERR;
        poll(&mut fds, Some(&Timespec::default())).is_ok()
            && fds.iter().any(|fd| fd.revents().intersects(gone))
    }

    /// Sends as much as fits without blocking, and returns the count.
    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(&self.stream, bytes, flags) {
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            sent => Ok(sent?),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The client sees the end now, although the pump has a descriptor of its own.
        let _ = rustix::net::shutdown(&self.stream, Shutdown::Both);
    }
}

/// The machine's side of a [`ConsoleSocket`], in the vmm thread.
pub(crate) struct SocketOutput {
    socket: ConsoleSocket,
    client: Option<Client>,
    logged: u64,
    lost_by_clients: u64,
    /// Whether the event loop reports connections.
    listening: bool,
}

impl SocketOutput {
    /// Registers the console with the loop.
    ///
    /// # Errors
    /// An error of epoll.
    pub(crate) fn new(socket: ConsoleSocket, events: &EventLoop) -> io::Result<Self> {
        let inner = &socket.0;
        events.add(inner.history.written().as_raw_fd(), Token::ConsoleOutput)?;
        events.add(inner.listener.as_raw_fd(), Token::ConsoleConnection)?;
        let logged = inner.history.end();
        Ok(Self {
            socket,
            client: None,
            logged,
            lost_by_clients: 0,
            listening: true,
        })
    }

    /// The losses so far.
    pub(crate) fn loss(&self) -> ConsoleLoss {
        ConsoleLoss {
            log: self.socket.log().map_or(0, |log| log.lost()),
            clients: self.lost_by_clients,
        }
    }

    /// For [`Token::ConsoleConnection`]: accepts one connection.
    pub(crate) fn connection(&mut self, input: &mut InputPump, events: &EventLoop) {
        let stream = match self.socket.0.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if super::is_transient(&error) => return,
            Err(error) => {
                // Most likely no descriptor is left. The connection stays pending, and would wake
                // this thread forever.
                tracing::warn!(%error, "cannot accept a connection to the console");
                self.listening = events.remove(self.socket.0.listener.as_raw_fd()).is_err();
                return;
            }
        };
        if let Some(client) = &self.client {
            if !client.is_gone() {
                return refuse(&stream, client.pid);
            }
            self.disconnect(input, events);
        }
        if let Err(error) = self.connect(stream, input, events) {
            tracing::warn!(%error, "cannot serve a client of the console");
        }
    }

    fn connect(
        &mut self,
        stream: UnixStream,
        input: &mut InputPump,
        events: &EventLoop,
    ) -> io::Result<()> {
        let keyboard = ClientInput(stream.try_clone()?.into());
        let end = self.socket.0.history.end();
        let pid = peer(&stream);
        input.attach(Box::new(keyboard), events)?;
        tracing::info!(pid, "a client has the console");
        self.client = Some(Client {
            stream,
            pid,
            position: end.saturating_sub(REPLAY),
            note: Vec::new(),
            awaited: false,
        });
        self.hand_on(true, input, events);
        Ok(())
    }

    fn disconnect(&mut self, input: &mut InputPump, events: &EventLoop) {
        let Some(client) = self.client.take() else {
            return;
        };
        input.detach(events);
        if client.awaited
            && let Err(error) = events.remove(client.stream.as_raw_fd())
        {
            tracing::warn!(%error, "cannot stop waiting for a client of the console");
        }
        tracing::info!(pid = client.pid, "the console has no client");
        drop(client);
        if !self.listening {
            // A descriptor is free again.
            let listener = self.socket.0.listener.as_raw_fd();
            self.listening = events.add(listener, Token::ConsoleConnection).is_ok();
        }
    }

    /// For [`Token::ConsoleOutput`]: the guest has written output.
    pub(crate) fn output(&mut self, input: &mut InputPump, events: &EventLoop) {
        // A client that is not ready is written to when it becomes writable.
        let ready = self.client.as_ref().is_some_and(|client| !client.awaited);
        self.hand_on(ready, input, events);
    }

    /// For [`Token::ConsoleWritable`]: the client is writable.
    pub(crate) fn writable(&mut self, input: &mut InputPump, events: &EventLoop) {
        self.hand_on(true, input, events);
    }

    /// The one place that acknowledges: it forwards the output that an event announced to the log
    /// and the client.
    fn hand_on(&mut self, to_client: bool, input: &mut InputPump, events: &EventLoop) {
        let history = self.socket.0.history.clone();
        if self.socket.0.log.is_none() && !to_client {
            // A client that connects later reads the history itself: until then the guest wakes no
            // thread.
            return history.ignore();
        }
        history.acknowledge();
        if let Some(mut log) = self.socket.log() {
            let mut buffer = [0; CHUNK];
            for _ in 0..CHUNKS_MAX {
                let chunk = history.read(self.logged, &mut buffer);
                self.logged = chunk.next;
                if chunk.lost > 0 {
                    log.lose(chunk.lost);
                }
                match buffer.get(..chunk.count) {
                    Some(bytes) if !bytes.is_empty() => log.write(bytes),
                    _ => break,
                }
            }
        }
        if to_client {
            self.write_client(input, events);
        }
        if self.socket.0.log.is_some() && self.logged < history.end() {
            // Other events get their turn first.
            let _ = history.written().write(1);
        }
    }

    /// After [`Token::ConsoleInput`]: removes a client that has closed.
    pub(crate) fn input_read(&mut self, input: &mut InputPump, events: &EventLoop) {
        if input.is_closed() && self.client.as_ref().is_some_and(Client::is_gone) {
            self.disconnect(input, events);
        }
    }

    fn write_client(&mut self, input: &mut InputPump, events: &EventLoop) {
        let written = self.try_write_client(events);
        if let Err(error) = written {
            tracing::debug!(%error, "the console's client has left");
            // Input that it sent before is still to be read; without that, disconnect it now.
            if input.is_closed() {
                self.disconnect(input, events);
            } else if let Some(client) = &mut self.client {
                client.position = u64::MAX;
                client.note.clear();
                if std::mem::take(&mut client.awaited) {
                    let _ = events.remove(client.stream.as_raw_fd());
                }
            }
        }
    }

    fn try_write_client(&mut self, events: &EventLoop) -> io::Result<()> {
        let Some(client) = &mut self.client else {
            return Ok(());
        };
        let history = &self.socket.0.history;
        let mut buffer = [0; CHUNK];
        let mut more = true;
        for _ in 0..CHUNKS_MAX {
            if !client.note.is_empty() {
                let sent = client.send(&client.note)?;
                client.note.drain(..sent.min(client.note.len()));
                if !client.note.is_empty() {
                    break;
                }
            }
            let chunk = history.read(client.position, &mut buffer);
            if chunk.lost > 0 {
                self.lost_by_clients = self.lost_by_clients.saturating_add(chunk.lost);
                let note = format!(
                    "\r\n[bellhop: {} bytes of output are missing here]\r\n",
                    chunk.lost
                );
                client.note = note.into_bytes();
                client.position = client.position.saturating_add(chunk.lost);
                continue;
            }
            let bytes = buffer.get(..chunk.count).unwrap_or_default();
            if bytes.is_empty() {
                more = false;
                break;
            }
            let sent = client.send(bytes)?;
            client.position = client.position.saturating_add(sent as u64);
            if sent < bytes.len() {
                break;
            }
        }
        let fd = client.stream.as_raw_fd();
        match (client.awaited, more) {
            (false, true) => events.add_writable(fd, Token::ConsoleWritable)?,
            (true, false) => events.remove(fd)?,
            (false, false) | (true, true) => {}
        }
        client.awaited = more;
        Ok(())
    }

    /// Ends the machine's console: writes its last output to the log, and to the client as far as
    /// the client reads it within `limit`.
    pub(crate) fn finish(&mut self, input: &mut InputPump, events: &EventLoop, limit: Duration) {
        let start = Instant::now();
        while self.logged < self.socket.0.history.end() && self.socket.0.log.is_some() {
            self.hand_on(false, input, events);
        }
        self.hand_on(true, input, events);
        while let Some(client) = self.client.as_ref().filter(|client| client.awaited) {
            let left = limit.saturating_sub(start.elapsed());
            let left = Timespec::try_from(left).unwrap_or_default();
            let mut fds = [PollFd::new(&client.stream, PollFlags::OUT)];
            if !matches!(poll(&mut fds, Some(&left)), Ok(1..)) {
                tracing::warn!("the console's client is too slow: dropping the last output");
                return;
            }
            self.write_client(input, events);
        }
    }
}

vdpa::opaque_debug! {
    SocketOutput, this =>
    client: this.client.as_ref().map(|client| client.pid),
    loss: this.loss(),
}

/// The process at the other end; `None` if it is not visible from here (another PID namespace).
fn peer(stream: &UnixStream) -> Option<i32> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut size = libc::socklen_t::try_from(size_of_val(&peer)).ok()?;
    // SAFETY: needed because the standard library does not offer this, and a PID of 0 is no valid
    // value of rustix's type for it. The kernel writes at most `size` bytes, the size of `peer`,
    // and any bytes are a valid `ucred`; `stream` is open for the whole call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    (result == 0 && peer.pid > 0).then_some(peer.pid)
}

/// Tells a second client which process has the console. Dropping `stream` disconnects it.
fn refuse(stream: &UnixStream, holder: Option<i32>) {
    let holder = holder.map_or_else(
        || "another process".to_owned(),
        |pid| format!("process {pid}"),
    );
    let line = format!("[bellhop: {holder} uses this console; try again when it has left]\r\n");
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // An empty socket has room for one line; a failure does not matter.
    let _ = rustix::net::send(stream, line.as_bytes(), flags);
}

#[cfg(test)]
mod tests;
