//! `/v1/vms/{name}/nics/{id}`: a NIC of a VM, which can be added and removed while the VM runs.
//!
//! The device is created, handed to the VM, and recorded, so it exists again after a restart. The
//! VM itself reports how the guest uses it (`GET`, forwarded).

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::machine::NicInfo;
use bellhop_api::node::{NicMove, Vm};
use bellhop_api::responses::{NameErrors, NamedChangeErrors, ProcessErrors, ProxyErrors};
use serde_json::{Map, Value};
use vmm::http::body::{JsonBody, invalid};

use super::state::{Api, SenderRole};
use super::vm::info;
use super::vm_path::{DevicePath, VmPath};
use crate::error::Error;
use crate::machines::Removed;
use crate::machines::spec::{ExistingDevice, NicSpec};

/// A NIC whose name may be omitted, because the path has it.
fn named(mut fields: Map<String, Value>, path: &DevicePath) -> Result<NicSpec, Error> {
    let given = fields
        .entry("id")
        .or_insert_with(|| path.id.as_str().into());
    path.check(Some(given.as_str().unwrap_or_default()))?;
    let nic = serde_path_to_error::deserialize(Value::Object(fields));
    nic.map_err(|error| invalid(error).into())
}

/// Add a NIC to a virtual machine
///
/// Creates its device, if it has `from`, and plugs it; the guest finds it by itself. If a step
/// fails, the daemon undoes the earlier ones. An identical NIC changes nothing.
#[utoipa::path(put, path = "/v1/vms/{name}/nics/{id}", operation_id = "put_vm_nic",
    params(DevicePath), request_body = NicSpec, responses(
    (status = 200, description = "It existed already", body = Vm),
    (status = 201, description = "Created", body = Vm),
    NamedChangeErrors, ProcessErrors,
))]
pub(super) async fn put(
    State(node): Api,
    path: DevicePath,
    JsonBody(fields): JsonBody<Map<String, Value>>,
) -> Result<Response, Error> {
    let nic = named(fields, &path)?;
    let put = node.machines.add_nic(&path.name, nic).await?;
    Ok((put.status(), info(&node, &path.name)?).into_response())
}

/// Move a NIC to another vDPA device
///
/// The guest keeps the PCI function, MAC address, control state and rings. The device must offer
/// all negotiated features. A refusal changes nothing. The old device is deleted if it was created
/// for the NIC. Its settings (bridge, VLAN, rates) end with it. An identical device changes
/// nothing.
#[utoipa::path(patch, path = "/v1/vms/{name}/nics/{id}", operation_id = "patch_vm_nic",
    params(DevicePath), request_body = NicMove, responses(
    (status = 200, description = "It is on that device now", body = Vm),
    NamedChangeErrors, ProcessErrors,
))]
pub(super) async fn change(
    State(node): Api,
    DevicePath { name, id }: DevicePath,
    JsonBody(wanted): JsonBody<NicMove>,
) -> Result<Response, Error> {
    let device = match (wanted.path, wanted.device) {
        (Some(path), None) => ExistingDevice::Path(path),
        (None, Some(name)) => ExistingDevice::Name(name),
        _ => {
            // Each of them is valid separately.
            let message = "name the new vDPA device by either `path` or `device`";
            let status = StatusCode::UNPROCESSABLE_ENTITY;
            return Err(Error::answered(status, "one_device", message));
        }
    };
    node.machines.swap_nic(&name, &id, device).await?;
    Ok(info(&node, &name)?.into_response())
}

/// Remove a NIC from a virtual machine
///
/// Asks the guest to release it, then deletes its device. A guest that does not respond keeps it
/// until the machine resets or ends.
#[utoipa::path(delete, path = "/v1/vms/{name}/nics/{id}", operation_id = "delete_vm_nic",
    params(DevicePath), responses(
    (status = 202, description = "The guest is asked, and still has it", body = Vm),
    (status = 204, description = "Deleted"),
    NameErrors, ProcessErrors,
))]
pub(super) async fn remove(
    State(node): Api,
    DevicePath { name, id }: DevicePath,
) -> Result<Response, Error> {
    Ok(match node.machines.remove_nic(&name, &id).await? {
        Removed::Gone => StatusCode::NO_CONTENT.into_response(),
        Removed::Asked => (StatusCode::ACCEPTED, info(&node, &name)?).into_response(),
    })
}

/// Read a NIC of a virtual machine
///
/// As the process of the machine reports it.
#[utoipa::path(get, path = "/v1/vms/{name}/nics/{id}", operation_id = "get_vm_nic",
    params(DevicePath), responses(
    (status = 200, description = "The NIC", body = NicInfo),
    NameErrors, ProxyErrors,
))]
pub(super) async fn show(
    api: Api,
    role: SenderRole,
    _: DevicePath,
    vm: VmPath,
    request: axum::extract::Request,
) -> Result<Response, Error> {
    super::proxy::forward(api, role, vm, request).await
}
