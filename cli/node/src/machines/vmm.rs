//! The client for a VM's own API: HTTP on the Unix socket of its process.
//!
//! Each request has its own connection. Answers are limited in size and time and are validated,
//! because the process runs a guest and the guest may have compromised it.
//!
//! Owns the client's side of that API.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Method, Request, Response, StatusCode, header};
use bellhop_api::machine::{
    Handshake, MigrationStatus, NicInfo, Place, ResolveRequest, SNAPSHOT_TIME, SnapshotInfo,
    SnapshotRequest, UpgradeRequest, VmChange, VmStatus, WantedState,
};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmm::http::ErrorBody;
use vmm::http::budget::BudgetPlace;
use vmm::http::client::{Client, ClientError, ServerProcess};
use vmm::http::request_id::REQUEST_ID;

use super::incoming::IncomingReport;
use super::outgoing::MigrationReport;
use super::spec::{DeviceId, NicId};
use super::steps::{ProxiedResponse, SendRequest};
use crate::error::{Error, ErrorKind};

/// The longest accepted answer in bytes. The longest real one lists a VM's NICs.
const ANSWER_MAX: usize = 1 << 20;
/// The timeout of requests that wait for nothing.
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// The timeout of a start: memory is pinned for devices, at some GiB per second.
pub(crate) const START: Duration = Duration::from_secs(300);
/// The timeout of requests for which the VM reads certificates first.
const ANSWER: Duration = Duration::from_secs(90);
/// The path of a VM's migration.
pub(crate) const MIGRATION: &str = "/v1/vm/migration";
/// How long a watch waits, in seconds.
const WATCH_SECONDS: u64 = 30;

/// Error codes of the VM's API that pass through unchanged.
const CODES: [&str; 23] = [
    "resolved",
    "unusable",
    "no_room",
    "host_failed",
    "wrong_state",
    "no_configuration",
    "ended",
    "busy",
    "id_in_use",
    "no_such_device",
    "not_a_nic",
    "incompatible",
    "cannot_hand_over",
    "nic_lost",
    "bad_descriptor",
    "invalid_body",
    "ending",
    "no_migration",
    "migrating",
    "saving",
    "cannot_be_saved",
    "cannot_follow_writes",
    "crashed",
];
/// The hint for a process that does not answer.
const ENDED: &str = "GET the virtual machine: it may have ended";

/// A VM's process does not answer.
pub(crate) fn no_answer(message: &str) -> Error {
    Error::answered(StatusCode::BAD_GATEWAY, "no_answer", message)
}

/// A VM's process does not answer in time.
pub(crate) fn not_in_time(limit: Duration) -> Error {
    let seconds = limit.as_secs();
    let message = format!("the VM's process did not answer within {seconds} s");
    Error::answered(StatusCode::GATEWAY_TIMEOUT, "no_answer", message).hint(ENDED)
}

/// A message to or from a VM's process is not JSON, or has the wrong form.
pub(super) fn malformed(source: serde_json::Error) -> Error {
    let message = "cannot decode the answer of the VM's process";
    Error::new(BAD_ANSWER, message).because(source)
}

/// A request to a VM's process cannot be built.
pub(crate) fn unformed(source: axum::http::Error) -> Error {
    Error::new(BAD_ANSWER, "cannot build the request").because(source)
}

const BAD_ANSWER: ErrorKind = ErrorKind::Answer(StatusCode::BAD_GATEWAY, "bad_answer");

/// The longest text of a refusal, in characters: the process may be hostile.
const TEXT_MAX: usize = 4096;

/// A refusal in the words of the VM's process.
fn refused(status: StatusCode, body: ErrorBody) -> Error {
    let code = CODES.iter().find(|code| **code == body.code);
    let kind = ErrorKind::Refused(status, code.copied().unwrap_or("refused"));
    let error = Error::new(kind, short(&body.message));
    match causes(&body.causes) {
        Some(cause) => error.because(cause),
        None => error,
    }
}

/// Causes that arrived as text, the outermost first; their number is limited.
fn causes(texts: &[String]) -> Option<Error> {
    const CAUSES_MAX: usize = 16;
    let texts = texts.get(..CAUSES_MAX).unwrap_or(texts);
    texts.iter().rev().fold(None, |source, text| {
        let error = Error::failed(short(text));
        Some(match source {
            Some(source) => error.because(source),
            None => error,
        })
    })
}

fn short(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}

