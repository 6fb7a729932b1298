//! The common part of the endpoints of NICs, disks and functions of the host. These pluggable
//! devices belong to the configuration before boot and to the VM afterwards.
//!
//! Owns the choice between these two, and the effect of each method. It must not know the
//! configuration of a kind of device, nor its description. A plugged device cannot change, except
//! for the vDPA device of a NIC (`nic.rs`).

use std::sync::Arc;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::machine::{DeviceInfo, DiskInfo, NicInfo, VfioInfo};
use serde::Serialize;

use crate::api::controller::Controller;
use crate::api::error::ApiError;
use crate::config::{DiskConfig, VdpaConfig, VfioConfig, VmConfig};
use crate::http::HttpError;
use crate::machine::{DiskStatus, Handle, NicStatus, Pluggable, RequestError, VfioStatus};

/// A kind of pluggable device, implemented by its configuration.
pub(super) trait Kind: Clone + PartialEq + Send + 'static {
    /// The description for clients.
    type Info: From<Known<Self>> + Serialize;

    /// The list in the configuration.
    fn list(config: &mut VmConfig) -> &mut Vec<Self>;
    /// Its name, once it has one: see [`name_all`].
    fn id(&mut self) -> &mut Option<String>;
    /// The configuration in the form in which the VM reports a plugged device.
    fn plugged(&self) -> Self;
    fn find(machine: &Handle, id: &str) -> Option<Pluggable<Self>>;
    fn plug(&self, machine: &Handle, id: &str) -> Result<Pluggable<Self>, RequestError>;
    fn unplug(machine: &Handle, id: &str) -> Result<Pluggable<Self>, RequestError>;
}

impl Kind for VdpaConfig {
    type Info = NicInfo;

    fn list(config: &mut VmConfig) -> &mut Vec<Self> {
        &mut config.vdpa
    }

    fn id(&mut self) -> &mut Option<String> {
        &mut self.id
    }

    fn plugged(&self) -> Self {
        self.released()
    }

    fn find(machine: &Handle, id: &str) -> Option<NicStatus> {
        machine.nic(id)
    }

    fn plug(&self, machine: &Handle, _id: &str) -> Result<NicStatus, RequestError> {
        machine.plug_nic(self)
    }

    fn unplug(machine: &Handle, id: &str) -> Result<NicStatus, RequestError> {
        machine.unplug_nic(id)
    }
}

impl Kind for DiskConfig {
    type Info = DiskInfo;

    fn list(config: &mut VmConfig) -> &mut Vec<Self> {
        &mut config.disks
    }

    fn id(&mut self) -> &mut Option<String> {
        &mut self.id
    }

    fn plugged(&self) -> Self {
        self.clone()
    }

    fn find(machine: &Handle, id: &str) -> Option<DiskStatus> {
        machine.disk(id)
    }

    fn plug(&self, machine: &Handle, id: &str) -> Result<DiskStatus, RequestError> {
        machine.plug_disk(id, self)
    }

    fn unplug(machine: &Handle, id: &str) -> Result<DiskStatus, RequestError> {
        machine.unplug_disk(id)
    }
}

impl Kind for VfioConfig {
    type Info = VfioInfo;

    fn list(config: &mut VmConfig) -> &mut Vec<Self> {
        &mut config.vfio
    }

    fn id(&mut self) -> &mut Option<String> {
        &mut self.id
    }

    fn plugged(&self) -> Self {
        self.released()
    }

    fn find(machine: &Handle, id: &str) -> Option<VfioStatus> {
        machine.vfio(id)
    }

    fn plug(&self, machine: &Handle, _id: &str) -> Result<VfioStatus, RequestError> {
        machine.plug_vfio(self)
    }

    fn unplug(machine: &Handle, id: &str) -> Result<VfioStatus, RequestError> {
        machine.unplug_vfio(id)
    }
}

/// The current state of a device; its configuration contains its name.
#[derive(Debug)]
pub(super) enum Known<C> {
    /// It is added when the VM starts.
    Configured(C),
    /// It is plugged into the VM.
    Plugged {
        device: Pluggable<C>,
        /// Its state in the guest, if queried.
        info: Option<DeviceInfo>,
    },
}

impl<C> From<Pluggable<C>> for Known<C> {
    fn from(device: Pluggable<C>) -> Self {
        Self::Plugged { device, info: None }
    }
}

fn no_such(id: &str) -> ApiError {
    RequestError::NoSuchDevice(id.to_owned()).into()
}

/// Gives each device its effective name, so that it keeps the name when others are added or
/// removed. A disk without a name gets one from its position in the list (`disk0`).
fn name_all(config: &mut VmConfig) {
    for nic in &mut config.vdpa {
        nic.id = Some(nic.name());
    }
    for (number, disk) in config.disks.iter_mut().enumerate() {
        disk.id = Some(disk.name(number));
    }
    for function in &mut config.vfio {
        function.id = Some(function.name());
    }
}

