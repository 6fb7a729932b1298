//! A guest's NIC behind a virtio-iommu: Debian's kernel translates its addresses in each of its
//! modes, and a kernel without the driver bypasses the IOMMU. A driver in the guest's user space
//! chooses its own addresses.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
#[allow(dead_code, reason = "other tests change links")]
mod bridge;
mod guest_nics;

use std::fs::File;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use bridge::Bridge;
use guest_nics::wait_nics;
use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::notice::{Kind, notice};
use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::swnic::Swnic;
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange_between, exchange_counted, flood_on};
use lab::vmm_process::cost;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:01";
/// The guest on the same bridge.
const PEER: &str = "52:54:5e:11:53:02";
const MTU: u16 = 1400;
/// How long the NIC's driver may wait for the IOMMU's driver, or take to release the NIC.
const PROBE: Duration = Duration::from_secs(30);
/// How long a reboot, or the end of a flood, may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Frames of all sizes, so that buffers begin and end inside pages.
fn frames() -> [Frames; 3] {
    [(200, 60), (200, 590), (200, u64::from(MTU) + 14)].map(|(count, size)| Frames {
        count,
        size,
        window: 32,
    })
}

/// Boots a guest with its NIC behind the IOMMU. `kind` is the type of the NIC's group in the guest.
fn guest_behind(arguments: BellhopArguments, device: &Path, kind: Option<&str>) -> Guest {
    let nic = format!("path={},iommu=on", device.display());
    let mut guest = Guest::start(&arguments.argument("--vdpa", &nic)).unwrap();
    let begin = Instant::now();
    loop {
        let info = guest.command("info").unwrap();
        if let Some(nic) = info["nics"].get(0) {
            assert_eq!(nic["iommu"].as_str(), kind, "{info}");
            // Bit 33: ACCESS_PLATFORM.
            let features = nic["features"].as_str().unwrap();
            assert_eq!(features.as_bytes().get(33), Some(&b'1'), "{features}");
            break;
        }
        assert!(begin.elapsed() < PROBE, "{info}");
        sleep(Duration::from_millis(200));
    }
    guest.command("up eth0").unwrap();
    guest
}

