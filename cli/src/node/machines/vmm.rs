//! A machine's own API, as the node uses it: HTTP on the Unix socket of its process.
//!
//! One connection for each request. What comes from there is limited in size and time and checked: the process runs a
//! guest, and may be one that a guest has taken over.
//!
//! Owns the client's side of that API. It must not know why something is asked.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use vmm::http::ErrorBody;
use vmm::http::client::{Client, ClientError};
use vmm::http::request_id::REQUEST_ID;

use super::arrival::Coming;
use super::departure::{Account, MigrationView};
use super::record::EndedBecause;
use super::spec::NicId;
use super::steps::{Passed, SendRequest};

/// The longest answer that is read, in bytes. The longest there is lists a machine's NICs.
const ANSWER_MAX: usize = 1 << 20;
/// How long an answer may take that waits for nothing.
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// How long a start may take: memory is pinned for devices, some GiB in a second.
pub(crate) const START: Duration = Duration::from_secs(300);
/// How long a machine may take that reads certificates before it answers.
const ANSWER: Duration = Duration::from_secs(90);
/// Where a machine's migration is.
pub(crate) const MIGRATION: &str = "/v1/vm/migration";
/// How long a watch waits, in seconds.
const WATCH_SECONDS: u64 = 30;

/// Why a machine did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VmmError {
    /// Nobody listens.
    #[error("the machine's process does not listen on {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// No answer.
    #[error("the machine's process did not answer in {} s", .0.as_secs())]
    NotInTime(Duration),
    /// The connection broke.
    #[error("the machine's process did not answer")]
    Http(#[source] hyper::Error),
    /// There is no whole answer.
    #[error(transparent)]
    Client(Box<ClientError>),
    /// The answer's body ended early, or has no end.
    #[error("the machine's process did not answer as a whole")]
    Cut(#[source] axum::Error),
    /// The answer is none.
    #[error("the answer of the machine's process makes no sense")]
    Malformed(#[source] serde_json::Error),
    /// The request could not be formed.
    #[error("the request cannot be formed")]
    Request(#[source] axum::http::Error),
    /// The machine refuses.
    #[error("{}", .1.message)]
    Refused(StatusCode, Box<ErrorBody>, #[source] Option<Cause>),
}

impl From<ClientError> for VmmError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Connect { socket, source } => Self::Connect {
                path: socket,
                source,
            },
            ClientError::TooSlow { limit, .. } => Self::NotInTime(limit),
            error => Self::Client(Box::new(error)),
        }
    }
}

/// Causes that came as text.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Cause {
    text: String,
    #[source]
    source: Option<Box<Cause>>,
}

impl Cause {
    /// From the outermost to the innermost, at most a few.
    fn chain(texts: &[String]) -> Option<Self> {
        const CAUSES_MAX: usize = 16;
        let texts = texts.get(..CAUSES_MAX).unwrap_or(texts);
        texts.iter().rev().fold(None, |source, text| {
            Some(Self {
                text: text.clone(),
                source: source.map(Box::new),
            })
        })
    }
}

/// What a machine does, by its own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum VmmState {
    NotStarted,
    Starting,
    Running,
    Paused,
    Stopped,
}

/// A machine at one moment, by its own account. Fields that this program does not know are ignored: a
/// later program may run it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct VmmStatus {
    pub(crate) state: VmmState,
    pub(crate) generation: u64,
    pub(crate) pid: u32,
    #[serde(default)]
    pub(crate) nics: Vec<VmmNic>,
    #[serde(default)]
    pub(crate) end: Option<VmmEnd>,
}

/// Why a machine is over, by its own account.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct VmmEnd {
    pub(crate) reason: VmmEndReason,
    pub(crate) detail: String,
}

/// The kind of an end, by the machine's account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum VmmEndReason {
    PoweredOff,
    Stopped,
    Moved,
    Unsettled,
    Crashed,
    /// And what later versions may say.
    #[serde(other)]
    Failed,
}

impl From<VmmEndReason> for EndedBecause {
    fn from(reason: VmmEndReason) -> Self {
        match reason {
            VmmEndReason::PoweredOff => Self::PoweredOff,
            VmmEndReason::Stopped => Self::Stopped,
            VmmEndReason::Moved => Self::Moved,
            VmmEndReason::Unsettled => Self::Unsettled,
            VmmEndReason::Crashed => Self::Crashed,
            VmmEndReason::Failed => Self::Failed,
        }
    }
}

/// A NIC of a machine, by its own account.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct VmmNic {
    pub(crate) id: String,
    /// The character device that it is on.
    #[serde(default)]
    pub(crate) path: PathBuf,
}

/// What stands by for a NIC, by the machine's account.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct VmmStandBy {
    /// The character device that stands by for it.
    #[serde(default)]
    pub(crate) failover: Option<PathBuf>,
}

/// Which API a process has, and nothing else: what all levels have in common.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Handshake {
    pub(crate) pid: u32,
    pub(crate) version: String,
    /// The first programs did not say it.
    #[serde(default = "first_level")]
    pub(crate) api: u32,
}

fn first_level() -> u32 {
    1
}

/// The API on one socket.
#[derive(Debug, Clone)]
pub(crate) struct Vmm {
    socket: PathBuf,
}

