//! Guests on virtual functions of the SR-IOV rig: vp_vdpa, an IOMMU, several queues, and peers
//! on the same switch.

use lab::guest::{BellhopArguments, Guest};
use lab::sim::vdpa;
use lab::sriov::{SriovNic, VfDevice, set_link};
use lab::traffic::{Frames, exchange_between};
use lab::vmm_process::cost;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(240);

/// No test here depends on the guest's memory size, except for the pinned memory.
const MEMORY_MIB: u64 = 128;

/// Rebinds of the driver, and the frames that the guest sends: ten after each rebind.
const REBINDS: u64 = 6;
const REBOUND: u64 = 10 * REBINDS;

/// Frames per second that the other guest sends while the driver is rebound.
const RATE: u32 = 1000;

fn start(device: &VfDevice<'_>, processors: u32) -> Guest {
    let arguments = BellhopArguments::small()
        .unwrap()
        .processors(processors)
        .memory(&format!("{MEMORY_MIB}M"))
        .vdpa(device.path());
    Guest::start(&arguments).unwrap()
}

/// `count` checked frames from one guest to the other and back.
#[track_caller]
fn exchange(from: &mut Guest, to: &mut Guest, mac: &str, count: u64, size: u64, window: u64) {
    let frames = Frames {
        count,
        size,
        window,
    };
    exchange_between(from, to, mac, frames).unwrap();
}

