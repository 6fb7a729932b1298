//! Accepts and serves connections within limits.
//!
//! Owns the limits of clients. It must not know the requests, nor the kind of socket
//! ([`Transport`]).
//!
//! | object | limit |
//! |---|---|
//! | connections with a role | 64; half of them for the role read, three quarters for operate |
//! | connections without one yet | 256, and 32 of one address; a new one replaces the oldest |
//! | the time before HTTP (a TLS handshake) | 3 s |
//! | a request's line and headers | 16 KiB, 64 headers, 10 s; the 10 s also end idle connections |
//! | a request's body | 64 KiB, 10 s |
//! | a connection's life | 5 min, and the request in progress at that time |
//! | an answer, once its endpoint is done after these 5 min | 90 s, in which the client reads it |
//! | the server's end | 1 s for pending answers |
//!
//! An endpoint has its own limit for its work: a snapshot of a large guest may take an hour. The
//! wait ends when the client closes its connection.
//!
//! An endpoint may switch to another protocol (status 101). These limits end then, and the endpoint
//! applies its own.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::middleware::Next;
use axum::{Router, middleware};
use bellhop_api::node::Role;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::admission::Admissions;

pub use super::admission::Admission;

/// The target of log lines about connections without a request, which anyone can cause.
pub const REFUSED: &str = "refused";

const HEADERS_MAX: usize = 64;
const HEAD_MAX: usize = 16 * 1024;
const HEAD_TIME: Duration = Duration::from_secs(10);
/// The largest body, in bytes: the configuration of a VM with many devices has some KiB.
pub(crate) const BODY_MAX: usize = 64 * 1024;
/// How long a body may take to arrive.
pub(crate) const BODY_TIME: Duration = Duration::from_secs(10);
const ESTABLISH_TIME: Duration = Duration::from_secs(3);
const CONNECTION_TIME: Duration = Duration::from_secs(300);
/// How long a client may take to read the last answer, once its endpoint is done.
const LAST_READ: Duration = Duration::from_secs(90);
/// How long pending answers may take at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// The delay after a failure to accept, such as a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A source of connections.
pub trait Transport: Send + Sync + 'static {
    /// An accepted connection before its handshake.
    type Incoming: Send + 'static;
    /// A connection that carries HTTP.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;
    /// The known data of the peer. Each request has it as an extension.
    type Peer: Clone + Send + Sync + 'static;

    /// The next connection.
    ///
    /// # Errors
    /// The kernel's; accepting continues afterwards.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Incoming>> + Send;

    /// The address of a client on another host. Its API has to admit it ([`Admission`]). Without
    /// one the client is of this host, and admitted with the role admin.
    fn source(incoming: &Self::Incoming) -> Option<IpAddr>;

    /// The handshake before HTTP; cancelled after 3 s.
    ///
    /// # Errors
    /// The connection is closed.
    fn establish(
        &self,
        incoming: Self::Incoming,
    ) -> impl Future<Output = io::Result<(Self::Stream, Self::Peer)>> + Send;
}

/// The peer of a Unix socket, as the kernel reports it (SO_PEERCRED, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnixPeer {
    /// The user it connected as.
    pub uid: u32,
    /// Its process, if it is in a PID namespace that is visible here.
    pub pid: Option<i32>,
}

impl Transport for UnixListener {
    type Incoming = UnixStream;
    type Stream = UnixStream;
    type Peer = UnixPeer;

    async fn accept(&self) -> io::Result<UnixStream> {
        Ok(Self::accept(self).await?.0)
    }

    fn source(_: &UnixStream) -> Option<IpAddr> {
        None
    }

    async fn establish(&self, incoming: UnixStream) -> io::Result<(UnixStream, UnixPeer)> {
        let credentials = incoming.peer_cred()?;
        let peer = UnixPeer {
            uid: credentials.uid(),
            pid: credentials.pid(),
        };
        Ok((incoming, peer))
    }
}

/// Signals when a connection accepts no more requests: its time is over, or the server ends. Each
/// request has it as an extension, so that an endless answer can end.
#[derive(Debug, Clone)]
pub struct Closing(watch::Receiver<bool>);

impl Closing {
    /// Waits for the signal.
    pub async fn wait(&mut self) {
        // An error means that the connection is gone, which is also the end.
        let _ = self.0.wait_for(|closing| *closing).await;
    }
}

