//! Checks what must be true of every answer:
//!
//! * Any answer must exist, must have a name (`x-request-id`, the client's if it sent one), and
//!   must not blame the server. A request that names [`NO_NODE`] may blame that node.
//! * An answer to a described request must have a described status, with the body that is described
//!   for it.
//! * An answer to any other request must be 4xx.
//! * A rejection must have the body `ErrorBody`, which contains the name.

use super::Description;
use super::cases::{Case, Expect};
use super::exchange::{Answer, Request};
use super::schema::{conforms, resolve};
use serde_json::{Value, json};

/// The address of a node that does not exist.
pub const NO_NODE: &str = "node:/nonexistent/node.socket";

/// The error codes of bodies that the server did not understand.
const FORM: [&str; 9] = [
    "malformed_body",
    "invalid_body",
    "bad_parameter",
    "incomplete_body",
    "body_too_large",
    "unknown_parameter",
    "unsupported_content_type",
    "unsupported_condition",
    "browser_refused",
];

/// The faults of an answer, if any.
#[must_use]
pub fn wrong(description: &Description, case: &Case, answer: Option<&Answer>) -> Vec<String> {
    let Some(answer) = answer else {
        return match case.expect {
            Expect::NoHttp => Vec::new(),
            _ => vec!["there is no answer".to_owned()],
        };
    };
    // The server's lowest layer itself answers to malformed HTTP.
    if case.expect == Expect::NoHttp && answer.body.is_empty() && refuses(answer.status) {
        return Vec::new();
    }
    let mut wrong = Vec::new();
    if answer.status >= 500 && !(answer.status == 502 && names_no_node(&case.request)) {
        wrong.push("the server is to blame".to_owned());
    }
    if case.expect == Expect::Refused && !refuses(answer.status) {
        wrong.push("it is not refused".to_owned());
    }
    let code = answer.json()["code"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if case.expect == Expect::Understood && FORM.contains(&code.as_str()) {
        wrong.push(format!("it is right and not understood ({code})"));
    }
    wrong.extend(wrong_name(&case.request, answer));
    let path = case.request.path();
    match description.operation(&case.request.method, &path) {
        Some(operation) => {
            let response = &operation.responses[answer.status.to_string()];
            if response.is_null() {
                wrong.push("its status is not described".to_owned());
            } else {
                wrong.extend(wrong_body(description, response, answer));
            }
        }
        // A client that may GET may also HEAD. A path with odd letters may mean another path.
        None if case.request.method == "HEAD" || answer.status == 200 => {}
        None if !refuses(answer.status) => wrong.push("it is not described".to_owned()),
        None => {}
    }
    if answer.status >= 400 && case.request.method != "HEAD" {
        wrong.extend(wrong_error(description, answer));
    }
    wrong
}

fn names_no_node(request: &Request) -> bool {
    let body = request.body.as_deref().unwrap_or_default();
    body.windows(NO_NODE.len())
        .any(|part| part == NO_NODE.as_bytes())
}

fn refuses(status: u16) -> bool {
    (400..500).contains(&status)
}

fn wrong_name(request: &Request, answer: &Answer) -> Option<String> {
    let Some(name) = answer.header("x-request-id") else {
        return Some("it has no name".to_owned());
    };
    let given = request
        .headers
        .iter()
        .find(|(one, _)| one == "x-request-id");
    let given = given.and_then(|(_, value)| std::str::from_utf8(value).ok());
    let usable = given.filter(|name| {
        (1..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
    });
    match usable {
        Some(given) if given != name => Some(format!("its name is {name:?}")),
        _ => None,
    }
}

fn wrong_body(description: &Description, response: &Value, answer: &Answer) -> Option<String> {
    let response = resolve(description.whole(), response);
    let Some(schema) = response["content"]["application/json"].get("schema") else {
        let described = response["content"].is_object();
        return (!described && !answer.body.is_empty())
            .then(|| "its body is not described".to_owned());
    };
    match serde_json::from_slice(&answer.body) {
        Err(error) => Some(format!("its body is no JSON: {error}")),
        Ok(body) => conforms(description.whole(), schema, &body).err(),
    }
}

fn wrong_error(description: &Description, answer: &Answer) -> Option<String> {
    let body = answer.json();
    let schema = json!({ "$ref": "#/components/schemas/ErrorBody" });
    if let Err(why) = conforms(description.whole(), &schema, &body) {
        return Some(format!("its body is no ErrorBody: {why}"));
    }
    if answer.header("content-type") != Some("application/problem+json") {
        return Some("its body is no problem".to_owned());
    }
    if body["request_id"].as_str() != answer.header("x-request-id") {
        return Some("its body has another name".to_owned());
    }
    let empty = ["code", "message"].iter().any(|field| body[field] == "");
    empty.then(|| "it says nothing".to_owned())
}
