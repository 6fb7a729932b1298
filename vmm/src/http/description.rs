//! OpenAPI descriptions: how they are written, and what must be true of each.
//!
//! Owns the text's form, and the checks that tests of every API make of its own description
//! and answers. It must not know what is described.

use axum::Router;
use serde_json::Value;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;

/// The text that is served, and is in the repository: pretty-printed JSON with a line's end.
#[must_use]
pub fn text(description: &OpenApi) -> String {
    // Maps with keys of text can always be written.
    let mut text = serde_json::to_string_pretty(description).unwrap_or_default();
    text.push('\n');
    text
}

/// The endpoints alone. Their description has been made with them, in many small
/// pieces of memory, and is seldom asked for: it is dropped, and its pages (a megabyte) are given
/// back to the kernel.
pub fn endpoints_alone<S: Clone + Send + Sync + 'static>(
    registered: OpenApiRouter<S>,
) -> Router<S> {
    let (router, description) = registered.split_for_parts();
    drop(description);
    // SAFETY: needed because the standard library has no way to say so: glibc keeps what a thread
    // other than the main one has freed. The call takes the allocator's own locks, moves nothing
    // that is in use, and its argument is the number of bytes to keep at the end of the heap.
    unsafe { libc::malloc_trim(0) };
    router
}

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
