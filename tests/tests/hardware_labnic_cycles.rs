//! Again and again on the lab NIC: driver, machine, cable.

mod cycles;

use cycles::End;
use lab::labnic::{Labnic, set_link, trouble};
use lab::sim::SimDevice;

const MACS: [&str; 2] = ["02:4c:61:62:53:61", "02:4c:61:62:53:62"];

fn with_two_devices(test: impl FnOnce([End<'_>; 2], &SimDevice)) {
    let labnic = Labnic::load(&[]).unwrap();
    let devices = [0, 1].map(|index| {
        let name = format!("cycles{index}");
        labnic
            .add(&name, &["mac", MACS[index], "max_vqp", "2"])
            .unwrap()
    });
    let ends = [0, 1].map(|index| End {
        path: devices[index].path(),
        mac: MACS[index],
    });
    test(ends, &devices[0]);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn rebinds_under_flood_leak_nothing() {
    with_two_devices(|ends, _| cycles::rebinds(ends));
}

#[test]
fn reboots_under_flood_leak_nothing() {
    with_two_devices(|ends, _| cycles::reboots(ends));
}

#[test]
fn link_flaps_under_flood_leak_nothing() {
    with_two_devices(|ends, device| {
        cycles::link_flaps(ends, |up| set_link(device, up).unwrap());
    });
}
