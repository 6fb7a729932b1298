//! `/v1/vm/nics/{id}`: one NIC, which comes and goes also while the machine runs.
//!
//! Before boot it is a part of the configuration; after it, of the machine. Nothing of a
//! plugged NIC can be changed but whether it is there.

use std::path::PathBuf;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Api;
use super::device::DeviceInfo;
use super::nics::NicSummary;
use crate::api::error::ApiError;
use crate::config::{DoorbellMode, MacAddress, VdpaConfig, VmConfig, schema};
use crate::http::body::JsonBody;
use crate::http::parameters::DeviceName;
use crate::http::{ErrorBody, HttpError, on_worker};
use crate::machine::{Handle, NicStatus, RequestError};

/// A NIC with all there is to say about it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct NicInfo {
    #[serde(flatten)]
    summary: NicSummary,
    /// The MAC address that was asked for; none: the device's own.
    mac: Option<String>,
    /// The number of queues that was asked for, control queue included.
    num_queues: Option<u16>,
    /// Whether doorbells were asked for.
    #[schema(schema_with = schema::doorbell)]
    doorbell: DoorbellMode,
    /// What the guest made of it, once the machine is built.
    device: Option<DeviceInfo>,
}

impl NicInfo {
    fn new(summary: NicSummary, config: &VdpaConfig, device: Option<DeviceInfo>) -> Self {
        Self {
            summary,
            mac: config.mac.map(|mac| mac.to_string()),
            num_queues: config.num_queues,
            doorbell: config.doorbell,
            device,
        }
    }

    fn plugged(nic: &NicStatus, device: Option<DeviceInfo>) -> Self {
        Self::new(NicSummary::from(nic), &nic.config, device)
    }
}

/// What of a NIC can be changed before the machine starts; what is absent stays.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NicChange {
    /// The vhost-vdpa character device.
    #[schema(value_type = Option<String>)]
    path: Option<PathBuf>,
    /// The MAC address that the guest sees.
    #[schema(schema_with = schema::mac)]
    mac: Option<MacAddress>,
    /// Number of virtqueues, control virtqueue included.
    num_queues: Option<u16>,
    /// Whether the guest gets the device's doorbells.
    #[schema(schema_with = schema::doorbell)]
    doorbell: Option<DoorbellMode>,
}

fn no_such(id: &str) -> ApiError {
    RequestError::NoSuchDevice(id.to_owned()).into()
}

fn position(config: &VmConfig, id: &str) -> Option<usize> {
    config.vdpa.iter().position(|vdpa| vdpa.name() == id)
}

/// A NIC in full
#[utoipa::path(get, path = "/v1/vm/nics/{id}", params(("id" = String, Path, description = "The NIC's name")), responses(
    (status = 200, description = "The NIC", body = NicInfo),
    (status = 400, description = "Not a name", body = ErrorBody),
    (status = 404, description = "There is none of this name", body = ErrorBody),
    (status = 409, description = "The machine has no configuration yet, or has ended", body = ErrorBody),
    (status = 503, description = "Too many requests wait", body = ErrorBody),
))]
pub(super) async fn show(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Json<NicInfo>, ApiError> {
    if !api.is_built() {
        let config = api.config()?;
        let vdpa = config.vdpa.iter().find(|vdpa| vdpa.name() == id);
        let vdpa = vdpa.ok_or_else(|| no_such(&id))?;
        return Ok(Json(NicInfo::new(NicSummary::from(vdpa), vdpa, None)));
    }
    let machine = api.running()?;
    let nic = machine.nic(&id).ok_or_else(|| no_such(&id))?;
    let devices = on_worker(move || machine.devices()).await??;
    // It may have gone in between.
    let device = devices.iter().find(|device| device.id == id);
    let device = device.map(|device| DeviceInfo::from(&device.description));
    Ok(Json(NicInfo::plugged(&nic, device)))
}

/// Give the machine a NIC
///
/// Before it starts: a NIC for later. While it runs or is paused: the device is opened and
/// plugged in; the guest finds it by itself. The same NIC again changes nothing.
#[utoipa::path(put, path = "/v1/vm/nics/{id}", params(("id" = String, Path, description = "The NIC's name")), request_body = VdpaConfig, responses(
    (status = 200, description = "There was one of this name: before the machine starts it is replaced, later it is the same", body = NicInfo),
    (status = 201, description = "It is there now", body = NicInfo),
    (status = 400, description = "Not a name, or the body is not JSON", body = ErrorBody),
    (status = 408, description = "The body did not come in time", body = ErrorBody),
    (status = 409, description = "The machine has another device of this name, no free slot, no configuration yet, or just starts", body = ErrorBody),
    (status = 413, description = "The body is too large", body = ErrorBody),
    (status = 422, description = "An unknown field or a wrong value, named; or the device cannot be used: it is busy, or locked memory is too low", body = ErrorBody),
    (status = 500, description = "The host cannot do it", body = ErrorBody),
    (status = 503, description = "Too many requests wait", body = ErrorBody),
))]
pub(super) async fn put(
    State(api): Api,
    DeviceName(id): DeviceName,
    JsonBody(mut wanted): JsonBody<VdpaConfig>,
) -> Result<Response, ApiError> {
    if let Some(other) = wanted.id.replace(id.clone())
        && other != id
    {
        return Err(HttpError::Invalid {
            at: " at id".to_owned(),
            reason: format!("the path says {id}, the body {other}; leave the body's away"),
        }
        .into());
    }
    let (status, nic) = if api.is_built() {
        let machine = api.running()?;
        on_worker(move || plug(&machine, &wanted)).await??
    } else {
        api.edit(|config| configure(config, wanted))?
    };
    Ok((status, Json(nic)).into_response())
}

