//! Invariants of each OpenAPI description and of the answers of its API: checks for the tests of
//! every API.

use std::collections::HashSet;
use std::path::Path;
use std::{fs, io};

use bellhop_api::{ErrorCode, PROBLEM_JSON};
use serde_json::Value;

/// The operation of a request: `path` may have a query.
#[must_use]
pub fn operation<'a>(description: &'a Value, method: &str, path: &str) -> Option<&'a Value> {
    let path = path.split('?').next().unwrap_or_default();
    let (_, item) = description["paths"]
        .as_object()?
        .iter()
        .find(|(template, _)| matches(template, path))?;
    // Methods are case-sensitive (RFC 9110, 9.1), and the description has them in lower case.
    let known = !method.contains(|letter: char| letter.is_ascii_lowercase());
    item.get(method.to_ascii_lowercase()).filter(|_| known)
}

fn matches(template: &str, path: &str) -> bool {
    let (mut wanted, mut given) = (template.split('/'), path.split('/'));
    loop {
        match (wanted.next(), given.next()) {
            (None, None) => return true,
            (Some(wanted), Some(given)) if wanted == given => {}
            (Some(wanted), Some(given)) if wanted.starts_with('{') && !given.is_empty() => {}
            _ => return false,
        }
    }
}

/// Whether an answer's status is described. Returns true for a request without an operation,
/// because the server gives a general answer to it.
#[must_use]
pub fn describes(description: &Value, method: &str, path: &str, status: u16) -> bool {
    operation(description, method, path)
        .is_none_or(|operation| operation["responses"].get(status.to_string()).is_some())
}

/// The faults of a description. It must not have
///
/// * references without a target, schemas that allow any value, words of an enum without a meaning,
///   and integers without limits;
/// * operations without a summary, a description and a declared tag;
/// * errors without the problem `ErrorBody`, successes with it, and responses without
///   `x-request-id`.
#[must_use]
pub fn faults(description: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    schema_faults(description, description, "", &mut faults);
    let tags = description["tags"].as_array();
    let tags: Vec<_> = tags.into_iter().flatten().map(|tag| &tag["name"]).collect();
    for (path, item) in description["paths"].as_object().into_iter().flatten() {
        for (method, operation) in item.as_object().into_iter().flatten() {
            let mut fault = |what: &str| faults.push(format!("{method} {path}: {what}"));
            for text in ["summary", "description"] {
                if operation[text].as_str().unwrap_or_default().is_empty() {
                    fault(&format!("no {text}"));
                }
            }
            if !tags.contains(&&operation["tags"][0]) {
                fault("no declared tag");
            }
            let responses = operation["responses"].as_object().into_iter().flatten();
            for (status, response) in responses {
                let error = status.starts_with(['4', '5']);
                let problem = &response["content"][PROBLEM_JSON];
                if error != problem.to_string().contains("ErrorBody") {
                    fault(&format!("{status}: ErrorBody"));
                }
                if response["headers"]["x-request-id"].is_null() {
                    fault(&format!("{status}: no x-request-id"));
                }
            }
        }
    }
    faults
}

/// The faults of a part of a description and of the parts below it; `place` is its JSON pointer.
fn schema_faults(whole: &Value, part: &Value, place: &str, faults: &mut Vec<String>) {
    if part.as_object().is_some_and(serde_json::Map::is_empty) && !place.contains("/security/") {
        faults.push(format!("{place}: anything is allowed"));
    }
    if let Some(reference) = part["$ref"].as_str() {
        let target = reference.strip_prefix('#');
        if target.and_then(|target| whole.pointer(target)).is_none() {
            faults.push(format!("{reference}: nothing is there"));
        }
    }
    let text = part["description"].as_str().unwrap_or_default();
    for word in part["enum"].as_array().into_iter().flatten() {
        if let Some(word) = word.as_str()
            && !text.contains(&format!("`{word}`"))
        {
            faults.push(format!("{place}: no meaning of {word:?}"));
        }
    }
    if is_integer(&part["type"]) && !is_limited(part) {
        faults.push(format!("{place}: no limits"));
    }
    match part {
        Value::Object(fields) => {
            for (name, field) in fields {
                let name = name.replace('~', "~0").replace('/', "~1");
                schema_faults(whole, field, &format!("{place}/{name}"), faults);
            }
        }
        Value::Array(parts) => {
            for (index, part) in parts.iter().enumerate() {
                schema_faults(whole, part, &format!("{place}/{index}"), faults);
            }
        }
        _ => {}
    }
}

