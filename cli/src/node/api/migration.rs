//! `/v1/vms/{name}/migration`: the machine's own migration, and what the node has to know of it.
//!
//! Requests are passed on as all others are. A machine that is asked to leave is marked in its record before; what its
//! process answers to clients is heard, too; and when the process is gone, the node itself is told where the guest is.

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Extension, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;
use vmm::http::request_id::RequestId;

use super::Api;
use super::proxy;
use super::vm_error::{ApiError, VmPath};
use crate::node::machines::departure::{Account, MigrationView};
use crate::node::machines::error::VmError;
use crate::node::machines::steps::SendRequest;
use crate::node::machines::vmm::VmmError;

/// The longest account of a migration that is read, in bytes.
const ACCOUNT_MAX: usize = 1 << 20;

/// Where the guest of a migration that is not settled is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
pub(super) enum Whereabouts {
    /// At this node: it goes on, or may be started again.
    Here,
    /// Elsewhere: the machine here has ended, or ends.
    There,
}

/// What is to be settled.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct MigrationChange {
    /// Where the guest is.
    settle: Whereabouts,
}

/// Has the machine leave: `POST`, with the body that the machine's own API describes.
pub(super) async fn begin(
    State(node): Api,
    VmPath { name }: VmPath,
    id: Option<Extension<RequestId>>,
    JsonBody(wanted): JsonBody<Value>,
) -> Result<Response, ApiError> {
    let destination = wanted
        .pointer("/send/destination")
        .and_then(Value::as_str)
        .unwrap_or("another process");
    let request = SendRequest {
        destination: destination.to_owned(),
        body: Bytes::from(wanted.to_string()),
        request_id: id.map(|Extension(RequestId(id))| id),
    };
    let passed = node.machines.send(&name, request).await?;
    let mut response = Response::new(Body::from(passed.body));
    *response.status_mut() = passed.status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    Ok(response)
}

/// How the machine's migration goes, in its own words: `GET`.
pub(super) async fn show(api: Api, vm: VmPath, request: Request) -> Result<Response, ApiError> {
    let (machines, name) = (api.0.machines.clone(), vm.name.clone());
    let asked = machines.asks_migration(&name);
    let answer = proxy::forward(api, vm, request).await?;
    let (head, body) = answer.into_parts();
    let body = to_bytes(body, ACCOUNT_MAX).await;
    let body = body.map_err(|error| VmError::Vmm(VmmError::Cut(error)))?;
    if let Ok(view) = serde_json::from_slice::<MigrationView>(&body) {
        machines
            .hears_migration(&name, asked, Account::from(&view))
            .await;
    }
    Ok(Response::from_parts(head, Body::from(body)))
}

/// Say where the guest is of a machine that was sent elsewhere
///
/// When its migration is not settled: the connection broke while the guest was handed over, or the process here is gone and did
/// not say that the guest is here (`may_be_elsewhere`). Look at the destination first. Here lets the guest go on, or the machine be
/// started again, which is done at once if it is to run; There ends it. Who says Here on both sides has the guest twice. How to
/// send a machine, and how far that is (`POST`, `GET`, `DELETE`), the machine's own API describes.
#[utoipa::path(patch, path = "/v1/vms/{name}/migration", params(VmPath), request_body = MigrationChange, responses(
    (status = 204, description = "It is settled"),
    (status = 400, description = "Not a name, or the body is not JSON", body = ErrorBody),
    (status = 404, description = "There is no such virtual machine, or it has not been migrated", body = ErrorBody),
    (status = 408, description = "The body did not come in time", body = ErrorBody),
    (status = 409, description = "It is settled, or still under way; or the machine is being deleted, or cannot go on", body = ErrorBody),
    (status = 413, description = "The body is too large", body = ErrorBody),
    (status = 422, description = "An unknown field or a wrong value, named", body = ErrorBody),
    (status = 500, description = "The host failed at it", body = ErrorBody),
    (status = 502, description = "The machine's process does not answer", body = ErrorBody),
    (status = 503, description = "This daemon ends, or the machine's process does", body = ErrorBody),
    (status = 504, description = "The machine's process does not answer in time", body = ErrorBody),
))]
pub(super) async fn settle(
    State(node): Api,
    VmPath { name }: VmPath,
    JsonBody(change): JsonBody<MigrationChange>,
) -> Result<StatusCode, ApiError> {
    let here = change.settle == Whereabouts::Here;
    node.machines.say_where(&name, here).await?;
    Ok(StatusCode::NO_CONTENT)
}
