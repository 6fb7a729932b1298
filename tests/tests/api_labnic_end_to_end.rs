//! Creates two machines with one request each, each with a subfunction of the lab NIC in a VLAN of
//! a bridge. Checked traffic flows between them, none to a machine in another VLAN, and afterwards
//! the host is as before.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "mgmt_nic/bridge.rs"]
mod bridge;
mod end_to_end;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use bridge::{BRIDGE, Host, UPLINK, run};
use end_to_end::{Before, deleted, made, up};
use lab::labnic::trouble;
use lab::node::Node;
use lab::traffic::{Frames, exchange_between};
use serde_json::{Value, json};
use support::{bellhop, printed};

const MACS: [&str; 3] = [
    "02:00:5e:00:53:21",
    "02:00:5e:00:53:22",
    "02:00:5e:00:53:23",
];

fn nics(number: usize, vlan: u16) -> Value {
    json!([{
        "id": "net0", "from": UPLINK, "kind": "sf", "bridge": BRIDGE, "vlan": vlan,
        "mac": MACS[number], "mtu": 1500,
    }])
}

/// The VLAN of the VM that no other VM reaches.
const FAR_VLAN: u16 = 200;

/// The bridge's port in this VLAN.
fn port_in(vlan: u16) -> String {
    let told: Value = serde_json::from_str(&run("bridge -j vlan show")).unwrap();
    let ports = told.as_array().unwrap();
    let is_in = |port: &&Value| {
        let vlans = port["vlans"].as_array().unwrap();
        vlans.iter().any(|one| one["vlan"] == vlan)
    };
    let port = ports.iter().find(is_in).unwrap_or_else(|| panic!("{told}"));
    port["ifname"].as_str().unwrap().to_owned()
}

const FRAMES: Frames = Frames {
    count: 200,
    size: 1514,
    window: 16,
};

#[test]
fn machines_with_subfunctions_are_created_and_deleted() {
    let _host = Host::new();
    let node = Node::start("e2e-sf").unwrap();
    let before = Before::now(&node);
    let (_, mut one) = made(&node, "one", &nics(0, 100));
    let (_, mut other) = made(&node, "other", &nics(1, 100));
    assert_eq!(up(&mut one), MACS[0]);
    assert_eq!(up(&mut other), MACS[1]);
    exchange_between(&mut one, &mut other, MACS[1], FRAMES).unwrap();
    let ports = node.api.get("/v1/ports").unwrap();
    let shown = printed(&bellhop(&["port", "show", "-j"]));
    assert_eq!(ports, serde_json::from_str::<Value>(&shown).unwrap());
    let made_nics = node.api.get("/v1/nics").unwrap();
    for (name, mac) in [("one.net0", MACS[0]), ("other.net0", MACS[1])] {
        assert_eq!(made_nics["nic"][name]["mac"], mac, "{made_nics:#}");
        let port = made_nics["nic"][name]["port"].as_str().unwrap();
        assert!(ports["port"][port].is_object(), "{ports:#}");
    }
    drop(other);
    deleted(&node, "other");
    // Nothing arrives in another VLAN. The test sends one window at most: the guest waits for each
    // lost frame.
    let (_, mut far) = made(&node, "far", &nics(2, FAR_VLAN));
    assert_eq!(up(&mut far), MACS[2]);
    far.command("echo-on").unwrap();
    let few = format!("frames 16 1514 16 to {}", MACS[2]);
    let said = one.command(&few).unwrap();
    let echoed = far.command("echo-off").unwrap();
    assert_eq!(
        (&said["tx"], &said["rx"]),
        (&json!(16), &json!(0)),
        "{said}"
    );
    assert_eq!(echoed["echoed"], 0, "{echoed}");
    // Both were ready: in one VLAN they reach each other.
    run(&format!(
        "bridge vlan add dev {} vid 100 pvid untagged",
        port_in(FAR_VLAN)
    ));
    exchange_between(&mut one, &mut far, MACS[2], FRAMES).unwrap();
    drop((one, far));
    deleted(&node, "far");
    deleted(&node, "one");
    before.assert_same(&node, "after removal");
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}
