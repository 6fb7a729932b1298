//! `/v1/vm/vfio`: PCI functions of the host, which can be added and removed while the VM runs; see
//! `pluggable.rs`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use bellhop_api::Items;
use bellhop_api::machine::{VfioArea, VfioFunctionInfo, VfioInfo, VfioSummary};
use bellhop_api::responses::{BusyErrors, HostErrors, NameErrors, NamedBodyErrors};
use devices::vfio::FunctionDescription;

use super::descriptors;
use super::pluggable::{self, Known};
use super::state::Api;
use crate::api::controller::Controller;
use crate::api::error::ApiError;
use crate::config::VfioConfig;
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;
use crate::http::parameters::DeviceName;
use crate::machine::{RequestError, VfioStatus};

impl From<&VfioStatus> for VfioSummary {
    fn from(function: &VfioStatus) -> Self {
        Self {
            state: function.state,
            address: Some(function.address.to_string()),
            ..Self::configured(&function.config)
        }
    }
}

impl From<Known<VfioConfig>> for VfioInfo {
    fn from(function: Known<VfioConfig>) -> Self {
        let summary = match function {
            Known::Configured(config) => VfioSummary::configured(&config),
            Known::Plugged { device, .. } => VfioSummary::from(&device),
        };
        Self {
            summary,
            function: None,
        }
    }
}

/// The description of a function for clients.
pub(super) fn function_info(function: &FunctionDescription) -> VfioFunctionInfo {
    let [trapped_reads, trapped_writes] = function.trapped;
    let areas = function.areas.iter().map(|area| VfioArea {
        bar: area.bar,
        offset: area.offset,
        size: area.size,
        address: area.address,
    });
    VfioFunctionInfo {
        driver: function.driver.clone(),
        vectors: function.vectors,
        connected_vectors: function.connected,
        areas: areas.collect(),
        failed: function.failed,
        trapped_reads,
        trapped_writes,
        failures: function.failures,
        faults: function.faults,
        resets: function.resets,
        host_requests: function.requests,
        errors: function.errors,
    }
}

/// All functions, with their state in the guest once the machine is built.
async fn all(api: &Arc<Controller>) -> Result<Vec<VfioInfo>, ApiError> {
    if !api.is_built() {
        let functions = api.config()?.vfio.into_iter();
        let info = |config| VfioInfo::from(Known::Configured(config));
        return Ok(functions.map(info).collect());
    }
    let functions = api.view().vfio;
    let descriptions = api.ask(|machine| machine.functions()).await?;
    let info = |summary: VfioSummary| VfioInfo {
        function: descriptions.get(&summary.id).map(function_info),
        summary,
    };
    Ok(functions.into_iter().map(info).collect())
}

/// List the PCI functions of the host
///
/// These are the functions that the guest drives by VFIO. Before the machine is built, they are
/// those of its configuration.
#[utoipa::path(get, path = "/v1/vm/vfio", operation_id = "list_vfio", responses(
    (status = 200, description = "All functions", body = Items<VfioInfo>),
    BusyErrors,
))]
pub(super) async fn list(State(api): Api) -> Result<Json<Items<VfioInfo>>, ApiError> {
    Ok(Json(all(&api).await?.into_iter().collect()))
}

/// Read a PCI function of the host
///
/// With its vectors, its mapped areas and its counters once the machine is built.
#[utoipa::path(get, path = "/v1/vm/vfio/{id}", operation_id = "get_vfio",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The function's name")), responses(
    (status = 200, description = "The function", body = VfioInfo),
    NameErrors, BusyErrors,
))]
pub(super) async fn show(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Json<VfioInfo>, ApiError> {
    let functions = all(&api).await?;
    let found = functions.into_iter().find(|one| one.summary.id == id);
    Ok(Json(found.ok_or(RequestError::NoSuchDevice(id))?))
}

/// Add a PCI function of the host
///
/// The function is bound to vfio-pci: `bellhop bind pci/ADDRESS vfio-pci`. Before the machine
/// starts, it is added to the configuration. Later, it is opened, reset and plugged; the guest
/// finds it by itself. The first function pins all guest memory. An identical function changes
/// nothing.
///
/// A function whose driver moves its state (VFIO migration v2) goes along when the machine is
/// saved, migrated or upgraded in place. With any other, the machine is neither saved nor upgraded,
/// and migrates only if a NIC stands by for the function.
#[utoipa::path(put, path = "/v1/vm/vfio/{id}", operation_id = "put_vfio",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The function's name")),
    request_body = VfioConfig, responses(
    (status = 200, description = "A function of this name existed: a function that is not plugged \
        yet is replaced, a plugged one is identical", body = VfioInfo),
    (status = 201, description = "Created", body = VfioInfo),
    NamedBodyErrors, HostErrors,
))]
pub(super) async fn put(
    State(api): Api,
    DeviceName(id): DeviceName,
    received: Received,
    JsonBody(mut wanted): JsonBody<VfioConfig>,
) -> Result<Response, ApiError> {
    // For messages.
    wanted.id.get_or_insert_with(|| id.clone());
    descriptors::give(&received, [], [&mut wanted])?;
    pluggable::put(&api, id, wanted).await
}

/// Remove a PCI function of the host
///
/// Before the machine starts, it is removed at once. Later, the guest is asked to release it. The
/// function is reset and closed when it is no longer listed. A guest that does not respond keeps it
/// until the machine resets. Another request asks the guest again.
#[utoipa::path(delete, path = "/v1/vm/vfio/{id}", operation_id = "delete_vfio",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The function's name")), responses(
    (status = 202, description = "The guest is asked to release it", body = VfioInfo),
    (status = 204, description = "Deleted"),
    NameErrors, BusyErrors,
))]
pub(super) async fn remove(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Response, ApiError> {
    pluggable::remove::<VfioConfig>(&api, id).await
}
