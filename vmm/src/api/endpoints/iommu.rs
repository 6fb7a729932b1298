//! `/v1/vm/iommu`: the guest's IOMMU.
//!
//! The status of the machine does not have it. Some guests change the counters with each packet. A
//! change of the status wakes all clients that watch it.

use axum::Json;
use axum::extract::State;
use bellhop_api::machine::IommuInfo;
use bellhop_api::responses::BusyErrors;

use super::state::Api;
use crate::api::error::ApiError;
use crate::http::ErrorBody;
use crate::machine::RequestError;

/// Read the state of the guest's IOMMU
///
/// Its mappings, its counters, and the last request that a device or a limit refused. A machine
/// without an IOMMU has no such object.
#[utoipa::path(get, path = "/v1/vm/iommu", operation_id = "get_iommu", responses(
    (status = 200, description = "The IOMMU", body = IommuInfo),
    BusyErrors,
    (status = 404, description = "The machine has no IOMMU", body = ErrorBody),
))]
pub(super) async fn show(State(api): Api) -> Result<Json<IommuInfo>, ApiError> {
    let info = api.ask(|machine| machine.iommu()).await?;
    let none = || RequestError::NoSuchDevice("iommu".to_owned());
    Ok(Json(info.ok_or_else(none)?))
}
