//! Announces the place of an arrived guest to the network, for drivers that cannot announce it.
//!
//! ```text
//!   arrived, or a NIC moved to another device ─> each NIC: did its driver agree on GUEST_ANNOUNCE?
//!     yes, or no driver runs it   the VMM has asked the driver; or there is no driver to reach
//!     no                          this host notifies bridge and network (`vdpa_mgmt::announce`)
//! ```
//!
//! The announced address is the one that this node configured for the NIC, or the device's own. It
//! is never an address that the guest chose, because the host would then send in the name of
//! others. A failure here does not fail the VM: the network also learns the place from the guest's
//! first frame.
//!
//! Owns the choice of NICs to announce. `vdpa_mgmt::announce` sends the announcements.

use std::thread;
use std::time::Duration;

use bellhop_api::machine::DeviceInfo;
use vdpa_mgmt::announce::Announcement;
use vmm::config::MacAddress;

use super::Machines;
use super::spec::{NicSpec, VmName};
use crate::error::Error;

/// Number of announcements: a switch may be busy, or a frame lost.
const TIMES: u32 = 3;
/// Delay between two announcements.
const BETWEEN: Duration = Duration::from_millis(70);
/// The driver's feature to announce its NIC on request (VIRTIO_NET_F_GUEST_ANNOUNCE).
const GUEST_ANNOUNCE: &str = "GUEST_ANNOUNCE";

/// Whether a driver runs the device but cannot announce it.
fn is_mute(device: Option<&DeviceInfo>) -> bool {
    let running = device.filter(|device| device.driver_ok);
    let negotiated = running.and_then(|device| device.features_negotiated.as_ref());
    negotiated.is_some_and(|names| names.iter().all(|name| name != GUEST_ANNOUNCE))
}

impl Machines {
    /// Announces those of these NICs that the guest does not announce itself.
    pub(super) fn announce_mute(&self, vm: &VmName, nics: &[NicSpec]) {
        let mut announcements = Vec::new();
        for nic in nics {
            match self.announcement(vm, nic) {
                Ok(Some(announcement)) => {
                    let by: Vec<&str> = announcement.interfaces().collect();
                    tracing::info!(
                        %vm,
                        nic = %nic.id(),
                        by = by.join(" "),
                        "the guest's driver cannot announce its NIC: this host announces it"
                    );
                    announcements.push((nic, announcement));
                }
                Ok(None) => {}
                Err(error) => announce_failed(vm, nic, &error),
            }
        }
        for time in 0..TIMES {
            if time > 0 && !announcements.is_empty() {
                thread::sleep(BETWEEN);
            }
            announcements.retain(|(nic, announcement)| match announcement.send() {
                Ok(()) => true,
                Err(error) => {
                    announce_failed(vm, nic, &error.into());
                    false
                }
            });
        }
    }

    /// The announcement for a NIC, if it needs one.
    fn announcement(&self, vm: &VmName, nic: &NicSpec) -> Result<Option<Announcement>, Error> {
        let info = self.runtime.block_on(self.api_of(vm).nic(nic.id()));
        let info = info.map_err(Error::context(
            "the VM does not report its driver's features",
        ))?;
        if !is_mute(info.device.as_ref()) {
            return Ok(None);
        }
        let device = self.vdpa_device(vm, nic);
        let device = device.ok_or_else(|| Error::failed("its device is unknown"))?;
        let given = nic.mac().map(MacAddress::bytes);
        let own = || self.config_of(vm, &device).and_then(|config| config.mac);
        let mac = given.or_else(own);
        let mac = mac.ok_or_else(|| Error::failed("its address is unknown here"))?;
        Ok(Some(Announcement::prepare(&device, mac)?))
    }
}

fn announce_failed(vm: &VmName, nic: &NicSpec, error: &Error) {
    tracing::info!(
        %vm,
        nic = %nic.id(),
        error = error as &dyn std::error::Error,
        "cannot announce a NIC: the network learns its place from the guest's first frame"
    );
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn only_a_driver_that_runs_and_did_not_agree_to_announce_is_spoken_for() {
        for (driver_ok, negotiated, mute) in [
            (false, None, false),
            (true, None, false),
            (false, Some(&["MAC"][..]), false),
            (true, Some(&["MAC", "CTRL_VQ"]), true),
            (true, Some(&[]), true),
            (true, Some(&["CTRL_VQ", "GUEST_ANNOUNCE"]), false),
        ] {
            let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
            let device = DeviceInfo {
                status: 15,
                driver_ok,
                features_negotiated: negotiated.map(names),
                ..DeviceInfo::default()
            };
            assert_eq!(is_mute(Some(&device)), mute, "{device:?}");
        }
        assert!(!is_mute(None));
    }

    /// The VMM API names features as the library does.
    #[test]
    fn the_feature_is_called_so() {
        assert_eq!(vdpa::features::name(21, 1), Some(GUEST_ANNOUNCE));
    }
}
