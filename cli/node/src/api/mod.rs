//! The daemon's endpoints: one file each, one line here, and their description.

mod events;
mod functions;
mod management;
mod metrics;
mod mgmtdevs;
mod migration;
mod nics;
mod ports;
mod precondition;
mod proxy;
mod state;
mod topology;
mod vdpa_device;
mod vdpa_devices;
mod version;
mod vm;
mod vm_disks;
mod vm_logs;
mod vm_nics;
mod vm_path;
mod vms;

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use vmm::http::request_rules::{self, Evaluated};
use vmm::http::{self, ErrorBody};

use super::access::{self, Access};
use super::context::Node;
use bellhop_api::node::Event;

pub(super) use management::Turns;
pub use version::API_LEVEL;

/// What the description has beside the endpoints.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Bellhop, the API of one node",
        description = "HTTP/1.1 on a Unix socket, and by TCP with TLS and a token. Errors have the body `ErrorBody`; every answer has the header `x-request-id`. What is beneath `/v1/vms/{name}/` and not described here is the machine's own API: `/v1/vms/x/power-button` is its `/v1/vm/power-button`, and `/v1/vms/x/openapi.json` describes all of it."
    ),
    components(schemas(ErrorBody, Event))
)]
struct Description;

fn registered() -> OpenApiRouter<Arc<Node>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(version::show))
        .routes(routes!(vms::list))
        .routes(routes!(vm::show, vm::put, vm::change, vm::remove))
        .routes(routes!(vm::spec))
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
            migration::begin,
            migration::cancel,
            migration::settle
        ))
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
            vdpa_device::show,
            vdpa_device::put,
            vdpa_device::change,
            vdpa_device::remove
        ))
        .routes(routes!(nics::list))
}

/// The description; a copy is in the repository, and a test compares them.
fn document() -> &'static str {
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    DOCUMENT.get_or_init(|| {
        let (_, mut registered) = registered().split_for_parts();
        access::describe(&mut registered);
        request_rules::describe(&mut registered);
        http::description::text(&registered)
    })
}

/// The description of this API, OpenAPI 3.1
#[utoipa::path(get, path = "/v1/openapi.json", operation_id = "get_openapi", responses(
    (status = 200, description = "The description", body = serde_json::Value),
))]
async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], document()).into_response()
}

/// Conditional headers that endpoints evaluate. Elsewhere they are refused.
const EVALUATED: &[Evaluated] = &[
    ("/v1/vms/{name}", "if-match"),
    ("/v1/vms/{name}", "if-none-match"),
];

/// All of them, over `node`, for those whom `access` lets through.
pub(super) fn router(node: Arc<Node>, access: Arc<Access>) -> Router {
    let (router, rules) = http::description::endpoints_and_rules(registered());
    // What the machine's own API describes is not described here again.
    let router = router
        .route("/v1/vms/{name}/migration", get(migration::show))
        .route("/v1/vms/{name}/{*rest}", any(proxy::forward));
    let router = rules.evaluated(EVALUATED).around(router);
    // What there is not is told to those only who may come in.
    let checked = http::complete(router).layer(from_fn_with_state(access, access::check));
    http::named(checked).with_state(node)
}

#[cfg(test)]
mod tests {
    use axum::Extension;
    use vmm::http::description::testing as description;
    use vmm::http::request_rules::testing::unenforced;
    use vmm::http::server::UnixPeer;

    use super::*;
    use crate::machines::spec::VmName;
    use crate::machines::{Change, Machines};
    use crate::paths::Paths;
    use crate::peers::Peers;
    use crate::store::Store;

    /// The copy in the repository.
    const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");

    #[test]
    fn the_copy_in_the_repository_is_what_is_served() {
        let served = document();
        if std::env::var_os("BELLHOP_WRITE_OPENAPI").is_some() {
            std::fs::write(COPY, served).unwrap();
        }
        let copy = std::fs::read_to_string(COPY).unwrap();
        assert!(
            copy == served,
            "cli/node/openapi.json is not what is served: BELLHOP_WRITE_OPENAPI=1 cargo test -p bellhop-node writes it"
        );
    }

    #[test]
    fn each_endpoint_needs_a_role() {
        let served = serde_json::from_str(document()).unwrap();
        assert_eq!(access::faults(&served), Vec::<String>::new());
    }

    #[test]
    fn everything_described_is_complete() {
        let served = serde_json::from_str(document()).unwrap();
        assert_eq!(description::faults(&served), Vec::<String>::new());
    }

    #[tokio::test]
    async fn every_operation_refuses_what_it_would_ignore() {
        let name = format!("node-rules-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let paths = Paths::new(&directory.join("state"), &directory.join("run"));
        paths.make().unwrap();
        let machines = Machines::open(
            Store::open(&paths.store()).unwrap(),
            paths.clone(),
            "boot".to_owned(),
            "info".to_owned(),
            None,
            Peers::default(),
            Arc::new(|_: &VmName, _: Change| {}),
        );
        let node = Arc::new(Node {
            paths,
            events: Arc::default(),
            turns: Turns::default(),
            machines: machines.unwrap(),
        });
        let root = UnixPeer { uid: 0, pid: None };
        let router = router(node, Arc::new(Access::new(None).unwrap())).layer(Extension(root));
        let served = serde_json::from_str(document()).unwrap();
        let faults = unenforced(router, &served, EVALUATED).await;
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(faults, Vec::<String>::new());
    }

    #[test]
    fn operation_ids_are_unique_and_name_verb_and_object() {
        let served = serde_json::from_str(document()).unwrap();
        let faults = description::operation_id_faults(&served);
        assert_eq!(faults, Vec::<String>::new());
    }
}
