//! The endpoint of a migration: a Unix socket of this host, or TCP, with or without TLS.
//!
//! Owns addresses, sockets and connection timeouts. It must not know what passes over a connection.
//! [`super::tls`] decides who may connect over TCP, and the caller whether TLS is required.
//!
//! ```text
//!   destination   Listener::bind ──> accept, repeatedly: WouldBlock if no peer connects for 50 ms
//!   source        connect
//! ```

use std::io::{self, ErrorKind as IoErrorKind, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use super::channel::Connection;
use super::tls::{Tls, TlsStream};
use crate::http::socket::{self, SocketFile};
use crate::{Error, ErrorKind};
pub use bellhop_api::endpoint::{BadEndpoint, Endpoint};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long [`Listener::accept`] waits.
const MOMENT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// Certificates for a socket whose mode already restricts access.
fn no_tls_on_unix(path: &Path) -> Error {
    Error::tls(format!(
        "unix:{} does not leave this host, so there is no TLS: leave the certificates out, or use \
         tcp:HOST:PORT",
        path.display()
    ))
}

/// Connects to `endpoint`, and waits up to `patience` for each of its addresses.
///
/// With `tls`, the first read or write of the stream begins the handshake. It fails unless the peer
/// has a certificate for that host.
///
/// # Errors
/// `NoDestination` or `BadTls`.
pub fn connect(
    endpoint: &Endpoint,
    patience: Duration,
    tls: Option<&Tls>,
) -> Result<Stream, Error> {
    let failed = |source: io::Error| {
        let message =
            format!("cannot connect to {endpoint}; does a machine wait there for a migration?");
        Error::new(ErrorKind::NoDestination, message).because(source)
    };
    match (endpoint, tls) {
        (Endpoint::Unix(path), None) => UnixStream::connect(path).map(Stream::Unix).map_err(failed),
        (Endpoint::Unix(path), Some(_)) => Err(no_tls_on_unix(path)),
        (Endpoint::Tcp { host, port }, tls) => {
            let socket = connect_tcp(host, *port, patience).map_err(failed)?;
            Ok(match tls {
                Some(tls) => Stream::Tls(Box::new(tls.connect(host, socket)?)),
                None => Stream::Tcp(socket),
            })
        }
    }
}

fn connect_tcp(host: &str, port: u16, patience: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(IoErrorKind::NotFound, "the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, patience) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A connection of any kind.
#[derive(Debug)]
pub enum Stream {
    /// On this host.
    Unix(UnixStream),
    /// Over a network.
    Tcp(TcpStream),
    /// Over a network, encrypted and authenticated.
    Tls(Box<TlsStream>),
}

impl Stream {
    fn any(&mut self) -> &mut dyn Connection {
        match self {
            Self::Unix(stream) => stream,
            Self::Tcp(stream) => stream,
            Self::Tls(stream) => &mut **stream,
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.any().read(into)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.any().write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.any().write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.any().flush()
    }
}

impl Connection for Stream {
    fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.any().set_timeout(timeout)
    }
}

/// Linux returns errors of the pending connection here (accept(2)). A peer that opens and breaks
/// connections must not end the wait for others.
fn of_the_listener(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(
            libc::ECONNABORTED
            | libc::ECONNRESET
            | libc::EPROTO
            | libc::EPERM
            | libc::ENETDOWN
            | libc::ENOPROTOOPT
            | libc::EHOSTDOWN
            | libc::ENONET
            | libc::EHOSTUNREACH
            | libc::EOPNOTSUPP
            | libc::ENETUNREACH,
        ) => IoErrorKind::WouldBlock.into(),
        _ => error,
    }
}

/// A socket that waits for a source. Dropping it removes its file, if it has one.
#[derive(Debug)]
pub struct Listener(Kind);

#[derive(Debug)]
enum Kind {
    Unix {
        listener: UnixListener,
        _file: SocketFile,
    },
    Tcp {
        listener: TcpListener,
        tls: Option<Tls>,
    },
}

impl Listener {
    /// Listens. A Unix socket has the mode 0600. With `tls`, the peer must show a certificate.
    ///
    /// # Errors
    /// `CannotListen` or `BadTls`.
    pub fn bind(endpoint: &Endpoint, tls: Option<Tls>) -> Result<Self, Error> {
        Ok(Self(match endpoint {
            Endpoint::Unix(path) if tls.is_some() => {
                return Err(no_tls_on_unix(path));
            }
            Endpoint::Unix(path) => {
                let (listener, file) = socket::listen(path)
                    .map_err(|error| Error::transparent(ErrorKind::CannotListen, error))?;
                Kind::Unix {
                    listener,
                    _file: file,
                }
            }
            Endpoint::Tcp { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port)).and_then(|listener| {
                    listener.set_nonblocking(true)?;
                    Ok(listener)
                });
                let listener = listener.map_err(|source| {
                    let message = format!("cannot listen on {endpoint}");
                    Error::new(ErrorKind::CannotListen, message).because(source)
                })?;
                Kind::Tcp { listener, tls }
            }
        }))
    }

    /// Returns the next connection. In TLS, its first read or write begins the handshake: the peer
    /// is unauthenticated until a read has returned a byte.
    ///
    /// # Errors
    /// [`IoErrorKind::WouldBlock`] if no connection arrives for 50 ms, or if it is closed again;
    /// the kernel's error.
    pub fn accept(&self) -> io::Result<Stream> {
        let fd: BorrowedFd<'_> = match &self.0 {
            Kind::Unix { listener, .. } => listener.as_fd(),
            Kind::Tcp { listener, .. } => listener.as_fd(),
        };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&MOMENT)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match &self.0 {
            Kind::Unix { listener, .. } => {
                let (stream, _) = listener.accept().map_err(of_the_listener)?;
                stream.set_nonblocking(false)?;
                Ok(Stream::Unix(stream))
            }
            Kind::Tcp { listener, tls } => {
                let (stream, from) = listener.accept().map_err(of_the_listener)?;
                stream.set_nonblocking(false)?;
                tracing::debug!(%from, "a connection for a migration");
                match tls {
                    Some(tls) => {
                        let stream = tls.accept(stream).map_err(io::Error::other)?;
                        Ok(Stream::Tls(Box::new(stream)))
                    }
                    None => Ok(Stream::Tcp(stream)),
                }
            }
        }
    }
}

