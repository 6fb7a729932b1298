//! Forwards all paths below `/v1/vms/{name}/` that the daemon does not serve to the VM's own API.
//!
//! `/v1/vms/x/power-button` is the VM's `/v1/vm/power-button`. Paths outside `/v1/vm` keep their
//! name: `/v1/vms/x/metrics`, `/v1/vms/x/openapi.json`. The VM itself (`/v1/vm`) is not reachable
//! this way, because the daemon controls its life. Bodies are streamed, whatever their size: the VM
//! limits them.
//!
//! Clients share the places of each VM by role, so that the VM has some left for its supervisor.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{ACCEPT, ALLOW, CONNECTION, CONTENT_TYPE, HOST};
use axum::http::{HeaderName, HeaderValue, Uri};
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use vmm::http::request_id::{REQUEST_ID, RequestId};

use super::state::{Api, SenderRole};
use super::vm_path::VmPath;
use crate::error::Error;
use crate::machines::error::no_vm;
use crate::machines::vmm::{Vmm, not_in_time, unformed};

/// The time limit for the begin of a VM's answer: longer than any of its watches.
const ANSWER_TIME: Duration = Duration::from_secs(90);
/// The VM's path on which a client waits.
const WATCH: &str = "/v1/vm/watch";
/// The VM's paths outside `/v1/vm`.
const BESIDE: [&str; 2] = ["metrics", "openapi.json"];
/// The request headers that are forwarded.
const REQUEST_HEADERS: [HeaderName; 2] = [CONTENT_TYPE, ACCEPT];
/// The answer headers that are forwarded. The server adds the request ID.
const ANSWER_HEADERS: [HeaderName; 2] = [CONTENT_TYPE, ALLOW];

/// Forwards a request.
pub(super) async fn forward(
    State(node): Api,
    SenderRole(role): SenderRole,
    VmPath { name }: VmPath,
    request: Request,
) -> Result<Response, Error> {
    let (head, body) = request.into_parts();
    let target = target(&head.uri).ok_or_else(|| no_vm(&name))?;
    let vmm = if target.split('?').next() == Some(WATCH) {
        node.machines.vmm_to_watch(&name, role)?
    } else {
        node.machines.vmm_for(&name, role)?
    };
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
    let mut response = Response::new(Body::new(Answer { body, _vmm: vmm }));
    *response.status_mut() = head.status;
    for header in ANSWER_HEADERS {
        if let Some(value) = head.headers.get(&header) {
            response.headers_mut().insert(header, value.clone());
        }
    }
    Ok(response)
}

/// The body of a VM's answer, which keeps the client's place until its end.
struct Answer {
    body: Incoming,
    _vmm: Vmm,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The path and query in the VM's API. Nothing is decoded, so a path cannot become another one.
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

    use bellhop_api::node::Role;
    use serde_json::json;

    use super::*;
    use crate::context::Node;
    use crate::machines::record::{Phase, Record, Step};
    use crate::paths::Paths;
    use crate::store::{Store, VMS};

    #[tokio::test]
    async fn a_process_that_may_not_listen_yet_is_not_asked() {
        let name = format!("node-starting-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let paths = Paths::new(&directory.join("state"), &directory.join("run"));
        paths.make().unwrap();
        let spec = serde_json::from_value(json!({ "kernel": "/nonexistent" })).unwrap();
        let mut record = Record::new(spec);
        record.phase = Phase::Present;
        record.steps_mut().push(Step::Process {
            identity: None,
            boot: "boot".to_owned(),
        });
        let store = Store::open(&paths.store()).unwrap();
        store.put(VMS, "web", &record).unwrap();
        drop(store);
        let node = Node::below(&directory);
        let name = "web".parse().unwrap();
        let request = Request::post("/v1/vms/web/power-button");
        let request = request.body(Body::empty()).unwrap();
        let role = SenderRole(Role::Admin);
        let refused = forward(State(node), role, VmPath { name }, request).await;
        let (status, code) = refused.unwrap_err().answer();
        assert_eq!((status.as_u16(), code), (409, "starting"));
        std::fs::remove_dir_all(&directory).unwrap();
    }

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
