//! VMs of the node daemon with NICs without hardware, on one bridge or at ports. The daemon and the
//! processes of the NICs are killed meanwhile. A VM whose NIC cannot be created leaves nothing.

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
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

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

/// Deletes the tap of the NIC of `web` while the bridge is down. The daemon creates another one,
/// and connects it once the bridge is up.
#[track_caller]
fn replace_tap(node: &Node, web: &Value) {
    let failure = format!("`ip link set {BRIDGE} up`");
    let failures = || node.said().matches(&failure).count();
    let killed = server_of(web).unwrap();
    ip(&format!("link set {BRIDGE} down"));
    ip("link del web.net0");
    until("the daemon cannot connect the new tap", || failures() > 0).unwrap();
    let port = format!("/sys/class/net/{BRIDGE}/brif/web.net0");
    assert!(server_of(web).is_some_and(|pid| pid != killed));
    assert!(Path::new("/sys/class/net/web.net0").exists() && !Path::new(&port).exists());
    // The daemon tries again meanwhile.
    std::thread::sleep(Duration::from_secs(12));
    ip(&format!("link set {BRIDGE} up"));
    until("the new tap is in its VLAN", || {
        let mut show = Command::new("bridge");
        let output = show.args(["vlan", "show", "dev", "web.net0"]).output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        text.contains(&format!("{VLAN} PVID Egress Untagged")) && text.lines().count() == 2
    })
    .unwrap();
    assert!(Path::new(&port).exists());
    assert_eq!(failures(), 1);
    // The bridge learns the carrier of a new port within a second.
    std::thread::sleep(Duration::from_secs(2));
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
    replace_tap(&node, &web);
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

/// A file that has another name until it is dropped.
struct Hidden {
    path: &'static Path,
    hidden: PathBuf,
}

impl Hidden {
    fn new(path: &'static str) -> Self {
        let path = Path::new(path);
        let hidden = path.with_extension("hidden");
        std::fs::rename(path, &hidden).unwrap();
        Self { path, hidden }
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // The kernel may have created another one meanwhile.
        let _ = std::fs::rename(&self.hidden, self.path);
    }
}

#[test]
fn a_vm_whose_nic_cannot_be_created_leaves_nothing() {
    let _bridge = Bridge::add(BRIDGE);
    let node = Node::start("swnic-fails").unwrap();
    let before = Before::now(&node);
    let interfaces_before = interfaces();
    let refused = |mut nics: Value, more: Value, words: &str| {
        let first = nics[0].as_object_mut().unwrap();
        first.extend(more.as_object().unwrap().clone());
        let body = end_to_end::spec(&nics);
        let answer = node.api.ask("PUT", "/v1/vms/web", Some(&body)).unwrap();
        let text = answer.body.to_string();
        println!("{} {text}", answer.status);
        assert!(answer.status >= 400 && text.contains(words), "{text}");
        assert_eq!(node.vm("web").unwrap(), None);
        before.assert_same_node(&node, words);
        assert_eq!(interfaces(), interfaces_before, "{words}");
        let files = ["lock", "log"].map(|kind| format!("{}/web.net0.{kind}", server::DIRECTORY));
        assert!(
            files.iter().all(|file| !Path::new(file).exists()),
            "{words}"
        );
        assert_eq!(server::holder("web.net0").unwrap(), None, "{words}");
        assert!(!Path::new("/dev/vduse/web.net0").exists(), "{words}");
    };
    let one = || json!([{ "id": "net0", "from": "software", "bridge": BRIDGE }]);
    // Before the process of the NIC is started.
    refused(one(), json!({ "queue_pairs": 17 }), "17");
    // After it has a tap and a device.
    refused(one(), json!({ "bridge": "lab-nobr" }), "lab-nobr");
    refused(one(), json!({ "vlan": VLAN }), BRIDGE);
    // After the whole NIC.
    let mut two = one();
    let nowhere = json!({ "id": "net1", "from": "nowhere0" });
    two.as_array_mut().unwrap().push(nowhere);
    refused(two, json!({}), "nowhere0");
    // The process cannot open what it needs.
    for (path, name) in [("/dev/net/tun", "tun"), ("/dev/vduse/control", "vduse")] {
        let _hidden = Hidden::new(path);
        refused(one(), json!({}), &format!("modprobe {name}"));
    }
    ip("link add web.net0 type dummy");
    let taken = interfaces();
    let body = end_to_end::spec(&one());
    let answer = node.api.ask("PUT", "/v1/vms/web", Some(&body)).unwrap();
    assert!(answer.status >= 400, "{}", answer.body);
    assert!(
        answer.body.to_string().contains("there is an interface"),
        "{}",
        answer.body
    );
    assert_eq!(interfaces(), taken);
    ip("link del web.net0");
    before.assert_same_node(&node, "all are refused");

    // It works then.
    let (_, guest) = made(&node, "web", &one());
    drop(guest);
    deleted(&node, "web");
    before.assert_same_node(&node, "it is deleted");
    assert_eq!(interfaces(), interfaces_before);
}
