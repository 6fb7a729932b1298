//! The HTTP client: for a VM's API on its Unix socket, and for a node daemon's on its socket or
//! over TLS.
//!
//! Owns one connection for each request, with limits in time and size. It must not know the
//! requests.
//!
//! ```text
//!   connect ──> head, body and descriptors are sent ──> head of the answer ──> its body
//!   └────────────────────────── all of it within the time ──────────────────────────┘
//! ```
//! Each request has its own connection, because descriptors belong to the current request of their
//! connection, and because a Unix socket connects in microseconds.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net;
use std::path::Path;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use axum::http::{HeaderValue, Request, Response, StatusCode};
use bellhop_api::address::Address;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body, Incoming};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::descriptors::{DESCRIPTORS_MAX, DescriptorStream, TooManyDescriptors};
use super::early_answer::EarlyAnswer;
use super::socket::connect_directly;

/// The default limit of an answer's size, in bytes.
pub const ANSWER_MAX: usize = 4 * 1024 * 1024;
/// The default timeout of a request: longer than any watch.
pub const TIME: Duration = Duration::from_secs(90);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No server listens there.
    #[error("cannot connect to {server}")]
    Connect {
        /// The server.
        server: Address,
        /// The error of the kernel or the TLS library.
        #[source]
        source: io::Error,
    },
    /// More descriptors than one request may have.
    #[error(transparent)]
    TooManyDescriptors(#[from] TooManyDescriptors),
    /// A descriptor cannot be duplicated.
    #[error("cannot pass a descriptor")]
    Descriptor(#[source] io::Error),
    /// The connection ended early, or the answer is not HTTP.
    #[error("{server} did not answer")]
    Http {
        /// The server.
        server: Address,
        /// The cause.
        #[source]
        source: hyper::Error,
    },
    /// The answer's body ended early.
    #[error("the answer of {server} ended early")]
    Body {
        /// The server.
        server: Address,
        /// The cause.
        #[source]
        source: BoxError,
    },
    /// The timeout expired.
    #[error("{server} did not answer within {} s", limit.as_secs())]
    TooSlow {
        /// The server.
        server: Address,
        /// The timeout.
        limit: Duration,
    },
    /// The answer is too large.
    #[error("the answer of {server} has more than {limit} bytes")]
    TooLarge {
        /// The server.
        server: Address,
        /// The limit in bytes.
        limit: usize,
    },
}

/// The credentials for a server on another host.
#[derive(Clone)]
pub struct Tls {
    /// The connector with the client's certificate.
    pub connector: TlsConnector,
    /// The value of the header `authorization`.
    pub authorization: HeaderValue,
}

vdpa::opaque_debug!(Tls);

/// See the module.
#[derive(Debug, Clone)]
pub struct Client {
    server: Address,
    tls: Option<Tls>,
    tunnel: Option<Tunnel>,
    /// Whether a Unix socket is that of a VM's process, which may replace it by a link.
    is_of_vm: bool,
    time: Duration,
    answer_max: usize,
}

/// Opens a connection to a server that only a helper of the caller reaches.
pub type Tunnel = fn(&Address) -> io::Result<net::UnixStream>;

/// The ID of the process that listens on a Unix socket, as the kernel reports it (SO_PEERCRED,
/// unix(7)): an extension of its answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerProcess(pub u32);

/// The answer to a request for a stream.
#[derive(Debug)]
pub enum Streamed {
    /// The answer has begun.
    Pieces(Pieces),
    /// The server refuses.
    Refused(Response<Bytes>),
}

/// The answer to a request to switch protocols.
#[derive(Debug)]
pub enum Switched {
    /// The head of the answer, and the connection for the other protocol.
    To(Response<()>, Upgraded),
    /// The server refuses.
    Refused(Response<Bytes>),
}

/// The body of an answer that arrives piece by piece.
#[derive(Debug)]
pub struct Pieces(Incoming);

impl Pieces {
    /// The next piece; none at the end, or if the connection broke. Cancel-safe.
    pub async fn next(&mut self) -> Option<Bytes> {
        loop {
            let frame = self.0.frame().await?.ok()?;
            if let Ok(data) = frame.into_data() {
                return Some(data);
            }
        }
    }
}

/// A connection of any kind.
trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<C: AsyncRead + AsyncWrite + Send + Unpin> Connection for C {}

impl Client {
    /// A client for the API of a VM's process on `socket`, which need not exist yet.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self {
            is_of_vm: true,
            ..Self::of(Address::Socket(socket.to_owned()))
        }
    }

    /// A client for the API at `server`; one on another host needs [`Client::tls`] or
    /// [`Client::tunnel`].
    #[must_use]
    pub fn of(server: Address) -> Self {
        Self {
            server,
            tls: None,
            tunnel: None,
            is_of_vm: false,
            time: TIME,
            answer_max: ANSWER_MAX,
        }
    }

    /// Sets the credentials for a server on another host.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Sets the way to a server with an address of [`Address::Ssh`].
    #[must_use]
    pub fn tunnel(mut self, tunnel: Tunnel) -> Self {
        self.tunnel = Some(tunnel);
        self
    }

    /// Sets the timeout of a request including its answer.
    #[must_use]
    pub fn time(mut self, limit: Duration) -> Self {
        self.time = limit;
        self
    }

    /// Sets the limit of an answer's body, in bytes.
    #[must_use]
    pub fn answer_max(mut self, limit: usize) -> Self {
        self.answer_max = limit;
        self
    }

    /// Sends a request, and `descriptors` with its first byte: their indices in `fd` are those of
    /// this list. The server receives duplicates, possibly even if this fails. Any status counts as
    /// an answer.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn send(
        &self,
        request: Request<Bytes>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Response<Bytes>, ClientError> {
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(TooManyDescriptors.into());
        }
        let duplicates = descriptors.iter().map(BorrowedFd::try_clone_to_owned);
        let duplicates = duplicates.collect::<io::Result<_>>();
        let duplicates = duplicates.map_err(ClientError::Descriptor)?;
        self.in_time(async {
            let answer = self.begin(with_type(request), duplicates).await?;
            self.whole(answer).await
        })
        .await
    }

    /// Sends a request whose answer arrives piece by piece, without a limit in size. The timeout
    /// applies until the answer begins. A refusal is returned whole.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn stream(&self, request: Request<Bytes>) -> Result<Streamed, ClientError> {
        self.in_time(async {
            let answer = self.begin(with_type(request), Vec::new()).await?;
            if answer.status().is_success() {
                Ok(Streamed::Pieces(Pieces(answer.into_body())))
            } else {
                Ok(Streamed::Refused(self.whole(answer).await?))
            }
        })
        .await
    }

    /// Sends a request to switch protocols. The timeout applies until the answer. A refusal is
    /// returned whole.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn switch(&self, request: Request<Bytes>) -> Result<Switched, ClientError> {
        self.in_time(async {
            let mut answer = self.begin(with_type(request), Vec::new()).await?;
            if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
                return Ok(Switched::Refused(self.whole(answer).await?));
            }
            let connection = hyper::upgrade::on(&mut answer).await;
            let connection = connection.map_err(|source| ClientError::Http {
                server: self.server.clone(),
                source,
            })?;
            Ok(Switched::To(answer.map(drop), connection))
        })
        .await
    }

    /// Sends a request unchanged; the caller reads the answer's body. Only the caller's limits
    /// apply.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn open<B>(&self, request: Request<B>) -> Result<Response<Incoming>, ClientError>
    where
        B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        self.begin(request, Vec::new()).await
    }

    async fn in_time<T>(
        &self,
        exchange: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let answer = tokio::time::timeout(self.time, exchange).await;
        answer.unwrap_or_else(|_| {
            Err(ClientError::TooSlow {
                server: self.server.clone(),
                limit: self.time,
            })
        })
    }

    async fn begin<B>(
        &self,
        mut request: Request<B>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Response<Incoming>, ClientError>
    where
        B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let http = |source| ClientError::Http {
            server: self.server.clone(),
            source,
        };
        let failed = |source| ClientError::Connect {
            server: self.server.clone(),
            source,
        };
        let (stream, process) = self.connect(descriptors).await.map_err(failed)?;
        let host = match &self.server {
            Address::Socket(_) | Address::Ssh { .. } => HeaderValue::from_static("bellhop"),
            Address::Https { .. } => {
                let authority = self.server.to_string();
                let authority = authority.trim_start_matches("https://");
                HeaderValue::from_str(authority)
                    .map_err(io::Error::other)
                    .map_err(failed)?
            }
        };
        let headers = request.headers_mut();
        headers.entry(HOST).or_insert(host);
        if let Some(tls) = &self.tls {
            headers.insert(AUTHORIZATION, tls.authorization.clone());
        }
        let handshake =
            hyper::client::conn::http1::handshake(TokioIo::new(EarlyAnswer::new(stream)));
        let (mut sender, connection) = handshake.await.map_err(http)?;
        // The task ends with the answer's body, or when that is dropped. The exchange receives any
        // error.
        tokio::spawn(connection.with_upgrades());
        let mut answer = sender.send_request(request).await.map_err(http)?;
        if let Some(process) = process {
            answer.extensions_mut().insert(process);
        }
        Ok(answer)
    }

    async fn connect(
        &self,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<(Box<dyn Connection>, Option<ServerProcess>)> {
        let connection: Box<dyn Connection> = match (&self.server, &self.tls) {
            (Address::Socket(path), _) => {
                let stream = if self.is_of_vm {
                    connect_directly(path).await?
                } else {
                    UnixStream::connect(path).await?
                };
                let process = stream.peer_cred()?.pid();
                let process = process.and_then(|pid| u32::try_from(pid).ok());
                let stream = DescriptorStream::sending(stream, descriptors);
                return Ok((Box::new(stream), process.map(ServerProcess)));
            }
            (Address::Https { host, port }, Some(tls)) => {
                let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                Box::new(tls.connector.connect(name, stream).await?)
            }
            (address @ Address::Ssh { .. }, _) => {
                let tunnel = self.tunnel.ok_or(io::ErrorKind::Unsupported)?;
                let stream = tunnel(address)?;
                stream.set_nonblocking(true)?;
                Box::new(UnixStream::from_std(stream)?)
            }
            (Address::Https { .. }, None) => return Err(io::ErrorKind::Unsupported.into()),
        };
        Ok((connection, None))
    }

    /// Reads the whole answer.
    async fn whole(&self, answer: Response<Incoming>) -> Result<Response<Bytes>, ClientError> {
        let (head, body) = answer.into_parts();
        match Limited::new(body, self.answer_max).collect().await {
            Ok(collected) => Ok(Response::from_parts(head, collected.to_bytes())),
            Err(source) if source.is::<LengthLimitError>() => Err(self.too_large()),
            Err(source) => Err(self.body(source)),
        }
    }

    fn body(&self, source: BoxError) -> ClientError {
        ClientError::Body {
            server: self.server.clone(),
            source,
        }
    }

    fn too_large(&self) -> ClientError {
        ClientError::TooLarge {
            server: self.server.clone(),
            limit: self.answer_max,
        }
    }
}

/// A body is JSON unless its sender sets another type.
fn with_type(request: Request<Bytes>) -> Request<Full<Bytes>> {
    let (mut head, body) = request.into_parts();
    if !body.is_empty() {
        head.headers
            .entry(CONTENT_TYPE)
            .or_insert(HeaderValue::from_static("application/json"));
    }
    Request::from_parts(head, Full::new(body))
}
