//! `/v1/vms/{name}`: one VM, from its creation to its end.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bellhop_api::machine::WantedState;
use bellhop_api::node::{
    AfterGrace, GRACE_PERIOD_MAX_S, GRACE_PERIOD_S, Operation, SnapshotName, StopMode, VmInfo,
    VmStateChange,
};
use bellhop_api::responses::{NameErrors, NamedChangeErrors, ProcessErrors};
use serde::Deserialize;
use utoipa::IntoParams;
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;
use vmm::http::parameters::Parameters;

use super::operations::{Waiting, accepted};
use super::precondition::{Precondition, etag};
use super::state::Api;
use super::vm_path::VmPath;
use super::vms;
use crate::context::Node;
use crate::error::Error;
use crate::machines::Put;
use crate::machines::error::no_vm;
use crate::machines::operations::Requested;
use crate::machines::spec::{VmName, VmSpec};
use crate::machines::stop::Stop;

/// The current state of a VM.
pub(super) fn info(node: &Node, name: &VmName) -> Result<Json<VmInfo>, Error> {
    let view = node.machines.show(name)?;
    let info = vms::info(node, name, view);
    Ok(Json(info.ok_or_else(|| no_vm(name))?))
}

/// The current state of a VM, with its generation.
fn tagged(node: &Node, name: &VmName) -> Result<impl IntoResponse + use<>, Error> {
    let Json(vm) = info(node, name)?;
    Ok((etag(vm.generation), Json(vm)))
}

/// Read the state of a virtual machine
///
/// `GET /v1/vms/{name}/spec` has its configuration.
#[utoipa::path(get, path = "/v1/vms/{name}", operation_id = "get_vm", params(VmPath), responses(
    (status = 200, description = "The virtual machine", body = VmInfo,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    NameErrors,
))]
pub(super) async fn show(State(node): Api, VmPath { name }: VmPath) -> Result<Response, Error> {
    Ok(tagged(&node, &name)?.into_response())
}

/// Make a virtual machine, with its NICs
///
/// All of it, or nothing: a step that fails undoes those before it. The same again changes nothing,
/// but has it run or stop as it says. Another one replaces it if it is stopped. Boot files, disks
/// and NIC sources are checked before that. If the new one fails nevertheless, the former one is
/// put back with its NICs.
///
/// `If-None-Match: *` only creates, `If-Match` only replaces. 412 has the code `vm_exists`,
/// `no_such_vm` or `generation_conflict`. With `wait=false` it is an operation.
///
/// With `restore_from` the machine continues from a snapshot instead of booting. Later starts boot.
/// The spec has the NICs and disks of the snapshot; `GET /v1/snapshots/{name}/spec` returns one.
/// Devices may differ. Other members apply at the next start, as with a patch.
#[utoipa::path(put, path = "/v1/vms/{name}", operation_id = "put_vm",
    params(VmPath, Making, Precondition), request_body = VmSpec, responses(
    (status = 200, description = "It was there already; or was stopped, and is replaced",
        body = VmInfo,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    (status = 201, description = "It is made, and runs if it is to", body = VmInfo,
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
    JsonBody(spec): JsonBody<VmSpec>,
) -> Result<Response, Error> {
    let condition = precondition.condition()?;
    if wait == Some(false) {
        let begun = node
            .machines
            .begin_put(&name, condition, spec, restore_from, by);
        return Ok(accepted(&begun.await?));
    }
    let put = node.machines.put(&name, condition, spec, restore_from);
    let status = match put.await? {
        Put::Created => StatusCode::CREATED,
        Put::Same | Put::Replaced => StatusCode::OK,
    };
    Ok((status, tagged(&node, &name)?).into_response())
}

/// How a virtual machine is made.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Making {
    /// Whether the answer waits for the result: `true` where it is not given
    wait: Option<bool>,
    /// The snapshot from which it continues; it boots where none is given
    #[param(value_type = Option<String>, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    restore_from: Option<SnapshotName>,
}

/// Whether a virtual machine that runs is deleted.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Deletion {
    /// Whether it is deleted also if it runs, without asking its guest: `false` where it is not
    /// given
    force: Option<bool>,
}

/// Members that are valid separately, but not together.
fn contradiction(message: &str) -> Error {
    Error::answered(StatusCode::UNPROCESSABLE_ENTITY, "contradiction", message)
}

