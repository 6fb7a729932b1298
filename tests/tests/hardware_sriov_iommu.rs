//! A guest's NIC behind a virtio-iommu on vp_vdpa: a virtual function behind an IOMMU of the host.
//! Debian's kernel drives it in its modes with split and with packed rings, and an application by
//! VFIO. The peer is another guest on the functions' switch.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod guest_nics;

use std::time::Duration;

use guest_nics::wait_nics;
use lab::api::Client;
use lab::endurance::soak;
use lab::guest::{BellhopArguments, Guest};
use lab::kvm_events::AddressExits;
use lab::notice::{Kind, notice};
use lab::rig::FIRST_PACKED_FUNCTION as PACKED;
use lab::sriov::{SriovNic, VfDevice};
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange_from};
use serde_json::Value;

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(240);

/// Bit of the feature RING_PACKED.
const RING_PACKED: usize = 34;

/// The number of frames, and how many of them are in flight.
type Amount = (u64, u64);

/// Frames to the other guest and back, each checked by both.
#[track_caller]
fn exchange(guest: &mut Guest, nic: &str, peer: &mut Guest, mac: &str, (count, window): Amount) {
    for size in [60, 1514] {
        let frames = Frames {
            count,
            size,
            window,
        };
        exchange_from(guest, nic, peer, mac, frames).unwrap();
    }
}

fn peer_on(device: &VfDevice<'_>) -> (Guest, String) {
    let arguments = BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&arguments.vdpa(device.path())).unwrap();
    // The switch may know its address at a port that another test has moved it to.
    peer.command("pace 1 64 0").unwrap();
    (peer, device.function().mac())
}

/// The NIC has a driver, with these rings, in this mode.
#[track_caller]
fn has_started(guest: &mut Guest, mac: &str, kind: &str, packed: bool) {
    wait_nics(guest, &[mac]);
    let nic = guest.command("info").unwrap()["nics"][0].clone();
    assert_eq!(nic["iommu"], kind, "{nic}");
    let features = nic["features"].as_str().unwrap();
    assert_eq!(features.as_bytes()[RING_PACKED] == b'1', packed, "{nic}");
}

/// A mode of the guest's kernel: the words that choose it, and its name in sysfs.
struct Mode {
    words: &'static str,
    kind: &'static str,
    amount: Amount,
}

const LAZY: Mode = Mode {
    words: "iommu.passthrough=0 iommu.strict=0",
    kind: "DMA-FQ",
    amount: (50, 8),
};

/// Each frame changes the tables of two emulated IOMMUs four times, and then waits for them.
const STRICT: Mode = Mode {
    words: "iommu.passthrough=0 iommu.strict=1",
    kind: "DMA",
    amount: (10, 1),
};

/// All of the guest's memory stays mapped.
const PASSTHROUGH: Mode = Mode {
    words: "iommu.passthrough=1",
    kind: "identity",
    amount: (200, 8),
};

/// Debian's kernel: traffic at first, after a rebind of its driver, and in a soak after a reboot.
fn stock_guest(functions: [usize; 2], mode: &Mode) {
    let Mode {
        words,
        kind,
        amount,
    } = *mode;
    let nic = SriovNic::enable(4).unwrap();
    let devices = functions.map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let [own, third] = &devices;
    let (mut peer, other) = peer_on(third);
    let vdpa = format!("path={},iommu=on", own.path().display());
    let arguments = BellhopArguments::stock().unwrap().memory("192M");
    let arguments = arguments.cmdline(words).argument("--vdpa", &vdpa);
    let mut guest = Guest::start(&arguments).unwrap();
    let (mac, packed) = (own.function().mac(), functions[0] >= PACKED);
    has_started(&mut guest, &mac, kind, packed);
    exchange(&mut guest, "eth0", &mut peer, &other, amount);

    let line = format!("rebind 1 to {other}");
    let rebound = guest.command_within(&line, LIMIT).unwrap();
    assert_eq!(rebound["corrupt"], 0, "{rebound}");
    has_started(&mut guest, &mac, kind, packed);
    exchange(&mut guest, "eth0", &mut peer, &other, amount);

    if soak() {
        guest.command("reboot").unwrap();
        guest.wait_ready(LIMIT).unwrap();
        has_started(&mut guest, &mac, kind, packed);
        exchange(&mut guest, "eth0", &mut peer, &other, amount);
    }

    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
}

