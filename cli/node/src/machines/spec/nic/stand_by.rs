//! What stands by for a NIC: another vDPA device, which the NIC is on once its own has failed.
//!
//! One that is made (`from`) is as the NIC's own: address, MTU, queue pairs, what it is connected with, rates. So it can only
//! stand by for one that is made, too. Owns how that is said. It must not know when a device has failed.

use std::path::Path;

use bellhop_api::node::{NicId, NicSettings, NicStandBy};
use vdpa_mgmt::NetConfig;
use vdpa_mgmt::nic::NicRequest;
use vmm::config::MacAddress;

use super::{ExistingDevice, NicSource, NicSpec, VmName, only_from, request};
use crate::error::Error;

/// The MTU of Ethernet, in bytes.
const MTU: u16 = 1500;

fn mac_address(bytes: [u8; 6]) -> Option<MacAddress> {
    let text = bytes.map(|byte| format!("{byte:02x}")).join(":");
    text.parse().ok()
}

/// What to say of one that is made for a NIC that is not.
const MADE: &str = "failover.from";

/// Whether a NIC that moves to a device that is there already keeps what stands by for it.
pub(super) fn keeps_stand_by(stand_by: &NicStandBy, to: &ExistingDevice) -> bool {
    let is_itself = match to {
        ExistingDevice::Path(path) => stand_by.path.as_ref() == Some(path),
        ExistingDevice::Name(name) => stand_by.device.as_ref() == Some(name),
    };
    stand_by.from.is_none() && !is_itself
}

/// Where it comes from, for the NIC `id` that is `raw` and comes from `own`.
pub(super) fn stand_by_source(
    stand_by: &NicStandBy,
    id: &NicId,
    raw: &NicSettings,
    own: &NicSource,
) -> Result<NicSource, Error> {
    let source = match (&stand_by.from, &stand_by.path, &stand_by.device) {
        (Some(from), None, None) => NicSource::From(Box::new(request(id, raw, from)?)),
        (None, Some(path), None) => NicSource::Path(path.clone()),
        (None, None, Some(device)) => NicSource::Device(device.clone()),
        (from, path, device) => {
            let given = [from.is_some(), path.is_some(), device.is_some()];
            let count = given.into_iter().filter(|given| *given).count();
            return Err(Error::invalid(format!(
                "{id}: failover has {count} of from, path and device: give one"
            )));
        }
    };
    match (&source, own) {
        (NicSource::From(_), NicSource::Path(_) | NicSource::Device(_)) => Err(only_from(id, MADE)),
        (NicSource::Path(_) | NicSource::Device(_), own) if source == *own => {
            Err(Error::invalid(format!(
                "{id}: failover is the NIC's own device: name another one that can take its place"
            )))
        }
        _ => Ok(source),
    }
}

impl NicSpec {
    /// Where the device comes from that stands by for it, if one does.
    pub(crate) fn stand_by(&self) -> Option<&NicSource> {
        self.stand_by.as_ref()
    }

    /// Whether its own device, or the one that stands by for it, is made for it.
    pub(crate) fn is_made(&self, stand_by: bool) -> bool {
        let source = if stand_by {
            self.stand_by.as_ref()
        } else {
            Some(&self.source)
        };
        matches!(source, Some(NicSource::From(_)))
    }

    /// The same NIC once it is on the device that stands by for it; none if none does.
    pub(crate) fn on_stand_by(&self, vm: &VmName) -> Option<Self> {
        let device = match self.stand_by.as_ref()? {
            NicSource::From(_) => ExistingDevice::Name(vm.stand_by(&self.id)),
            NicSource::Path(path) => ExistingDevice::Path(path.clone()),
            NicSource::Device(name) => ExistingDevice::Name(name.clone()),
        };
        let mut nic = self.moved_to(device);
        nic.raw.failover = None;
        nic.stand_by = None;
        Some(nic)
    }

    /// The device to be made for `vm` to stand by; none if it is there already, or none does. `own` is what the NIC's own device
    /// says of itself: what that has without having been asked for is asked for here.
    pub(crate) fn stand_by_request(
        &self,
        vm: &VmName,
        own: Option<&NetConfig>,
    ) -> Option<NicRequest> {
        let NicSource::From(wanted) = self.stand_by.as_ref()? else {
            return None;
        };
        let mut raw = self.raw.clone();
        has_as(&mut raw, own);
        Some(NicRequest {
            name: vm.stand_by(&self.id),
            owner: Some(vm.owner(&self.id)),
            mac: raw.mac.map(MacAddress::bytes),
            mtu: raw.mtu,
            max_vqp: raw.queue_pairs,
            ..(**wanted).clone()
        })
    }

    /// The paths that it names, and what they are.
    pub(crate) fn paths(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let own = (Some(&self.source), "a NIC's path");
        let stand_by = (self.stand_by.as_ref(), "a NIC's failover.path");
        let both = [own, stand_by].into_iter();
        both.filter_map(|(source, what)| match source {
            Some(NicSource::Path(path)) => Some((what, path.as_path())),
            Some(NicSource::From(_) | NicSource::Device(_)) | None => None,
        })
    }

    /// The names of the devices that are made for it.
    pub(crate) fn made_names(&self, vm: &VmName) -> impl Iterator<Item = String> {
        let own = self.is_made(false).then(|| vm.device(&self.id));
        let stand_by = self.is_made(true).then(|| vm.stand_by(&self.id));
        own.into_iter().chain(stand_by)
    }
}

/// Has a NIC ask for what its device has without having been asked for.
pub(super) fn has_as(nic: &mut NicSettings, device: Option<&NetConfig>) {
    let Some(device) = device else {
        return;
    };
    let mac = device.mac.filter(|mac| *mac != [0; 6]);
    nic.mac = nic.mac.or_else(|| mac.and_then(mac_address));
    // What every device has need not be asked for: not all take the request.
    nic.mtu = nic.mtu.or(device.mtu.filter(|mtu| *mtu != MTU));
    nic.queue_pairs = nic
        .queue_pairs
        .or(device.max_vq_pairs.filter(|pairs| *pairs > 1));
}