fn traffic_in_mode(mapping: Mapping, words: &str, kind: &str) {
    require_lab().unwrap();
    let _mapping = OtherMapping::load(mapping).unwrap();
    let net = SimDevice::net("net", MAC, MTU).unwrap();
    let arguments = BellhopArguments::stock().unwrap().cmdline(words);
    let mut guest = guest_behind(arguments, net.path(), Some(kind));
    exchange_counted(&mut guest, "eth0", &net, &frames()).unwrap();
    // A driver that restarts maps its buffers again.
    let rebound = guest.command("rebind 3").unwrap();
    assert_eq!(rebound["rx"], 30, "{rebound}");
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

#[test]
fn traffic_of_a_guest_that_unmaps_lazily() {
    let words = "iommu.passthrough=0 iommu.strict=0";
    traffic_in_mode(Mapping::DEFAULT, words, "DMA-FQ");
}

#[test]
fn traffic_of_a_guest_that_unmaps_at_once_on_a_device_that_maps_at_once() {
    traffic_in_mode(
        Mapping::PINNED_ONE_BY_ONE,
        "iommu.passthrough=0 iommu.strict=1",
        "DMA",
    );
}

#[test]
fn traffic_of_a_guest_that_passes_the_device_through() {
    traffic_in_mode(Mapping::DEFAULT, "iommu.passthrough=1", "identity");
}

#[test]
fn a_guest_without_a_driver_bypasses_the_iommu() {
    require_lab().unwrap();
    let net = SimDevice::net("net", MAC, MTU).unwrap();
    let arguments = BellhopArguments::small().unwrap();
    let mut guest = guest_behind(arguments, net.path(), None);
    exchange_counted(&mut guest, "eth0", &net, &frames()).unwrap();
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

/// A guest that boots without a NIC.
struct Vm {
    guest: Guest,
    api: Client,
    net: SimDevice,
    _socket: TempPath,
}

impl Vm {
    /// Plugs in the NIC behind the IOMMU: its slot is one of those that the ACPI table names.
    #[track_caller]
    fn plug(&mut self, kind: &str) {
        let body = json!({ "path": self.net.path(), "iommu": true });
        let plugged = self.api.ask("PUT", NIC, Some(&body)).unwrap();
        assert_eq!(plugged.status, 201, "{}", plugged.body);
        assert_eq!(plugged.body["iommu"], true, "{}", plugged.body);
        assert_eq!(plugged.body["address"], "0000:00:10.0", "{}", plugged.body);
        self.exchange(kind);
    }

    /// The NIC has a driver, and the guest's IOMMU has its buffers. Each frame returns once.
    #[track_caller]
    fn exchange(&mut self, kind: &str) {
        wait_nics(&mut self.guest, &[MAC]);
        let info = self.guest.command("info").unwrap();
        assert_eq!(info["nics"][0]["iommu"], kind, "{info}");
        let iommu = self.api.get("/v1/vm/iommu").unwrap();
        assert!(iommu["mappings"].as_u64() > Some(0), "{iommu}");
        assert_eq!(iommu["refused"], 0, "{iommu}");
        exchange_counted(&mut self.guest, "eth0", &self.net, &frames()).unwrap();
    }

    /// Unplugs the NIC. Nothing is mapped then, and another user can open the device.
    #[track_caller]
    fn unplug(&mut self) {
        let asked = self.api.ask("DELETE", NIC, None).unwrap();
        assert_eq!(asked.status, 202, "{}", asked.body);
        let begin = Instant::now();
        while self.api.ask("GET", NIC, None).unwrap().status != 404 {
            assert!(begin.elapsed() < PROBE);
            sleep(Duration::from_millis(200));
        }
        wait_nics(&mut self.guest, &[]);
        let iommu = self.api.get("/v1/vm/iommu").unwrap();
        assert_eq!(iommu["mappings"], 0, "{iommu}");
        assert_eq!(cost(self.guest.pid()).unwrap().pinned_kib, 0);
        File::open(self.net.path()).unwrap();
    }
}

/// The API's path of the NIC.
const NIC: &str = "/v1/vm/nics/late";

/// A NIC is plugged in twice. The guest keeps the second one when it reboots.
fn plugged_in_mode(mapping: Mapping, words: &str, kind: &str) {
    require_lab().unwrap();
    let _mapping = OtherMapping::load(mapping).unwrap();
    let socket = TempPath::new("iommu-plug");
    let arguments = BellhopArguments::stock()
        .unwrap()
        .cmdline(words)
        .argument("--iommu", "boot_bypass=on")
        .argument("--api-socket", socket.text());
    let mut vm = Vm {
        guest: Guest::start(&arguments).unwrap(),
        api: Client::new(socket.path()),
        net: SimDevice::net("plug", MAC, MTU).unwrap(),
        _socket: socket,
    };
    vm.plug(kind);
    vm.unplug();
    vm.plug(kind);
    vm.guest.command("reboot").unwrap();
    vm.guest.wait_ready(LIMIT).unwrap();
    vm.exchange(kind);
    vm.unplug();
    assert_eq!(vm.guest.power_off().unwrap().code(), Some(0));
}

#[test]
fn a_guest_that_unmaps_lazily_gets_a_nic_and_keeps_it_across_a_reboot() {
    let words = "iommu.passthrough=0 iommu.strict=0";
    plugged_in_mode(Mapping::DEFAULT, words, "DMA-FQ");
}

#[test]
fn a_guest_that_unmaps_at_once_gets_a_nic_and_keeps_it_across_a_reboot() {
    let words = "iommu.passthrough=0 iommu.strict=1";
    plugged_in_mode(Mapping::PINNED_ONE_BY_ONE, words, "DMA");
}

/// Waits until the guest has sent another frame.
fn await_frame(nic: &Swnic) {
    let sent = || nic.statistic("rx_packets").unwrap();
    let (before, begin) = (sent(), Instant::now());
    while sent() == before {
        assert!(begin.elapsed() < LIMIT, "no frame arrives at the tap");
        sleep(Duration::from_millis(5));
    }
}

/// The mappings of the process that serves the NIC change with those of the guest. Another process
/// continues with all of them, also one that follows so many killed ones under a flood.
fn software_in_mode(words: &str, kind: &str, rings: &[&str], kills: u64) {
    let bridge = Bridge::add("lab-swbr");
    let start = |name, mac| {
        let words = ["--bridge", bridge.0, "--mtu", "1500", "--mac", mac];
        Swnic::start(name, &[&words, rings].concat()).unwrap()
    };
    let nics = [start("lab-sw0", MAC), start("lab-sw1", PEER)];
    let small = BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&small.vdpa(nics[1].path())).unwrap();
    let arguments = BellhopArguments::stock().unwrap().cmdline(words);
    let mut guest = guest_behind(arguments, nics[0].path(), Some(kind));
    let mut exchange = || {
        for frames in frames() {
            exchange_between(&mut guest, &mut peer, PEER, frames).unwrap();
        }
    };
    exchange();
    let [_, worker] = nics[0].processes().unwrap();
    kill_process(worker, Signal::KILL).unwrap();
    nics[0].await_other_worker(worker).unwrap();
    exchange();

    // The kernel waits for an answer most of the time if the guest unmaps each frame.
    peer.command("echo-on").unwrap();
    flood_on(&mut guest, "eth0", PEER);
    for _ in 0..kills {
        let [_, worker] = nics[0].processes().unwrap();
        kill_process(worker, Signal::KILL).unwrap();
        nics[0].await_other_worker(worker).unwrap();
        await_frame(&nics[0]);
    }
    let answer = guest.command_within("flood-off", LIMIT).unwrap();
    println!("{answer}");
    let count = |what: &str| answer[what].as_u64().unwrap();
    assert!(count("rx") > 0 && count("corrupt") == 0, "{answer}");
    // A killed worker loses at most one frame of each of its queues, and none is sent twice.
    assert!(count("lost") <= 2 * kills, "{answer}");
    assert_eq!(count("duplicate"), 0, "{answer}");
    peer.command("echo-off").unwrap();
    exchange_between(&mut guest, &mut peer, PEER, frames()[0]).unwrap();
    for guest in [guest, peer] {
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
    }
}

#[test]
fn a_software_nic_of_a_guest_that_unmaps_lazily() {
    let words = "iommu.passthrough=0 iommu.strict=0";
    software_in_mode(words, "DMA-FQ", &["--split"], 2);
}

#[test]
fn a_software_nic_of_a_guest_that_unmaps_at_once() {
    software_in_mode("iommu.passthrough=0 iommu.strict=1", "DMA", &[], 20);
}

/// A VM's counters of its IOMMU.
#[derive(Debug, PartialEq, Eq)]
struct Iommu {
    mappings: u64,
    kicks: u64,
    maps: u64,
    unmaps: u64,
}

fn metric(metrics: &Value, name: &str) -> u64 {
    let mut lines = metrics.as_str().unwrap().lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = value.unwrap_or_else(|| panic!("no {name}: {metrics}"));
    value.parse().unwrap()
}

/// The counters of the IOMMU, and the exits to the VMM by accesses to memory.
fn counted(api: &Client) -> (Iommu, u64) {
    let metrics = api.get("/v1/metrics").unwrap();
    let total = |what| metric(&metrics, &format!("bellhop_iommu_total{{what=\"{what}\"}}"));
    let iommu = Iommu {
        mappings: metric(&metrics, "bellhop_iommu_mappings"),
        kicks: total("kicks"),
        maps: total("maps"),
        unmaps: total("unmaps"),
    };
    let exits = metric(&metrics, "bellhop_kvm_total{counter=\"mmio_exits\"}");
    (iommu, exits)
}

/// An application with VFIO maps its memory once. Then a frame costs only kicks, which end in the
/// host's kernel.
#[test]
fn a_userspace_driver_in_the_guest_chooses_its_own_addresses() {
    require_lab().unwrap();
    let socket = TempPath::new("iommu-userspace");
    let net = SimDevice::net("net", MAC, MTU).unwrap();
    let arguments = BellhopArguments::stock()
        .unwrap()
        .cmdline("iommu.passthrough=0")
        .memory("512M")
        .argument("--api-socket", socket.text());
    let mut guest = guest_behind(arguments, net.path(), Some("DMA-FQ"));
    let api = Client::new(socket.path());
    let (kernels, kernels_exits) = counted(&api);

    let started = guest.command("vfio-on").unwrap();
    let (before, exits_before) = counted(&api);
    let mapped = started["mapped"].as_u64().unwrap();
    assert!(before.mappings >= mapped, "{before:?}");
    assert!(before.maps >= kernels.maps + mapped, "{before:?}");
    // The driver accessed registers, so the counter of exits works.
    assert!(exits_before > kernels_exits, "{exits_before}");

    let frames = frames();
    exchange_counted(&mut guest, "vfio", &net, &frames).unwrap();
    let (after, exits_after) = counted(&api);
    assert_eq!(after, before);
    let count: u64 = frames.iter().map(|frames| frames.count).sum();
    let exits = exits_after - exits_before;
    let figure = format!(
        "{mapped} ranges of a userspace driver: {} MAPs; then",
        before.maps - kernels.maps
    );
    notice(
        Kind::Figure,
        format!("{figure} {count} frames: {exits} exits to the VMM"),
    );
    assert!(exits < count / 20, "{exits} exits for {count} frames");

    guest.command("vfio-off").unwrap();
    let (off, _) = counted(&api);
    assert!(off.unmaps >= before.unmaps + mapped, "{off:?}");
    guest.command("up eth0").unwrap();
    exchange_counted(&mut guest, "eth0", &net, &frames).unwrap();
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}
