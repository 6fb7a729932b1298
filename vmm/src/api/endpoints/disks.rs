//! `/v1/vm/disks`: all disks.

use axum::Json;
use axum::extract::State;
use bellhop_api::Items;
use bellhop_api::machine::{DeviceInfo, DiskInfo, DiskSummary};
use bellhop_api::responses::BusyErrors;

use super::pluggable::Known;
use super::state::Api;
use crate::api::error::ApiError;
use crate::config::DiskConfig;
use crate::machine::DiskStatus;

impl From<&DiskStatus> for DiskSummary {
    fn from(disk: &DiskStatus) -> Self {
        Self {
            state: disk.state,
            address: Some(disk.address.to_string()),
            ..Self::configured(disk.id.clone(), &disk.config)
        }
    }
}

impl From<Known<DiskConfig>> for DiskInfo {
    fn from(disk: Known<DiskConfig>) -> Self {
        match disk {
            Known::Configured(config) => {
                let id = config.id.clone().unwrap_or_default();
                Self {
                    summary: DiskSummary::configured(id, &config),
                    device: None,
                }
            }
            Known::Plugged { device, info } => Self {
                summary: DiskSummary::from(&device),
                device: info,
            },
        }
    }
}

/// List disks
///
/// Before the machine is built, these are the disks of its configuration.
#[utoipa::path(get, path = "/v1/vm/disks", operation_id = "list_disks", responses(
    (status = 200, description = "All disks", body = Items<DiskInfo>),
    BusyErrors,
))]
pub(super) async fn list(State(api): Api) -> Result<Json<Items<DiskInfo>>, ApiError> {
    if !api.is_built() {
        let disks = api.config()?.disks;
        let info = |(number, disk): (usize, &DiskConfig)| DiskInfo {
            summary: DiskSummary::configured(disk.name(number), disk),
            device: None,
        };
        return Ok(Json(disks.iter().enumerate().map(info).collect()));
    }
    let disks = api.view().disks;
    let devices = api.ask(|machine| machine.devices()).await?;
    let info = |summary: DiskSummary| {
        let device = devices.iter().find(|device| device.id == summary.id);
        DiskInfo {
            device: device.map(DeviceInfo::from),
            summary,
        }
    };
    Ok(Json(disks.into_iter().map(info).collect()))
}
