//! The description against the code: the copy in the repository, and every answer of the tests.

use serde_json::Value;

use crate::api::endpoints;

/// The copy in the repository.
const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");

pub(super) fn description() -> Value {
    serde_json::from_str(endpoints::document()).unwrap()
}

/// The operation that a request means, and its path in the description.
pub(super) fn operation<'a>(description: &'a Value, method: &str, path: &str) -> Option<&'a Value> {
    let path = path.split('?').next().unwrap();
    let paths = description["paths"].as_object().unwrap();
    let (_, item) = paths.iter().find(|(template, _)| {
        let (mut wanted, mut given) = (template.split('/'), path.split('/'));
        loop {
            match (wanted.next(), given.next()) {
                (None, None) => return true,
                (Some(wanted), Some(given)) if wanted == given => {}
                (Some(wanted), Some(given)) if wanted.starts_with('{') && !given.is_empty() => {}
                _ => return false,
            }
        }
    })?;
    item.get(method.to_ascii_lowercase())
}

/// Every status that a described request is answered with is described.
#[track_caller]
pub(super) fn is_described(method: &str, path: &str, status: u16) {
    let description = description();
    if let Some(operation) = operation(&description, method, path) {
        let known = operation["responses"].get(status.to_string()).is_some();
        assert!(
            known,
            "{method} {path} is answered with {status}, which is not described"
        );
    }
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
    let description = description();
    let mut references = Vec::new();
    collect(&description, &mut references);
    assert!(!references.is_empty());
    for reference in references {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(description.pointer(pointer).is_some(), "{reference}");
    }
    for (path, item) in description["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            for (status, response) in operation["responses"].as_object().unwrap() {
                let error = status.starts_with('4') || status.starts_with('5');
                let body = response["content"].to_string();
                assert_eq!(
                    error,
                    body.contains("ErrorBody"),
                    "{method} {path} {status}"
                );
            }
        }
    }
}

fn collect(value: &Value, references: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                references.push(reference.clone());
            }
            fields.values().for_each(|value| collect(value, references));
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, references)),
        _ => {}
    }
}
