//! A hostile guest without an operating system on a NIC without hardware. Another guest sends
//! checked frames through the same bridge, which returns them. Each NIC has a worker of its own,
//! and both survive. So they do when a guest with an IOMMU changes the mappings of the buffers that
//! its worker uses.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod bare_metal;
#[path = "swnic/bridge.rs"]
mod bridge;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bare_metal::hostile::Hostile;
use bare_metal::{INDIRECT_AND_EVENT_IDX, RING_PACKED, VERSION_1};
use bridge::{Bridge, ip};
use lab::endurance::soak;
use lab::guest::{BellhopArguments, Guest};
use lab::notice::{Kind, notice};
use lab::swnic::Swnic;
use lab::threads::StopOnDrop;
use lab::traffic::{Frames, exchange, exchange_both_ways};
use rustix::process::{Pid, Signal};

const VICTIM: [u8; 6] = [0x52, 0x54, 0x00, 0x5e, 0x55, 0x01];
/// The NICs of the victim and of the hostile guest, with their addresses.
const NICS: [&str; 2] = ["lab-sw0", "lab-sw1"];
const MACS: [&str; 2] = ["52:54:00:5e:55:01", HOSTILE];
const HOSTILE: &str = "52:54:00:5e:55:02";

/// The server's message for a ring that it cannot follow.
const BROKEN: &str = "a queue stops until the driver resets the NIC";

/// How long the hostile guest may take until it breaks a ring: all guests are emulated twice.
const START_MAX: Duration = Duration::from_secs(120);

/// The guest that is no attacker, its NIC, and the NIC of the other one.
///
/// There is no third guest: the emulation loses guests more often, the more of them run.
struct Scene {
    // Before the NICs, which are deleted after their guests have ended. So a failed test leaves
    // nothing, and the lab can repeat it.
    victim: Guest,
    nics: [Swnic; 2],
    workers: [Pid; 2],
}

impl Scene {
    fn start(bridge: &Bridge) -> Self {
        let nics = [0, 1].map(|number| {
            let words = ["--bridge", bridge.0, "--mtu", "1500", "--mac", MACS[number]];
            Swnic::start(NICS[number], &words).unwrap()
        });
        // The bridge returns the frames that the victim sends to itself.
        ip(&format!(
            "link set {} type bridge_slave hairpin on",
            NICS[0]
        ));
        let workers = nics.each_ref().map(|nic| nic.processes().unwrap()[1]);
        let arguments = BellhopArguments::small().unwrap().memory("128M");
        let mut scene = Self {
            victim: Guest::start(&arguments.vdpa(nics[0].path())).unwrap(),
            nics,
            workers,
        };
        scene.exchange();
        scene
    }

    /// Each frame of the victim returns once and whole, as without the other guest.
    #[track_caller]
    fn exchange(&mut self) {
        for (count, size, window) in [(500, 64, 32), (200, 1514, 8)] {
            let frames = Frames {
                count,
                size,
                window,
            };
            exchange(&mut self.victim, "eth0", frames).unwrap();
        }
    }

    fn attacked(&self) -> &Swnic {
        &self.nics[1]
    }

    /// Ends both guests, after frames between them. The victim has seen nothing, and no worker had
    /// a successor.
    fn end(mut self, mut last: Guest) {
        exchange_both_ways(&mut last, &mut self.victim, [HOSTILE, MACS[0]]).unwrap();
        for mut guest in [self.victim, last] {
            let log = guest.command("dmesg").unwrap();
            assert_eq!(log["errors"], 0, "{log}");
            assert!(guest.power_off().unwrap().success());
        }
        for (nic, worker) in self.nics.into_iter().zip(self.workers) {
            let log = nic.log().unwrap();
            assert_eq!(nic.processes().unwrap()[1], worker, "{log}");
            nic.signal(Signal::TERM).unwrap();
            let (status, text) = nic.end().unwrap();
            assert!(status.success(), "{text}");
        }
    }
}

