//! `/v1/topology`: all of vDPA on this node as one tree.

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::{KernelErrors, NameErrors};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vdpa_mgmt::pci::Address;
use vdpa_mgmt::topology::{self, Topology};
use vmm::http::parameters::Parameters;

use super::state::{Api, SenderRole};
use crate::error::Error;

/// The selected part of the topology.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Part {
    /// One physical function with its tree: its address, or that of one of its virtual functions,
    /// such as `0000:01:00.0` (default: the whole tree).
    #[param(pattern = "^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]$")]
    function: Option<String>,
}

/// The topology, as `bellhop topology -j`.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TopologyListing {
    /// The tree.
    topology: Topology,
}

/// Read the topology
///
/// NICs, their functions, vDPA devices and the processes that use them, as `bellhop topology -j`.
/// Nothing is changed or opened, so this is possible at any time.
#[utoipa::path(get, path = "/v1/topology", operation_id = "get_topology", params(Part), responses(
    (status = 200, description = "The topology", body = TopologyListing),
    NameErrors, KernelErrors,
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    Parameters(part): Parameters<Part>,
) -> Result<Json<TopologyListing>, Error> {
    let address = part
        .function
        .map(|text| text.parse::<Address>())
        .transpose()?;
    let read = move || match address {
        Some(address) => topology::read_function(address),
        None => topology::read(),
    };
    let topology = node.kernel_permits.run(role, read).await?;
    Ok(Json(TopologyListing { topology }))
}
