//! A guest on a virtual function rebinds, loses its link and reboots repeatedly.

mod cycles;

use cycles::End;
use lab::sriov::{SriovNic, VfDevice, set_link};

#[test]
fn rebinds_link_changes_and_reboots_under_traffic_leak_nothing() {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let macs = devices.each_ref().map(|device| device.function().mac());
    let ends = [0, 1].map(|index| End {
        path: devices[index].path(),
        mac: &macs[index],
    });
    let link = devices[0].function().link();
    cycles::leak_nothing(ends, |up| set_link(&link, up).unwrap());
}