fn is_integer(kind: &Value) -> bool {
    let kinds = kind.as_array().into_iter().flatten();
    kinds.chain([kind]).any(|kind| kind == "integer")
}

/// Whether a schema of integers has both limits. A format of 64 bits implies the upper one.
fn is_limited(schema: &Value) -> bool {
    let is_large = matches!(schema["format"].as_str(), Some("int64" | "uint64"));
    schema["minimum"].is_number() && (is_large || schema["maximum"].is_number())
}

/// Codes in the sources below a directory that [`ErrorCode`] lacks.
///
/// # Errors
/// A source cannot be read.
pub fn unknown_codes(sources: &Path) -> io::Result<Vec<String>> {
    let mut unknown = Vec::new();
    for entry in fs::read_dir(sources)? {
        let path = entry?.path();
        if path.is_dir() {
            unknown.extend(unknown_codes(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path)?;
            let of_path = |code: &str| format!("{}: {code}", path.display());
            unknown.extend(codes(&source).filter(is_unknown).map(of_path));
        }
    }
    Ok(unknown)
}

/// The codes in a source: literals after these words, and after a status and a comma.
fn codes(source: &str) -> impl Iterator<Item = &str> {
    const BEFORE: [&str; 5] = [
        "conflict(",
        "precondition_failed(",
        "unavailable(",
        "unauthorized(",
        "UnclearThere(",
    ];
    let after = BEFORE
        .iter()
        .flat_map(|before| source.split(before).skip(1));
    let statuses = source.split("StatusCode::").skip(1);
    let after_status = statuses.filter_map(|rest| {
        rest.trim_start_matches(|letter: char| letter.is_ascii_uppercase() || letter == '_')
            .strip_prefix(',')
    });
    after.chain(after_status).filter_map(|rest| {
        let (code, _) = rest.trim_start().strip_prefix('"')?.split_once('"')?;
        let is_word = code.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        is_word.then_some(code)
    })
}

fn is_unknown(code: &&str) -> bool {
    ErrorCode::of(code) == ErrorCode::Unknown
}

/// The first word of an operation's id, by method; the words after it name the object.
const VERBS: [(&str, &[&str]); 5] = [
    ("get", &["get", "list", "watch"]),
    ("put", &["put", "restore"]),
    ("patch", &["patch", "resolve"]),
    ("delete", &["delete", "cancel"]),
    (
        "post",
        &[
            "announce", "create", "press", "reset", "send", "start", "upgrade",
        ],
    ),
];

/// Operation ids that a generated client cannot use: every id is unique and reads
/// `verb_object` in snake case, with a verb that fits the method.
#[must_use]
pub fn operation_id_faults(description: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    let mut seen = HashSet::new();
    let paths = description["paths"].as_object().into_iter().flatten();
    for (path, item) in paths {
        for (method, operation) in item.as_object().into_iter().flatten() {
            let id = operation["operationId"].as_str().unwrap_or_default();
            if !is_operation_id(method, id) {
                faults.push(format!("{method} {path}: {id:?} is not verb_object"));
            }
            if !seen.insert(id) {
                faults.push(format!("{method} {path}: {id:?} is not unique"));
            }
        }
    }
    faults
}

fn is_operation_id(method: &str, id: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase());
    let Some((verb, object)) = id.split_once('_') else {
        return false;
    };
    let verbs = VERBS.iter().find(|(of, _)| *of == method);
    verbs.is_some_and(|(_, verbs)| verbs.contains(&verb)) && object.split('_').all(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The faults of two operations with these ids.
    fn id_faults(get: &Value, put: &Value) -> usize {
        let description = json!({"paths": {
            "/v1/vm": {"get": {"operationId": get}, "put": {"operationId": put}},
        }});
        operation_id_faults(&description).len()
    }

    /// A description without faults.
    fn good() -> Value {
        json!({
            "tags": [{"name": "vm"}],
            "paths": {"/v1/vm": {"get": {
                "summary": "s", "description": "d", "tags": ["vm"], "security": [{}],
                "responses": {
                    "200": {"headers": {"x-request-id": {"$ref": "#/components/headers/Id"}}},
                    "404": {
                        "headers": {"x-request-id": {"$ref": "#/components/headers/Id"}},
                        "content": {PROBLEM_JSON: {"schema": {"title": "ErrorBody"}}},
                    },
                },
            }}},
            "components": {
                "headers": {"Id": {"description": "d"}},
                "schemas": {
                    "Word": {"description": "* `a`: A", "enum": ["a", null]},
                    "Number": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
                    "Large": {"type": "integer", "minimum": 0, "format": "uint64"},
                },
            },
        })
    }

    #[test]
    fn each_fault_is_found() {
        assert_eq!(faults(&good()), Vec::<String>::new());
        let operation = "/paths/~1v1~1vm/get";
        for (place, bad, fault) in [
            (format!("{operation}/summary"), json!(""), "no summary"),
            (
                format!("{operation}/description"),
                json!(null),
                "no description",
            ),
            (
                format!("{operation}/tags/0"),
                json!("vms"),
                "no declared tag",
            ),
            (
                format!("{operation}/responses/404/content"),
                json!(null),
                "404: ErrorBody",
            ),
            (
                format!("{operation}/responses/200/headers"),
                json!(null),
                "200: no x-request-id",
            ),
            (
                "/components/headers/Id".to_owned(),
                json!({}),
                "anything is allowed",
            ),
            (
                "/components/headers".to_owned(),
                json!(null),
                "nothing is there",
            ),
            (
                "/components/schemas/Word/enum/1".to_owned(),
                json!("b"),
                "no meaning of \"b\"",
            ),
            (
                "/components/schemas/Number/maximum".to_owned(),
                json!(null),
                "no limits",
            ),
            (
                "/components/schemas/Large/minimum".to_owned(),
                json!(null),
                "no limits",
            ),
        ] {
            let mut description = good();
            *description.pointer_mut(&place).unwrap() = bad;
            let found = faults(&description);
            assert!(
                found.iter().any(|found| found.contains(fault)),
                "{place}: {found:?}"
            );
        }
    }

    #[test]
    fn codes_are_found_in_sources() {
        // With `~`, so that this source has none of them.
        let source = r#"(Status~Code::NOT_FOUND, "busy") con~flict(
            "a_new_one") Status~Code::OK, code, "other" answered(Status~Code::GONE, "gone", "m")"#;
        let source = source.replace('~', "");
        let found: Vec<_> = codes(&source).collect();
        assert_eq!(found, ["a_new_one", "busy", "gone"]);
        let unknown: Vec<_> = codes(&source).filter(is_unknown).collect();
        assert_eq!(unknown, ["a_new_one", "gone"]);
    }

    #[test]
    fn good_operation_ids_have_no_faults() {
        assert_eq!(id_faults(&json!("get_vm"), &json!("put_vm_nic")), 0);
    }

    #[test]
    fn bad_operation_ids_are_faults() {
        for bad in [
            "", "show", "get", "get_", "get_Vm", "getVm", "get__vm", "put_it",
        ] {
            assert_eq!(id_faults(&json!(bad), &json!("put_vm")), 1, "{bad:?}");
        }
        assert_eq!(id_faults(&Value::Null, &json!("put_vm")), 1, "no id");
    }

    #[test]
    fn an_operation_id_that_occurs_twice_is_a_fault() {
        let description = json!({"paths": {
            "/v1/a": {"get": {"operationId": "get_vm"}},
            "/v1/b": {"get": {"operationId": "get_vm"}},
        }});
        assert_eq!(
            operation_id_faults(&description),
            [r#"get /v1/b: "get_vm" is not unique"#]
        );
    }
}
