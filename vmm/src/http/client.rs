//! A client of an API on a Unix socket: of a machine's, of the node daemon's.
//!
//! Owns one connection for each request, with limits in time and size. It must not know what is asked.
//!
//! ```text
//!   connect ──> head, body and descriptors are sent ──> head of the answer ──> its body
//!   └────────────────────────── all of it within the time ──────────────────────────┘
//! ```
//! A connection for each request, because descriptors belong to no request but the one that is under way on
//! their connection, and because a Unix socket connects in microseconds.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::{CONTENT_TYPE, HOST};
use axum::http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::descriptors::{DESCRIPTORS_MAX, DescriptorStream, TooManyDescriptors};

/// The largest answer where no other limit is set, in bytes.
pub const ANSWER_MAX: usize = 4 * 1024 * 1024;
/// How long a request may take where no other limit is set: longer than any watch.
pub const TIME: Duration = Duration::from_secs(90);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error("cannot connect to {socket}")]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// More descriptors than go with one request.
    #[error(transparent)]
    TooManyDescriptors(#[from] TooManyDescriptors),
    /// A descriptor cannot be duplicated.
    #[error("cannot pass a descriptor")]
    Descriptor(#[source] io::Error),
    /// The connection ended early, or what came is no HTTP.
    #[error("{socket} did not answer")]
    Http {
        /// The socket.
        socket: PathBuf,
        /// What is wrong.
        #[source]
        source: hyper::Error,
    },
    /// The answer's body ended early.
    #[error("the answer of {socket} ended early")]
    Body {
        /// The socket.
        socket: PathBuf,
        /// What is wrong.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It took too long.
    #[error("{socket} did not answer within {} s", limit.as_secs())]
    TooSlow {
        /// The socket.
        socket: PathBuf,
        /// How long it could take.
        limit: Duration,
    },
    /// It is too large.
    #[error("the answer of {socket} has more than {limit} bytes")]
    TooLarge {
        /// The socket.
        socket: PathBuf,
        /// How large it could be.
        limit: usize,
    },
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    time: Duration,
    answer_max: usize,
}

impl Client {
    /// For the API on `socket`, which need not be there yet.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            time: TIME,
            answer_max: ANSWER_MAX,
        }
    }

    /// With another limit for the whole of a request and its answer.
    #[must_use]
    pub fn time(mut self, limit: Duration) -> Self {
        self.time = limit;
        self
    }

    /// With another limit for an answer's body, in bytes.
    #[must_use]
    pub fn answer_max(mut self, limit: usize) -> Self {
        self.answer_max = limit;
        self
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a request, and `descriptors` with its first byte: their indices in `fd` are those of this list.
    /// The other side gets duplicates; it may have taken them also if this fails. Any status is an answer.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn send(
        &self,
        request: Request<Bytes>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Response<Bytes>, ClientError> {
        let too_slow = || ClientError::TooSlow {
            socket: self.socket.clone(),
            limit: self.time,
        };
        let answer = tokio::time::timeout(self.time, self.exchange(request, descriptors));
        answer.await.map_err(|_| too_slow())?
    }

    async fn exchange(
        &self,
        request: Request<Bytes>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Response<Bytes>, ClientError> {
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(TooManyDescriptors.into());
        }
        let duplicates: io::Result<Vec<OwnedFd>> = descriptors
            .iter()
            .map(BorrowedFd::try_clone_to_owned)
            .collect();
        let duplicates = duplicates.map_err(ClientError::Descriptor)?;
        let stream = UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(|source| ClientError::Connect {
            socket: self.socket.clone(),
            source,
        })?;
        let stream = DescriptorStream::sending(stream, duplicates);
        let http = |source| ClientError::Http {
            socket: self.socket.clone(),
            source,
        };
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(http)?;
        let exchange = async {
            let answer = sender.send_request(prepared(request)).await.map_err(http)?;
            let (head, body) = answer.into_parts();
            let limit = self.answer_max;
            match Limited::new(body, limit).collect().await {
                Ok(collected) => Ok(Response::from_parts(head, collected.to_bytes())),
                Err(source) if source.is::<LengthLimitError>() => Err(ClientError::TooLarge {
                    socket: self.socket.clone(),
                    limit,
                }),
                Err(source) => Err(ClientError::Body {
                    socket: self.socket.clone(),
                    source,
                }),
            }
        };
        // The connection works only while it is polled. When it ends, the exchange has what it gets.
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            biased;
            answer = exchange.as_mut() => answer,
            _ = connection => exchange.await,
        }
    }
}

/// What HTTP wants beside what the caller says.
fn prepared(request: Request<Bytes>) -> Request<Full<Bytes>> {
    let (mut head, body) = request.into_parts();
    head.headers
        .entry(HOST)
        .or_insert(HeaderValue::from_static("bellhop"));
    if !body.is_empty() {
        head.headers
            .entry(CONTENT_TYPE)
            .or_insert(HeaderValue::from_static("application/json"));
    }
    Request::from_parts(head, Full::new(body))
}