#[test]
fn a_hostile_guest_ends_no_nic_and_disturbs_no_other_guest() {
    let bridge = Bridge::add("lab-swbr");
    let mut scene = Scene::start(&bridge);
    let length = if soak() {
        Duration::from_secs(60)
    } else {
        notice(Kind::Thinned, "a hostile guest: 15 of 60 seconds");
        Duration::from_secs(15)
    };
    let features = VERSION_1 | INDIRECT_AND_EVENT_IDX;
    let features = [
        VERSION_1,
        features,
        features | RING_PACKED,
        VERSION_1 | RING_PACKED,
    ];
    let path = format!("path={}", scene.attacked().path().display());
    let mut hostile = Hostile::start(path, VICTIM, &features);
    let broken = |scene: &Scene| scene.attacked().log().unwrap().matches(BROKEN).count();
    let begin = Instant::now();
    let mut since = None;
    while since.is_none_or(|since: Instant| since.elapsed() < length) {
        if since.is_none() {
            since = (broken(&scene) > 0).then(Instant::now);
            let is_late = since.is_none() && begin.elapsed() > START_MAX;
            assert!(!is_late, "no broken ring: {}", hostile.said());
        }
        scene.exchange();
        hostile.keep_running();
    }
    println!(
        "{} broken rings, {} frames sent, {} crashes of the guest",
        broken(&scene),
        scene.attacked().statistic("rx_packets").unwrap(),
        hostile.crashes
    );
    drop(hostile);
    // The next guest on the NIC of the hostile one.
    let arguments = BellhopArguments::small().unwrap().memory("128M");
    let next = Guest::start(&arguments.vdpa(scene.attacked().path())).unwrap();
    scene.end(next);
}

/// Sends datagrams from the bridge to the NIC of the hostile guest until `stop`.
fn send_datagrams(bridge: &Bridge, stop: &AtomicBool) {
    let [own, guest] = ["10.55.0.1", "10.55.0.2"];
    ip(&format!("addr add {own}/24 dev {}", bridge.0));
    let neighbour = format!("{guest} lladdr {HOSTILE} nud permanent dev {}", bridge.0);
    ip(&format!("neigh replace {neighbour}"));
    let socket = UdpSocket::bind((own, 0)).unwrap();
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..16 {
            // The tap's queue may be full.
            let _ = socket.send_to(&[0x66; 1000], (guest, 9));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A driver in user space behind the guest's IOMMU unmaps the buffers and the rings in use, and
/// maps them again. Frames pass in both directions.
#[test]
fn a_guest_that_changes_mappings_under_traffic_disturbs_only_itself() {
    let bridge = Bridge::add("lab-swbr");
    let mut scene = Scene::start(&bridge);
    // The emulation loses a guest after some minutes.
    let rounds: u64 = if soak() {
        16
    } else {
        notice(
            Kind::Thinned,
            "a guest that changes mappings: 4 of 16 rounds",
        );
        4
    };
    let nic = format!("path={},iommu=on", scene.attacked().path().display());
    let arguments = BellhopArguments::stock()
        .unwrap()
        .cmdline("iommu.passthrough=0")
        .argument("--vdpa", &nic);
    let mut hostile = Guest::start(&arguments).unwrap();
    let stop = AtomicBool::new(false);
    let (mut changes, mut restarts) = (0, 0);
    std::thread::scope(|threads| {
        // Before the datagrams: the guest's kernel maps each one that it receives.
        hostile.command("vfio-on 2 eth0").unwrap();
        threads.spawn(|| send_datagrams(&bridge, &stop));
        // Also if an assertion fails: the scope waits for its thread.
        let _stop = StopOnDrop(&stop);
        let line = format!("vfio-remap 3000 {}", MACS[0]);
        for _ in 0..rounds {
            hostile.send(&line).unwrap();
            scene.exchange();
            let answer = hostile.answer(&line, START_MAX).unwrap();
            println!("{answer}");
            let count = |what: &str| answer[what].as_u64().unwrap();
            assert!(count("tx") > 0 && count("rx") > 0, "{answer}");
            changes += count("changes");
            restarts += count("restarts");
        }
        hostile.command("vfio-off").unwrap();
    });
    // The worker met unmapped memory, and each queue worked again after a reset.
    let broken = scene.attacked().log().unwrap().matches(BROKEN).count();
    println!("{changes} changes, {restarts} restarts, {broken} broken rings");
    assert!(changes > 3 * rounds && restarts > 0 && broken > 0);
    hostile.command("up eth0").unwrap();
    scene.end(hostile);
}
