//! `/v1/version`: the server's version.

use axum::Json;
use axum::extract::State;
use bellhop_api::node::Version;

use super::state::Api;

/// Incremented for changes of this API that clients must know about.
pub const API_LEVEL: u32 = 1;

/// Read the version of the daemon
///
/// `api` is the level of this API.
#[utoipa::path(get, path = "/v1/version", operation_id = "get_version",
    responses((status = 200, description = "The version", body = Version)))]
pub(super) async fn show(State(node): Api) -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: API_LEVEL,
        pid: std::process::id(),
        cordoned: node.paths.cordon().exists(),
        socket: node.paths.socket().to_string_lossy().into_owned(),
    })
}
