//! Guests on the lab NIC: device notifications, addresses that the VMM sets, rings that change
//! their size, and withheld features.

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
/// The address that the VMM gives the NIC.
const GIVEN_MAC: &str = "02:4c:61:62:53:49";

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(60);

/// As VIRTIO_NET_F_… and VIRTIO_F_…: the features that a device needs to accept an address, without
/// an address of its own.
const FEATURES_WITHOUT_MAC: u64 =
    1 << 3 | 1 << 16 | 1 << 17 | 1 << 18 | 1 << 23 | 1 << 32 | 1 << 33;

/// Unbinds and binds the driver, without frames in between.
const REBIND: &str = "rebind-flooded 1 0";

/// No test here depends on the guest's memory size.
const MEMORY: &str = "128M";

/// DEVICE_NEEDS_RESET in the device status (virtio 1.3, 2.1).
const NEEDS_RESET: u64 = 64;

fn small() -> BellhopArguments {
    BellhopArguments::small().unwrap().memory(MEMORY)
}

fn start(arguments: BellhopArguments, device: &SimDevice, options: &str) -> Guest {
    start_with(arguments, &[device], options)
}

/// A guest with a NIC on each device.
fn start_with(arguments: BellhopArguments, devices: &[&SimDevice], options: &str) -> Guest {
    let arguments = devices.iter().fold(arguments, |arguments, device| {
        let options = format!("path={}{options}", device.path().display());
        arguments.argument("--vdpa", &options)
    });
    let arguments = arguments
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

/// Reads the guest's NIC until it is as wanted.
#[track_caller]
fn wait_for(guest: &mut Guest, what: &str, is_so: impl Fn(&Value) -> bool) {
    let begin = Instant::now();
    loop {
        let nic = nic(guest);
        if is_so(&nic) {
            return;
        }
        assert!(begin.elapsed() < LIMIT, "{what}: {nic}");
    }
}

#[track_caller]
fn resize_under_traffic(guest: &mut Guest, name: &str, peer: &Peer) {
    let rebind = format!("{REBIND} {name}");
    let flood = |on| peer.flood(on);
    ring_sizes::resize_under_traffic(guest, name, &rebind, flood, |guest, size| {
        peer.exchange_on(name, guest, 100, size);
    });
}

/// The guest's name of the NIC with this address, and its driver's features.
#[track_caller]
fn find_nic(guest: &mut Guest, mac: &str) -> (String, String) {
    let link = guest.command("link").unwrap();
    let nics = link["nics"].as_array().unwrap();
    let nic = nics.iter().find(|nic| nic["mac"] == mac);
    let nic = nic.unwrap_or_else(|| panic!("no NIC {mac}: {link}"));
    let text = |what: &str| nic[what].as_str().unwrap().to_owned();
    (text("name"), text("features"))
}

/// How often the test breaks a device, and thus the number of warnings in the VMM's log.
const BROKEN: usize = 2;

/// A device that needs a reset notifies its guest, which resets it. `uplink` is the NIC's ID.
#[track_caller]
fn a_broken_device_heals(guest: &mut Guest, device: &SimDevice, peer: &Peer) {
    peer.exchange(guest, 50, 256);
    let before = nic(guest);
    assert_eq!(status(&before), 15, "{before}");

    break_down(device).unwrap();
    wait_for(guest, "NEEDS_RESET", |nic| status(nic) & NEEDS_RESET != 0);
    let interrupts = |nic: &Value| nic["config_interrupts"].as_u64().unwrap();
    let broken = nic(guest);
    assert!(interrupts(&broken) > interrupts(&before), "{broken}");
    // The VMM rejects a command to a broken device at once, without waiting for a time limit.
    guest.command(&format!("mac {OTHER_MAC}")).unwrap_err();
    let said = guest.console();
    assert!(!said.contains("did not answer a control command"), "{said}");

    // The driver's reset heals it.
    guest.command(REBIND).unwrap();
    let healed = nic(guest);
    assert_eq!(status(&healed), 15, "{healed}");
    peer.exchange(guest, 50, 256);
    guest.command(&format!("mac {OTHER_MAC}")).unwrap();

    // Logged once each time, with the device's name.
    break_down(device).unwrap();
    wait_for(guest, "NEEDS_RESET", |nic| status(nic) & NEEDS_RESET != 0);
    set_link(device, false).unwrap();
    set_link(device, true).unwrap();
    guest.command(REBIND).unwrap();
    let said = guest.console();
    let warnings: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("the device reports DEVICE_NEEDS_RESET"))
        .collect();
    assert_eq!(warnings.len(), BROKEN, "{said}");
    for warning in warnings {
        assert!(warning.contains("WARN"), "{warning}");
        assert!(warning.contains("uplink"), "{warning}");
    }
}

