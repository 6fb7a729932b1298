//! `/v1/vm/upgrade`: hands the VM over to another program.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::machine::UpgradeRequest;
use bellhop_api::responses::{BodyErrors, StateErrors};

use super::state::Api;
use crate::api::error::ApiError;
use crate::http::body::JsonBody;
use crate::http::on_worker;
use crate::machine::Handle;

/// The time for the answer to reach the client before the serving program is replaced.
const ANSWER: Duration = Duration::from_millis(100);

/// Upgrade the program of the machine in place
///
/// Another program of Bellhop replaces this one in the same process (live upgrade). The guest stops
/// for a moment and its memory stays in place. vDPA devices are closed and opened again by their
/// paths, and so are VFIO devices whose driver moves their state. Meanwhile this API does not
/// respond.
///
/// `GET /v1/vm` has the result: `upgrades` increases, or `upgrade_error` has the reason and the old
/// program continues.
#[utoipa::path(post, path = "/v1/vm/upgrade", operation_id = "upgrade_vm",
    request_body = UpgradeRequest, responses(
    (status = 202, description = "The upgrade begins: watch `upgrades` and `upgrade_error`"),
    BodyErrors, StateErrors,
))]
pub(super) async fn upgrade(
    State(api): Api,
    JsonBody(wanted): JsonBody<UpgradeRequest>,
) -> Result<StatusCode, ApiError> {
    let machine = api.running()?;
    api.ask(Handle::ensure_functions_continue).await?;
    let program = wanted.program.clone();
    on_worker(move || crate::machine::check_program(&program)).await??;
    machine.forget_upgrade_error();
    tokio::spawn(async move {
        tokio::time::sleep(ANSWER).await;
        // The status of the VM has the reason of a failure.
        let _ = on_worker(move || machine.hand_over(&wanted.program)).await;
    });
    Ok(StatusCode::ACCEPTED)
}
