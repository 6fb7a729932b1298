//! Guests on the lab NIC: what a device tells its driver, addresses that are the
//! VMM's, rings that change their size, features that are withheld.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod labnic_peer;
mod ring_sizes;

use lab::guest::{BellhopArguments, Guest};
use lab::labnic::{Labnic, break_down, counter, set_link};
use lab::sim::SimDevice;
use labnic_peer::Peer;
use serde_json::Value;
use std::time::{Duration, Instant};

const MAC: &str = "02:4c:61:62:53:47";
const OTHER_MAC: &str = "02:4c:61:62:53:48";
/// Laid over by the VMM.
const GIVEN_MAC: &str = "02:4c:61:62:53:49";

/// Far more than anything here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(60);

/// As VIRTIO_NET_F_… and VIRTIO_F_…: all that a device needs to be given an address,
/// but no address of its own.
const FEATURES_WITHOUT_MAC: u64 =
    1 << 3 | 1 << 16 | 1 << 17 | 1 << 18 | 1 << 23 | 1 << 32 | 1 << 33;

/// Driver off and on, without frames between.
const REBIND: &str = "rebind-flooded 1 0";

/// DEVICE_NEEDS_RESET in the device status (virtio 1.3, 2.1).
const NEEDS_RESET: u64 = 64;

fn start(arguments: BellhopArguments, device: &SimDevice, options: &str) -> Guest {
    let options = format!("path={}{options}", device.path().display());
    let arguments = arguments
        .argument("--vdpa", &options)
        .argument("--log-level", "info")
        .silence(Duration::from_secs(120));
    Guest::start(&arguments).unwrap()
}

fn nic(guest: &mut Guest) -> Value {
    guest.command("link").unwrap()["nics"][0].clone()
}

fn status(nic: &Value) -> u64 {
    let text = nic["status"].as_str().unwrap();
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
}

/// Asks the guest for its NIC until it is as wanted; how long that took.
#[track_caller]
fn wait_for(guest: &mut Guest, what: &str, is_so: impl Fn(&Value) -> bool) -> Duration {
    let begin = Instant::now();
    loop {
        let nic = nic(guest);
        if is_so(&nic) {
            return begin.elapsed();
        }
        assert!(begin.elapsed() < LIMIT, "{what}: {nic}");
    }
}

fn resize_under_traffic(guest: &mut Guest, peer: &Peer) {
    let flood = |on| peer.flood(on);
    ring_sizes::resize_under_traffic(guest, REBIND, flood, |guest, size| {
        peer.exchange(guest, 100, size);
    });
}

fn a_broken_device_heals(arguments: BellhopArguments, parameters: &[(&str, &str)]) {
    let labnic = Labnic::load(parameters).unwrap();
    let peer = Peer::start(&labnic);
    let device = labnic.add("broken", &["mac", MAC]).unwrap();
    let mut guest = start(arguments, &device, ",id=uplink");
    peer.exchange(&mut guest, 50, 256);
    let before = nic(&mut guest);
    assert_eq!(status(&before), 15, "{before}");

    break_down(&device).unwrap();
    wait_for(&mut guest, "NEEDS_RESET", |nic| {
        status(nic) & NEEDS_RESET != 0
    });
    let interrupts = |nic: &Value| nic["config_interrupts"].as_u64().unwrap();
    let broken = nic(&mut guest);
    assert!(interrupts(&broken) > interrupts(&before), "{broken}");
    // A command to a broken device is refused, and soon: not at the end of a time limit.
    let begin = Instant::now();
    guest.command(&format!("mac {OTHER_MAC}")).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(9), "it took its time");

    // Its driver's reset heals it.
    guest.command(REBIND).unwrap();
    let healed = nic(&mut guest);
    assert_eq!(status(&healed), 15, "{healed}");
    peer.exchange(&mut guest, 50, 256);
    guest.command(&format!("mac {OTHER_MAC}")).unwrap();

    // Said once for each time, with the device's name.
    break_down(&device).unwrap();
    wait_for(&mut guest, "NEEDS_RESET", |nic| {
        status(nic) & NEEDS_RESET != 0
    });
    set_link(&device, false).unwrap();
    set_link(&device, true).unwrap();
    guest.command(REBIND).unwrap();
    let said = guest.console();
    let warnings: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("the device says that it needs a reset"))
        .collect();
    assert_eq!(warnings.len(), 2, "{said}");
    for warning in warnings {
        assert!(warning.contains("WARN"), "{warning}");
        assert!(warning.contains("uplink"), "{warning}");
    }
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_device_that_needs_a_reset_tells_a_stock_guest() {
    a_broken_device_heals(BellhopArguments::stock().unwrap(), &[]);
}

#[test]
fn a_poor_device_that_needs_a_reset_tells_its_guest() {
    a_broken_device_heals(
        BellhopArguments::small().unwrap(),
        &[
            ("address_spaces", "1"),
            ("cvq_group", "0"),
            ("desc_group", "0"),
            ("iotlb_persist", "0"),
            ("set_map", "0"),
            ("suspend", "0"),
            ("resume", "0"),
            ("cvq", "poor"),
        ],
    );
}

