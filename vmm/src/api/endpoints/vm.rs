//! `/v1/vm`: the machine's state and configuration as a whole.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::machine::{VmChange, VmStatus, WantedState};
use bellhop_api::responses::{BodyErrors, HostErrors, StateErrors};

use super::descriptors;
use super::state::Api;
use crate::api::error::ApiError;
use crate::config::VmConfig;
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;

/// The machine's state
#[utoipa::path(get, path = "/v1/vm", operation_id = "get_vm",
    responses((status = 200, description = "The state", body = VmStatus)))]
pub(super) async fn show(State(api): Api) -> Json<VmStatus> {
    Json(api.view())
}

/// Give the machine its configuration, before it starts
///
/// All of it at once; an earlier one is replaced. Nothing is opened yet. vDPA devices named by `fd` come as
/// descriptors with the request (SCM_RIGHTS); they are kept until the machine starts or the configuration is
/// replaced. A start uses them up: after one that failed they are to be given again. As a device opens once, whoever
/// opened it closes its own descriptor after the answer.
#[utoipa::path(put, path = "/v1/vm", operation_id = "put_vm", request_body = VmConfig, responses(
    (status = 204, description = "The machine has this configuration"),
    BodyErrors, StateErrors,
))]
pub(super) async fn configure(
    State(api): Api,
    received: Received,
    JsonBody(mut config): JsonBody<VmConfig>,
) -> Result<StatusCode, ApiError> {
    descriptors::give(&received, &mut config.vdpa)?;
    api.configure(config)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Start, pause, resume or stop the machine
#[utoipa::path(patch, path = "/v1/vm", operation_id = "patch_vm",
    request_body = VmChange, responses(
    (status = 204, description = "Done; for Stopped: this process ends now"),
    BodyErrors, HostErrors,
))]
pub(super) async fn change(
    State(api): Api,
    JsonBody(change): JsonBody<VmChange>,
) -> Result<StatusCode, ApiError> {
    match change.state {
        WantedState::Running if !api.is_built() => api.start().await?,
        WantedState::Running => api.ask(|machine| machine.resume()).await?,
        WantedState::Paused => api.ask(|machine| machine.pause()).await?,
        WantedState::Stopped => api.stop(),
    }
    Ok(StatusCode::NO_CONTENT)
}
