//! `/v1/vm/nics/{id}`: one NIC, which comes and goes also while the machine runs; see
//! `pluggable.rs`.

use std::path::{Path, PathBuf};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::descriptors::Descriptors;
use super::device::DeviceInfo;
use super::nics::NicSummary;
use super::pluggable::Known;
use super::{Api, pluggable};
use crate::api::error::ApiError;
use crate::config::{DoorbellMode, MacAddress, VdpaConfig, VdpaSource, schema};
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;
use crate::http::parameters::DeviceName;
use crate::http::{ErrorBody, HttpError, on_worker};
use crate::machine::{Failover, FailoverState, Handle, NicStatus, RequestError};

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
    /// Whether a queue that hangs is kicked and its driver interrupted.
    rescue: bool,
    /// The vhost-vdpa character device to which it moves, once, if its own says that it needs a reset.
    failover: Option<String>,
    /// What came of it when its device said so, until somebody moves it.
    last_failover: Option<FailoverInfo>,
    /// The NUMA node of the host that it hangs on, once the machine is built and where the
    /// host says so.
    numa_node: Option<u16>,
    /// Said where guest memory is bound to another node.
    numa_warning: Option<String>,
    /// What the guest made of it, once the machine is built.
    device: Option<DeviceInfo>,
}

/// How far a failover is.
#[derive(Debug, Serialize, ToSchema)]
pub(super) enum FailoverPhase {
    /// The other device is being opened; the guest's driver has not been told that its own has failed.
    UnderWay,
    /// The NIC is on the other device.
    Done,
    /// The NIC is on the device that has failed, and needs a reset by the guest's driver.
    Failed,
}

/// A failover of a NIC.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct FailoverInfo {
    /// How far it is.
    state: FailoverPhase,
    /// The device that has failed.
    from: String,
    /// The device that was to take its place.
    to: String,
    /// For how long neither device worked, in microseconds, as the machine saw it: from when the other one was open. None
    /// if no driver was using the NIC by then.
    gap_us: Option<u64>,
    /// Why it failed.
    error: Option<String>,
}

impl From<&Failover> for FailoverInfo {
    fn from(failover: &Failover) -> Self {
        let (state, gap, error) = match &failover.state {
            FailoverState::UnderWay => (FailoverPhase::UnderWay, None, None),
            FailoverState::Done { gap } => (FailoverPhase::Done, *gap, None),
            FailoverState::Failed(error) => (FailoverPhase::Failed, None, Some(error.clone())),
        };
        Self {
            state,
            from: failover.from.clone(),
            to: shown(&failover.to),
            gap_us: gap.map(|gap| u64::try_from(gap.as_micros()).unwrap_or(u64::MAX)),
            error,
        }
    }
}

fn shown(path: impl AsRef<Path>) -> String {
    path.as_ref().display().to_string()
}

impl NicInfo {
    fn new(summary: NicSummary, config: &VdpaConfig, device: Option<DeviceInfo>) -> Self {
        Self {
            summary,
            mac: config.mac.map(|mac| mac.to_string()),
            num_queues: config.num_queues,
            doorbell: config.doorbell,
            rescue: config.rescue,
            failover: config.failover.as_ref().map(shown),
            last_failover: None,
            numa_node: None,
            numa_warning: None,
            device,
        }
    }
}

impl From<Known<VdpaConfig>> for NicInfo {
    fn from(nic: Known<VdpaConfig>) -> Self {
        match nic {
            Known::Configured(config) => Self::new(NicSummary::from(&config), &config, None),
            Known::Plugged { device, info } => Self {
                numa_node: device.numa_node,
                numa_warning: device.numa_warning.clone(),
                last_failover: device.failover.as_deref().map(FailoverInfo::from),
                ..Self::new(NicSummary::from(&device), &device.config, info)
            },
        }
    }
}

/// What of a NIC can be changed; what is absent stays. While the machine runs it is its devices alone: `path` or `fd`, and
/// `failover`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NicChange {
    /// The vhost-vdpa character device. Either this or `fd`.
    #[schema(value_type = Option<String>)]
    path: Option<PathBuf>,
    /// The vhost-vdpa device as a descriptor, open for reading and writing: the index, from 0, among those
    /// that came with the request (SCM_RIGHTS).
    fd: Option<u32>,
    /// The MAC address that the guest sees.
    #[schema(schema_with = schema::mac)]
    mac: Option<MacAddress>,
    /// Number of virtqueues, control virtqueue included.
    num_queues: Option<u16>,
    /// Whether the guest gets the device's doorbells.
    #[schema(schema_with = schema::doorbell_change)]
    doorbell: Option<DoorbellMode>,
    /// Whether a queue that hangs is kicked and its driver interrupted.
    rescue: Option<bool>,
    /// The vhost-vdpa character device to which the NIC moves, once, if its own says that it needs a reset; null: none.
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = Option<String>)]
    failover: Option<Option<PathBuf>>,
}

