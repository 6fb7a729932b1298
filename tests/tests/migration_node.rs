//! The node daemon is killed while its VM migrates, on vdpa_sim. The guest runs once, with its NIC,
//! and no later daemon starts it again. Once the connections are open, it is at the destination.
//!
//! ```text
//!   POST …/migration ── 202 ──> daemon killed, sooner or later ──> guest at the destination,
//!        │                                                         source process gone
//!        └──> daemon again: moved, or location unknown ──> resolved: there ──> stopped
//! ```

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod moving;

use lab::guest::Guest;
use lab::node::{Node, small, until};
use lab::sim::SimDevice;
use lab::traffic::check_traffic;
use moving::{Host, NOTICE};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:5b:01";
/// How long a guest's console may be silent while it boots.
const SILENCE: Duration = Duration::from_secs(120);
/// Longer than the first waits of a restart policy.
const POLICY: Duration = Duration::from_secs(5);
/// How many milliseconds after the request the daemon is killed. It opens the connections to the
/// destination, so with 0 the guest may stay.
const KILLS: [u64; 2] = [0, 1000];

/// A VM on this device with the restart policy `Always`.
#[track_caller]
fn made(node: &Node, device: &SimDevice) -> Guest {
    let nic = json!({ "id": "nic", "path": device.path() });
    let mut body = small(&json!([nic])).unwrap();
    body["spec"]["restart"] = "Always".into();
    node.api.done("PUT", "/v1/vms/web", Some(&body)).unwrap();
    let vm = node.await_phase("web", "Running").unwrap();
    let console = vm["status"]["console"]["socket"].as_str().unwrap();
    let pid = u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    Guest::attach(Path::new(console), pid, SILENCE).unwrap()
}

fn send(to: &Host) -> Value {
    json!({ "send": { "destination": to.endpoint() } })
}

/// Resolves the VM's location: the daemon knows that it has moved, or the test reports it.
#[track_caller]
fn resolve_there(node: &Node) {
    let vm = || node.vm("web").unwrap().unwrap();
    until("it is known that the process is gone", || {
        ["MigrationUnknown", "Stopped"].contains(&vm()["status"]["phase"].as_str().unwrap())
    })
    .unwrap();
    if vm()["status"]["phase"] == "MigrationUnknown" {
        let start = json!({ "state": "Running" });
        let refused = node
            .api
            .ask("PUT", "/v1/vms/web/state", Some(&start))
            .unwrap();
        assert_eq!(refused.status, 409, "{}", refused.body);
        let remedy = refused.body["message"].as_str().unwrap();
        assert!(remedy.contains("resolve web there"), "{remedy}");
        let there = json!({ "resolve": "There" });
        node.api
            .done("PATCH", "/v1/vms/web/migration", Some(&there))
            .unwrap();
    }
    assert_eq!(vm()["status"]["phase"], "Stopped", "{:#}", vm());
    assert_eq!(vm()["status"]["last_end"]["reason"], "Moved", "{:#}", vm());
}

#[test]
fn a_daemon_killed_while_its_machine_moves_finds_a_guest_that_runs_once() {
    let mut node = Node::start("move-kill").unwrap();
    let devices = [
        SimDevice::net("node1", MAC, 1500).unwrap(),
        SimDevice::net("node2", MAC, 1500).unwrap(),
    ];
    for after in KILLS {
        let mut guest = made(&node, &devices[0]);
        check_traffic(&mut guest, &devices[0]);
        guest.command("write-on 24 50").unwrap();
        let there = Host::new("node2", devices[1].path());
        let mut waiting = there.wait();
        node.api
            .done("POST", "/v1/vms/web/migration", Some(&send(&there)))
            .unwrap();
        std::thread::sleep(Duration::from_millis(after));
        node.kill();
        let moved = || {
            let vm = there.client().get("/v1/vm").unwrap_or_default();
            let migration = there.client().get("/v1/vm/migration").unwrap_or_default();
            vm["state"] == "Running" && migration["phase"] == "Moved"
        };
        if after == 0 {
            node.start_again().unwrap();
            until("the migration has ended", || {
                moved() || node.api.get("/v1/vms/web/migration").unwrap()["phase"] == "Stayed"
            })
            .unwrap();
            if !moved() {
                node.await_phase("web", "Running").unwrap();
                let found = guest.command("write-off").unwrap();
                assert_eq!(found["wrong"], 0, "{found}");
                check_traffic(&mut guest, &devices[0]);
                node.api
                    .done("DELETE", "/v1/vms/web?force=true", None)
                    .unwrap();
                continue;
            }
            node.kill();
        }
        until("the guest runs there", moved).unwrap();
        until("its process here is gone", || node.processes().is_empty()).unwrap();
        drop(guest);
        for _ in 0..2 {
            node.start_again().unwrap();
            std::thread::sleep(POLICY);
            assert!(node.processes().is_empty(), "killed after {after} ms");
            node.kill();
        }
        node.start_again().unwrap();
        resolve_there(&node);
        std::thread::sleep(POLICY);
        assert!(node.processes().is_empty(), "killed after {after} ms");
        waiting.answers(NOTICE).unwrap();
        let found = waiting.command("write-off").unwrap();
        assert_eq!(found["wrong"], 0, "{found}");
        check_traffic(&mut waiting, &devices[1]);
        assert!(waiting.power_off().unwrap().success());
        node.api
            .done("DELETE", "/v1/vms/web?force=true", None)
            .unwrap();
    }
}

#[test]
fn a_daemon_that_comes_back_while_its_machine_stays_starts_it_again_if_it_crashes() {
    let mut node = Node::start("move-stay").unwrap();
    let device = SimDevice::net("node1", MAC, 1500).unwrap();
    let guest = made(&node, &device);
    let before = node.vm("web").unwrap().unwrap();
    // No destination listens.
    let missing = Host::new("node3", device.path());
    node.api
        .done("POST", "/v1/vms/web/migration", Some(&send(&missing)))
        .unwrap();
    node.kill();
    node.start_again().unwrap();
    until("it stayed", || {
        node.api.get("/v1/vms/web/migration").unwrap()["phase"] == "Stayed"
    })
    .unwrap();
    std::thread::sleep(POLICY);
    drop(guest);
    for (_, pid) in node.processes() {
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
    until("it is back", || {
        let vm = node.vm("web").unwrap().unwrap();
        vm["status"]["phase"] == "Running" && vm["status"]["pid"] != before["status"]["pid"]
    })
    .unwrap();
    node.api
        .done("DELETE", "/v1/vms/web?force=true", None)
        .unwrap();
}
