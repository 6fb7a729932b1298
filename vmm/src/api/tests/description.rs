//! The description against the code: the copy in the repository, and every answer of the tests.

use serde_json::Value;

use crate::api::endpoints;
use crate::http::description::testing as description;
use crate::http::request_rules::testing::unenforced;

/// The copy in the repository.
const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");

fn served() -> Value {
    serde_json::from_str(endpoints::document()).unwrap()
}

/// Every status that a described request is answered with is described.
#[track_caller]
pub(super) fn is_described(method: &str, path: &str, status: u16) {
    assert!(
        description::describes(&served(), method, path, status),
        "{method} {path} is answered with {status}, which is not described"
    );
}

#[test]
fn the_copy_in_the_repository_is_what_is_served() {
    let served = endpoints::document();
    if std::env::var_os("BELLHOP_WRITE_OPENAPI").is_some() {
        std::fs::write(COPY, served).unwrap();
    }
    let copy = std::fs::read_to_string(COPY).unwrap();
    assert!(
        copy == served,
        "vmm/openapi.json is not what is served: BELLHOP_WRITE_OPENAPI=1 cargo test -p vmm writes it"
    );
}

#[test]
fn everything_described_is_complete() {
    let served = served();
    assert!(served["paths"]["/v1/vm"]["patch"].is_object());
    assert_eq!(description::faults(&served), Vec::<String>::new());
}

#[test]
fn every_operation_refuses_what_it_would_ignore() {
    let inside = super::Inside::new(None);
    let served = served();
    let faults = unenforced(inside.router.clone(), &served, &[]);
    let faults = inside.runtime.block_on(faults);
    assert_eq!(faults, Vec::<String>::new());
}

#[test]
fn operation_ids_are_unique_and_name_verb_and_object() {
    let faults = description::operation_id_faults(&served());
    assert_eq!(faults, Vec::<String>::new());
}
