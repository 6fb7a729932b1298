//! Debian's kernel with 4, 2 and 1 processors on NICs without hardware. They use TCP over IPv4 and
//! IPv6 with checksum and segmentation offloads, frames of 9014 bytes, and a VLAN.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;

use std::process::Command;
use std::time::Duration;

use bridge::{Bridge, ip};
use lab::guest::{BellhopArguments, Guest};
use lab::swnic::Swnic;
use lab::traffic::{Frames, exchange_between};

/// Of each guest; their NICs have these numbers in names and addresses, too.
const PROCESSORS: [u32; 3] = [4, 2, 1];

/// Bytes of a stream.
const LENGTH: u64 = 1 << 20;

/// The longest frame without segmentation offload, with an MTU of 1500 and a VLAN tag.
const FULL_FRAME: u64 = 1518;

/// The guests are emulated twice.
const LIMIT: Duration = Duration::from_secs(240);

/// VIRTIO_NET_F_CSUM, GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, HOST_TSO4 and HOST_TSO6.
const OFFLOADS: [usize; 6] = [0, 1, 7, 8, 11, 12];

fn mac(number: u32) -> String {
    format!("52:54:00:5e:56:0{number}")
}

fn tap(number: u32) -> String {
    format!("lab-sw{number}")
}

/// A guest with its NIC.
struct Machine {
    number: u32,
    guest: Guest,
    nic: Swnic,
}

impl Machine {
    fn ip(&mut self, words: &str) {
        self.guest.command(&format!("ip {words}")).unwrap();
    }

    /// Bytes per packet that passed the tap: `tx` is to the guest. `since`: packets and bytes.
    fn mean_since(&self, direction: &str, since: [u64; 2]) -> u64 {
        let [packets, bytes] = self.passed(direction);
        (bytes - since[1]) / (packets - since[0])
    }

    fn passed(&self, direction: &str) -> [u64; 2] {
        let count = |what| self.nic.statistic(&format!("{direction}_{what}")).unwrap();
        [count("packets"), count("bytes")]
    }
}

fn boot(number: u32, bridge: &Bridge) -> Machine {
    let mac = mac(number);
    let mut words = vec!["--bridge", bridge.0, "--mac", &mac];
    // The others have packed rings.
    words.extend((number == 1).then_some("--split"));
    let nic = Swnic::start(&tap(number), &words).unwrap();
    let arguments = BellhopArguments::stock().unwrap().memory("192M");
    let arguments = arguments.processors(number).vdpa(nic.path());
    let guest = Guest::start(&arguments.silence(LIMIT)).unwrap();
    let ready = guest.ready();
    assert_eq!(ready["problems"], serde_json::json!([]));
    assert_eq!(ready["cpus_online"], number);
    assert_eq!(ready["nics"][0]["mtu"], 9000, "{ready}");
    let features = ready["nics"][0]["features"].as_str().unwrap().as_bytes();
    assert!(OFFLOADS.iter().all(|&bit| features[bit] == b'1'), "{ready}");
    println!("{number} processors: ready after {:?}", guest.ready_after());
    Machine { number, guest, nic }
}

/// Sends a stream by TCP. Returns the mean size of the packets in the sender's tap and in the
/// receiver's. The peer's address is the network's prefix and the peer's number.
#[track_caller]
fn stream(from: &mut Machine, to: &mut Machine, prefix: &str) -> [u64; 2] {
    let before = [from.passed("rx"), to.passed("tx")];
    to.guest.listen("tcp-receive").unwrap();
    let line = format!("tcp-send {prefix}{} {LENGTH}", to.number);
    let sent = from.guest.command_within(&line, LIMIT).unwrap();
    let received = to.guest.answer("tcp-receive", LIMIT).unwrap();
    assert_eq!(received["bytes"], LENGTH);
    assert_eq!(sent, received);
    let means = [
        from.mean_since("rx", before[0]),
        to.mean_since("tx", before[1]),
    ];
    println!("{} to {} by {prefix}: {means:?}", from.number, to.number);
    means
}

/// Has each guest send to the next one.
#[track_caller]
fn ring(machines: &mut [Machine], mut each: impl FnMut(&mut Machine, &mut Machine)) {
    for _ in 0..machines.len() {
        let (first, others) = machines.split_first_mut().unwrap();
        each(first, &mut others[0]);
        machines.rotate_left(1);
    }
}

#[test]
fn stock_guests_use_offloads_long_frames_and_a_vlan() {
    let bridge = Bridge::add("lab-swbr");
    let mut machines = PROCESSORS.map(|number| boot(number, &bridge));
    for machine in &mut machines {
        let number = machine.number;
        machine.ip(&format!("addr add 10.0.0.{number}/24 dev eth0"));
        machine.guest.command("ipv6").unwrap();
        machine.ip(&format!("addr add fd00::{number}/64 dev eth0"));
    }
    ring(&mut machines, |from, to| {
        let frames = Frames {
            count: 50,
            size: 9014,
            window: 8,
        };
        exchange_between(&mut from.guest, &mut to.guest, &mac(to.number), frames).unwrap();
        let means = stream(from, to, "10.0.0.");
        assert!(means.iter().all(|&mean| mean > FULL_FRAME), "{means:?}");
    });
    // More than one of these segments makes such packets.
    for machine in &mut machines {
        machine.ip("link set dev eth0 mtu 1500");
    }
    for prefix in ["10.0.0.", "fd00::"] {
        ring(&mut machines, |from, to| {
            let means = stream(from, to, prefix);
            assert!(means.iter().all(|&mean| mean > FULL_FRAME), "{means:?}");
        });
    }

    // The ports of all NICs carry only tagged frames of this VLAN.
    ip("link set lab-swbr type bridge vlan_filtering 1");
    for machine in &mut machines {
        let number = machine.number;
        for change in ["add", "del"] {
            let vid = if change == "add" { "7" } else { "1" };
            let words = ["vlan", change, "dev", &tap(number), "vid", vid];
            assert!(
                Command::new("bridge")
                    .args(words)
                    .status()
                    .unwrap()
                    .success()
            );
        }
        machine.ip("link add link eth0 name vlan7 type vlan id 7");
        machine.ip(&format!("addr add 10.0.7.{number}/24 dev vlan7"));
        machine.ip("link set dev vlan7 up");
    }
    ring(&mut machines, |from, to| {
        let means = stream(from, to, "10.0.7.");
        assert!(means.iter().all(|&mean| mean > FULL_FRAME), "{means:?}");
    });
    for machine in machines {
        assert!(machine.guest.power_off().unwrap().success());
    }
}
