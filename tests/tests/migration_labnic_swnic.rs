//! Hot swap between a NIC without hardware and a subfunction of the lab NIC, both ways and under
//! traffic. The subfunction's representor is a port of the same bridge.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
#[allow(dead_code, reason = "other tests use more of it")]
mod live;
#[allow(dead_code, reason = "other tests use more of it")]
mod moving;
#[path = "swnic/swaps.rs"]
mod swaps;

use bridge::{Bridge, ip};
use lab::guest::BellhopArguments;
use lab::labnic::sf::{Subfunction, set_eswitch_mode};
use lab::labnic::{Labnic, trouble};
use swaps::{Software, Vm, swaps};

/// All features but CSUM, TSO and ECN, which the lab NIC lacks.
const WITHOUT_OFFLOADS: &str = "0xffffffffffffc47c";
const MAC: &str = "02:00:5e:00:55:01";

#[test]
fn a_guest_moves_between_software_and_a_subfunction() {
    let _labnic = Labnic::load(&[]).unwrap();
    set_eswitch_mode("switchdev").unwrap();
    let bridge = Bridge::add("lab-swbr");
    let function = Subfunction::add(90).unwrap();
    ip(&format!(
        "link set {} up master {}",
        function.representor(),
        bridge.0
    ));
    let hardware = function.device("lab-sf", MAC).unwrap();
    let options = ["--split", "--device-features", WITHOUT_OFFLOADS];
    let software = Software::start(bridge.0, MAC, &options);
    let small = BellhopArguments::small().unwrap().memory("128M");
    let mut vm = Vm::boot(small, software.nic.path());
    vm.exchange();
    let to = [hardware.path(), software.nic.path()];
    vm.move_under_flood(swaps(), to, &software);
    assert!(vm.guest.power_off().unwrap().success());
    drop(software);
    drop(hardware);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}