#[test]
fn a_stock_guest_resizes_its_rings_and_resets_a_device_that_needs_it() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let device = labnic.add("broken", &["mac", MAC]).unwrap();
    let stock = BellhopArguments::stock().unwrap();
    let mut guest = start(stock, &device, ",id=uplink,doorbell=on");
    resize_under_traffic(&mut guest, "eth0", &peer);
    a_broken_device_heals(&mut guest, &device, &peer);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_poor_device_that_needs_a_reset_notifies_its_guest() {
    let labnic = Labnic::load(&[
        ("address_spaces", "1"),
        ("cvq_group", "0"),
        ("desc_group", "0"),
        ("iotlb_persist", "0"),
        ("set_map", "0"),
        ("suspend", "0"),
        ("resume", "0"),
        ("cvq", "poor"),
    ])
    .unwrap();
    let peer = Peer::start(&labnic);
    let device = labnic.add("broken", &["mac", MAC]).unwrap();
    let mut guest = start(small(), &device, ",id=uplink");
    a_broken_device_heals(&mut guest, &device, &peer);
    assert!(guest.power_off().unwrap().success());
}

/// The link goes down and up: the guest gets an interrupt each time.
#[track_caller]
fn changes_its_link(guest: &mut Guest, device: &SimDevice) {
    assert_eq!(guest.ready()["nics"][0]["carrier"], 1);
    for up in [false, true, false, true, false, true] {
        let before = nic(guest)["config_interrupts"].as_u64();
        set_link(device, up).unwrap();
        wait_for(guest, "carrier", |nic| nic["carrier"] == u64::from(up));
        let after = nic(guest)["config_interrupts"].as_u64();
        assert!(after > before, "no interrupt: {before:?} {after:?}");
    }
}

/// Checks the VMM's log of features, and the features of the guest's driver.
#[track_caller]
fn withholds_features(guest: &mut Guest) {
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
    let features = nic(guest)["features"].as_str().unwrap().to_owned();
    let has = |bit: usize| features.as_bytes()[bit] == b'1';
    assert!(!has(33) && !has(38), "{features}");
    assert!(has(21) && has(40), "{features}");
}

