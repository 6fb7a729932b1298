//! `/v1/vm/nics`: NICs, which can be added and removed while the VM runs; see `pluggable.rs`.

use std::path::{Path, PathBuf};

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use bellhop_api::Items;
use bellhop_api::machine::{
    DeviceInfo, FailoverInfo, FailoverPhase, NicChange, NicInfo, NicSummary,
};
use bellhop_api::responses::{
    BusyErrors, HostErrors, NameErrors, NamedBodyErrors, NamedChangeErrors, StateErrors,
};

use super::pluggable::Known;
use super::state::Api;
use super::{descriptors, pluggable};
use crate::api::error::ApiError;
use crate::config::{DeviceSource, DoorbellMode, VdpaConfig};
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;
use crate::http::parameters::DeviceName;
use crate::http::{ErrorBody, HttpError};
use crate::machine::{Failover, FailoverState, Handle, NicStatus, RequestError};

impl From<&NicStatus> for NicSummary {
    fn from(nic: &NicStatus) -> Self {
        Self {
            id: nic.id.clone(),
            state: nic.state,
            path: nic.config.shown_path().into_owned(),
            address: Some(nic.address.to_string()),
        }
    }
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

fn info(summary: NicSummary, config: &VdpaConfig, device: Option<DeviceInfo>) -> NicInfo {
    NicInfo {
        summary,
        mac: config.mac.map(|mac| mac.to_string()),
        mac_lock: config.mac_lock,
        standby: config.standby,
        num_queues: config.num_queues,
        doorbell: config.doorbell,
        iommu: config.iommu,
        stall_kick: config.stall_kick,
        backup: config.backup.as_ref().map(shown),
        last_failover: None,
        numa_node: None,
        numa_warning: None,
        device,
    }
}

impl From<Known<VdpaConfig>> for NicInfo {
    fn from(nic: Known<VdpaConfig>) -> Self {
        match nic {
            Known::Configured(config) => info(NicSummary::from(&config), &config, None),
            Known::Plugged {
                device,
                info: guest,
            } => Self {
                numa_node: device.numa_node,
                numa_warning: device.numa_warning.clone(),
                last_failover: device.failover.as_deref().map(FailoverInfo::from),
                ..info(NicSummary::from(&device), &device.config, guest)
            },
        }
    }
}

/// The device in a change, if it has one.
fn source(change: &NicChange) -> Result<Option<DeviceSource>, HttpError> {
    match (&change.path, change.fd) {
        (None, None) => Ok(None),
        (Some(path), None) => Ok(Some(DeviceSource::Path(path.clone()))),
        (None, Some(number)) => Ok(Some(DeviceSource::Number(number))),
        (Some(_), Some(_)) => Err(HttpError::Invalid {
            at: String::new(),
            reason: "both `path` and `fd` are given: give one of them".to_owned(),
        }),
    }
}

/// Whether the change contains only the device or its backup.
fn is_devices_alone(change: &NicChange) -> bool {
    matches!(
        change,
        NicChange {
            path: _,
            fd: _,
            backup: _,
            mac: None,
            mac_lock: None,
            standby: None,
            num_queues: None,
            doorbell: None,
            iommu: None,
            stall_kick: None,
        }
    )
}

/// List NICs
///
/// Before the machine is built, these are the vDPA devices of its configuration, which are not
/// opened yet.
#[utoipa::path(get, path = "/v1/vm/nics", operation_id = "list_nics", responses(
    (status = 200, description = "All NICs", body = Items<NicSummary>),
    StateErrors,
))]
pub(super) async fn list(State(api): Api) -> Result<Json<Items<NicSummary>>, ApiError> {
    if api.is_built() {
        return Ok(Json(api.view().nics.into_iter().collect()));
    }
    let config = api.config()?;
    Ok(Json(config.vdpa.iter().map(NicSummary::from).collect()))
}

/// Read a NIC
///
/// With its queues, features and last failover once the machine is built.
#[utoipa::path(get, path = "/v1/vm/nics/{id}", operation_id = "get_nic",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The NIC's name")), responses(
    (status = 200, description = "The NIC", body = NicInfo),
    NameErrors, BusyErrors,
))]
pub(super) async fn show(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Json<NicInfo>, ApiError> {
    pluggable::show::<VdpaConfig>(&api, &id).await
}

/// Add a NIC
///
/// Before the machine starts, the NIC is added to its configuration. Later, its device is opened
/// and plugged; the guest finds it by itself. An identical NIC changes nothing. With `fd` the
/// device is a descriptor that comes with the request, as for `PUT /v1/vm`.
#[utoipa::path(put, path = "/v1/vm/nics/{id}", operation_id = "put_nic",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The NIC's name")),
    request_body = VdpaConfig, responses(
    (status = 200, description = "A NIC of this name existed: a NIC that is not plugged yet is \
        replaced, a plugged one is identical", body = NicInfo),
    (status = 201, description = "Created", body = NicInfo),
    NamedBodyErrors, HostErrors,
))]
pub(super) async fn put(
    State(api): Api,
    DeviceName(id): DeviceName,
    received: Received,
    JsonBody(mut wanted): JsonBody<VdpaConfig>,
) -> Result<Response, ApiError> {
    // A device that arrives as a descriptor has no other name.
    wanted.id.get_or_insert_with(|| id.clone());
    descriptors::give(&received, [&mut wanted], [])?;
    pluggable::put(&api, id, wanted).await
}

