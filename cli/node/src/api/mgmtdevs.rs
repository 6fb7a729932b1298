//! `/v1/mgmtdevs`: what vDPA devices can be made on.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::KernelErrors;
use bellhop_common::listing::Listing;
use bellhop_common::management::mgmtdev;
use utoipa::ToSchema;
use vdpa_mgmt::Connection;

use super::management::of_vdpa;
use super::state::Api;
use crate::error::Error;

/// All management devices, as `bellhop mgmtdev show -j`.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(
    not(test),
    expect(
        dead_code,
        reason = "it describes what `mgmtdev::listing` writes; a test compares them"
    )
)]
pub(super) struct MgmtdevListing {
    /// By name: NAME or BUS/NAME, such as `pci/0000:01:00.1`.
    mgmtdev: BTreeMap<String, MgmtdevInfo>,
}

/// What vDPA devices are made on: a function of a NIC, or a simulator.
#[derive(Debug, ToSchema)]
#[cfg_attr(test, derive(serde::Deserialize), serde(deny_unknown_fields))]
#[expect(dead_code, reason = "as above")]
pub(super) struct MgmtdevInfo {
    /// The classes of devices that can be made: `net`, `block`.
    supported_classes: Vec<String>,
    /// The most virtqueues of one device; 0 is no limit.
    max_supported_vqs: Option<u32>,
    /// Feature bits that devices can have, by name; the number of one without a name.
    dev_features: Option<Vec<serde_json::Value>>,
}

/// What vDPA devices can be made on
///
/// Without the kernel's vDPA management (`modprobe vdpa`) there is none.
#[utoipa::path(get, path = "/v1/mgmtdevs", operation_id = "list_mgmtdevs", responses(
    (status = 200, description = "All management devices", body = MgmtdevListing),
    KernelErrors,
))]
pub(super) async fn list(State(node): Api) -> Result<Json<Listing>, Error> {
    let devices = node.turns.run(|| of_vdpa(Connection::mgmt_devices)).await?;
    Ok(Json(mgmtdev::listing(&devices)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdpa_mgmt::MgmtDevice;

    #[test]
    fn what_is_described_is_what_is_written() {
        let device = |name: &str, features| MgmtDevice {
            name: name.parse().unwrap(),
            supported_classes: 6,
            max_supported_vqs: Some(3),
            supported_features: features,
        };
        let all = [
            device("pci/0000:01:00.1", Some(u64::MAX)),
            device("vduse", None),
        ];
        let written = serde_json::to_string(&mgmtdev::listing(&all)).unwrap();
        let read: MgmtdevListing = serde_json::from_str(&written).unwrap();
        assert_eq!(read.mgmtdev["vduse"].supported_classes, ["net", "block"]);
    }
}
