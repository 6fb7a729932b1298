//! Two machines, each from one request, each with a virtual function of the lab's NIC; checked traffic between them; and a host
//! that is as before, to the number of virtual functions.

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
use lab::node::{Node, until};
use lab::traffic::{Frames, exchange_between};
use serde_json::json;
use vdpa::mgmt::pci::Pci;

/// The NIC, once its driver is ready: virtual functions are refused before.
fn nic() -> String {
    let mut found = None;
    until("the NIC has its driver", || {
        let all = Pci::default().physical_functions().unwrap();
        let ready = all.into_iter().find(|function| {
            function.driver.as_deref() == Some("virtio-pci") && !function.netdevs.is_empty()
        });
        found = ready.map(|function| format!("pci/{}", function.address));
        found.is_some()
    })
    .unwrap();
    found.unwrap()
}

#[test]
fn machines_with_virtual_functions_come_and_go() {
    let node = Node::start("e2e-vf").unwrap();
    let nic = nic();
    let before = Before::now(&node);
    let nics = json!([{ "id": "net0", "from": nic, "kind": "vf", "virtual_functions": 2 }]);
    let (_, mut one) = made(&node, "one", &nics);
    let (vm, mut other) = made(&node, "other", &nics);
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
    // The first one was made first and is taken away first.
    deleted(&node, "one");
    assert_eq!(node.vm("other").unwrap().unwrap()["pid"], vm["pid"]);
    deleted(&node, "other");
    before.assert_same(&node, "after removal");
}
