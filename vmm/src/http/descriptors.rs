//! Open files that are passed with HTTP over a Unix socket (SCM_RIGHTS, unix(7)), in both
//! directions.
//!
//! Owns the stream that receives and sends them, and the few that wait for a request. It must not
//! know their kind, nor the requests.
//!
//! ```text
//!   recvmsg ──> bytes ───────────────> HTTP
//!           └─> at most 16 wait ─────> the request's handler takes them (extension Received)
//!                  │ more of them         │ not taken when the request ends (discard)
//!                  v                      v
//!                closed                 closed
//! ```
//! A client sends them with any byte of its request, and no others before the answer. HTTP has no
//! place for them, so they belong to the current request of the connection. Descriptors are
//! received close-on-exec, and only if there is room: the kernel closes the rest.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use parking_lot::Mutex;
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{UnixListener, UnixStream};

use super::server::{Transport, UnixPeer};

/// The most descriptors that wait on a connection, and that one request can have.
pub const DESCRIPTORS_MAX: usize = 16;
const CONTROL_LEN: usize = cmsg_space!(ScmRights(DESCRIPTORS_MAX));

#[derive(Debug, Default)]
struct Waiting {
    descriptors: Vec<OwnedFd>,
    /// Whether some did not fit and were closed.
    overflow: bool,
}

/// The descriptors that arrived on a connection and wait for a request to take them. An extension
/// of each request on a [`DescriptorListener`]; on any other transport it is empty.
#[derive(Debug, Clone, Default)]
pub struct Received(Arc<Mutex<Waiting>>);

/// More than [`DESCRIPTORS_MAX`] arrived with one request.
#[derive(Debug, thiserror::Error)]
#[error("more than {DESCRIPTORS_MAX} descriptors came with the request")]
pub struct TooManyDescriptors;

impl Received {
    /// Takes all of them, in order of arrival. Must be called once the body is complete: they may
    /// arrive with its last byte.
    ///
    /// # Errors
    /// [`TooManyDescriptors`]; then all are closed.
    pub fn take(&self) -> Result<Vec<OwnedFd>, TooManyDescriptors> {
        let waiting = std::mem::take(&mut *self.0.lock());
        if waiting.overflow {
            return Err(TooManyDescriptors);
        }
        Ok(waiting.descriptors)
    }

    fn put(&self, descriptors: impl Iterator<Item = OwnedFd>) {
        let mut waiting = self.0.lock();
        for descriptor in descriptors {
            if waiting.descriptors.len() < DESCRIPTORS_MAX {
                waiting.descriptors.push(descriptor);
            } else {
                waiting.overflow = true;
            }
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Received {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let peer = parts.extensions.get::<DescriptorPeer>();
        Ok(peer.map(|peer| peer.received.clone()).unwrap_or_default())
    }
}

/// Middleware for every request of an API that takes descriptors: closes those that are not taken
/// when the request ends.
pub async fn discard(received: Received, request: Request, next: Next) -> Response {
    /// Also runs if the client disconnects and the request is dropped.
    struct Discard(Received);
    impl Drop for Discard {
        fn drop(&mut self) {
            *self.0.0.lock() = Waiting::default();
        }
    }
    let _discard = Discard(received);
    next.run(request).await
}

/// A Unix socket that receives descriptors.
#[derive(Debug)]
pub struct DescriptorListener(pub UnixListener);

/// The peer of a connection of a [`DescriptorListener`].
#[derive(Debug, Clone)]
pub struct DescriptorPeer {
    /// The client's credentials.
    pub unix: UnixPeer,
    /// The received descriptors.
    pub received: Received,
}

impl Transport for DescriptorListener {
    type Incoming = UnixStream;
    type Stream = DescriptorStream;
    type Peer = DescriptorPeer;

    async fn accept(&self) -> io::Result<UnixStream> {
        Transport::accept(&self.0).await
    }

    fn source(incoming: &UnixStream) -> Option<IpAddr> {
        <UnixListener as Transport>::source(incoming)
    }

    async fn establish(
        &self,
        incoming: UnixStream,
    ) -> io::Result<(DescriptorStream, DescriptorPeer)> {
        let (stream, unix) = self.0.establish(incoming).await?;
        let received = Received::default();
        let stream = DescriptorStream {
            stream,
            received: received.clone(),
            to_send: Vec::new(),
        };
        Ok((stream, DescriptorPeer { unix, received }))
    }
}

/// A Unix stream that receives and sends descriptors.
pub struct DescriptorStream {
    stream: UnixStream,
    received: Received,
    /// Sent with the next byte.
    to_send: Vec<OwnedFd>,
}

vdpa::opaque_debug!(DescriptorStream, this => received: this.received, to_send: this.to_send.len());

impl DescriptorStream {
    /// A stream that sends `descriptors` with its first byte. Received ones are closed.
    pub(super) fn sending(stream: UnixStream, descriptors: Vec<OwnedFd>) -> Self {
        Self {
            stream,
            received: Received::default(),
            to_send: descriptors,
        }
    }

    fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); CONTROL_LEN];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = rustix::net::recvmsg(
            &self.stream,
            &mut [IoSliceMut::new(bytes)],
            &mut control,
            RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        )?;
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = part {
                self.received.put(descriptors);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            // The kernel has closed those that did not fit.
            self.received.0.lock().overflow = true;
        }
        Ok(message.bytes)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let descriptors: Vec<BorrowedFd<'_>> = self.to_send.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); CONTROL_LEN];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                TooManyDescriptors,
            ));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(rustix::net::sendmsg(
            &self.stream,
            &[IoSlice::new(bytes)],
            &mut control,
            flags,
        )?)
    }
}

impl AsyncRead for DescriptorStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            let bytes = buffer.initialize_unfilled();
            let read = self
                .stream
                .try_io(Interest::READABLE, || self.receive(bytes));
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => {
                    buffer.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for DescriptorStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Descriptors cannot be sent without a byte.
        if self.to_send.is_empty() || bytes.is_empty() {
            return Pin::new(&mut self.stream).poll_write(context, bytes);
        }
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            let sent = self.stream.try_io(Interest::WRITABLE, || self.send(bytes));
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => {
                    let count = sent?;
                    self.to_send.clear();
                    return Poll::Ready(Ok(count));
                }
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
