//! `/v1/functions`: PCI functions with SR-IOV and their virtual functions.

use axum::Json;
use axum::extract::State;
use bellhop_api::node::{Event, EventChange};
use bellhop_api::responses::{KernelErrors, NameErrors, NamedChangeErrors};
use bellhop_common::listing::Listing;
use bellhop_common::management::vf;
use serde::Deserialize;
use utoipa::ToSchema;
use vdpa_mgmt::nic::{MadeNic, Step, Store};
use vdpa_mgmt::pci::{Address, Function, Pci};
use vmm::http::body::JsonBody;
use vmm::http::parameters::DeviceName;

use super::listings::FunctionListing;
use super::management::part_of_nic;
use super::state::{Api, SenderRole};
use crate::error::Error;

/// List PCI functions
///
/// All functions with SR-IOV and their virtual functions, as `bellhop vf show -j`.
#[utoipa::path(get, path = "/v1/functions", operation_id = "list_functions", responses(
    (status = 200, description = "All functions", body = FunctionListing),
    KernelErrors,
))]
pub(super) async fn list(
    State(node): Api,
    SenderRole(role): SenderRole,
) -> Result<Json<Listing>, Error> {
    Ok(Json(node.kernel_permits.run(role, vf::all).await?))
}

/// Read a PCI function
///
/// A physical function with its virtual functions, or one virtual function, as `bellhop vf show
/// pci/ADDRESS -j`.
#[utoipa::path(get, path = "/v1/functions/{address}", operation_id = "get_function", params(
        ("address" = String, Path, pattern = "^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]$",
            description = "Its address, such as `0000:01:00.0`"),
    ), responses(
    (status = 200, description = "The function", body = FunctionListing),
    NameErrors, KernelErrors,
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    DeviceName(address): DeviceName,
) -> Result<Json<Listing>, Error> {
    let one = move || vf::one(&format!("pci/{address}"));
    Ok(Json(node.kernel_permits.run(role, one).await?))
}

/// A change of a PCI function.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FunctionChange {
    /// The number of its virtual functions; 0 deletes them.
    vfs: u32,
}

/// Set the number of virtual functions
///
/// The kernel changes the number only from and to 0, so all existing ones are deleted first. None
/// of them may be in use or part of a NIC.
#[utoipa::path(patch, path = "/v1/functions/{address}", operation_id = "patch_function", params(
        ("address" = String, Path, pattern = "^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]$",
            description = "The address of the physical function, such as `0000:01:00.0`"),
    ), request_body = FunctionChange, responses(
    (status = 200, description = "The function and its virtual functions", body = FunctionListing),
    NamedChangeErrors, KernelErrors,
))]
pub(super) async fn change(
    State(node): Api,
    SenderRole(role): SenderRole,
    DeviceName(address): DeviceName,
    JsonBody(change): JsonBody<FunctionChange>,
) -> Result<Json<Listing>, Error> {
    let own = node.clone();
    let count = move || {
        let address: Address = address.parse()?;
        let pci = Pci::default();
        let function = pci.function(address)?;
        let before = function.virtual_functions.len();
        let changes = u32::try_from(before).is_ok_and(|before| before != change.vfs);
        if changes {
            if let Some(nic) = Store::open(&own.paths.nics())?
                .nics()?
                .iter()
                .find(|nic| is_on(nic, &function))
            {
                let nic = nic.name();
                return Err(part_of_nic(format!(
                    "the NIC {nic} uses a virtual function of {address}: delete that NIC first"
                )));
            }
            pci.set_virtual_functions(address, change.vfs)?;
            let detail = format!("it has {} virtual functions", change.vfs);
            let subject = format!("/v1/functions/{address}");
            let event = Event::new(subject, EventChange::Changed);
            own.events.publish(event.detail(detail));
        }
        Ok(vf::one(&format!("pci/{address}"))?)
    };
    Ok(Json(node.kernel_permits.run(role, count).await?))
}

/// Whether a NIC was created on a virtual function of this one.
fn is_on(nic: &MadeNic, function: &Function) -> bool {
    let virtual_ones = function.virtual_functions.iter();
    let virtual_ones: Vec<String> = virtual_ones.map(|(_, one)| one.to_string()).collect();
    nic.steps().iter().any(|step| match step {
        Step::CountVirtualFunctions { physical, .. }
        | Step::SetVirtualFunction { physical, .. } => *physical == function.address,
        Step::BindFunction { function, .. } => virtual_ones.contains(&function.to_string()),
        Step::AddDevice { mgmtdev } => {
            mgmtdev.bus() == Some("pci") && virtual_ones.iter().any(|one| one == mgmtdev.name())
        }
        Step::AddPort { .. }
        | Step::ActivatePort { .. }
        | Step::Serve { .. }
        | Step::Connect { .. } => false,
    })
}