/// Whether an endpoint works on a request of the connection. HTTP/1 has one request at a time.
struct Working(watch::Sender<bool>);

impl Working {
    fn begin(working: &watch::Sender<bool>) -> Self {
        working.send_replace(true);
        Self(working.clone())
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

/// Serves `router` until `ended` is true or its sender is gone. Then it stops accepting, and
/// pending answers get a second to reach their clients.
pub async fn serve<T: Transport>(transport: T, router: Router, ended: watch::Receiver<bool>) {
    let transport = Arc::new(transport);
    let admissions = Admissions::new();
    let mut connections = JoinSet::new();
    let mut end = ended.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            // An error means that the server is gone, which is also the end.
            _ = end.wait_for(|ended| *ended) => break,
            accepted = transport.accept() => accepted,
        };
        // Removes the finished ones.
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok(incoming) => {
                let (router, ended) = (router.clone(), ended.clone());
                let transport = transport.clone();
                let source = T::source(&incoming);
                let admission = admissions.add(source);
                connections.spawn(async move {
                    let served = serve_incoming(&*transport, incoming, &admission, router, ended);
                    tokio::select! {
                        () = served => {}
                        () = admission.replaced() => {
                            tracing::debug!(?source, "a newer connection replaces this one");
                        }
                    }
                    admission.end();
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the API");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(transport);
    while connections.join_next().await.is_some() {}
}

async fn serve_incoming<T: Transport>(
    transport: &T,
    incoming: T::Incoming,
    admission: &Admission,
    router: Router,
    mut ended: watch::Receiver<bool>,
) {
    let is_local = T::source(&incoming).is_none();
    let established = tokio::select! {
        _ = ended.wait_for(|ended| *ended) => return,
        established =
            tokio::time::timeout(ESTABLISH_TIME, transport.establish(incoming)) => established,
    };
    match established.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok((stream, peer)) => {
            if is_local {
                tokio::select! {
                    _ = ended.wait_for(|ended| *ended) => return,
                    () = admission.admit(Role::Admin) => {}
                }
            }
            let admission = admission.clone();
            let router = router.layer(middleware::from_fn(
                move |mut request: Request, next: Next| {
                    let extensions = request.extensions_mut();
                    extensions.insert(peer.clone());
                    extensions.insert(admission.clone());
                    next.run(request)
                },
            ));
            serve_connection(stream, router, ended).await;
        }
        Err(error) => {
            tracing::info!(target: REFUSED, %error, "a connection to the API is refused");
        }
    }
}

/// Serves one connection until either side ends it.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    mut ended: watch::Receiver<bool>,
) {
    let (close, closing) = watch::channel(false);
    let (works, mut working) = watch::channel(false);
    let closing = Closing(closing);
    let router = router.layer(middleware::from_fn(
        move |mut request: Request, next: Next| {
            request.extensions_mut().insert(closing.clone());
            let works = Working::begin(&works);
            async move {
                let answer = next.run(request).await;
                drop(works);
                answer
            }
        },
    ));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .with_upgrades();
    let mut connection = pin!(connection);
    let expired = tokio::select! {
        over = connection.as_mut() => return note(over),
        // An error means that the server is gone, which is also the end.
        _ = ended.wait_for(|ended| *ended) => false,
        () = tokio::time::sleep(CONNECTION_TIME) => true,
    };
    close.send_replace(true);
    if expired {
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            over = connection.as_mut() => return note(over),
            _ = ended.wait_for(|ended| *ended) => {}
            () = unread(&mut working) => return,
        }
    }
    connection.as_mut().graceful_shutdown();
    if let Ok(over) = tokio::time::timeout(LAST_ANSWERS, connection).await {
        note(over);
    }
}

/// Waits until no endpoint has worked for [`LAST_READ`]: then the client does not read its answer.
async fn unread(working: &mut watch::Receiver<bool>) {
    loop {
        // An error means that the connection is gone, which is also the end.
        let _ = working.wait_for(|working| !working).await;
        let again = working.wait_for(|working| *working);
        if !matches!(tokio::time::timeout(LAST_READ, again).await, Ok(Ok(_))) {
            return;
        }
    }
}

/// Clients may disconnect at any time; the reason only helps to find mistakes.
fn note(over: hyper::Result<()>) {
    if let Err(error) = over {
        tracing::debug!(%error, "a connection to the API ended");
    }
}

#[cfg(test)]
mod tests;
