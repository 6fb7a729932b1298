//! Hot swap and live migration between a NIC without hardware and a virtual function (vp_vdpa),
//! both ways and under traffic, with several queue pairs. A snapshot moves, too. So does the NIC of
//! a VM of the node daemon.
//!
//! VDUSE has no control queue, so the VMM answers the guest's commands there. Another virtual
//! function is a port of the bridge. It connects the bridge to the switch of the functions.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
mod end_to_end;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
#[allow(dead_code, reason = "other tests use more of it")]
mod live;
#[allow(dead_code, reason = "other tests use more of it")]
mod moving;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;
#[path = "swnic/swaps.rs"]
mod swaps;

use std::path::Path;
use std::process::Command;

use bridge::{Bridge, ip};
use end_to_end::{Before, deleted, made, up};
use lab::guest::{BellhopArguments, Guest};
use lab::node::{Node, until};
use lab::rig::{FIRST_PACKED_FUNCTION, QUEUE_PAIRS};
use lab::soak_run::Run;
use lab::sriov::{SriovNic, VfDevice};
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange_with, flood_off_with_losses};
use lab::vmm_process::cost;
use moving::soak::{Scene, run_soak};
use moving::{Host, NOTICE};
use serde_json::json;
use swaps::{Software, Vm, swaps};

/// An address that the guest sets.
const CHOSEN: &str = "02:00:5e:00:55:77";

/// VIRTIO_F_RING_PACKED (virtio 1.3, 6).
const RING_PACKED: usize = 34;

/// Frames of a flood that are in flight at once.
const WINDOW: u64 = 16;

/// The two NICs of the guest, which have the same address.
struct Nics<'nic> {
    hardware: VfDevice<'nic>,
    software: Software,
    _bridge: Bridge,
}

impl<'nic> Nics<'nic> {
    fn of(nic: &'nic SriovNic) -> Self {
        // This function has no packed rings.
        Self::with(nic, 0, &["--split"])
    }

    /// The hardware is the function `index`. The NIC without hardware has these options.
    fn with(nic: &'nic SriovNic, index: usize, options: &[&str]) -> Self {
        let hardware = VfDevice::add(nic.vf(index).unwrap()).unwrap();
        assert_eq!(usize::from(hardware.queues()), 2 * QUEUE_PAIRS + 1);
        let bridge = Bridge::add("lab-swbr");
        let uplink = nic.vf(1).unwrap().interface().unwrap();
        ip(&format!("link set {uplink} up master {}", bridge.0));
        let pairs = QUEUE_PAIRS.to_string();
        let options = [&["--queue-pairs", &pairs], options].concat();
        Self {
            software: Software::start(bridge.0, &hardware.function().mac(), &options),
            hardware,
            _bridge: bridge,
        }
    }

    fn software(&self) -> &Path {
        self.software.nic.path()
    }
}

fn small() -> BellhopArguments {
    BellhopArguments::small().unwrap().memory("128M")
}

#[test]
fn a_guest_on_software_gets_hardware_and_returns() {
    let nic = SriovNic::enable(4).unwrap();
    let nics = Nics::of(&nic);
    let mut vm = Vm::boot(small(), nics.software());
    vm.exchange();
    let to = [nics.hardware.path(), nics.software()];
    vm.move_under_flood(2, to, &nics.software);
    let descriptors = cost(vm.guest.pid()).unwrap().descriptors;
    vm.move_under_flood(swaps(), to, &nics.software);
    assert_eq!(cost(vm.guest.pid()).unwrap().descriptors, descriptors);
    // The next driver negotiates with the NIC that is there.
    vm.guest.command("rebind-flooded 1 0").unwrap();
    vm.exchange();
    // The guest's own address goes with it.
    vm.guest.command(&format!("mac {CHOSEN}")).unwrap();
    vm.exchange();
    vm.move_under_flood(2, to, &nics.software);
    assert!(vm.guest.power_off().unwrap().success());
}

