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
use lab::guest::Guest;
use lab::node::Node;
use lab::traffic::{Frames, exchange};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:59:01";

fn nics() -> Value {
    json!([{ "id": "net0", "from": "vdpasim_net", "mac": MAC, "mtu": 1500 }])
}

#[test]
fn a_machine_with_a_nic_is_created_and_deleted() {
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
            (
                &now["status"]["pid"],
                &now["status"]["adopted"],
                &now["status"]["restarts"]
            ),
            (&vm["status"]["pid"], &json!(true), &json!(0)),
            "{now:#}"
        );
    }
    let said = guest.answer(&line, Duration::from_secs(300)).unwrap();
    lab::traffic::all_returned(&said, count).unwrap();
    drop(guest);
    deleted(&node, "web");
    // The other test counts descriptors: this is another daemon.
    before.assert_same_but_descriptors(&node, "after removal");
}

const SNAPSHOT: &str = "/v1/snapshots/before";
const RESTORE: &str = "/v1/vms/again?restore_from=before";
/// How long a restored guest may take to answer.
const ANSWER: Duration = Duration::from_secs(60);

#[test]
fn a_machine_continues_from_a_snapshot_after_its_deletion() {
    let node = Node::start("e2e-restore").unwrap();
    let frames = || Frames {
        count: 200,
        size: 590,
        window: 16,
    };
    let (_, mut guest) = made(&node, "web", &nics());
    exchange(&mut guest, "eth0", frames()).unwrap();
    let before = guest.command("info").unwrap()["uptime_ms"].as_u64();
    let named = json!({ "name": "before" });
    let snapshot = |status: u16| {
        let at = "/v1/vms/web/snapshot";
        let answer = node.api.ask("POST", at, Some(&named)).unwrap();
        assert_eq!(answer.status, status, "{}", answer.body);
        answer.body
    };
    let written = snapshot(201);
    assert_eq!(snapshot(409)["code"], "name_taken");
    drop(guest);
    deleted(&node, "web");

    let all = node.api.get("/v1/snapshots").unwrap();
    let one = &all["items"][0];
    assert_eq!(all["items"].as_array().unwrap().len(), 1, "{all:#}");
    assert_eq!((&one["name"], &one["vm"]), (&named["name"], &json!("web")));
    assert_eq!(one["path"], written["path"]);
    assert!(one["bytes"].as_u64() > written["memory_bytes"].as_u64());
    assert!(one["format"].as_u64().is_some(), "{one:#}");
    let spec = node.api.get(&format!("{SNAPSHOT}/spec")).unwrap();
    assert_eq!(spec["spec"]["nics"][0]["mac"], MAC, "{spec:#}");

    // A refused restore leaves nothing, before its first step and after the NIC was created.
    let traces = node.traces().unwrap();
    let path = Path::new(one["path"].as_str().unwrap());
    let refused = |spec: &Value, words: &str| {
        let answer = node.api.ask("PUT", RESTORE, Some(spec)).unwrap();
        assert!(answer.status >= 400, "{}", answer.body);
        assert!(answer.body.to_string().contains(words), "{}", answer.body);
        assert_eq!(node.vm("again").unwrap(), None);
        node.same(&traces, "after a refusal").unwrap();
    };
    let mut without = spec.clone();
    without["spec"]["nics"] = json!([]);
    refused(&without, "the snapshot has the NICs");
    for file in ["state", "memory"] {
        let name = path.join(file);
        let bytes = fs::read(&name).unwrap();
        let at = bytes.iter().rposition(|byte| *byte != 0).unwrap();
        let file = fs::File::options().write(true).open(&name).unwrap();
        let place = u64::try_from(at).unwrap();
        file.write_all_at(&[bytes[at] ^ 1], place).unwrap();
        refused(&spec, "checksum");
        file.write_all_at(&[bytes[at]], place).unwrap();
    }

    let answer = node.api.ask("PUT", RESTORE, Some(&spec)).unwrap();
    assert_eq!(answer.status, 201, "{}\n{}", answer.body, node.said());
    let vm = node.await_phase("again", "Running").unwrap();
    let pending = vm["status"]["pending"].as_array();
    assert!(pending.is_none_or(Vec::is_empty), "{vm:#}");
    let console = vm["status"]["console"]["socket"].as_str().unwrap();
    let pid = u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    let mut guest = Guest::attach_arrived(Path::new(console), pid, ANSWER).unwrap();
    let now = guest.command("info").unwrap();
    assert_eq!(now["nics"][0]["mac"], MAC, "{now}");
    assert!(now["uptime_ms"].as_u64() >= before, "{now}");
    exchange(&mut guest, "eth0", frames()).unwrap();
    drop(guest);
    deleted(&node, "again");
    node.api.done("DELETE", SNAPSHOT, None).unwrap();
    let all = node.api.get("/v1/snapshots").unwrap();
    assert_eq!(all["items"], json!([]));
}
