//! `/v1/vms/{name}/migration`: the VM's own migration, and the node's part in it.
//!
//! The daemon forwards requests like all others, except those about a migration between two nodes.
//! Before a VM receives a request to leave, the daemon marks its record. The daemon also evaluates
//! the process's answers to clients. Once the process is gone, clients set the guest's location at
//! the daemon itself.

use axum::Json;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Extension, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::PROBLEM_JSON;
use bellhop_api::machine::{MigrationStatus, MigrationTrial, Place, ResolveRequest};
use bellhop_api::node::{Awaited, Operation};
use bellhop_api::responses::{NameErrors, NamedChangeErrors, ProcessErrors, ProxyErrors};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::Value;
use vmm::http::ErrorBody;
use vmm::http::body::JsonBody;
use vmm::http::server::UnixPeer;
use vmm::migration::endpoint::Endpoint;

use super::operations::accepted;
use super::proxy;
use super::state::{Api, SenderRole};
use super::vm_path::VmPath;
use crate::error::{Error, OfProcess};
use crate::machines::operations::{Requested, Sent};
use crate::machines::spec::NodeMigrationRequest;
use crate::machines::steps::{ProxiedResponse, SendRequest};
use crate::machines::vmm::no_answer;
use crate::peers;

/// The longest accepted report of a migration, in bytes.
const ACCOUNT_MAX: usize = 1 << 20;

/// A migration request, for this daemon or for the VM.
#[derive(Debug)]
pub(super) enum Wanted {
    /// For this daemon.
    Ours(NodeMigrationRequest),
    /// For the VM: a migration to a waiting process.
    Machines(Value),
}

impl<'de> Deserialize<'de> for Wanted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let destination = value.pointer("/send/destination").and_then(Value::as_str);
        if value.get("receive").is_none() && !destination.is_some_and(peers::is_node) {
            return Ok(Self::Machines(value));
        }
        let wanted = serde_path_to_error::deserialize(value)
            .map_err(|error| D::Error::custom(format_args!("{}: {}", error.path(), error.inner())));
        wanted.map(Self::Ours)
    }
}

/// Migrate a virtual machine to another node
///
/// `send` to `https://HOST:PORT` or `node:/PATH` asks the daemon of that node to create the NICs
/// and a receiving process. The guest migrates, and then the daemon here deletes its devices. If
/// the guest stays, the devices there are deleted. The operation has the progress and the result.
/// The daemon forwards a destination that is a process (`unix:/PATH`, `tcp:HOST:PORT`) to the
/// process of the machine.
///
/// `receive` is the request of another daemon. The virtual machine is in the phase Receiving until
/// its guest has arrived. If the guest does not arrive, the daemon deletes the machine.
#[utoipa::path(post, path = "/v1/vms/{name}/migration", operation_id = "start_vm_migration",
    params(VmPath), request_body = NodeMigrationRequest, responses(
    (status = 200, description = "With `dry_run`: whether it can migrate; without sizes and times \
        if the other node refuses it", body = MigrationTrial),
    (status = 201, description = "A process waits for it", body = Awaited),
    (status = 202, description = "It is in progress", body = Operation,
        headers(("Location" = String, description = "The operation"))),
    NamedChangeErrors, ProcessErrors,
    (status = 409, description = "It does not run or is already migrating. Or the other node \
        refuses it, its name or a device is in use here, or this daemon has no certificates for \
        migrations", body = ErrorBody),
    (status = 502, description = "The other node, or the VM's process, does not respond",
     body = ErrorBody),
))]
pub(super) async fn begin(
    State(node): Api,
    VmPath { name }: VmPath,
    by: Requested,
    peer: Option<Extension<UnixPeer>>,
    JsonBody(wanted): JsonBody<Wanted>,
) -> Result<Response, Error> {
    let sent = match wanted {
        Wanted::Ours(NodeMigrationRequest::Receive(wanted)) => {
            let near = peer.is_some();
            let awaited = node.machines.receive(&name, *wanted, near).await?;
            return Ok((StatusCode::CREATED, Json(awaited)).into_response());
        }
        Wanted::Ours(NodeMigrationRequest::Send(wanted)) => {
            node.machines.send_to_node(&name, wanted, by).await?
        }
        Wanted::Machines(mut wanted) => {
            let destination = wanted
                .pointer("/send/destination")
                .and_then(Value::as_str)
                .unwrap_or("another process")
                .to_owned();
            let endpoint: Option<Endpoint> = destination.parse().ok();
            if endpoint.is_some() {
                connect_for_it(&mut wanted);
            }
            let request = SendRequest {
                destination,
                body: Bytes::from(wanted.to_string()),
                endpoint,
                request_id: by.request_id.clone(),
                peer: None,
            };
            node.machines.send(&name, request, by).await?
        }
    };
    Ok(match sent {
        Sent::Begun(operation) => accepted(&operation),
        Sent::Answered(passed) => answered(passed),
    })
}