impl Vmm {
    /// On this socket, which need not be there yet.
    pub(crate) fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// Sends a request as it is; the answer's body is still to be read.
    pub(crate) async fn send(
        &self,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, VmmError> {
        let stream =
            UnixStream::connect(&self.socket)
                .await
                .map_err(|source| VmmError::Connect {
                    path: self.socket.clone(),
                    source,
                })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(VmmError::Http)?;
        // It ends with the answer's body, or when nobody wants that any more.
        tokio::spawn(connection);
        sender.send_request(request).await.map_err(VmmError::Http)
    }

    /// Asks the machine to leave for another process; what it answers, whatever that is.
    pub(crate) async fn leave(&self, request: &SendRequest) -> Result<Passed, VmmError> {
        let mut builder = Request::builder()
            .method(Method::POST)
            .uri(MIGRATION)
            .header(header::CONNECTION, HeaderValue::from_static("close"));
        if let Some(id) = &request.request_id {
            builder = builder.header(REQUEST_ID, id);
        }
        let request = builder
            .body(request.body.clone())
            .map_err(VmmError::Request)?;
        let answer = self.client(ANSWER).send(request, &[]).await?;
        Ok(Passed {
            status: answer.status(),
            body: answer.into_body(),
        })
    }

    /// What the machine says of its last migration. A machine that has moved may end once it was asked.
    pub(crate) async fn migration(&self) -> Account {
        match self.get::<MigrationView>(MIGRATION, SOON).await {
            Ok(view) => Account::from(&view),
            Err(VmmError::Refused(StatusCode::NOT_FOUND, ..)) => Account::None,
            Err(_) => Account::Silent,
        }
    }

    /// What the machine's process says that waits for it to come.
    pub(crate) async fn coming(&self) -> Coming {
        match self.get::<MigrationView>(MIGRATION, SOON).await {
            Ok(view) => Coming::from(&view),
            Err(_) => Coming::Silent,
        }
    }

    fn client(&self, limit: Duration) -> Client {
        Client::new(&self.socket).time(limit).answer_max(ANSWER_MAX)
    }

    /// Asks, and reads the answer.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        limit: Duration,
    ) -> Result<Bytes, VmmError> {
        self.hand_over(method, path, body, limit, &[]).await
    }

    /// Asks, and passes open files on, which `body` names by their place in the list.
    pub(crate) async fn hand_over(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        limit: Duration,
        descriptors: &[OwnedFd],
    ) -> Result<Bytes, VmmError> {
        let body = match body {
            Some(body) => Bytes::from(serde_json::to_vec(body).map_err(VmmError::Malformed)?),
            None => Bytes::new(),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONNECTION, HeaderValue::from_static("close"))
            .body(body)
            .map_err(VmmError::Request)?;
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let answer = self.client(limit).send(request, &descriptors).await?;
        let (status, body) = (answer.status(), answer.into_body());
        match status.is_success() {
            true => Ok(body),
            false => {
                let body: ErrorBody = serde_json::from_slice(&body).map_err(VmmError::Malformed)?;
                let causes = Cause::chain(&body.causes);
                Err(VmmError::Refused(status, Box::new(body), causes))
            }
        }
    }

    async fn get<T: for<'de> Deserialize<'de>>(
        &self,
        path: &str,
        limit: Duration,
    ) -> Result<T, VmmError> {
        let body = self.ask(Method::GET, path, None::<&()>, limit).await?;
        serde_json::from_slice(&body).map_err(VmmError::Malformed)
    }

    /// Who it is.
    pub(crate) async fn handshake(&self) -> Result<Handshake, VmmError> {
        self.get("/v1/vm", SOON).await
    }

    /// What it does.
    pub(crate) async fn status(&self) -> Result<VmmStatus, VmmError> {
        self.get("/v1/vm", SOON).await
    }

    /// What is of interest of one of its NICs.
    pub(super) async fn nic<T: for<'de> Deserialize<'de>>(
        &self,
        id: &NicId,
    ) -> Result<T, VmmError> {
        self.get(&format!("/v1/vm/nics/{id}"), SOON).await
    }

    /// What it does once that is not what it did in generation `since`, or after a while.
    pub(crate) async fn watch(&self, since: u64) -> Result<VmmStatus, VmmError> {
        let path = format!("/v1/vm/watch?since={since}&timeout_s={WATCH_SECONDS}");
        let limit = Duration::from_secs(WATCH_SECONDS).saturating_add(SOON);
        self.get(&path, limit).await
    }

    /// Says where the guest is of a migration that is not settled.
    pub(crate) async fn settle(&self, here: bool) -> Result<(), VmmError> {
        #[derive(Serialize)]
        struct Settle {
            settle: &'static str,
        }
        let settle = if here { "Here" } else { "There" };
        self.ask(Method::PATCH, MIGRATION, Some(&Settle { settle }), START)
            .await
            .map(drop)
    }

    /// Tells it what to do.
    pub(crate) async fn want(&self, state: VmmState) -> Result<(), VmmError> {
        #[derive(Serialize)]
        struct Change {
            state: VmmState,
        }
        let change = Change { state };
        self.ask(Method::PATCH, "/v1/vm", Some(&change), START)
            .await
            .map(drop)
    }
}
