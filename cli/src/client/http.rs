//! HTTP/1.1 to a daemon: one connection for each request.
//!
//! Owns the runtime that waits for it. What a daemon sends is limited in size and time.

use std::io;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

use super::{Address, Answer, ClientError, Request, Transport};

/// The largest answer that is read, in bytes.
const ANSWER_MAX: usize = 16 << 20;

/// Requests over a Unix socket.
#[derive(Debug)]
pub(crate) struct Http {
    address: Address,
    runtime: Runtime,
}

impl Http {
    /// To the daemon at `address`, which is reached with the first request.
    ///
    /// # Errors
    /// The kernel has no descriptors left to wait with.
    pub(crate) fn new(address: &Address) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ClientError::Start)?;
        Ok(Self {
            address: address.clone(),
            runtime,
        })
    }

    async fn carry(&self, request: &Request) -> Result<Answer, ClientError> {
        let connect = |source: io::Error| ClientError::Connect {
            address: self.address.to_string(),
            source,
        };
        match &self.address {
            Address::Socket(path) => {
                let stream = UnixStream::connect(path).await.map_err(connect)?;
                exchange(stream, "node", request).await
            }
            Address::Https { .. } => Err(connect(io::ErrorKind::Unsupported.into())),
        }
    }
}

impl Transport for Http {
    fn exchange(&self, request: &Request) -> Result<Answer, ClientError> {
        self.runtime.block_on(async {
            match tokio::time::timeout(request.time, self.carry(request)).await {
                Ok(answer) => answer,
                Err(_) => Err(ClientError::TimeLimit {
                    address: self.address.to_string(),
                    time: request.time,
                }),
            }
        })
    }
}

/// One request and its answer on a connection that is used for nothing else.
async fn exchange<S>(stream: S, host: &str, request: &Request) -> Result<Answer, ClientError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let broken = |error: hyper::Error| ClientError::Broken(error.into());
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(broken)?;
    let mut builder = hyper::Request::builder()
        .method(request.method.clone())
        .uri(&request.path)
        .header(HOST, host);
    if request.body.is_some() {
        builder = builder.header(CONTENT_TYPE, "application/json");
    }
    let body = Full::new(Bytes::from(request.body.clone().unwrap_or_default()));
    let http_request = builder
        .body(body)
        .map_err(|error| ClientError::Broken(error.into()))?;
    let answer = async {
        let response = sender.send_request(http_request).await.map_err(broken)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX)
            .collect()
            .await;
        let body = body.map_err(|error| match error.is::<LengthLimitError>() {
            true => ClientError::TooLarge(ANSWER_MAX),
            false => ClientError::Broken(error),
        })?;
        Ok(Answer {
            status,
            body: body.to_bytes().to_vec(),
        })
    };
    // The connection has to be driven until the answer is there; how it ends after that is of no interest.
    let mut answer = std::pin::pin!(answer);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        answer = &mut answer => answer,
        _ = &mut connection => answer.await,
    }
}
