//! Doorbells of virtio NICs behind vp_vdpa.

mod doorbell;

use lab::sriov::{SriovNic, VfDevice};

#[test]
fn pages_save_exits_and_serve_every_driver() {
    let nic = SriovNic::enable(1).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    doorbell::pages_save_exits_and_serve_every_driver(device.path());
}
