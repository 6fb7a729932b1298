//! `/v1/vms/{name}/spec`: the configuration of a VM, read and changed.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::node::SpecChanges;
use bellhop_api::responses::{NameErrors, NamedChangeErrors};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::IntoParams;
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;
use vmm::http::parameters::Parameters;

use super::precondition::{Precondition, etag};
use super::state::Api;
use super::vm_path::VmPath;
use crate::error::Error;
use crate::machines::error::no_vm;
use crate::machines::spec::{VmSpec, VmSpecPatch};

/// Read the configuration of a virtual machine
///
/// As created, with all changes since.
#[utoipa::path(get, path = "/v1/vms/{name}/spec", operation_id = "get_vm_spec",
    params(VmPath), responses(
    (status = 200, description = "As created, with all changes since", body = VmSpec,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    NameErrors,
))]
pub(super) async fn show(State(node): Api, VmPath { name }: VmPath) -> Result<Response, Error> {
    let record = node.machines.show(&name)?.record;
    let record = record.ok_or_else(|| no_vm(&name))?;
    Ok((etag(record.generation), Json(record.spec)).into_response())
}

/// Whether the request changes anything.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Trial {
    /// `true`: check the patch and return its changes without making them
    dry_run: Option<bool>,
}

/// Change the configuration of a virtual machine
///
/// With a JSON merge patch (RFC 7396), also while the machine runs. `restart`, `labels` and
/// `annotations` apply at once. All else applies at the next start of its process; a reset of the
/// guest is not such a start. The response tells the time for each member. `pending` of the machine
/// lists those that wait.
///
/// A patch replaces the lists of NICs and disks as a whole, and only while the machine is stopped.
/// Other NICs replace the machine as PUT does; if that fails, the daemon restores the former one.
/// A patch cannot change `state`.
#[utoipa::path(patch, path = "/v1/vms/{name}/spec", operation_id = "patch_vm_spec",
    params(VmPath, Trial, Precondition),
    request_body(content = VmSpecPatch, content_type = "application/merge-patch+json"),
    responses(
    (status = 200, description = "It is recorded", body = SpecChanges,
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
    let changed = node
        .machines
        .patch_spec(&name, condition, patch, dry_run)
        .await?;
    Ok((etag(changed.generation), Json(changed)).into_response())
}
