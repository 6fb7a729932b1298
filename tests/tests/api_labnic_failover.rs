//! NICs of the node daemon fail over to their backup device. Either their own device needs a reset,
//! or devlink reports an error of the NIC that it belongs to, or the host removes it.
//!
//! ```text
//!   one.net0 (subfunction) ── DEVICE_NEEDS_RESET ──> one.net0~ (subfunction, created with it)
//!   one.net0 (subfunction) ── fw of platform/labnic.0 in error ──> a device of another NIC
//!   two.net0 (subfunction) ── the same ──> stays: its backup is part of that NIC, too
//! ```

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "mgmt_nic/bridge.rs"]
mod bridge;
#[allow(dead_code, reason = "other tests use more of it")]
mod end_to_end;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
#[allow(dead_code, reason = "other tests use more of it")]
mod labnic_peer;
mod removal;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use bridge::{BRIDGE, Host, UPLINK};
use end_to_end::{Before, deleted, made, up};
use lab::files;
use lab::labnic::sf::{NIC, debug_file, devlink};
use lab::labnic::{break_down_named, trouble};
use lab::node::{Node, until};
use lab::sim::vdpa;
use lab::traffic::{Frames, exchange_between};
use labnic_peer::Peer;
use removal::ends;
use serde_json::{Value, json};
use std::path::Path;

const MACS: [&str; 2] = ["02:00:5e:00:53:31", "02:00:5e:00:53:32"];

/// The MAC address of the device that is not part of the NIC.
const SPARE_MAC: &str = "02:00:5e:00:53:33";

const FRAMES: Frames = Frames {
    count: 200,
    size: 1514,
    window: 16,
};

/// A subfunction in the bridge's VLAN 100.
fn nics(number: usize, backup: &Value) -> Value {
    json!([{
        "id": "net0", "from": UPLINK, "kind": "sf", "bridge": BRIDGE, "vlan": 100,
        "mac": MACS[number], "mtu": 1500, "backup": backup,
    }])
}

/// The NIC of a machine, as the machine reports it.
#[track_caller]
fn nic(node: &Node, vm: &str) -> Value {
    let path = format!("/v1/vms/{vm}/nics/net0");
    node.api.get(&path).unwrap()
}

/// The character device of the vDPA device of this name.
#[track_caller]
fn character_device(name: &str) -> Value {
    let directory = Path::new("/sys/bus/vdpa/devices").join(name);
    let entries = files::list(&directory).unwrap();
    let mut names = entries
        .iter()
        .filter_map(|entry| entry.file_name()?.to_str());
    let file = names.find(|name| name.starts_with("vhost-vdpa-")).unwrap();
    json!(format!("/dev/{file}"))
}

/// DRIVER_OK, and no DEVICE_NEEDS_RESET.
#[track_caller]
fn is_well(nic: &Value) {
    assert_eq!(nic["device"]["status"], 15, "{nic}");
}

