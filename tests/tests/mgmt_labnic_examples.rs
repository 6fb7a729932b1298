//! The manual's examples that need a NIC in switchdev mode.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod examples;

use examples::{Desk, Place};
use lab::labnic::Labnic;
use lab::labnic::sf::{NIC, set_eswitch_mode};
use lab::process::output;
use lab::sim::require_lab;
use std::process::Command;

fn ip(arguments: &str) {
    let mut command = Command::new("ip");
    output(command.args(arguments.split(' '))).unwrap();
}

/// The bridge of the example. Dropping it deletes the bridge.
struct Bridge;

impl Bridge {
    fn new() -> Self {
        ip("link add br0 type bridge vlan_filtering 1");
        ip("link set br0 up");
        Self
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        ip("link del br0");
    }
}

#[test]
fn a_nic_is_created_on_a_subfunction() {
    require_lab().unwrap();
    let _labnic = Labnic::load(&[]).unwrap();
    set_eswitch_mode("switchdev").unwrap();
    let _bridge = Bridge::new();
    let desk = Desk::new("examples-labnic");
    let said = desk.run(
        Place::Labnic,
        &[("enp6s0f0np0", NIC)],
        "bellhop nic delete nic1",
    );
    for part in ["/dev/vhost-vdpa-", "nic1"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
}
