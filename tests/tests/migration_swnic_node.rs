//! Two node daemons pair the migration of a guest on a NIC without hardware, in both directions.
//! Meanwhile it exchanges frames with a VM on the same bridge.

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
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use std::path::Path;
use std::time::Duration;

use bridge::{Bridge, ip};
use end_to_end::{Before, deleted, made, up};
use lab::guest::Guest;
use lab::node::{Node, until};
use lab::traffic::{Frames, exchange_between, flood_off_with_losses};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const BRIDGE: &str = "lab-swbr";

/// Frames in flight at once. A reset of the NIC loses as many, and so does the way to the NIC that
/// the guest leaves.
const WINDOW: u64 = 16;
const MAY_LOSE: u64 = 2 * WINDOW;

const LIMIT: Duration = Duration::from_secs(120);

fn nics() -> Value {
    json!([{ "id": "net0", "from": "software", "bridge": BRIDGE, "vlan": 100 }])
}

/// Whether the NIC of a VM exists: its device, and its tap as a port of the bridge.
fn parts(vm: &str) -> [bool; 3] {
    [
        format!("/sys/bus/vdpa/devices/{vm}.net0"),
        format!("/dev/vduse/{vm}.net0"),
        format!("/sys/class/net/{BRIDGE}/brif/{vm}.net0"),
    ]
    .map(|path| Path::new(&path).exists())
}

/// A request to migrate to this VM of a node. Both daemons are on one host, so two VMs of one name
/// would have NICs of one name.
fn to(node: &Node, name: &str, dry_run: bool) -> Value {
    let socket = node.api.socket().display().to_string();
    // On a busy host the switch takes longer than the default allows.
    json!({ "send": {
        "destination": format!("node:{socket}"), "name": name, "dry_run": dry_run,
        "downtime_ms": 3000,
    } })
}

/// Begins to write memory and to exchange frames, in the background.
fn load(guest: &mut Guest, peer: &str) {
    guest.command("write-on 16 50").unwrap();
    let flood = format!("flood-on 300 {WINDOW} eth0 to {peer}");
    guest.command(&flood).unwrap();
}

/// Ends that, and checks all frames and pages.
#[track_caller]
fn check_load(guest: &mut Guest) {
    flood_off_with_losses(guest, MAY_LOSE);
    assert_eq!(guest.command("write-off").unwrap()["wrong"], 0);
}

/// How a migration ends early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    Cancelled,
    /// The process that receives the guest is killed.
    Killed,
}

/// Ends a migration while memory is copied: the guest stays, with its NIC.
#[track_caller]
fn stays(guest: &mut Guest, peer: &str, here: &Node, there: &Node, failure: Failure) {
    load(guest, peer);
    let path = "/v1/vms/web/migration";
    let mut request = to(there, "web2", false);
    // So short that memory is copied until then.
    request["send"]["downtime_ms"] = 1.into();
    let sent = here.api.ask("POST", path, Some(&request)).unwrap();
    assert_eq!(sent.status, 202, "{}", sent.body);
    until("memory is copied", || {
        let status = here.api.get(path).unwrap_or_default();
        status["rounds"].as_u64() > Some(0)
    })
    .unwrap();
    assert_eq!(parts("web2"), [true; 3]);
    match failure {
        Failure::Cancelled => {
            let operation = format!("/v1/operations/{}", sent.body["id"].as_str().unwrap());
            here.api.done("DELETE", &operation, None).unwrap();
        }
        Failure::Killed => {
            let receiver = there.vm("web2").unwrap().unwrap();
            let pid = receiver["status"]["pid"].as_i64().unwrap();
            let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
            kill_process(pid, Signal::KILL).unwrap();
        }
    }
    until("the guest stays, and nothing is left there", || {
        here.api.get(path).unwrap()["phase"] == "Stayed"
            && there.vm("web2").unwrap().is_none()
            && parts("web2") == [false; 3]
    })
    .unwrap();
    here.await_phase("web", "Running").unwrap();
    check_load(guest);
}

/// Migrates a VM under traffic, and attaches to it at the destination.
#[track_caller]
fn migrate(mut guest: Guest, peer: &str, from: (&Node, &str), to_node: (&Node, &str)) -> Guest {
    load(&mut guest, peer);
    let path = format!("/v1/vms/{}/migration", from.1);
    let request = to(to_node.0, to_node.1, false);
    let sent = from.0.api.ask("POST", &path, Some(&request)).unwrap();
    assert_eq!(sent.status, 202, "{}", sent.body);
    let vm = to_node.0.await_phase(to_node.1, "Running").unwrap();
    let console = vm["status"]["console"]["socket"].as_str().unwrap();
    let pid = u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    let mut there = Guest::attach_arrived(Path::new(console), pid, LIMIT).unwrap();
    until("nothing is left of it where it was", || {
        from.0.vm(from.1).unwrap().is_none() && parts(from.1) == [false; 3]
    })
    .unwrap();
    assert_eq!(parts(to_node.1), [true; 3]);
    check_load(&mut there);
    there
}

#[test]
fn a_guest_moves_between_two_daemons_and_back() {
    let _bridge = Bridge::add(BRIDGE);
    ip(&format!("link set {BRIDGE} type bridge vlan_filtering 1"));
    let here = Node::start("sw-a").unwrap();
    let there = Node::start("sw-b").unwrap();
    let before = [Before::now(&here), Before::now(&there)];
    let (_, mut guest) = made(&here, "web", &nics());
    let (_, mut peer) = made(&here, "peer", &nics());
    let mac = up(&mut guest);
    let peer_mac = up(&mut peer);
    peer.command("echo-on").unwrap();

    // A dry run leaves nothing behind.
    let path = "/v1/vms/web/migration";
    let asked = here.api.ask("POST", path, Some(&to(&there, "web2", true)));
    let asked = asked.unwrap();
    assert_eq!(asked.body["movable"], true, "{}", asked.body);
    assert_eq!(parts("web2"), [false; 3]);

    for failure in [Failure::Cancelled, Failure::Killed] {
        stays(&mut guest, &peer_mac, &here, &there, failure);
    }
    let moves = [
        ((&here, "web"), (&there, "web2")),
        ((&there, "web2"), (&here, "web")),
    ];
    for (from, to) in moves {
        guest = migrate(guest, &peer_mac, from, to);
        let nic = &guest.command("info").unwrap()["nics"][0];
        assert_eq!((&nic["mac"], &nic["mtu"]), (&json!(mac), &json!(9000)));
    }
    peer.command("echo-off").unwrap();
    // To the guest's address, which the bridge has learned at its new port.
    let frames = Frames {
        count: 200,
        size: 9014,
        window: 8,
    };
    exchange_between(&mut peer, &mut guest, &mac, frames).unwrap();
    drop((guest, peer));
    for vm in ["web", "peer"] {
        deleted(&here, vm);
        assert_eq!(parts(vm), [false; 3]);
    }
    before[0].assert_same_node(&here, "all are deleted");
    before[1].assert_same_node(&there, "all are deleted");
}
