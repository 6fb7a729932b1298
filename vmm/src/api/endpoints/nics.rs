//! `/v1/vm/nics`: all NICs.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::Api;
use super::pluggable::PlugPhase;
use crate::api::error::ApiError;
use crate::config::VdpaConfig;
use crate::http::ErrorBody;
use crate::machine::NicStatus;

/// A NIC in a list.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct NicSummary {
    /// Its name.
    pub(super) id: String,
    /// Where it is in its life.
    pub(super) state: PlugPhase,
    /// Its vhost-vdpa character device.
    pub(super) path: String,
    /// Where the guest sees it, once the machine is built.
    pub(super) address: Option<String>,
}

impl From<&NicStatus> for NicSummary {
    fn from(nic: &NicStatus) -> Self {
        Self {
            id: nic.id.clone(),
            state: nic.state.into(),
            path: nic.config.shown_path().into_owned(),
            address: Some(nic.address.to_string()),
        }
    }
}

impl From<&VdpaConfig> for NicSummary {
    fn from(config: &VdpaConfig) -> Self {
        Self {
            id: config.name(),
            state: PlugPhase::Configured,
            path: config.shown_path().into_owned(),
            address: None,
        }
    }
}

/// All NICs
///
/// Before the machine is built these are all vDPA devices of its configuration: what they are
/// shows when they are opened.
#[utoipa::path(get, path = "/v1/vm/nics", operation_id = "list_nics", responses(
    (status = 200, description = "All NICs", body = Vec<NicSummary>),
    (status = 409, description = "The machine has no configuration yet", body = ErrorBody),
))]
pub(super) async fn list(State(api): Api) -> Result<Json<Vec<NicSummary>>, ApiError> {
    if api.is_built() {
        let nics = api.view().nics;
        return Ok(Json(nics.iter().map(NicSummary::from).collect()));
    }
    let config = api.config()?;
    Ok(Json(config.vdpa.iter().map(NicSummary::from).collect()))
}