#[test]
fn a_guest_that_unmaps_lazily_has_split_rings() {
    stock_guest([0, 1], &LAZY);
}

#[test]
fn a_guest_that_unmaps_at_once_has_split_rings() {
    stock_guest([0, 1], &STRICT);
}

#[test]
fn a_guest_that_unmaps_lazily_has_packed_rings() {
    stock_guest([PACKED, 1], &LAZY);
}

#[test]
fn a_guest_that_unmaps_at_once_has_packed_rings() {
    stock_guest([PACKED, 1], &STRICT);
}

#[test]
fn a_guest_that_passes_its_nic_through_has_split_rings() {
    stock_guest([0, 1], &PASSTHROUGH);
}

#[test]
fn a_guest_that_passes_its_nic_through_has_packed_rings() {
    stock_guest([PACKED, 1], &PASSTHROUGH);
}

/// Requests to the IOMMU, and exits to the VMM by accesses to memory.
fn counted(api: &Client) -> (Value, u64) {
    let metrics = api.get("/v1/metrics").unwrap();
    let mut lines = metrics.as_str().unwrap().lines();
    let name = "bellhop_kvm_total{counter=\"mmio_exits\"} ";
    let exits = lines.find_map(|line| line.strip_prefix(name)).unwrap();
    let iommu = api.get("/v1/vm/iommu").unwrap();
    (iommu, exits.parse().unwrap())
}

/// A kick is a store to the function's own doorbell page.
#[test]
fn an_application_exchanges_frames_with_another_guest_without_exits() {
    // Tracepoints are switched while there is no guest.
    let kicks = AddressExits::prepare().unwrap();
    let nic = SriovNic::enable(4).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let [own, third] = &devices;
    let (mut peer, other) = peer_on(third);
    let socket = TempPath::new("iommu-exits");
    let vdpa = format!("path={},iommu=on", own.path().display());
    let arguments = BellhopArguments::stock()
        .unwrap()
        .cmdline(LAZY.words)
        .argument("--vdpa", &vdpa)
        .argument("--api-socket", socket.text());
    let mut guest = Guest::start(&arguments).unwrap();
    let api = Client::new(socket.path());
    has_started(&mut guest, &own.function().mac(), LAZY.kind, false);
    let notify = guest.command("notify").unwrap();
    let number = |name: &str| notify[name].as_u64().unwrap();
    let doorbells = number("address")..number("address") + number("length");

    guest.command("vfio-on 16").unwrap();
    // The first kick of each queue maps its page.
    exchange(&mut guest, "vfio", &mut peer, &other, (10, 8));
    let (before, exits_before) = counted(&api);
    kicks.watch(&doorbells).unwrap();
    let count = 500;
    exchange(&mut guest, "vfio", &mut peer, &other, (count, 8));
    kicks.watch(&(0..0)).unwrap();
    let (after, exits_after) = counted(&api);
    assert_eq!(after, before);
    let (exits, kicks) = (exits_after - exits_before, kicks.count().unwrap());
    let frames = 2 * count;
    let figure = format!("{frames} frames of a userspace driver to another guest and back");
    notice(
        Kind::Figure,
        format!("{figure}: {exits} exits to the VMM, {kicks} exits by kicks"),
    );
    assert_eq!((exits, kicks), (0, 0));

    guest.command("vfio-off").unwrap();
    has_started(&mut guest, &own.function().mac(), LAZY.kind, false);
    exchange(&mut guest, "eth0", &mut peer, &other, LAZY.amount);
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
}
