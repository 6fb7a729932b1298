//! `/v1/vms/{name}/plan`: the steps of a creation, without taking them.

use axum::Json;
use axum::extract::State;
use bellhop_api::node::Plan;
use bellhop_api::responses::NamedChangeErrors;
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;

use super::state::Api;
use super::vm_path::VmPath;
use crate::error::Error;
use crate::machines::condition::Condition;
use crate::machines::spec::VmBody;

/// Plan a virtual machine
///
/// The steps that `PUT /v1/vms/{name}` would take for a machine of this name, which must not exist.
/// The daemon checks boot files, disks and NIC sources, and creates nothing. It plans NICs one by
/// one, so two NICs may have the same virtual function in the plan.
#[utoipa::path(post, path = "/v1/vms/{name}/plan", operation_id = "create_vm_plan", params(VmPath),
    request_body = VmBody, responses(
    (status = 200, description = "The steps", body = Plan),
    NamedChangeErrors,
    (status = 409, description = "Another machine has one of the devices", body = ErrorBody),
    (status = 412, description = "It exists, or the condition does not hold", body = ErrorBody),
    (status = 500, description = "Internal error: the host failed", body = ErrorBody),
    (status = 503, description = "This daemon is shutting down", body = ErrorBody),
))]
pub(super) async fn plan(
    State(node): Api,
    VmPath { name }: VmPath,
    JsonBody(body): JsonBody<VmBody>,
) -> Result<Json<Plan>, Error> {
    let (spec, condition) = body.for_vm(&name, Condition::Absent)?;
    let plan = node.machines.plan(&name, condition, spec).await?;
    Ok(Json(plan))
}
