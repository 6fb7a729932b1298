//! The endpoints, one line each, and their description.

mod actions;
mod config;
mod descriptors;
mod device;
mod disk;
mod metrics;
mod migration;
mod nic;
mod pluggable;
mod restore;
mod snapshot;
mod state;
mod upgrade;
mod vm;
mod watch;

use std::sync::Arc;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::{Router, middleware};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::controller::Controller;
use crate::http::descriptors::discard;
use crate::http::{self, ErrorBody, description};

/// The description, except for the endpoints.
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
    components(schemas(ErrorBody))
)]
struct Description;

fn registered() -> OpenApiRouter<Arc<Controller>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(vm::show, vm::configure, vm::change))
        .routes(routes!(config::show))
        .routes(routes!(watch::wait))
        .routes(routes!(actions::power_button))
        .routes(routes!(actions::reset))
        .routes(routes!(snapshot::write))
        .routes(routes!(restore::restore))
        .routes(routes!(upgrade::upgrade))
        .routes(routes!(
            migration::show,
            migration::begin,
            migration::resolve,
            migration::cancel
        ))
        .routes(routes!(actions::nmi))
        .routes(routes!(nic::list))
        .routes(routes!(nic::show, nic::put, nic::change, nic::remove))
        .routes(routes!(actions::announce))
        .routes(routes!(disk::list))
        .routes(routes!(disk::show, disk::put, disk::change, disk::remove))
        .routes(routes!(metrics::show))
        .routes(routes!(openapi))
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
    let (router, rules) = description::endpoints_and_rules(registered());
    // The outermost layer: also for requests to paths that do not exist.
    let router = http::surround(rules.around(router)).layer(middleware::from_fn(discard));
    router.with_state(controller)
}
