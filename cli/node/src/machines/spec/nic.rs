//! A NIC of a VM, as clients write it and after validation.
//!
//! It may have a backup: another vDPA device, to which the NIC moves when its own fails. A backup
//! that is created (`from`) has the settings of the NIC's own device: address, MTU, queue pairs,
//! connection, rates. So only a NIC whose own device is created, too, can have such a backup. Only
//! software polls and is at queues of ports, so a backup of hardware does neither.
//!
//! Owns the valid combinations of its settings.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use bellhop_api::node::{HostNicSpec, NicBackup, NicKind, NicSettings};
use bellhop_common::text::address;
use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};
use vdpa_mgmt::connectivity::Connectivity;
use vdpa_mgmt::link::VlanId;
use vdpa_mgmt::nic::{Kind, NicRequest, PortQueue, SOFTWARE};
use vdpa_mgmt::sriov::Rates;
use vdpa_mgmt::{Error as MgmtError, NetConfig};
use vmm::config::{DeviceSource, MacAddress, VdpaConfig};

use super::{NicId, VmName};
use crate::error::Error;

/// The MTU of Ethernet, in bytes.
const MTU: u16 = 1500;

/// The source of a NIC's device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NicSource {
    /// The device is created for the VM with these settings; the VM adds name and owner.
    From(Box<NicRequest>),
    /// The device exists already.
    There(ExistingDevice),
}

/// A vDPA device that exists already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExistingDevice {
    /// Its character device.
    Path(PathBuf),
    /// Its name.
    Name(String),
}

/// A validated NIC of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NicSettings", into = "NicSettings")]
pub(crate) struct NicSpec {
    id: NicId,
    source: NicSource,
    backup: Option<NicSource>,
    raw: NicSettings,
}

impl NicSpec {
    pub(crate) fn id(&self) -> &NicId {
        &self.id
    }

    pub(crate) fn source(&self) -> &NicSource {
        &self.source
    }

    /// Whether the guest's IOMMU decides which memory it reaches.
    pub(crate) fn is_behind_iommu(&self) -> bool {
        self.raw.iommu
    }

    /// The requested address; none: the device's own.
    pub(crate) fn mac(&self) -> Option<MacAddress> {
        self.raw.mac
    }

    /// The same NIC on an existing device. Settings for created devices are dropped. The backup is
    /// dropped, too, if it is that device or was to be created.
    pub(crate) fn moved_to(&self, device: ExistingDevice) -> Self {
        let other = NicSource::There(device.clone());
        let keeps = |backup: &NicSource| matches!(backup, NicSource::There(_)) && *backup != other;
        let backup = self.backup.clone().filter(keeps);
        let given = self.raw.backup.clone().filter(|_| backup.is_some());
        let (path, name) = match device {
            ExistingDevice::Path(path) => (Some(path), None),
            ExistingDevice::Name(name) => (None, Some(name)),
        };
        let raw = NicSettings {
            id: Some(self.id.clone()),
            path,
            device: name,
            mac: self.raw.mac,
            mac_lock: self.raw.mac_lock,
            standby: self.raw.standby,
            doorbell: self.raw.doorbell,
            iommu: self.raw.iommu,
            stall_kick: self.raw.stall_kick,
            backup: given,
            ..NicSettings::default()
        };
        Self {
            id: self.id.clone(),
            source: other,
            backup,
            raw,
        }
    }

    /// The NIC's configuration for the VM on this device, with the character device `backup` as
    /// its backup.
    pub(crate) fn vdpa(&self, source: DeviceSource, backup: Option<PathBuf>) -> VdpaConfig {
        VdpaConfig {
            source,
            id: Some(self.id.to_string()),
            mac: self.raw.mac,
            mac_lock: self.raw.mac_lock,
            standby: self.raw.standby,
            num_queues: None,
            doorbell: self.raw.doorbell,
            iommu: self.raw.iommu,
            stall_kick: self.raw.stall_kick,
            backup,
        }
    }

