//! A guest whose NIC is behind a virtio-iommu, on vp_vdpa: virtual functions behind an IOMMU of the
//! host. Its kernel, in each of its modes, or an application with VFIO exchanges frames with
//! another guest, while the VM migrates. The kernel also rebinds its driver. Another guest is
//! swapped, upgraded, saved and restored.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod guest_nics;
#[path = "moving/lifecycle.rs"]
mod lifecycle;
mod live;
mod moving;

use std::time::{Duration, Instant};

use guest_nics::wait_nics;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::rig::FIRST_PACKED_FUNCTION as PACKED;
use lab::sriov::{SriovNic, VfDevice};
use lab::traffic::all_returned;
use lifecycle::{save_and_restore, swap, upgrade};
use moving::{DOWNTIME, Host, SHADOW_QUEUES, move_guest_verified};
use serde_json::Value;

/// Resets of the device by a migration: when shadow queues begin, when the guest stops, and when it
/// starts at the destination. Each may lose a window of frames.
const RESETS: u64 = 3;
/// The guest gives up the frames in flight after so many seconds, and sends as many again.
const GIVE_UP_S: u64 = 2;
/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(240);

/// A mode of the guest's kernel.
struct Mode {
    /// They choose it.
    words: &'static str,
    /// Its name in sysfs.
    kind: &'static str,
    /// Frames of one exchange.
    frames: u64,
    /// Frames in flight at once.
    window: u64,
}

const LAZY: Mode = Mode {
    words: "iommu.passthrough=0 iommu.strict=0",
    kind: "DMA-FQ",
    frames: 200,
    window: 8,
};

/// Each frame changes the tables of two emulated IOMMUs four times, and then waits for them.
const STRICT: Mode = Mode {
    words: "iommu.passthrough=0 iommu.strict=1",
    kind: "DMA",
    frames: 10,
    window: 1,
};

const PASSTHROUGH: Mode = Mode {
    words: "iommu.passthrough=1",
    kind: "identity",
    ..LAZY
};

impl Mode {
    /// The most frames that may be lost by a migration with this downtime, which the guest's clock
    /// counts.
    fn lost_at_most(&self, downtime: Duration) -> u64 {
        self.window * (2 * RESETS + downtime.as_secs() / GIVE_UP_S)
    }

    /// Frames to the other guest and back, with nothing else under way. `nic`: the kernel's NIC or
    /// the application's.
    #[track_caller]
    fn exchange(&self, guest: &mut Guest, nic: &str, peer: &str) {
        let line = format!("frames {} 590 {} {nic} to {peer}", self.frames, self.window);
        let answer = guest.command_within(&line, LIMIT).unwrap();
        all_returned(&answer, self.frames).unwrap();
    }
}

#[track_caller]
fn assert_intact(answer: &Value, may_lose: u64) {
    println!("{answer}");
    assert!(answer["rx"].as_u64() > Some(0), "{answer}");
    for wrong in ["corrupt", "duplicate"] {
        assert_eq!(answer[wrong], 0, "{wrong}: {answer}");
    }
    assert!(answer["lost"].as_u64().unwrap() <= may_lose, "{answer}");
}

/// Two functions for a guest, and its peer on a third one, which sends all frames back.
struct Scene<'a> {
    devices: &'a [VfDevice<'a>; 3],
    hosts: [Host; 2],
    peer: Guest,
    /// The peer's address.
    other: String,
}

impl<'a> Scene<'a> {
    fn of(devices: &'a [VfDevice<'a>; 3]) -> Self {
        let [first, second, third] = devices;
        let small = BellhopArguments::small().unwrap();
        let mut peer = Guest::start(&small.vdpa(third.path())).unwrap();
        peer.command("echo-on").unwrap();
        // The switch may know its address at a port that another test has moved it to.
        peer.command("pace 1 64 0").unwrap();
        let host = |name: &str, device: &VfDevice<'_>| {
            Host::new(name, device.path()).nic_options("iommu=on")
        };
        Self {
            devices,
            hosts: [host("here", first), host("there", second)],
            peer,
            other: third.function().mac(),
        }
    }

    fn boot(&self, arguments: BellhopArguments, mode: &Mode) -> Guest {
        let mut guest = self.hosts[0].boot(arguments.cmdline(mode.words));
        let mac = self.devices[0].function().mac();
        wait_nics(&mut guest, &[&mac]);
        let info = guest.command("info").unwrap();
        assert_eq!(info["nics"][0]["iommu"], mode.kind, "{info}");
        mode.exchange(&mut guest, "eth0", &self.other);
        guest
    }

    fn end(self, guest: Guest) {
        assert!(guest.power_off().unwrap().success());
        assert!(self.peer.power_off().unwrap().success());
    }
}

fn devices(nic: &SriovNic, functions: [usize; 3]) -> [VfDevice<'_>; 3] {
    functions.map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap())
}

