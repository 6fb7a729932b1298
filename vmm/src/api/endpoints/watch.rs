//! `/v1/vm/watch`: a long poll.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use bellhop_api::machine::{VmState, VmStatus, Watch};
use bellhop_api::responses::WatchErrors;

use super::state::Api;
use crate::api::error::ApiError;
use crate::http::HttpError;
use crate::http::parameters::Parameters;

/// The longest wait, in seconds.
const TIMEOUT_MAX: u64 = 60;
/// The default wait, in seconds.
const TIMEOUT: u64 = 30;

/// Wait for a change
///
/// Responds once the generation differs from `since`, and after `timeout_s` at the latest.
#[utoipa::path(get, path = "/v1/vm/watch", operation_id = "watch_vm", params(Watch), responses(
    (status = 200, description = "The machine now", body = VmStatus),
    WatchErrors,
))]
pub(super) async fn wait(
    State(api): Api,
    Parameters(watch): Parameters<Watch>,
) -> Result<Json<VmStatus>, ApiError> {
    let seconds = watch.timeout_s.unwrap_or(TIMEOUT);
    if seconds > TIMEOUT_MAX {
        return Err(
            HttpError::Parameter(format!("timeout_s is {seconds}: at most {TIMEOUT_MAX}")).into(),
        );
    }
    if let Some(since) = watch.since {
        let _watcher = api.watcher()?;
        let mut changes = api.watch();
        // After the end there are no more changes.
        let done =
            changes.wait_for(|view| view.generation != since || view.state == VmState::Stopped);
        // The answer is the current view, whether it changed or not.
        let _ = tokio::time::timeout(Duration::from_secs(seconds), done).await;
    }
    Ok(Json(api.view()))
}
