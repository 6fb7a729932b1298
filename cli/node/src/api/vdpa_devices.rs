//! `/v1/vdpa-devices`: all vDPA devices. One of them: `vdpa_device.rs`.

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::KernelErrors;
use bellhop_common::listing::Listing;
use bellhop_common::management::dev;
use vdpa_mgmt::Connection;

use super::listings::VdpaDeviceListing;
use super::management::of_vdpa;
use super::state::Api;
use crate::error::Error;

/// List vDPA devices
///
/// As `bellhop dev show -j`. The list is empty without the vDPA management of the kernel (`modprobe
/// vdpa`).
#[utoipa::path(get, path = "/v1/vdpa-devices", operation_id = "list_vdpa_devices", responses(
    (status = 200, description = "All vDPA devices", body = VdpaDeviceListing),
    KernelErrors,
))]
pub(super) async fn list(State(node): Api) -> Result<Json<Listing>, Error> {
    let devices = node.turns.run(|| of_vdpa(Connection::devices)).await?;
    Ok(Json(dev::listing(&devices)))
}