#[test]
fn link_changes_reach_the_guest_and_withheld_features_are_logged() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    labnic.set("notification_data", "1").unwrap();
    let device = labnic.add("link", &["mac", MAC]).unwrap();
    let mut guest = start(small(), &device, ",id=uplink");
    withholds_features(&mut guest);
    changes_its_link(&mut guest, &device);
    peer.exchange(&mut guest, 50, 256);
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
    let mut guest = start(small(), &device, &format!(",mac={GIVEN_MAC}"));
    for _ in 0..3 {
        assert_eq!(nic(&mut guest)["mac"], GIVEN_MAC);
        // The peer sends each frame back to its source address. The device accepts no others: its
        // driver has switched promiscuous mode off.
        peer.exchange(&mut guest, 60, 256);
        // The device forgets all of it at the reset, and receives it again.
        guest.command(REBIND).unwrap();
    }
    assert_eq!(counter(&device, "filtered").unwrap(), 0);
    // The guest may take another address, until its driver restarts.
    guest.command(&format!("mac {MAC}")).unwrap();
    peer.exchange(&mut guest, 50, 256);
    guest.command(REBIND).unwrap();
    assert_eq!(nic(&mut guest)["mac"], GIVEN_MAC);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_locked_nic_keeps_its_address_and_receives_nothing_for_another() {
    let labnic = Labnic::load(&[]).unwrap();
    let device = labnic.add("locked", &["mac", MAC]).unwrap();
    let peer = Peer::start(&labnic);
    let options = format!(",mac={GIVEN_MAC},mac_lock=on");
    let mut guest = start(small(), &device, &options);
    // CTRL_RX, CTRL_VLAN, CTRL_RX_EXTRA, CTRL_MAC_ADDR; the control queue stays for other commands.
    let features = nic(&mut guest)["features"].as_str().unwrap().to_owned();
    let has = |bit: usize| features.as_bytes()[bit] == b'1';
    assert!(
        has(17) && [18, 19, 20, 23].into_iter().all(|bit| !has(bit)),
        "{features}"
    );
    for _ in 0..2 {
        assert_eq!(nic(&mut guest)["mac"], GIVEN_MAC);
        peer.exchange(&mut guest, 50, 256);
        guest.command(REBIND).unwrap();
    }
    // The guest's network stack may send with another address and be promiscuous. The device still
    // drops the answers.
    guest.command(&format!("mac {OTHER_MAC}")).unwrap();
    guest.command("promisc on").unwrap();
    let before = (counter(&device, "filtered").unwrap(), peer.echoed());
    let said = guest.command(&format!("frames 4 256 4 eth0 to {}", labnic_peer::MAC));
    assert!(peer.echoed() > before.1, "{said:?}");
    assert!(counter(&device, "filtered").unwrap() > before.0, "{said:?}");
    assert!(guest.power_off().unwrap().success());
}

/// A parameter of the module, its value for one device, and its default.
type Parameter<'a> = (&'a str, &'a str, &'a str);

/// One device for each set of parameters. The defaults are restored after each.
fn devices<const N: usize>(
    labnic: &Labnic,
    makings: [(&str, &[Parameter<'_>]); N],
) -> [SimDevice; N] {
    let mut macs = [MAC, OTHER_MAC, GIVEN_MAC].into_iter();
    makings.map(|(name, parameters)| {
        for (parameter, value, _) in parameters {
            labnic.set(parameter, value).unwrap();
        }
        let device = labnic.add(name, &["mac", macs.next().unwrap()]).unwrap();
        for (parameter, _, default) in parameters {
            labnic.set(parameter, default).unwrap();
        }
        device
    })
}

/// One guest with a NIC on each device.
#[test]
fn rings_of_a_device_that_applies_changes_at_resume_are_resized() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let [resume, used] = devices(
        &labnic,
        [
            (
                "resume",
                &[("apply", "resume", "enable"), ("rx_prefetch", "4", "0")],
            ),
            (
                "used",
                &[("ring_state", "used", "avail"), ("rx_prefetch", "4", "0")],
            ),
        ],
    );
    let mut guest = start_with(small(), &[&resume, &used], "");
    for mac in [MAC, OTHER_MAC] {
        let (name, _) = find_nic(&mut guest, mac);
        resize_under_traffic(&mut guest, &name, &peer);
    }
    assert!(guest.power_off().unwrap().success());
}

/// One guest with a NIC on each device.
#[test]
fn rings_that_cannot_be_reset_keep_their_size() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let [suspend, resume, none] = devices(
        &labnic,
        [
            ("suspend", &[("suspend", "0", "1")]),
            ("resume", &[("resume", "0", "1")]),
            ("none", &[("ring_state", "none", "avail")]),
        ],
    );
    let mut guest = start_with(small(), &[&suspend, &resume, &none], "");
    for mac in [MAC, OTHER_MAC, GIVEN_MAC] {
        let (name, features) = find_nic(&mut guest, mac);
        assert_eq!(features.as_bytes()[40], b'0', "{mac}: {features}");
        guest.command(&format!("rings 64 64 {name}")).unwrap_err();
        peer.exchange_on(&name, &mut guest, 50, 256);
    }
    assert!(guest.power_off().unwrap().success());
}
