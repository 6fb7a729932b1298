//! HTTP/1.1 to a daemon: one connection for each request.
//!
//! Owns the runtime that waits for it. What a daemon sends is limited in size and time.

use std::io;
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Runtime;
use tokio::time::Instant;
use tokio_rustls::rustls::pki_types::ServerName;

use super::tls::Tls;
use super::{Address, Answer, ClientError, Credentials, Request, Transport};

/// The largest answer that is read, in bytes.
const ANSWER_MAX: usize = 16 << 20;

/// Requests over a Unix socket, or over TLS.
#[derive(Debug)]
pub(crate) struct Http {
    address: Address,
    /// For a daemon on another host.
    tls: Option<Tls>,
    runtime: Runtime,
}

impl Http {
    /// To the daemon at `address`, which is reached with the first request.
    ///
    /// # Errors
    /// The kernel has no descriptors left to wait with, or what a daemon on another host is to be shown cannot be
    /// used.
    pub(crate) fn new(address: &Address, credentials: &Credentials) -> Result<Self, ClientError> {
        let tls = match address {
            Address::Socket(_) => None,
            Address::Https { .. } => Some(credentials.load()?),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ClientError::Start)?;
        Ok(Self {
            address: address.clone(),
            tls,
            runtime,
        })
    }

    async fn carry(&self, request: &Request) -> Result<Answer, ClientError> {
        let connect = |source: io::Error| ClientError::Connect {
            address: self.address.to_string(),
            source,
        };
        match (&self.address, &self.tls) {
            (Address::Socket(path), _) => {
                let stream = UnixStream::connect(path).await.map_err(connect)?;
                exchange(stream, "node", None, request).await
            }
            (Address::Https { host, port }, Some(tls)) => {
                let name = ServerName::try_from(host.clone()).map_err(io::Error::other);
                let name = name.map_err(connect)?;
                let stream = TcpStream::connect((host.as_str(), *port)).await;
                let stream = tls.connector.connect(name, stream.map_err(connect)?).await;
                let authority = self.address.to_string();
                let authority = authority.trim_start_matches("https://");
                let authorization = Some(&tls.authorization);
                exchange(stream.map_err(connect)?, authority, authorization, request).await
            }
            (Address::Https { .. }, None) => Err(connect(io::ErrorKind::Unsupported.into())),
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
async fn exchange<S>(
    stream: S,
    host: &str,
    authorization: Option<&HeaderValue>,
    request: &Request,
) -> Result<Answer, ClientError>
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
    if let Some(authorization) = authorization {
        builder = builder.header(AUTHORIZATION, authorization);
    }
    if request.listen.is_some() {
        // From the first on.
        builder = builder.header("last-event-id", "0");
    }
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
        let body = response.into_body();
        let body = match request.listen.filter(|_| status.is_success()) {
            Some(time) => heard(body, time).await?,
            None => {
                let body = Limited::new(body, ANSWER_MAX).collect().await;
                let body = body.map_err(|error| match error.is::<LengthLimitError>() {
                    true => ClientError::TooLarge(ANSWER_MAX),
                    false => ClientError::Broken(error),
                });
                body?.to_bytes().to_vec()
            }
        };
        Ok(Answer { status, body })
    };
    // The connection has to be driven until the answer is there; how it ends after that is of no interest.
    let mut answer = std::pin::pin!(answer);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        answer = &mut answer => answer,
        _ = &mut connection => answer.await,
    }
}

/// What comes within `time`.
async fn heard(mut body: Incoming, time: Duration) -> Result<Vec<u8>, ClientError> {
    let end = Instant::now() + time;
    let mut heard = Vec::new();
    while let Ok(Some(frame)) = tokio::time::timeout_at(end, body.frame()).await {
        let frame = frame.map_err(|error| ClientError::Broken(error.into()))?;
        if let Some(data) = frame.data_ref() {
            heard.extend_from_slice(data);
        }
        if heard.len() > ANSWER_MAX {
            return Err(ClientError::TooLarge(ANSWER_MAX));
        }
    }
    Ok(heard)
}