/// Change a NIC, or move it to another vDPA device
///
/// Before the machine starts, every member can change. Later, only its device (`path` or `fd`) and
/// `backup` can change.
///
/// A move keeps the PCI function, MAC address, control state and rings. The guest gets a spurious
/// interrupt and announces itself if it can. The new device must offer all negotiated features and
/// as many queues. A refusal changes nothing. If the new device fails to start, the old one
/// continues. An identical device changes nothing.
///
/// `backup` names the NIC's backup device. When the present device reports DEVICE_NEEDS_RESET, or
/// the host removes it, the NIC moves to the backup once, in the same way. `last_failover` has the
/// result, and the generation of the machine increases. If the move fails, the driver receives its
/// device's report.
#[utoipa::path(patch, path = "/v1/vm/nics/{id}", operation_id = "patch_nic",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The NIC's name")),
    request_body = NicChange, responses(
    (status = 200, description = "The changed NIC", body = NicInfo),
    NamedChangeErrors, HostErrors,
    (status = 500, description = "The host cannot do it; or the new device did not start and \
        the old one not again: the guest's driver has to reset the NIC", body = ErrorBody),
))]
pub(super) async fn change(
    State(api): Api,
    DeviceName(id): DeviceName,
    received: Received,
    JsonBody(change): JsonBody<NicChange>,
) -> Result<Json<NicInfo>, ApiError> {
    let mut device = source(&change)?.map(|source| on_device(&id, source));
    descriptors::give(&received, &mut device, [])?;
    // Before any device moves.
    if let (Some(device), Some(backup)) = (&device, &change.backup) {
        check_backup(device, backup.as_deref())?;
    }
    if api.is_built() && is_devices_alone(&change) {
        let source = device.map(|device| device.source);
        let changed = api.ask(move |machine| change_devices(machine, &id, source, change.backup));
        let nic = changed.await?;
        let nic = nic.ok_or_else(|| api.wrong_state(pluggable::UNCHANGING))?;
        return Ok(Json(Known::from(nic).into()));
    }
    pluggable::change(&api, &id, |nic: &mut VdpaConfig| {
        if let Some(device) = device {
            nic.source = device.source;
        }
        nic.mac = change.mac.or(nic.mac);
        nic.mac_lock = change.mac_lock.unwrap_or(nic.mac_lock);
        nic.standby = change.standby.unwrap_or(nic.standby);
        nic.num_queues = change.num_queues.or(nic.num_queues);
        nic.doorbell = change.doorbell.unwrap_or(nic.doorbell);
        nic.iommu = change.iommu.unwrap_or(nic.iommu);
        nic.stall_kick = change.stall_kick.unwrap_or(nic.stall_kick);
        if let Some(backup) = change.backup {
            nic.backup = backup;
        }
        Ok(check_backup(nic, nic.backup.as_deref())?)
    })
}

/// Checks the backup device of a NIC.
fn check_backup(nic: &VdpaConfig, backup: Option<&Path>) -> Result<(), RequestError> {
    match backup {
        Some(backup) if nic.is_at(backup) => Err(RequestError::OwnBackup(nic.name())),
        _ => Ok(()),
    }
}

/// A NIC with this device and default settings.
fn on_device(id: &str, source: DeviceSource) -> VdpaConfig {
    VdpaConfig {
        source,
        id: Some(id.to_owned()),
        mac: None,
        mac_lock: false,
        standby: false,
        num_queues: None,
        doorbell: DoorbellMode::default(),
        iommu: false,
        stall_kick: false,
        backup: None,
    }
}

/// Changes the devices of a running VM's NIC; `None` if there is no change.
fn change_devices(
    machine: &Handle,
    id: &str,
    source: Option<DeviceSource>,
    backup: Option<Option<PathBuf>>,
) -> Result<Option<NicStatus>, RequestError> {
    let moved = source.map(|source| swap(machine, id, source)).transpose()?;
    match backup {
        Some(backup) => machine.set_backup(id, backup).map(Some),
        None => Ok(moved),
    }
}

/// Moves a NIC of a running VM to another device.
fn swap(machine: &Handle, id: &str, source: DeviceSource) -> Result<NicStatus, RequestError> {
    let config = match machine.nic(id) {
        Some(nic) => VdpaConfig {
            source,
            ..nic.config
        },
        // The VM reports the NIC of this name.
        None => on_device(id, source),
    };
    Ok(machine.swap_nic(id, &config)?.status)
}

/// Remove a NIC
///
/// Before the machine starts, it is removed at once. Later, the guest is asked to release it. The
/// NIC is gone, and its device free, when it is no longer listed. A guest that does not respond
/// keeps it until the machine resets. Another request asks the guest again.
#[utoipa::path(delete, path = "/v1/vm/nics/{id}", operation_id = "delete_nic",
    params(("id" = String, Path, pattern = "^[A-Za-z0-9._:-]{1,64}$",
        description = "The NIC's name")), responses(
    (status = 202, description = "The guest is asked to release it", body = NicInfo),
    (status = 204, description = "Deleted"),
    NameErrors, BusyErrors,
))]
pub(super) async fn remove(
    State(api): Api,
    DeviceName(id): DeviceName,
) -> Result<Response, ApiError> {
    pluggable::remove::<VdpaConfig>(&api, id).await
}