/// Two guests whose drivers found their devices.
fn two_guests(devices: &[VfDevice<'_>; 2], processors: [u32; 2]) -> [Guest; 2] {
    let guests = [0, 1].map(|index| start(&devices[index], processors[index]));
    for ((guest, device), processors) in guests.iter().zip(devices).zip(processors) {
        let ready = guest.ready();
        assert_eq!(ready["problems"], serde_json::json!([]));
        assert_eq!(ready["cpus_online"], processors);
        assert_eq!(ready["nics"][0]["mac"], device.function().mac());
        assert_eq!(ready["nics"][0]["driver"], "virtio_net");
        assert_eq!(ready["nics"][0]["carrier"], 1);
        // The driver takes a queue pair for each processor, up to four.
        assert_eq!(ready["nics"][0]["tx_queues"], processors);
        // This parent pins all of guest RAM.
        assert!(cost(guest.pid()).unwrap().pinned_kib >= MEMORY_MIB << 10);
    }
    guests
}

/// Small and full frames, from each guest to the other.
#[track_caller]
fn talk(guests: &mut [Guest; 2], macs: &[String; 2]) {
    let [first, second] = guests;
    exchange(first, second, &macs[1], 1000, 64, 32);
    exchange(second, first, &macs[0], 300, 1514, 8);
}

/// A function in use is refused, and killing its user frees it.
#[track_caller]
fn refuses_a_second_user(device: &VfDevice<'_>, guest: Guest) {
    let message = refused(device.path());
    // Landlock hides the files of other processes.
    assert!(message.contains("in use by a process"), "{message}");
    assert!(message.contains("fuser -v"), "{message}");
    drop(guest);
    let again = start(device, 1);
    assert_eq!(again.ready()["nics"][0]["mac"], device.function().mac());
}

/// Pulls the cable and plugs it in twice; the other guest's link stays up.
#[track_caller]
fn cable(device: &VfDevice<'_>, first: &mut Guest, second: &mut Guest) {
    let link = device.function().link();
    for up in [false, true, false, true] {
        set_link(&link, up).unwrap();
        let begin = Instant::now();
        loop {
            let shown = first.command("link").unwrap();
            if shown["nics"][0]["carrier"] == u64::from(up) {
                break;
            }
            assert!(begin.elapsed() < LIMIT, "{shown}");
        }
    }
    let peer = second.command("link").unwrap();
    assert_eq!(peer["nics"][0]["carrier"], 1);
}

#[test]
fn guests_with_one_and_four_processors_talk_and_a_cable_is_pulled() {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let macs = devices.each_ref().map(|device| device.function().mac());
    let mut guests = two_guests(&devices, [1, 4]);
    talk(&mut guests, &macs);
    let [mut first, mut second] = guests;
    cable(&devices[0], &mut first, &mut second);
    exchange(&mut first, &mut second, &macs[1], 200, 256, 16);
    assert!(second.power_off().unwrap().success());
    refuses_a_second_user(&devices[0], first);
}

/// The guest chooses the number of queue pairs.
#[track_caller]
fn choose_queue_pairs(first: &mut Guest, second: &mut Guest, mac: &str) {
    for pairs in [4, 1, 3, 2] {
        let channels = first.command(&format!("channels {pairs}")).unwrap();
        assert_eq!(channels["combined"], pairs, "{channels}");
        assert_eq!(channels["max_combined"], 4, "{channels}");
        let link = first.command("link").unwrap();
        assert_eq!(link["nics"][0]["tx_queues"], pairs, "{link}");
        assert_eq!(link["nics"][0]["rx_queues"], pairs, "{link}");
        exchange(first, second, mac, 200, 256, 16);
    }
    // A number that the device does not support is refused and changes nothing.
    first.command("channels 5").unwrap_err();
    first.command("channels 0").unwrap_err();
    exchange(first, second, mac, 50, 256, 16);
}

/// Rebinds the driver while frames arrive.
#[track_caller]
fn rebind(first: &mut Guest, second: &mut Guest, macs: &[String; 2]) {
    let before = cost(first.pid()).unwrap();
    // Until all frames of the other guest have arrived.
    let flood = format!("flood 120 256 to {} until {REBOUND} at {RATE}", macs[0]);
    second.listen(&flood).unwrap();
    let rebound = first
        .command_within(&format!("rebind {REBINDS} to {}", macs[1]), LIMIT)
        .unwrap();
    let after = cost(first.pid()).unwrap();
    let flooded = second.answer(&flood, LIMIT).unwrap();
    assert_eq!(rebound["rebinds"], REBINDS);
    assert_eq!(rebound["tx"], REBOUND, "{rebound}");
    assert_eq!(rebound["lost"], 0, "{rebound}");
    assert_eq!(rebound["corrupt"], 0, "{rebound}");
    assert_eq!(flooded["corrupt"], 0, "{flooded}");
    assert!(flooded["tx"].as_u64() >= Some(REBOUND), "{flooded}");
    // The frames of each rebind reached the other guest through its own flood.
    assert_eq!(flooded["others"], REBOUND, "{flooded} {rebound}");
    assert_eq!(
        (after.descriptors, after.threads, after.pinned_kib),
        (before.descriptors, before.threads, before.pinned_kib)
    );
}

#[test]
fn guests_with_two_processors_talk_choose_queue_pairs_and_rebind() {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    assert_eq!(devices[0].queues(), 9);
    let macs = devices.each_ref().map(|device| device.function().mac());
    let mut guests = two_guests(&devices, [2, 2]);
    talk(&mut guests, &macs);
    let [first, second] = &mut guests;
    choose_queue_pairs(first, second, &macs[1]);
    rebind(first, second, &macs);
    exchange(first, second, &macs[1], 200, 256, 16);
    for guest in guests {
        let status = guest.power_off().unwrap();
        assert!(status.success(), "{status}");
    }
}

#[test]
fn a_link_that_is_not_there_is_refused() {
    let nic = SriovNic::enable(1).unwrap();
    assert_eq!(nic.vf(0).unwrap().link(), "vf0");
    for link in ["vf4", "pf", "", "vf0,"] {
        let error = set_link(link, false).unwrap_err().to_string();
        assert!(error.contains("vf0 vf1 vf2 vf3"), "{error}");
    }
    set_link("vf3", false).unwrap();
    set_link("vf3", true).unwrap();
}

/// The error of `bellhop run` for a NIC that it cannot use.
#[track_caller]
fn refused(path: &Path) -> String {
    let arguments = BellhopArguments::small().unwrap();
    arguments.vdpa(path).refused().unwrap()
}

#[test]
fn functions_bound_to_other_drivers_are_refused_with_a_remedy() {
    let nic = SriovNic::enable(2).unwrap();
    // Bound to virtio-pci: there is no device file, only its directory.
    let function = nic.vf(0).unwrap();
    assert_eq!(function.driver().as_deref(), Some("virtio-pci"));
    let directory = Path::new("/sys/bus/pci/devices").join(function.address());
    let message = refused(&directory);
    assert!(message.contains("not a character device"), "{message}");

    // Bound to vp-vdpa, but by another user.
    function.bind("vp-vdpa").unwrap();
    let error = VfDevice::add(function.clone()).unwrap_err().to_string();
    assert!(error.contains("is bound to vp-vdpa"), "{error}");
    assert!(error.contains("remedy"), "{error}");
    function.bind("virtio-pci").unwrap();

    // A vDPA device that the host's own network stack uses, and one that is gone.
    let device = VfDevice::add(function).unwrap();
    let path = device.path().to_owned();
    fs::write("/sys/bus/vdpa/drivers/vhost_vdpa/unbind", device.name()).unwrap();
    let message = refused(&path);
    assert!(message.contains("does not exist"), "{message}");
    assert!(message.contains("vhost_vdpa"), "{message}");
    drop(device);
    assert!(!path.exists());
    refused(&path);
    let shown = String::from_utf8(vdpa(&["dev", "show"]).unwrap()).unwrap();
    assert!(!shown.contains("lab-"), "{shown}");
    assert_eq!(nic.vf(0).unwrap().driver().as_deref(), Some("virtio-pci"));
    SriovNic::enable(2).unwrap_err();
}
