//! Errors as clients see them, and which status each has.
//!
//! Owns the body and the table. It must not know what was asked.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::body::{BODY_MAX, BODY_TIME};
use super::controller::{VmState, WATCHERS_MAX};
use crate::machine::{DeviceKind, MachineError, RequestError};

/// Why a request was not carried out. The machine is as before.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// No route.
    #[error("there is no {0} here")]
    NoSuchPath(String),
    /// A route, but not with this method.
    #[error("{path} does not know the method {method}")]
    Method {
        /// What was asked for.
        path: String,
        /// How.
        method: String,
    },
    /// Not JSON, or not UTF-8.
    #[error("the body is not JSON")]
    Malformed(#[source] serde_json::Error),
    /// JSON that does not say what it should.
    #[error("the body is not what is wanted{at}: {reason}")]
    Invalid {
        /// Where in the body: ` at vdpa[0].mac`.
        at: String,
        /// What is wrong there.
        reason: String,
    },
    /// A part of the URL that is not what it should be.
    #[error("{0}")]
    Parameter(String),
    /// A body that is too large.
    #[error("the body has more than {BODY_MAX} bytes")]
    TooLarge,
    /// A body that did not come in time.
    #[error("the body did not come within {} s", BODY_TIME.as_secs())]
    TooSlow,
    /// A body that ended early.
    #[error("the body could not be received")]
    Receive(#[source] axum::Error),
    /// Right, but not now.
    #[error("the machine is {state}: {remedy}")]
    WrongState {
        /// What it does.
        state: VmState,
        /// What to do instead, or first.
        remedy: &'static str,
    },
    /// Nothing to start or to show.
    #[error("the machine has no configuration yet")]
    NoConfig,
    /// The machine cannot be built or booted.
    #[error("the machine cannot be started")]
    Start(#[source] Box<MachineError>),
    /// The machine refuses.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Waiting clients take connections from others.
    #[error("{WATCHERS_MAX} clients wait for changes already")]
    TooManyWatchers,
    /// The process ends.
    #[error("this process ends")]
    Ending,
    /// A worker failed.
    #[error("the request was not finished")]
    Worker(#[source] tokio::task::JoinError),
}

impl ApiError {
    /// The status and the word for programs. The one place that decides it.
    pub(super) fn kind(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NoSuchPath(_) => (StatusCode::NOT_FOUND, "no_such_path"),
            Self::Method { .. } => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::Malformed(_) => (StatusCode::BAD_REQUEST, "malformed_body"),
            Self::Receive(_) => (StatusCode::BAD_REQUEST, "incomplete_body"),
            Self::Parameter(_) => (StatusCode::BAD_REQUEST, "bad_parameter"),
            Self::Invalid { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_body"),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            Self::TooSlow => (StatusCode::REQUEST_TIMEOUT, "body_too_slow"),
            Self::WrongState { .. } => (StatusCode::CONFLICT, "wrong_state"),
            Self::NoConfig => (StatusCode::CONFLICT, "no_configuration"),
            Self::Start(error) => machine(error),
            Self::Request(RequestError::Device(error)) => machine(error),
            Self::Request(RequestError::Ended) => (StatusCode::CONFLICT, "ended"),
            Self::Request(RequestError::Busy) => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
            Self::Request(RequestError::IdInUse(_)) => (StatusCode::CONFLICT, "id_in_use"),
            Self::Request(RequestError::NoSuchDevice(_)) => {
                (StatusCode::NOT_FOUND, "no_such_device")
            }
            Self::Request(RequestError::OtherKind { wanted, .. }) => match wanted {
                DeviceKind::Nic => (StatusCode::CONFLICT, "not_a_nic"),
                DeviceKind::Disk => (StatusCode::CONFLICT, "not_a_disk"),
            },
            Self::Request(RequestError::NoAnnouncement(_)) => {
                (StatusCode::CONFLICT, "cannot_announce")
            }
            Self::Request(RequestError::Wake(_)) | Self::Worker(_) => {
                (StatusCode::INTERNAL_SERVER_ERROR, "internal")
            }
            Self::TooManyWatchers => (StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers"),
            Self::Ending => (StatusCode::SERVICE_UNAVAILABLE, "ending"),
        }
    }

    /// What the client can do, where it is not in the message.
    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoSuchPath(_) | Self::Method { .. } | Self::Invalid { .. } => {
                Some("GET /v1/openapi.json describes what there is")
            }
            Self::NoConfig => Some("PUT /v1/vm gives the machine its configuration"),
            Self::Start(_) => Some("PUT /v1/vm with another configuration, or try again"),
            Self::Request(RequestError::Busy) | Self::TooManyWatchers => Some("try again later"),
            _ => None,
        }
    }
}

/// What of the machine's errors is the client's: what it named cannot be used.
fn machine(error: &MachineError) -> (StatusCode, &'static str) {
    match error {
        MachineError::Layout(_)
        | MachineError::Memory(_)
        | MachineError::Boot(_)
        | MachineError::Disk(_)
        | MachineError::Block { .. }
        | MachineError::Virtio { .. }
        | MachineError::Vdpa { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "unusable"),
        MachineError::Pci { .. }
        | MachineError::DuplicateId(_)
        | MachineError::TooManyDevices(_) => (StatusCode::CONFLICT, "no_room"),
        MachineError::Kvm(_)
        | MachineError::MemorySlot(_)
        | MachineError::Vcpu(_)
        | MachineError::Acpi(_)
        | MachineError::Bus(_)
        | MachineError::PciWindow(_)
        | MachineError::Host { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "host_failed"),
    }
}

/// What went wrong.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(super) struct ErrorBody {
    /// A word for programs, such as `wrong_state`.
    pub(super) code: String,
    /// A sentence for people.
    pub(super) message: String,
    /// Why, from the outermost cause to the innermost.
    pub(super) causes: Vec<String>,
    /// What can be done about it, where the message does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hint: Option<String>,
    /// The request's name, as in the header `x-request-id` and in the log.
    pub(super) request_id: String,
}

/// Travels with the response until the request's name is known: see `request_id.rs`.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, code) = self.kind();
        let mut causes = Vec::new();
        let mut cause = std::error::Error::source(&self);
        while let Some(error) = cause {
            causes.push(error.to_string());
            cause = error.source();
        }
        let body = ErrorBody {
            code: code.to_owned(),
            message: self.to_string(),
            causes,
            hint: self.hint().map(str::to_owned),
            request_id: String::new(),
        };
        let mut response = status.into_response();
        response.extensions_mut().insert(body);
        response
    }
}
