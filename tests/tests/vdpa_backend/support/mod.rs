//! Shared by the tests of this target: the simulator in a known mode, frames to send, and two
//! network drivers in userspace.

pub(crate) mod frames;
pub(crate) mod guest;
pub(crate) mod machine;
pub(crate) mod nic;
pub(crate) mod process;

use lab::sim::{self, Mapping, SimDevice};

/// The address that devices are created with. Without a zero byte: the simulator's filter compares
/// addresses as C strings (`receive_filter` in `drivers/vdpa/vdpa_sim/vdpa_sim_net.c`) and ignores
/// bytes after one.
pub(crate) const MAC: [u8; 6] = [0x02, 0x5e, 0x10, 0x53, 0x11, 0x01];
/// The address of another station.
pub(crate) const FOREIGN: [u8; 6] = [0x02, 0x5e, 0x10, 0x53, 0x11, 0x77];
/// The address of a second device.
pub(crate) const SECOND: [u8; 6] = [0x02, 0x5e, 0x10, 0x53, 0x11, 0x02];
pub(crate) const BROADCAST: [u8; 6] = [0xff; 6];

/// An address as the tools write it.
pub(crate) fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Loads the simulator in this mode if necessary. No device may exist.
pub(crate) fn simulator(mapping: Mapping) {
    sim::require_lab().unwrap();
    let parameter = |name: &str| {
        let path = format!("/sys/module/vdpa_sim/parameters/{name}");
        std::fs::read_to_string(path).is_ok_and(|value| matches!(value.trim(), "Y" | "1"))
    };
    let now = (parameter("use_va"), parameter("batch_mapping"));
    if now != (mapping.use_va, mapping.batch_mapping) {
        sim::reload(mapping).unwrap();
    }
    assert_eq!(parameter("use_va"), mapping.use_va);
    assert_eq!(parameter("batch_mapping"), mapping.batch_mapping);
}

/// A network device with the address [`MAC`] on a simulator in this mode.
pub(crate) fn net(mapping: Mapping) -> SimDevice {
    simulator(mapping);
    second_net("vdpa", MAC)
}

/// One more network device.
pub(crate) fn second_net(name: &str, mac: [u8; 6]) -> SimDevice {
    SimDevice::net(name, &text(mac), 1500).unwrap()
}
