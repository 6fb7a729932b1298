//! A guest whose NIC is behind a virtio-iommu, in each mode of Debian's kernel. Its frames, memory
//! and messages are unchanged after a hot swap, a live upgrade, migrations and a restore.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod guest_nics;
#[path = "moving/lifecycle.rs"]
mod lifecycle;
mod live;
mod moving;

use guest_nics::wait_nics;
use lab::endurance::soak;
use lab::guest::BellhopArguments;
use lab::messages::messages;
use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::traffic::{check_traffic, flood_off, flood_on};
use lifecycle::{save_and_restore, swap, upgrade};
use moving::{DOWNTIME, Host, MAPPINGS, SHADOW_QUEUES, move_guest_verified};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:02";

/// `words` of the kernel's command line choose its mode; sysfs reports it as `kind`. `tracking` is
/// how its migrations find what the device writes. The short form migrates once and restores.
fn swap_upgrade_migrate_restore(mapping: Mapping, (words, kind): (&str, &str), tracking: &str) {
    require_lab().unwrap();
    let _mapping = OtherMapping::load(mapping).unwrap();
    let devices = ["iommu1", "iommu2"].map(|name| SimDevice::net(name, MAC, 1500).unwrap());
    let hosts = devices.each_ref().map(|device| {
        let host = Host::new(device.name(), device.path());
        host.nic_options("iommu=on")
    });
    // The destination compares all memory with a digest, which takes an unoptimized build long.
    let small = || BellhopArguments::stock().unwrap().memory("128M");
    let arguments = || small().cmdline(words);
    let mut guest = hosts[0].boot(arguments());
    wait_nics(&mut guest, &[MAC]);
    let info = guest.command("info").unwrap();
    assert_eq!(info["nics"][0]["iommu"], kind, "{info}");
    check_traffic(&mut guest, &devices[0]);
    let messages_before = messages(&mut guest).unwrap();

    if soak() {
        flood_on(&mut guest, "eth0", MAC);
        swap(&hosts[0], [devices[0].path(), devices[1].path()]);
        flood_off(&mut guest);
        check_traffic(&mut guest, &devices[0]);

        flood_on(&mut guest, "eth0", MAC);
        upgrade(&guest, &hosts[0]);
        flood_off(&mut guest);
        check_traffic(&mut guest, &devices[0]);
    }

    let moves = if soak() { 2 } else { 1 };
    let mut at = 0;
    for _ in 0..moves {
        let to = 1 - at;
        flood_on(&mut guest, "eth0", MAC);
        let (moved, status) =
            move_guest_verified(guest, &hosts[at], &hosts[to], tracking, DOWNTIME);
        println!("{status}");
        guest = moved;
        flood_off(&mut guest);
        check_traffic(&mut guest, &devices[to]);
        at = to;
    }

    let to = 1 - at;
    let mut guest = save_and_restore(guest, &hosts[at], &hosts[to], arguments());
    check_traffic(&mut guest, &devices[to]);
    // The next driver maps its buffers in the restored domains.
    let rebound = guest.command("rebind 1").unwrap();
    assert_eq!(rebound["rx"], 10, "{rebound}");
    assert_eq!(messages(&mut guest).unwrap(), messages_before);
    assert!(guest.power_off().unwrap().success());
}

const LAZY: (&str, &str) = ("iommu.passthrough=0 iommu.strict=0", "DMA-FQ");
const STRICT: (&str, &str) = ("iommu.passthrough=0 iommu.strict=1", "DMA");
const PASSTHROUGH: (&str, &str) = ("iommu.passthrough=1", "identity");

#[test]
fn a_guest_that_unmaps_lazily() {
    swap_upgrade_migrate_restore(Mapping::DEFAULT, LAZY, MAPPINGS);
}

#[test]
fn a_guest_that_unmaps_lazily_on_a_device_that_maps_at_once() {
    swap_upgrade_migrate_restore(Mapping::PINNED_ONE_BY_ONE, LAZY, MAPPINGS);
}

#[test]
fn a_guest_that_unmaps_at_once() {
    swap_upgrade_migrate_restore(Mapping::PINNED_ONE_BY_ONE, STRICT, MAPPINGS);
}

#[test]
fn a_guest_that_unmaps_at_once_on_a_device_that_maps_all_again() {
    swap_upgrade_migrate_restore(Mapping::DEFAULT, STRICT, MAPPINGS);
}

#[test]
fn a_guest_that_passes_its_nic_through() {
    swap_upgrade_migrate_restore(Mapping::DEFAULT, PASSTHROUGH, SHADOW_QUEUES);
}

#[test]
fn a_guest_that_passes_its_nic_through_on_a_device_that_maps_at_once() {
    swap_upgrade_migrate_restore(Mapping::PINNED_ONE_BY_ONE, PASSTHROUGH, SHADOW_QUEUES);
}
