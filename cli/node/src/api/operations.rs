//! `/v1/operations`: long requests to the daemon, and the requests that only begin one.
//!
//! Owns the form of these requests and answers. [`crate::machines::operations`] owns the
//! operations.

use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::header::LOCATION;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use bellhop_api::Items;
use bellhop_api::machine::{SnapshotInfo, UpgradeRequest};
use bellhop_api::node::{
    OPERATION_WAIT_MAX_S, Operation, OperationKind, OperationPhase, OperationQuery, OperationWait,
    VmSnapshotRequest,
};
use bellhop_api::responses::{NamedChangeErrors, ProcessErrors, ProxyErrors, WatchErrors};
use serde::Deserialize;
use utoipa::IntoParams;
use vmm::http::body::JsonBody;
use vmm::http::parameters::{Parameters, PathParameters};
use vmm::http::request_id::RequestId;
use vmm::http::server::Closing;
use vmm::http::{ErrorBody, HttpError};

use super::state::{Api, SenderRole};
use super::vm_path::VmPath;
use crate::access::RequestedBy;
use crate::error::Error;
use crate::machines::operations::Requested;
use crate::machines::spec::VmName;

/// The ID of an operation in the path.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct OperationPath {
    /// The ID of the operation
    id: String,
}

impl<S: Send + Sync> FromRequestParts<S> for OperationPath {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let PathParameters(id) = PathParameters::from_request_parts(parts, state).await?;
        Ok(Self { id })
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Requested {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let by = parts.extensions.get::<RequestedBy>();
        let id = parts.extensions.get::<RequestId>();
        Ok(Self {
            by: by.map(|by| by.0.clone()).unwrap_or_default(),
            request_id: id.map(|id| id.0.clone()).unwrap_or_default(),
        })
    }
}

/// The time of an answer.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Waiting {
    /// Whether the answer waits for the result (default: `true`)
    pub(super) wait: Option<bool>,
}

/// The answer to a request that only begins an operation.
pub(super) fn accepted(operation: &Operation) -> Response {
    let location = [(LOCATION, format!("/v1/operations/{}", operation.id))];
    (StatusCode::ACCEPTED, location, Json(operation)).into_response()
}

/// List operations
///
/// Running ones, and the last 1000 that have ended, also before a restart of the daemon. The oldest
/// comes first.
#[utoipa::path(get, path = "/v1/operations", operation_id = "list_operations",
    params(OperationQuery), responses(
    (status = 200, description = "The operations", body = Items<Operation>),
    (status = 400, description = "Invalid or unknown parameter", body = ErrorBody),
))]
pub(super) async fn list(
    State(node): Api,
    Parameters(query): Parameters<OperationQuery>,
) -> Result<Json<Items<Operation>>, Error> {
    if let Some(target) = &query.target {
        target.parse::<VmName>()?;
    }
    // Words that match no operation are rejected.
    if query.kind == Some(OperationKind::Unknown) || query.phase == Some(OperationPhase::Unknown) {
        let message = "unknown `kind` or `phase`: see `OperationKind` and `OperationPhase` in \
            /v1/openapi.json";
        return Err(HttpError::Parameter(message.to_owned()).into());
    }
    let all = node.machines.operations.list(&query);
    Ok(Json(all.into_iter().collect()))
}

/// Read an operation
///
/// With `wait` the response comes when the operation has ended, or after that time.
#[utoipa::path(get, path = "/v1/operations/{id}", operation_id = "get_operation",
    params(OperationPath, OperationWait), responses(
    (status = 200, description = "The operation", body = Operation),
    WatchErrors,
    (status = 404, description = "Not found", body = ErrorBody),
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    OperationPath { id }: OperationPath,
    Parameters(query): Parameters<OperationWait>,
    closing: Option<Extension<Closing>>,
) -> Result<Json<Operation>, Error> {
    let operations = &node.machines.operations;
    let seconds = query.wait.unwrap_or_default();
    if seconds > OPERATION_WAIT_MAX_S {
        let message = format!("`wait` is {seconds}: at most {OPERATION_WAIT_MAX_S}");
        return Err(HttpError::Parameter(message).into());
    }
    if seconds == 0 {
        return operations.show(&id).map(Json);
    }
    let closing = async {
        match closing {
            Some(Extension(mut closing)) => closing.wait().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        ended = operations.wait(&id, role, Duration::from_secs(seconds)) => ended.map(Json),
        () = closing => operations.show(&id).map(Json),
    }
}

/// Cancel an operation
///
/// Only a migration can be cancelled, before the handover of the guest. It ends as `cancelled`,
/// unless the guest has already moved.
#[utoipa::path(delete, path = "/v1/operations/{id}", operation_id = "cancel_operation",
    params(OperationPath), responses(
    (status = 202, description = "It is being cancelled: wait for its end", body = Operation),
    ProxyErrors,
    (status = 400, description = "Invalid ID", body = ErrorBody),
    (status = 404, description = "Not found", body = ErrorBody),
    (status = 409, description = "It has ended, or operations of its kind cannot be cancelled",
        body = ErrorBody),
))]
pub(super) async fn cancel(
    State(node): Api,
    OperationPath { id }: OperationPath,
) -> Result<(StatusCode, Json<Operation>), Error> {
    let operation = node.machines.cancel_operation(&id).await?;
    Ok((StatusCode::ACCEPTED, Json(operation)))
}

