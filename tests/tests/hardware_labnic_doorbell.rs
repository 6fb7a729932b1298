//! Doorbells of the lab NIC.

mod doorbell;

use lab::sim::SimDevice;

const MAC: &str = "02:00:5e:00:53:42";

#[test]
fn pages_serve_every_driver() {
    let device = SimDevice::add("bell", "labnic", &["mac", MAC]).unwrap();
    doorbell::pages_serve_every_driver(device.path());
}

#[test]
fn a_read_does_not_hurt() {
    let device = SimDevice::add("bell", "labnic", &["mac", MAC]).unwrap();
    doorbell::a_read_does_not_hurt(device.path());
}
