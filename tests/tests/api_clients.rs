//! The Python package and the Rust client against a daemon whose VM runs: each operation of the
//! description is called, and each answer is described.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use bellhop_common::client::{Address, Credentials, Http, Node as Client};
use lab::node::Node;
use lab::sim::require_lab;
use serde_json::{Value, json};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:5d:01";

/// A VM with a NIC.
fn spec(node: &Node) -> Value {
    let nic = json!({ "id": "net0", "from": "vdpasim_net", "mac": MAC, "mtu": 1500 });
    node.tiny(&json!([nic])).unwrap()
}

/// The operations of the description that the daemon serves.
fn described(node: &Node) -> Vec<(String, Value)> {
    let description = node.api.get("/v1/openapi.json").unwrap();
    let items = description["paths"].as_object().unwrap().values();
    let operations = items.flat_map(|item| item.as_object().unwrap().values());
    operations
        .map(|one| {
            let id = one["operationId"].as_str().unwrap().to_owned();
            (id, one["responses"].clone())
        })
        .collect()
}

#[test]
fn the_python_package_calls_each_operation() {
    require_lab().unwrap();
    let node = Node::start("python").unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("python3")
        .arg("-B")
        .arg(script.join("../clients/python/tests/every_operation.py"))
        .arg(node.api.socket())
        .arg(spec(&node).to_string())
        .output()
        .expect("python3, which images/host/packages has");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{printed}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let called = printed
        .lines()
        .find_map(|line| line.strip_prefix("operations: "));
    let called: BTreeSet<String> = called.unwrap().split(' ').map(str::to_owned).collect();
    let wanted: BTreeSet<String> = described(&node).into_iter().map(|(id, _)| id).collect();
    assert_eq!(called, wanted);
    assert_eq!(node.processes().len(), 0);
}

#[test]
fn the_rust_client_calls_each_operation() {
    require_lab().unwrap();
    let node = Node::start("rust").unwrap();
    let address = Address::Socket(node.api.socket().to_owned());
    let client = Client::new(Http::new(&address, &Credentials::default()).unwrap());
    let spec = spec(&node);
    let created = client.put_vm("rust", &spec).only_if_absent();
    created.ignoring().send().unwrap();
    let again = client.put_vm("rust", &spec).only_if_absent().send();
    assert!(again.unwrap_err().refusal().unwrap().is_there_already());
    node.await_phase("rust", "Running").unwrap();
    let described = described(&node);
    // Reads of the VM, changes of objects that do not exist.
    let argument = |operation: &str, parameter: &str| {
        let reads = ["get_", "list_", "watch_"]
            .iter()
            .any(|verb| operation.starts_with(verb));
        let word = match parameter {
            "name" if reads => "rust",
            "id" if reads => "net0",
            "log" => "vmm",
            "address" | "device" => "0000:00:00.0",
            "index" => "0",
            _ => "none",
        };
        word.to_owned()
    };
    let mut called = Vec::new();
    for (id, call) in client.every_operation(&argument, &json!({})) {
        let call = match id {
            "watch_events" => call.query("since", 0).query("follow", false),
            _ => call,
        };
        match call.send() {
            Ok(()) => println!("{id}: done"),
            Err(error) => {
                println!("{id}: {error}");
                let refusal = error.refusal().unwrap();
                let (_, responses) = described.iter().find(|(of, _)| of == id).unwrap();
                let status = refusal.status.as_str();
                assert!(responses.get(status).is_some(), "{id}: {status}");
            }
        }
        called.push(id);
    }
    let wanted: Vec<&str> = described.iter().map(|(id, _)| id.as_str()).collect();
    let sorted = |mut all: Vec<&str>| -> Vec<String> {
        all.sort_unstable();
        all.into_iter().map(str::to_owned).collect()
    };
    assert_eq!(sorted(called), sorted(wanted));
    // The types fit the answers.
    assert!(client.get_version().send().unwrap().api >= 1);
    let all = client.list_vms().send().unwrap();
    assert_eq!(all.items[0].name, "rust");
    let nic = client.get_vm_nic("rust", "net0").send().unwrap();
    assert_eq!(nic.summary.id, "net0");
    assert!(
        client
            .get_vm_metrics("rust")
            .send()
            .unwrap()
            .contains("bellhop_")
    );
    client
        .delete_vm("rust")
        .query("force", true)
        .send()
        .unwrap();
    assert!(client.get_vm("rust").send().is_err());
    assert_eq!(node.processes().len(), 0);
}