    /// The NIC that another node is to create for the same guest: on `from` there, if given,
    /// otherwise on the source named as here. Settings that the device here has without a request
    /// are requested there.
    ///
    /// # Errors
    /// `from` is not possible for this NIC.
    pub(crate) fn elsewhere(
        &self,
        from: Option<&str>,
        device: Option<&NetConfig>,
    ) -> Result<Self, Error> {
        let mut raw = self.raw.clone();
        if let Some(from) = from {
            keep_for(&mut raw, from);
            raw.from = Some(from.to_owned());
            raw.path = None;
            raw.device = None;
            // These concern the NIC of this host.
            raw.kind = NicKind::default();
            raw.virtual_functions = None;
            raw.backup = raw.backup.map(|_| NicBackup::created_from(from));
        }
        if raw.from.is_some() {
            has_as(&mut raw, device);
        }
        Self::try_from(raw).map_err(not_a_nic)
    }

    /// The device to create for `vm`; none if it exists already.
    pub(crate) fn request(&self, vm: &VmName) -> Option<NicRequest> {
        match &self.source {
            NicSource::From(request) => Some(NicRequest {
                name: vm.device(&self.id),
                owner: Some(vm.owner(&self.id)),
                ..(**request).clone()
            }),
            NicSource::There(_) => None,
        }
    }

    /// The NIC's device; one that is created has a derived name.
    pub(crate) fn device(&self, vm: &VmName) -> ExistingDevice {
        match &self.source {
            NicSource::From(_) => ExistingDevice::Name(vm.device(&self.id)),
            NicSource::There(device) => device.clone(),
        }
    }

    /// The source of its backup device, if it has one.
    pub(crate) fn backup(&self) -> Option<&NicSource> {
        self.backup.as_ref()
    }

    /// Whether its own device, or its backup, is created for it.
    pub(crate) fn is_created(&self, backup: bool) -> bool {
        let source = if backup {
            self.backup.as_ref()
        } else {
            Some(&self.source)
        };
        matches!(source, Some(NicSource::From(_)))
    }

    /// The same NIC on its backup device; none if it has no backup.
    pub(crate) fn on_backup(&self, vm: &VmName) -> Option<Self> {
        let device = match self.backup.as_ref()? {
            NicSource::From(_) => ExistingDevice::Name(vm.backup(&self.id)),
            NicSource::There(device) => device.clone(),
        };
        let mut nic = self.moved_to(device);
        nic.raw.backup = None;
        nic.backup = None;
        Some(nic)
    }

    /// The backup device to create for `vm`; none if it exists already, or the NIC has no backup.
    /// `own` is the configuration that the NIC's own device reports. Settings that it has without a
    /// request are requested for the backup.
    pub(crate) fn backup_request(
        &self,
        vm: &VmName,
        own: Option<&NetConfig>,
    ) -> Option<NicRequest> {
        let NicSource::From(wanted) = self.backup.as_ref()? else {
            return None;
        };
        let mut raw = self.raw.clone();
        has_as(&mut raw, own);
        Some(NicRequest {
            name: vm.backup(&self.id),
            owner: Some(vm.owner(&self.id)),
            mac: raw.mac.map(MacAddress::bytes),
            mtu: raw.mtu,
            max_vqp: raw.queue_pairs,
            ..(**wanted).clone()
        })
    }

    /// The paths in its settings, with their kinds.
    pub(crate) fn paths(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let own = (Some(&self.source), "a NIC's path");
        let backup = (self.backup.as_ref(), "a NIC's backup.path");
        let both = [own, backup].into_iter();
        both.filter_map(|(source, what)| match source {
            Some(NicSource::There(ExistingDevice::Path(path))) => Some((what, path.as_path())),
            _ => None,
        })
    }

