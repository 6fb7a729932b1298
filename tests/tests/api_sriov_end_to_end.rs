//! Creates two machines with one request each, each with a device on a virtual function of the
//! lab's NIC. Checked traffic flows between them, and afterwards the host is as before.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod end_to_end;
mod guest_nics;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
mod removal;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use end_to_end::{Before, deleted, made, up};
use guest_nics::wait_nics;
use lab::node::{Node, PATIENCE, until};
use lab::sriov::{ManagedFunction, SriovNic};
use lab::traffic::{Frames, exchange_between};
use lab::vmm_process::cost;
use removal::ends;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

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

/// The host takes a function's driver and then all functions, while guests send. Their VMs continue
/// without the NICs.
#[test]
fn functions_that_the_host_takes_back_are_unplugged_and_forgotten() {
    let node = Node::start("taken-vf").unwrap();
    let nic = SriovNic::enable(2).unwrap();
    let functions = [0, 1].map(|index| ManagedFunction::bind(nic.vf(index).unwrap()).unwrap());
    let (_, mut one) = made(&node, "one", &nics(&functions[0]));
    let (_, mut other) = made(&node, "other", &nics(&functions[1]));
    up(&mut one);
    let mac = up(&mut other);
    let frames = Frames {
        count: 200,
        size: 300,
        window: 16,
    };
    exchange_between(&mut one, &mut other, &mac, frames).unwrap();
    let device = Path::new("/sys/bus/pci/devices").join(nic.vf(1).unwrap().address());
    let all = fs::canonicalize(device.join("physfn/sriov_numvfs")).unwrap();
    let driver = Path::new("/sys/bus/pci/drivers/vp-vdpa/unbind").to_owned();
    let address = nic.vf(0).unwrap().address().to_owned();
    for guest in [&mut one, &mut other] {
        guest.command("flood-on 512").unwrap();
    }
    for (name, guest, file, value) in [
        ("one", &mut one, driver, address),
        ("other", &mut other, all, "0".to_owned()),
    ] {
        ends(&format!("{value} in {}", file.display()), move || {
            fs::write(file, value).unwrap();
        });
        guest.command_within("flood-off", PATIENCE).unwrap();
        wait_nics(guest, &[]);
        for gone in [format!("vms/{name}/nics/net0"), format!("nics/{name}.net0")] {
            until(&format!("{gone} is gone"), || {
                let answer = node.api.ask("GET", &format!("/v1/{gone}"), None);
                answer.unwrap().status == 404
            })
            .unwrap();
        }
        let vm = node.await_phase(name, "Running").unwrap();
        assert_eq!(vm["status"]["pid"], guest.pid(), "{vm}");
        assert_eq!(cost(guest.pid()).unwrap().pinned_kib, 0);
    }
    drop((one, other));
    deleted(&node, "one");
    deleted(&node, "other");
    // They are gone, with their functions.
    std::mem::forget(functions);
}
