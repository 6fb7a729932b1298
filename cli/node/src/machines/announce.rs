//! Saying on the network where a guest is that has come and cannot say it itself.
//!
//! ```text
//!   arrived, or a NIC moved to another device ─> each NIC: did its driver agree on GUEST_ANNOUNCE?
//!     yes, or no driver runs it   the machine has asked the driver; or there is nobody to be found
//!     no                          this host tells the bridge and the network (`vdpa_mgmt::announce`)
//! ```
//!
//! The address is the one that the NIC was given by this node, or its device's own: not one that the guest has chosen, for the host
//! would speak in the name of others. Nothing here can fail for a machine: what nobody says the network learns from the
//! guest's first frame.
//!
//! Owns for which NICs it is said. It must not know how.

use std::thread;
use std::time::Duration;

use bellhop_api::machine::DeviceInfo;
use vdpa_mgmt::announce::Announcement;
use vmm::config::MacAddress;

use super::Machines;
use super::spec::{NicSpec, VmName};
use crate::error::Error;

/// How often it is said: a switch may be busy, a frame lost.
const TIMES: u32 = 3;
/// Between two times.
const BETWEEN: Duration = Duration::from_millis(70);
/// The feature of drivers that announce their NIC when they are asked to (VIRTIO_NET_F_GUEST_ANNOUNCE).
const GUEST_ANNOUNCE: &str = "GUEST_ANNOUNCE";

/// Whether a driver runs a device that does not announce it.
fn is_mute(device: Option<&DeviceInfo>) -> bool {
    let running = device.filter(|device| device.driver_ok);
    let negotiated = running.and_then(|device| device.features_negotiated.as_ref());
    negotiated.is_some_and(|names| names.iter().all(|name| name != GUEST_ANNOUNCE))
}

impl Machines {
    /// Says where the guest is on these NICs of it that it does not announce itself.
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
                        "the guest's driver cannot announce its NIC: this host does it"
                    );
                    announcements.push((nic, announcement));
                }
                Ok(None) => {}
                Err(error) => untold(vm, nic, &error),
            }
        }
        for time in 0..TIMES {
            if time > 0 && !announcements.is_empty() {
                thread::sleep(BETWEEN);
            }
            announcements.retain(|(nic, announcement)| match announcement.send() {
                Ok(()) => true,
                Err(error) => {
                    untold(vm, nic, &error.into());
                    false
                }
            });
        }
    }

    /// What is to be said of a NIC, if anything.
    fn announcement(&self, vm: &VmName, nic: &NicSpec) -> Result<Option<Announcement>, Error> {
        let info = self.runtime.block_on(self.api_of(vm).nic(nic.id()));
        let info = info.map_err(Error::context(
            "the machine does not say what its driver can",
        ))?;
        if !is_mute(info.device.as_ref()) {
            return Ok(None);
        }
        let device = self.vdpa_device(vm, nic);
        let device = device.ok_or_else(|| Error::failed("its device is not known"))?;
        let given = nic.mac().map(MacAddress::bytes);
        let own = || self.config_of(vm, &device).and_then(|config| config.mac);
        let mac = given.or_else(own);
        let mac = mac.ok_or_else(|| Error::failed("it has no address that is known here"))?;
        Ok(Some(Announcement::prepare(&device, mac)?))
    }
}

fn untold(vm: &VmName, nic: &NicSpec, error: &Error) {
    tracing::info!(
        %vm,
        nic = %nic.id(),
        error = error as &dyn std::error::Error,
        "nobody announces this NIC: the network learns where it is with its guest's first frame"
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
                broken: false,
                features_offered: Vec::new(),
                features_negotiated: negotiated.map(names),
                queues: Vec::new(),
            };
            assert_eq!(is_mute(Some(&device)), mute, "{device:?}");
        }
        assert!(!is_mute(None));
    }

    /// The names by which a machine tells features are the library's.
    #[test]
    fn the_feature_is_called_so() {
        assert_eq!(vdpa::features::name(21, 1), Some(GUEST_ANNOUNCE));
    }
}
