//! The daemon's endpoints, one file and one line each, and their description.

mod cordon;
#[cfg(test)]
mod description;
mod doctor;
mod events;
mod functions;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod fuzz;
mod listings;
mod management;
mod metrics;
mod mgmtdevs;
mod migration;
mod nics;
mod operations;
mod permits;
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
mod vm_devices;
mod vm_disks;
mod vm_logs;
mod vm_nics;
mod vm_path;
mod vm_plan;
mod vm_state;
mod vm_vfio;
mod vms;

use std::sync::Arc;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
#[cfg(any(test, feature = "fuzz"))]
use utoipa::OpenApi;
use vmm::http;
use vmm::http::request_rules::RequestRules;

use super::access::{self, Access};
use super::context::Node;

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::request_anything;
pub(super) use permits::Permits;
pub use version::API_LEVEL;

/// What the description has beside the endpoints.
#[cfg(any(test, feature = "fuzz"))]
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
    components(schemas(vmm::http::ErrorBody, bellhop_api::node::Event))
)]
struct Description;

vmm::endpoints! {
    #[cfg(any(test, feature = "fuzz"))]
    Arc<Node>:
    version::show,
    cordon::put,
    cordon::remove,
    vms::list,
    vm::show,
    vm::put,
    vm::change,
    vm::remove,
    vm_state::put,
    vm_plan::plan,
    vm_console::open,
    vm_logs::show,
    vm_nics::show,
    vm_nics::put,
    vm_nics::change,
    vm_nics::remove,
    vm_disks::list,
    vm_disks::show,
    vm_disks::put,
    vm_disks::remove,
    vm_vfio::list,
    vm_vfio::show,
    vm_vfio::put,
    vm_vfio::remove,
    migration::show,
    migration::begin,
    migration::cancel,
    migration::resolve,
    operations::list,
    operations::show,
    operations::cancel,
    operations::snapshot,
    operations::upgrade,
    snapshots::list,
    snapshots::show,
    snapshots::remove,
    snapshots::spec,
    self::openapi,
    events::follow,
    metrics::show,
    topology::show,
    functions::list,
    functions::show,
    functions::change,
    ports::list,
    ports::of_instance,
    ports::show,
    mgmtdevs::list,
    vdpa_devices::list,
    vdpa_devices::show,
    vdpa_devices::put,
    vdpa_devices::change,
    vdpa_devices::remove,
    nics::list,
    nics::create,
    nics::show,
    nics::remove,
    doctor::show,
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

/// The paths that are forwarded to the process of a VM, unless the daemon has an endpoint for them.
const FORWARDED: &str = "/v1/vms/{name}/{*rest}";

/// The router of all endpoints over `node`, for callers that `access` permits.
pub(super) fn router(node: Arc<Node>, access: Arc<Access>) -> Router {
    // Tests generate the description of these from that of the VM's API.
    let router = endpoints().route(FORWARDED, any(proxy::forward));
    let router = RequestRules::of(DOCUMENT).around(router);
    // Only permitted callers learn that a path does not exist.
    let checked = http::complete(router).layer(from_fn_with_state(access, access::check));
    http::named(checked).with_state(node)
}
