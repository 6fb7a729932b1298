//! Everything beneath `/v1/vms/{name}/` that is not the daemon's: passed on to the machine's own API.
//!
//! `/v1/vms/x/power-button` is the machine's `/v1/vm/power-button`; what it has beside `/v1/vm` keeps its
//! name: `/v1/vms/x/metrics`, `/v1/vms/x/openapi.json`. The machine itself (`/v1/vm`) is not reached so: its
//! life is the daemon's. Bodies pass piece by piece, whatever their size: the machine limits them.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{ACCEPT, ALLOW, CONNECTION, CONTENT_TYPE, HOST};
use axum::http::{HeaderName, HeaderValue, Uri};
use axum::response::Response;
use vmm::http::request_id::{REQUEST_ID, RequestId};

use super::state::Api;
use super::vm_path::VmPath;
use crate::error::Error;
use crate::machines::error::no_vm;
use crate::machines::vmm::{not_in_time, unformed};

/// How long a machine may take to begin its answer: longer than any watch of its.
const ANSWER_TIME: Duration = Duration::from_secs(90);
/// What the machine has beside `/v1/vm`.
const BESIDE: [&str; 2] = ["metrics", "openapi.json"];
/// What of a request's head the machine gets to know.
const REQUEST_HEADERS: [HeaderName; 2] = [CONTENT_TYPE, ACCEPT];
/// What of an answer's head the client gets to know. Its request's name is given by whoever serves.
const ANSWER_HEADERS: [HeaderName; 2] = [CONTENT_TYPE, ALLOW];

/// Passes a request on.
pub(super) async fn forward(
    State(node): Api,
    VmPath { name }: VmPath,
    request: Request,
) -> Result<Response, Error> {
    let vmm = node.machines.vmm(&name)?;
    let (head, body) = request.into_parts();
    let target = target(&head.uri).ok_or_else(|| no_vm(&name))?;
    let mut builder = Request::builder()
        .method(head.method)
        .uri(target)
        .header(HOST, HeaderValue::from_static("vm"))
        .header(CONNECTION, HeaderValue::from_static("close"));
    if let Some(RequestId(id)) = head.extensions.get() {
        builder = builder.header(REQUEST_ID, id);
    }
    for header in REQUEST_HEADERS {
        if let Some(value) = head.headers.get(&header) {
            builder = builder.header(header, value);
        }
    }
    let passed = builder.body(body).map_err(unformed)?;
    let answer = tokio::time::timeout(ANSWER_TIME, vmm.send(passed)).await;
    let answer = answer.map_err(|_| not_in_time(ANSWER_TIME))??;
    let (head, body) = answer.into_parts();
    let mut response = Response::new(Body::new(body));
    *response.status_mut() = head.status;
    for header in ANSWER_HEADERS {
        if let Some(value) = head.headers.get(&header) {
            response.headers_mut().insert(header, value.clone());
        }
    }
    Ok(response)
}

/// The path in the machine's API, with what follows it. Nothing is decoded, so nothing can become
/// another path.
pub(super) fn target(uri: &Uri) -> Option<String> {
    let (_, rest) = uri.path().strip_prefix("/v1/vms/")?.split_once('/')?;
    let mut target = if BESIDE.contains(&rest) {
        format!("/v1/{rest}")
    } else {
        format!("/v1/vm/{rest}")
    };
    if let Some(query) = uri.query() {
        target.push('?');
        target.push_str(query);
    }
    Some(target)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn paths_are_the_machines_own() {
        let of = |path: &'static str| target(&Uri::from_static(path));
        for (asked, passed) in [
            ("/v1/vms/x/power-button", "/v1/vm/power-button"),
            ("/v1/vms/x/nics/a", "/v1/vm/nics/a"),
            ("/v1/vms/x/metrics", "/v1/metrics"),
            ("/v1/vms/x/openapi.json", "/v1/openapi.json"),
            (
                "/v1/vms/x/watch?since=1&timeout_s=2",
                "/v1/vm/watch?since=1&timeout_s=2",
            ),
            ("/v1/vms/x/a%2f..%2fb", "/v1/vm/a%2f..%2fb"),
            ("/v1/vms/x/../../metrics", "/v1/vm/../../metrics"),
        ] {
            assert_eq!(of(asked).unwrap(), passed);
        }
        assert_eq!(of("/v1/vms/x"), None);
    }
}
