//! Creates two machines with one request each, each with a device on a virtual function of the
//! lab's NIC. Checked traffic flows between them, and afterwards the host is as before.

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

use end_to_end::{Before, deleted, made, up};
use lab::node::Node;
use lab::sriov::{ManagedFunction, SriovNic};
use lab::traffic::{Frames, exchange_between};
use serde_json::{Value, json};

/// A NIC on this function. The lab has bound it to vp_vdpa. QEMU's function has only one queue pair
/// unless its registers were written before that (see tests/README.md), and would refuse a guest's
/// driver.
fn nics(function: &ManagedFunction<'_>) -> Value {
    json!([{ "id": "net0", "from": function.mgmtdev() }])
}

#[test]
fn machines_with_virtual_functions_are_created_and_deleted() {
    let node = Node::start("e2e-vf").unwrap();
    let nic = SriovNic::enable(2).unwrap();
    let functions = [0, 1].map(|index| ManagedFunction::bind(nic.vf(index).unwrap()).unwrap());
    let before = Before::now(&node);
    let (_, mut one) = made(&node, "one", &nics(&functions[0]));
    let (vm, mut other) = made(&node, "other", &nics(&functions[1]));
    up(&mut one);
    let mac = up(&mut other);
    for size in [60, 1514] {
        let frames = Frames {
            count: 200,
            size,
            window: 16,
        };
        exchange_between(&mut one, &mut other, &mac, frames).unwrap();
    }
    drop((one, other));
    // The first VM was created first and is deleted first.
    deleted(&node, "one");
    assert_eq!(
        node.vm("other").unwrap().unwrap()["status"]["pid"],
        vm["status"]["pid"]
    );
    deleted(&node, "other");
    before.assert_same(&node, "after removal");
}
