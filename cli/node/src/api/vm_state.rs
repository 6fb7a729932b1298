//! `/v1/vms/{name}/state`: starts, pauses, resumes and stops a VM.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::machine::WantedState;
use bellhop_api::node::{
    AfterGrace, GRACE_PERIOD_MAX_S, GRACE_PERIOD_S, StopMode, Vm, VmStateChange,
};
use bellhop_api::responses::{NamedChangeErrors, ProcessErrors};
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;
use vmm::http::parameters::Parameters;

use super::operations::Waiting;
use super::precondition::Precondition;
use super::state::Api;
use super::vm::tagged;
use super::vm_path::VmPath;
use crate::error::Error;
use crate::machines::stop::Stop;

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
/// `Running` starts it, or resumes a paused one. `Stopped` asks the guest to power off and waits
/// until it has. From then on no restart policy starts the machine, also if the client disconnects
/// or the guest takes longer. `mode: hard` does not ask the guest, also while another request
/// waits. A machine that is started meanwhile keeps running.
#[utoipa::path(put, path = "/v1/vms/{name}/state", operation_id = "put_vm_state",
    params(VmPath, Waiting, Precondition), request_body = VmStateChange, responses(
    (status = 200, description = "Done", body = Vm,
        headers(("ETag" = String, description = "Its generation, for If-Match: `\"g17\"`"))),
    (status = 202, description = "Its guest is asked to power off, and the request does not wait",
        body = Vm),
    NamedChangeErrors, ProcessErrors,
    (status = 412, description = "The condition does not hold", body = ErrorBody),
    (status = 409, description = "The state of the machine, or of one of its devices, does not \
        allow it. `still_runs`: its guest has not powered off in time and continues to run. \
        `paused`: its guest cannot power off. `started_again`: another request wants it to run",
        body = ErrorBody),
))]
pub(super) async fn put(
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
    fn members_without_a_value_are_refused() {
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
