//! The endpoints: one file each, one line here, and their description.

mod announce;
mod config;
mod descriptors;
mod device;
mod disk;
mod disks;
mod metrics;
mod migration;
mod nic;
mod nics;
mod nmi;
mod pluggable;
mod power_button;
mod queue_watch;
mod reset;
mod restore;
mod snapshot;
mod state;
mod upgrade;
mod vm;
mod watch;

use std::sync::{Arc, OnceLock};

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::{Router, middleware};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::controller::Controller;
use crate::http::descriptors::discard;
use crate::http::{self, ErrorBody, description, request_rules};

/// What the description has beside the endpoints.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Bellhop, the API of one machine",
        description = "HTTP/1.1 on a Unix socket. Errors have the body `ErrorBody`; every \
                       answer has the header `x-request-id`."
    ),
    components(schemas(ErrorBody))
)]
struct Description;

fn registered() -> OpenApiRouter<Arc<Controller>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(vm::show, vm::configure, vm::change))
        .routes(routes!(config::show))
        .routes(routes!(watch::wait))
        .routes(routes!(power_button::press))
        .routes(routes!(reset::reset))
        .routes(routes!(snapshot::write))
        .routes(routes!(restore::restore))
        .routes(routes!(upgrade::upgrade))
        .routes(routes!(
            migration::show,
            migration::begin,
            migration::settle,
            migration::cancel
        ))
        .routes(routes!(nmi::send))
        .routes(routes!(nics::list))
        .routes(routes!(nic::show, nic::put, nic::change, nic::remove))
        .routes(routes!(announce::announce))
        .routes(routes!(disks::list))
        .routes(routes!(disk::show, disk::put, disk::change, disk::remove))
        .routes(routes!(metrics::show))
        .routes(routes!(openapi))
}

/// The description; a copy is in the repository, and a test compares them.
pub(super) fn document() -> &'static str {
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    DOCUMENT.get_or_init(|| {
        let (_, mut registered) = registered().split_for_parts();
        request_rules::describe(&mut registered);
        description::text(&registered)
    })
}

/// The description of this API, OpenAPI 3.1
#[utoipa::path(get, path = "/v1/openapi.json", operation_id = "get_openapi", responses(
    (status = 200, description = "The description", body = serde_json::Value),
))]
async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], document()).into_response()
}

/// All of them, over `controller`.
pub(super) fn router(controller: Arc<Controller>) -> Router {
    let (router, rules) = description::endpoints_and_rules(registered());
    // The outermost: also of requests for what is not there.
    let router = http::surround(rules.around(router)).layer(middleware::from_fn(discard));
    router.with_state(controller)
}
