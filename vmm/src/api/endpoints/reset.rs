//! `/v1/vm/reset`.

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::responses::HostErrors;

use super::state::Api;
use crate::api::error::ApiError;

/// Reset the machine
///
/// Resets the machine without asking the guest. It boots again in place; `boots` increases. A
/// paused machine stays paused at its first instruction.
#[utoipa::path(post, path = "/v1/vm/reset", operation_id = "reset_vm", responses(
    (status = 204, description = "The machine resets"),
    HostErrors,
))]
pub(super) async fn reset(State(api): Api) -> Result<StatusCode, ApiError> {
    api.ask(|machine| machine.reset()).await?;
    Ok(StatusCode::NO_CONTENT)
}