/// Names the descriptor by which the daemon opens the connections of the VM's process.
fn connect_for_it(wanted: &mut Value) {
    if let Some(send) = wanted.pointer_mut("/send").and_then(Value::as_object_mut) {
        send.insert("fd".to_owned(), 0.into());
    }
}

/// The answer of a VM's process to a client of the daemon.
fn answered(passed: ProxiedResponse) -> Response {
    let kind = if passed.status.is_success() {
        "application/json"
    } else {
        PROBLEM_JSON
    };
    let mut response = (passed.status, [(CONTENT_TYPE, kind)], passed.body).into_response();
    response.extensions_mut().insert(OfProcess);
    response
}

/// Cancel a migration
///
/// Possible before the handover of the guest. An outgoing machine stays, and the destination
/// deletes its devices. An incoming machine is deleted with its devices.
#[utoipa::path(delete, path = "/v1/vms/{name}/migration", operation_id = "cancel_vm_migration",
    params(VmPath), responses(
    (status = 202, description = "It is being cancelled: GET reports the result"),
    (status = 204, description = "The incoming machine is deleted"),
    NameErrors, ProcessErrors,
    (status = 404, description = "Not found: the VM, or a migration", body = ErrorBody),
    (status = 500, description = "A step could not be undone: delete the VM", body = ErrorBody),
))]
pub(super) async fn cancel(State(node): Api, VmPath { name }: VmPath) -> Result<StatusCode, Error> {
    match node.machines.cancel_incoming(&name).await? {
        Some(()) => Ok(StatusCode::NO_CONTENT),
        None => {
            node.machines.cancel_migration(&name).await?;
            Ok(StatusCode::ACCEPTED)
        }
    }
}

/// Read the state of the last migration
///
/// As the process of the machine reports it, or the last report before the guest left this node.
/// The operation of the migration has it, too.
#[utoipa::path(get, path = "/v1/vms/{name}/migration", operation_id = "get_vm_migration",
    params(VmPath), responses(
    (status = 200, description = "Its state", body = MigrationStatus),
    NameErrors, ProxyErrors,
    (status = 404, description = "Not found: the VM, or a migration", body = ErrorBody),
))]
pub(super) async fn show(
    api: Api,
    role: SenderRole,
    vm: VmPath,
    request: Request,
) -> Result<Response, Error> {
    let (machines, name) = (api.0.machines.clone(), vm.name.clone());
    let asked = machines.process_of(&name);
    let answer = match proxy::forward(api, role, vm, request).await {
        Ok(answer) => answer,
        Err(error) => {
            let left = machines.last_outgoing(&name);
            return Ok(Json(left.ok_or(error)?).into_response());
        }
    };
    let (head, body) = answer.into_parts();
    let body = to_bytes(body, ACCOUNT_MAX).await;
    let body = body.map_err(|error| {
        no_answer("the answer of the VM's process is incomplete").because(error)
    })?;
    if let Ok(status) = serde_json::from_slice::<MigrationStatus>(&body) {
        machines.on_migration_report(&name, asked, status).await;
    }
    Ok(Response::from_parts(head, Body::from(body)))
}

/// Resolve an indeterminate migration
///
/// For a guest whose connection broke during the handover, or whose process ended without a result
/// (`migration_unknown`). Check the destination first. `here` resumes the guest, or permits a
/// start, which follows at once if the machine should run. `there` ends it here. With `here` on
/// both hosts the guest runs twice.
#[utoipa::path(patch, path = "/v1/vms/{name}/migration", operation_id = "resolve_vm_migration",
    params(VmPath), request_body = ResolveRequest, responses(
    (status = 204, description = "It is resolved"),
    NamedChangeErrors, ProcessErrors,
    (status = 404, description = "Not found: the VM, or a migration", body = ErrorBody),
))]
pub(super) async fn resolve(
    State(node): Api,
    VmPath { name }: VmPath,
    JsonBody(change): JsonBody<ResolveRequest>,
) -> Result<StatusCode, Error> {
    let here = change.resolve == Place::Here;
    node.machines.resolve_migration(&name, here).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_the_machines_process_is_a_problem() {
        for (status, kind) in [
            (StatusCode::ACCEPTED, "application/json"),
            (StatusCode::UNPROCESSABLE_ENTITY, "application/problem+json"),
        ] {
            let body = Bytes::from_static(b"{}");
            let answer = answered(ProxiedResponse { status, body });
            assert_eq!(answer.headers()[CONTENT_TYPE], kind);
        }
    }
}