impl From<ClientError> for Error {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Connect { server, source } => {
                let message = format!("the VM's process does not listen on {server}");
                let error = Self::new(ErrorKind::NotListening, message);
                error.because(source).hint(ENDED)
            }
            ClientError::TooSlow { limit, .. } => not_in_time(limit),
            error => {
                let kind = ErrorKind::Answer(StatusCode::BAD_GATEWAY, "no_answer");
                Self::transparent(kind, error)
            }
        }
    }
}

/// The API on one socket.
#[derive(Debug, Clone)]
pub(crate) struct Vmm {
    socket: PathBuf,
    /// That of the client for whom the request is sent; none for the daemon's own requests.
    _place: Option<Arc<BudgetPlace>>,
}

impl Vmm {
    /// A client for this socket, which need not exist yet.
    pub(crate) fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            _place: None,
        }
    }

    /// The same, for a client that holds this place meanwhile.
    pub(super) fn holding(self, place: BudgetPlace) -> Self {
        let _place = Some(Arc::new(place));
        Self { _place, ..self }
    }

    /// Sends a request unchanged; the caller reads the answer's body.
    pub(crate) async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, Error> {
        let answer = self.client(ANSWER).open(request).await;
        answer.map_err(|error| match error {
            ClientError::Http { source, .. } => {
                no_answer("the VM's process did not answer").because(source)
            }
            error => error.into(),
        })
    }

    /// Requests the VM to leave for another process, with open files that the request names by
    /// their index; returns its answer unchanged.
    pub(crate) async fn leave(
        &self,
        request: &SendRequest,
        descriptors: &[OwnedFd],
    ) -> Result<ProxiedResponse, Error> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(MIGRATION)
            .header(header::CONNECTION, HeaderValue::from_static("close"))
            .header(REQUEST_ID, &request.request_id)
            .body(request.body.clone())
            .map_err(unformed)?;
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let answer = self.client(ANSWER).send(request, &descriptors).await?;
        Ok(ProxiedResponse {
            status: answer.status(),
            body: answer.into_body(),
        })
    }

    /// The VM's report about its last migration. A VM that has moved may exit after this query.
    pub(crate) async fn migration(&self) -> Result<MigrationStatus, MigrationReport> {
        let status = self.get(MIGRATION, SOON).await;
        status.map_err(|error: Error| {
            if error.is_refused(StatusCode::NOT_FOUND) {
                MigrationReport::None
            } else {
                MigrationReport::Silent
            }
        })
    }

    /// Cancels the migration that is in progress.
    pub(crate) async fn cancel_migration(&self) -> Result<(), Error> {
        self.ask(Method::DELETE, MIGRATION, None::<&()>, SOON)
            .await
            .map(drop)
    }

    /// Writes a snapshot.
    pub(crate) async fn snapshot(&self, wanted: &SnapshotRequest) -> Result<SnapshotInfo, Error> {
        let path = "/v1/vm/snapshot";
        let body = self.ask(Method::POST, path, Some(wanted), SNAPSHOT_TIME);
        serde_json::from_slice(&body.await?).map_err(malformed)
    }

    /// Begins an upgrade; the status contains its result.
    pub(crate) async fn upgrade(&self, wanted: &UpgradeRequest) -> Result<(), Error> {
        self.ask(Method::POST, "/v1/vm/upgrade", Some(wanted), ANSWER)
            .await
            .map(drop)
    }

    /// The report of a process that waits for an incoming VM.
    pub(crate) async fn incoming_report(&self) -> IncomingReport {
        match self.get::<MigrationStatus>(MIGRATION, SOON).await {
            Ok(status) => IncomingReport::from(&status),
            Err(_) => IncomingReport::Silent,
        }
    }

    fn client(&self, limit: Duration) -> Client {
        Client::new(&self.socket).time(limit).answer_max(ANSWER_MAX)
    }

    /// Sends a request, and reads the answer.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        limit: Duration,
    ) -> Result<Bytes, Error> {
        self.hand_over(method, path, body, limit, &[]).await
    }

    /// Sends a request with open files, which `body` names by their index in the list.
    pub(crate) async fn hand_over(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        limit: Duration,
        descriptors: &[OwnedFd],
    ) -> Result<Bytes, Error> {
        let answer = self.exchange(method, path, body, limit, descriptors);
        Ok(answer.await?.into_body())
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        limit: Duration,
        descriptors: &[OwnedFd],
    ) -> Result<Response<Bytes>, Error> {
        let body = match body {
            Some(body) => Bytes::from(serde_json::to_vec(body).map_err(malformed)?),
            None => Bytes::new(),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONNECTION, HeaderValue::from_static("close"))
            .body(body)
            .map_err(unformed)?;
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let answer = self.client(limit).send(request, &descriptors).await?;
        let status = answer.status();
        if status.is_success() {
            Ok(answer)
        } else {
            let body = serde_json::from_slice::<ErrorBody>(answer.body()).map_err(malformed)?;
            Err(refused(status, body))
        }
    }

    async fn get<T: for<'de> Deserialize<'de>>(
        &self,
        path: &str,
        limit: Duration,
    ) -> Result<T, Error> {
        let body = self.ask(Method::GET, path, None::<&()>, limit).await?;
        serde_json::from_slice(&body).map_err(malformed)
    }

    /// The same, with the process ID as the kernel reports it: a confined process is the first one
    /// of its own namespace.
    async fn get_with_pid<T: for<'de> Deserialize<'de>>(
        &self,
        path: &str,
        limit: Duration,
        pid: impl FnOnce(&mut T) -> &mut u32,
    ) -> Result<T, Error> {
        let answer = self.exchange(Method::GET, path, None::<&()>, limit, &[]);
        let answer = answer.await?;
        let mut value = serde_json::from_slice(answer.body()).map_err(malformed)?;
        if let Some(ServerProcess(process)) = answer.extensions().get() {
            *pid(&mut value) = *process;
        }
        Ok(value)
    }

    /// The program behind the socket.
    pub(crate) async fn handshake(&self) -> Result<Handshake, Error> {
        self.get_with_pid("/v1/vm", SOON, |shown: &mut Handshake| &mut shown.pid)
            .await
    }

    /// The VM's state.
    pub(crate) async fn status(&self) -> Result<VmStatus, Error> {
        self.get_with_pid("/v1/vm", SOON, |shown: &mut VmStatus| &mut shown.pid)
            .await
    }

    /// One of its NICs.
    pub(crate) async fn nic(&self, id: &NicId) -> Result<NicInfo, Error> {
        self.get(&format!("/v1/vm/nics/{id}"), SOON).await
    }

    /// All its disks, as the VM reports them.
    pub(crate) async fn disks(&self) -> Result<Value, Error> {
        self.get("/v1/vm/disks", SOON).await
    }

    /// One of its disks, as the VM reports it.
    pub(crate) async fn disk(&self, id: &DeviceId) -> Result<Value, Error> {
        self.get(&format!("/v1/vm/disks/{id}"), SOON).await
    }

    /// All its functions by VFIO, as the VM reports them.
    pub(crate) async fn functions(&self) -> Result<Value, Error> {
        self.get("/v1/vm/vfio", SOON).await
    }

    /// One of its functions by VFIO, as the VM reports it.
    pub(crate) async fn function(&self, id: &DeviceId) -> Result<Value, Error> {
        self.get(&format!("/v1/vm/vfio/{id}"), SOON).await
    }

    /// The VM's state once it differs from that of generation `since`, or after a timeout.
    pub(crate) async fn watch(&self, since: u64) -> Result<VmStatus, Error> {
        let path = format!("/v1/vm/watch?since={since}&timeout_s={WATCH_SECONDS}");
        let limit = Duration::from_secs(WATCH_SECONDS).saturating_add(SOON);
        self.get_with_pid(&path, limit, |shown: &mut VmStatus| &mut shown.pid)
            .await
    }

    /// Resolves where the guest of an indeterminate migration is.
    pub(crate) async fn resolve(&self, here: bool) -> Result<(), Error> {
        let resolve = if here { Place::Here } else { Place::There };
        let change = ResolveRequest { resolve };
        self.ask(Method::PATCH, MIGRATION, Some(&change), START)
            .await
            .map(drop)
    }

    /// Presses its power button.
    pub(crate) async fn press_button(&self) -> Result<(), Error> {
        let path = "/v1/vm/power-button";
        self.ask(Method::POST, path, None::<&()>, SOON)
            .await
            .map(drop)
    }

    /// Requests a state.
    pub(crate) async fn want(&self, state: WantedState) -> Result<(), Error> {
        let change = VmChange { state };
        self.ask(Method::PATCH, "/v1/vm", Some(&change), START)
            .await
            .map(drop)
    }
}
