//! NICs that are plugged and unplugged while the guest runs.
//!
//! The machine is `lab-machine`, which passes requests from a socket to the machine's handle. The
//! guest reports what it sees. A later user can open the device, which proves that it is free. The
//! kernel's account of the process and the machine's own account prove that nothing leaks.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod control;
mod guest_nics;

use control::{Control, SILENCE, is_free, machine, start};
use guest_nics::wait_nics;
use lab::endurance::{GROWTH, cycles};
use lab::guest::{BellhopArguments, Guest};
use lab::labnic::Labnic;
use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::traffic::check_traffic;
use lab::vmm_process::cost;
use serde_json::json;
use std::fs::File;
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:54:01";
const SECOND_MAC: &str = "52:54:5e:11:54:02";

/// How long the driver may take to acknowledge an announcement; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

const PINNED: Mapping = Mapping {
    use_va: false,
    batch_mapping: true,
};

#[track_caller]
fn is_quiet(guest: &Guest) {
    let console = guest.console();
    for word in ["ERROR", "WARN", "panicked"] {
        let said: Vec<&str> = console.lines().filter(|line| line.contains(word)).collect();
        assert!(said.is_empty(), "{said:#?}");
    }
}

fn is_inserted_and_ejected(arguments: BellhopArguments, name: &str) {
    let device = SimDevice::net("plug", MAC, 1500).unwrap();
    let control = Control::new(name);
    let mut guest = Guest::start(&machine(arguments, &control)).unwrap();
    wait_nics(&mut guest, &[]);
    let before = control.ok("resources");
    let nic = control.plug(&device, "nic");
    assert!(
        nic["address"].as_str().unwrap().starts_with("0000:00:"),
        "{nic}"
    );
    wait_nics(&mut guest, &[MAC]);
    check_traffic(&mut guest, &device);
    assert_ne!(control.ok("resources"), before);

    control.unplug("nic");
    wait_nics(&mut guest, &[]);
    is_free(&device);
    assert_eq!(control.ok("resources"), before);
    assert_eq!(control.ok("nics")["nics"], json!([]));
    // The same slot again.
    let again = control.plug(&device, "nic");
    assert_eq!(again["address"], nic["address"]);
    assert_ne!(again["serial"], nic["serial"]);
    wait_nics(&mut guest, &[MAC]);
    check_traffic(&mut guest, &device);
    is_quiet(&guest);
    assert!(guest.power_off().unwrap().success());
    is_free(&device);
}

#[test]
fn a_nic_is_plugged_and_unplugged_in_the_small_kernel() {
    require_lab().unwrap();
    is_inserted_and_ejected(BellhopArguments::small().unwrap().processors(2), "small");
}

#[test]
fn a_nic_is_plugged_and_unplugged_in_the_stock_kernel() {
    require_lab().unwrap();
    is_inserted_and_ejected(BellhopArguments::stock().unwrap(), "stock");
}

