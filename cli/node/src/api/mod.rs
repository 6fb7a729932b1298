//! The daemon's endpoints, one file and one line each, and their description.

mod cordon;
#[cfg(test)]
mod description;
mod doctor;
mod events;
mod functions;
mod listings;
mod management;
mod metrics;
mod mgmtdevs;
mod migration;
mod nics;
mod operations;
mod ports;
mod precondition;
mod proxy;
#[cfg(test)]
mod role_tests;
mod snapshots;
mod state;
mod topology;
mod vdpa_devices;
mod version;
mod vm;
mod vm_console;
mod vm_disks;
mod vm_logs;
mod vm_nics;
mod vm_path;
mod vm_plan;
mod vm_state;
mod vms;

use std::sync::Arc;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use vmm::http::{self, ErrorBody};

use super::access::{self, Access};
use super::context::Node;
use bellhop_api::node::Event;

pub(super) use management::KernelPermits;
pub use version::API_LEVEL;

/// What the description has beside the endpoints.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Bellhop, the API of one node",
        description = "The API of the daemon of one node: HTTP/1.1 on a Unix socket, and over TCP \
            with TLS, a client certificate and a token. The daemon forwards other requests below \
            `/v1/vms/{name}/` to the process of the machine, whose version may differ. Clients \
            must ignore unknown members of responses: a later version may add some."
    ),
    servers(
        (url = "/", description = "The Unix socket of the daemon: /run/bellhop/node.socket"),
        (
            url = "https://{host}:{port}",
            description = "The address of `bellhop serve --listen`",
            variables(
                ("host" = (default = "localhost", description = "The node")),
                ("port" = (default = "8443", description = "Its port")),
            )
        ),
    ),
    components(schemas(ErrorBody, Event))
)]
struct Description;

fn registered() -> OpenApiRouter<Arc<Node>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(version::show))
        .routes(routes!(cordon::put, cordon::remove))
        .routes(routes!(vms::list))
        .routes(routes!(vm::show, vm::put, vm::change, vm::remove))
        .routes(routes!(vm_state::put))
        .routes(routes!(vm_plan::plan))
        .routes(routes!(vm_console::open))
        .routes(routes!(vm_logs::show))
        .routes(routes!(
            vm_nics::show,
            vm_nics::put,
            vm_nics::change,
            vm_nics::remove
        ))
        .routes(routes!(vm_disks::list))
        .routes(routes!(vm_disks::show, vm_disks::put, vm_disks::remove))
        .routes(routes!(
            migration::show,
            migration::begin,
            migration::cancel,
            migration::resolve
        ))
        .routes(routes!(operations::list))
        .routes(routes!(operations::show, operations::cancel))
        .routes(routes!(operations::snapshot))
        .routes(routes!(operations::upgrade))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::show, snapshots::remove))
        .routes(routes!(snapshots::spec))
        .routes(routes!(openapi))
        .routes(routes!(events::follow))
        .routes(routes!(metrics::show))
        .routes(routes!(topology::show))
        .routes(routes!(functions::list))
        .routes(routes!(functions::show, functions::change))
        .routes(routes!(ports::list))
        .routes(routes!(ports::of_instance))
        .routes(routes!(ports::show))
        .routes(routes!(mgmtdevs::list))
        .routes(routes!(vdpa_devices::list))
        .routes(routes!(
            vdpa_devices::show,
            vdpa_devices::put,
            vdpa_devices::change,
            vdpa_devices::remove
        ))
        .routes(routes!(nics::list, nics::create))
        .routes(routes!(nics::show, nics::remove))
        .routes(routes!(doctor::show))
}

/// The served description; a test generates it and compares.
pub(crate) const DOCUMENT: &str = include_str!("../../openapi.json");

/// Read this description
///
/// OpenAPI 3.1. The same file is in the repository.
#[utoipa::path(get, path = "/v1/openapi.json", operation_id = "get_openapi", responses(
    (status = 200, description = "The description", body = Object),
))]
async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}

/// The router of all endpoints over `node`, for callers that `access` permits.
pub(super) fn router(node: Arc<Node>, access: Arc<Access>) -> Router {
    let (router, rules) = http::description::endpoints_and_rules(registered());
    // Tests generate the description of these from that of the VM's API.
    let router = router.route("/v1/vms/{name}/{*rest}", any(proxy::forward));
    let router = rules.around(router);
    // Only permitted callers learn that a path does not exist.
    let checked = http::complete(router).layer(from_fn_with_state(access, access::check));
    http::named(checked).with_state(node)
}
