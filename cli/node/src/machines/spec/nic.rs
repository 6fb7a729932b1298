//! A NIC of a virtual machine, as clients say it and as it is once it is checked.
//!
//! Owns which of its settings go together. It must not know the machine's other NICs.

mod stand_by;

use std::borrow::Cow;
use std::path::PathBuf;

use bellhop_api::node::{NicKind, NicSettings, NicStandBy};
use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};
use vdpa_mgmt::connectivity::Connectivity;
use vdpa_mgmt::link::VlanId;
use vdpa_mgmt::nic::{Kind, NicRequest};
use vdpa_mgmt::sriov::Rates;
use vdpa_mgmt::{Error as MgmtError, NetConfig};
use vmm::config::{MacAddress, VdpaConfig, VdpaSource};

use self::stand_by::{has_as, keeps_stand_by, stand_by_source};
use super::{NicId, VmName, not_a_nic};
use crate::error::Error;

/// Where a NIC's device comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NicSource {
    /// It is made for the machine, like this; name and owner are the machine's to give.
    From(Box<NicRequest>),
    /// It is there: its character device.
    Path(PathBuf),
    /// It is there: its name.
    Device(String),
}

/// A vDPA device that is there already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExistingDevice {
    /// Its character device.
    Path(PathBuf),
    /// Its name.
    Name(String),
}

/// A NIC of a virtual machine, checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NicSettings", into = "NicSettings")]
pub(crate) struct NicSpec {
    id: NicId,
    source: NicSource,
    stand_by: Option<NicSource>,
    raw: NicSettings,
}

impl NicSpec {
    pub(crate) fn id(&self) -> &NicId {
        &self.id
    }

    pub(crate) fn source(&self) -> &NicSource {
        &self.source
    }

    /// The address that was asked for; none: the device's own.
    pub(crate) fn mac(&self) -> Option<MacAddress> {
        self.raw.mac
    }

    /// The same NIC on a device that is there already. What is for devices that are made is gone, and so is what stands by for
    /// it if that is this device, or made.
    pub(crate) fn moved_to(&self, device: ExistingDevice) -> Self {
        let stands_by = self.raw.failover.as_ref();
        let failover = stands_by
            .filter(|stands_by| keeps_stand_by(stands_by, &device))
            .cloned();
        let stand_by = self.stand_by.clone().filter(|_| failover.is_some());
        let (source, path, name) = match device {
            ExistingDevice::Path(path) => (NicSource::Path(path.clone()), Some(path), None),
            ExistingDevice::Name(name) => (NicSource::Device(name.clone()), None, Some(name)),
        };
        let raw = NicSettings {
            id: Some(self.id.clone()),
            path,
            device: name,
            mac: self.raw.mac,
            doorbell: self.raw.doorbell,
            rescue: self.raw.rescue,
            failover,
            ..NicSettings::default()
        };
        Self {
            id: self.id.clone(),
            source,
            stand_by,
            raw,
        }
    }

    /// As the machine takes it, on this device; the character device `failover` stands by.
    pub(crate) fn vdpa(&self, source: VdpaSource, failover: Option<PathBuf>) -> VdpaConfig {
        VdpaConfig {
            source,
            id: Some(self.id.to_string()),
            mac: self.raw.mac,
            num_queues: None,
            doorbell: self.raw.doorbell,
            rescue: self.raw.rescue,
            failover,
        }
    }

    /// The NIC that another node is to make for the same guest: on what is called `from` there, if that is given, else on what is
    /// called as here. What its device here has without having been asked for is asked for there.
    ///
    /// # Errors
    /// `from` cannot be meant.
    pub(crate) fn elsewhere(
        &self,
        from: Option<&str>,
        device: Option<&NetConfig>,
    ) -> Result<Self, Error> {
        let mut raw = self.raw.clone();
        if let Some(from) = from {
            raw.from = Some(from.to_owned());
            raw.path = None;
            raw.device = None;
            // These are about the NIC of this host.
            raw.kind = NicKind::default();
            raw.virtual_functions = None;
            raw.failover = raw.failover.map(|_| NicStandBy::made_of(from));
        }
        if raw.from.is_some() {
            has_as(&mut raw, device);
        }
        Self::try_from(raw).map_err(not_a_nic)
    }

