//! `/v1/vms/{name}/vfio`: the functions by VFIO of a VM, which can be added and removed while it
//! runs.
//!
//! The daemon binds a function to vfio-pci, and the VM's process gets it. The record keeps it for
//! each later start. While the VM runs, its process describes its functions; otherwise the record
//! does.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::Items;
use bellhop_api::machine::{VfioInfo, VfioSummary};
use bellhop_api::node::Role;
use bellhop_api::responses::{NameErrors, NamedChangeErrors, ProcessErrors, ProxyErrors};
use vmm::config::VfioConfig;
use vmm::http::body::JsonBody;

use super::state::{Api, SenderRole};
use super::vm_devices::{look, removal};
use super::vm_path::{DevicePath, VmPath};
use crate::context::Node;
use crate::error::Error;
use crate::machines::Removed;
use crate::machines::error::no_function;
use crate::machines::spec::{DeviceId, VmName};

/// The description of a function of a VM that does not run.
fn recorded(function: &VfioConfig) -> VfioInfo {
    VfioInfo {
        summary: VfioSummary::configured(function),
        function: None,
    }
}

async fn info(node: &Node, role: Role, name: &VmName, id: &DeviceId) -> Result<Response, Error> {
    let (spec, vmm) = look(node, role, name)?;
    if let Some(vmm) = vmm {
        return Ok(Json(vmm.function(id).await?).into_response());
    }
    let function = spec.function(id).ok_or_else(|| no_function(name, id))?;
    Ok(Json(recorded(function)).into_response())
}

/// List PCI functions of a virtual machine
///
/// These are the functions of the host that its guest drives by VFIO. For a stopped machine: those
/// of its next start.
#[utoipa::path(get, path = "/v1/vms/{name}/vfio", operation_id = "list_vm_vfio",
    params(VmPath), responses(
    (status = 200, description = "All its functions", body = Items<VfioInfo>),
    NameErrors, ProxyErrors,
))]
pub(super) async fn list(
    State(node): Api,
    SenderRole(role): SenderRole,
    VmPath { name }: VmPath,
) -> Result<Response, Error> {
    let (spec, vmm) = look(&node, role, &name)?;
    if let Some(vmm) = vmm {
        return Ok(Json(vmm.functions().await?).into_response());
    }
    let functions: Items<VfioInfo> = spec.machine().vfio.iter().map(recorded).collect();
    Ok(Json(functions).into_response())
}

/// Read the state of a PCI function of a virtual machine
///
/// For a stopped machine: the function of its next start.
#[utoipa::path(get, path = "/v1/vms/{name}/vfio/{id}", operation_id = "get_vm_vfio",
    params(DevicePath), responses(
    (status = 200, description = "The function", body = VfioInfo),
    NameErrors, ProxyErrors,
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    DevicePath { name, id }: DevicePath,
) -> Result<Response, Error> {
    info(&node, role, &name, &id).await
}

/// Add a PCI function to a virtual machine
///
/// The daemon binds the function to vfio-pci, unless it is, and gives it its former driver again
/// when the machine no longer has it. A running machine gets the function now, and each later start
/// has it. No snapshot of the machine can be taken then. It migrates if a NIC stands by for the
/// function, or if the function's driver moves its state. An identical function changes nothing.
#[utoipa::path(put, path = "/v1/vms/{name}/vfio/{id}", operation_id = "put_vm_vfio",
    params(DevicePath), request_body = VfioConfig, responses(
    (status = 200, description = "It existed already", body = VfioInfo),
    (status = 201, description = "Created", body = VfioInfo),
    NamedChangeErrors, ProcessErrors,
))]
pub(super) async fn put(
    State(node): Api,
    SenderRole(role): SenderRole,
    path: DevicePath,
    JsonBody(mut function): JsonBody<VfioConfig>,
) -> Result<Response, Error> {
    path.check(function.id.as_deref())?;
    let DevicePath { name, id } = path;
    function.id = Some(id.to_string());
    let put = node.machines.add_function(&name, &id, function).await?;
    Ok((put.status(), info(&node, role, &name, &id).await?).into_response())
}

/// Remove a PCI function from a virtual machine
///
/// The guest of a running machine is asked to release the function. A guest that does not respond
/// keeps it until the machine resets or ends. Then the function gets its former driver again.
#[utoipa::path(delete, path = "/v1/vms/{name}/vfio/{id}", operation_id = "delete_vm_vfio",
    params(DevicePath), responses(
    (status = 202, description = "The guest is asked, and still has it", body = VfioInfo),
    (status = 204, description = "It is gone"),
    NameErrors, ProcessErrors,
))]
pub(super) async fn remove(
    State(node): Api,
    SenderRole(role): SenderRole,
    DevicePath { name, id }: DevicePath,
) -> Result<Response, Error> {
    if node.machines.remove_function(&name, &id).await? == Removed::Gone {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    removal(info(&node, role, &name, &id).await)
}
