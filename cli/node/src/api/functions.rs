//! `/v1/functions`: PCI functions with SR-IOV and their virtual functions.

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::{KernelErrors, NameErrors, NamedChangeErrors};
use bellhop_common::listing::Listing;
use bellhop_common::management::vf;
use serde::Deserialize;
use utoipa::ToSchema;
use vdpa_mgmt::nic::{MadeNic, Step, Store};
use vdpa_mgmt::pci::{Address, Function, Pci};
use vmm::http::body::JsonBody;
use vmm::http::parameters::DeviceName;

use super::management::part_of_nic;
use super::state::Api;
use crate::error::Error;

/// PCI functions that can have virtual functions, and these
#[utoipa::path(get, path = "/v1/functions", operation_id = "list_functions", responses(
    (status = 200, description = "As `bellhop vf show -j`: `{\"vf\": {\"pci/ADDRESS\": …}}`", body = serde_json::Value),
    KernelErrors,
))]
pub(super) async fn list(State(node): Api) -> Result<Json<Listing>, Error> {
    Ok(Json(node.turns.run(vf::all).await?))
}

/// One PCI function, and its virtual functions if it has some
#[utoipa::path(get, path = "/v1/functions/{address}", operation_id = "get_function", params(
        ("address" = String, Path, pattern = "^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]$", description = "Its address, such as `0000:01:00.0`"),
    ), responses(
    (status = 200, description = "As `bellhop vf show pci/ADDRESS -j`", body = serde_json::Value),
    NameErrors, KernelErrors,
))]
pub(super) async fn show(
    State(node): Api,
    DeviceName(address): DeviceName,
) -> Result<Json<Listing>, Error> {
    let one = move || vf::one(&format!("pci/{address}"));
    Ok(Json(node.turns.run(one).await?))
}

/// What of a function is to change.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FunctionChange {
    /// How many virtual functions it is to have; 0 takes them away.
    vfs: u32,
}

/// Give a physical function this many virtual functions
///
/// The kernel changes a number only from 0 and to 0, so all that are there go first. Nobody may be using one, and no NIC
/// may be made on one.
#[utoipa::path(patch, path = "/v1/functions/{address}", operation_id = "patch_function", params(
        ("address" = String, Path, pattern = "^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]$", description = "The address of the physical function, such as `0000:01:00.0`"),
    ), request_body = FunctionChange, responses(
    (status = 200, description = "The function and its virtual ones, as they are now", body = serde_json::Value),
    NamedChangeErrors, KernelErrors,
))]
pub(super) async fn change(
    State(node): Api,
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
                    "the NIC {nic} is made on a virtual function of {address}: remove that first"
                )));
            }
            pci.set_virtual_functions(address, change.vfs)?;
            let detail = format!("it has {} virtual functions", change.vfs);
            let subject = format!("/v1/functions/{address}");
            own.events.publish(&subject, "changed", Some(detail));
        }
        Ok(vf::one(&format!("pci/{address}"))?)
    };
    Ok(Json(node.turns.run(count).await?))
}

/// Whether a NIC is made on a virtual function of this one.
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
        Step::AddPort { .. } | Step::ActivatePort { .. } | Step::Connect { .. } => false,
    })
}
