//! `/v1/vm/snapshot`: the whole machine into a directory.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::machine::{SnapshotInfo, SnapshotRequest};
use bellhop_api::responses::BodyErrors;

use super::Api;
use crate::api::error::ApiError;
use crate::http::body::JsonBody;
use crate::http::{ErrorBody, on_worker};

/// Write a snapshot of the machine
///
/// From the states Running and Paused, in which the machine is again afterwards. Meanwhile its vCPUs are
/// parked and its devices stopped; frames for it are lost. When the answer comes the directory is whole and on the
/// disk; a snapshot that fails leaves nothing and the machine goes on. It holds the guest's memory: treat it
/// as such. `PUT /v1/vm/restore` and `bellhop run --restore` bring the machine back.
#[utoipa::path(post, path = "/v1/vm/snapshot", operation_id = "create_snapshot",
    request_body = SnapshotRequest, responses(
    (status = 201, description = "It is there, whole", body = SnapshotInfo),
    BodyErrors,
    (status = 409, description = "There is no machine that runs or is paused, one of its devices cannot be saved, or another snapshot is being written", body = ErrorBody),
    (status = 422, description = "An unknown field; or the directory cannot be made: it exists, is no absolute path, …", body = ErrorBody),
    (status = 500, description = "The host cannot do it: the disk is full, …", body = ErrorBody),
    (status = 503, description = "Too many requests wait", body = ErrorBody),
))]
pub(super) async fn write(
    State(api): Api,
    JsonBody(wanted): JsonBody<SnapshotRequest>,
) -> Result<(StatusCode, Json<SnapshotInfo>), ApiError> {
    let machine = api.running()?;
    let path = wanted.path.clone();
    let written = on_worker(move || machine.snapshot(&path)).await??;
    let info = SnapshotInfo {
        path: wanted.path,
        memory_bytes: written.memory_bytes,
        paused_ms: u64::try_from(written.paused.as_millis()).unwrap_or(u64::MAX),
    };
    Ok((StatusCode::CREATED, Json(info)))
}
