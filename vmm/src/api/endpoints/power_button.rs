//! `/v1/vm/power-button`.

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::responses::HostErrors;

use super::state::Api;
use crate::api::error::ApiError;

/// Press the power button
///
/// Asks the guest to shut down, by ACPI. Once it has powered off, the state is Stopped and this
/// process exits.
#[utoipa::path(post, path = "/v1/vm/power-button", operation_id = "press_power_button", responses(
    (status = 204, description = "The button is pressed"),
    HostErrors,
))]
pub(super) async fn press(State(api): Api) -> Result<StatusCode, ApiError> {
    api.ask(|machine| machine.power_button()).await?;
    Ok(StatusCode::NO_CONTENT)
}