#[cfg(test)]
impl Listener {
    /// Its address, with the port that the kernel has chosen for port 0.
    pub(super) fn endpoint(&self) -> Endpoint {
        match &self.0 {
            Kind::Unix { listener, .. } => {
                let address = listener.local_addr().unwrap();
                Endpoint::Unix(address.as_pathname().unwrap().to_owned())
            }
            Kind::Tcp { listener, .. } => {
                let address = listener.local_addr().unwrap();
                Endpoint::Tcp {
                    host: address.ip().to_string(),
                    port: address.port(),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_broke_before_it_was_accepted_ends_no_wait() {
        for errno in [libc::ECONNABORTED, libc::EPROTO, libc::ENETUNREACH] {
            let error = of_the_listener(io::Error::from_raw_os_error(errno));
            assert_eq!(error.kind(), IoErrorKind::WouldBlock, "{errno}");
        }
        let error = of_the_listener(io::Error::from_raw_os_error(libc::EMFILE));
        assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
    }

    #[test]
    fn a_failed_connection_names_its_address() {
        let nowhere: Endpoint = "unix:/nonexistent/socket".parse().unwrap();
        let error = connect(&nowhere, Duration::from_secs(1), None).unwrap_err();
        assert!(error.to_string().contains("unix:/nonexistent/socket"));
        assert!(Listener::bind(&nowhere, None).is_err());
    }

    #[test]
    fn a_listener_waits_for_a_moment_at_most() {
        let path = std::env::temp_dir().join(format!("bellhop-endpoint-{}", std::process::id()));
        let endpoint = Endpoint::Unix(path.clone());
        let listener = Listener::bind(&endpoint, None).unwrap();
        assert_eq!(
            listener.accept().unwrap_err().kind(),
            IoErrorKind::WouldBlock
        );
        let mut source = connect(&endpoint, Duration::from_secs(1), None).unwrap();
        let mut arrived = listener.accept().unwrap();
        source.write_all(b"hello").unwrap();
        let mut read = [0; 5];
        arrived.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"hello");
        drop(listener);
        assert!(!path.exists());
    }
}
