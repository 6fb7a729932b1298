//! Errors about VMs that several requests share, and their statuses.
//!
//! Owns their texts. It must not know the request.

use axum::http::StatusCode;
use bellhop_api::node::BadDeviceId;
use vdpa_mgmt::nic::{MakeError, NicError, RemoveError};

use super::spec::{DeviceId, NicId, VmName};
use crate::error::{Error, ErrorKind, HOST_FAILED, UNUSABLE, conflict};

pub(crate) fn no_vm(vm: &VmName) -> Error {
    let message = format!("there is no virtual machine {vm}");
    let error = Error::answered(StatusCode::NOT_FOUND, "no_such_vm", message);
    error.hint("GET /v1/vms lists them")
}

pub(super) fn no_nic(vm: &VmName, id: &NicId) -> Error {
    let message = format!("{vm} has no NIC {id}");
    Error::answered(StatusCode::NOT_FOUND, "no_such_device", message)
}

pub(super) fn other_nic(vm: &VmName, id: &NicId) -> Error {
    let message =
        format!("{vm} has another NIC {id}: take it away first, or give this one another name");
    Error::conflict("id_in_use", message)
}

pub(crate) fn no_disk(vm: &VmName, id: &DeviceId) -> Error {
    let message = format!("{vm} has no disk {id}");
    let error = Error::answered(StatusCode::NOT_FOUND, "no_such_device", message);
    error.hint("GET /v1/vms/{name}/disks lists its disks")
}

/// Another device of the VM has this name.
pub(super) fn other_device(vm: &VmName, id: &DeviceId) -> Error {
    let message =
        format!("{vm} has another device {id}: remove that first, or give this one another name");
    Error::conflict("id_in_use", message)
}

pub(super) fn arriving(vm: &VmName) -> Error {
    let message =
        format!("{vm} is still coming from another node: wait until it has, or call it off");
    Error::conflict("arriving", message).hint("DELETE /v1/vms/{name}/migration calls it off")
}

pub(super) fn has_come(vm: &VmName) -> Error {
    let message = format!("{vm} arrived, or may have arrived: the move cannot be cancelled");
    Error::new(ErrorKind::HasCome, message)
}

pub(super) fn deleting(vm: &VmName) -> Error {
    let message = format!("{vm} is being deleted: try again when it is gone");
    Error::conflict("deleting", message)
}

pub(super) fn migrating(vm: &VmName) -> Error {
    let message = format!("{vm} is being migrated: change it when the migration has ended");
    Error::conflict("migrating", message)
}

pub(super) fn not_running(vm: &VmName) -> Error {
    let message = format!("{vm} does not run: start it first");
    Error::conflict("not_running", message)
}

/// The operation is not possible on a running VM.
pub(super) fn vm_runs(vm: &VmName, what: &str, hint: &'static str) -> Error {
    Error::conflict("vm_runs", format!("cannot {what} {vm}: it runs")).hint(hint)
}

/// A worker thread failed.
pub(super) fn unfinished(source: tokio::task::JoinError) -> Error {
    let message = "the request was not finished";
    Error::answered(StatusCode::INTERNAL_SERVER_ERROR, "internal", message).because(source)
}

vdpa::error_from! {
    BadDeviceId as error => ErrorKind::Answer(StatusCode::BAD_REQUEST, "bad_name"),
    NicError as error => kind(&error),
    MakeError as error => kind(&error.source),
    RemoveError as error => match error {
        RemoveError::InUse(_) | RemoveError::NotForGuests { .. } => conflict("in_use"),
        RemoveError::Incomplete { .. } => HOST_FAILED,
    },
}

fn kind(error: &NicError) -> ErrorKind {
    match error {
        NicError::NoneFree { .. } | NicError::NoSfnum(_) => conflict("no_room"),
        NicError::NameTaken(_) | NicError::RecordTaken(_) => conflict("name_taken"),
        NicError::Record(_) | NicError::NotInTime { .. } => HOST_FAILED,
        // All other errors concern an object that the request names.
        _ => UNUSABLE,
    }
}
