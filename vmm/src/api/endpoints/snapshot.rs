//! `/v1/vm/snapshot`: writes a snapshot of the VM to a directory.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::machine::{SnapshotInfo, SnapshotRequest};
use bellhop_api::responses::{BodyErrors, HostErrors};

use super::state::Api;
use crate::api::error::ApiError;
use crate::http::body::JsonBody;
use crate::machine::milliseconds;

/// Create a snapshot
///
/// Possible in the states Running and Paused, which the machine keeps. Meanwhile its vCPUs are
/// parked, its devices are stopped, and frames for it are lost. The directory is complete and on
/// the disk before the response. A failed snapshot leaves no files, and the machine continues.
///
/// The snapshot holds the memory of the guest: protect it. `bellhop run --restore` and the
/// operation `restore_vm` restore it.
#[utoipa::path(post, path = "/v1/vm/snapshot", operation_id = "create_snapshot",
    request_body = SnapshotRequest, responses(
    (status = 201, description = "The snapshot is complete", body = SnapshotInfo),
    BodyErrors, HostErrors,
))]
pub(super) async fn write(
    State(api): Api,
    JsonBody(wanted): JsonBody<SnapshotRequest>,
) -> Result<(StatusCode, Json<SnapshotInfo>), ApiError> {
    let path = wanted.path.clone();
    let written = api.ask(move |machine| machine.snapshot(&path)).await?;
    let info = SnapshotInfo {
        path: wanted.path,
        memory_bytes: written.memory_bytes,
        paused_ms: milliseconds(written.paused),
    };
    Ok((StatusCode::CREATED, Json(info)))
}
