//! `/v1/vms/{name}`: one VM, from its creation to its end.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bellhop_api::node::{Operation, SnapshotName, Vm, VmChanges};
use bellhop_api::responses::{NameErrors, NamedChangeErrors, ProcessErrors};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::IntoParams;
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;
use vmm::http::parameters::Parameters;

use super::operations::accepted;
use super::precondition::{Precondition, etag};
use super::state::Api;
use super::vm_path::VmPath;
use super::vms;
use crate::context::Node;
use crate::error::Error;
use crate::machines::error::no_vm;
use crate::machines::operations::Requested;
use crate::machines::spec::{VmBody, VmName, VmPatch};

/// The current state of a VM.
pub(super) fn info(node: &Node, name: &VmName) -> Result<Json<Vm>, Error> {
    let view = node.machines.show(name)?;
    let info = vms::info(node, name, view);
    Ok(Json(info.ok_or_else(|| no_vm(name))?))
}

/// The current state of a VM, with its generation.
pub(super) fn tagged(node: &Node, name: &VmName) -> Result<impl IntoResponse + use<>, Error> {
    let Json(vm) = info(node, name)?;
    Ok((etag(vm.generation), Json(vm)))
}

/// Read a virtual machine
///
/// Its desired configuration, and its observed state.
#[utoipa::path(get, path = "/v1/vms/{name}", operation_id = "get_vm", params(VmPath), responses(
    (status = 200, description = "The virtual machine", body = Vm,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    NameErrors,
))]
pub(super) async fn show(State(node): Api, VmPath { name }: VmPath) -> Result<Response, Error> {
    Ok(tagged(&node, &name)?.into_response())
}

/// Create or replace a virtual machine with its NICs
///
/// All of it, or nothing: if a step fails, the daemon undoes the earlier ones. An identical machine
/// changes nothing, but starts or stops as requested. A different one replaces a stopped machine.
/// The daemon first checks boot files, disks and NIC sources. If it cannot create the new machine,
/// it restores the former one with its NICs.
///
/// `If-None-Match: *` only creates, `If-Match` only replaces. 412 has the code `vm_exists`,
/// `no_such_vm` or `generation_conflict`. With `wait=false` it is an operation.
///
/// With `restore_from` the machine continues from a snapshot instead of booting. Later starts boot.
/// The body has the NICs and disks of the snapshot; `GET /v1/snapshots/{name}/spec` returns one.
/// Devices may differ. Other members apply at the next start, as with a patch.
///
/// The body may be a machine that was read, with changes. Its `status` is ignored, its `name` is
/// that of the path, and its `generation` is a condition.
#[utoipa::path(put, path = "/v1/vms/{name}", operation_id = "put_vm",
    params(VmPath, Making, Precondition), request_body = VmBody, responses(
    (status = 200, description = "It existed already; or was stopped, and is replaced", body = Vm,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    (status = 201, description = "Created, and started if requested", body = Vm,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    (status = 202, description = "With `wait=false`: it is in progress", body = Operation,
        headers(("Location" = String, description = "The operation"))),
    NamedChangeErrors, ProcessErrors,
    (status = 412, description = "The condition does not hold", body = ErrorBody),
))]
pub(super) async fn put(
    State(node): Api,
    VmPath { name }: VmPath,
    Parameters(Making { wait, restore_from }): Parameters<Making>,
    precondition: Precondition,
    by: Requested,
    JsonBody(body): JsonBody<VmBody>,
) -> Result<Response, Error> {
    let (spec, condition) = body.for_vm(&name, precondition.condition()?)?;
    if wait == Some(false) {
        let begun = node
            .machines
            .begin_put(&name, condition, spec, restore_from, by);
        return Ok(accepted(&begun.await?));
    }
    let put = node.machines.put(&name, condition, spec, restore_from);
    let status = put.await?.status();
    Ok((status, tagged(&node, &name)?).into_response())
}

/// The creation of a virtual machine.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Making {
    /// Whether the answer waits for the result (default: `true`)
    wait: Option<bool>,
    /// The snapshot from which it continues; without it the machine boots
    #[param(value_type = Option<String>, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    restore_from: Option<SnapshotName>,
}

/// Whether a running virtual machine is deleted.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Deletion {
    /// Whether to delete a running machine, without asking its guest (default: `false`)
    force: Option<bool>,
}

/// Whether the request changes anything.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Trial {
    /// `true`: check the patch and return its changes without making them
    dry_run: Option<bool>,
}

/// Change a virtual machine
///
/// With a JSON merge patch (RFC 7396), also while the machine runs. `labels`, `annotations` and
/// `spec.restart` apply at once. All else applies at the next start of its process; a reset of the
/// guest is not such a start. The response tells the time for each member. `status.pending` of the
/// machine lists those that wait.
///
/// A patch replaces the lists of NICs and disks as a whole, and only while the machine is stopped.
/// Other NICs replace the machine as PUT does; if that fails, the daemon restores the former one.
/// A patch cannot change `spec.state`: `PUT /v1/vms/{name}/state` does.
#[utoipa::path(patch, path = "/v1/vms/{name}", operation_id = "patch_vm",
    params(VmPath, Trial, Precondition),
    request_body(content = VmPatch, content_type = "application/merge-patch+json"),
    responses(
    (status = 200, description = "It is recorded", body = VmChanges,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    NamedChangeErrors,
    (status = 409, description = "The patch changes NICs or disks of a running machine, or the \
        machine is being migrated or may run elsewhere", body = ErrorBody),
    (status = 412, description = "The condition does not hold", body = ErrorBody),
    (status = 500, description = "Internal error: the host failed", body = ErrorBody),
    (status = 503, description = "This daemon is shutting down", body = ErrorBody),
))]
pub(super) async fn change(
    State(node): Api,
    VmPath { name }: VmPath,
    Parameters(Trial { dry_run }): Parameters<Trial>,
    precondition: Precondition,
    JsonBody(patch): JsonBody<Map<String, Value>>,
) -> Result<Response, Error> {
    let condition = precondition.condition()?;
    let dry_run = dry_run == Some(true);
    let changes = node
        .machines
        .patch_spec(&name, condition, patch, dry_run)
        .await?;
    let Json(vm) = info(&node, &name)?;
    let tag = etag(vm.generation);
    Ok((tag, Json(VmChanges { vm, changes })).into_response())
}

/// Delete a virtual machine
///
/// With the devices that were created for it. A running machine needs `force`. Then its guest is
/// not asked.
#[utoipa::path(delete, path = "/v1/vms/{name}", operation_id = "delete_vm",
    params(VmPath, Deletion, Precondition), responses(
    (status = 204, description = "Deleted"),
    NameErrors,
    (status = 409, description = "It runs", body = ErrorBody),
    (status = 412, description = "The condition does not hold", body = ErrorBody),
    (status = 500, description = "A step could not be undone: the machine still exists, and can be \
        deleted again", body = ErrorBody),
    (status = 503, description = "This daemon is shutting down", body = ErrorBody),
))]
pub(super) async fn remove(
    State(node): Api,
    VmPath { name }: VmPath,
    Parameters(Deletion { force }): Parameters<Deletion>,
    precondition: Precondition,
) -> Result<StatusCode, Error> {
    let condition = precondition.condition()?;
    node.machines
        .delete(&name, condition, force == Some(true))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}