    /// The device to be made for `vm`; none if it is there already.
    pub(crate) fn request(&self, vm: &VmName) -> Option<NicRequest> {
        match &self.source {
            NicSource::From(request) => Some(NicRequest {
                name: vm.device(&self.id),
                owner: Some(vm.owner(&self.id)),
                ..(**request).clone()
            }),
            NicSource::Path(_) | NicSource::Device(_) => None,
        }
    }
}

impl From<NicSpec> for NicSettings {
    fn from(nic: NicSpec) -> Self {
        nic.raw
    }
}

// The names of fields are all that a client needs to see of it.
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

/// A setting of devices that are made, for one that is there already.
fn only_from(id: &NicId, what: &str) -> Error {
    Error::invalid(format!(
        "{id} has {what}, which is for devices that are made (`from`): leave it out"
    ))
}

impl TryFrom<NicSettings> for NicSpec {
    type Error = Error;

    fn try_from(raw: NicSettings) -> Result<Self, Error> {
        // As serde says it of a field that is not optional.
        let no_id = || Error::invalid("missing field `id`");
        let id = raw.id.clone().ok_or_else(no_id)?;
        let source = match (&raw.from, &raw.path, &raw.device) {
            (Some(from), None, None) => NicSource::From(Box::new(request(&id, &raw, from)?)),
            (None, Some(path), None) => NicSource::Path(path.clone()),
            (None, None, Some(device)) => NicSource::Device(device.clone()),
            (from, path, device) => {
                let given = [from.is_some(), path.is_some(), device.is_some()];
                let count = given.into_iter().filter(|given| *given).count();
                return Err(Error::invalid(format!(
                    "{id} has {count} of from, path and device: give one"
                )));
            }
        };
        if !matches!(source, NicSource::From(_)) {
            let given = [
                (raw.kind != NicKind::Auto, "kind"),
                (raw.bridge.is_some(), "bridge"),
                (raw.vlan.is_some(), "vlan"),
                (raw.mtu.is_some(), "mtu"),
                (raw.queue_pairs.is_some(), "queue_pairs"),
                (raw.max_tx_rate.is_some(), "max_tx_rate"),
                (raw.min_tx_rate.is_some(), "min_tx_rate"),
                (raw.virtual_functions.is_some(), "virtual_functions"),
            ];
            if let Some(&(_, what)) = given.iter().find(|one| one.0) {
                return Err(only_from(&id, what));
            }
        }
        let stand_by = raw
            .failover
            .as_ref()
            .map(|stand_by| stand_by_source(stand_by, &id, &raw, &source))
            .transpose()?;
        Ok(Self {
            id,
            source,
            stand_by,
            raw,
        })
    }
}

/// What is to be made, without name and owner.
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
        // The representor has to let through what the function sends.
        mtu: raw.mtu.filter(|_| raw.bridge.is_some()).map(u32::from),
    });
    let request = NicRequest {
        kind: match raw.kind {
            NicKind::Auto => Kind::Auto,
            NicKind::Vf => Kind::VirtualFunction,
            NicKind::Sf => Kind::Subfunction,
        },
        mac: raw.mac.map(MacAddress::bytes),
        mtu: raw.mtu,
        max_vqp: raw.queue_pairs,
        connectivity,
        rates,
        virtual_functions: raw.virtual_functions,
        ..NicRequest::new("nic", from)
    };
    // Values that no device can have, whatever it is made on.
    if let Ok(any) = "any".parse() {
        request.device(any).map_err(wrong)?;
    }
    Ok(request)
}