#[test]
fn a_guest_with_packed_rings_gets_hardware_and_returns() {
    let nic = SriovNic::enable(4).unwrap();
    let nics = Nics::with(&nic, FIRST_PACKED_FUNCTION, &[]);
    let mut vm = Vm::boot(small(), nics.software());
    let features = vm.guest.ready()["nics"][0]["features"].as_str().unwrap();
    assert_eq!(features.as_bytes()[RING_PACKED], b'1');
    vm.exchange();
    let to = [nics.hardware.path(), nics.software()];
    vm.move_under_flood(swaps(), to, &nics.software);
    assert!(vm.guest.power_off().unwrap().success());
}

#[test]
fn a_guest_with_two_processors_leaves_hardware_and_returns() {
    let nic = SriovNic::enable(4).unwrap();
    let nics = Nics::of(&nic);
    let mut vm = Vm::boot(small().processors(2), nics.hardware.path());
    vm.exchange();
    let to = [nics.software(), nics.hardware.path()];
    vm.move_under_flood(3, to, &nics.software);
    // The upgraded VMM restores a driver that has negotiated with hardware.
    let program = std::env::var_os("BELLHOP").unwrap();
    live::ask_upgrade(&vm.client, Path::new(&program));
    live::wait_upgrade(&vm.guest, &vm.client, |vm| vm["upgrades"] == 1);
    vm.exchange();
    vm.move_under_flood(1, [nics.hardware.path(); 2], &nics.software);
    assert!(vm.guest.power_off().unwrap().success());
}

/// A guest migrates between two VMMs, one of which has hardware.
fn migrate(nics: Nics<'_>, packed: bool) {
    let hosts = [
        Host::new("software", nics.software()),
        Host::new("hardware", nics.hardware.path()),
    ];
    let Software {
        nic: _nic,
        peer,
        of_peer: _of_peer,
    } = nics.software;
    let scene = Scene {
        hosts,
        traffic_peer: peer,
        set_link: None,
        // Both devices are reset twice: when queues become relayed, and when the guest stops. The
        // bridge sends frames to the former port until the guest announces itself.
        may_lose: 48,
        resets: 3,
        moves_idle: true,
        packed,
    };
    run_soak(scene, small(), Run { first: 0, moves: 4 });
}

#[test]
fn a_guest_migrates_to_hardware_and_returns() {
    let nic = SriovNic::enable(4).unwrap();
    migrate(Nics::of(&nic), false);
}

#[test]
fn a_guest_with_packed_rings_migrates_to_hardware_and_returns() {
    let nic = SriovNic::enable(4).unwrap();
    migrate(Nics::with(&nic, FIRST_PACKED_FUNCTION, &[]), true);
}

#[test]
fn a_guest_that_was_saved_on_software_continues_on_hardware() {
    let nic = SriovNic::enable(4).unwrap();
    let nics = Nics::of(&nic);
    let mut vm = Vm::boot(small(), nics.software());
    vm.exchange();
    let saved = TempPath::new("swnic.snapshot");
    let body = json!({ "path": saved.text() });
    let answer = vm.client.ask("POST", "/v1/vm/snapshot", Some(&body));
    let answer = answer.unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    drop(vm.guest);
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    let path = format!("path={},id=nic", nics.hardware.path().display());
    command.args(["run", "--restore", saved.text(), "--vdpa", &path]);
    command.args(small().allow_boot_files());
    let guest = Guest::start_restored(command, NOTICE).unwrap();
    vm = Vm { guest, ..vm };
    vm.exchange();
    vm.guest.command("rebind-flooded 1 0").unwrap();
    vm.exchange();
    assert!(vm.guest.power_off().unwrap().success());
}

/// Frames that a tap has passed, in both directions.
fn passed(tap: &str) -> [u64; 2] {
    ["rx_packets", "tx_packets"].map(|what| {
        let path = format!("/sys/class/net/{tap}/statistics/{what}");
        std::fs::read_to_string(path)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    })
}

