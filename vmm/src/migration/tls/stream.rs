//! A TLS connection whose calls end in time and can be repeated.
//!
//! Owns the session and its socket. It must not know what passes over it.
//!
//! ```text
//!   New ── first read or write ──> Handshaking ── certificates valid ──> Open ──> closed by drop
//!                                      └── else: Broken, calls report why <─┘
//! ```
//!
//! The handshake is part of its user's calls. So a peer that connects and sends nothing delays no
//! other work, and a destination waits a few seconds for it at most.
//!
//! A call that returns [`ErrorKind::WouldBlock`] has consumed no caller's bytes and lost no
//! received ones: those stay in the session's buffers until the next call. A write that returns a
//! number has accepted that many bytes. Those the socket has no room for leave with the next write,
//! read or flush.

use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustls::Connection as Session;

use crate::migration::channel::Connection;

/// Limit of the record bytes that wait for the socket: the amount one write accepts.
const UNSENT_MAX: usize = 256 << 10;
/// Size of a read from the socket, in bytes; the session alone would use 4096.
const READ_SIZE: usize = 64 << 10;
/// How long the destination waits for a peer to authenticate. Shorter than every timeout of the
/// source, which may have to wait for its turn.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);

/// Why a session ended. It arrives as the inner error of an [`io::Error`] of the kind
/// [`ErrorKind::InvalidData`].
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The peer has shown no acceptable certificate.
    #[error(
        "this host does not accept the other host's certificate: it must be valid now and from an \
         authority that this host has. The destination's must also be for the name or address in \
         `tcp:`"
    )]
    Certificate(#[source] rustls::Error),
    /// The peer has ended the session.
    #[error(
        "the other host does not continue with TLS; it may not accept this host's certificate, \
         which must be valid now and from an authority that the other host has"
    )]
    Ended(#[source] rustls::Error),
    /// The source has not shown a certificate in time.
    #[error(
        "the other host has not finished the TLS handshake within {} s",
        HANDSHAKE_PATIENCE.as_secs()
    )]
    Late,
    /// The received bytes are not TLS, or were changed on the way.
    #[error("the other host does not send TLS 1.3 for a migration; do both hosts use TLS?")]
    Protocol(#[source] rustls::Error),
}

impl From<rustls::Error> for SessionError {
    fn from(error: rustls::Error) -> Self {
        match error {
            rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented => {
                Self::Certificate(error)
            }
            rustls::Error::AlertReceived(_) => Self::Ended(error),
            _ => Self::Protocol(error),
        }
    }
}

/// The cause that ended a session.
#[derive(Debug, Clone)]
enum Cause {
    Late,
    Session(rustls::Error),
}

/// A TLS connection of either side.
pub struct TlsStream {
    session: Session,
    socket: BufReader<TcpStream>,
    /// How long a call may take; `None`: no limit.
    timeout: Option<Duration>,
    /// When the handshake must be complete; at the source its user's timeout suffices.
    known_by: Option<Instant>,
    /// Why the session has ended.
    broken: Option<Cause>,
}

vdpa::opaque_debug! {
    TlsStream, this =>
    socket: this.socket.get_ref(),
    handshaking: this.session.is_handshaking(),
    broken: this.broken,
}

/// When a call has to return.
#[derive(Debug, Clone, Copy)]
struct Deadline(Option<Instant>);

impl Deadline {
    /// A peer that sends or accepts a byte now and then must not hold a call longer than a silent
    /// one.
    fn check(self) -> io::Result<()> {
        match self.0 {
            Some(end) if Instant::now() >= end => Err(ErrorKind::WouldBlock.into()),
            _ => Ok(()),
        }
    }
}

impl TlsStream {
    pub(super) fn new(mut session: Session, socket: TcpStream) -> Self {
        session.set_buffer_limit(Some(UNSENT_MAX));
        let known_by = match &session {
            Session::Client(_) => None,
            Session::Server(_) => Some(Instant::now() + HANDSHAKE_PATIENCE),
        };
        Self {
            session,
            known_by,
            socket: BufReader::with_capacity(READ_SIZE, socket),
            timeout: None,
            broken: None,
        }
    }

    fn deadline(&self) -> Deadline {
        Deadline(self.timeout.map(|timeout| Instant::now() + timeout))
    }

