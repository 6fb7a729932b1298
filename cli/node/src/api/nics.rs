//! `/v1/nics`: NICs that `bellhop nic create` or this daemon created, from their records.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::LOCATION;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::node::{Event, EventChange, HostNicSpec};
use bellhop_api::responses::{BodyErrors, KernelErrors, NameErrors};
use bellhop_common::listing::Listing;
use bellhop_common::management::nic;
use vdpa_mgmt::nic::Store;
use vmm::http::body::JsonBody;
use vmm::http::parameters::DeviceName;

use super::listings::HostNicListing;
use super::state::{Api, SenderRole};
use crate::error::Error;
use crate::machines::spec::host_request;

/// List NICs
///
/// NICs that `bellhop nic create` or the daemon created, also incomplete ones, as `bellhop nic list
/// -j`.
#[utoipa::path(get, path = "/v1/nics", operation_id = "list_nics", responses(
    (status = 200, description = "All NICs", body = HostNicListing),
    KernelErrors,
))]
pub(super) async fn list(
    State(node): Api,
    SenderRole(role): SenderRole,
) -> Result<Json<Listing>, Error> {
    let directory = node.paths.nics();
    let list = move || {
        let nics = Store::open(&directory)?.nics()?;
        Ok::<_, Error>(nic::listing(&nics)?)
    };
    Ok(Json(node.kernel_permits.run(role, list).await?))
}

/// Create a NIC
///
/// A vDPA device and all that it needs, as `bellhop nic create`: virtual functions or a
/// subfunction, drivers, a port of a bridge. If a step fails, the daemon undoes the earlier ones.
/// The NIC belongs to no virtual machine; the daemon creates those of its virtual machines itself.
#[utoipa::path(post, path = "/v1/nics", operation_id = "create_nic", request_body = HostNicSpec,
    responses(
    (status = 201, description = "The NIC", body = HostNicListing,
        headers(("Location" = String, description = "The NIC"))),
    BodyErrors, KernelErrors,
))]
pub(super) async fn create(
    State(node): Api,
    SenderRole(role): SenderRole,
    JsonBody(spec): JsonBody<HostNicSpec>,
) -> Result<Response, Error> {
    let request = host_request(&spec)?;
    let location = format!("/v1/nics/{}", spec.name);
    let (own, subject) = (node.clone(), location.clone());
    let make = move || {
        let nic = own.machines.make_host_nic(&request)?;
        let event = Event::new(subject, EventChange::Created);
        let detail = format!("created from {} on request", request.from);
        own.events.publish(event.detail(detail));
        Ok::<_, Error>(nic::listing(&[nic])?)
    };
    let made = node.kernel_permits.run(role, make).await?;
    Ok((StatusCode::CREATED, [(LOCATION, location)], Json(made)).into_response())
}

/// Read a NIC
///
/// As `bellhop nic show -j`.
#[utoipa::path(get, path = "/v1/nics/{name}", operation_id = "get_nic",
    params(("name" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,63}$",
        description = "The NIC's name")),
    responses(
    (status = 200, description = "The NIC", body = HostNicListing),
    NameErrors, KernelErrors,
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    DeviceName(name): DeviceName,
) -> Result<Json<Listing>, Error> {
    let directory = node.paths.nics();
    let show = move || {
        let nic = Store::open(&directory)?.nic(&name)?;
        Ok::<_, Error>(nic::listing(&[nic])?)
    };
    Ok(Json(node.kernel_permits.run(role, show).await?))
}

/// Delete a NIC
///
/// Undoes all steps of its creation, the last one first, also of an incomplete one. No process may
/// have the device open. For the NIC of a virtual machine, use the request of that machine.
#[utoipa::path(delete, path = "/v1/nics/{name}", operation_id = "delete_nic",
    params(("name" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,63}$",
        description = "The NIC's name")),
    responses(
    (status = 204, description = "Deleted"),
    NameErrors, KernelErrors,
))]
pub(super) async fn remove(
    State(node): Api,
    SenderRole(role): SenderRole,
    DeviceName(name): DeviceName,
) -> Result<StatusCode, Error> {
    let own = node.clone();
    let delete = move || {
        own.machines.remove_host_nic(&name)?;
        let event = Event::new(format!("/v1/nics/{name}"), EventChange::Deleted);
        own.events.publish(event.detail("on request"));
        Ok::<_, Error>(())
    };
    node.kernel_permits.run(role, delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use bellhop_api::node::Role;
    use serde_json::json;

    use super::*;
    use crate::context::Node;

    const ADMIN: SenderRole = SenderRole(Role::Admin);

    #[tokio::test]
    async fn invalid_nics_are_refused_before_any_change_of_the_host() {
        let name = format!("node-host-nics-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let node = Node::below(&directory);
        for bad in [
            json!({ "name": "nic0" }),
            json!({ "name": "../nic0", "from": "eth0" }),
            json!({ "name": "nic0", "from": "eth0", "path": "/dev/vhost-vdpa-0" }),
            json!({ "name": "nic0", "from": "eth0", "owner": "node:web/net0" }),
        ] {
            assert!(serde_json::from_value::<HostNicSpec>(bad).is_err());
        }
        for bad in [
            json!({ "name": "nic0", "from": "eth0", "mtu": 67 }),
            json!({ "name": "nic0", "from": "eth0", "vlan": 4095 }),
            json!({ "name": "nic0", "from": "eth0", "poll": 30 }),
            json!({ "name": "nic0", "from": "software", "poll": 101 }),
            json!({ "name": "nic0", "from": "eth0", "min_tx_rate": 2, "max_tx_rate": 1 }),
        ] {
            let spec = serde_json::from_value(bad).unwrap();
            let error = create(State(node.clone()), ADMIN, JsonBody(spec))
                .await
                .unwrap_err();
            assert_eq!(error.answer().0, StatusCode::UNPROCESSABLE_ENTITY);
        }
        for name in ["nic0".to_owned(), "n".repeat(64)] {
            let status = StatusCode::NOT_FOUND;
            let error = remove(State(node.clone()), ADMIN, DeviceName(name.clone())).await;
            assert_eq!(error.unwrap_err().answer().0, status, "{name}");
            let error = show(State(node.clone()), ADMIN, DeviceName(name.clone())).await;
            assert_eq!(error.unwrap_err().answer().0, status, "{name}");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
