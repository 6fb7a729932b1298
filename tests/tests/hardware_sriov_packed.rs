//! Guests that negotiate packed rings, on virtual functions of the SR-IOV rig that offer them (vf2,
//! vf3). They use the device's data queues, and the control queue, which ends in the VMM on both
//! sides.

use lab::guest::{BellhopArguments, Guest};
use lab::rig::FIRST_PACKED_FUNCTION;
use lab::sriov::{SriovNic, VfDevice};
use lab::traffic::{Frames, exchange_between};
use serde_json::Value;
use std::time::Duration;

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(240);

/// VIRTIO_F_RING_PACKED and VIRTIO_NET_F_CTRL_VQ (virtio 1.3, 6 and 5.1.3).
const RING_PACKED: usize = 34;
const CTRL_VQ: usize = 17;

/// All functions, and devices on two of them.
fn devices(nic: &SriovNic, functions: [usize; 2]) -> [VfDevice<'_>; 2] {
    functions.map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap())
}

fn start(device: &VfDevice<'_>, processors: u32) -> Guest {
    let arguments = BellhopArguments::small()
        .unwrap()
        .processors(processors)
        .memory("128M")
        .vdpa(device.path());
    let guest = Guest::start(&arguments).unwrap();
    assert_eq!(guest.ready()["problems"], serde_json::json!([]));
    guest
}

/// Whether the guest's driver negotiated a feature.
fn negotiated(answer: &Value, bit: usize) -> bool {
    // sysfs: one character for each bit, bit 0 first.
    let features = answer["nics"][0]["features"].as_str().unwrap();
    features.as_bytes()[bit] == b'1'
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

/// Frames per second that the other guest sends while the driver is rebound.
const RATE: u32 = 1000;

/// Rebinds of the driver, and the frames that the guest sends: ten after each rebind.
const REBINDS: u64 = 6;
const REBOUND: u64 = 10 * REBINDS;

/// Rebinds the driver while frames arrive.
#[track_caller]
fn rebind(first: &mut Guest, second: &mut Guest, macs: &[String; 2]) {
    // Until all frames of the first guest have arrived.
    let flood = format!("flood 120 256 to {} until {REBOUND} at {RATE}", macs[0]);
    second.listen(&flood).unwrap();
    let rebound = first
        .command_within(&format!("rebind {REBINDS} to {}", macs[1]), LIMIT)
        .unwrap();
    let flooded = second.answer(&flood, LIMIT).unwrap();
    assert_eq!(rebound["rebinds"], REBINDS);
    assert_eq!(rebound["lost"], 0, "{rebound}");
    assert_eq!(rebound["corrupt"], 0, "{rebound}");
    assert_eq!(flooded["corrupt"], 0, "{flooded}");
    assert!(flooded["tx"].as_u64() >= Some(REBOUND), "{flooded}");
    assert!(negotiated(&first.command("info").unwrap(), RING_PACKED));
    exchange(first, second, &macs[1], 200, 256, 16);
}

/// Uses several queue pairs, and more control commands than the rings have entries: the guest's has
/// 64, the VMM's own 16. Then the driver is rebound.
#[test]
fn queues_control_commands_and_rebinds_work_on_packed_rings() {
    let nic = SriovNic::enable(4).unwrap();
    let devices = devices(&nic, [FIRST_PACKED_FUNCTION, FIRST_PACKED_FUNCTION + 1]);
    let mut guests = devices.each_ref().map(|device| start(device, 2));
    for guest in &guests {
        let ready = guest.ready();
        assert!(negotiated(ready, RING_PACKED) && negotiated(ready, CTRL_VQ));
        assert_eq!(ready["nics"][0]["tx_queues"], 2);
    }
    let macs = devices.each_ref().map(|device| device.function().mac());
    let mac = macs[1].clone();
    let [first, second] = &mut guests;
    exchange(first, second, &mac, 1000, 64, 32);
    exchange(first, second, &mac, 300, 1514, 8);
    for pairs in [4, 1, 3, 2] {
        let channels = first.command(&format!("channels {pairs}")).unwrap();
        assert_eq!(channels["combined"], pairs, "{channels}");
        exchange(first, second, &mac, 200, 256, 16);
    }
    first.command("channels 5").unwrap_err();
    for _ in 0..20 {
        for word in ["on", "off"] {
            first.command(&format!("promisc {word}")).unwrap();
        }
    }
    rebind(first, second, &macs);
    let moved = "02:00:5e:00:54:77";
    second.command(&format!("mac {moved}")).unwrap();
    exchange(first, second, moved, 200, 256, 16);
    for guest in guests {
        let status = guest.power_off().unwrap();
        assert!(status.success(), "{status}");
    }
}

#[test]
fn peers_with_both_formats_talk() {
    let nic = SriovNic::enable(4).unwrap();
    let devices = devices(&nic, [0, FIRST_PACKED_FUNCTION]);
    let mut guests = devices.each_ref().map(|device| start(device, 1));
    assert!(!negotiated(guests[0].ready(), RING_PACKED));
    assert!(negotiated(guests[1].ready(), RING_PACKED));
    let macs = devices.each_ref().map(|device| device.function().mac());
    let [first, second] = &mut guests;
    exchange(first, second, &macs[1], 300, 256, 16);
    exchange(second, first, &macs[0], 300, 1514, 8);
}
