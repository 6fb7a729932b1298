//! `/v1/vm`: the machine's state and configuration as a whole.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::machine::{AlarmInfo, DiskSummary, NicSummary, VmChange, VmStatus, WantedState};
use bellhop_api::responses::BodyErrors;

use super::descriptors::Descriptors;
use super::{Api, exactly};
use crate::api::API_LEVEL;
use crate::api::controller::View;
use crate::api::error::ApiError;
use crate::config::VmConfig;
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;
use crate::http::{ErrorBody, on_worker};

impl From<&View> for VmStatus {
    fn from(view: &View) -> Self {
        Self {
            state: view.state,
            generation: view.generation,
            boots: view.boots,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            api: API_LEVEL,
            nics: view.nics.iter().map(NicSummary::from).collect(),
            end: view.end.clone(),
            disks: view.disks.iter().map(DiskSummary::from).collect(),
            alarms: view.alarms.iter().map(AlarmInfo::from).collect(),
            upgrades: view.upgrade.count,
            upgrade_error: view.upgrade.error.clone(),
            upgrade_downtime_ms: view.upgrade.downtime.map(exactly),
        }
    }
}

/// The machine's state
#[utoipa::path(get, path = "/v1/vm", operation_id = "get_vm",
    responses((status = 200, description = "The state", body = VmStatus)))]
pub(super) async fn show(State(api): Api) -> Json<VmStatus> {
    Json(VmStatus::from(&api.view()))
}

/// Give the machine its configuration, before it starts
///
/// All of it at once; an earlier one is replaced. Nothing is opened yet. vDPA devices named by `fd` come as
/// descriptors with the request (SCM_RIGHTS); they are kept until the machine starts or the configuration is
/// replaced. A start uses them up: after one that failed they are to be given again. As a device opens once, whoever
/// opened it closes its own descriptor after the answer.
#[utoipa::path(put, path = "/v1/vm", operation_id = "put_vm", request_body = VmConfig, responses(
    (status = 204, description = "The machine has this configuration"),
    BodyErrors,
    (status = 409, description = "The machine is started already", body = ErrorBody),
    (status = 422, description = "An unknown field or a wrong value, named; or a descriptor that did not come along or is no vDPA device", body = ErrorBody),
))]
pub(super) async fn configure(
    State(api): Api,
    received: Received,
    JsonBody(mut config): JsonBody<VmConfig>,
) -> Result<StatusCode, ApiError> {
    let mut descriptors = Descriptors::of(&received)?;
    config.take_descriptors(|number| descriptors.take(number))?;
    api.configure(config)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Start, pause, resume or stop the machine
#[utoipa::path(patch, path = "/v1/vm", operation_id = "patch_vm",
    request_body = VmChange, responses(
    (status = 204, description = "Done; for Stopped: this process ends now"),
    BodyErrors,
    (status = 409, description = "Not from the state that the machine is in", body = ErrorBody),
    (status = 422, description = "An unknown field or state; or the configuration names what cannot be used, such as a device that is busy", body = ErrorBody),
    (status = 500, description = "The host cannot run the machine", body = ErrorBody),
    (status = 503, description = "Too many requests wait, or this process ends", body = ErrorBody),
))]
pub(super) async fn change(
    State(api): Api,
    JsonBody(change): JsonBody<VmChange>,
) -> Result<StatusCode, ApiError> {
    match change.state {
        WantedState::Running if !api.is_built() => api.start().await?,
        WantedState::Running => {
            let machine = api.running()?;
            on_worker(move || machine.resume()).await??;
        }
        WantedState::Paused => {
            let machine = api.running()?;
            on_worker(move || machine.pause()).await??;
        }
        WantedState::Stopped => api.stop(),
    }
    Ok(StatusCode::NO_CONTENT)
}
