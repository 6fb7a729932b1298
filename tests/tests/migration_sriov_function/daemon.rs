//! The same by node daemons: a snapshot, its restore and a migration, each with a function that the
//! client chooses.

use std::path::Path;

use lab::guest::Guest;
use lab::node::{Node, small, until};
use lab::sriov::{SriovNic, VirtualFunction};
use serde_json::{Value, json};

use super::moving::NOTICE;
use super::{DRIVER, bind, check, check_and_continue};

/// The guest of a VM that has arrived or was restored.
#[track_caller]
fn arrived(node: &Node, name: &str) -> Guest {
    let (socket, pid) = console(node, name);
    Guest::attach_arrived(Path::new(&socket), pid, NOTICE).unwrap()
}

/// The console of a running VM, and its process.
#[track_caller]
fn console(node: &Node, name: &str) -> (String, u32) {
    let vm = node.await_phase(name, "Running").unwrap();
    let socket = vm["status"]["console"]["socket"].as_str().unwrap();
    let pid = vm["status"]["pid"].as_u64().unwrap();
    (socket.to_owned(), u32::try_from(pid).unwrap())
}

#[track_caller]
fn put(node: &Node, path: &str, body: &Value, status: u16) -> String {
    let answer = node.api.ask("PUT", path, Some(body)).unwrap();
    let text = answer.body.to_string();
    assert_eq!(answer.status, status, "{text}\n{}", node.said());
    text
}

fn deleted(node: &Node, name: &str) {
    let path = format!("/v1/vms/{name}?force=true");
    node.api.done("DELETE", &path, None).unwrap();
}

#[test]
fn daemons_save_restore_and_migrate_a_vm_with_its_function() {
    const RESTORE: &str = "/v1/vms/again?restore_from=before";
    let nic = SriovNic::enable(3).unwrap();
    let functions = [0, 1, 2].map(|index| nic.vf(index).unwrap());
    let [first, second, other] = &functions;
    [first, second].into_iter().for_each(bind);
    let (here, there) = (
        Node::start("mover-a").unwrap(),
        Node::start("mover-b").unwrap(),
    );
    let mut body = small(&json!([])).unwrap();
    body["spec"]["vfio"] = json!([{ "host": first.address() }]);
    put(&here, "/v1/vms/web", &body, 201);
    let (socket, pid) = console(&here, "web");
    let mut guest = Guest::attach(Path::new(&socket), pid, NOTICE).unwrap();
    guest.command("mover-on 3000").unwrap();

    let named = json!({ "name": "before" });
    let saved = here
        .api
        .ask("POST", "/v1/vms/web/snapshot", Some(&named))
        .unwrap();
    assert_eq!(saved.status, 201, "{}\n{}", saved.body, here.said());
    check_and_continue(&mut guest, 0);
    drop(guest);
    // The guest's function keeps its name on another one.
    let spec = here.api.get("/v1/snapshots/before/spec").unwrap();
    let given = json!([{ "host": first.address(), "id": first.address() }]);
    assert_eq!(spec["spec"]["vfio"], given);
    let text = put(&here, RESTORE, &spec, 409);
    assert!(text.contains("device_taken"), "{text}");
    deleted(&here, "web");
    let on = |function: &VirtualFunction<'_>| {
        let mut spec = spec.clone();
        spec["spec"]["vfio"][0]["host"] = json!(function.address());
        spec
    };
    let mut without = spec.clone();
    without["spec"]["vfio"] = json!([]);
    let text = put(&here, RESTORE, &without, 422);
    assert!(text.contains("vfio: the snapshot has"), "{text}");
    // Bound to vfio-pci, which moves no state, and given back.
    let text = put(&here, RESTORE, &on(other), 422);
    for part in [first.address(), "of the same model"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(other.driver().as_deref(), Some("virtio-pci"));
    assert_eq!(here.vm("again").unwrap(), None);

    put(&here, RESTORE, &on(second), 201);
    let mut guest = arrived(&here, "again");
    check_and_continue(&mut guest, 1);
    guest.command("mover-on 3000").unwrap();
    drop(guest);

    let migrate = |function: &VirtualFunction<'_>, dry_run: bool| {
        let destination = format!("node:{}", there.api.socket().display());
        let send = json!({ "send": {
            "destination": destination, "name": "moved", "dry_run": dry_run,
            "vfio": { first.address(): function.address() }, "verify_memory": true,
        } });
        let path = "/v1/vms/again/migration";
        let answer = here.api.ask("POST", path, Some(&send)).unwrap();
        let text = format!("{}\n{}\n{}", answer.body, here.said(), there.said());
        assert_eq!(answer.status, if dry_run { 200 } else { 202 }, "{text}");
        answer.body
    };
    let refused = migrate(other, true);
    assert_eq!(refused["movable"], false, "{refused}");
    assert!(
        refused.to_string().contains("of the same model"),
        "{refused}"
    );
    assert_eq!(other.driver().as_deref(), Some("virtio-pci"));
    let trial = migrate(first, true);
    assert_eq!(trial["movable"], true, "{trial}");
    migrate(first, false);
    let mut guest = arrived(&there, "moved");
    until("nothing is left of it here", || {
        here.vm("again").unwrap().is_none() && here.processes().is_empty()
    })
    .unwrap();
    check(&mut guest, 2);
    drop(guest);
    deleted(&there, "moved");
    // Their owner has bound them.
    for function in [first, second] {
        assert_eq!(function.driver().as_deref(), Some(DRIVER));
    }
    drop((here, there));
    for function in &functions {
        function.bind("virtio-pci").unwrap();
    }
}
