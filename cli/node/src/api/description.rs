//! The description of the API: its generation, and what must be true of it.

use std::path::Path;
use std::sync::LazyLock;

use serde_json::Value;
use vmm::http::description::generate::{Tag, text};
use vmm::http::description::testing as description;

use super::registered;
use crate::access;

/// The copy in the repository.
const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");

const TAGS: [Tag; 6] = [
    Tag {
        name: "node",
        about: "The daemon: its version, its events and this description.",
        paths: &["/v1/version", "/v1/events", "/v1/openapi.json"],
    },
    Tag {
        name: "host",
        about: "Devices of the host: PCI functions, ports, NICs and vDPA devices.",
        paths: &[
            "/v1/topology",
            "/v1/functions",
            "/v1/ports",
            "/v1/nics",
            "/v1/mgmtdevs",
            "/v1/vdpa-devices",
        ],
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
    access::describe(&mut described);
    text(&described, &TAGS)
});
static SERVED: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(&GENERATED).unwrap());

#[test]
fn the_copy_in_the_repository_is_what_is_served() {
    if std::env::var_os("BELLHOP_WRITE_OPENAPI").is_some() {
        std::fs::write(COPY, &*GENERATED).unwrap();
    }
    let copy = std::fs::read_to_string(COPY).unwrap();
    assert!(
        copy == *GENERATED,
        "cli/node/openapi.json is not what is served: \
         BELLHOP_WRITE_OPENAPI=1 cargo test -p bellhop-node writes it"
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
