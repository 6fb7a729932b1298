//! The endpoints, one line each, and their description.

mod actions;
mod config;
mod descriptors;
mod device;
mod disk;
mod iommu;
mod metrics;
mod migration;
mod nic;
mod pluggable;
mod restore;
mod snapshot;
mod state;
mod upgrade;
mod vfio;
mod vm;
mod watch;

use std::sync::Arc;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::{Router, middleware};
#[cfg(any(test, feature = "testing"))]
use utoipa::OpenApi;

use super::controller::Controller;
use crate::http;
use crate::http::descriptors::discard;
use crate::http::request_rules::RequestRules;

/// The description, except for the endpoints.
#[cfg(any(test, feature = "testing"))]
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Bellhop, the API of one machine",
        description = "The API of the process of one machine: HTTP/1.1 on a Unix socket, whose \
                       mode controls access. Clients must ignore unknown members of responses: a \
                       later version may add some."
    ),
    // The mode of the socket controls access.
    security(()),
    servers((url = "/", description = "The Unix socket, as `bellhop run --api-socket` names it")),
    components(schemas(crate::http::ErrorBody))
)]
struct Description;

crate::endpoints! {
    #[cfg(any(test, feature = "testing"))]
    Arc<Controller>:
    vm::show,
    vm::configure,
    vm::change,
    config::show,
    watch::wait,
    actions::power_button,
    actions::reset,
    snapshot::write,
    restore::restore,
    upgrade::upgrade,
    migration::show,
    migration::begin,
    migration::resolve,
    migration::cancel,
    actions::nmi,
    nic::list,
    nic::show,
    nic::put,
    nic::change,
    nic::remove,
    actions::announce,
    disk::list,
    disk::show,
    disk::put,
    disk::change,
    disk::remove,
    vfio::list,
    vfio::show,
    vfio::put,
    vfio::remove,
    iommu::show,
    metrics::show,
    self::openapi,
}

/// The served description; a test generates it and compares.
pub(super) const DOCUMENT: &str = include_str!("../../../openapi.json");

/// The description as utoipa derives it.
#[cfg(any(test, feature = "testing"))]
pub(super) fn described() -> utoipa::openapi::OpenApi {
    registered().split_for_parts().1
}

/// Read this description
///
/// OpenAPI 3.1. The same file is in the repository.
#[utoipa::path(get, path = "/v1/openapi.json", operation_id = "get_openapi", responses(
    (status = 200, description = "The description", body = Object),
))]
async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}

/// The router of all endpoints over `controller`.
pub(super) fn router(controller: Arc<Controller>) -> Router {
    let router = RequestRules::of(DOCUMENT).around(endpoints());
    // The outermost layer: also for requests to paths that do not exist.
    let router = http::surround(router).layer(middleware::from_fn(discard));
    router.with_state(controller)
}
