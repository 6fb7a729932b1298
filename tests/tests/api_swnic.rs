//! VMs of the node daemon with NICs without hardware, on one bridge or at ports. The daemon and the
//! processes of the NICs are killed meanwhile.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
#[path = "swnic/cable.rs"]
mod cable;
mod end_to_end;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use std::collections::BTreeSet;

use bridge::{Bridge, ip};
use cable::{Cable, ENDS};
use end_to_end::{Before, deleted, made, up};
use lab::guest::Guest;
use lab::node::{Node, until};
use lab::swnic;
use lab::traffic::{Frames, exchange_between};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vdpa_mgmt::nic::server;

const BRIDGE: &str = "lab-swbr";
const VLAN: u16 = 100;

/// The share of a processor for polling, in percent.
const POLL: u8 = 30;

/// The NIC of a VM.
fn software() -> Value {
    json!([{ "id": "net0", "from": "software", "bridge": BRIDGE, "vlan": VLAN, "poll": POLL }])
}

/// The process of a VM's NIC, if it has one.
fn server_of(vm: &Value) -> Option<Pid> {
    let device = vm["status"]["nic_devices"][0]["vdpa_device"]
        .as_str()
        .unwrap();
    server::holder(device).unwrap()
}

/// Fails if the NIC of `web` does not poll as requested: its process, or the daemon's list.
#[track_caller]
fn assert_polls(node: &Node, web: &Value) {
    let pid = server_of(web).unwrap().as_raw_pid();
    let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(words.contains(&format!("\0--poll\0{POLL}\0")), "{words:?}");
    let nics = node.api.get("/v1/nics").unwrap();
    assert_eq!(nics["nic"]["web.net0"]["poll"], POLL, "{nics}");
}

/// Kills the process of a VM's NIC, and waits for another one, which the daemon starts.
#[track_caller]
fn replace_server(vm: &Value) {
    let killed = server_of(vm).unwrap();
    kill_process(killed, Signal::KILL).unwrap();
    until("the NIC has another process", || {
        server_of(vm).is_some_and(|pid| pid != killed)
    })
    .unwrap();
}

/// Stops both processes of a VM's NIC, and waits for another worker: the daemon continues the first
/// process, which replaces the second.
#[track_caller]
fn stop_processes(vm: &Value) {
    let device = vm["status"]["nic_devices"][0]["vdpa_device"]
        .as_str()
        .unwrap();
    let [server, worker] = swnic::processes(device).unwrap();
    for process in [server, worker] {
        kill_process(process, Signal::STOP).unwrap();
    }
    until("another worker serves the NIC", || {
        swnic::processes(device).is_ok_and(|[first, other]| first == server && other != worker)
    })
    .unwrap();
}

/// Kills this process of the NIC of `web` while there is no daemon. The next daemon starts another.
#[track_caller]
fn start_after_kill(node: &mut Node, server: Pid) {
    kill_process(server, Signal::KILL).unwrap();
    node.start_again().unwrap();
    let web = node.await_phase("web", "Running").unwrap();
    until("the NIC has a process", || server_of(&web).is_some()).unwrap();
}

/// All network interfaces, taps among them.
fn interfaces() -> BTreeSet<String> {
    let all = std::fs::read_dir("/sys/class/net").unwrap();
    all.map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[track_caller]
fn exchange(from: &mut Guest, to: &mut Guest, mac: &str) {
    let frames = Frames {
        count: 200,
        size: 300,
        window: 8,
    };
    exchange_between(from, to, mac, frames).unwrap();
}

#[test]
fn software_nics_of_vms_survive_the_daemon_and_their_own_processes() {
    let _bridge = Bridge::add(BRIDGE);
    ip(&format!("link set {BRIDGE} type bridge vlan_filtering 1"));
    let mut node = Node::start("swnic").unwrap();
    let before = Before::now(&node);
    let interfaces_before = interfaces();
    let (web, mut guest) = made(&node, "web", &software());
    let (_, mut peer) = made(&node, "peer", &software());
    let _ = up(&mut guest);
    let mac = up(&mut peer);
    assert_polls(&node, &web);
    exchange(&mut guest, &mut peer, &mac);

    // The daemon starts the process of a NIC again, and the guest does not notice.
    replace_server(&web);
    assert_polls(&node, &web);
    exchange(&mut guest, &mut peer, &mac);
    stop_processes(&web);
    exchange(&mut guest, &mut peer, &mac);

    // The processes outlive the daemon. The next daemon finds them, or starts them.
    let kept = server_of(&web).unwrap();
    node.kill();
    exchange(&mut guest, &mut peer, &mac);
    node.start_again().unwrap();
    let web = node.await_phase("web", "Running").unwrap();
    assert_eq!(server_of(&web), Some(kept));
    node.kill();
    start_after_kill(&mut node, kept);
    assert_polls(&node, &web);
    exchange(&mut guest, &mut peer, &mac);

    for vm in ["web", "peer"] {
        deleted(&node, vm);
    }
    // The bridge itself has no carrier without a port, so only the node's own part is compared.
    before.assert_same_node(&node, "both are deleted");
    assert_eq!(interfaces(), interfaces_before);
}

#[test]
fn nics_of_vms_at_queues_of_ports_survive_the_same() {
    let _cable = Cable::add();
    let at = |port| json!([{ "id": "net0", "from": "software", "port": port, "queue": 0 }]);
    let mut node = Node::start("swnic").unwrap();
    let before = Before::now(&node);
    let (web, mut guest) = made(&node, "web", &at(ENDS[0]));
    let (_, mut peer) = made(&node, "peer", &at(ENDS[1]));
    let _ = up(&mut guest);
    let mac = up(&mut peer);
    exchange(&mut guest, &mut peer, &mac);

    replace_server(&web);
    exchange(&mut guest, &mut peer, &mac);

    let kept = server_of(&web).unwrap();
    node.kill();
    exchange(&mut guest, &mut peer, &mac);
    start_after_kill(&mut node, kept);
    exchange(&mut guest, &mut peer, &mac);

    for vm in ["web", "peer"] {
        deleted(&node, vm);
    }
    before.assert_same_node(&node, "both are deleted");
}
