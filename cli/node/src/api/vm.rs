//! `/v1/vms/{name}`: one virtual machine, from its making to its end.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::machine::VmChange;
use bellhop_api::node::VmInfo;
use bellhop_api::responses::{NameErrors, NamedChangeErrors, ProcessErrors};
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;

use super::state::Api;
use super::vm_path::VmPath;
use super::vms;
use crate::context::Node;
use crate::error::Error;
use crate::machines::Put;
use crate::machines::error::no_vm;
use crate::machines::spec::{VmName, VmSpec};

/// It as it is now.
pub(super) fn info(node: &Node, name: &VmName) -> Result<Json<VmInfo>, Error> {
    let view = node.machines.show(name)?;
    let info = vms::info(node, name, view);
    Ok(Json(info.ok_or_else(|| no_vm(name))?))
}

/// Read the state of a virtual machine
///
/// `GET /v1/vms/{name}/spec` has its configuration.
#[utoipa::path(get, path = "/v1/vms/{name}", operation_id = "get_vm", params(VmPath), responses(
    (status = 200, description = "The virtual machine", body = VmInfo),
    NameErrors,
))]
pub(super) async fn show(State(node): Api, VmPath { name }: VmPath) -> Result<Json<VmInfo>, Error> {
    info(&node, &name)
}

/// Read the configuration of a virtual machine
///
/// As it was created, with all changes since.
#[utoipa::path(get, path = "/v1/vms/{name}/spec", operation_id = "get_vm_spec",
    params(VmPath), responses(
    (status = 200, description = "As it was asked for, with what was changed since", body = VmSpec),
    NameErrors,
))]
pub(super) async fn spec(State(node): Api, VmPath { name }: VmPath) -> Result<Json<VmSpec>, Error> {
    let record = node.machines.show(&name)?.record;
    Ok(Json(record.ok_or_else(|| no_vm(&name))?.spec))
}

/// Make a virtual machine, with its NICs
///
/// All of it, or nothing: a step that fails undoes those before it. The same again changes nothing,
/// but has it run or stop as it says; another one replaces it if it is stopped.
#[utoipa::path(put, path = "/v1/vms/{name}", operation_id = "put_vm",
    params(VmPath), request_body = VmSpec, responses(
    (status = 200, description = "It was there already; or was stopped, and is replaced", body = VmInfo),
    (status = 201, description = "It is made, and runs if it is to", body = VmInfo),
    NamedChangeErrors, ProcessErrors,
))]
pub(super) async fn put(
    State(node): Api,
    VmPath { name }: VmPath,
    JsonBody(spec): JsonBody<VmSpec>,
) -> Result<Response, Error> {
    let status = match node.machines.put(&name, spec).await? {
        Put::Created => StatusCode::CREATED,
        Put::Same | Put::Replaced => StatusCode::OK,
    };
    Ok((status, info(&node, &name)?).into_response())
}

/// Start, pause, resume or stop a virtual machine
///
/// Running starts it, or resumes a paused one. Stopped ends it, and it stays stopped.
#[utoipa::path(patch, path = "/v1/vms/{name}", operation_id = "patch_vm",
    params(VmPath), request_body = VmChange, responses(
    (status = 200, description = "It does so", body = VmInfo),
    NamedChangeErrors, ProcessErrors,
))]
pub(super) async fn change(
    State(node): Api,
    VmPath { name }: VmPath,
    JsonBody(change): JsonBody<VmChange>,
) -> Result<Json<VmInfo>, Error> {
    node.machines.change(&name, change.state).await?;
    info(&node, &name)
}

/// Delete a virtual machine
///
/// With the devices that were created for it.
#[utoipa::path(delete, path = "/v1/vms/{name}", operation_id = "delete_vm",
    params(VmPath), responses(
    (status = 204, description = "It is gone"),
    NameErrors,
    (status = 500, description = "Something could not be undone: it is still there, and can be deleted again", body = ErrorBody),
    (status = 503, description = "This daemon ends", body = ErrorBody),
))]
pub(super) async fn remove(State(node): Api, VmPath { name }: VmPath) -> Result<StatusCode, Error> {
    node.machines.delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}