/// Boots a guest on the first function and its peer on the third one. `begin` starts what exchanges
/// the frames, and returns its name. Then the guest migrates to the second function and back.
fn moves_between(
    functions: [usize; 3],
    mode: &Mode,
    memory: &str,
    begin: fn(&mut Guest, &str) -> &'static str,
) {
    let nic = SriovNic::enable(4).unwrap();
    let devices = devices(&nic, functions);
    let scene = Scene::of(&devices);
    let [here, there] = &scene.hosts;
    let other = &scene.other;
    let mut guest = scene.boot(BellhopArguments::stock().unwrap().memory(memory), mode);
    let name = begin(&mut guest, other);
    mode.exchange(&mut guest, name, other);
    let messages_before = messages(&mut guest).unwrap();

    let flood = format!("flood-on 590 {} {name} to {other}", mode.window);
    for (from, to) in [(here, there), (there, here)] {
        guest.command(&flood).unwrap();
        // A function cannot suspend.
        let (moved, status) = move_guest_verified(guest, from, to, SHADOW_QUEUES, DOWNTIME);
        println!("{status}");
        guest = moved;
        let came = guest.command_within("flood-off", LIMIT).unwrap();
        let downtime = status["downtime_ms"].as_f64().unwrap() / 1000.0;
        let downtime = Duration::from_secs_f64(downtime);
        assert_intact(&came, mode.lost_at_most(downtime));
        mode.exchange(&mut guest, name, other);
    }
    assert_eq!(messages(&mut guest).unwrap(), messages_before);
    scene.end(guest);
}

/// The kernel's driver maps its buffers again.
fn rebind(guest: &mut Guest, other: &str) -> &'static str {
    let line = format!("rebind 2 to {other}");
    let rebound = guest.command_within(&line, LIMIT).unwrap();
    assert_eq!(rebound["corrupt"], 0, "{rebound}");
    "eth0"
}

#[test]
fn a_guest_with_split_rings_moves_there_and_back() {
    moves_between([0, 1, 2], &LAZY, "128M", rebind);
}

#[test]
fn a_guest_with_packed_rings_moves_there_and_back() {
    moves_between([PACKED, PACKED + 1, 0], &LAZY, "128M", rebind);
}

#[test]
fn a_guest_that_unmaps_at_once_moves_there_and_back_with_split_rings() {
    moves_between([0, 1, 2], &STRICT, "128M", rebind);
}

#[test]
fn a_guest_that_unmaps_at_once_moves_there_and_back_with_packed_rings() {
    moves_between([PACKED, PACKED + 1, 0], &STRICT, "128M", rebind);
}

#[test]
fn a_guest_that_passes_its_nic_through_moves_there_and_back() {
    moves_between([0, 1, 2], &PASSTHROUGH, "128M", rebind);
}

/// An application with addresses of its own choice.
#[test]
fn an_application_that_talks_with_another_guest_moves_there_and_back() {
    moves_between([0, 1, 2], &LAZY, "192M", |guest, _| {
        guest.command("vfio-on 16").unwrap();
        "vfio"
    });
}

/// Hot swaps and an upgrade under a flood, then a snapshot that continues on the other function.
fn swapped_upgraded_restored(functions: [usize; 3], mode: &Mode) {
    let nic = SriovNic::enable(4).unwrap();
    let devices = devices(&nic, functions);
    let scene = Scene::of(&devices);
    let [here, there] = &scene.hosts;
    let other = &scene.other;
    let arguments = || BellhopArguments::stock().unwrap().memory("128M");
    let mut guest = scene.boot(arguments(), mode);
    let messages_before = messages(&mut guest).unwrap();

    let flood = format!("flood-on 590 {} eth0 to {other}", mode.window);
    let changes: [&dyn Fn(&Guest); 2] = [
        &|_| swap(here, [devices[0].path(), devices[1].path()]),
        &|guest| upgrade(guest, here),
    ];
    for change in changes {
        guest.command(&flood).unwrap();
        let begin = Instant::now();
        change(&guest);
        let took = begin.elapsed();
        let came = guest.command_within("flood-off", LIMIT).unwrap();
        assert_intact(&came, mode.lost_at_most(took));
        mode.exchange(&mut guest, "eth0", other);
    }

    let files = arguments().cmdline(mode.words);
    let mut guest = save_and_restore(guest, here, there, files);
    mode.exchange(&mut guest, "eth0", other);
    // The next driver maps its buffers in the restored domains.
    rebind(&mut guest, other);
    mode.exchange(&mut guest, "eth0", other);
    assert_eq!(messages(&mut guest).unwrap(), messages_before);
    scene.end(guest);
}

#[test]
fn a_guest_with_split_rings_is_swapped_upgraded_and_restored() {
    swapped_upgraded_restored([0, 1, 2], &LAZY);
}

#[test]
fn a_guest_with_packed_rings_that_unmaps_at_once_is_swapped_upgraded_and_restored() {
    swapped_upgraded_restored([PACKED, PACKED + 1, 0], &STRICT);
}
