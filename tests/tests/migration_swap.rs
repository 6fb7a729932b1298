//! Hot swap on the simulator: a guest's NIC moves to another vDPA device while it sends, and keeps
//! its device when it cannot move.
//!
//! Independent parties check the result. The guest sends frames to itself and verifies them. Both
//! devices' own counters give their number. A later open proves that a device is free.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod guest_nics;
#[allow(dead_code, reason = "other tests use more of it")]
mod swap;

use guest_nics::wait_nics;
use lab::guest::BellhopArguments;
use lab::sim::{SimDevice, require_lab};
use lab::traffic::{Frames, exchange, exchange_counted, flood_off, flood_on, packets};
use lab::vmm_process::cost;
use serde_json::{Value, json};
use std::fs::File;
use std::time::Duration;
use swap::Vm;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:54:01";
const OTHER_MAC: &str = "52:54:5e:11:54:02";

/// The simulator's features without STATUS.
const WITHOUT_STATUS: &str = "0x308820028";

const SOME: Frames = Frames {
    count: 50,
    size: 300,
    window: 8,
};

fn devices(name: &str) -> [SimDevice; 2] {
    let other = format!("{name}2");
    [
        SimDevice::net(name, MAC, 1500).unwrap(),
        // With another address: the guest's address moves with the guest.
        SimDevice::net(&other, OTHER_MAC, 1500).unwrap(),
    ]
}

fn number(answer: &Value, name: &str) -> u64 {
    answer[name].as_u64().unwrap()
}

fn ten_swaps_under_traffic(arguments: BellhopArguments, name: &str) {
    require_lab().unwrap();
    let devices = devices(name);
    let [first, second] = &devices;
    let mut vm = Vm::start(arguments, name, first, "");
    wait_nics(&mut vm.guest, &[MAC]);
    exchange_counted(&mut vm.guest, "eth0", first, &[SOME]).unwrap();
    // Once there and back, so that both devices can report their counts.
    vm.swap(first, second);
    wait_nics(&mut vm.guest, &[MAC]);
    exchange(&mut vm.guest, "eth0", SOME).unwrap();
    let second_before = packets(second).unwrap();
    vm.swap(second, first);
    let first_before = packets(first).unwrap();
    let descriptors = cost(vm.guest.pid()).unwrap().descriptors;

    // To itself, through the device, from before the first swap until after the last.
    flood_on(&mut vm.guest, "eth0", MAC);
    for round in 0..10 {
        std::thread::sleep(Duration::from_millis(100 + 37 * round));
        match round % 2 {
            0 => vm.swap(first, second),
            _ => vm.swap(second, first),
        }
    }
    let answer = flood_off(&mut vm.guest);
    println!("gaps as the machine saw them: {:?}", vm.gaps());
    let first_after = packets(first).unwrap();
    vm.swap(first, second);
    let second_after = packets(second).unwrap();
    let sent = [
        first_after.transmitted - first_before.transmitted,
        second_after.transmitted - second_before.transmitted,
    ];
    println!("frames by device: {sent:?}");
    assert!(sent.iter().all(|sent| *sent > 0), "both had work: {sent:?}");
    assert_eq!(sent.iter().sum::<u64>(), number(&answer, "tx"));

    // The next driver finds the same NIC.
    vm.guest.command("rebind-flooded 1 0").unwrap();
    wait_nics(&mut vm.guest, &[MAC]);
    exchange_counted(&mut vm.guest, "eth0", second, &[SOME]).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(cost(vm.guest.pid()).unwrap().descriptors, descriptors);
    vm.power_off();
}

#[test]
fn a_small_guest_is_swapped_under_traffic() {
    ten_swaps_under_traffic(BellhopArguments::small().unwrap(), "swap");
}

#[test]
fn a_stock_guest_is_swapped_under_traffic() {
    ten_swaps_under_traffic(BellhopArguments::stock().unwrap(), "stock");
}

#[test]
fn an_address_that_the_guest_chose_goes_along() {
    require_lab().unwrap();
    const CHOSEN: &str = "52:54:5e:11:54:03";
    let devices = devices("chosen");
    let [first, second] = &devices;
    let mut vm = Vm::start(BellhopArguments::small().unwrap(), "chosen", first, "");
    wait_nics(&mut vm.guest, &[MAC]);
    vm.guest.command(&format!("mac {CHOSEN}")).unwrap();
    vm.swap(first, second);
    // The simulator returns a frame only to the address that its device has.
    exchange(&mut vm.guest, "eth0", SOME).unwrap();
    wait_nics(&mut vm.guest, &[CHOSEN]);
    vm.guest.command("rebind-flooded 1 0").unwrap();
    wait_nics(&mut vm.guest, &[MAC]);
    exchange(&mut vm.guest, "eth0", SOME).unwrap();
    vm.power_off();
}

#[test]
fn a_nic_stays_where_it_is_if_the_other_device_does_not_fit() {
    require_lab().unwrap();
    let devices = devices("stays");
    let [first, second] = &devices;
    let attributes = [
        "mac",
        OTHER_MAC,
        "mtu",
        "1500",
        "device_features",
        WITHOUT_STATUS,
    ];
    let poorer = SimDevice::add("poorer", "vdpasim_net", &attributes).unwrap();
    let smaller = SimDevice::net("smaller", OTHER_MAC, 1400).unwrap();
    let block = SimDevice::block("stays-blk").unwrap();
    let mut vm = Vm::start(BellhopArguments::small().unwrap(), "stays", first, "");
    wait_nics(&mut vm.guest, &[MAC]);
    exchange_counted(&mut vm.guest, "eth0", first, &[SOME]).unwrap();
    let descriptors = cost(vm.guest.pid()).unwrap().descriptors;
    let held = File::options().read(true).write(true).open(second.path());
    let to = |device: &SimDevice| json!({ "path": device.path() });
    for (body, status, code, words) in [
        (to(&poorer), 422, "incompatible", "STATUS"),
        (to(&smaller), 422, "incompatible", "mtu 1500"),
        (to(&block), 422, "incompatible", "virtio type 2"),
        (to(second), 422, "unusable", "in use"),
        (
            json!({ "path": "/dev/vhost-vdpa-99" }),
            422,
            "unusable",
            "does not exist",
        ),
        (
            json!({ "path": "/dev/null" }),
            422,
            "unusable",
            "vhost-vdpa",
        ),
        (
            json!({ "path": second.path(), "mac": OTHER_MAC }),
            409,
            "wrong_state",
            "path of a NIC",
        ),
    ] {
        vm.refused(&body, status, code, words);
        // It continues with the same device.
        exchange_counted(&mut vm.guest, "eth0", first, &[SOME]).unwrap();
    }
    // Its current device is no change.
    vm.stays(first);
    exchange_counted(&mut vm.guest, "eth0", first, &[SOME]).unwrap();
    assert!(vm.gaps().is_empty());
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(cost(vm.guest.pid()).unwrap().descriptors, descriptors);
    drop(held);
    vm.swap(first, second);
    exchange_counted(&mut vm.guest, "eth0", second, &[SOME]).unwrap();
    vm.power_off();
}
