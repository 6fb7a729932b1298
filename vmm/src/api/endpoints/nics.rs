//! `/v1/vm/nics`: all NICs.

use axum::Json;
use axum::extract::State;
use bellhop_api::Items;
use bellhop_api::machine::NicSummary;
use bellhop_api::responses::StateErrors;

use super::state::Api;
use crate::api::error::ApiError;
use crate::machine::NicStatus;

impl From<&NicStatus> for NicSummary {
    fn from(nic: &NicStatus) -> Self {
        Self {
            id: nic.id.clone(),
            state: nic.state,
            path: nic.config.shown_path().into_owned(),
            address: Some(nic.address.to_string()),
        }
    }
}

/// List NICs
///
/// Before the machine is built, these are the vDPA devices of its configuration, which are not
/// opened yet.
#[utoipa::path(get, path = "/v1/vm/nics", operation_id = "list_nics", responses(
    (status = 200, description = "All NICs", body = Items<NicSummary>),
    StateErrors,
))]
pub(super) async fn list(State(api): Api) -> Result<Json<Items<NicSummary>>, ApiError> {
    if api.is_built() {
        return Ok(Json(api.view().nics.into_iter().collect()));
    }
    let config = api.config()?;
    Ok(Json(config.vdpa.iter().map(NicSummary::from).collect()))
}