/// A field that is there, also if it is null.
fn given<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Option<PathBuf>>, D::Error> {
    Option::deserialize(field).map(Some)
}

impl NicChange {
    /// The device, if one is named.
    fn source(&self) -> Result<Option<VdpaSource>, HttpError> {
        match (&self.path, self.fd) {
            (None, None) => Ok(None),
            (Some(path), None) => Ok(Some(VdpaSource::Path(path.clone()))),
            (None, Some(number)) => Ok(Some(VdpaSource::Number(number))),
            (Some(_), Some(_)) => Err(HttpError::Invalid {
                at: String::new(),
                reason: "both `path` and `fd` are given: a device has one of them".to_owned(),
            }),
        }
    }

    /// Whether nothing but the device, or the one that stands by for it, is to change.
    fn is_devices_alone(&self) -> bool {
        matches!(
            self,
            Self {
                path: _,
                fd: _,
                failover: _,
                mac: None,
                num_queues: None,
                doorbell: None,
                rescue: None,
            }
        )
    }
}

/// A NIC in full
#[utoipa::path(get, path = "/v1/vm/nics/{id}", operation_id = "get_nic",
    params(("id" = String, Path, description = "The NIC's name")), responses(
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
    let nic = pluggable::show::<VdpaConfig>(&api, &id).await?;
    Ok(Json(nic.into()))
}

/// Give the machine a NIC
///
/// Before it starts: a NIC for later. While it runs or is paused: the device is opened and
/// plugged in; the guest finds it by itself. The same NIC again changes nothing. With `fd` the device comes as a
/// descriptor with the request (SCM_RIGHTS); what `PUT /v1/vm` says of those holds here too.
#[utoipa::path(put, path = "/v1/vm/nics/{id}", operation_id = "put_nic",
    params(("id" = String, Path, description = "The NIC's name")), request_body = VdpaConfig, responses(
    (status = 200, description = "There was one of this name: before the machine starts it is replaced, later it is the same", body = NicInfo),
    (status = 201, description = "It is there now", body = NicInfo),
    (status = 400, description = "Not a name, or the body is not JSON", body = ErrorBody),
    (status = 408, description = "The body did not come in time", body = ErrorBody),
    (status = 409, description = "The machine has another device of this name, no free slot, no configuration yet, or just starts", body = ErrorBody),
    (status = 413, description = "The body is too large", body = ErrorBody),
    (status = 422, description = "An unknown field or a wrong value, named; or the device cannot be used: it is busy, locked memory is too low, or it is a descriptor that did not come along or is no vDPA device", body = ErrorBody),
    (status = 500, description = "The host cannot do it", body = ErrorBody),
    (status = 503, description = "Too many requests wait", body = ErrorBody),
))]
pub(super) async fn put(
    State(api): Api,
    DeviceName(id): DeviceName,
    received: Received,
    JsonBody(mut wanted): JsonBody<VdpaConfig>,
) -> Result<Response, ApiError> {
    // One that comes as a descriptor has no other name.
    wanted.id.get_or_insert_with(|| id.clone());
    let mut descriptors = Descriptors::of(&received)?;
    wanted.take_descriptor(|number| descriptors.take(number))?;
    drop(descriptors);
    let (status, nic) = pluggable::put(&api, id, wanted).await?;
    Ok((status, Json(NicInfo::from(nic))).into_response())
}

