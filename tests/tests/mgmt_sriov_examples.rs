//! The manual's examples that need a NIC with virtual functions.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod examples;

use examples::{Desk, Place};
use lab::sim::require_lab;
use std::time::{Duration, Instant};
use vdpa_mgmt::pci::Pci;

/// The network interface of the NIC, once its driver is ready.
fn interface() -> String {
    let begin = Instant::now();
    loop {
        let found = Pci::default().physical_functions().unwrap();
        if let Some(name) = found.iter().find_map(|function| function.netdevs.first()) {
            return name.clone();
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "no NIC");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_nic_is_created_on_a_virtual_function() {
    require_lab().unwrap();
    let desk = Desk::new("examples-sriov");
    let name = interface();
    let said = desk.run(
        Place::Sriov,
        &[("enp1s0f0", &name)],
        &format!("bellhop vf count {name} 0"),
    );
    assert!(said.contains("/dev/vhost-vdpa-"), "{said}");
}
