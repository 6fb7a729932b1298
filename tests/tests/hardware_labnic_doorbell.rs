//! Doorbells of the lab NIC.

mod doorbell;

use lab::labnic::Labnic;

const MAC: &str = "02:4c:61:62:53:42";

#[test]
fn pages_save_exits_and_serve_every_driver() {
    // Loaded here: another file of tests on the same host may have unloaded it.
    let labnic = Labnic::load(&[]).unwrap();
    let device = labnic.add("bell", &["mac", MAC]).unwrap();
    doorbell::pages_save_exits_and_serve_every_driver(device.path());
}