#[test]
fn a_nic_whose_device_fails_moves_to_the_backup_created_with_it() {
    let _host = Host::new();
    let node = Node::start("backup").unwrap();
    let before = Before::now(&node);
    let (_, mut one) = made(&node, "one", &nics(0, &json!({ "from": UPLINK })));
    let (_, mut other) = made(&node, "other", &nics(1, &Value::Null));
    assert_eq!(up(&mut one), MACS[0]);
    assert_eq!(up(&mut other), MACS[1]);
    exchange_between(&mut one, &mut other, MACS[1], FRAMES).unwrap();
    assert_eq!(nic(&node, "one")["path"], character_device("one.net0"));

    break_down_named("one.net0").unwrap();
    let stands_by = character_device("one.net0~");
    until("the NIC is on its backup device", || {
        nic(&node, "one")["last_failover"]["state"] == "Done"
    })
    .unwrap();
    let moved = nic(&node, "one");
    assert_eq!(moved["path"], stands_by, "{moved}");
    is_well(&moved);
    // The bridge knows the guest's new place, in both directions.
    exchange_between(&mut one, &mut other, MACS[1], FRAMES).unwrap();
    exchange_between(&mut other, &mut one, MACS[0], FRAMES).unwrap();

    drop((one, other));
    deleted(&node, "one");
    deleted(&node, "other");
    before.assert_same(&node, "after removal");
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

/// The host deletes the vDPA device of this name, which a VM has open.
#[track_caller]
fn delete(device: &'static str) {
    ends(device, move || {
        vdpa(&["dev", "del", device]).unwrap();
    });
}

#[test]
fn a_nic_whose_device_the_host_removes_moves_or_is_unplugged_until_the_next_start() {
    let _host = Host::new();
    let node = Node::start("removal").unwrap();
    let before = Before::now(&node);
    let (_, mut one) = made(&node, "one", &nics(0, &json!({ "from": UPLINK })));
    let (_, mut other) = made(&node, "other", &nics(1, &Value::Null));
    assert_eq!(up(&mut one), MACS[0]);
    assert_eq!(up(&mut other), MACS[1]);
    exchange_between(&mut one, &mut other, MACS[1], FRAMES).unwrap();
    let is_recorded = |device: &str| {
        let path = format!("/v1/nics/{device}");
        node.api.ask("GET", &path, None).unwrap().status == 200
    };
    assert!(is_recorded("one.net0") && is_recorded("other.net0"));

    delete("one.net0");
    until("the NIC is on its backup device", || {
        nic(&node, "one")["last_failover"]["state"] == "Done"
    })
    .unwrap();
    is_well(&nic(&node, "one"));
    exchange_between(&mut one, &mut other, MACS[1], FRAMES).unwrap();
    exchange_between(&mut other, &mut one, MACS[0], FRAMES).unwrap();
    until("the rest of the device is deleted", || {
        !is_recorded("one.net0")
    })
    .unwrap();
    assert_eq!(nic(&node, "one")["path"], character_device("one.net0~"));

    delete("other.net0");
    until("the NIC is unplugged", || {
        let answer = node.api.ask("GET", "/v1/vms/other/nics/net0", None);
        answer.unwrap().status == 404
    })
    .unwrap();
    until("the rest of the device is deleted", || {
        !is_recorded("other.net0")
    })
    .unwrap();
    let events = node.api.ask("GET", "/v1/events?since=0&follow=false", None);
    let events = events.unwrap().body.to_string();
    assert!(events.contains("nic_device_removed"), "{events}");
    // The spec still has it.
    drop(other);
    for wanted in [
        json!({ "state": "Stopped", "mode": "hard" }),
        json!({ "state": "Running" }),
    ] {
        let path = "/v1/vms/other/state";
        node.api.done("PUT", path, Some(&wanted)).unwrap();
        let state = wanted["state"].as_str().unwrap();
        node.await_phase("other", state).unwrap();
    }
    assert!(is_recorded("other.net0"));
    until("the NIC is back", || {
        let answer = node.api.ask("GET", "/v1/vms/other/nics/net0", None);
        answer.unwrap().body["state"] == "Plugged"
    })
    .unwrap();

    drop(one);
    deleted(&node, "one");
    deleted(&node, "other");
    before.assert_same(&node, "after removal");
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn nics_move_when_devlink_reports_an_error_of_their_function() {
    let host = Host::new();
    let spare = host.labnic.add("spare", &["mac", SPARE_MAC, "mtu", "1500"]);
    let spare = spare.unwrap();
    let peer = Peer::start(&host.labnic);
    let node = Node::start("devlink-failover").unwrap();
    let before = Before::now(&node);
    let far = json!({ "path": spare.path() });
    let (_, mut one) = made(&node, "one", &nics(0, &far));
    let (_, mut two) = made(&node, "two", &nics(1, &json!({ "from": UPLINK })));
    up(&mut one);
    up(&mut two);
    exchange_between(&mut one, &mut two, MACS[1], FRAMES).unwrap();

    files::write(&debug_file("health_stuck").unwrap(), "Y").unwrap();
    files::write(&debug_file("health_report").unwrap(), "fire").unwrap_err();
    until("the NIC is on its backup device", || {
        nic(&node, "one")["path"] == json!(spare.path())
    })
    .unwrap();
    is_well(&nic(&node, "one"));
    peer.exchange(&mut one, 50, 256);
    until("the log says why the other one stays", || {
        node.said().contains("the backup device depends on it, too")
    })
    .unwrap();
    let stays = nic(&node, "two");
    assert_eq!(stays["path"], character_device("two.net0"), "{stays}");
    is_well(&stays);

    files::write(&debug_file("health_stuck").unwrap(), "N").unwrap();
    devlink(&["health", "recover", NIC, "reporter", "fw"]).unwrap();
    drop((one, two));
    deleted(&node, "one");
    deleted(&node, "two");
    before.assert_same(&node, "after removal");
    drop(spare);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}