fn configure(config: &mut VmConfig, wanted: VdpaConfig) -> Result<(StatusCode, NicInfo), ApiError> {
    let id = wanted.name();
    let mut disks = config.disks.iter().enumerate();
    if disks.any(|(number, disk)| disk.name(number) == id) {
        return Err(RequestError::IdInUse(id).into());
    }
    let nic = NicInfo::new(NicSummary::from(&wanted), &wanted, None);
    let there = position(config, &id).and_then(|at| config.vdpa.get_mut(at));
    Ok(match there {
        Some(there) => {
            *there = wanted;
            (StatusCode::OK, nic)
        }
        None => {
            config.vdpa.push(wanted);
            (StatusCode::CREATED, nic)
        }
    })
}

fn plug(machine: &Handle, wanted: &VdpaConfig) -> Result<(StatusCode, NicInfo), RequestError> {
    let same = |nic: &NicStatus| {
        VdpaConfig {
            // Whether it was named or got its file's name.
            id: Some(nic.id.clone()),
            ..nic.config.clone()
        } == *wanted
    };
    if let Some(nic) = machine.nic(&wanted.name())
        && same(&nic)
    {
        return Ok((StatusCode::OK, NicInfo::plugged(&nic, None)));
    }
    let nic = machine.plug_nic(wanted)?;
    Ok((StatusCode::CREATED, NicInfo::plugged(&nic, None)))
}

/// Change a NIC before the machine starts
#[utoipa::path(patch, path = "/v1/vm/nics/{id}", params(("id" = String, Path, description = "The NIC's name")), request_body = NicChange, responses(
    (status = 200, description = "The NIC as it is now", body = NicInfo),
    (status = 400, description = "Not a name, or the body is not JSON", body = ErrorBody),
    (status = 404, description = "There is none of this name", body = ErrorBody),
    (status = 408, description = "The body did not come in time", body = ErrorBody),
    (status = 409, description = "The machine is built, or has no configuration yet", body = ErrorBody),
    (status = 413, description = "The body is too large", body = ErrorBody),
    (status = 422, description = "An unknown field or a wrong value, named", body = ErrorBody),
))]
pub(super) async fn change(
    State(api): Api,
    DeviceName(id): DeviceName,
    JsonBody(change): JsonBody<NicChange>,
) -> Result<Json<NicInfo>, ApiError> {
    if api.is_built() {
        return Err(api.wrong_state(
            "a plugged NIC stays as it is; take it away with DELETE and give another one with PUT",
        ));
    }
    api.edit(|config| {
        let at = position(config, &id).ok_or_else(|| no_such(&id))?;
        let nic = config.vdpa.get_mut(at).ok_or_else(|| no_such(&id))?;
        // Its name may have come from the path.
        nic.id = Some(id.clone());
        if let Some(path) = change.path {
            nic.path = path;
        }
        nic.mac = change.mac.or(nic.mac);
        nic.num_queues = change.num_queues.or(nic.num_queues);
        nic.doorbell = change.doorbell.unwrap_or(nic.doorbell);
        Ok(Json(NicInfo::new(NicSummary::from(&*nic), nic, None)))
    })
}

/// Take a NIC away
///
/// Before the machine starts it is gone at once. Later the guest is asked to give it up: it is
/// gone, and its device free, when it is no longer listed. A guest that does not answer keeps it
/// until the machine resets; asking again reminds it.
#[utoipa::path(delete, path = "/v1/vm/nics/{id}", params(("id" = String, Path, description = "The NIC's name")), responses(
    (status = 202, description = "The guest is asked: watch it go", body = NicInfo),
    (status = 204, description = "It is gone"),
    (status = 400, description = "Not a name", body = ErrorBody),
    (status = 404, description = "There is none of this name", body = ErrorBody),
    (status = 409, description = "It is another device than a NIC; or the machine has no configuration yet, or just starts", body = ErrorBody),
    (status = 503, description = "Too many requests wait", body = ErrorBody),
))]
pub(super) async fn remove(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Response, ApiError> {
    if api.is_built() {
        let machine = api.running()?;
        let nic = on_worker(move || machine.unplug(&id)).await??;
        let nic = NicInfo::plugged(&nic, None);
        return Ok((StatusCode::ACCEPTED, Json(nic)).into_response());
    }
    api.edit(|config| {
        let at = position(config, &id).ok_or_else(|| no_such(&id))?;
        config.vdpa.remove(at);
        Ok(StatusCode::NO_CONTENT.into_response())
    })
}