    /// The names of the devices that are created for it.
    pub(crate) fn created_names(&self, vm: &VmName) -> impl Iterator<Item = String> {
        let own = self.is_created(false).then(|| vm.device(&self.id));
        let backup = self.is_created(true).then(|| vm.backup(&self.id));
        own.into_iter().chain(backup)
    }
}

impl From<NicSpec> for NicSettings {
    fn from(nic: NicSpec) -> Self {
        nic.raw
    }
}

// A client needs only the names of the fields.
impl PartialSchema for NicSpec {
    fn schema() -> RefOr<Schema> {
        NicSettings::schema()
    }
}

impl ToSchema for NicSpec {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("NicSpec")
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        <NicSettings as ToSchema>::schemas(schemas);
    }
}

/// Rejects a setting of created devices for an existing device.
fn only_from(id: &NicId, what: &str) -> Error {
    Error::invalid(format!(
        "{id} has {what}, which needs a created device (`from`): omit it"
    ))
}

impl TryFrom<NicSettings> for NicSpec {
    type Error = Error;

    fn try_from(raw: NicSettings) -> Result<Self, Error> {
        // In the words of serde for a missing field that is not optional.
        let no_id = || Error::invalid("missing field `id`");
        let id = raw.id.clone().ok_or_else(no_id)?;
        let own = (&raw.from, &raw.path, &raw.device);
        let source = source(own, &id, |from| request(&id, &raw, from))?;
        if !matches!(source, NicSource::From(_)) {
            let given = [
                (raw.kind != NicKind::Auto, "kind"),
                (raw.bridge.is_some(), "bridge"),
                (raw.vlan.is_some(), "vlan"),
                (raw.port.is_some(), "port"),
                (raw.queue.is_some(), "queue"),
                (raw.mtu.is_some(), "mtu"),
                (raw.queue_pairs.is_some(), "queue_pairs"),
                (raw.poll.is_some(), "poll"),
                (raw.device_features.is_some(), "device_features"),
                (raw.max_tx_rate.is_some(), "max_tx_rate"),
                (raw.min_tx_rate.is_some(), "min_tx_rate"),
                (raw.virtual_functions.is_some(), "virtual_functions"),
            ];
            if let Some(&(_, what)) = given.iter().find(|one| one.0) {
                return Err(only_from(&id, what));
            }
        }
        let backup = raw.backup.as_ref();
        let backup = backup.map(|backup| backup_source(backup, &id, &raw, &source));
        let backup = backup.transpose()?;
        Ok(Self {
            id,
            source,
            backup,
            raw,
        })
    }
}

/// The source of a device; exactly one of from, path and device must be set. `what` names the
/// device in errors.
fn source(
    said: (&Option<String>, &Option<PathBuf>, &Option<String>),
    what: impl fmt::Display,
    request: impl FnOnce(&str) -> Result<NicRequest, Error>,
) -> Result<NicSource, Error> {
    let there = match said {
        (Some(from), None, None) => return Ok(NicSource::From(Box::new(request(from)?))),
        (None, Some(path), None) => ExistingDevice::Path(path.clone()),
        (None, None, Some(name)) => ExistingDevice::Name(name.clone()),
        (from, path, device) => {
            let given = [from.is_some(), path.is_some(), device.is_some()];
            let count = given.into_iter().filter(|given| *given).count();
            return Err(Error::invalid(format!(
                "{what} has {count} of from, path and device: give exactly one"
            )));
        }
    };
    Ok(NicSource::There(there))
}

/// Keeps only the settings that a device of `from` has: software polls, and can be at a queue of a
/// port. A mask for software may have features that hardware lacks, which refuses them.
fn keep_for(raw: &mut NicSettings, from: &str) {
    if from != SOFTWARE {
        raw.poll = None;
        raw.port = None;
        raw.queue = None;
        if raw.from.as_deref() == Some(SOFTWARE) {
            raw.device_features = None;
        }
    }
}

