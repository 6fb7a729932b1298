//! Connections: accepted and served within limits.
//!
//! Owns what a client may take. It must not know what is asked, nor what kind of
//! socket it comes by ([`Transport`]).
//!
//! | what | limit |
//! |---|---|
//! | connections at a time | 64; more wait in the kernel's backlog |
//! | what comes before the first request (a TLS handshake) | 10 s |
//! | a request's line and headers | 16 KiB, 64 headers, 10 s; the 10 s also end idle connections |
//! | a request's body | 64 KiB, 10 s |
//! | a connection's life | 5 min, and the request that is under way then |
//! | an answer, once its endpoint is done after these 5 min | 90 s, in which the client reads it |
//! | the server's end | 1 s for the answers that are under way |
//!
//! An endpoint has its own limit for its work: a snapshot of a large guest may take an hour. The
//! wait ends when the client closes its connection.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::middleware::Next;
use axum::{Router, middleware};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

const CONNECTIONS_MAX: usize = 64;
const HEADERS_MAX: usize = 64;
const HEAD_MAX: usize = 16 * 1024;
const HEAD_TIME: Duration = Duration::from_secs(10);
/// The largest body, in bytes: a machine with many devices has some KiB.
pub(crate) const BODY_MAX: usize = 64 * 1024;
/// How long a body may take to come.
pub(crate) const BODY_TIME: Duration = Duration::from_secs(10);
const ESTABLISH_TIME: Duration = Duration::from_secs(10);
const CONNECTION_TIME: Duration = Duration::from_secs(300);
/// How long a client may take to read the last answer, once its endpoint is done.
const LAST_READ: Duration = Duration::from_secs(90);
/// How long answers that are under way may take at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// After a failure to accept, which a lack of descriptors may be.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where connections come from.
pub trait Transport: Send + Sync + 'static {
    /// A connection of which nothing is known yet.
    type Incoming: Send + 'static;
    /// A connection on which HTTP is spoken.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;
    /// What is known of who is at the other end. Each request has it as an extension.
    type Peer: Clone + Send + Sync + 'static;

    /// The next connection.
    ///
    /// # Errors
    /// The kernel's, after which accepting goes on.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Incoming>> + Send;

    /// What is to be done before HTTP is spoken; it is ended after 10 s.
    ///
    /// # Errors
    /// The connection is closed.
    fn establish(
        &self,
        incoming: Self::Incoming,
    ) -> impl Future<Output = io::Result<(Self::Stream, Self::Peer)>> + Send;
}

/// Who is at the other end of a Unix socket, as the kernel says (SO_PEERCRED, unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnixPeer {
    /// The user it connected as.
    pub uid: u32,
    /// Its process, where it is in a PID namespace that is seen from here.
    pub pid: Option<i32>,
}

impl Transport for UnixListener {
    type Incoming = UnixStream;
    type Stream = UnixStream;
    type Peer = UnixPeer;

    async fn accept(&self) -> io::Result<UnixStream> {
        Ok(Self::accept(self).await?.0)
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

/// Says when a connection takes no more requests: its time is over, or the server ends. Each request has it as
/// an extension, so that an answer without an end can be brought to one.
#[derive(Debug, Clone)]
pub struct Closing(watch::Receiver<bool>);

impl Closing {
    /// Waits for it.
    pub async fn wait(&mut self) {
        // An error means that the connection is gone, which is the end as well.
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

/// Serves `router` until `ended` is true or its sender is gone; then the answers that are under way get
/// a second to reach their clients. Accepting is over before that.
pub async fn serve<T: Transport>(transport: T, router: Router, ended: watch::Receiver<bool>) {
    let transport = Arc::new(transport);
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    let mut end = ended.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            // An error means that the server is gone, which is the end as well.
            _ = end.wait_for(|ended| *ended) => break,
            accepted = next(&*transport, &slots) => accepted,
        };
        // The ones that are over.
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((incoming, slot)) => {
                let (router, ended) = (router.clone(), ended.clone());
                let transport = transport.clone();
                connections.spawn(async move {
                    serve_incoming(&*transport, incoming, router, ended).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to the API cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(transport);
    while connections.join_next().await.is_some() {}
}

/// The next connection, once there is room for it.
async fn next<T: Transport>(
    transport: &T,
    slots: &Arc<Semaphore>,
) -> io::Result<(T::Incoming, tokio::sync::OwnedSemaphorePermit)> {
    let slot = slots
        .clone()
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    Ok((transport.accept().await?, slot))
}

async fn serve_incoming<T: Transport>(
    transport: &T,
    incoming: T::Incoming,
    router: Router,
    mut ended: watch::Receiver<bool>,
) {
    let established = tokio::select! {
        _ = ended.wait_for(|ended| *ended) => return,
        established = tokio::time::timeout(ESTABLISH_TIME, transport.establish(incoming)) => established,
    };
    match established.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok((stream, peer)) => {
            let router = router.layer(middleware::from_fn(
                move |mut request: Request, next: Next| {
                    request.extensions_mut().insert(peer.clone());
                    next.run(request)
                },
            ));
            serve_connection(stream, router, ended).await;
        }
        Err(error) => tracing::info!(%error, "a connection to the API is refused"),
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
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let expired = tokio::select! {
        over = connection.as_mut() => return note(over),
        // An error means that the server is gone, which is the end as well.
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
        // An error means that the connection is gone, which is the end as well.
        let _ = working.wait_for(|working| !working).await;
        let again = working.wait_for(|working| *working);
        if !matches!(tokio::time::timeout(LAST_READ, again).await, Ok(Ok(_))) {
            return;
        }
    }
}

/// Clients come and go as they like: how, is of no interest but for finding mistakes.
fn note(over: hyper::Result<()>) {
    if let Err(error) = over {
        tracing::debug!(%error, "a connection to the API ended");
    }
}

#[cfg(test)]
mod tests;
