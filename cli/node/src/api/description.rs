//! Generates the description of the API, and tests its invariants.

mod clients;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use axum::Extension;
use axum::http::Uri;
use bellhop_api::responses::{NameErrors, ProxyErrors};
use serde_json::Value;
use utoipa::openapi::path::ParameterIn;
use utoipa::openapi::{OpenApi, RefOr, Schema};
use utoipa::{IntoParams as _, IntoResponses as _};
use vmm::http::description::generate::{Tag, text};
use vmm::http::description::operations;
use vmm::http::description::testing as description;
use vmm::http::request_rules;
use vmm::http::request_rules::testing::unenforced;
use vmm::http::server::UnixPeer;

use super::vm_path::VmPath;
use super::{proxy, registered, router};
use crate::access::{self, Access};
use crate::context::Node;

/// The copy in the repository.
const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");

const TAGS: [Tag; 8] = [
    Tag {
        name: "node",
        about: "The daemon: its version, its events, metrics and this description.",
        paths: &[
            "/v1/version",
            "/v1/cordon",
            "/v1/events",
            "/v1/metrics",
            "/v1/openapi.json",
        ],
    },
    Tag {
        name: "host",
        about: "Devices of the host: PCI functions, ports, NICs and vDPA devices.",
        paths: &[
            "/v1/topology",
            "/v1/doctor",
            "/v1/functions",
            "/v1/ports",
            "/v1/nics",
            "/v1/mgmtdevs",
            "/v1/vdpa-devices",
        ],
    },
    Tag {
        name: "operations",
        about: "Long requests to the daemon: their progress and their result.",
        paths: &["/v1/operations"],
    },
    Tag {
        name: "snapshots",
        about: "Snapshots of virtual machines that the daemon keeps.",
        paths: &["/v1/snapshots"],
    },
    Tag {
        name: "vms",
        about: "Virtual machines: their configuration, state and power.",
        paths: &["/v1/vms"],
    },
    Tag {
        name: "vm-nics",
        about: "NICs of virtual machines.",
        paths: &["/v1/vms/{name}/nics"],
    },
    Tag {
        name: "vm-disks",
        about: "Disks of virtual machines.",
        paths: &["/v1/vms/{name}/disks"],
    },
    Tag {
        name: "vm-migration",
        about: "Live migration of virtual machines to another node.",
        paths: &["/v1/vms/{name}/migration"],
    },
];

static GENERATED: LazyLock<String> = LazyLock::new(|| {
    let (_, mut described) = registered().split_for_parts();
    mount(&mut described, vmm::api::described());
    access::describe(&mut described);
    request_rules::describe(&mut described);
    text(&described, &TAGS)
});
static SERVED: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(&GENERATED).unwrap());

/// Adds the operations that the daemon forwards to the process of a VM, with their schemas. Paths
/// of the daemon come first.
fn mount(node: &mut OpenApi, mut machine: OpenApi) {
    for (path, mut item) in std::mem::take(&mut machine.paths.paths) {
        let Some(path) = mounted(&path) else { continue };
        if node.paths.paths.contains_key(&path) {
            continue;
        }
        for (_, operation) in operations(&mut item) {
            let name = VmPath::into_params(|| Some(ParameterIn::Path));
            let parameters = name.into_iter().map(RefOr::T);
            let others = operation.parameters.take().into_iter().flatten();
            operation.parameters = Some(parameters.chain(others).collect());
            operation.operation_id = operation.operation_id.as_deref().map(id_of_vm);
            if let Some(text) = &mut operation.description {
                *text = text
                    .replace("GET /v1/vm`", "GET /v1/vms/{name}/watch`")
                    .replace("/v1/vm/", "/v1/vms/{name}/");
            }
            let errors = NameErrors::responses().into_iter();
            for (status, response) in errors.chain(ProxyErrors::responses()) {
                let responses = &mut operation.responses.responses;
                responses.entry(status).or_insert(response);
            }
        }
        node.paths.paths.insert(path, item);
    }
    let (of_node, of_machine) = (schemas(node), schemas(&machine));
    for (name, schema) in of_machine {
        let same = of_node.get(&name).is_none_or(|own| *own == schema);
        assert!(same, "two schemas have the name {name}");
    }
    machine.servers = None;
    machine.security = None;
    node.merge(machine);
    drop_unused(node);
}

