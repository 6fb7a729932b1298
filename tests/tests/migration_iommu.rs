//! A guest whose NIC is behind a virtio-iommu, in each mode of Debian's kernel. Its frames, memory
//! and messages are unchanged after a hot swap, a live upgrade, migrations and a restore.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod guest_nics;
mod moving;

use std::process::Command;
use std::time::Instant;

use guest_nics::wait_nics;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::temp_path::TempPath;
use lab::traffic::check_traffic;
use moving::{Host, NOTICE, move_guest_as};
use serde_json::{Value, json};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:02";

/// The simulator then changes one mapping at a time. By default it copies all mappings at each
/// change, and an emulated guest that unmaps at once takes seconds for a hundred frames.
const ONE_BY_ONE: Mapping = Mapping {
    use_va: false,
    batch_mapping: false,
};

/// Starts checked frames that return, a window of them in flight, until `flood-off`.
fn flood_on(guest: &mut Guest) {
    let line = format!("flood-on 300 64 eth0 to {MAC}");
    guest.command(&line).unwrap();
}

/// Checks that each frame of the flood returned once, intact.
#[track_caller]
fn flood_off(guest: &mut Guest) {
    let came = guest.command("flood-off").unwrap();
    println!("{came}");
    assert!(came["rx"].as_u64() > Some(0), "{came}");
    for wrong in ["corrupt", "duplicate", "lost"] {
        assert_eq!(came[wrong], 0, "{wrong}: {came}");
    }
    assert_eq!(came["rx"], came["tx"], "{came}");
}

/// The NIC moves to another device and back.
#[track_caller]
fn swap(host: &Host, devices: [&SimDevice; 2]) {
    let [own, other] = devices;
    for device in [other, own] {
        let body = json!({ "path": device.path() });
        let client = host.client();
        let answer = client.ask("PATCH", "/v1/vm/nics/nic", Some(&body)).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        let nic = client.get("/v1/vm/nics/nic").unwrap();
        assert_eq!(nic["path"], json!(device.path()), "{nic}");
        assert_eq!(nic["device"]["driver_ok"], true, "{nic}");
    }
}

/// The same program continues the VM in the same process.
#[track_caller]
fn upgrade(host: &Host) {
    let body = json!({ "program": std::env::var("BELLHOP").unwrap() });
    let client = host.client();
    let answer = client.ask("POST", "/v1/vm/upgrade", Some(&body)).unwrap();
    assert_eq!(answer.status, 202, "{}", answer.body);
    let begin = Instant::now();
    loop {
        // The API is unavailable for a moment.
        if let Ok(vm) = client.get("/v1/vm") {
            assert_eq!(vm["upgrade_error"], Value::Null, "{vm}");
            if vm["upgrades"] == 1 {
                return;
            }
        }
        assert!(begin.elapsed() < NOTICE, "{}", host.account());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
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

/// `words` of the kernel's command line choose its mode; sysfs reports it as `kind`.
fn swap_upgrade_migrate_restore(mapping: Mapping, words: &str, kind: &str) {
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

    flood_on(&mut guest);
    swap(&here, [first, second]);
    flood_off(&mut guest);
    check_traffic(&mut guest, first);

    flood_on(&mut guest);
    upgrade(&here);
    flood_off(&mut guest);
    check_traffic(&mut guest, first);

    let verified = json!({ "verify_memory": true });
    for (from, to, device) in [(&here, &there, second), (&there, &here, first)] {
        flood_on(&mut guest);
        let (moved, status) = move_guest_as(guest, from, to, verified.clone());
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
    swap_upgrade_migrate_restore(Mapping::DEFAULT, words, "DMA-FQ");
}

#[test]
fn a_guest_that_unmaps_at_once() {
    let words = "iommu.passthrough=0 iommu.strict=1";
    swap_upgrade_migrate_restore(ONE_BY_ONE, words, "DMA");
}

#[test]
fn a_guest_that_passes_its_nic_through() {
    let words = "iommu.passthrough=1";
    swap_upgrade_migrate_restore(Mapping::DEFAULT, words, "identity");
}
