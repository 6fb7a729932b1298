//! `/v1/vm/disks`: disks, which can be added and removed while the VM runs; see `pluggable.rs`.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use bellhop_api::Items;
use bellhop_api::machine::{DeviceInfo, DiskChange, DiskInfo, DiskSummary};
use bellhop_api::responses::{
    BusyErrors, HostErrors, NameErrors, NamedBodyErrors, NamedChangeErrors, StateErrors,
};

use super::pluggable::{self, Known};
use super::state::Api;
use crate::api::error::ApiError;
use crate::config::DiskConfig;
use crate::http::body::JsonBody;
use crate::http::parameters::DeviceName;
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

/// Read a disk
///
/// With its queues and features once the machine is built.
#[utoipa::path(get, path = "/v1/vm/disks/{id}", operation_id = "get_disk",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The disk's name")), responses(
    (status = 200, description = "The disk", body = DiskInfo),
    NameErrors, BusyErrors,
))]
pub(super) async fn show(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Json<DiskInfo>, ApiError> {
    pluggable::show::<DiskConfig>(&api, &id).await
}

/// Add a disk
///
/// Before the machine starts, the disk is added to its configuration. Later, the image is opened,
/// locked (one writer or many readers) and plugged; the guest finds it by itself. An identical disk
/// changes nothing.
///
/// The name is also the serial number of the disk, so the limit of 20 characters applies to it.
#[utoipa::path(put, path = "/v1/vm/disks/{id}", operation_id = "put_disk",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The disk's name")),
    request_body = DiskConfig, responses(
    (status = 200, description = "A disk of this name existed: a disk that is not plugged yet is \
        replaced, a plugged one is identical", body = DiskInfo),
    (status = 201, description = "Created", body = DiskInfo),
    NamedBodyErrors, HostErrors,
))]
pub(super) async fn put(
    State(api): Api,
    DeviceName(id): DeviceName,
    JsonBody(wanted): JsonBody<DiskConfig>,
) -> Result<Response, ApiError> {
    pluggable::put(&api, id, wanted).await
}

/// Change a disk before the machine starts
///
/// A plugged disk cannot be changed: remove it and add another one.
#[utoipa::path(patch, path = "/v1/vm/disks/{id}", operation_id = "patch_disk",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The disk's name")),
    request_body = DiskChange, responses(
    (status = 200, description = "The changed disk", body = DiskInfo),
    NamedChangeErrors, StateErrors,
))]
pub(super) async fn change(
    State(api): Api,
    DeviceName(id): DeviceName,
    JsonBody(change): JsonBody<DiskChange>,
) -> Result<Json<DiskInfo>, ApiError> {
    pluggable::change(&api, &id, |disk: &mut DiskConfig| {
        if let Some(path) = change.path {
            disk.path = path;
        }
        disk.readonly = change.readonly.unwrap_or(disk.readonly);
        disk.iommu = change.iommu.unwrap_or(disk.iommu);
        Ok(())
    })
}

/// Remove a disk
///
/// Before the machine starts, it is removed at once. Later, the guest is asked to release it. The
/// disk is gone, with its image closed and unlocked, when it is no longer listed. A guest that does
/// not respond keeps it until the machine resets. Another request asks the guest again.
#[utoipa::path(delete, path = "/v1/vm/disks/{id}", operation_id = "delete_disk",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The disk's name")), responses(
    (status = 202, description = "The guest is asked to release it", body = DiskInfo),
    (status = 204, description = "Deleted"),
    NameErrors, BusyErrors,
))]
pub(super) async fn remove(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Response, ApiError> {
    pluggable::remove::<DiskConfig>(&api, id).await
}
