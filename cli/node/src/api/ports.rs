//! `/v1/ports`: ports of NICs, as devlink reports them.

use axum::Json;
use axum::extract::State;
use bellhop_api::responses::{KernelErrors, NameErrors};
use bellhop_common::listing::Listing;
use bellhop_common::management::port;
use serde::Deserialize;
use utoipa::IntoParams;
use vdpa_mgmt::devlink::{Devlink, Handle};
use vmm::http::parameters::PathParameters;

use super::listings::PortListing;
use super::management::{no_devlink, or_none};
use super::state::{Api, SenderRole};
use crate::error::Error;

/// A devlink instance in the path.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct InstancePath {
    /// The bus of the instance, such as `pci`
    #[param(pattern = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")]
    bus: String,
    /// Its device, such as `0000:06:00.0`
    #[param(pattern = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")]
    device: String,
}

/// List ports
///
/// Ports of all NICs, as `bellhop port show -j`. The list is empty without devlink.
#[utoipa::path(get, path = "/v1/ports", operation_id = "list_ports", responses(
    (status = 200, description = "All ports", body = PortListing),
    KernelErrors,
))]
pub(super) async fn list(
    State(node): Api,
    SenderRole(role): SenderRole,
) -> Result<Json<Listing>, Error> {
    let ports = node.kernel_permits.run(role, || {
        or_none(
            Devlink::open().and_then(|devlink| devlink.ports()),
            no_devlink,
        )
    });
    Ok(Json(port::listing(&ports.await?)))
}

/// List the ports of a devlink instance
///
/// As `bellhop port show BUS/DEVICE -j`.
#[utoipa::path(get, path = "/v1/ports/{bus}/{device}", operation_id = "list_device_ports",
    params(InstancePath), responses(
    (status = 200, description = "Its ports", body = PortListing),
    NameErrors, KernelErrors,
))]
pub(super) async fn of_instance(
    State(node): Api,
    SenderRole(role): SenderRole,
    PathParameters(InstancePath { bus, device }): PathParameters<InstancePath>,
) -> Result<Json<Listing>, Error> {
    let handle = Handle::new(&bus, &device)?;
    let ports = move || Devlink::open()?.ports_of(&handle);
    let ports = node.kernel_permits.run(role, ports).await?;
    Ok(Json(port::listing(&ports)))
}

/// Read a port
///
/// As `bellhop port show BUS/DEVICE/INDEX -j`.
#[utoipa::path(get, path = "/v1/ports/{bus}/{device}/{index}", operation_id = "get_port",
    params(InstancePath, ("index" = u32, Path, description = "The port's number")), responses(
    (status = 200, description = "The port", body = PortListing),
    NameErrors, KernelErrors,
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    PathParameters((bus, device, index)): PathParameters<(String, String, u32)>,
) -> Result<Json<Listing>, Error> {
    let handle = Handle::new(&bus, &device)?;
    let port = move || Devlink::open()?.port(&handle.port(index));
    let port = node.kernel_permits.run(role, port).await?;
    Ok(Json(port::listing(&[port])))
}
