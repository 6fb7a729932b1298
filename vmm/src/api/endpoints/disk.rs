//! `/v1/vm/disks/{id}`: one disk, which comes and goes also while the machine runs; see
//! `pluggable.rs`.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use bellhop_api::machine::{DiskChange, DiskInfo};
use bellhop_api::responses::{
    BusyErrors, HostErrors, NameErrors, NamedBodyErrors, NamedChangeErrors, StateErrors,
};

use super::pluggable;
use super::state::Api;
use crate::api::error::ApiError;
use crate::config::DiskConfig;
use crate::http::body::JsonBody;
use crate::http::parameters::DeviceName;

/// A disk in full
#[utoipa::path(get, path = "/v1/vm/disks/{id}", operation_id = "get_disk",
    params(("id" = String, Path, description = "The disk's name")), responses(
    (status = 200, description = "The disk", body = DiskInfo),
    NameErrors, BusyErrors,
))]
pub(super) async fn show(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Json<DiskInfo>, ApiError> {
    pluggable::show::<DiskConfig>(&api, &id).await
}

/// Give the machine a disk
///
/// Before it starts: a disk for later. While it runs or is paused: the image is opened, locked
/// (by one writer or any number of readers) and plugged in; the guest finds it by itself. The
/// same disk again changes nothing. The name is also the disk's serial number, so the guest's
/// limit of 20 characters holds for it.
#[utoipa::path(put, path = "/v1/vm/disks/{id}", operation_id = "put_disk",
    params(("id" = String, Path, description = "The disk's name")),
    request_body = DiskConfig, responses(
    (status = 200, description = "There was one of this name: before the machine starts it is \
        replaced, later it is the same", body = DiskInfo),
    (status = 201, description = "It is there now", body = DiskInfo),
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
#[utoipa::path(patch, path = "/v1/vm/disks/{id}", operation_id = "patch_disk",
    params(("id" = String, Path, description = "The disk's name")),
    request_body = DiskChange, responses(
    (status = 200, description = "The disk as it is now", body = DiskInfo),
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
        Ok(())
    })
}

/// Take a disk away
///
/// Before the machine starts it is gone at once. Later the guest is asked to give it up: it is
/// gone, and its image closed and unlocked, when it is no longer listed. A guest that does not
/// answer keeps it until the machine resets; asking again reminds it.
#[utoipa::path(delete, path = "/v1/vm/disks/{id}", operation_id = "delete_disk",
    params(("id" = String, Path, description = "The disk's name")), responses(
    (status = 202, description = "The guest is asked: watch it go", body = DiskInfo),
    (status = 204, description = "It is gone"),
    NameErrors, BusyErrors,
))]
pub(super) async fn remove(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Response, ApiError> {
    pluggable::remove::<DiskConfig>(&api, id).await
}
