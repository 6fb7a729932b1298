//! Errors for clients, and the status of each.
//!
//! Owns the table. It must not know the requests.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bellhop_api::machine::VmState;
use devices::ErrorKind as DeviceErrorKind;

use super::WATCHERS_MAX;
use crate::config::DescriptorError;
use crate::http::{HttpError, Problem};
use crate::machine::{DeviceKind, RequestError};
use crate::{Error, ErrorKind};

/// Why a request failed. The VM is as before.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// The request itself is invalid.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// A descriptor did not arrive, or is not a vDPA device.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The request is not possible in the current state.
    #[error("the machine is {state}: {remedy}")]
    WrongState {
        /// The current state.
        state: VmState,
        /// The remedy.
        remedy: &'static str,
    },
    /// There is no configuration to start or to show.
    #[error("the machine has no configuration yet")]
    NoConfig,
    /// The VM cannot be built or booted.
    #[error("the machine cannot be started")]
    Start(#[source] Error),
    /// The VM refuses.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The named object cannot be used, or the host failed.
    #[error(transparent)]
    Failed(#[from] Error),
    /// There is no migration to show or to cancel.
    #[error("the machine was never migrated")]
    NoMigration,
    /// A migration is in progress already.
    #[error("a migration of the machine is in progress; DELETE /v1/vm/migration cancels it")]
    MigrationRuns,
    /// The place of the guest is known.
    #[error("the guest's location is known, or the migration has not ended")]
    Resolved,
    /// The process cannot create a thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// Too many clients wait: they take connections from others.
    #[error("{WATCHERS_MAX} clients wait for changes already")]
    TooManyWatchers,
    /// The process ends.
    #[error("this process ends")]
    Ending,
}

impl Problem for ApiError {
    fn kind(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Http(error) => error.kind(),
            Self::Descriptor(_) => (StatusCode::UNPROCESSABLE_ENTITY, "bad_descriptor"),
            Self::WrongState { .. } => (StatusCode::CONFLICT, "wrong_state"),
            Self::NoConfig => (StatusCode::CONFLICT, "no_configuration"),
            Self::Start(error) | Self::Failed(error) => machine(error.kind()),
            Self::Request(error) => request(error),
            Self::NoMigration => (StatusCode::NOT_FOUND, "no_migration"),
            Self::MigrationRuns => (StatusCode::CONFLICT, "migrating"),
            Self::Resolved => (StatusCode::CONFLICT, "resolved"),
            Self::Thread(_) => (StatusCode::INTERNAL_SERVER_ERROR, "host_failed"),
            Self::TooManyWatchers => (StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers"),
            Self::Ending => (StatusCode::SERVICE_UNAVAILABLE, "ending"),
        }
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Http(error) => error.hint(),
            Self::NoConfig => Some("configure the machine with PUT /v1/vm"),
            Self::Start(_) => Some("PUT /v1/vm with another configuration, or try again"),
            Self::Request(RequestError::Busy) | Self::TooManyWatchers => Some("try again later"),
            _ => None,
        }
    }
}

/// The status and code of a refusal by the VM.
fn request(error: &RequestError) -> (StatusCode, &'static str) {
    match error {
        RequestError::Device(error) => machine(error.kind()),
        RequestError::Snapshot(error) => machine(error.kind()),
        RequestError::Swap { source, .. } => swap(source.kind()),
        RequestError::Ended | RequestError::EndedBy(_) => (StatusCode::CONFLICT, "ended"),
        RequestError::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
        RequestError::IdInUse(_) => (StatusCode::CONFLICT, "id_in_use"),
        RequestError::NoSuchDevice(_) => (StatusCode::NOT_FOUND, "no_such_device"),
        RequestError::OtherKind { wanted, .. } => match wanted {
            DeviceKind::Nic => (StatusCode::CONFLICT, "not_a_nic"),
            DeviceKind::Disk => (StatusCode::CONFLICT, "not_a_disk"),
            DeviceKind::Vfio => (StatusCode::CONFLICT, "not_a_vfio_device"),
        },
        RequestError::OwnBackup(_) => (StatusCode::UNPROCESSABLE_ENTITY, "unusable"),
        RequestError::NoAnnouncement(_) => (StatusCode::CONFLICT, "cannot_announce"),
        RequestError::DirtyLog { .. } => (StatusCode::CONFLICT, "cannot_follow_writes"),
        RequestError::Migrating | RequestError::Quiesced => (StatusCode::CONFLICT, "migrating"),
        RequestError::Resolved => (StatusCode::CONFLICT, "resolved"),
        RequestError::Crashed(_) => (StatusCode::CONFLICT, "crashed"),
        RequestError::NotMovable(_) => (StatusCode::CONFLICT, "cannot_move"),
        RequestError::Saving => (StatusCode::CONFLICT, "saving"),
        RequestError::NotSavable { .. }
        | RequestError::Removed(_)
        | RequestError::Save { .. }
        | RequestError::HungDisk => (StatusCode::CONFLICT, "cannot_be_saved"),
        RequestError::Wake(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
    }
}

/// The status and code of a failed move of a NIC.
fn swap(kind: DeviceErrorKind) -> (StatusCode, &'static str) {
    match kind {
        DeviceErrorKind::CannotStart => (StatusCode::UNPROCESSABLE_ENTITY, "unusable"),
        DeviceErrorKind::CannotHandOver => (StatusCode::CONFLICT, "cannot_hand_over"),
        DeviceErrorKind::Lost => (StatusCode::INTERNAL_SERVER_ERROR, "nic_lost"),
        _ => (StatusCode::UNPROCESSABLE_ENTITY, "incompatible"),
    }
}

/// The status and code of the VM's errors that the client can fix: the named object cannot be used.
fn machine(kind: ErrorKind) -> (StatusCode, &'static str) {
    match kind {
        ErrorKind::Unusable => (StatusCode::UNPROCESSABLE_ENTITY, "unusable"),
        ErrorKind::NoRoom => (StatusCode::CONFLICT, "no_room"),
        ErrorKind::NotArrived => (StatusCode::CONFLICT, "not_arrived"),
        ErrorKind::CannotListen => (StatusCode::UNPROCESSABLE_ENTITY, "cannot_listen"),
        ErrorKind::NoDestination => (StatusCode::BAD_GATEWAY, "no_destination"),
        ErrorKind::BadTls => (StatusCode::UNPROCESSABLE_ENTITY, "bad_tls"),
        ErrorKind::Host => (StatusCode::INTERNAL_SERVER_ERROR, "host_failed"),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.to_response()
    }
}
