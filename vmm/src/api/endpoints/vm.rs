//! `/v1/vm`: the state and configuration of the whole VM.

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

/// Read the state of the machine
///
/// Works in every state, also before the machine has a configuration. `GET /v1/vm/watch` waits for
/// a change.
#[utoipa::path(get, path = "/v1/vm", operation_id = "get_vm",
    responses((status = 200, description = "The state", body = VmStatus)))]
pub(super) async fn show(State(api): Api) -> Json<VmStatus> {
    Json(api.view())
}

/// Configure the machine before it starts
///
/// Replaces the whole configuration. Nothing is opened yet.
///
/// A vDPA device or a function by VFIO given as `fd` is a descriptor in the request (SCM_RIGHTS).
/// The process keeps the descriptors until the machine starts or its configuration is replaced. A
/// start consumes them: after a failed start, send them again. A device opens once, so the client
/// closes its own descriptor after the response.
#[utoipa::path(put, path = "/v1/vm", operation_id = "put_vm", request_body = VmConfig, responses(
    (status = 204, description = "The machine has this configuration"),
    BodyErrors, StateErrors,
))]
pub(super) async fn configure(
    State(api): Api,
    received: Received,
    JsonBody(mut config): JsonBody<VmConfig>,
) -> Result<StatusCode, ApiError> {
    descriptors::give(&received, &mut config.vdpa, &mut config.vfio)?;
    api.configure(config)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Start, pause, resume or stop the machine
///
/// Starts from NotStarted, pauses from Running, resumes from Paused. Stopped ends the machine and
/// its process in every state, without asking the guest.
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
