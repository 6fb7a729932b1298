//! `/v1/vm/nmi`.

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::responses::HostErrors;

use super::state::Api;
use crate::api::error::ApiError;

/// Send a non-maskable interrupt
///
/// Sends it to the first vCPU. Linux logs it, or panics with `unknown_nmi_panic`, which helps with
/// a hung guest. A paused vCPU receives it when it resumes.
#[utoipa::path(post, path = "/v1/vm/nmi", operation_id = "send_nmi", responses(
    (status = 204, description = "It is sent"),
    HostErrors,
))]
pub(super) async fn send(State(api): Api) -> Result<StatusCode, ApiError> {
    api.ask(|machine| machine.nmi()).await?;
    Ok(StatusCode::NO_CONTENT)
}