/// Change a NIC; while the machine runs, move it to another vDPA device
///
/// Before the machine starts anything can change. Later it is the device (`path`, or `fd` as `PUT` has it), and the guest goes on with it: same PCI
/// function, MAC address, control state and rings; it gets a spurious interrupt, and announces itself if it knows how.
/// The new device must offer what the guest's driver has negotiated and have the same number of queues. A refusal
/// changes nothing; if the new device fails at the last moment the old one goes on. The same device again changes
/// nothing.
///
/// With `failover` another device stands by. If the present one says that it needs a reset (DEVICE_NEEDS_RESET) the NIC moves
/// there by itself, in the same way, once; afterwards none stands by. What came of it is `last_failover`, and the machine's
/// generation grows. If it fails the guest's driver is told what its device said.
#[utoipa::path(patch, path = "/v1/vm/nics/{id}", operation_id = "patch_nic",
    params(("id" = String, Path, description = "The NIC's name")), request_body = NicChange, responses(
    (status = 200, description = "The NIC as it is now", body = NicInfo),
    (status = 400, description = "Not a name, or the body is not JSON", body = ErrorBody),
    (status = 404, description = "There is none of this name", body = ErrorBody),
    (status = 408, description = "The body did not come in time", body = ErrorBody),
    (status = 409, description = "The machine is built and not just its devices are to change, the old device cannot hand over now, it is another device than a NIC, or the machine has no configuration yet", body = ErrorBody),
    (status = 413, description = "The body is too large", body = ErrorBody),
    (status = 422, description = "An unknown field or a wrong value, named; or the new device cannot be used: it is busy, does not fit (what is missing is named), does not start, or is a descriptor that did not come along or is no vDPA device", body = ErrorBody),
    (status = 500, description = "The host cannot do it; or the new device did not start and the old one not again: the guest's driver has to reset the NIC", body = ErrorBody),
    (status = 503, description = "Too many requests wait", body = ErrorBody),
))]
pub(super) async fn change(
    State(api): Api,
    DeviceName(id): DeviceName,
    received: Received,
    JsonBody(change): JsonBody<NicChange>,
) -> Result<Json<NicInfo>, ApiError> {
    let mut device = change.source()?.map(|source| on_device(&id, source));
    let mut descriptors = Descriptors::of(&received)?;
    if let Some(device) = &mut device {
        device.take_descriptor(|number| descriptors.take(number))?;
    }
    drop(descriptors);
    // Before anything moves.
    if let (Some(device), Some(failover)) = (&device, &change.failover) {
        check_failover(device, failover.as_deref())?;
    }
    if api.is_built() && change.is_devices_alone() {
        let machine = api.running()?;
        let source = device.map(|device| device.source);
        let changed = on_worker(move || change_devices(&machine, &id, source, change.failover));
        let nic = changed.await??;
        let nic = nic.ok_or_else(|| api.wrong_state(pluggable::UNCHANGING))?;
        return Ok(Json(Known::from(nic).into()));
    }
    let nic = pluggable::change(&api, &id, |nic: &mut VdpaConfig| {
        if let Some(device) = device {
            nic.source = device.source;
        }
        nic.mac = change.mac.or(nic.mac);
        nic.num_queues = change.num_queues.or(nic.num_queues);
        nic.doorbell = change.doorbell.unwrap_or(nic.doorbell);
        nic.rescue = change.rescue.unwrap_or(nic.rescue);
        if let Some(failover) = change.failover {
            nic.failover = failover;
        }
        Ok(check_failover(nic, nic.failover.as_deref())?)
    })?;
    Ok(Json(nic.into()))
}

/// Another device is to take a NIC's place.
fn check_failover(nic: &VdpaConfig, failover: Option<&Path>) -> Result<(), RequestError> {
    match failover {
        Some(failover) if nic.is_at(failover) => Err(RequestError::OwnFailover(nic.name())),
        _ => Ok(()),
    }
}

/// A NIC of which no more than the device is known.
fn on_device(id: &str, source: VdpaSource) -> VdpaConfig {
    VdpaConfig {
        source,
        id: Some(id.to_owned()),
        mac: None,
        num_queues: None,
        doorbell: DoorbellMode::default(),
        rescue: false,
        failover: None,
    }
}

/// Changes the devices of a running machine's NIC; `None` if nothing is to change.
fn change_devices(
    machine: &Handle,
    id: &str,
    source: Option<VdpaSource>,
    failover: Option<Option<PathBuf>>,
) -> Result<Option<NicStatus>, RequestError> {
    let moved = source.map(|source| swap(machine, id, source)).transpose()?;
    match failover {
        Some(failover) => machine.set_failover(id, failover).map(Some),
        None => Ok(moved),
    }
}

/// Moves a NIC of a running machine to another device.
fn swap(machine: &Handle, id: &str, source: VdpaSource) -> Result<NicStatus, RequestError> {
    let config = match machine.nic(id) {
        Some(nic) => VdpaConfig {
            source,
            ..nic.config
        },
        // The machine says what it has of this name.
        None => on_device(id, source),
    };
    Ok(machine.swap_nic(id, &config)?.status)
}

/// Take a NIC away
///
/// Before the machine starts it is gone at once. Later the guest is asked to give it up: it is
/// gone, and its device free, when it is no longer listed. A guest that does not answer keeps it
/// until the machine resets; asking again reminds it.
#[utoipa::path(delete, path = "/v1/vm/nics/{id}", operation_id = "delete_nic",
    params(("id" = String, Path, description = "The NIC's name")), responses(
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
    Ok(match pluggable::remove::<VdpaConfig>(&api, id).await? {
        Some(nic) => (StatusCode::ACCEPTED, Json(NicInfo::from(nic))).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}