    /// # Errors
    /// [`SessionError`], if the session has ended.
    fn check(&self) -> io::Result<()> {
        let error = match &self.broken {
            None => return Ok(()),
            Some(Cause::Late) => SessionError::Late,
            Some(Cause::Session(error)) => error.clone().into(),
        };
        Err(io::Error::new(ErrorKind::InvalidData, error))
    }

    /// Runs the handshake until both sides have authenticated. No user data is sent before.
    fn handshake(&mut self, deadline: Deadline) -> io::Result<()> {
        self.check()?;
        while self.session.is_handshaking() {
            if self.known_by.is_some_and(|end| Instant::now() >= end) {
                self.broken = Some(Cause::Late);
                return self.check();
            }
            self.send(deadline)?;
            if !self.receive()? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            if self.session.is_handshaking() {
                deadline.check()?;
            }
        }
        Ok(())
    }

    /// Sends the pending records. If that fails for good, returns the peer's reason if it gave one.
    fn send(&mut self, deadline: Deadline) -> io::Result<()> {
        self.push(deadline).map_err(|error| {
            if passes(&error) {
                error
            } else {
                self.last_words(error)
            }
        })
    }

    fn push(&mut self, deadline: Deadline) -> io::Result<()> {
        while self.session.wants_write() {
            if self.session.write_tls(self.socket.get_mut())? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            if self.session.wants_write() {
                deadline.check()?;
            }
        }
        Ok(())
    }

    /// Receives at most a record or two; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        let count = self.session.read_tls(&mut self.socket)?;
        if let Err(error) = self.session.process_new_packets() {
            self.broken = Some(Cause::Session(error));
            // Send the alert to the peer, if possible.
            let _ = self.session.write_tls(self.socket.get_mut());
            self.check()?;
        }
        Ok(count > 0)
    }

    /// A peer that has hung up may have sent its reason before. User data from it stays readable.
    fn last_words(&mut self, error: io::Error) -> io::Error {
        while let Ok(true) = self.receive() {}
        self.check().err().unwrap_or(error)
    }
}

/// Whether the call can be repeated after this error.
fn passes(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

impl Read for TlsStream {
    /// [`ErrorKind::UnexpectedEof`] if the peer hung up without a TLS `close_notify`.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let deadline = self.deadline();
        // Data received before the session broke is still valid.
        if self.broken.is_none() {
            self.handshake(deadline)?;
        }
        loop {
            match self.session.reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return read,
            }
            self.check()?;
            // A peer that accepts nothing any more may still send.
            let sent = self.push(deadline);
            match self.receive() {
                // At the end the reader reports which kind of end it is.
                Ok(false) => {}
                Ok(true) => deadline.check()?,
                Err(error) if passes(&error) => {
                    return Err(sent.err().filter(|sent| !passes(sent)).unwrap_or(error));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Write for TlsStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let deadline = self.deadline();
        self.handshake(deadline)?;
        self.send(deadline)?;
        let count = self.session.writer().write_vectored(slices)?;
        match self.send(deadline) {
            Err(error) if !passes(&error) => Err(error),
            // The session has accepted these bytes, wherever they are now.
            _ => Ok(count),
        }
    }

    /// Returns when the socket has accepted all written bytes.
    fn flush(&mut self) -> io::Result<()> {
        self.check()?;
        self.send(self.deadline())
    }
}

impl Connection for TlsStream {
    fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.timeout = Some(timeout);
        self.socket.get_mut().set_timeout(timeout)
    }
}

#[cfg(test)]
impl TlsStream {
    /// Lets the handshake deadline pass.
    pub(super) fn be_late(&mut self) {
        self.known_by = Some(Instant::now());
    }

    pub(super) fn socket(&self) -> &TcpStream {
        self.socket.get_ref()
    }
}

impl Drop for TlsStream {
    /// Sends `close_notify` if that does not block.
    fn drop(&mut self) {
        // The peer could not decode it after a partial record.
        if self.session.is_handshaking() || self.session.wants_write() || self.broken.is_some() {
            return;
        }
        self.session.send_close_notify();
        let socket = self.socket.get_mut();
        if let Err(error) = socket
            .set_nonblocking(true)
            .and_then(|()| self.session.write_tls(socket))
        {
            tracing::debug!(%error, "cannot tell the other host that the connection ends");
        }
    }
}