/// Create a snapshot
///
/// From the states Running and Paused, to which the virtual machine returns. Meanwhile its vCPUs
/// are paused, its devices are stopped, and it loses incoming frames. The directory is complete and
/// on the disk before the operation ends. A failed snapshot leaves nothing behind, and the virtual
/// machine continues. The snapshot continues also if the client disconnects.
///
/// The snapshot has all memory of the guest: protect it. The daemon keeps one with a `name`, and
/// restores it: see `restore_from` of `put_vm`. `bellhop run --restore` restores one at a `path`.
#[utoipa::path(post, path = "/v1/vms/{name}/snapshot", operation_id = "create_vm_snapshot",
    params(VmPath, Waiting), request_body = VmSnapshotRequest, responses(
    (status = 201, description = "The snapshot is complete", body = SnapshotInfo),
    (status = 202, description = "With `wait=false`: it is in progress", body = Operation,
        headers(("Location" = String, description = "The operation"))),
    NamedChangeErrors, ProcessErrors,
))]
pub(super) async fn snapshot(
    State(node): Api,
    VmPath { name }: VmPath,
    Parameters(Waiting { wait }): Parameters<Waiting>,
    by: Requested,
    JsonBody(wanted): JsonBody<VmSnapshotRequest>,
) -> Result<Response, Error> {
    let (operation, written) = node.machines.snapshot(&name, wanted, by).await?;
    if wait == Some(false) {
        return Ok(accepted(&operation));
    }
    Ok((StatusCode::CREATED, Json(written.await?)).into_response())
}

/// Upgrade the program of a virtual machine in place
///
/// Another program of Bellhop replaces the present one in the same process (live upgrade). The
/// guest is paused for a moment, and its memory stays in place. The program closes vDPA devices and
/// opens them again by their paths. If the operation fails, the present program continues.
#[utoipa::path(post, path = "/v1/vms/{name}/upgrade", operation_id = "upgrade_vm",
    params(VmPath), request_body = UpgradeRequest, responses(
    (status = 202, description = "It is in progress", body = Operation,
        headers(("Location" = String, description = "The operation"))),
    NamedChangeErrors, ProcessErrors,
))]
pub(super) async fn upgrade(
    State(node): Api,
    VmPath { name }: VmPath,
    by: Requested,
    JsonBody(wanted): JsonBody<UpgradeRequest>,
) -> Result<Response, Error> {
    let operation = node.machines.upgrade(&name, wanted, by).await?;
    Ok(accepted(&operation))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bellhop_api::node::Role;
    use serde_json::{Value, json};

    use super::*;
    use crate::context::Node;
    use crate::paths::Paths;
    use crate::store::{OPERATIONS, Store};

    fn running(id: &str, kind: &str) -> Value {
        json!({
            "id": id, "kind": kind, "target": "web", "phase": "running", "created_ms": 1,
            "requested_by": "uid 0", "request_id": "r",
        })
    }

    async fn listed(node: &Arc<Node>, query: Value) -> Result<Vec<String>, Error> {
        let query = serde_json::from_value(query).unwrap();
        let Json(all) = list(State(node.clone()), Parameters(query)).await?;
        Ok(all.items.into_iter().map(|one| one.id).collect())
    }

    async fn shown(
        node: &Arc<Node>,
        id: &str,
        wait: u64,
    ) -> Result<Operation, (u16, &'static str)> {
        let path = OperationPath { id: id.to_owned() };
        let query = Parameters(OperationWait { wait: Some(wait) });
        let role = SenderRole(Role::Read);
        let shown = show(State(node.clone()), role, path, query, None).await;
        shown.map(|Json(one)| one).map_err(|error| {
            let (status, code) = error.answer();
            (status.as_u16(), code)
        })
    }

    async fn cancelled(node: &Arc<Node>, id: &str) -> &'static str {
        let path = OperationPath { id: id.to_owned() };
        let error = cancel(State(node.clone()), path).await.unwrap_err();
        error.answer().1
    }

    #[tokio::test]
    async fn operations_of_the_daemon_before_are_read_listed_and_not_cancelled() {
        let name = format!("node-operations-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let paths = Paths::new(&directory.join("state"), &directory.join("run"));
        {
            let store = Store::open(&paths.store()).unwrap();
            for one in [running("5", "create"), running("6", "migration")] {
                store
                    .put(OPERATIONS, one["id"].as_str().unwrap(), &one)
                    .unwrap();
            }
        }
        // The second daemon finds the results of the first one.
        for _ in 0..2 {
            let node = Node::below(&directory);
            assert_eq!(listed(&node, json!({})).await.unwrap(), ["5", "6"]);
            let failed = json!({ "phase": "failed", "kind": "create", "target": "web" });
            assert_eq!(listed(&node, failed).await.unwrap(), ["5"]);
            let db = json!({ "target": "db" });
            assert!(listed(&node, db).await.unwrap().is_empty());
            let error = shown(&node, "6", 60).await.unwrap().error.unwrap();
            assert_eq!(
                (error.code.as_str(), error.request_id.as_str()),
                ("interrupted", "r")
            );
            assert_eq!(cancelled(&node, "5").await, "operation_ended");
            assert_eq!(cancelled(&node, "7").await, "no_such_operation");
            let unknown = shown(&node, "x", 0).await.unwrap_err();
            assert_eq!(unknown, (404, "no_such_operation"));
            let long = shown(&node, "5", OPERATION_WAIT_MAX_S + 1)
                .await
                .unwrap_err();
            assert_eq!(long, (400, "bad_parameter"));
            for wrong in [
                json!({ "kind": "x" }),
                json!({ "phase": "x" }),
                json!({ "target": "A" }),
            ] {
                listed(&node, wrong).await.unwrap_err();
            }
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[tokio::test]
    async fn work_that_only_begins_has_a_location() {
        let operation = serde_json::from_value(running("7", "snapshot")).unwrap();
        let answer = accepted(&operation);
        assert_eq!(answer.status(), StatusCode::ACCEPTED);
        assert_eq!(answer.headers()[LOCATION], "/v1/operations/7");
    }
}
