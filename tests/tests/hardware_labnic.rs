//! The lab NIC itself, driven by a plain client in this process: it must work as documented before
//! VMs are tested with it.

#[path = "hardware_labnic/abilities.rs"]
mod abilities;
#[path = "hardware_labnic/client.rs"]
#[expect(
    clippy::unwrap_used,
    reason = "a test's driver: a failure is the test's"
)]
mod client;
#[path = "hardware_labnic/control.rs"]
mod control;
#[path = "hardware_labnic/faults.rs"]
mod faults;
#[path = "hardware_labnic/in_order.rs"]
mod in_order;
#[path = "hardware_labnic/rings.rs"]
mod rings;
#[path = "hardware_labnic/switch.rs"]
mod switch;

use client::{Client, frame};
use lab::labnic::{self, Labnic};
use lab::sim::SimDevice;

const A: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 1];
const B: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 2];
const C: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 3];
const BROADCAST: [u8; 6] = [0xff; 6];
const MULTICAST: [u8; 6] = [1, 0, 0x5e, 0, 0, 9];

fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn add(labnic: &Labnic, name: &str, mac: [u8; 6]) -> SimDevice {
    labnic.add(name, &["mac", &text(mac)]).unwrap()
}

/// Two devices, A and B.
fn two(labnic: &Labnic) -> (SimDevice, SimDevice) {
    (add(labnic, "a", A), add(labnic, "b", B))
}

fn count(device: &SimDevice, queue: u32, name: &str) -> u64 {
    let stats = device.vstats(queue).unwrap();
    let found = stats
        .get(name)
        .or_else(|| stats.get(name.replace(' ', "_")))
        .and_then(serde_json::Value::as_u64);
    found.unwrap_or_else(|| panic!("no {name} in {stats}"))
}

fn kernel_is_well() {
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

/// Frames in both directions, of all lengths, checked.
fn exchange(a: &mut Client, b: &mut Client, frames: u32) {
    for number in 0..frames {
        let len = usize::try_from(number % 1400).unwrap();
        a.send(0, &frame(B, A, number, len));
        assert_eq!(b.receive(0), frame(B, A, number, len));
        b.send(0, &frame(A, B, number, len));
        assert_eq!(a.receive(0), frame(A, B, number, len));
    }
}
