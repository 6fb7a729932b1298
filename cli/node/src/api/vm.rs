//! `/v1/vms/{name}`: one virtual machine, from its making to its end.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bellhop_api::machine::VmChange;
use bellhop_api::node::VmInfo;
use bellhop_api::responses::{NameErrors, NamedChangeErrors, ProcessErrors};
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;

use super::precondition::{Precondition, etag};
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

/// It as it is now, with its generation.
fn tagged(node: &Node, name: &VmName) -> Result<impl IntoResponse + use<>, Error> {
    let Json(vm) = info(node, name)?;
    Ok((etag(vm.generation), Json(vm)))
}

/// A virtual machine
#[utoipa::path(get, path = "/v1/vms/{name}", operation_id = "get_vm", params(VmPath), responses(
    (status = 200, description = "The virtual machine", body = VmInfo,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    NameErrors,
))]
pub(super) async fn show(State(node): Api, VmPath { name }: VmPath) -> Result<Response, Error> {
    Ok(tagged(&node, &name)?.into_response())
}

/// What a virtual machine is to be like
#[utoipa::path(get, path = "/v1/vms/{name}/spec", operation_id = "get_vm_spec",
    params(VmPath), responses(
    (status = 200, description = "As it was asked for, with what was changed since", body = VmSpec,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    NameErrors,
))]
pub(super) async fn spec(State(node): Api, VmPath { name }: VmPath) -> Result<Response, Error> {
    let record = node.machines.show(&name)?.record;
    let record = record.ok_or_else(|| no_vm(&name))?;
    Ok((etag(record.generation), Json(record.spec)).into_response())
}

/// Make a virtual machine, with its NICs
///
/// All of it, or nothing: a step that fails undoes those before it. The same again changes nothing, but has it run
/// or stop as it says. Another one replaces it if it is stopped. Boot files, disks and NIC sources are checked before
/// that. If the new one fails nevertheless, the former one is put back with its NICs.
///
/// `If-None-Match: *` only creates, `If-Match` only replaces. 412 has the code `vm_exists`, `no_such_vm` or
/// `generation_conflict`.
#[utoipa::path(put, path = "/v1/vms/{name}", operation_id = "put_vm",
    params(VmPath, Precondition), request_body = VmSpec, responses(
    (status = 200, description = "It was there already; or was stopped, and is replaced", body = VmInfo,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    (status = 201, description = "It is made, and runs if it is to", body = VmInfo,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    NamedChangeErrors, ProcessErrors,
    (status = 412, description = "The condition does not hold", body = ErrorBody),
))]
pub(super) async fn put(
    State(node): Api,
    VmPath { name }: VmPath,
    precondition: Precondition,
    JsonBody(spec): JsonBody<VmSpec>,
) -> Result<Response, Error> {
    let condition = precondition.condition()?;
    let status = match node.machines.put(&name, condition, spec).await? {
        Put::Created => StatusCode::CREATED,
        Put::Same | Put::Replaced => StatusCode::OK,
    };
    Ok((status, tagged(&node, &name)?).into_response())
}

/// Start, pause, resume or stop a virtual machine
#[utoipa::path(patch, path = "/v1/vms/{name}", operation_id = "patch_vm",
    params(VmPath, Precondition), request_body = VmChange, responses(
    (status = 200, description = "It does so", body = VmInfo,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    NamedChangeErrors, ProcessErrors,
    (status = 412, description = "The condition does not hold", body = ErrorBody),
))]
pub(super) async fn change(
    State(node): Api,
    VmPath { name }: VmPath,
    precondition: Precondition,
    JsonBody(change): JsonBody<VmChange>,
) -> Result<Response, Error> {
    let condition = precondition.condition()?;
    node.machines.change(&name, condition, change.state).await?;
    Ok(tagged(&node, &name)?.into_response())
}

/// Take a virtual machine away, with all that was made for it
#[utoipa::path(delete, path = "/v1/vms/{name}", operation_id = "delete_vm",
    params(VmPath, Precondition), responses(
    (status = 204, description = "It is gone"),
    NameErrors,
    (status = 412, description = "The condition does not hold", body = ErrorBody),
    (status = 500, description = "Something could not be undone: it is still there, and can be deleted again", body = ErrorBody),
    (status = 503, description = "This daemon ends", body = ErrorBody),
))]
pub(super) async fn remove(
    State(node): Api,
    VmPath { name }: VmPath,
    precondition: Precondition,
) -> Result<StatusCode, Error> {
    let condition = precondition.condition()?;
    node.machines.delete(&name, condition).await?;
    Ok(StatusCode::NO_CONTENT)
}
