//! The permitted parts of a request besides its path, checked before its endpoint runs.
//!
//! A server that ignores a part of a request does not do what the client requested. A misspelled
//! filter lists everything, and an ignored condition overwrites another client's change.
//!
//! | part | rejected | status |
//! |---|---|---|
//! | query parameter | every one that the operation's description does not list | 400 |
//! | body | every content type but JSON; PATCH takes a merge patch, too | 415 |
//! | conditional header (RFC 9110, 13.1) | every one that the operation does not describe | 412 |
//! | `Origin` | always: browsers send it, and no client runs in one | 403 |
//!
//! A date condition is rejected, too, although RFC 9110 lets a server without dates ignore it: a
//! client that sends one relies on the protection. `Host` is not checked. A web page that rebinds
//! its name to this host has neither a client certificate nor a token.
//!
//! Owns these rules; the parameters come from the API's description. It must not know the content
//! of requests. An operation without a description (the node's proxy) keeps its query parameters:
//! the server that answers it checks them.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::HttpBody as _;
use axum::extract::{MatchedPath, Query, Request, State};
use axum::http::header::{
    CONTENT_TYPE, HeaderMap, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE,
    IF_UNMODIFIED_SINCE, ORIGIN,
};
use axum::http::{HeaderName, HeaderValue, Method};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::{Router, http};
use bellhop_api::responses::error;
use serde::Deserialize;
use utoipa::openapi::path;
use utoipa::openapi::{OpenApi, RefOr};

use super::problem::HttpError;

/// The headers that make a request conditional.
const CONDITIONS: [HeaderName; 5] = [
    IF_MATCH,
    IF_NONE_MATCH,
    IF_MODIFIED_SINCE,
    IF_UNMODIFIED_SINCE,
    IF_RANGE,
];
/// How many characters of a client's word an error shows.
const SHOWN: usize = 64;

/// The rules of one API.
#[derive(Debug)]
pub struct RequestRules {
    operations: Vec<Operation>,
}

/// The part of a description that has rules: operations by path and method.
#[derive(Debug, Default, Deserialize)]
struct Described {
    paths: BTreeMap<String, BTreeMap<String, DescribedOperation>>,
}

#[derive(Debug, Deserialize)]
struct DescribedOperation {
    #[serde(default)]
    parameters: Vec<DescribedParameter>,
}

#[derive(Debug, Deserialize)]
struct DescribedParameter {
    name: String,
    #[serde(rename = "in")]
    part: String,
}

/// A described operation.
#[derive(Debug)]
struct Operation {
    method: Method,
    path: String,
    /// The names of its query parameters.
    parameters: Vec<String>,
    /// The names of its header parameters, in lower case.
    headers: Vec<String>,
}

impl RequestRules {
    /// The rules for the operations in `document`, a description in JSON that is part of the
    /// program. A test fails if it cannot be read.
    #[must_use]
    pub fn of(document: &str) -> Self {
        let described: Described = serde_json::from_str(document).unwrap_or_default();
        let mut rules = Vec::new();
        for (path, item) in described.paths {
            for (method, operation) in item {
                let Ok(method) = Method::from_bytes(method.to_ascii_uppercase().as_bytes()) else {
                    continue;
                };
                let named = |part: &str| {
                    let parameters = operation.parameters.iter();
                    let parameters = parameters.filter(|parameter| parameter.part == part);
                    parameters
                        .map(|parameter| parameter.name.clone())
                        .collect::<Vec<_>>()
                };
                let mut headers = named("header");
                headers
                    .iter_mut()
                    .for_each(|name| name.make_ascii_lowercase());
                rules.push(Operation {
                    method,
                    path: path.clone(),
                    parameters: named("query"),
                    headers,
                });
            }
        }
        Self { operations: rules }
    }

