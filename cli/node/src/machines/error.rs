//! Errors about VMs that several requests share, and their statuses.
//!
//! Owns their texts.

use axum::http::StatusCode;
use bellhop_api::node::BadDeviceId;
use vdpa_mgmt::nic::{MakeError, NicError, RemoveError};

use super::spec::{DeviceId, NicId, VmName};
use crate::error::{Error, ErrorKind, HOST_FAILED, UNUSABLE, conflict};

pub(crate) fn no_vm(vm: &VmName) -> Error {
    let message = format!("the virtual machine {vm} does not exist");
    let error = Error::answered(StatusCode::NOT_FOUND, "no_such_vm", message);
    error.hint("GET /v1/vms lists them")
}

pub(super) fn no_nic(vm: &VmName, id: &NicId) -> Error {
    let message = format!("{vm} has no NIC {id}");
    Error::answered(StatusCode::NOT_FOUND, "no_such_device", message)
}

pub(super) fn other_nic(vm: &VmName, id: &NicId) -> Error {
    let message = format!("{vm} has another NIC {id}: remove it first, or use another name");
    Error::conflict("id_in_use", message)
}

pub(crate) fn no_disk(vm: &VmName, id: &DeviceId) -> Error {
    let message = format!("{vm} has no disk {id}");
    let error = Error::answered(StatusCode::NOT_FOUND, "no_such_device", message);
    error.hint("GET /v1/vms/{name}/disks lists its disks")
}

pub(crate) fn no_function(vm: &VmName, id: &DeviceId) -> Error {
    let message = format!("{vm} has no function {id}");
    let error = Error::answered(StatusCode::NOT_FOUND, "no_such_device", message);
    error.hint("GET /v1/vms/{name}/vfio lists its functions")
}

/// Another device of the VM has this name.
pub(super) fn other_device(vm: &VmName, id: &DeviceId) -> Error {
    let message = format!("{vm} has another device {id}: remove it first, or use another name");
    Error::conflict("id_in_use", message)
}

pub(super) fn arriving(vm: &VmName) -> Error {
    let message =
        format!("{vm} is still arriving from another node: wait for it, or cancel its migration");
    Error::conflict("arriving", message).hint("DELETE /v1/vms/{name}/migration cancels it")
}

pub(super) fn has_come(vm: &VmName) -> Error {
    let message = format!("{vm} has arrived, or may have: cannot cancel its migration");
    Error::new(ErrorKind::HasCome, message)
}

pub(super) fn deleting(vm: &VmName) -> Error {
    let message = format!("{vm} is being deleted: try again later");
    Error::conflict("deleting", message)
}

pub(super) fn migrating(vm: &VmName) -> Error {
    let message = format!("{vm} is migrating: change it after the migration");
    Error::conflict("migrating", message)
}

pub(super) fn not_running(vm: &VmName) -> Error {
    let message = format!("{vm} does not run: start it first");
    Error::conflict("not_running", message)
}

pub(super) fn starting(vm: &VmName) -> Error {
    let message = format!("{vm} is starting: try again when it runs");
    Error::conflict("starting", message).hint("GET /v1/vms/{name} shows its phase")
}

/// The operation is not possible on a running VM.
pub(super) fn vm_runs(vm: &VmName, what: &str, hint: &'static str) -> Error {
    Error::conflict("vm_runs", format!("cannot {what} {vm}: it runs")).hint(hint)
}

/// A worker thread failed.
pub(crate) fn unfinished(source: tokio::task::JoinError) -> Error {
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