#[test]
fn a_link_that_goes_and_comes_reaches_the_guest() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let device = labnic.add("link", &["mac", MAC]).unwrap();
    let mut guest = start(BellhopArguments::small().unwrap(), &device, "");
    assert_eq!(guest.ready()["nics"][0]["carrier"], 1);
    let times = [false, true, false, true, false, true].map(|up| {
        let before = nic(&mut guest)["config_interrupts"].clone();
        set_link(&device, up).unwrap();
        let time = wait_for(&mut guest, "carrier", |nic| nic["carrier"] == u64::from(up));
        let after = nic(&mut guest)["config_interrupts"].clone();
        assert!(after.as_u64() > before.as_u64(), "no interrupt: {after}");
        time
    });
    println!("the link's state reached the guest within {times:?}, asking it included");
    // On a busy emulated processor one of several times may be longer.
    assert!(
        times.iter().min() < Some(&Duration::from_secs(1)),
        "{times:?}"
    );
    peer.exchange(&mut guest, 50, 256);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn every_withheld_feature_is_logged_with_its_reason() {
    let labnic = Labnic::load(&[("notification_data", "1")]).unwrap();
    let device = labnic.add("withheld", &["mac", MAC]).unwrap();
    let mut guest = start(BellhopArguments::small().unwrap(), &device, ",id=uplink");
    let said = guest.console();
    let withheld = |name: &str| {
        let mut lines = said.lines();
        let name = format!("\"{name}\"");
        let line = lines.find(|line| line.contains("feature withheld") && line.contains(&name));
        line.unwrap_or_else(|| panic!("{name}: {said}")).to_owned()
    };
    for (name, reason) in [
        ("ACCESS_PLATFORM", "the VMM translates addresses"),
        ("NOTIFICATION_DATA", "which loses the data"),
    ] {
        let line = withheld(name);
        assert!(line.contains(reason) && line.contains("uplink"), "{line}");
    }
    let own = said.lines().find(|line| line.contains("offers on its own"));
    let own = own.unwrap();
    for name in ["GUEST_ANNOUNCE", "RING_RESET"] {
        assert!(own.contains(name), "{own}");
    }
    // Character N of sysfs' attribute is feature bit N.
    let features = nic(&mut guest)["features"].as_str().unwrap().to_owned();
    let has = |bit: usize| features.as_bytes()[bit] == b'1';
    assert!(!has(33) && !has(38), "{features}");
    assert!(has(21) && has(40), "{features}");
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn an_address_given_by_the_vmm_is_the_one_on_the_wire() {
    let labnic = Labnic::load(&[]).unwrap();
    let features = format!("{FEATURES_WITHOUT_MAC:#x}");
    let device = labnic
        .add("given", &["device_features", &features])
        .unwrap();
    let peer = Peer::start(&labnic);
    let arguments = BellhopArguments::small().unwrap();
    let mut guest = start(arguments, &device, &format!(",mac={GIVEN_MAC}"));
    for _ in 0..3 {
        assert_eq!(nic(&mut guest)["mac"], GIVEN_MAC);
        // The peer sends each frame back to the address that it came from. The device takes
        // no others: its driver has switched the promiscuous mode off.
        peer.exchange(&mut guest, 60, 256);
        // The device forgets all of it at the reset, and is told anew.
        guest.command(REBIND).unwrap();
    }
    assert_eq!(counter(&device, "filtered").unwrap(), 0);
    // The guest may take another one, until its driver starts anew.
    guest.command(&format!("mac {MAC}")).unwrap();
    peer.exchange(&mut guest, 50, 256);
    guest.command(REBIND).unwrap();
    assert_eq!(nic(&mut guest)["mac"], GIVEN_MAC);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_stock_guest_resizes_its_rings_under_traffic() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let device = labnic.add("rings", &["mac", MAC]).unwrap();
    let mut guest = start(BellhopArguments::stock().unwrap(), &device, ",doorbell=on");
    resize_under_traffic(&mut guest, &peer);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn rings_of_a_device_that_applies_changes_at_resume_are_resized() {
    for parameters in [
        [("apply", "resume"), ("rx_prefetch", "4")],
        [("ring_state", "used"), ("rx_prefetch", "4")],
    ] {
        let labnic = Labnic::load(&parameters).unwrap();
        let peer = Peer::start(&labnic);
        let device = labnic.add("rings", &["mac", MAC]).unwrap();
        let mut guest = start(BellhopArguments::small().unwrap(), &device, "");
        resize_under_traffic(&mut guest, &peer);
        assert!(guest.power_off().unwrap().success());
    }
}

#[test]
fn rings_that_cannot_be_reset_keep_their_size() {
    for parameter in [("suspend", "0"), ("resume", "0"), ("ring_state", "none")] {
        let labnic = Labnic::load(&[parameter]).unwrap();
        let peer = Peer::start(&labnic);
        let device = labnic.add("rings", &["mac", MAC]).unwrap();
        let mut guest = start(BellhopArguments::small().unwrap(), &device, "");
        let features = nic(&mut guest)["features"].as_str().unwrap().to_owned();
        assert_eq!(features.as_bytes()[40], b'0', "{parameter:?}: {features}");
        guest.command("rings 64 64").unwrap_err();
        peer.exchange(&mut guest, 50, 256);
        assert!(guest.power_off().unwrap().success());
    }
}
