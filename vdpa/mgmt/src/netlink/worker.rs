//! The thread that sends netlink requests.
//!
//! The kernel carries a request out inside `sendto`. A vDPA command sleeps there uninterruptibly
//! while another one holds the lock, and `dev del` while the device's file is open. So the caller
//! waits elsewhere, for a limited time:
//!
//! ```text
//!   queued ──(thread takes it)──> sent ──(answer)──> answered
//!     └──(caller gives up)──> withdrawn: never sent
//!                            sent + caller gives up: outcome unknown
//! ```
//!
//! The thread ends when its [`Worker`] is dropped and the current request, if there is one, has
//! returned.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::error::CallError;
use super::exchange::{Answer, Exchange, Progress};
use super::message::{Mode, Protocol, Request};
use super::socket::Socket;
use crate::error::Error;

/// Maximum attempts for an inconsistent dump.
const DUMP_ATTEMPTS: u32 = 16;

type Outcome = Result<Answer, CallError>;

struct Job {
    request: Request,
    /// Set by the first of both: the thread when it begins, the caller when it gives up.
    taken: Arc<AtomicBool>,
    answer: mpsc::SyncSender<Outcome>,
}

/// The handle of the thread.
#[derive(Debug)]
pub(crate) struct Worker {
    jobs: mpsc::Sender<Job>,
    patience: Duration,
}

impl Worker {
    /// Starts the thread, which opens a socket. `patience` is the maximum time for a call.
    pub(crate) fn start(protocol: Protocol, patience: Duration) -> Result<Self, Error> {
        Self::start_after(protocol, patience, || Ok(()))
    }

    /// As [`Self::start`], but the thread first runs `prepare`, for instance to enter a network
    /// namespace for all its sockets.
    pub(crate) fn start_after(
        protocol: Protocol,
        patience: Duration,
        prepare: impl FnOnce() -> Result<(), Error> + Send + 'static,
    ) -> Result<Self, Error> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (ready, readiness) = mpsc::sync_channel(1);
        let open = move || {
            prepare()?;
            Socket::open(protocol, patience).map_err(Error::netlink)
        };
        thread::Builder::new()
            .name("netlink".to_owned())
            .spawn(move || {
                let (socket, opened) = match open() {
                    Ok(socket) => (Some(socket), Ok(())),
                    Err(error) => (None, Err(error)),
                };
                let begun = socket.is_some();
                if ready.send(opened).is_err() || !begun {
                    return;
                }
                let mut link = Link {
                    protocol,
                    socket,
                    patience,
                    sequence: 0,
                };
                for job in queue {
                    if !job.taken.swap(true, Ordering::AcqRel) {
                        // The caller may have given up, and then receives nothing.
                        let _ = job.answer.send(link.call(&job.request));
                    }
                }
            })
            .map_err(Error::netlink)?;
        readiness.recv().map_err(|_| Error::netlink(ended()))??;
        Ok(Self { jobs, patience })
    }

    /// Maximum time for a call.
    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// Sends a request and waits for its whole answer.
    pub(crate) fn call(&self, request: Request) -> Outcome {
        let gone = || CallError::Socket(ended());
        let taken = Arc::new(AtomicBool::new(false));
        let (answer, answered) = mpsc::sync_channel(1);
        let job = Job {
            request,
            taken: Arc::clone(&taken),
            answer,
        };
        self.jobs.send(job).map_err(|_| gone())?;
        match answered.recv_timeout(self.patience) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                let sent = taken.swap(true, Ordering::AcqRel);
                Err(CallError::Timeout { sent })
            }
        }
    }
}

fn ended() -> io::Error {
    io::Error::other("the netlink thread has ended")
}

/// The thread's state.
struct Link {
    protocol: Protocol,
    /// `None` after a failed exchange: the socket's remaining content is unknown.
    socket: Option<Socket>,
    patience: Duration,
    sequence: u32,
}

impl Link {
    fn call(&mut self, request: &Request) -> Outcome {
        for _ in 0..DUMP_ATTEMPTS {
            match self.attempt(request) {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => {}
                // Lost to a full receive buffer. Only a dump may be repeated safely.
                Err(CallError::Socket(error))
                    if error.raw_os_error() == Some(libc::ENOBUFS)
                        && request.mode == Mode::Dump => {}
                Err(error) => return Err(error),
            }
        }
        Err(CallError::Interrupted)
    }

    /// One exchange; `None` if it was interrupted.
    fn attempt(&mut self, request: &Request) -> Result<Option<Answer>, CallError> {
        let mut socket = match self.socket.take() {
            Some(socket) => socket,
            None => Socket::open(self.protocol, self.patience).map_err(CallError::Socket)?,
        };
        self.sequence = self.sequence.wrapping_add(1).max(1);
        let mut exchange = Exchange::new(self.sequence, request.mode, self.protocol);
        socket
            .send(&request.bytes(self.sequence))
            .map_err(CallError::Socket)?;
        let outcome = loop {
            let datagram = socket.receive().map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => CallError::Timeout { sent: true },
                _ => CallError::Socket(error),
            })?;
            match exchange.feed(datagram) {
                Ok(Progress::Waiting) => {}
                Ok(Progress::Complete) => break Ok(Some(exchange.answer())),
                Ok(Progress::Interrupted) => break Ok(None),
                Err(error @ CallError::Refused(_)) => break Err(error),
                // Drop the socket: the rest of this answer is in it.
                Err(error) => return Err(error),
            }
        };
        self.socket = Some(socket);
        outcome
    }
}
