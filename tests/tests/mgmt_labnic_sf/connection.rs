//! Where a subfunction's frames go and where they do not.

use std::time::{Duration, Instant};

use lab::labnic::Labnic;
use lab::labnic::sf::{Subfunction, set_eswitch_mode};
use lab::sim::SimDevice;
use serde_json::Value;
use vdpa::netdev::{Netdev, Options};
use vdpa_mgmt::announce::Announcement;

use crate::support::{Bridge, ip, kernel_is_well, run};
use crate::traffic::{Flow, Mode, both_ways, frame, start};

const A: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 0x61];
const B: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 0x62];
const C: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 0x63];
const BROADCAST: [u8; 6] = [0xff; 6];
/// Long after a frame would have arrived.
const QUIET: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(20);

fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Two subfunctions with a device each; the devices are dropped first.
struct Two {
    devices: [SimDevice; 2],
    functions: [Subfunction; 2],
}

fn two() -> Two {
    set_eswitch_mode("switchdev").unwrap();
    let functions = [88, 89].map(|sfnum| Subfunction::add(sfnum).unwrap());
    let devices = [
        functions[0].device("sfa", &text(A)).unwrap(),
        functions[1].device("sfb", &text(B)).unwrap(),
    ];
    Two { devices, functions }
}

/// Sends frames and waits until the device has taken them all.
fn send(from: &mut Netdev, source: [u8; 6], to: [u8; 6], count: u32) {
    let transmit = &mut from.driver.pairs[0].transmit;
    let mut out = Vec::new();
    for number in 0..count {
        frame(&mut out, to, source, 1, number, 60);
        assert!(transmit.send(&out).unwrap());
    }
    transmit.flush().unwrap();
    let begin = Instant::now();
    while transmit.queue().outstanding() > 0 {
        transmit.reap().unwrap();
        assert!(begin.elapsed() < PATIENCE, "buffers do not come back");
        std::thread::yield_now();
    }
}

/// How many frames of the test, not the host's own, arrive until no more come.
fn received(netdev: &mut Netdev) -> u32 {
    received_of(netdev, &[0x88, 0xb5])
}

