//! `/v1/vm/disks`: all disks. They are a part of the configuration and stay.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::Api;
use super::device::DeviceInfo;
use crate::api::error::ApiError;
use crate::http::{ErrorBody, on_worker};

/// A disk.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DiskInfo {
    /// Its name.
    id: String,
    /// Its image.
    path: String,
    /// Whether writes are refused.
    readonly: bool,
    /// What the guest made of it, once the machine is built.
    device: Option<DeviceInfo>,
}

/// All disks
#[utoipa::path(get, path = "/v1/vm/disks", responses(
    (status = 200, description = "All disks", body = Vec<DiskInfo>),
    (status = 409, description = "The machine has no configuration yet, or has ended", body = ErrorBody),
    (status = 503, description = "Too many requests wait", body = ErrorBody),
))]
pub(super) async fn list(State(api): Api) -> Result<Json<Vec<DiskInfo>>, ApiError> {
    let disks = api.config()?.disks;
    let devices = match api.running() {
        Ok(machine) => on_worker(move || machine.devices()).await??,
        Err(_) => Vec::new(),
    };
    let info = |(number, disk): (usize, &crate::config::DiskConfig)| {
        let id = disk.name(number);
        let device = devices.iter().find(|device| device.id == id);
        DiskInfo {
            path: disk.path.to_string_lossy().into_owned(),
            readonly: disk.readonly,
            device: device.map(|device| DeviceInfo::from(&device.description)),
            id,
        }
    };
    Ok(Json(disks.iter().enumerate().map(info).collect()))
}
