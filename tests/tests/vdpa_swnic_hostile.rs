//! A hostile guest without an operating system on a NIC without hardware. On the same bridge, two
//! guests exchange checked frames. Each NIC has a worker of its own, and all of them survive.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod bare_metal;
#[path = "swnic/bridge.rs"]
mod bridge;

use std::time::{Duration, Instant};

use bare_metal::hostile::Hostile;
use bare_metal::{INDIRECT_AND_EVENT_IDX, RING_PACKED, VERSION_1};
use bridge::Bridge;
use lab::endurance::soak;
use lab::guest::{BellhopArguments, Guest};
use lab::notice::{Kind, notice};
use lab::swnic::Swnic;
use lab::traffic::exchange_both_ways;
use rustix::process::Signal;

const VICTIM: [u8; 6] = [0x52, 0x54, 0x00, 0x5e, 0x55, 0x01];
const MACS: [&str; 2] = ["52:54:00:5e:55:01", "52:54:00:5e:55:02"];
const HOSTILE: &str = "52:54:00:5e:55:03";

/// The server's message for a ring that it cannot follow.
const BROKEN: &str = "a queue stops until the driver resets the NIC";

/// How long the hostile guest may take until it breaks a ring: all guests are emulated twice.
const START_MAX: Duration = Duration::from_secs(120);

#[test]
fn a_hostile_guest_ends_no_nic_and_disturbs_no_other_guest() {
    let bridge = Bridge::add("lab-swbr");
    let start = |name, mac| {
        let words = ["--bridge", bridge.0, "--mac", mac];
        Swnic::start(name, &words).unwrap()
    };
    let nics = [start("lab-sw0", MACS[0]), start("lab-sw1", MACS[1])];
    let attacked = start("lab-sw2", HOSTILE);
    let workers = [&nics[0], &nics[1], &attacked].map(|nic| nic.processes().unwrap()[1]);
    let [mut victim, mut peer] = nics.each_ref().map(|nic| {
        let arguments = BellhopArguments::small().unwrap().memory("128M");
        Guest::start(&arguments.vdpa(nic.path())).unwrap()
    });
    exchange_both_ways(&mut victim, &mut peer, MACS).unwrap();

    let length = if soak() {
        Duration::from_secs(120)
    } else {
        notice(Kind::Thinned, "a hostile guest: 15 of 120 seconds");
        Duration::from_secs(15)
    };
    let features = VERSION_1 | INDIRECT_AND_EVENT_IDX;
    let features = [
        VERSION_1,
        features,
        features | RING_PACKED,
        VERSION_1 | RING_PACKED,
    ];
    let path = format!("path={}", attacked.path().display());
    let mut hostile = Hostile::start(path, VICTIM, &features);
    let broken = || attacked.log().unwrap().matches(BROKEN).count();
    let begin = Instant::now();
    let mut since = None;
    while since.is_none_or(|since: Instant| since.elapsed() < length) {
        if since.is_none() {
            since = (broken() > 0).then(Instant::now);
            let is_late = since.is_none() && begin.elapsed() > START_MAX;
            assert!(!is_late, "no broken ring: {}", hostile.said());
        }
        // Each frame returns once and whole, as without the other guest.
        exchange_both_ways(&mut victim, &mut peer, MACS).unwrap();
        hostile.keep_running();
    }
    println!(
        "{} broken rings, {} frames sent, {} crashes of the guest",
        broken(),
        attacked.statistic("rx_packets").unwrap(),
        hostile.crashes
    );
    drop(hostile);
    // The next guest on the NIC of the hostile one.
    let arguments = BellhopArguments::small().unwrap().memory("128M");
    let mut next = Guest::start(&arguments.vdpa(attacked.path())).unwrap();
    exchange_both_ways(&mut next, &mut peer, [HOSTILE, MACS[1]]).unwrap();
    for mut guest in [victim, peer, next] {
        let log = guest.command("dmesg").unwrap();
        assert_eq!(log["errors"], 0, "{log}");
        assert!(guest.power_off().unwrap().success());
    }
    for (nic, worker) in nics.into_iter().chain([attacked]).zip(workers) {
        // A worker that had ended would have a successor.
        let log = nic.log().unwrap();
        assert_eq!(nic.processes().unwrap()[1], worker, "{log}");
        nic.signal(Signal::TERM).unwrap();
        let (status, text) = nic.end().unwrap();
        assert!(status.success(), "{text}");
    }
}
