//! `/v1/vdpa-devices`: all vDPA devices. One of them: `vdpa_device.rs`.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::KernelErrors;
use bellhop_common::listing::Listing;
use bellhop_common::management::dev;
use utoipa::ToSchema;
use vdpa_mgmt::Connection;

use super::management::of_vdpa;
use super::state::Api;
use crate::error::Error;

/// All vDPA devices, as `bellhop dev show -j`.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(
    not(test),
    expect(
        dead_code,
        reason = "it describes what `dev::listing` writes; a test compares them"
    )
)]
pub(super) struct VdpaDeviceListing {
    /// By name.
    dev: BTreeMap<String, VdpaDeviceInfo>,
}

/// A vDPA device.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Deserialize), serde(deny_unknown_fields))]
#[expect(dead_code, reason = "as above")]
pub(super) struct VdpaDeviceInfo {
    /// `network`, `block`.
    #[schema(rename = "type")]
    #[cfg_attr(test, serde(rename = "type"))]
    class: String,
    /// What it was made on.
    mgmtdev: String,
    /// The vendor's number: a PCI vendor, or 0.
    vendor_id: Option<u32>,
    /// The number of its virtqueues.
    max_vqs: Option<u32>,
    /// The largest ring, in entries.
    max_vq_size: Option<u16>,
}

/// All vDPA devices
///
/// Without the kernel's vDPA management (`modprobe vdpa`) there is none.
#[utoipa::path(get, path = "/v1/vdpa-devices", operation_id = "list_vdpa_devices", responses(
    (status = 200, description = "All vDPA devices", body = VdpaDeviceListing),
    KernelErrors,
))]
pub(super) async fn list(State(node): Api) -> Result<Json<Listing>, Error> {
    let devices = node.turns.run(|| of_vdpa(Connection::devices)).await?;
    Ok(Json(dev::listing(&devices)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdpa_mgmt::VdpaDevice;

    #[test]
    fn what_is_described_is_what_is_written() {
        let device = VdpaDevice {
            name: "nic0".to_owned(),
            mgmtdev: "vdpasim_net".parse().unwrap(),
            device_id: 1,
            vendor_id: Some(0),
            max_vqs: Some(3),
            max_vq_size: Some(256),
            min_vq_size: None,
        };
        let written = serde_json::to_string(&dev::listing(&[device])).unwrap();
        let read: VdpaDeviceListing = serde_json::from_str(&written).unwrap();
        assert_eq!(read.dev["nic0"].class, "network");
    }
}
