//! Errors as clients see them, and which status each has.
//!
//! Owns the table. It must not know what was asked.

use std::io::ErrorKind;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bellhop_api::machine::VmState;
use devices::virtio::pci::SwapError;

use super::controller::WATCHERS_MAX;
use crate::config::DescriptorError;
use crate::http::{HttpError, Problem};
use crate::machine::{DeviceKind, MachineError, RequestError, SnapshotError};
use crate::migration::endpoint::EndpointError;
use crate::snapshot::directory::CreateError;
use crate::vcpu::VcpuError;

/// Why a request was not carried out. The machine is as before.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// The request itself is wrong.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// A descriptor did not come along, or is no vDPA device.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
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
    /// The snapshot cannot be used.
    #[error(transparent)]
    Snapshot(SnapshotError),
    /// The machine refuses.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Nobody can come there.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// Nothing to show or to end.
    #[error("the machine has not been migrated, nor is it")]
    NoMigration,
    /// One at a time.
    #[error("a migration of the machine is under way; DELETE /v1/vm/migration ends it")]
    MigrationRuns,
    /// There is no doubt where the guest is.
    #[error("it is settled where the machine's guest is, or not decided yet")]
    Settled,
    /// The process has no room for a thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// Waiting clients take connections from others.
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
            Self::Start(error) => machine(error),
            Self::Request(RequestError::Device(error)) => machine(error),
            Self::Request(RequestError::Ended | RequestError::EndedBy(_)) => {
                (StatusCode::CONFLICT, "ended")
            }
            Self::Request(RequestError::Busy) => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
            Self::Request(RequestError::IdInUse(_)) => (StatusCode::CONFLICT, "id_in_use"),
            Self::Request(RequestError::NoSuchDevice(_)) => {
                (StatusCode::NOT_FOUND, "no_such_device")
            }
            Self::Request(RequestError::OtherKind { wanted, .. }) => match wanted {
                DeviceKind::Nic => (StatusCode::CONFLICT, "not_a_nic"),
                DeviceKind::Disk => (StatusCode::CONFLICT, "not_a_disk"),
            },
            Self::Request(RequestError::OwnFailover(_)) => {
                (StatusCode::UNPROCESSABLE_ENTITY, "unusable")
            }
            Self::Request(RequestError::NoAnnouncement(_)) => {
                (StatusCode::CONFLICT, "cannot_announce")
            }
            Self::Request(RequestError::DirtyLog { .. }) => {
                (StatusCode::CONFLICT, "cannot_follow_writes")
            }
            Self::Request(RequestError::Migrating | RequestError::StandsStill) => {
                (StatusCode::CONFLICT, "migrating")
            }
            Self::Request(RequestError::Crashed(_)) => (StatusCode::CONFLICT, "crashed"),
            Self::Request(RequestError::NotMovable(_)) => (StatusCode::CONFLICT, "cannot_move"),
            Self::Endpoint(EndpointError::Socket(_) | EndpointError::Listen { .. }) => {
                (StatusCode::UNPROCESSABLE_ENTITY, "cannot_listen")
            }
            Self::Endpoint(EndpointError::Connect { .. }) => {
                (StatusCode::BAD_GATEWAY, "no_destination")
            }
            Self::Endpoint(
                EndpointError::TlsOnUnix(_) | EndpointError::Tls(_) | EndpointError::NoTls(_),
            ) => (StatusCode::UNPROCESSABLE_ENTITY, "bad_tls"),
            Self::NoMigration => (StatusCode::NOT_FOUND, "no_migration"),
            Self::MigrationRuns => (StatusCode::CONFLICT, "migrating"),
            Self::Settled | Self::Request(RequestError::Settled) => {
                (StatusCode::CONFLICT, "settled")
            }
            Self::Thread(_) => (StatusCode::INTERNAL_SERVER_ERROR, "host_failed"),
            Self::Request(RequestError::Saving) => (StatusCode::CONFLICT, "saving"),
            Self::Request(RequestError::Save { .. }) => (StatusCode::CONFLICT, "cannot_be_saved"),
            Self::Request(RequestError::Snapshot(error)) | Self::Snapshot(error) => snapshot(error),
            Self::Request(RequestError::Swap { source, .. }) => swap(source),
            Self::Request(RequestError::Wake(_)) => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
            Self::TooManyWatchers => (StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers"),
            Self::Ending => (StatusCode::SERVICE_UNAVAILABLE, "ending"),
        }
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Http(error) => error.hint(),
            Self::NoConfig => Some("PUT /v1/vm gives the machine its configuration"),
            Self::Start(_) => Some("PUT /v1/vm with another configuration, or try again"),
            Self::Request(RequestError::Busy) | Self::TooManyWatchers => Some("try again later"),
            _ => None,
        }
    }
}

/// Why a NIC keeps its device.
fn swap(error: &SwapError) -> (StatusCode, &'static str) {
    match error {
        SwapError::DeviceType { .. }
        | SwapError::Features { .. }
        | SwapError::QueueCount { .. }
        | SwapError::QueueSize { .. }
        | SwapError::ConfigLen { .. }
        | SwapError::Refused(_) => (StatusCode::UNPROCESSABLE_ENTITY, "incompatible"),
        SwapError::Start(_) => (StatusCode::UNPROCESSABLE_ENTITY, "unusable"),
        SwapError::Saved | SwapError::InUse | SwapError::HandOver(_) => {
            (StatusCode::CONFLICT, "cannot_hand_over")
        }
        SwapError::Failed(_) | SwapError::Lost { .. } => {
            (StatusCode::INTERNAL_SERVER_ERROR, "nic_lost")
        }
    }
}

/// What of the machine's errors is the client's: what it named cannot be used.
fn machine(error: &MachineError) -> (StatusCode, &'static str) {
    match error {
        MachineError::Baseline(_)
        | MachineError::Layout(_)
        | MachineError::Memory(_)
        | MachineError::Affinity(_)
        | MachineError::Placement(_)
        | MachineError::Vcpu(VcpuError::Affinity { .. })
        | MachineError::Boot(_)
        | MachineError::Disk(_)
        | MachineError::Block { .. }
        | MachineError::Virtio { .. }
        | MachineError::Descriptor { .. }
        | MachineError::Vdpa { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "unusable"),
        MachineError::Pci { .. }
        | MachineError::DuplicateId(_)
        | MachineError::TooManyDevices(_) => (StatusCode::CONFLICT, "no_room"),
        MachineError::Snapshot(error) => snapshot(error),
        MachineError::NotArrived(_) => (StatusCode::CONFLICT, "not_arrived"),
        MachineError::Kvm(_)
        | MachineError::MemorySlot(_)
        | MachineError::Vcpu(_)
        | MachineError::Acpi(_)
        | MachineError::Bus(_)
        | MachineError::PciWindow(_)
        | MachineError::Host { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "host_failed"),
    }
}

/// What a snapshot cannot be for; the rest is the host's fault.
fn snapshot(error: &SnapshotError) -> (StatusCode, &'static str) {
    match error {
        SnapshotError::SaveMemory(_) | SnapshotError::Write(_) => {
            (StatusCode::INTERNAL_SERVER_ERROR, "host_failed")
        }
        SnapshotError::Create(CreateError::Io { source, .. })
            if !matches!(
                source.kind(),
                ErrorKind::NotFound
                    | ErrorKind::NotADirectory
                    | ErrorKind::PermissionDenied
                    | ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            (StatusCode::INTERNAL_SERVER_ERROR, "host_failed")
        }
        _ => (StatusCode::UNPROCESSABLE_ENTITY, "unusable"),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.to_response()
    }
}
