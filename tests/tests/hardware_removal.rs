//! The host takes a device back while its guest sends. The NIC moves to its backup device. Without
//! one the device is closed, and the guest is asked to eject the NIC.
//!
//! The kernel waits in the removal until the VMM has closed the device, so its end proves that. The
//! machine's own account proves that nothing is left.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod control;
mod guest_nics;
mod removal;

use control::{Control, SILENCE, is_free, machine, start};
use guest_nics::wait_nics;
use lab::guest::{BellhopArguments, Guest};
use lab::labnic::{Labnic, trouble};
use lab::sim::{SimDevice, require_lab, vdpa};
use lab::traffic::{Frames, check_traffic, exchange};
use lab::vmm_process::cost;
use removal::ends;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:54:01";
const OTHER_MAC: &str = "52:54:5e:11:54:02";

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(60);

/// DEVICE_NEEDS_RESET in the device status (virtio 1.3, 2.1).
const NEEDS_RESET: u64 = 64;

const SOME: Frames = Frames {
    count: 50,
    size: 300,
    window: 8,
};

/// A way in which the host takes a device back.
type Way = fn(&SimDevice);

/// `vdpa dev del`.
#[track_caller]
fn delete(device: &SimDevice) {
    let name = device.name().to_owned();
    ends("vdpa dev del", move || {
        vdpa(&["dev", "del", &name]).unwrap();
    });
}

/// The device stays, without its driver.
#[track_caller]
fn unbind(device: &SimDevice) {
    let name = device.name().to_owned();
    ends("unbind of vhost_vdpa", move || {
        std::fs::write("/sys/bus/vdpa/drivers/vhost_vdpa/unbind", name).unwrap();
    });
}

/// The machine's NICs.
fn nics(control: &Control) -> Value {
    control.ok("nics")["nics"].clone()
}

/// Waits until the guest has ejected the NIC and the machine has what it had before.
#[track_caller]
fn is_unplugged(control: &Control, guest: &mut Guest, before: &Value) {
    wait_nics(guest, &[]);
    let begin = Instant::now();
    while nics(control) != json!([]) {
        assert!(begin.elapsed() < LIMIT, "{}", nics(control));
    }
    assert_eq!(control.ok("resources"), *before);
}

/// Waits until the NIC is on this device.
#[track_caller]
fn is_on(control: &Control, device: &SimDevice) {
    let begin = Instant::now();
    loop {
        let nics = nics(control);
        if nics[0]["path"] == json!(device.path()) {
            assert_eq!(nics[0]["state"], "plugged", "{nics}");
            return;
        }
        assert!(begin.elapsed() < LIMIT, "{nics}");
    }
}

#[track_caller]
fn plug(control: &Control, device: &SimDevice, options: &str) {
    let path = device.path().display();
    control.ok(&format!("plug path={path},id=nic{options}"));
}