/// The index of the device with this name; all of them have one.
fn position<C: Kind>(config: &mut VmConfig, id: &str) -> Option<usize> {
    let mut devices = C::list(config).iter_mut();
    devices.position(|device| device.id().as_deref() == Some(id))
}

/// The device `id`, with its state in the guest.
pub(super) async fn show<C: Kind>(api: &Controller, id: &str) -> Result<Json<C::Info>, ApiError> {
    if !api.is_built() {
        let mut config = api.config()?;
        name_all(&mut config);
        let at = position::<C>(&mut config, id).ok_or_else(|| no_such(id))?;
        let configured = C::list(&mut config).swap_remove(at);
        return Ok(Json(Known::Configured(configured).into()));
    }
    let device = C::find(&api.running()?, id).ok_or_else(|| no_such(id))?;
    let devices = api.ask(|machine| machine.devices()).await?;
    // It may have been removed in between.
    let info = devices.iter().find(|device| device.id == id);
    let info = info.map(DeviceInfo::from);
    Ok(Json(Known::Plugged { device, info }.into()))
}

/// Ensures that the device `id` exists as `wanted`, now or when the VM starts.
pub(super) async fn put<C: Kind>(
    api: &Arc<Controller>,
    id: String,
    mut wanted: C,
) -> Result<Response, ApiError> {
    if let Some(other) = wanted.id().replace(id.clone())
        && other != id
    {
        return Err(HttpError::Invalid {
            at: "/id".to_owned(),
            reason: format!("the path has {id}, the body {other}; omit the body's"),
        }
        .into());
    }
    let (status, device) = if api.is_built() {
        let plugged = api.ask(move |machine| plug(machine, &id, &wanted));
        plugged.await?
    } else {
        api.edit(|config| configure(config, id, wanted))?
    };
    Ok((status, Json(C::Info::from(device))).into_response())
}

fn configure<C: Kind>(
    config: &mut VmConfig,
    id: String,
    wanted: C,
) -> Result<(StatusCode, Known<C>), ApiError> {
    let mut named = config.clone();
    name_all(&mut named);
    let at = position::<C>(&mut named, &id);
    let is_nic = position::<VdpaConfig>(&mut named, &id).is_some();
    let is_disk = position::<DiskConfig>(&mut named, &id).is_some();
    let is_vfio = position::<VfioConfig>(&mut named, &id).is_some();
    if at.is_none() && (is_nic || is_disk || is_vfio) {
        return Err(RequestError::IdInUse(id).into());
    }
    let devices = C::list(&mut named);
    let status = match at.and_then(|at| devices.get_mut(at)) {
        Some(there) => {
            *there = wanted.clone();
            StatusCode::OK
        }
        None => {
            devices.push(wanted.clone());
            StatusCode::CREATED
        }
    };
    *config = named;
    Ok((status, Known::Configured(wanted)))
}

fn plug<C: Kind>(
    machine: &Handle,
    id: &str,
    wanted: &C,
) -> Result<(StatusCode, Known<C>), RequestError> {
    if let Some(device) = C::find(machine, id)
        && device.config == wanted.plugged()
    {
        return Ok((StatusCode::OK, device.into()));
    }
    let device = wanted.plug(machine, id)?;
    Ok((StatusCode::CREATED, device.into()))
}

/// Why a plugged device cannot change.
pub(super) const UNCHANGING: &str = "of a plugged device only the path of a NIC and its backup \
     device can change, in a request of their own; DELETE it and PUT another device";

/// Changes the device `id` before the VM starts. If `change` fails, the device is unchanged.
pub(super) fn change<C: Kind>(
    api: &Controller,
    id: &str,
    change: impl FnOnce(&mut C) -> Result<(), ApiError>,
) -> Result<Json<C::Info>, ApiError> {
    if api.is_built() {
        return Err(api.wrong_state(UNCHANGING));
    }
    api.edit(|config| {
        name_all(config);
        let at = position::<C>(config, id).ok_or_else(|| no_such(id))?;
        let device = C::list(config).get_mut(at).ok_or_else(|| no_such(id))?;
        let mut changed = device.clone();
        change(&mut changed)?;
        device.clone_from(&changed);
        Ok(Json(Known::Configured(changed).into()))
    })
}

/// Removes the device `id`, at once or by a request to the guest.
pub(super) async fn remove<C: Kind>(
    api: &Arc<Controller>,
    id: String,
) -> Result<Response, ApiError> {
    if api.is_built() {
        let device = api.ask(move |machine| C::unplug(machine, &id)).await?;
        let info = C::Info::from(device.into());
        return Ok((StatusCode::ACCEPTED, Json(info)).into_response());
    }
    api.edit(|config| {
        name_all(config);
        let at = position::<C>(config, &id).ok_or_else(|| no_such(&id))?;
        C::list(config).remove(at);
        Ok(StatusCode::NO_CONTENT.into_response())
    })
}
