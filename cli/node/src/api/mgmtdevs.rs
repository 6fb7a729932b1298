//! `/v1/mgmtdevs`: the management devices, on which vDPA devices can be created.

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::KernelErrors;
use bellhop_common::listing::Listing;
use bellhop_common::management::mgmtdev;
use vdpa_mgmt::Connection;

use super::listings::MgmtdevListing;
use super::management::of_vdpa;
use super::state::{Api, SenderRole};
use crate::error::Error;

/// List management devices
///
/// The devices that vDPA devices can be created on. The list is empty without the vDPA management
/// of the kernel (`modprobe vdpa`).
#[utoipa::path(get, path = "/v1/mgmtdevs", operation_id = "list_mgmtdevs", responses(
    (status = 200, description = "All management devices", body = MgmtdevListing),
    KernelErrors,
))]
pub(super) async fn list(
    State(node): Api,
    SenderRole(role): SenderRole,
) -> Result<Json<Listing>, Error> {
    let devices = node
        .kernel_permits
        .run(role, || of_vdpa(Connection::mgmt_devices))
        .await?;
    Ok(Json(mgmtdev::listing(&devices)))
}
