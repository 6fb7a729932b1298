//! Guests on virtual functions of the SR-IOV rig: vp_vdpa, an IOMMU, several
//! queues, and neighbours on the same switch.

use lab::guest::{BellhopArguments, Guest};
use lab::sim::vdpa;
use lab::sriov::{SriovNic, VfDevice, set_link};
use lab::traffic::{Frames, exchange_between};
use lab::vmm_process::cost;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Far more than anything here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(240);

/// A link's state reaches the guest within this time, polling included. On a
/// busy emulated processor one of several times may be longer.
const LINK_LIMIT: Duration = Duration::from_secs(1);

fn start(device: &VfDevice<'_>, processors: u32) -> Guest {
    let arguments = BellhopArguments::small()
        .unwrap()
        .processors(processors)
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

/// The guests' devices, and two guests that find each other.
fn two_guests(processors: u32) {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let mut guests = devices.each_ref().map(|device| start(device, processors));
    for (guest, device) in guests.iter().zip(&devices) {
        let ready = guest.ready();
        assert_eq!(ready["problems"], serde_json::json!([]));
        assert_eq!(ready["cpus_online"], processors);
        assert_eq!(ready["nics"][0]["mac"], device.function().mac());
        assert_eq!(ready["nics"][0]["driver"], "virtio_net");
        assert_eq!(ready["nics"][0]["carrier"], 1);
        // The driver takes a queue pair for each processor, up to four.
        assert_eq!(ready["nics"][0]["tx_queues"], processors);
        // This parent pins: all of guest RAM.
        assert!(cost(guest.pid()).unwrap().pinned_kib >= 256 * 1024);
    }
    let macs = devices.each_ref().map(|device| device.function().mac());
    let [first, second] = &mut guests;
    exchange(first, second, &macs[1], 1000, 64, 32);
    exchange(second, first, &macs[0], 300, 1514, 8);
    for guest in guests {
        let status = guest.power_off().unwrap();
        assert!(status.success(), "{status}");
    }
}

#[test]
fn two_guests_with_one_processor_talk() {
    two_guests(1);
}

#[test]
fn two_guests_with_two_processors_talk() {
    two_guests(2);
}

#[test]
fn two_guests_with_four_processors_talk() {
    two_guests(4);
}

#[test]
fn queue_pairs_are_the_guests_choice() {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    assert_eq!(devices[0].queues(), 9);
    let mut guests = devices.each_ref().map(|device| start(device, 2));
    let mac = devices[1].function().mac();
    let [first, second] = &mut guests;
    for pairs in [4, 1, 3, 2] {
        let channels = first.command(&format!("channels {pairs}")).unwrap();
        assert_eq!(channels["combined"], pairs, "{channels}");
        assert_eq!(channels["max_combined"], 4, "{channels}");
        let link = first.command("link").unwrap();
        assert_eq!(link["nics"][0]["tx_queues"], pairs, "{link}");
        assert_eq!(link["nics"][0]["rx_queues"], pairs, "{link}");
        exchange(first, second, &mac, 200, 256, 16);
    }
    // What no device has is refused and changes nothing.
    first.command("channels 5").unwrap_err();
    first.command("channels 0").unwrap_err();
    exchange(first, second, &mac, 50, 256, 16);
}

#[test]
fn a_pulled_cable_reaches_the_guest() {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let mut guests = devices.each_ref().map(|device| start(device, 1));
    let [first, second] = &mut guests;
    let mac = devices[1].function().mac();
    let link = devices[0].function().link();
    let times = [false, true, false, true].map(|up| {
        set_link(&link, up).unwrap();
        let begin = Instant::now();
        loop {
            let shown = first.command("link").unwrap();
            if shown["nics"][0]["carrier"] == u64::from(up) {
                break begin.elapsed();
            }
            assert!(begin.elapsed() < 10 * LINK_LIMIT, "{shown}");
        }
    });
    assert!(times.iter().min() < Some(&LINK_LIMIT), "{times:?}");
    let neighbour = second.command("link").unwrap();
    assert_eq!(neighbour["nics"][0]["carrier"], 1);
    exchange(first, second, &mac, 200, 256, 16);
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

#[test]
fn the_driver_comes_and_goes_while_frames_arrive() {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let mut guests = devices.each_ref().map(|device| start(device, 2));
    let macs = devices.each_ref().map(|device| device.function().mac());
    let [first, second] = &mut guests;
    exchange(first, second, &macs[1], 20, 256, 4);
    let before = cost(first.pid()).unwrap();
    // Until all that the other guest sends has arrived.
    let flood = format!("flood 120 256 to {} until 200", macs[0]);
    second.listen(&flood).unwrap();
    let rebound = first
        .command_within(&format!("rebind 20 to {}", macs[1]), LIMIT)
        .unwrap();
    let after = cost(first.pid()).unwrap();
    let flooded = second.answer(&flood, LIMIT).unwrap();
    assert_eq!(rebound["rebinds"], 20);
    assert_eq!(rebound["tx"], 200, "{rebound}");
    assert_eq!(rebound["lost"], 0, "{rebound}");
    assert_eq!(rebound["corrupt"], 0, "{rebound}");
    assert_eq!(flooded["corrupt"], 0, "{flooded}");
    // Those of each time reached the other guest through its own flood.
    assert_eq!(flooded["others"], 200, "{flooded} {rebound}");
    assert_eq!(
        (after.descriptors, after.threads, after.pinned_kib),
        (before.descriptors, before.threads, before.pinned_kib)
    );
    exchange(first, second, &macs[1], 200, 256, 16);
}

/// What `bellhop run` says about a NIC that it cannot have.
#[track_caller]
fn refused(path: &Path) -> String {
    let output = BellhopArguments::small()
        .unwrap()
        .vdpa(path)
        .command()
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(!message.contains("panicked"), "{message}");
    message
}

#[test]
fn functions_that_are_elsewhere_are_refused_with_a_sentence() {
    let nic = SriovNic::enable(2).unwrap();
    // Bound to virtio-pci: there is nothing to open but its directory.
    let function = nic.vf(0).unwrap();
    assert_eq!(function.driver().as_deref(), Some("virtio-pci"));
    let directory = Path::new("/sys/bus/pci/devices").join(function.address());
    let message = refused(&directory);
    assert!(message.contains("not a character device"), "{message}");

    // Bound to vp-vdpa, but by somebody else.
    function.bind("vp-vdpa").unwrap();
    let error = VfDevice::add(function.clone()).unwrap_err().to_string();
    assert!(error.contains("is bound to vp-vdpa"), "{error}");
    assert!(error.contains("remedy"), "{error}");
    function.bind("virtio-pci").unwrap();

    // A vDPA device that the host's own network took, and one that is gone.
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

/// A device in use names its user, and is free at once when that is killed.
#[test]
fn a_busy_function_names_its_user() {
    let nic = SriovNic::enable(1).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let guest = start(&device, 1);
    let message = refused(device.path());
    assert!(message.contains("in use by"), "{message}");
    assert!(message.contains(&guest.pid().to_string()), "{message}");
    drop(guest);
    let again = start(&device, 1);
    assert_eq!(again.ready()["nics"][0]["mac"], device.function().mac());
}
