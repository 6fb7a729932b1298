//! The endpoint of a migration: a Unix socket of this host, or TCP, with or without TLS.
//!
//! Owns addresses, sockets and connection timeouts. It must not know what passes over a connection.
//! [`super::tls`] decides who may connect over TCP, and the caller whether TLS is required.
//!
//! ```text
//!   destination   Listener::bind or adopt ──> accept, repeatedly: WouldBlock if no peer connects
//!                                             for 50 ms
//!   source        Route::connect
//! ```

use std::io::{self, ErrorKind as IoErrorKind, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use super::channel::Connection;
use super::connector::Connector;
use super::tls::{Tls, TlsStream};
use crate::http::socket::{self, SocketFile};
use crate::{Error, ErrorKind};
pub use bellhop_api::endpoint::{BadEndpoint, Endpoint};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketType, sockopt};

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

/// How a source reaches its destination.
#[derive(Debug)]
pub struct Route {
    /// The address of the destination.
    pub endpoint: Endpoint,
    /// The certificates, over TCP with TLS.
    pub tls: Option<Tls>,
    /// Another process opens the connections.
    pub connector: Option<Connector>,
}

impl Route {
    /// Opens a connection, and waits up to `patience` for each address of the endpoint.
    ///
    /// With TLS, the first read or write of the stream begins the handshake. It fails unless the
    /// peer has a certificate for that host.
    ///
    /// # Errors
    /// `NoDestination` or `BadTls`.
    pub fn connect(&self, patience: Duration) -> Result<Stream, Error> {
        let (endpoint, tls) = (&self.endpoint, self.tls.as_ref());
        if let (Endpoint::Unix(path), Some(_)) = (endpoint, tls) {
            return Err(no_tls_on_unix(path));
        }
        let socket = match &self.connector {
            Some(connector) => connector.connection(),
            None => open(endpoint, patience),
        };
        let socket = socket.map_err(|source| {
            let message =
                format!("cannot connect to {endpoint}; does a machine wait there for a migration?");
            Error::new(ErrorKind::NoDestination, message).because(source)
        })?;
        Ok(match (endpoint, tls) {
            (Endpoint::Unix(_), _) => Stream::Unix(socket.into()),
            (Endpoint::Tcp { .. }, None) => Stream::Tcp(socket.into()),
            (Endpoint::Tcp { host, .. }, Some(tls)) => {
                Stream::Tls(Box::new(tls.connect(host, socket.into())?))
            }
        })
    }
}

/// Opens a socket that is connected to `endpoint`.
pub(super) fn open(endpoint: &Endpoint, patience: Duration) -> io::Result<OwnedFd> {
    match endpoint {
        Endpoint::Unix(path) => UnixStream::connect(path).map(OwnedFd::from),
        Endpoint::Tcp { host, port } => connect_tcp(host, *port, patience).map(OwnedFd::from),
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
        /// `None`: another process owns the file.
        _file: Option<SocketFile>,
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
                    _file: Some(file),
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

    /// Takes a socket that listens at `endpoint` already. With `tls`, the peer must show a
    /// certificate.
    ///
    /// # Errors
    /// `CannotListen`: `socket` is no such socket. `BadTls`.
    pub fn adopt(endpoint: &Endpoint, socket: OwnedFd, tls: Option<Tls>) -> Result<Self, Error> {
        let unusable = |source: io::Error| {
            let message = format!("the passed descriptor cannot listen on {endpoint}");
            Error::new(ErrorKind::CannotListen, message).because(source)
        };
        let no_listener = || {
            let reason = "it is not a stream socket of that kind that listens";
            unusable(io::Error::new(IoErrorKind::InvalidInput, reason))
        };
        let described = sockopt::socket_domain(&socket).and_then(|domain| {
            let stream = sockopt::socket_type(&socket)? == SocketType::STREAM;
            Ok((domain, stream && sockopt::socket_acceptconn(&socket)?))
        });
        let (domain, listens) = described.map_err(|error| unusable(error.into()))?;
        if !listens {
            return Err(no_listener());
        }
        // Shared with the process that has passed it, and wanted by both.
        rustix::io::ioctl_fionbio(&socket, true).map_err(|error| unusable(error.into()))?;
        match (endpoint, domain) {
            (Endpoint::Unix(path), AddressFamily::UNIX) if tls.is_some() => {
                Err(no_tls_on_unix(path))
            }
            (Endpoint::Unix(_), AddressFamily::UNIX) => Ok(Self(Kind::Unix {
                listener: socket.into(),
                _file: None,
            })),
            (Endpoint::Tcp { .. }, AddressFamily::INET | AddressFamily::INET6) => {
                Ok(Self(Kind::Tcp {
                    listener: socket.into(),
                    tls,
                }))
            }
            _ => Err(no_listener()),
        }
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

/// Connects without another process.
#[cfg(test)]
pub(super) fn connect(
    endpoint: &Endpoint,
    patience: Duration,
    tls: Option<&Tls>,
) -> Result<Stream, Error> {
    let route = Route {
        endpoint: endpoint.clone(),
        tls: tls.cloned(),
        connector: None,
    };
    route.connect(patience)
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
    fn only_a_listening_socket_of_its_kind_is_adopted() {
        let tcp: Endpoint = "tcp:127.0.0.1:1".parse().unwrap();
        let unix: Endpoint = "unix:/nonexistent/socket".parse().unwrap();
        let listens = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (pair, _other) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        for (endpoint, socket) in [
            (&tcp, OwnedFd::from(pair)),
            (&tcp, file.into()),
            (&tcp, udp.into()),
            (&unix, listens().into()),
        ] {
            let error = Listener::adopt(endpoint, socket, None).unwrap_err();
            assert!(
                error.to_string().contains("the passed descriptor"),
                "{error}"
            );
        }

        let socket = listens();
        let port = socket.local_addr().unwrap().port();
        let endpoint = format!("tcp:127.0.0.1:{port}").parse().unwrap();
        let listener = Listener::adopt(&endpoint, socket.into(), None).unwrap();
        let nothing = listener.accept().unwrap_err();
        assert_eq!(nothing.kind(), IoErrorKind::WouldBlock);
        let mut source = connect(&endpoint, Duration::from_secs(1), None).unwrap();
        source.write_all(b"hello").unwrap();
        let mut read = [0; 5];
        listener.accept().unwrap().read_exact(&mut read).unwrap();
        assert_eq!(&read, b"hello");
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