/// Drops schemas of operations that are not mounted.
fn drop_unused(api: &mut OpenApi) {
    loop {
        let text = serde_json::to_string(api).unwrap();
        let schemas = &mut api.components.as_mut().unwrap().schemas;
        let before = schemas.len();
        schemas.retain(|name, _| text.contains(&format!("#/components/schemas/{name}\"")));
        if schemas.len() == before {
            return;
        }
    }
}

fn schemas(api: &OpenApi) -> BTreeMap<String, RefOr<Schema>> {
    let components = api.components.as_ref();
    components
        .map(|all| all.schemas.clone())
        .unwrap_or_default()
}

/// The daemon's path for a path of a VM's process: see `proxy.rs`. The daemon creates and starts
/// its VMs, so there is no restore.
fn mounted(path: &str) -> Option<String> {
    let rest = match path {
        "/v1/vm/restore" => return None,
        "/v1/metrics" | "/v1/openapi.json" => path.strip_prefix("/v1/")?,
        _ => path.strip_prefix("/v1/vm/")?,
    };
    Some(format!("/v1/vms/{{name}}/{rest}"))
}

/// `list_nics` becomes `list_vm_nics` here; `reset_vm` stays.
fn id_of_vm(id: &str) -> String {
    match id.split_once('_') {
        Some((verb, object)) if object != "vm" && !object.starts_with("vm_") => {
            format!("{verb}_vm_{object}")
        }
        _ => id.to_owned(),
    }
}

#[test]
fn mounted_paths_are_passed_on_to_where_they_come_from() {
    for path in vmm::api::described().paths.paths.keys() {
        if let Some(mounted) = mounted(path) {
            let concrete = |path: &str| path.replace("{name}", "x").replace("{id}", "a");
            let uri: Uri = concrete(&mounted).parse().unwrap();
            assert_eq!(proxy::target(&uri), Some(concrete(path)), "{mounted}");
            let item = &SERVED["paths"][&mounted];
            assert!(item.is_object(), "{mounted} is not described");
        }
    }
    let snapshot = &SERVED["paths"]["/v1/vms/{name}/snapshot"]["post"];
    assert_eq!(snapshot["operationId"], "create_vm_snapshot");
    assert_eq!(snapshot["parameters"][0]["name"], "name");
}

#[test]
fn the_copy_in_the_repository_is_the_served_one() {
    if std::env::var_os("BELLHOP_WRITE_OPENAPI").is_some() {
        std::fs::write(COPY, &*GENERATED).unwrap();
    }
    let copy = std::fs::read_to_string(COPY).unwrap();
    assert!(
        copy == *GENERATED,
        "cli/node/openapi.json differs from the served description: BELLHOP_WRITE_OPENAPI=1 cargo \
         test -p bellhop-node writes it"
    );
}

#[test]
fn each_endpoint_needs_a_role() {
    assert_eq!(access::faults(&SERVED), Vec::<String>::new());
}

#[test]
fn everything_described_is_complete() {
    assert_eq!(description::faults(&SERVED), Vec::<String>::new());
}

#[tokio::test]
async fn every_operation_refuses_input_that_it_would_ignore() {
    let name = format!("node-rules-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    let node = Node::below(&directory);
    let root = UnixPeer { uid: 0, pid: None };
    let router = router(node, Arc::new(Access::new(None).unwrap())).layer(Extension(root));
    // The process of a VM checks the forwarded requests.
    let (_, own) = registered().split_for_parts();
    let mut served = SERVED.clone();
    let paths = served["paths"].as_object_mut().unwrap();
    paths.retain(|path, _| own.paths.paths.contains_key(path));
    let faults = unenforced(router, &served).await;
    std::fs::remove_dir_all(&directory).unwrap();
    assert_eq!(faults, Vec::<String>::new());
}

#[test]
fn operation_ids_are_unique_and_name_verb_and_object() {
    let faults = description::operation_id_faults(&SERVED);
    assert_eq!(faults, Vec::<String>::new());
}

#[test]
fn every_code_of_an_error_is_described() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let unknown = description::unknown_codes(&sources).unwrap();
    assert_eq!(unknown, Vec::<String>::new());
}
