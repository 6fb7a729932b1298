//! The host takes virtual functions back while their guests send. A function's driver is unbound, a
//! function is reset, and all functions are removed at once.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod guest_nics;
mod removal;

use guest_nics::wait_nics;
use lab::guest::{BellhopArguments, Guest};
use lab::sriov::{SriovNic, VfDevice};
use lab::traffic::{Frames, exchange_between};
use lab::vmm_process::cost;
use removal::ends;
use std::path::Path;
use std::time::{Duration, Instant};

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(60);

const FRAMES: Frames = Frames {
    count: 200,
    size: 300,
    window: 16,
};

/// A guest with a NIC on this function.
fn guest(device: &VfDevice<'_>, options: &str) -> Guest {
    let nic = format!("path={},id=nic{options}", device.path().display());
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .argument("--vdpa", &nic)
        .argument("--log-level", "info");
    Guest::start(&arguments).unwrap()
}

/// Takes the function of one of two guests away. The guest has a backup and continues.
#[track_caller]
fn continues_on_its_backup(take: impl FnOnce(&VfDevice<'_>)) {
    let nic = SriovNic::enable(3).unwrap();
    let devices = [0, 1, 2].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let [own, peer, backup] = &devices;
    let macs = devices.each_ref().map(|device| device.function().mac());
    let mut first = guest(own, &format!(",backup={}", backup.path().display()));
    let mut second = guest(peer, "");
    exchange_between(&mut first, &mut second, &macs[1], FRAMES).unwrap();
    first.command("flood-on 512").unwrap();
    take(own);
    let begin = Instant::now();
    while !first.console().contains("moved to its backup device") {
        assert!(begin.elapsed() < LIMIT, "{}", first.console());
        std::thread::sleep(Duration::from_millis(20));
    }
    first.command_within("flood-off", LIMIT).unwrap();
    wait_nics(&mut first, &[macs[0].as_str()]);
    exchange_between(&mut first, &mut second, &macs[1], FRAMES).unwrap();
    exchange_between(&mut second, &mut first, &macs[0], FRAMES).unwrap();
    for guest in [first, second] {
        assert!(guest.power_off().unwrap().success());
    }
}

#[test]
fn a_guest_continues_when_the_driver_of_its_function_is_unbound() {
    continues_on_its_backup(|device| {
        let address = device.function().address().to_owned();
        ends("unbind of vp-vdpa", move || {
            std::fs::write("/sys/bus/pci/drivers/vp-vdpa/unbind", address).unwrap();
        });
    });
}

#[test]
fn a_guest_continues_when_its_function_is_reset() {
    continues_on_its_backup(|device| {
        let function = Path::new("/sys/bus/pci/devices").join(device.function().address());
        ends("reset of a function", move || {
            std::fs::write(function.join("reset"), "1").unwrap();
        });
    });
}

#[test]
fn all_functions_go_at_once_and_their_guests_lose_their_nics() {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let macs = devices.each_ref().map(|device| device.function().mac());
    let mut guests = devices.each_ref().map(|device| guest(device, ""));
    let [first, second] = &mut guests;
    exchange_between(first, second, &macs[1], FRAMES).unwrap();
    for guest in &mut guests {
        guest.command("flood-on 512").unwrap();
    }
    let function = Path::new("/sys/bus/pci/devices").join(devices[0].function().address());
    let control = std::fs::canonicalize(function.join("physfn/sriov_numvfs")).unwrap();
    ends("sriov_numvfs = 0", move || {
        std::fs::write(control, "0").unwrap();
    });
    for mut guest in guests {
        guest.command_within("flood-off", LIMIT).unwrap();
        wait_nics(&mut guest, &[]);
        assert_eq!(cost(guest.pid()).unwrap().pinned_kib, 0);
        assert!(guest.power_off().unwrap().success());
    }
    // They are gone, with their functions.
    std::mem::forget(devices);
}
