//! Requests that break each rule, to every operation of a description: a check for the tests of
//! every API.

#![allow(clippy::expect_used, reason = "only tests use it")]

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt as _;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;

use super::CONDITIONS;
use crate::http::description::testing::describes;

/// A query parameter that no operation has.
const UNKNOWN: &str = "no-such-parameter";
/// Content types of a browser's form, and others.
const TYPES: [&str; 5] = [
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/json-patch+json",
];

/// One broken rule.
struct Breach {
    query: Option<String>,
    header: Option<(String, String)>,
    body: &'static str,
    /// The status and the code of the refusal.
    refusal: (u16, &'static str),
}

fn breaches(operation: &Value) -> Vec<Breach> {
    let header = |name: &str, value: &str, body, refusal| Breach {
        query: None,
        header: (!value.is_empty()).then(|| (name.to_owned(), value.to_owned())),
        body,
        refusal,
    };
    let mut all = vec![
        Breach {
            query: Some(format!("?{UNKNOWN}=1")),
            header: None,
            body: "",
            refusal: (400, "unknown_parameter"),
        },
        header(
            "origin",
            "https://example.org",
            "",
            (403, "browser_refused"),
        ),
    ];
    for kind in TYPES {
        let refusal = (415, "unsupported_content_type");
        all.push(header("content-type", kind, "{}", refusal));
    }
    for condition in CONDITIONS {
        if !names(operation, "header").any(|name| condition == name.to_ascii_lowercase().as_str()) {
            let refusal = (412, "unsupported_condition");
            all.push(header(condition.as_str(), "\"1\"", "", refusal));
        }
    }
    all
}

/// The requests that `router` does not refuse with the status and code of the rule, and refusals
/// that `description` lacks. The refusal of a parameter must name it and the known ones.
pub async fn unenforced(router: Router, description: &Value) -> Vec<String> {
    let service = TowerToHyperService::new(router);
    let mut faults = Vec::new();
    let paths = description["paths"].as_object().into_iter().flatten();
    for (path, item) in paths {
        for (method, operation) in item.as_object().into_iter().flatten() {
            let method = method.to_ascii_uppercase();
            for breach in breaches(operation) {
                let target = at(path) + breach.query.as_deref().unwrap_or_default();
                let (status, body) = ask(&service, &method, &target, &breach).await;
                let code = body["code"].as_str().unwrap_or_default();
                let message = body["message"].as_str().unwrap_or_default();
                let is_refused = (status, code) == breach.refusal;
                let is_clear = breach.query.is_none()
                    || (message.contains(UNKNOWN)
                        && names(operation, "query").all(|name| message.contains(name)));
                if !is_refused || !is_clear || !describes(description, &method, &target, status) {
                    let header = breach.header;
                    faults.push(format!("{method} {target} {header:?}: {status} {body}"));
                }
            }
        }
    }
    faults
}

/// The status and the body of an answer.
async fn ask(
    service: &TowerToHyperService<Router>,
    method: &str,
    target: &str,
    breach: &Breach,
) -> (u16, Value) {
    let mut request = Request::builder().method(method).uri(target);
    if let Some((name, value)) = &breach.header {
        request = request.header(name, value);
    }
    let request = request.body(Body::from(breach.body));
    let request = request.expect("a request of known parts");
    let answer = service.call(request).await.expect("a router answers");
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    (status, serde_json::from_slice(&body).unwrap_or_default())
}

/// The path with a word for each parameter.
fn at(template: &str) -> String {
    let segments = template.split('/');
    let segments = segments.map(|segment| {
        if segment.starts_with('{') {
            "x"
        } else {
            segment
        }
    });
    segments.collect::<Vec<_>>().join("/")
}

/// The names of an operation's parameters in this part of a request.
fn names<'a>(operation: &'a Value, part: &'a str) -> impl Iterator<Item = &'a str> {
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let there = parameters.filter(move |one| one["in"] == part);
    there.filter_map(|one| one["name"].as_str())
}
