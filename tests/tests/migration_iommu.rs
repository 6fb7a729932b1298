//! A guest whose NIC is behind a virtio-iommu, in each mode of Debian's kernel. Its frames, memory
//! and messages are unchanged after a hot swap, a live upgrade, migrations and a restore.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod guest_nics;
mod live;
mod moving;

use std::path::Path;
use std::process::Command;

use guest_nics::wait_nics;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::temp_path::TempPath;
use lab::traffic::{check_traffic, flood_off, flood_on};
use live::{ask_upgrade, swap_nic, wait_upgrade};
use moving::{DOWNTIME, Host, MAPPINGS, NOTICE, SHADOW_QUEUES, move_guest_verified};
use serde_json::{Value, json};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:02";

/// The NIC moves to another device and back.
#[track_caller]
fn swap(host: &Host, devices: [&SimDevice; 2]) {
    let [own, other] = devices;
    for device in [other, own] {
        swap_nic(&host.client(), device.path());
    }
}

/// The same program continues the VM in the same process.
#[track_caller]
fn upgrade(guest: &Guest, host: &Host) {
    let client = host.client();
    ask_upgrade(&client, Path::new(&std::env::var_os("BELLHOP").unwrap()));
    let ended = |vm: &Value| vm["upgrades"] == 1 || vm["upgrade_error"].is_string();
    let vm = wait_upgrade(guest, &client, ended);
    assert_eq!(vm["upgrade_error"], Value::Null, "{vm}");
}

/// Saves the VM, stops it, and restores it on the device of `there`.
#[track_caller]
fn save_and_restore(mut guest: Guest, here: &Host, there: &Host, files: BellhopArguments) -> Guest {
    let saved = TempPath::new("iommu-snapshot");
    let client = here.client();
    let body = json!({ "path": saved.text() });
    let answer = client.ask("POST", "/v1/vm/snapshot", Some(&body)).unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    let stop = json!({ "state": "Stopped" });
    client.done("PATCH", "/v1/vm", Some(&stop)).unwrap();
    assert!(guest.wait_exit(NOTICE).unwrap().success());
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command
        .args(["run", "--restore", saved.text()])
        .args(files.allow_boot_files())
        .args(["--vdpa", there.vdpa()]);
    Guest::start_restored(command, NOTICE).unwrap()
}

/// `words` of the kernel's command line choose its mode; sysfs reports it as `kind`. `tracking` is
/// how its migrations find what the device writes.
fn swap_upgrade_migrate_restore(mapping: Mapping, words: &str, kind: &str, tracking: &str) {
    require_lab().unwrap();
    let _mapping = OtherMapping::load(mapping).unwrap();
    let devices = ["iommu1", "iommu2"].map(|name| SimDevice::net(name, MAC, 1500).unwrap());
    let [first, second] = &devices;
    let host = |device: &SimDevice| Host::new(device.name(), device.path());
    let [here, there] = [host(first), host(second)].map(|host| host.nic_options("iommu=on"));
    // The destination compares all memory with a digest, which takes an unoptimized build long.
    let small = || BellhopArguments::stock().unwrap().memory("128M");
    let arguments = || small().cmdline(words);
    let mut guest = here.boot(arguments());
    wait_nics(&mut guest, &[MAC]);
    let info = guest.command("info").unwrap();
    assert_eq!(info["nics"][0]["iommu"], kind, "{info}");
    check_traffic(&mut guest, first);
    let messages_before = messages(&mut guest).unwrap();

    flood_on(&mut guest, "eth0", MAC);
    swap(&here, [first, second]);
    flood_off(&mut guest);
    check_traffic(&mut guest, first);

    flood_on(&mut guest, "eth0", MAC);
    upgrade(&guest, &here);
    flood_off(&mut guest);
    check_traffic(&mut guest, first);

    for (from, to, device) in [(&here, &there, second), (&there, &here, first)] {
        flood_on(&mut guest, "eth0", MAC);
        let (moved, status) = move_guest_verified(guest, from, to, tracking, DOWNTIME);
        println!("{status}");
        guest = moved;
        flood_off(&mut guest);
        check_traffic(&mut guest, device);
    }

    let mut guest = save_and_restore(guest, &here, &there, arguments());
    check_traffic(&mut guest, second);
    // The next driver maps its buffers in the restored domains.
    let rebound = guest.command("rebind 1").unwrap();
    assert_eq!(rebound["rx"], 10, "{rebound}");
    assert_eq!(messages(&mut guest).unwrap(), messages_before);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_guest_that_unmaps_lazily() {
    let words = "iommu.passthrough=0 iommu.strict=0";
    swap_upgrade_migrate_restore(Mapping::DEFAULT, words, "DMA-FQ", MAPPINGS);
}

#[test]
fn a_guest_that_unmaps_at_once() {
    let words = "iommu.passthrough=0 iommu.strict=1";
    swap_upgrade_migrate_restore(Mapping::PINNED_ONE_BY_ONE, words, "DMA", MAPPINGS);
}

#[test]
fn a_guest_that_passes_its_nic_through() {
    let words = "iommu.passthrough=1";
    swap_upgrade_migrate_restore(Mapping::DEFAULT, words, "identity", SHADOW_QUEUES);
}
