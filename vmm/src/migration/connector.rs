//! Connections that the daemon opens for a VMM, which in its sandbox sees neither the network nor
//! the sockets of other VMMs.
//!
//! ```text
//!   VMM                                        daemon, a thread for each migration
//!   Connector ── one byte for each connection ──> connects to the destination of the migration
//!             <─ a descriptor, or an errno ──────
//! ```
//! Only the daemon knows the destination. So a VMM that its guest took over gets no other
//! connection, and at most [`CONNECTIONS_MAX`] of them. Owns both ends of the socket pair. It must
//! not know what passes over a connection.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketType, sockopt,
};

use super::endpoint::{Endpoint, open};
use super::protocol::CONNECTIONS_MAX;
use crate::{Error, ErrorKind};

/// How long the daemon may take for a connection: it tries each address of the destination.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the destination may take to accept a connection at one of its addresses.
const CONNECT: Duration = Duration::from_secs(10);
/// How long the VMM may wait before its next request. It opens all connections at the beginning, so
/// one that keeps the socket afterwards gets no further connection and holds no thread.
const IDLE: Duration = Duration::from_secs(120);
/// The answer for an error without a number, such as an unknown host name.
const UNKNOWN: u8 = u8::MAX;

/// The VMM's end.
#[derive(Debug)]
pub struct Connector(UnixStream);

impl Connector {
    /// Takes a socket whose other end is the daemon's.
    ///
    /// # Errors
    /// `NoDestination`: it is another kind of file.
    pub fn new(socket: OwnedFd) -> Result<Self, Error> {
        let unusable = |source: io::Error| {
            let message = "the passed descriptor opens no connections";
            Error::new(ErrorKind::NoDestination, message).because(source)
        };
        let described = sockopt::socket_domain(&socket)
            .and_then(|domain| Ok((domain, sockopt::socket_type(&socket)?)));
        match described {
            Ok((AddressFamily::UNIX, SocketType::STREAM)) => Ok(Self(socket.into())),
            Ok(_) => Err(unusable(io::ErrorKind::InvalidInput.into())),
            Err(error) => Err(unusable(error.into())),
        }
    }

    /// A new connection to the destination.
    ///
    /// # Errors
    /// The daemon's, or it does not answer.
    pub(super) fn connection(&self) -> io::Result<OwnedFd> {
        self.0.set_read_timeout(Some(PATIENCE))?;
        (&self.0).write_all(&[1])?;
        let mut answer = [0];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = rustix::net::recvmsg(
            &self.0,
            &mut [IoSliceMut::new(&mut answer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let socket = control.drain().find_map(|part| match part {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        match (message.bytes, answer, socket) {
            (1, [0], Some(socket)) => Ok(socket),
            (1, [UNKNOWN], None) => Err(io::Error::other(
                "the daemon cannot connect; its log has the reason",
            )),
            (1, [errno], None) if errno != 0 => Err(io::Error::from_raw_os_error(errno.into())),
            _ => Err(io::Error::other("the daemon opens no more connections")),
        }
    }
}

/// Starts a thread that opens connections to `endpoint` for the VM `vm`, and logs each. Returns
/// the socket of the VMM's [`Connector`]. The thread ends when that is closed, or asks for nothing
/// for two minutes.
///
/// # Errors
/// The process has no socket or thread left.
pub fn serve(vm: &str, endpoint: Endpoint) -> io::Result<OwnedFd> {
    let name = vm.to_owned();
    let (socket, vmm) = UnixStream::pair()?;
    thread::Builder::new()
        .name("connector".to_owned())
        .spawn(move || {
            if let Err(error) = answer(&socket, &name, &endpoint) {
                tracing::debug!(vm = name, %endpoint, %error, "a VMM asks for no more connections");
            }
        })?;
    Ok(vmm.into())
}

fn answer(mut socket: &UnixStream, vm: &str, endpoint: &Endpoint) -> io::Result<()> {
    socket.set_read_timeout(Some(IDLE))?;
    for _ in 0..CONNECTIONS_MAX {
        socket.read_exact(&mut [0])?;
        let opened = open(endpoint, CONNECT);
        let errno = match &opened {
            Ok(_) => {
                tracing::info!(vm, %endpoint, "gave the VM a connection for its migration");
                0
            }
            Err(error) => {
                tracing::warn!(vm, %endpoint, %error, "cannot connect for a migration");
                let errno = error.raw_os_error();
                errno
                    .and_then(|errno| u8::try_from(errno).ok())
                    .unwrap_or(UNKNOWN)
            }
        };
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptor = opened.as_ref().ok().map(|socket| [socket.as_fd()]);
        if let Some(descriptor) = &descriptor {
            control.push(SendAncillaryMessage::ScmRights(descriptor));
        }
        let errno = [errno];
        let answer = [IoSlice::new(&errno)];
        rustix::net::sendmsg(socket, &answer, &mut control, SendFlags::NOSIGNAL)?;
    }
    socket.read_exact(&mut [0])?;
    tracing::warn!(vm, %endpoint, "the VM asks for too many connections: it gets no more");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_daemon_opens_connections_to_one_destination_and_not_too_many() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("tcp:{}", listener.local_addr().unwrap());
        let socket = serve("one", endpoint.parse().unwrap()).unwrap();
        let connector = Connector::new(socket).unwrap();
        for _ in 0..CONNECTIONS_MAX {
            let mut near = TcpStream::from(connector.connection().unwrap());
            let (mut far, _) = listener.accept().unwrap();
            near.write_all(b"x").unwrap();
            far.read_exact(&mut [0]).unwrap();
        }
        connector.connection().unwrap_err();
    }

    #[test]
    fn the_reason_why_there_is_no_connection_arrives() {
        for (endpoint, words) in [
            ("unix:/nonexistent/socket", "No such file"),
            ("tcp:127.0.0.1:1", "refused"),
        ] {
            let connector =
                Connector::new(serve("one", endpoint.parse().unwrap()).unwrap()).unwrap();
            // The thread survives it.
            for _ in 0..2 {
                let error = connector.connection().unwrap_err();
                assert!(error.to_string().contains(words), "{endpoint}: {error}");
            }
        }
    }

    #[test]
    fn only_a_unix_stream_socket_is_a_connector() {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        for other in [OwnedFd::from(tcp), null.into()] {
            let error = Connector::new(other).unwrap_err();
            assert!(error.to_string().contains("no connections"), "{error}");
        }
        // The other end is gone.
        let (socket, other) = UnixStream::pair().unwrap();
        drop(other);
        let connector = Connector::new(socket.into()).unwrap();
        connector.connection().unwrap_err();
    }
}