#[test]
fn a_nic_without_a_backup_is_closed_and_unplugged() {
    require_lab().unwrap();
    let (control, mut guest) = start("removed");
    wait_nics(&mut guest, &[]);
    let before = control.ok("resources");
    let mut descriptors = None;
    let ways: [Way; 4] = [delete, unbind, delete, unbind];
    for way in ways {
        let device = SimDevice::net("removed", MAC, 1500).unwrap();
        plug(&control, &device, "");
        wait_nics(&mut guest, &[MAC]);
        check_traffic(&mut guest, &device);
        guest
            .command(&format!("flood-on 300 16 eth0 to {MAC}"))
            .unwrap();
        way(&device);
        guest.command_within("flood-off", LIMIT).unwrap();
        is_unplugged(&control, &mut guest, &before);
        // After the first time, when all that is allocated at first use exists.
        let now = cost(guest.pid()).unwrap();
        assert_eq!(now.pinned_kib, 0);
        let now = (now.descriptors, now.threads);
        assert_eq!(now, *descriptors.get_or_insert(now));
    }
    assert!(guest.console().contains("the host has removed the device"));
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_nic_moves_to_its_backup_and_no_frame_is_lost() {
    require_lab().unwrap();
    let ways: [Way; 2] = [delete, unbind];
    for way in ways {
        let first = SimDevice::net("first", MAC, 1500).unwrap();
        let second = SimDevice::net("second", OTHER_MAC, 1500).unwrap();
        let (control, mut guest) = start("backup");
        let before = control.ok("resources");
        plug(
            &control,
            &first,
            &format!(",backup={}", second.path().display()),
        );
        wait_nics(&mut guest, &[MAC]);
        check_traffic(&mut guest, &first);
        guest
            .command(&format!("flood-on 300 16 eth0 to {MAC}"))
            .unwrap();
        std::thread::sleep(Duration::from_millis(300));
        way(&first);
        is_on(&control, &second);
        std::thread::sleep(Duration::from_millis(300));
        let answer = guest.command_within("flood-off", LIMIT).unwrap();
        // The simulator suspends, so the backup begins exactly where it stopped.
        for what in ["lost", "corrupt", "duplicate"] {
            assert_eq!(answer[what], 0, "{what}: {answer}");
        }
        wait_nics(&mut guest, &[MAC]);
        exchange(&mut guest, "eth0", SOME).unwrap();
        // The backup is used up.
        way(&second);
        is_unplugged(&control, &mut guest, &before);
        assert!(guest.power_off().unwrap().success());
    }
}

#[test]
fn a_missing_backup_does_not_hold_the_host_up() {
    require_lab().unwrap();
    let device = SimDevice::net("missing", MAC, 1500).unwrap();
    let (control, mut guest) = start("missing");
    let before = control.ok("resources");
    plug(&control, &device, ",backup=/dev/vhost-vdpa-none");
    wait_nics(&mut guest, &[MAC]);
    check_traffic(&mut guest, &device);
    delete(&device);
    is_unplugged(&control, &mut guest, &before);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn mapped_doorbells_go_with_their_device() {
    let labnic = Labnic::load(&[]).unwrap();
    let (control, mut guest) = start("doorbells");
    let before = control.ok("resources");
    for backup in [false, true] {
        let first = labnic.add("first", &["mac", MAC]).unwrap();
        let second = labnic.add("second", &["mac", OTHER_MAC]).unwrap();
        let options = if backup {
            format!(",doorbell=on,backup={}", second.path().display())
        } else {
            ",doorbell=on".to_owned()
        };
        plug(&control, &first, &options);
        wait_nics(&mut guest, &[MAC]);
        guest.command("flood-on 512").unwrap();
        std::thread::sleep(Duration::from_millis(300));
        assert_ne!(control.ok("resources"), before);
        delete(&first);
        if backup {
            is_on(&control, &second);
            let mapped = control.ok("resources")["mapped_doorbells"].as_u64();
            assert!(mapped >= Some(2), "{mapped:?}");
            delete(&second);
        } else {
            is_free(&second);
        }
        guest.command_within("flood-off", LIMIT).unwrap();
        is_unplugged(&control, &mut guest, &before);
    }
    assert!(guest.power_off().unwrap().success());
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

/// Such a guest sees no link, its commands fail at once, and its next boot finds no NIC.
#[test]
fn a_guest_that_does_not_eject_the_nic_does_not_hold_the_host_up() {
    require_lab().unwrap();
    let device = SimDevice::net("deaf", MAC, 1500).unwrap();
    let control = Control::new("deaf");
    let arguments = BellhopArguments::small()
        .unwrap()
        .cmdline("acpiphp.disable=1")
        .argument(
            "--vdpa",
            &format!("path={},id=nic", device.path().display()),
        );
    let mut guest = Guest::start(&machine(arguments, &control)).unwrap();
    wait_nics(&mut guest, &[MAC]);
    check_traffic(&mut guest, &device);
    delete(&device);
    let nic = |guest: &mut Guest| guest.command("link").unwrap()["nics"][0].clone();
    let begin = Instant::now();
    while nic(&mut guest)["carrier"] != 0 {
        assert!(begin.elapsed() < LIMIT, "{}", nic(&mut guest));
    }
    let shown = nic(&mut guest);
    let status = shown["status"].as_str().unwrap().trim_start_matches("0x");
    let status = u64::from_str_radix(status, 16).unwrap();
    assert_eq!(status, 15 | NEEDS_RESET, "{shown}");
    guest.command(&format!("mac {OTHER_MAC}")).unwrap_err();
    assert_eq!(nics(&control)[0]["state"], "device-removed");
    guest.command("reboot").unwrap();
    guest.wait_ready(SILENCE).unwrap();
    wait_nics(&mut guest, &[]);
    assert_eq!(nics(&control), json!([]));
    assert!(guest.power_off().unwrap().success());
}

/// A device without hot-plug is closed, too.
#[test]
fn a_block_device_is_closed() {
    require_lab().unwrap();
    let device = SimDevice::block("removed-blk").unwrap();
    let arguments = BellhopArguments::small().unwrap().vdpa(device.path());
    let guest = Guest::start(&arguments).unwrap();
    let path = device.path().to_owned();
    delete(&device);
    assert!(!Path::new(&path).exists());
    assert!(guest.power_off().unwrap().success());
}
