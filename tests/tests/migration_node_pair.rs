//! Two node daemons pair a migration, on vdpa_sim: the destination creates the NIC and the source
//! deletes its own. A refusal leaves nothing behind.

use lab::node::{Node, until};
use serde_json::{Value, json};
use std::path::Path;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:5c:01";

fn is_device(name: &str) -> bool {
    Path::new("/sys/bus/vdpa/devices").join(name).exists()
}

/// A request to migrate to the VM `web2` of this node. Both daemons are on one host, so two VMs of
/// one name would have devices of one name.
fn to(node: &Node, dry_run: bool) -> Value {
    let socket = node.api.socket().display().to_string();
    let destination = format!("node:{socket}");
    json!({ "send": { "destination": destination, "name": "web2", "dry_run": dry_run } })
}

#[test]
fn the_daemons_pair_a_move_and_leave_nothing_behind() {
    let here = Node::start("pair-a").unwrap();
    let mut there = Node::start("pair-b").unwrap();
    let nics = json!([{ "id": "net0", "from": "vdpasim_net", "mac": MAC }]);
    let spec = here.tiny(&nics).unwrap();
    here.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    here.await_phase("web", "Running").unwrap();
    let empty = there.traces().unwrap();
    let migration = "/v1/vms/web/migration";

    // The other node refuses, because it has a VM of that name. The guest stays, and nothing is
    // created.
    let taken = there.tiny(&json!([])).unwrap();
    there.api.done("PUT", "/v1/vms/web2", Some(&taken)).unwrap();
    let refused = here.api.ask("POST", migration, Some(&to(&there, false)));
    let refused = refused.unwrap();
    assert_eq!(refused.status, 409, "{}", refused.body);
    let asked = here.api.ask("POST", migration, Some(&to(&there, true)));
    let asked = asked.unwrap();
    assert_eq!(asked.status, 200, "{}", asked.body);
    assert_eq!(asked.body["movable"], false, "{}", asked.body);
    assert!(!is_device("web2.net0"));
    there
        .api
        .done("DELETE", "/v1/vms/web2?force=true", None)
        .unwrap();

    // A dry run: the devices that it created are gone again.
    let asked = here.api.ask("POST", migration, Some(&to(&there, true)));
    let asked = asked.unwrap();
    assert_eq!(asked.body["movable"], true, "{}", asked.body);
    there.same(&empty, "after it was only asked").unwrap();

    // The waiting VM outlives its daemon, and is deleted when the migration is cancelled.
    let mut wanted = here.tiny(&nics).unwrap();
    wanted["spec"]["nics"][0]["id"] = "net1".into();
    let receive = json!({ "receive": { "vm": wanted } });
    let answer = there
        .api
        .ask("POST", "/v1/vms/web3/migration", Some(&receive));
    assert_eq!(answer.unwrap().status, 201);
    there.kill();
    there.start_again().unwrap();
    there.await_phase("web3", "Receiving").unwrap();
    assert!(is_device("web3.net1"));
    there
        .api
        .done("DELETE", "/v1/vms/web3/migration", None)
        .unwrap();
    there
        .same_but_descriptors(&empty, "after what waited was called off")
        .unwrap();

    // The guest migrates.
    let sent = here.api.ask("POST", migration, Some(&to(&there, false)));
    let sent = sent.unwrap();
    assert_eq!(sent.status, 202, "{}", sent.body);
    there.await_phase("web2", "Running").unwrap();
    until("nothing is left of it here", || {
        here.vm("web").unwrap().is_none() && here.processes().is_empty()
    })
    .unwrap();
    assert!(!is_device("web.net0") && is_device("web2.net0"));
    let vm = there.vm("web2").unwrap().unwrap();
    assert_eq!(vm["spec"]["nics"][0]["mac"], MAC, "{vm:#}");
    there
        .api
        .done("DELETE", "/v1/vms/web2?force=true", None)
        .unwrap();
    assert!(!is_device("web2.net0"));
}

#[test]
fn only_a_source_with_the_secret_of_the_pairing_arrives() {
    let here = Node::start("pair-c").unwrap();
    let there = Node::start("pair-d").unwrap();
    let nics = json!([{ "id": "net0", "from": "vdpasim_net", "mac": MAC }]);
    let spec = here.tiny(&nics).unwrap();
    here.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    here.await_phase("web", "Running").unwrap();
    let receive = json!({ "receive": { "vm": spec } });
    let path = "/v1/vms/web2/migration";
    let awaited = there.api.ask("POST", path, Some(&receive)).unwrap();
    assert_eq!(awaited.status, 201, "{}", awaited.body);
    let secret = awaited.body["secret"].as_str().unwrap();

    // The process of another VM, which reaches the socket.
    let trial = |secret: Option<&str>| {
        let mut send = json!({ "destination": awaited.body["listen"], "dry_run": true });
        if let Some(secret) = secret {
            send["pairing"] = json!({ "secret": secret });
        }
        let send = json!({ "send": send });
        let asked = here.api.ask("POST", "/v1/vms/web/migration", Some(&send));
        asked.unwrap().body
    };
    for wrong in [None, Some("00".repeat(32))] {
        let refused = trial(wrong.as_deref());
        assert_eq!(refused["movable"], false, "{refused}");
        assert!(
            refused["obstacles"].to_string().contains("secret"),
            "{refused}"
        );
    }
    // The destination still waits for its source.
    let asked = trial(Some(secret));
    assert_eq!(asked["movable"], true, "{asked}");

    // Other users of the host can read a command line.
    for (_, pid) in here.processes().into_iter().chain(there.processes()) {
        for file in ["cmdline", "environ"] {
            let text = std::fs::read(format!("/proc/{pid}/{file}")).unwrap();
            assert!(!String::from_utf8_lossy(&text).contains(secret), "{file}");
        }
    }
    there.api.done("DELETE", path, None).unwrap();
    here.api
        .done("DELETE", "/v1/vms/web?force=true", None)
        .unwrap();
}
