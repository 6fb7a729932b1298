//! `/v1/version`: who serves.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::Api;

/// Grows when something in this API changes so that clients have to know.
const LEVEL: u32 = 1;

/// The daemon.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Version {
    /// The version of Bellhop.
    version: &'static str,
    /// The level of this API: grows when clients have to know of a change.
    api: u32,
    /// The daemon's process.
    pid: u32,
    /// Its socket.
    socket: String,
}

/// The daemon's version
#[utoipa::path(get, path = "/v1/version", operation_id = "get_version",
    responses((status = 200, description = "The version", body = Version)))]
pub(super) async fn show(State(node): Api) -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION"),
        api: LEVEL,
        pid: std::process::id(),
        socket: node.paths.socket().to_string_lossy().into_owned(),
    })
}
