//! `/v1/vms/{name}/disks`: the disks of a VM, which can be added and removed while it runs.
//!
//! The VM's process gets the disk, and the record keeps it for each later start. While the VM runs,
//! its process describes the disks; otherwise the record does.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::Items;
use bellhop_api::machine::{DiskInfo, DiskSummary};
use bellhop_api::node::Role;
use bellhop_api::responses::{NameErrors, NamedChangeErrors, ProcessErrors, ProxyErrors};
use vmm::config::DiskConfig;
use vmm::http::body::JsonBody;

use super::state::{Api, SenderRole};
use super::vm_devices::{look, removal};
use super::vm_path::{DevicePath, VmPath};
use crate::context::Node;
use crate::error::Error;
use crate::machines::Removed;
use crate::machines::error::no_disk;
use crate::machines::spec::{DeviceId, VmName};

/// The description of a disk of a VM that does not run.
fn recorded(disk: &DiskConfig) -> DiskInfo {
    let id = disk.id.clone().unwrap_or_default();
    DiskInfo {
        summary: DiskSummary::configured(id, disk),
        device: None,
    }
}

async fn info(node: &Node, role: Role, name: &VmName, id: &DeviceId) -> Result<Response, Error> {
    let (spec, vmm) = look(node, role, name)?;
    if let Some(vmm) = vmm {
        return Ok(Json(vmm.disk(id).await?).into_response());
    }
    let disk = spec.disk(id).ok_or_else(|| no_disk(name, id))?;
    Ok(Json(recorded(disk)).into_response())
}

/// List disks of a virtual machine
///
/// For a stopped machine: the disks of its next start.
#[utoipa::path(get, path = "/v1/vms/{name}/disks", operation_id = "list_vm_disks",
    params(VmPath), responses(
    (status = 200, description = "All its disks", body = Items<DiskInfo>),
    NameErrors, ProxyErrors,
))]
pub(super) async fn list(
    State(node): Api,
    SenderRole(role): SenderRole,
    VmPath { name }: VmPath,
) -> Result<Response, Error> {
    let (spec, vmm) = look(&node, role, &name)?;
    if let Some(vmm) = vmm {
        return Ok(Json(vmm.disks().await?).into_response());
    }
    let disks: Items<DiskInfo> = spec.machine().disks.iter().map(recorded).collect();
    Ok(Json(disks).into_response())
}

/// Read the state of a disk of a virtual machine
///
/// For a stopped machine: the disk of its next start.
#[utoipa::path(get, path = "/v1/vms/{name}/disks/{id}", operation_id = "get_vm_disk",
    params(DevicePath), responses(
    (status = 200, description = "The disk", body = DiskInfo),
    NameErrors, ProxyErrors,
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    DevicePath { name, id }: DevicePath,
) -> Result<Response, Error> {
    info(&node, role, &name, &id).await
}

/// Add a disk to a virtual machine
///
/// The image is a regular file or a block device of the host. A running machine gets the disk now,
/// and each later start has it. For a stopped machine the daemon only opens and locks the image
/// once, to check it. An identical disk changes nothing. The name is also the disk's serial number,
/// so it has at most 20 characters.
#[utoipa::path(put, path = "/v1/vms/{name}/disks/{id}", operation_id = "put_vm_disk",
    params(DevicePath), request_body = DiskConfig, responses(
    (status = 200, description = "It existed already", body = DiskInfo),
    (status = 201, description = "Created", body = DiskInfo),
    NamedChangeErrors, ProcessErrors,
))]
pub(super) async fn put(
    State(node): Api,
    SenderRole(role): SenderRole,
    path: DevicePath,
    JsonBody(mut disk): JsonBody<DiskConfig>,
) -> Result<Response, Error> {
    path.check(disk.id.as_deref())?;
    let DevicePath { name, id } = path;
    disk.id = Some(id.to_string());
    let put = node.machines.add_disk(&name, &id, disk).await?;
    Ok((put.status(), info(&node, role, &name, &id).await?).into_response())
}

/// Remove a disk from a virtual machine
///
/// The guest of a running machine is asked to release the disk. A guest that does not respond keeps
/// it until the machine resets or ends. The image stays.
#[utoipa::path(delete, path = "/v1/vms/{name}/disks/{id}", operation_id = "delete_vm_disk",
    params(DevicePath), responses(
    (status = 202, description = "The guest is asked, and still has it", body = DiskInfo),
    (status = 204, description = "It is gone"),
    NameErrors, ProcessErrors,
))]
pub(super) async fn remove(
    State(node): Api,
    SenderRole(role): SenderRole,
    DevicePath { name, id }: DevicePath,
) -> Result<Response, Error> {
    if node.machines.remove_disk(&name, &id).await? == Removed::Gone {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    removal(info(&node, role, &name, &id).await)
}
