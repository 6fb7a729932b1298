//! The description against the code: the copy in the repository, and every answer of the tests.

use std::path::Path;
use std::sync::LazyLock;

use serde_json::Value;

use crate::api;
use crate::http::description::generate::{Tag, text};
use crate::http::description::testing as description;
use crate::http::request_rules;
use crate::http::request_rules::testing::unenforced;

/// The copy in the repository.
const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");

const TAGS: [Tag; 7] = [
    Tag {
        name: "machine",
        about: "The machine as a whole: its configuration, state and power.",
        paths: &["/v1/vm"],
    },
    Tag {
        name: "nics",
        about: "Its NICs, each a vDPA device.",
        paths: &["/v1/vm/nics"],
    },
    Tag {
        name: "disks",
        about: "Its disks.",
        paths: &["/v1/vm/disks"],
    },
    Tag {
        name: "vfio",
        about: "Its PCI functions of the host, by VFIO.",
        paths: &["/v1/vm/vfio"],
    },
    Tag {
        name: "migration",
        about: "Live migration to another process, and from one.",
        paths: &["/v1/vm/migration"],
    },
    Tag {
        name: "snapshots",
        about: "The whole machine in a directory.",
        paths: &["/v1/vm/snapshot", "/v1/vm/restore"],
    },
    Tag {
        name: "service",
        about: "Metrics, and this description.",
        paths: &["/v1/metrics", "/v1/openapi.json"],
    },
];

static GENERATED: LazyLock<String> = LazyLock::new(|| {
    let mut described = api::described();
    request_rules::describe(&mut described);
    text(&described, &TAGS)
});
static SERVED: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(&GENERATED).unwrap());

/// Checks that the status of an answer to a described request is described.
#[track_caller]
pub(super) fn is_described(method: &str, path: &str, status: u16) {
    assert!(
        description::describes(&SERVED, method, path, status),
        "{method} {path} is answered with {status}, which is not described"
    );
}

#[test]
fn the_copy_in_the_repository_is_the_served_one() {
    if std::env::var_os("BELLHOP_WRITE_OPENAPI").is_some() {
        std::fs::write(COPY, &*GENERATED).unwrap();
    }
    let copy = std::fs::read_to_string(COPY).unwrap();
    assert!(
        copy == *GENERATED,
        "vmm/openapi.json is not what is served: \
         BELLHOP_WRITE_OPENAPI=1 cargo test -p vmm writes it"
    );
}

#[test]
fn everything_described_is_complete() {
    assert!(SERVED["paths"]["/v1/vm"]["patch"].is_object());
    assert_eq!(description::faults(&SERVED), Vec::<String>::new());
}

#[test]
fn every_operation_refuses_input_that_it_would_ignore() {
    let inside = super::Inside::new(None);
    let faults = unenforced(inside.router.clone(), &SERVED);
    let faults = inside.runtime.block_on(faults);
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
