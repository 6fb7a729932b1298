//! Two machines, each from one request, each with a subfunction of the lab NIC in a VLAN of a bridge; checked traffic between
//! them; none with one in another VLAN; and a host that is as before.

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

use bridge::{BRIDGE, Host, UPLINK};
use end_to_end::{Before, deleted, made, up};
use lab::labnic::trouble;
use lab::node::Node;
use lab::traffic::{Frames, exchange_between};
use serde_json::{Value, json};

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

const FRAMES: Frames = Frames {
    count: 200,
    size: 1514,
    window: 16,
};

#[test]
fn machines_with_subfunctions_come_and_go() {
    let _host = Host::new();
    let node = Node::start("e2e-sf").unwrap();
    let before = Before::now(&node);
    let (_, mut one) = made(&node, "one", &nics(0, 100));
    let (_, mut other) = made(&node, "other", &nics(1, 100));
    assert_eq!(up(&mut one), MACS[0]);
    assert_eq!(up(&mut other), MACS[1]);
    exchange_between(&mut one, &mut other, MACS[1], FRAMES).unwrap();
    drop(other);
    deleted(&node, "other");
    // In another VLAN nothing arrives.
    let (_, mut far) = made(&node, "far", &nics(2, 200));
    up(&mut far);
    assert!(exchange_between(&mut one, &mut far, MACS[2], FRAMES).is_err());
    drop((one, far));
    deleted(&node, "far");
    deleted(&node, "one");
    before.assert_same(&node, "after removal");
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}
