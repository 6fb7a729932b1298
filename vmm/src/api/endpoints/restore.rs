//! `/v1/vm/restore`: restores a VM from a snapshot.

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::machine::RestoreRequest;
use bellhop_api::responses::{BodyErrors, HostErrors};

use super::descriptors;
use super::state::Api;
use crate::Error;
use crate::api::error::ApiError;
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;
use crate::http::on_worker;
use crate::machine::Snapshot;

/// Restore the machine from a snapshot
///
/// Possible only in the state NotStarted, instead of a start. The snapshot replaces an earlier
/// configuration. The guest resumes from the saved state, with its clock at that time.
///
/// A snapshot that cannot run here is refused: another CPU, a vDPA device without a negotiated
/// feature, or a function of another model. So is one that names a file that `allow_paths` does not
/// have, or a function that `vfio` does not have. Another attempt may follow.
#[utoipa::path(put, path = "/v1/vm/restore", operation_id = "restore_vm",
    request_body = RestoreRequest, responses(
    (status = 204, description = "The machine runs, or is paused"),
    BodyErrors, HostErrors,
))]
pub(super) async fn restore(
    State(api): Api,
    received: Received,
    JsonBody(wanted): JsonBody<RestoreRequest>,
) -> Result<StatusCode, ApiError> {
    let RestoreRequest {
        path,
        mut vdpa,
        mut vfio,
        allow_paths,
        paused,
    } = wanted;
    descriptors::give(&received, &mut vdpa, &mut vfio)?;
    api.before_boot("restore a machine before it starts")?;
    let opened = on_worker(move || {
        let mut snapshot = Snapshot::open(&path)?;
        snapshot.set_paused(paused);
        snapshot.adapt(vdpa, &vfio, &allow_paths)?;
        Ok::<_, Error>(snapshot)
    });
    api.restore(opened.await??).await?;
    Ok(StatusCode::NO_CONTENT)
}
