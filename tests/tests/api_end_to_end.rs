//! One request creates a machine with its NIC on the kernel's simulator; checked traffic flows;
//! another request restores the host. The daemon is also killed while frames are in flight: the
//! machine is unaffected.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod end_to_end;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use end_to_end::{Before, deleted, made};
use lab::endurance::cycles;
use lab::node::Node;
use lab::traffic::{Frames, exchange};
use serde_json::{Value, json};
use std::time::Duration;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:59:01";

fn nics() -> Value {
    json!([{ "id": "net0", "from": "vdpasim_net", "mac": MAC, "mtu": 1500 }])
}

#[test]
fn a_machine_with_a_nic_comes_and_goes() {
    let node = Node::start("e2e").unwrap();
    let before = Before::now(&node);
    let (vm, mut guest) = made(&node, "web", &nics());
    assert_eq!(guest.ready()["nics"][0]["mac"], MAC, "{vm:#}");
    for size in [60, 590, 1514] {
        let frames = Frames {
            count: 200,
            size,
            window: 16,
        };
        exchange(&mut guest, "eth0", frames).unwrap();
    }
    drop(guest);
    deleted(&node, "web");
    before.assert_same(&node, "after removal");
}

#[test]
fn a_daemon_is_killed_while_frames_are_under_way() {
    let mut node = Node::start("e2e-kill").unwrap();
    let before = Before::now(&node);
    let (vm, mut guest) = made(&node, "web", &nics());
    let count = 20_000;
    let line = format!("frames {count} 256 16 eth0");
    guest.send(&line).unwrap();
    for cycle in 0..cycles().unwrap().div_ceil(2) {
        match cycle % 2 {
            0 => node.kill(),
            _ => assert!(node.terminate()),
        }
        node.start_again().unwrap();
        let now = node.await_phase("web", "Running").unwrap();
        assert_eq!(
            (&now["pid"], &now["adopted"], &now["restarts"]),
            (&vm["pid"], &json!(true), &json!(0)),
            "{now:#}"
        );
    }
    let said = guest.answer(&line, Duration::from_secs(300)).unwrap();
    for (name, wanted) in [
        ("tx", count),
        ("rx", count),
        ("corrupt", 0),
        ("duplicate", 0),
        ("lost", 0),
    ] {
        assert_eq!(said[name], wanted, "{name}: {said}");
    }
    drop(guest);
    deleted(&node, "web");
    // The other test counts descriptors: this is another daemon.
    before.assert_same_but_descriptors(&node, "after removal");
}
