//! `/v1/vm/config`: the configuration.

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::StateErrors;

use super::state::Api;
use crate::api::error::ApiError;
use crate::config::VmConfig;

/// Read the configuration
///
/// The given configuration, updated with devices that were plugged, changed or unplugged since.
#[utoipa::path(get, path = "/v1/vm/config", operation_id = "get_vm_config", responses(
    (status = 200, description = "The configuration", body = VmConfig),
    StateErrors,
))]
pub(super) async fn show(State(api): Api) -> Result<Json<VmConfig>, ApiError> {
    api.config().map(Json)
}
