//! Nothing leaks: a guest resets its driver 100 times and then reboots repeatedly, both under
//! traffic. `lab::endurance` defines the comparison.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::endurance::{SteadyLine, cycles, same_cost, soak, steady_log};
use lab::guest::{BellhopArguments, Guest};
use lab::notice::{Kind, notice};
use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::traffic::{Frames, exchange_counted};
use lab::vmm_process::cost;
use std::time::Duration;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:01";

/// How long a console may be silent while a guest reboots.
const SILENCE: Duration = Duration::from_secs(120);

/// A guest with a NIC and a disk, whose VMM logs its resources.
fn start(net: &SimDevice, block: &SimDevice) -> Guest {
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .silence(SILENCE)
        .argument("--log-level", "debug")
        .argument("--vdpa", &format!("path={},id=nic", net.path().display()))
        .argument("--vdpa", &format!("path={},id=blk", block.path().display()));
    Guest::start(&arguments).unwrap()
}

/// Checks the NIC: 200 frames return, and the device counted them.
fn check_nic(guest: &mut Guest, net: &SimDevice) {
    let frames = Frames {
        count: 200,
        size: 590,
        window: 16,
    };
    exchange_counted(guest, "eth0", net, &[frames]).unwrap();
}

/// Frames of a flood return whole or not at all.
fn check_flood(totals: &serde_json::Value) {
    assert_eq!(totals["corrupt"], 0, "{totals}");
    assert_eq!(totals["duplicate"], 0, "{totals}");
    assert!(totals["rx"].as_u64() > Some(0), "{totals}");
}

/// Reboots, and leaves the guest as after its first boot.
fn reboot(guest: &mut Guest) {
    guest.command("reboot").unwrap();
    let ready = guest.wait_ready(SILENCE).unwrap();
    assert_eq!(ready["nics"][0]["mac"], MAC);
}

/// Compares the lines that the VMM logged at each reset, with at least this many of the machine and
/// of the NIC.
fn check_log(console: &str, machine_resets: u32, nic_resets: u32) {
    let line = |what, skipped, least: u32| SteadyLine {
        what,
        skipped,
        least: usize::try_from(least).unwrap(),
    };
    // A device's first reset is the one of the driver that finds it: only RAM is mapped then.
    let lines = [
        line("machine reset", 0, machine_resets),
        line("vDPA device reset device=nic", 1, nic_resets),
        line("vDPA device reset device=blk", 1, machine_resets),
    ];
    steady_log(console, &lines).unwrap();
}

/// Rebinds of the driver while frames are in flight, and at any other moment.
const REBINDS: [(u32, u32); 2] = [(60, 20), (40, 0)];
/// Rebinds before the accounts begin.
const FIRST_REBINDS: u32 = 5;

fn resets_and_reboots(mapping: Mapping) {
    require_lab().unwrap();
    let _mapping = OtherMapping::load(mapping).unwrap();
    let net = SimDevice::net("leaks", MAC, 1500).unwrap();
    let block = SimDevice::block("leaks-blk").unwrap();
    // One processor: under emulation, a guest with two is lost in about every fifth run of this
    // load (tests/README.md). hardware_sriov_cycles and hardware_labnic_cycles use two.
    let mut guest = start(&net, &block);
    // Each action once, so that resources allocated at first use exist.
    guest.command("flood-on 512").unwrap();
    let first = format!("rebind-flooded {FIRST_REBINDS} 20");
    guest.command(&first).unwrap();
    check_flood(&guest.command("flood-off").unwrap());
    reboot(&mut guest);
    check_nic(&mut guest, &net);
    let before = cost(guest.pid()).unwrap();

    guest.command("flood-on 512").unwrap();
    for (times, frames) in REBINDS {
        let line = format!("rebind-flooded {times} {frames}");
        guest.command(&line).unwrap();
    }
    check_flood(&guest.command("flood-off").unwrap());
    check_nic(&mut guest, &net);
    same_cost(&before, &cost(guest.pid()).unwrap()).unwrap();

    let reboots = cycles().unwrap();
    for _ in 0..reboots {
        guest.command("flood-on 512").unwrap();
        reboot(&mut guest);
    }
    check_nic(&mut guest, &net);
    same_cost(&before, &cost(guest.pid()).unwrap()).unwrap();
    let rebinds = FIRST_REBINDS + REBINDS.map(|(times, _)| times).iter().sum::<u32>();
    // Includes the first reboot.
    let machine_resets = reboots + 1;
    check_log(&guest.console(), machine_resets, rebinds + machine_resets);
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

#[test]
fn nothing_leaks_with_pinned_memory() {
    resets_and_reboots(Mapping::PINNED_ONE_BY_ONE);
}

#[test]
fn nothing_leaks_with_shared_virtual_addresses_in_batches() {
    resets_and_reboots(Mapping::DEFAULT);
}

/// The two other mappings: `soak` only.
#[test]
fn nothing_leaks_with_the_other_mappings() {
    if !soak() {
        let what = "leaks: 2 of 4 mappings; vdpa_net has traffic with all 4";
        notice(Kind::Thinned, what);
        return;
    }
    for use_va in [false, true] {
        resets_and_reboots(Mapping {
            use_va,
            batch_mapping: !use_va,
        });
    }
}