/// The source of the backup device of the NIC `id`, which has the settings `raw` and the source
/// `own`.
fn backup_source(
    backup: &NicBackup,
    id: &NicId,
    raw: &NicSettings,
    own: &NicSource,
) -> Result<NicSource, Error> {
    let given = (&backup.from, &backup.path, &backup.device);
    let what = format_args!("{id}: backup");
    let source = source(given, what, |from| {
        let mut raw = raw.clone();
        keep_for(&mut raw, from);
        request(id, &raw, from)
    })?;
    match (&source, own) {
        (NicSource::From(_), NicSource::There(_)) => Err(only_from(id, "backup.from")),
        (NicSource::There(_), own) if source == *own => Err(Error::invalid(format!(
            "{id}: backup is the NIC's own device: name another one"
        ))),
        _ => Ok(source),
    }
}

/// The device to create for no VM.
///
/// # Errors
/// A setting is invalid.
pub(crate) fn host_request(spec: &HostNicSpec) -> Result<NicRequest, Error> {
    Ok(NicRequest {
        name: spec.name.to_string(),
        ..request(&spec.name, &spec.settings(), &spec.from)?
    })
}

/// The device to create, without name and owner.
fn request(id: &NicId, raw: &NicSettings, from: &str) -> Result<NicRequest, Error> {
    let wrong = |why: MgmtError| Error::invalid(format!("{id}: {why}"));
    let rates = match (raw.min_tx_rate, raw.max_tx_rate) {
        (None, None) => None,
        (min, max) => {
            Some(Rates::new(min.unwrap_or_default(), max.unwrap_or_default()).map_err(wrong)?)
        }
    };
    let vlan = raw
        .vlan
        .map(|vlan| vlan.to_string().parse::<VlanId>())
        .transpose()
        .map_err(wrong)?;
    let connectivity = (raw.bridge.is_some() || vlan.is_some()).then(|| Connectivity {
        bridge: raw.bridge.clone(),
        vlan,
        // The representor must pass all that the function sends.
        mtu: raw.mtu.filter(|_| raw.bridge.is_some()).map(u32::from),
    });
    let port = match (&raw.port, raw.queue) {
        (None, None) => None,
        (Some(port), Some(queue)) => Some(PortQueue::new(port, queue).map_err(wrong)?),
        _ => {
            return Err(Error::invalid(format!(
                "{id}: name both `port` and `queue`"
            )));
        }
    };
    let request = NicRequest {
        kind: match raw.kind {
            NicKind::Auto => Kind::Auto,
            NicKind::Vf => Kind::VirtualFunction,
            NicKind::Sf => Kind::Subfunction,
        },
        mac: raw.mac.map(MacAddress::bytes),
        mtu: raw.mtu,
        max_vqp: raw.queue_pairs,
        poll_percent: raw.poll,
        device_features: raw.device_features.map(|mask| mask.0),
        connectivity,
        rates,
        virtual_functions: raw.virtual_functions,
        port,
        ..NicRequest::new("nic", from)
    };
    // Rejects values that no device can have.
    if let Ok(any) = "any".parse() {
        request.device(any).map_err(wrong)?;
    }
    Ok(request)
}

/// Requests for a NIC the settings that its device has without a request.
fn has_as(nic: &mut NicSettings, device: Option<&NetConfig>) {
    let Some(device) = device else {
        return;
    };
    let mac = device.mac.filter(|mac| *mac != [0; 6]);
    nic.mac = nic
        .mac
        .or_else(|| mac.and_then(|mac| address(&mac).parse().ok()));
    // Defaults of every device need no request, because not all sources accept it.
    nic.mtu = nic.mtu.or(device.mtu.filter(|mtu| *mtu != MTU));
    nic.queue_pairs = nic
        .queue_pairs
        .or(device.max_vq_pairs.filter(|pairs| *pairs > 1));
}
/// A body that is not a NIC.
fn not_a_nic(why: impl fmt::Display) -> Error {
    Error::invalid(format!("invalid NIC: {why}"))
}
