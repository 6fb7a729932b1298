//! The VMs: the daemon's data of them, and each VM's own reports. Without a daemon the VMs' own
//! sockets are queried.

use std::time::{Duration, Instant};

use bellhop_common::client::{Address, Credentials, Http, Node, path};
use bellhop_common::error::ErrorKind;
use serde_json::Value;
use vdpa::causes::in_one_line;

use super::bundle::Bundle;
use super::context::{Context, of_each_machine};

/// The time limit for all VMs together, which are queried one after the other.
const PATIENCE: Duration = Duration::from_secs(90);

/// The parts about the node, and their paths in the daemon's API.
const OF_NODE: [(&str, &str); 5] = [
    ("version.json", "/v1/version"),
    ("vms.json", "/v1/vms"),
    ("topology.json", "/v1/topology"),
    ("metrics.txt", "/v1/metrics"),
    ("events.txt", "/v1/events?since=0&follow=false"),
];
/// The parts about a VM, and their paths below the VM's own path.
const OF_MACHINE: [(&str, &[&str]); 5] = [
    ("config.json", &["config"]),
    ("nics.json", &["nics"]),
    ("disks.json", &["disks"]),
    ("vfio.json", &["vfio"]),
    ("metrics.txt", &["metrics"]),
];

/// Adds the VMs.
pub(super) fn add(context: &Context, bundle: &mut Bundle) {
    let node = match Http::new(&context.node, &context.credentials).map(Node::new) {
        Ok(node) => node,
        Err(error) => return bundle.miss("node", &in_one_line(&error)),
    };
    match node.get::<Value>("/v1/version") {
        Err(error) if matches!(error.kind(), ErrorKind::NoDaemon) => {
            let why = in_one_line(&error);
            bundle.miss(
                "node",
                &format!("{why}; the VMs were queried at their own sockets"),
            );
            alone(context, bundle);
        }
        Err(error) => bundle.miss("node", &in_one_line(&error)),
        Ok(_) => of_node(&node, bundle),
    }
}

fn of_node(node: &Node, bundle: &mut Bundle) {
    for (name, path) in OF_NODE {
        bundle.put(&["node", name], node.get_bytes(path));
    }
    let start = Instant::now();
    let names = match node.get::<Value>("/v1/vms") {
        Ok(list) => names(&list),
        // Recorded above.
        Err(_) => Vec::new(),
    };
    for name in names {
        if start.elapsed() > PATIENCE {
            bundle.miss(
                &format!("vms/{name}"),
                "the time limit for all VMs has passed",
            );
            continue;
        }
        let of_vm = path(["v1", "vms", &name]);
        bundle.put(&["vms", &name, "vm.json"], node.get_bytes(&of_vm));
        let spec = node.get_bytes(&path(["v1", "vms", &name, "spec"]));
        bundle.put(&["vms", &name, "spec.json"], spec);
        of_machine(node, &name, &of_vm, &of_vm, bundle);
    }
}

/// The names in a list of VMs, in any of the usual forms.
fn names(list: &Value) -> Vec<String> {
    let list = list.get("items").unwrap_or(list);
    let name = |vm: &Value| Some(vm.get("name")?.as_str()?.to_owned());
    match list {
        Value::Array(vms) => vms.iter().filter_map(name).collect(),
        Value::Object(vms) => vms.keys().cloned().collect(),
        _ => Vec::new(),
    }
}

/// `of_vm` is the path of its devices, `of_all` that of its metrics.
fn of_machine(node: &Node, name: &str, of_vm: &str, of_all: &str, bundle: &mut Bundle) {
    for (part, segments) in OF_MACHINE {
        let above = if part == "metrics.txt" { of_all } else { of_vm };
        let content = node.get_bytes(&format!("{above}{}", path(segments.iter().copied())));
        if part == "nics.json"
            && let Ok(nics) = &content
        {
            each_nic(node, name, of_vm, nics, bundle);
        }
        bundle.put(&["vms", name, part], content);
    }
}

/// Each NIC with its queues, the positions of its rings, and its doorbells.
fn each_nic(node: &Node, name: &str, of_vm: &str, nics: &[u8], bundle: &mut Bundle) {
    let nics: Value = serde_json::from_slice(nics).unwrap_or_default();
    for nic in nics["items"].as_array().into_iter().flatten() {
        if let Some(id) = nic.get("id").and_then(Value::as_str) {
            let content = node.get_bytes(&format!("{of_vm}{}", path(["nics", id])));
            bundle.put(&["vms", name, "nics", &format!("{id}.json")], content);
        }
    }
}

/// VMs at their own sockets.
fn alone(context: &Context, bundle: &mut Bundle) {
    let vms = context.runtime_dir.join("vms");
    let start = Instant::now();
    for (name, directory) in of_each_machine(&vms, "vms", bundle) {
        let socket = Address::Socket(directory.join("api.socket"));
        let node = match Http::new(&socket, &Credentials::default()).map(Node::new) {
            Ok(node) => node,
            Err(error) => {
                bundle.miss(&format!("vms/{name}"), &in_one_line(&error));
                continue;
            }
        };
        let vm = node.get_bytes("/v1/vm");
        let answers = vm.is_ok() && start.elapsed() < PATIENCE;
        bundle.put(&["vms", &name, "vm.json"], vm);
        if answers {
            of_machine(&node, &name, "/v1/vm", "/v1", bundle);
        }
    }
}
