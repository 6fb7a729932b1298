//! Doorbells of virtio NICs behind vp_vdpa.

mod doorbell;

use lab::sriov::{SriovNic, VfDevice};

#[test]
fn pages_serve_every_driver() {
    let nic = SriovNic::enable(1).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    doorbell::pages_serve_every_driver(device.path());
}

#[test]
fn a_read_does_not_hurt() {
    let nic = SriovNic::enable(1).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    doorbell::a_read_does_not_hurt(device.path());
}