#[test]
fn cycles_leak_nothing() {
    require_lab().unwrap();
    // With pinned memory, mappings for the device are visible.
    let _pinned = OtherMapping::load(PINNED).unwrap();
    let device = SimDevice::net("plug", MAC, 1500).unwrap();
    let (control, mut guest) = start("cycles");
    let mut accounts = None;
    for cycle in 0..cycles().unwrap().max(3) {
        control.plug(&device, "nic");
        wait_nics(&mut guest, &[MAC]);
        if cycle % 5 == 0 {
            check_traffic(&mut guest, &device);
        }
        control.unplug("nic");
        is_free(&device);
        let now = (cost(guest.pid()).unwrap(), control.ok("resources"));
        // After the first cycle, so that resources allocated at first use exist.
        let (first, held) = accounts.get_or_insert_with(|| now.clone());
        assert_eq!(&now.1, held, "cycle {cycle}");
        assert_eq!(now.0.pinned_kib, 0);
        assert_eq!(
            (now.0.descriptors, now.0.threads),
            (first.descriptors, first.threads),
            "cycle {cycle}"
        );
        // The allocator may keep a mapping or two.
        assert!(now.0.mappings <= first.mappings + 2, "{now:?} {first:?}");
        assert!(now.0.own_kib <= first.own_kib + GROWTH, "{now:?} {first:?}");
    }
    is_quiet(&guest);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_mapped_doorbell_goes_under_traffic() {
    let labnic = Labnic::load(&[]).unwrap();
    let device = labnic.add("plug", &["mac", MAC]).unwrap();
    let (control, mut guest) = start("doorbell");
    let before = control.ok("resources");
    for _ in 0..3 {
        control.ok(&format!(
            "plug path={},id=nic,doorbell=on",
            device.path().display()
        ));
        wait_nics(&mut guest, &[MAC]);
        let sent = guest.command("pace 20 128 1000").unwrap();
        assert_eq!(sent["statistics"]["tx_packets"], 20, "{sent}");
        let mapped = control.ok("resources")["mapped_doorbells"].as_u64();
        assert!(mapped >= Some(2), "{mapped:?}");
        guest.command("flood-on 512").unwrap();
        std::thread::sleep(Duration::from_millis(300));
        control.unplug("nic");
        guest.command("flood-off").unwrap();
        wait_nics(&mut guest, &[]);
        is_free(&device);
        assert_eq!(control.ok("resources"), before);
    }
    is_quiet(&guest);
    assert!(guest.power_off().unwrap().success());
    drop(device);
    assert_eq!(lab::labnic::trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn an_unplug_without_an_answer_waits_for_the_reset() {
    require_lab().unwrap();
    let first = SimDevice::net("plug", MAC, 1500).unwrap();
    let second = SimDevice::net("plug2", SECOND_MAC, 1500).unwrap();
    let control = Control::new("deaf");
    // A guest without a hot-plug driver.
    let arguments = BellhopArguments::small()
        .unwrap()
        .cmdline("acpiphp.disable=1")
        .argument(
            "--vdpa",
            &format!("path={},id=first", first.path().display()),
        );
    let mut guest = Guest::start(&machine(arguments, &control)).unwrap();
    wait_nics(&mut guest, &[MAC]);
    // Twice: the second request only repeats the first.
    for _ in 0..2 {
        let nic = control.ok("unplug first");
        assert_eq!(nic["state"], "unplug-requested");
        assert!(!control.is_unplugged(&nic, Duration::from_secs(1)));
    }
    // Until then the NIC works and keeps its name, and others can be plugged.
    check_traffic(&mut guest, &first);
    let error = control.refused(&format!("plug path={},id=first", second.path().display()));
    assert!(error.contains("device first already"), "{error}");
    control.plug(&second, "second");
    assert_eq!(control.ok("nics")["nics"].as_array().unwrap().len(), 2);

    guest.command("reboot").unwrap();
    guest.wait_ready(SILENCE).unwrap();
    wait_nics(&mut guest, &[SECOND_MAC]);
    is_free(&first);
    assert_eq!(control.ok("nics")["nics"][0]["id"], "second");
    check_traffic(&mut guest, &second);
    is_quiet(&guest);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_nic_that_was_plugged_early_is_found_and_survives_reboots() {
    require_lab().unwrap();
    let device = SimDevice::net("plug", MAC, 1500).unwrap();
    let control = Control::new("early");
    let arguments = machine(BellhopArguments::small().unwrap(), &control);
    let mut guest = std::thread::scope(|scope| {
        // Before the guest's kernel has scanned its buses.
        scope.spawn(|| control.plug(&device, "nic"));
        Guest::start(&arguments).unwrap()
    });
    if guest.retries() > 0 {
        // The attempt that received it is gone.
        control.plug(&device, "nic");
    }
    wait_nics(&mut guest, &[MAC]);
    for _ in 0..2 {
        guest.command("reboot").unwrap();
        guest.wait_ready(SILENCE).unwrap();
        wait_nics(&mut guest, &[MAC]);
        check_traffic(&mut guest, &device);
    }
    control.unplug("nic");
    wait_nics(&mut guest, &[]);
    is_quiet(&guest);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn the_error_for_an_impossible_plug_or_unplug_gives_the_reason() {
    require_lab().unwrap();
    let device = SimDevice::net("plug", MAC, 1500).unwrap();
    let block = SimDevice::block("plug-blk").unwrap();
    let (control, mut guest) = start("errors");
    let before = (
        control.ok("resources"),
        cost(guest.pid()).unwrap().descriptors,
    );
    let path = device.path().display();
    let held = File::options().read(true).write(true).open(device.path());
    for (line, words) in [
        (format!("plug path={path}"), "in use"),
        ("plug path=/dev/vhost-vdpa-99".into(), "No such file"),
        ("plug path=/dev/null".into(), "cannot use vDPA device"),
        (
            format!("plug path={}", block.path().display()),
            "not a network device",
        ),
        (format!("plug path={path},id=rng"), ""),
        ("unplug absent".into(), "no device absent"),
        ("unplug rng".into(), "not a network device"),
    ] {
        let error = control.refused(&line);
        println!("{line}: {error}");
        assert!(error.contains(words), "{line}: {error}");
    }
    drop(held);
    let error = control.refused(&format!("plug path={path},id=rng"));
    assert!(error.contains("device rng already"), "{error}");
    let error = control.refused(&format!("plug path={path},doorbell=on"));
    println!("{error}");
    is_free(&device);
    let after = (
        control.ok("resources"),
        cost(guest.pid()).unwrap().descriptors,
    );
    assert_eq!(before, after);
    // The machine still works.
    control.plug(&device, "nic");
    wait_nics(&mut guest, &[MAC]);
    check_traffic(&mut guest, &device);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn more_nics_than_slots() {
    require_lab().unwrap();
    // Slot 0 holds the host bridge, slot 1 the random number generator.
    const ROOM: usize = 30;
    let devices: Vec<SimDevice> = (0..=ROOM)
        .map(|number| {
            let mac = format!("52:54:5e:11:55:{:02x}", number + 1);
            SimDevice::net(&format!("plug{number}"), &mac, 1500).unwrap()
        })
        .collect();
    let control = Control::new("slots");
    // A guest that ignores them: the test covers only the machine.
    let arguments = BellhopArguments::small()
        .unwrap()
        .cmdline("acpiphp.disable=1");
    let guest = Guest::start(&machine(arguments, &control)).unwrap();
    let before = control.ok("resources");
    for (number, device) in devices.iter().take(ROOM).enumerate() {
        control.plug(device, &format!("nic{number}"));
    }
    let last = devices.last().unwrap();
    let error = control.refused(&format!("plug path={}", last.path().display()));
    assert!(error.contains("no free PCI slot"), "{error}");
    is_free(last);
    assert_ne!(control.ok("resources"), before);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn too_little_locked_memory_is_reported_to_the_caller() {
    require_lab().unwrap();
    let _pinned = OtherMapping::load(PINNED).unwrap();
    let device = SimDevice::net("plug", MAC, 1500).unwrap();
    let (control, mut guest) = start("memlock");
    let before = control.ok("resources");
    limit_locked_memory(&guest, Some(1 << 20));
    let line = format!("plug path={},id=nic", device.path().display());
    for _ in 0..3 {
        let error = control.refused(&line);
        assert!(error.contains("RLIMIT_MEMLOCK"), "{error}");
        is_free(&device);
    }
    assert_eq!(cost(guest.pid()).unwrap().pinned_kib, 0);
    assert_eq!(control.ok("resources"), before);
    limit_locked_memory(&guest, None);
    control.plug(&device, "nic");
    wait_nics(&mut guest, &[MAC]);
    check_traffic(&mut guest, &device);
    assert!(cost(guest.pid()).unwrap().pinned_kib >= 256 * 1024);
    control.unplug("nic");
    assert_eq!(cost(guest.pid()).unwrap().pinned_kib, 0);
    assert!(guest.power_off().unwrap().success());
}

/// Sets RLIMIT_MEMLOCK of the machine's process, in bytes; `None` means no limit.
fn limit_locked_memory(guest: &Guest, bytes: Option<u64>) {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = Pid::from_raw(guest.pid().try_into().unwrap()).unwrap();
    let limit = Rlimit {
        current: bytes,
        maximum: None,
    };
    prlimit(Some(pid), Resource::Memlock, limit).unwrap();
}

/// The request that a migration sends at its end, here without a migration.
#[test]
fn a_guest_announces_its_nic_when_it_is_asked() {
    require_lab().unwrap();
    let device = SimDevice::net("plug", MAC, 1500).unwrap();
    let control = Control::new("announce");
    let arguments = BellhopArguments::small().unwrap().argument(
        "--vdpa",
        &format!("path={},id=nic", device.path().display()),
    );
    let mut guest = Guest::start(&machine(arguments, &control)).unwrap();
    wait_nics(&mut guest, &[MAC]);
    for times in 1..=3 {
        control.ok("announce nic");
        let start = Instant::now();
        // The driver's acknowledgement.
        while guest.console().matches("has announced itself").count() < times {
            assert!(start.elapsed() < NOTICE, "{}", guest.console());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let refused = control.refused("announce other");
    assert!(refused.contains("no device other"), "{refused}");
    check_traffic(&mut guest, &device);
    assert!(guest.power_off().unwrap().success());
}