/// The parameters of the stop, if the request stops the VM.
fn stop_of(change: &VmStateChange) -> Result<Option<Stop>, Error> {
    let graceful = change.mode.unwrap_or_default() == StopMode::Graceful;
    let of_grace = change.grace_period_s.is_some() || change.then.is_some();
    let of_stop = of_grace || change.mode.is_some() || change.until_reboot;
    if change.state != WantedState::Stopped {
        return if of_stop {
            Err(contradiction("only `state: Stopped` takes more members"))
        } else {
            Ok(None)
        };
    }
    if !graceful && of_grace {
        let message = "`grace_period_s` and `then` need the mode `graceful`";
        return Err(contradiction(message));
    }
    let seconds = change.grace_period_s.unwrap_or(GRACE_PERIOD_S);
    if !(1..=GRACE_PERIOD_MAX_S).contains(&seconds) {
        let message = format!("`grace_period_s` is from 1 to {GRACE_PERIOD_MAX_S}");
        return Err(Error::invalid(message));
    }
    Ok(Some(Stop {
        grace: graceful.then(|| Duration::from_secs(seconds.into())),
        then_hard: change.then.unwrap_or_default() == AfterGrace::Hard,
        until_reboot: change.until_reboot,
    }))
}

/// Start, pause, resume or stop a virtual machine
///
/// Running starts it, or resumes a paused one. Stopped asks the guest to power off and waits until it
/// has. From then on no restart policy starts the machine, also if the client disconnects or the
/// guest takes longer. `mode: hard` does not ask it, also while another request waits. A machine that
/// is started meanwhile continues to run.
#[utoipa::path(patch, path = "/v1/vms/{name}", operation_id = "patch_vm",
    params(VmPath, Waiting, Precondition), request_body = VmStateChange, responses(
    (status = 200, description = "It does so", body = VmInfo,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    (status = 202, description = "Its guest is asked to power off, and the request does not wait", body = VmInfo),
    NamedChangeErrors, ProcessErrors,
    (status = 412, description = "The condition does not hold", body = ErrorBody),
    (status = 409, description = "The state of the machine, or of one of its devices, does not allow it. `still_runs`: its guest has not powered off in time and continues to run. `paused`: its guest cannot power off. `started_again`: another request wants it to run", body = ErrorBody),
))]
pub(super) async fn change(
    State(node): Api,
    VmPath { name }: VmPath,
    Parameters(Waiting { wait }): Parameters<Waiting>,
    precondition: Precondition,
    JsonBody(change): JsonBody<VmStateChange>,
) -> Result<Response, Error> {
    let condition = precondition.condition()?;
    let stopping = match stop_of(&change)? {
        Some(stop) => node.machines.stop(&name, condition, stop).await?,
        None => {
            node.machines.change(&name, condition, change.state).await?;
            None
        }
    };
    let status = match stopping {
        Some(stopping) if wait != Some(false) => {
            stopping.end().await?;
            StatusCode::OK
        }
        Some(_) => StatusCode::ACCEPTED,
        None => StatusCode::OK,
    };
    Ok((status, tagged(&node, &name)?).into_response())
}

/// Delete a virtual machine
///
/// With the devices that were created for it. One that runs is deleted only with `force`. Its guest
/// is not asked then.
#[utoipa::path(delete, path = "/v1/vms/{name}", operation_id = "delete_vm",
    params(VmPath, Deletion, Precondition), responses(
    (status = 204, description = "It is gone"),
    NameErrors,
    (status = 409, description = "It runs", body = ErrorBody),
    (status = 412, description = "The condition does not hold", body = ErrorBody),
    (status = 500, description = "Something could not be undone: it is still there, and can be deleted again", body = ErrorBody),
    (status = 503, description = "This daemon ends", body = ErrorBody),
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn stop(more: &Value) -> Result<Option<Stop>, Error> {
        let mut body = json!({ "state": "Stopped" });
        let fields = body.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        stop_of(&serde_json::from_value(body).unwrap())
    }

    #[test]
    fn a_stop_asks_the_guest_unless_it_is_hard() {
        let graceful = stop(&json!({})).unwrap().unwrap();
        assert_eq!(graceful.grace, Some(Duration::from_secs(60)));
        assert!(!graceful.then_hard && !graceful.until_reboot);
        let hard = stop(&json!({ "mode": "hard" })).unwrap().unwrap();
        assert_eq!(hard.grace, None);
        let host = json!({ "grace_period_s": 5, "then": "hard", "until_reboot": true });
        let host = stop(&host).unwrap().unwrap();
        assert_eq!(host.grace, Some(Duration::from_secs(5)));
        assert!(host.then_hard && host.until_reboot);
    }

    #[test]
    fn members_that_say_nothing_are_refused() {
        for wrong in [
            json!({ "mode": "hard", "then": "hard" }),
            json!({ "mode": "hard", "grace_period_s": 1 }),
            json!({ "grace_period_s": 0 }),
            json!({ "grace_period_s": 86_401 }),
            json!({ "state": "Running", "mode": "graceful" }),
            json!({ "state": "Paused", "until_reboot": true }),
        ] {
            let (status, _) = stop(&wrong).unwrap_err().answer();
            assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
        }
        assert!(stop(&json!({ "state": "Paused" })).unwrap().is_none());
    }
}
