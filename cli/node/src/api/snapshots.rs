//! `/v1/snapshots`: the snapshots that the daemon keeps.

use axum::Json;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use bellhop_api::Items;
use bellhop_api::node::{BadSnapshotName, Snapshot, SnapshotName};
use bellhop_api::responses::NameErrors;
use utoipa::IntoParams;
use vmm::http::ErrorBody;

use super::state::{Api, SenderRole};
use crate::error::Error;
use crate::machines::spec::VmBody;
use crate::snapshots::Snapshots;

/// The name of a snapshot in the path.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct SnapshotPath {
    /// The snapshot's name
    #[param(value_type = String, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    name: SnapshotName,
}

impl<S: Send + Sync> FromRequestParts<S> for SnapshotPath {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let name = Path::<String>::from_request_parts(parts, state).await;
        let Path(name) = name.map_err(|_| BadSnapshotName)?;
        let name = name.parse()?;
        Ok(Self { name })
    }
}

/// List snapshots
///
/// Those that the daemon keeps, by name, also incomplete and damaged ones.
#[utoipa::path(get, path = "/v1/snapshots", operation_id = "list_snapshots", responses(
    (status = 200, description = "The snapshots", body = Items<Snapshot>),
    (status = 500, description = "Internal error: the host failed", body = ErrorBody),
))]
pub(super) async fn list(
    State(node): Api,
    SenderRole(role): SenderRole,
) -> Result<Json<Items<Snapshot>>, Error> {
    let snapshots = Snapshots::of(&node.paths);
    let all = node
        .file_permits
        .run(role, move || snapshots.list())
        .await?;
    Ok(Json(all.into_iter().collect()))
}

/// Read a snapshot
///
/// Its virtual machine, time, size and format.
#[utoipa::path(get, path = "/v1/snapshots/{name}", operation_id = "get_snapshot",
    params(SnapshotPath), responses(
    (status = 200, description = "The snapshot", body = Snapshot),
    NameErrors,
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    SnapshotPath { name }: SnapshotPath,
) -> Result<Json<Snapshot>, Error> {
    let snapshots = Snapshots::of(&node.paths);
    let show = move || snapshots.show(&name);
    Ok(Json(node.file_permits.run(role, show).await?))
}

/// Read the configuration of the virtual machine of a snapshot
///
/// As it was, with the settings of its NICs' devices. `PUT /v1/vms/{name}` with `restore_from`
/// takes it, also with changes.
#[utoipa::path(get, path = "/v1/snapshots/{name}/spec", operation_id = "get_snapshot_spec",
    params(SnapshotPath), responses(
    (status = 200, description = "The configuration", body = VmBody),
    NameErrors,
    (status = 422, description = "The snapshot is damaged", body = ErrorBody),
))]
pub(super) async fn spec(
    State(node): Api,
    SenderRole(role): SenderRole,
    SnapshotPath { name }: SnapshotPath,
) -> Result<Json<VmBody>, Error> {
    let snapshots = Snapshots::of(&node.paths);
    let about = move || snapshots.about(&name);
    let about = node.file_permits.run(role, about).await?;
    Ok(Json(about.spec.into()))
}

/// Delete a snapshot
///
/// Also an incomplete or damaged one. A virtual machine that was restored from it is not affected.
#[utoipa::path(delete, path = "/v1/snapshots/{name}", operation_id = "delete_snapshot",
    params(SnapshotPath), responses(
    (status = 204, description = "It is gone"),
    NameErrors,
    (status = 409, description = "It is being written", body = ErrorBody),
    (status = 500, description = "Internal error: the host failed", body = ErrorBody),
))]
pub(super) async fn remove(
    State(node): Api,
    SenderRole(role): SenderRole,
    SnapshotPath { name }: SnapshotPath,
) -> Result<StatusCode, Error> {
    let snapshots = Snapshots::of(&node.paths);
    let remove = move || snapshots.remove(&name);
    node.file_permits.run(role, remove).await?;
    Ok(StatusCode::NO_CONTENT)
}