    /// Adds these rules to each endpoint of `router`.
    pub fn around<S: Clone + Send + Sync + 'static>(self, router: Router<S>) -> Router<S> {
        router.layer(middleware::from_fn_with_state(Arc::new(self), enforce))
    }

    fn check(&self, request: &Request) -> Result<(), HttpError> {
        let path = request.extensions().get::<MatchedPath>();
        let path = path.map_or("", MatchedPath::as_str);
        let operation = self.operation(request.method(), path);
        check_origin(request.headers())?;
        check_conditions(operation, request.headers())?;
        check_content_type(request)?;
        operation.map_or(Ok(()), |one| check_parameters(one, request.uri()))
    }

    /// The described operation; none if another server checks the request.
    fn operation(&self, method: &Method, path: &str) -> Option<&Operation> {
        let method = match *method {
            Method::HEAD => &Method::GET,
            _ => method,
        };
        let mut described = self.operations.iter();
        described.find(|one| one.path == path && one.method == *method)
    }
}

/// The operations of one path.
pub fn operations(
    item: &mut path::PathItem,
) -> impl Iterator<Item = (Method, &mut path::Operation)> {
    [
        (Method::GET, &mut item.get),
        (Method::PUT, &mut item.put),
        (Method::POST, &mut item.post),
        (Method::DELETE, &mut item.delete),
        (Method::OPTIONS, &mut item.options),
        (Method::HEAD, &mut item.head),
        (Method::PATCH, &mut item.patch),
        (Method::TRACE, &mut item.trace),
    ]
    .into_iter()
    .filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

fn check_conditions(operation: Option<&Operation>, headers: &HeaderMap) -> Result<(), HttpError> {
    let evaluated = operation.map_or(&[][..], |operation| operation.headers.as_slice());
    for condition in CONDITIONS {
        let is_evaluated = evaluated.iter().any(|name| condition == name.as_str());
        if !is_evaluated && headers.contains_key(&condition) {
            return Err(HttpError::Condition(condition));
        }
    }
    Ok(())
}

fn check_parameters(operation: &Operation, uri: &http::Uri) -> Result<(), HttpError> {
    let given = Query::<Vec<(String, String)>>::try_from_uri(uri)
        .map_err(|error| HttpError::Parameter(error.body_text()))?;
    for (name, _) in &given.0 {
        if !operation.parameters.contains(name) {
            return Err(HttpError::UnknownParameter {
                name: name.chars().take(SHOWN).collect(),
                known: operation.parameters.join(", "),
            });
        }
    }
    Ok(())
}

fn check_origin(headers: &HeaderMap) -> Result<(), HttpError> {
    if headers.contains_key(ORIGIN) {
        return Err(HttpError::Browser);
    }
    Ok(())
}

fn check_content_type(request: &Request) -> Result<(), HttpError> {
    if request.body().is_end_stream() {
        return Ok(());
    }
    let mut types = request.headers().get_all(CONTENT_TYPE).iter();
    match (types.next(), types.next()) {
        (Some(one), None) if is_json(request.method(), one) => Ok(()),
        _ => Err(HttpError::ContentType),
    }
}

/// Parameters such as `charset` have no meaning for JSON, which is always UTF-8.
fn is_json(method: &Method, content_type: &HeaderValue) -> bool {
    let text = content_type.to_str().unwrap_or_default();
    let essence = text.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
        || (*method == Method::PATCH
            && essence.eq_ignore_ascii_case("application/merge-patch+json"))
}

async fn enforce(State(rules): State<Arc<RequestRules>>, request: Request, next: Next) -> Response {
    match rules.check(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Adds the answers of these rules to each operation of a description.
pub fn describe(description: &mut OpenApi) {
    for item in description.paths.paths.values_mut() {
        for (_, operation) in operations(item) {
            for (status, meaning) in [
                ("400", "A query parameter is unknown"),
                (
                    "403",
                    "A browser sent the request: it has the header `Origin`",
                ),
                (
                    "412",
                    "The request has a conditional header that this operation does not support",
                ),
                ("415", "The body's content type is not JSON"),
            ] {
                let answers = &mut operation.responses.responses;
                match answers.get_mut(status) {
                    Some(RefOr::T(answer)) => {
                        answer.description.push_str(". ");
                        answer.description.push_str(meaning);
                    }
                    Some(RefOr::Ref(_)) => {}
                    None => {
                        answers.insert(status.to_owned(), error(meaning));
                    }
                }
            }
        }
    }
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