/// Moves the NIC of `web` under a flood, until the peer gets frames by the new device and answers.
#[track_caller]
fn move_nic(node: &Node, device: &str) {
    let body = json!({ "device": device });
    let moved = node.api.ask("PATCH", NIC, Some(&body)).unwrap();
    assert_eq!(moved.status, 200, "{}\n{}", moved.body, node.said());
    let device = &moved.body["status"]["nic_devices"][0];
    assert!(device["vdpa_device"].is_null(), "{}", moved.body);
    let before = passed("peer.net0");
    until("frames pass in both directions", || {
        let now = passed("peer.net0");
        (0..2).all(|way| now[way] > before[way] + 2 * WINDOW)
    })
    .unwrap();
}

/// The API's path of the NIC.
const NIC: &str = "/v1/vms/web/nics/net0";

#[test]
fn a_vm_of_the_daemon_gets_hardware_and_returns() {
    let nic = SriovNic::enable(4).unwrap();
    let hardware = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let bridge = Bridge::add("lab-swbr");
    let uplink = nic.vf(1).unwrap().interface().unwrap();
    ip(&format!("link set {uplink} up master {}", bridge.0));
    let node = Node::start("swnic-swap").unwrap();
    let before = Before::now(&node);
    // The features that the hardware offers, as `bellhop dev config show` lists them.
    let config = vdpa_mgmt::Connection::open()
        .unwrap()
        .config(hardware.name());
    let features = config.unwrap().device_features.unwrap();
    let mut own = json!({
        "id": "net0", "from": "software", "bridge": bridge.0, "mac": hardware.function().mac(),
        "mtu": 1500, "queue_pairs": QUEUE_PAIRS, "device_features": format!("{features:#x}"),
    });
    let (web, mut guest) = made(&node, "web", &json!([own]));
    assert_eq!(web["spec"]["nics"][0]["device_features"], features, "{web}");
    let other = json!([{ "id": "net0", "from": "software", "bridge": bridge.0, "mtu": 1500 }]);
    let (_, mut peer) = made(&node, "peer", &other);
    let _ = up(&mut guest);
    let mac = up(&mut peer);

    // A guest with all features of software cannot move to this hardware, and stays.
    let to_hardware = json!({ "device": hardware.name() });
    let path = "/v1/vms/peer/nics/net0";
    let refused = node.api.ask("PATCH", path, Some(&to_hardware)).unwrap();
    let text = refused.body.to_string();
    assert!(
        refused.status >= 400 && text.contains("RING_PACKED"),
        "{text}"
    );

    peer.command("echo-on").unwrap();
    let frames = || Frames {
        count: 200,
        size: 590,
        window: WINDOW,
    };
    exchange_with(&mut guest, &mac, frames()).unwrap();
    let flood = format!("flood-on 300 {WINDOW} eth0 to {mac}");
    guest.command(&flood).unwrap();
    move_nic(&node, hardware.name());
    // The NIC that was created for the VM is gone, with its tap.
    let listed = node.api.get("/v1/nics").unwrap();
    assert!(listed["nic"]["web.net0"].is_null(), "{listed}");
    assert!(!Path::new("/sys/class/net/web.net0").exists());

    // Another one is created for the way back.
    let fields = own.as_object_mut().unwrap();
    fields.remove("id");
    fields.insert("name".to_owned(), json!("back"));
    node.api.done("POST", "/v1/nics", Some(&own)).unwrap();
    move_nic(&node, "back");
    assert!(passed("back").into_iter().all(|count| count > 0));
    flood_off_with_losses(&mut guest, 4 * WINDOW);
    exchange_with(&mut guest, &mac, frames()).unwrap();
    assert_eq!(up(&mut guest), hardware.function().mac());

    drop((guest, peer));
    for vm in ["web", "peer"] {
        deleted(&node, vm);
    }
    node.api.done("DELETE", "/v1/nics/back", None).unwrap();
    before.assert_same_node(&node, "all are deleted");
}