/// Counts frames whose bytes between the destination's address and the payload end like this:
/// source and type.
fn received_of(netdev: &mut Netdev, end: &[u8]) -> u32 {
    let receive = &mut netdev.driver.pairs[0].receive;
    let (mut copy, mut count) = (vec![0; 2048], 0);
    let mut last = Instant::now();
    while last.elapsed() < QUIET {
        receive
            .poll(64, |frame| {
                if frame.copy_to(&mut copy).unwrap()[6..14].ends_with(end) {
                    count += 1;
                    last = Instant::now();
                }
            })
            .unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    count
}

/// The ports and VLANs behind which the bridge has learnt an address.
fn known_behind(mac: [u8; 6]) -> Vec<(String, u64)> {
    let all = run("bridge", &format!("-j fdb show br {}", Bridge::NAME));
    let all: Vec<Value> = serde_json::from_slice(&all).unwrap();
    let ours = all.into_iter().filter(|entry| {
        entry["mac"] == text(mac).as_str()
            && entry["state"] != "permanent"
            && !entry["vlan"].is_null()
    });
    ours.map(|entry| {
        assert_ne!(entry["state"], "static", "{entry}");
        let port = entry["ifname"].as_str().unwrap().to_owned();
        (port, entry["vlan"].as_u64().unwrap())
    })
    .collect()
}

fn statistic(link: &str, name: &str) -> u64 {
    let path = format!("/sys/class/net/{link}/statistics/{name}");
    std::fs::read_to_string(path)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

#[test]
fn traffic_goes_through_the_representors_and_a_bridge() {
    let _labnic = Labnic::load(&[]).unwrap();
    let two = two();
    let bridge = Bridge::add();
    for function in &two.functions {
        bridge.connect(function.representor());
    }
    for options in [
        Options::default(),
        Options {
            withhold: 1 << 29,
            ..Options::default()
        },
    ] {
        let [mut a, mut b] = two
            .devices
            .each_ref()
            .map(|nic| start(nic.path(), &options));
        for mode in [Mode::Poll, Mode::Interrupts] {
            let mut flow = Flow::new(A, B);
            flow.mode = mode;
            both_ways(&flow, &mut a, &mut b);
        }
    }
    for function in &two.functions {
        let link = function.representor();
        assert!(statistic(link, "rx_packets") >= 8000, "{link}");
        assert!(statistic(link, "tx_packets") >= 8000, "{link}");
    }
    drop(bridge);
    drop(two.devices);
    kernel_is_well();
}

#[test]
fn a_function_reaches_nothing_before_its_representor_is_up_and_attached() {
    let labnic = Labnic::load(&[]).unwrap();
    let two = two();
    let [one, other] = two.functions.each_ref().map(Subfunction::representor);
    let old = labnic.add("old", &["mac", &text(C)]).unwrap();
    let options = Options::default();
    let [mut a, mut b] = two
        .devices
        .each_ref()
        .map(|nic| start(nic.path(), &options));
    let mut c = start(old.path(), &options);

    // Both are down: their frames are dropped and counted.
    send(&mut a, A, BROADCAST, 20);
    assert_eq!((received(&mut b), received(&mut c)), (0, 0));
    assert_eq!(
        lab::labnic::counter(&two.devices[0], "link_down").unwrap(),
        20
    );
    assert_eq!(statistic(one, "rx_packets"), 0);

    // Up, but on no bridge: only the host receives the frames.
    ip(&format!("link set {one} up"));
    ip(&format!("link set {other} up"));
    send(&mut a, A, BROADCAST, 20);
    assert_eq!((received(&mut b), received(&mut c)), (0, 0));
    assert_eq!(statistic(one, "rx_packets"), 20);

    // One on a bridge, the other not.
    let bridge = Bridge::add();
    bridge.connect(one);
    send(&mut a, A, BROADCAST, 20);
    assert_eq!((received(&mut b), received(&mut c)), (0, 0));

    // Both: the frame arrives. The old switch's device is on neither bridge port.
    bridge.connect(other);
    send(&mut a, A, BROADCAST, 20);
    assert_eq!((received(&mut b), received(&mut c)), (20, 0));
    send(&mut b, B, A, 20);
    assert_eq!((received(&mut a), received(&mut c)), (20, 0));
    send(&mut c, C, BROADCAST, 20);
    assert_eq!((received(&mut a), received(&mut b)), (0, 0));

    // Down again, on the bridge.
    ip(&format!("link set {other} down"));
    send(&mut a, A, BROADCAST, 20);
    assert_eq!(received(&mut b), 0);
    // Different VLANs of the bridge are different networks.
    ip(&format!("link set {other} up"));
    Bridge::forwards(other);
    ip(&format!(
        "link set {} type bridge vlan_filtering 1",
        Bridge::NAME
    ));
    run(
        "bridge",
        &format!("vlan add dev {one} vid 100 pvid untagged"),
    );
    send(&mut a, A, BROADCAST, 20);
    assert_eq!(received(&mut b), 0);
    run(
        "bridge",
        &format!("vlan add dev {other} vid 100 pvid untagged"),
    );
    send(&mut a, A, BROADCAST, 20);
    assert_eq!(received(&mut b), 20);

    // The host announces that the guest with this address is now behind the other port. The bridge
    // learns it, and the frame leaves by all ports of the VLAN except that one.
    assert_eq!(known_behind(A), [(one.to_owned(), 100)]);
    let announcement = Announcement::prepare(two.devices[1].name(), A).unwrap();
    assert_eq!(announcement.interfaces().collect::<Vec<_>>(), [one]);
    assert_eq!(known_behind(A), [(other.to_owned(), 100)]);
    for _ in 0..3 {
        announcement.send().unwrap();
    }
    let rarp = [&A[..], &[0x80, 0x35]].concat();
    assert_eq!(received_of(&mut a, &rarp), 3);
    assert_eq!(received_of(&mut b, &rarp), 0);

    drop((a, b, c));
    drop(bridge);
    drop(old);
    drop(two.devices);
    kernel_is_well();
}

#[test]
fn the_link_of_the_device_follows_the_representor() {
    let _labnic = Labnic::load(&[]).unwrap();
    let two = two();
    let link = two.functions[0].representor();
    let carrier = || {
        let config = two.devices[0].config().unwrap();
        config["link "].as_str().unwrap().to_owned()
    };
    assert_eq!(carrier(), "down");
    ip(&format!("link set {link} up"));
    assert_eq!(carrier(), "up");
    ip(&format!("link set {link} down"));
    assert_eq!(carrier(), "down");
    drop(two.devices);
    kernel_is_well();
}

/// A receiver without buffers delays the sender for a bounded time, and the host never.
#[test]
fn a_receiver_that_posts_no_buffers_harms_only_itself() {
    let _labnic = Labnic::load(&[("credit_wait_ms", "50")]).unwrap();
    let two = two();
    let bridge = Bridge::add();
    for function in &two.functions {
        bridge.connect(function.representor());
    }
    let options = Options::default();
    let [mut a, b] = two
        .devices
        .each_ref()
        .map(|nic| start(nic.path(), &options));
    let other = two.functions[1].representor();
    for _ in 0..40 {
        send(&mut a, A, B, 64);
    }
    let begin = Instant::now();
    while statistic(other, "tx_dropped") == 0 {
        assert!(begin.elapsed() < PATIENCE, "frames for it wait for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
    ip(&format!("link set {other} down"));
    drop((a, b));
    drop(bridge);
    drop(two.devices);
    kernel_is_well();
}
