//! What must be true of each OpenAPI description, and of the answers of what it describes: the checks
//! that tests of every API make.

use std::collections::HashSet;

use serde_json::Value;

/// The operation that a request means: `path` may have a query.
#[must_use]
pub fn operation<'a>(description: &'a Value, method: &str, path: &str) -> Option<&'a Value> {
    let path = path.split('?').next().unwrap_or_default();
    let (_, item) = description["paths"]
        .as_object()?
        .iter()
        .find(|(template, _)| matches(template, path))?;
    item.get(method.to_ascii_lowercase())
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

/// Whether an answer's status is described. A request that no operation is described for is
/// answered with what the server says of all such: true.
#[must_use]
pub fn describes(description: &Value, method: &str, path: &str, status: u16) -> bool {
    operation(description, method, path)
        .is_none_or(|operation| operation["responses"].get(status.to_string()).is_some())
}

/// What is wrong with a description: references to nothing, errors without the body
/// `ErrorBody`, successes with it.
#[must_use]
pub fn faults(description: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    dangling(description, description, &mut faults);
    let paths = description["paths"].as_object().into_iter().flatten();
    for (path, item) in paths {
        for (method, operation) in item.as_object().into_iter().flatten() {
            let responses = operation["responses"].as_object().into_iter().flatten();
            for (status, response) in responses {
                let error = status.starts_with('4') || status.starts_with('5');
                if error != response["content"].to_string().contains("ErrorBody") {
                    faults.push(format!("{method} {path} {status}: ErrorBody"));
                }
            }
        }
    }
    faults
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

fn dangling(whole: &Value, part: &Value, faults: &mut Vec<String>) {
    match part {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                let target = reference.strip_prefix('#');
                if target.and_then(|target| whole.pointer(target)).is_none() {
                    faults.push(format!("{reference}: nothing is there"));
                }
            }
            for part in fields.values() {
                dangling(whole, part, faults);
            }
        }
        Value::Array(parts) => {
            for part in parts {
                dangling(whole, part, faults);
            }
        }
        _ => {}
    }
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
