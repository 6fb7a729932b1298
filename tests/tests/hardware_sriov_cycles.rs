//! Again and again on virtual functions: driver, machine, cable.

mod cycles;

use cycles::End;
use lab::sriov::{SriovNic, VfDevice, set_link};

fn with_two_functions(test: impl FnOnce([End<'_>; 2], &str)) {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let macs = devices.each_ref().map(|device| device.function().mac());
    let ends = [0, 1].map(|index| End {
        path: devices[index].path(),
        mac: &macs[index],
    });
    test(ends, &devices[0].function().link());
}

#[test]
fn rebinds_under_flood_leak_nothing() {
    with_two_functions(|ends, _| cycles::rebinds(ends));
}

#[test]
fn reboots_under_flood_leak_nothing() {
    with_two_functions(|ends, _| cycles::reboots(ends));
}

#[test]
fn link_flaps_under_flood_leak_nothing() {
    with_two_functions(|ends, link| {
        cycles::link_flaps(ends, |up| set_link(link, up).unwrap());
    });
}
