//! Blocking HTTP requests to a daemon, for commands.
//!
//! Owns the runtime that waits, and the texts of the client's errors.

use std::io;
use std::time::Duration;

use hyper::body::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::{Request as HttpRequest, Response};
use tokio::runtime::Runtime;
use vmm::http::client::{Client, ClientError as HttpError, Pieces, Streamed};

use super::refusal::BROKEN;
use super::transport::{Opened, Piece, Stream};
use super::{Address, Answer, Credentials, Request, Transport, WebSocket, ssh};
use crate::error::{Error, ErrorKind};

/// The largest accepted answer, in bytes.
const ANSWER_MAX: usize = 16 << 20;

/// An HTTP client over a Unix socket, over ssh, or over TLS.
#[derive(Debug)]
pub struct Http {
    client: Client,
    runtime: Runtime,
}

impl Http {
    /// Creates a client for the daemon at `address`. The first request connects.
    ///
    /// # Errors
    /// The kernel has no free descriptor for the runtime, or the credentials for a daemon on
    /// another host cannot be used.
    pub fn new(address: &Address, credentials: &Credentials) -> Result<Self, Error> {
        let client = Client::of(address.clone()).answer_max(ANSWER_MAX);
        let client = match address {
            Address::Socket(_) => client,
            Address::Https { .. } => client.tls(credentials.load()?),
            Address::Ssh { .. } => client.tunnel(ssh::connect),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(Error::context(
                "cannot start an HTTP connection to the node daemon",
            ))?;
        Ok(Self { client, runtime })
    }
}

impl Transport for Http {
    fn exchange(&self, request: &Request) -> Result<Answer, Error> {
        let client = self.client.clone().time(request.time);
        let answer = client.send(in_http(request)?, &[]);
        Ok(self.runtime.block_on(answer)?.into())
    }

    fn open(&self, request: &Request) -> Result<Opened<'_>, Error> {
        let client = self.client.clone().time(request.time);
        let answer = client.stream(in_http(request)?);
        Ok(match self.runtime.block_on(answer)? {
            Streamed::Pieces(pieces) => Opened::Stream(Box::new(Arriving {
                runtime: &self.runtime,
                pieces,
            })),
            Streamed::Refused(answer) => Opened::Refused(answer.into()),
        })
    }

    fn web_socket(&self, request: &Request) -> Result<WebSocket, Error> {
        WebSocket::open(self.client.clone().time(request.time), &request.path)
    }
}

fn in_http(request: &Request) -> Result<HttpRequest<Bytes>, Error> {
    let mut builder = HttpRequest::builder()
        .method(request.method.clone())
        .uri(&request.path);
    if request.is_merge_patch {
        builder = builder.header(CONTENT_TYPE, "application/merge-patch+json");
    }
    if let Some(condition) = &request.condition {
        let (name, value) = condition.header();
        builder = builder.header(name, value);
    }
    builder
        .body(Bytes::from(request.body.clone().unwrap_or_default()))
        .map_err(Error::context(BROKEN))
}

impl From<Response<Bytes>> for Answer {
    fn from(answer: Response<Bytes>) -> Self {
        Self {
            status: answer.status(),
            headers: answer.headers().clone(),
            body: answer.into_body().into(),
        }
    }
}

/// A stream whose connection is polled while the caller waits.
#[derive(Debug)]
struct Arriving<'a> {
    runtime: &'a Runtime,
    pieces: Pieces,
}

impl Stream for Arriving<'_> {
    fn next(&mut self, limit: Duration) -> Piece {
        let next = async { tokio::time::timeout(limit, self.pieces.next()).await };
        match self.runtime.block_on(next) {
            Ok(Some(data)) => Piece::Data(data.into()),
            Ok(None) => Piece::End,
            Err(_) => Piece::Silence,
        }
    }
}

impl From<HttpError> for Error {
    fn from(error: HttpError) -> Self {
        match error {
            HttpError::Connect { server, source } => {
                let message = format!("cannot reach the node daemon at {server}");
                let kind = source.kind();
                let error = Self::new(ErrorKind::NoDaemon, message).because(source);
                match kind {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => error.hint(
                        "start it with `systemctl start bellhop` or `bellhop serve`, or give its \
                         address with --node",
                    ),
                    io::ErrorKind::PermissionDenied => error.hint(
                        "run this as root, or as a member of the socket's group (`bellhop serve \
                         --group`)",
                    ),
                    _ => error,
                }
            }
            HttpError::TooSlow { server, limit } => {
                let seconds = limit.as_secs();
                let message =
                    format!("the node daemon at {server} did not answer within {seconds} s");
                Self::new(ErrorKind::TimedOut, message)
            }
            HttpError::TooLarge { limit, .. } => {
                let message = format!("the node daemon's answer has more than {limit} bytes");
                Self::failed(message)
            }
            // ssh has printed the cause.
            HttpError::Http {
                server: server @ Address::Ssh { .. },
                source,
            } => Self::new(
                ErrorKind::NoDaemon,
                format!("cannot reach the node daemon at {server}"),
            )
            .because(source)
            .hint("`ssh HOST bellhop version` shows whether the host and its daemon answer"),
            // The daemon has ended, or is being replaced.
            HttpError::Http { source, .. } => {
                Self::new(ErrorKind::NoDaemon, BROKEN).because(source)
            }
            HttpError::Body { source, .. } => {
                Self::new(ErrorKind::NoDaemon, BROKEN).because(source)
            }
            error @ (HttpError::TooManyDescriptors(_) | HttpError::Descriptor(_)) => {
                Self::context(BROKEN)(error)
            }
        }
    }
}
