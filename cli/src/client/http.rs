//! Requests to a daemon by HTTP, for commands, which wait for each answer.
//!
//! Owns the runtime that waits, and how this side's errors are told.

use hyper::Request as HttpRequest;
use hyper::body::Bytes;
use tokio::runtime::Runtime;
use vmm::http::client::{Client, ClientError as HttpError};

use super::{Address, Answer, ClientError, Credentials, Request, Transport};

/// The largest answer that is read, in bytes.
const ANSWER_MAX: usize = 16 << 20;

/// Requests over a Unix socket, or over TLS.
#[derive(Debug)]
pub(crate) struct Http {
    client: Client,
    runtime: Runtime,
}

impl Http {
    /// To the daemon at `address`, which is reached with the first request.
    ///
    /// # Errors
    /// The kernel has no descriptors left to wait with, or what a daemon on another host is to be shown cannot be
    /// used.
    pub(crate) fn new(address: &Address, credentials: &Credentials) -> Result<Self, ClientError> {
        let client = Client::of(address.clone()).answer_max(ANSWER_MAX);
        let client = match address {
            Address::Socket(_) => client,
            Address::Https { .. } => client.tls(credentials.load()?),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ClientError::Start)?;
        Ok(Self { client, runtime })
    }
}

impl Transport for Http {
    fn exchange(&self, request: &Request) -> Result<Answer, ClientError> {
        let mut builder = HttpRequest::builder()
            .method(request.method.clone())
            .uri(&request.path);
        if request.listen.is_some() {
            // From the first on.
            builder = builder.header("last-event-id", "0");
        }
        let http_request = builder
            .body(Bytes::from(request.body.clone().unwrap_or_default()))
            .map_err(|error| ClientError::Broken(error.into()))?;
        let client = self.client.clone().time(request.time);
        let answer = self.runtime.block_on(async {
            match request.listen {
                Some(time) => client.listen(http_request, time).await,
                None => client.send(http_request, &[]).await,
            }
        })?;
        Ok(Answer {
            status: answer.status(),
            body: answer.into_body().into(),
        })
    }
}

impl From<HttpError> for ClientError {
    fn from(error: HttpError) -> Self {
        match error {
            HttpError::Connect { server, source } => Self::Connect {
                address: server.to_string(),
                source,
            },
            HttpError::TooSlow { server, limit } => Self::TimeLimit {
                address: server.to_string(),
                time: limit,
            },
            HttpError::TooLarge { limit, .. } => Self::TooLarge(limit),
            HttpError::Http { source, .. } => Self::Broken(source.into()),
            HttpError::Body { source, .. } => Self::Broken(source),
            error @ (HttpError::TooManyDescriptors(_) | HttpError::Descriptor(_)) => {
                Self::Broken(error.into())
            }
        }
    }
}
