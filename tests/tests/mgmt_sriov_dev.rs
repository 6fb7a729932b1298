//! `bellhop mgmtdev` and `bellhop dev` on virtual functions under vp_vdpa, beside iproute2's
//! `vdpa`: management devices with a bus, features without a name.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_dev/same.rs"]
mod same;
#[path = "mgmt_dev/support.rs"]
mod support;

use lab::sriov::{SriovNic, VfDevice};
use same::{negotiated, same};
use support::{MAC, bellhop, complaint, listed, printed};
use vdpa_mgmt::Connection;

#[test]
fn virtual_functions_are_shown_as_iproute2_shows_them() {
    let nic = SriovNic::enable(2).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let mgmtdev = format!("pci/{}", device.function().address());
    same(&["mgmtdev", "show"]);
    same(&["mgmtdev", "show", &mgmtdev]);
    same(&["dev", "show"]);
    same(&["dev", "show", device.name()]);
    same(&["dev", "config", "show"]);
    let _driver = negotiated(device.path());
    same(&["dev", "config", "show", device.name()]);
    let text = printed(&bellhop(&["mgmtdev", "show"]));
    // RING_RESET.
    assert!(
        text.contains(&mgmtdev) && text.contains(" bit_40"),
        "{text}"
    );
}

#[test]
fn a_virtual_function_has_a_bus_and_one_device() {
    let nic = SriovNic::enable(1).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let address = device.function().address();
    let connection = Connection::open().unwrap();
    let shown = connection.device(device.name()).unwrap();
    assert_eq!(
        (shown.mgmtdev.bus(), shown.mgmtdev.name()),
        (Some("pci"), address)
    );
    let mgmtdev = connection.mgmt_device(&shown.mgmtdev).unwrap();
    assert_eq!(mgmtdev.max_supported_vqs, shown.max_vqs);
    // Without its bus it is not found: the bus is part of the name.
    complaint(
        &bellhop(&["mgmtdev", "show", address]),
        &["no management device"],
    );
    let again = format!("dev add name lab-again mgmtdev pci/{address}");
    let again: Vec<&str> = again.split(' ').collect();
    // vp_vdpa itself accepts a second device, and crashes when both are deleted.
    complaint(&bellhop(&again), &[device.name(), "confuses two devices"]);
    assert!(!listed().contains(&"lab-again".to_owned()));
    let stats = format!("dev vstats show {} qidx 0", device.name());
    let stats: Vec<&str> = stats.split(' ').collect();
    complaint(&bellhop(&stats), &["counters of queue 0"]);

    let set = format!("dev set name {} mac {MAC}", device.name());
    let set: Vec<&str> = set.split(' ').collect();
    complaint(
        &bellhop(&set),
        &["cannot change", "not supported by the device"],
    );

    let driver = negotiated(device.path());
    let own = format!("(PID {})", std::process::id());
    complaint(
        &bellhop(&["dev", "del", device.name()]),
        &["in use by", &own],
    );
    assert!(listed().contains(&device.name().to_owned()));
    drop(driver);
}
