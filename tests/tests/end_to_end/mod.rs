//! Shared by the tests of all rigs: a machine from one request, its guest on its console, and a
//! host that is as before.

use lab::guest::Guest;
use lab::node::{Node, Traces, small};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

use super::host;

/// How long a guest's console may be silent while it boots.
const SILENCE: Duration = Duration::from_secs(120);

/// The host's state before: as other tools see it, and the node's own part.
pub(crate) struct Before {
    host: host::Traces,
    node: Traces,
}

impl Before {
    /// Records the state, after the daemon has created its permanent files.
    #[allow(dead_code, reason = "not all tests compare the host")]
    pub(crate) fn now(node: &Node) -> Self {
        let tiny = node.tiny(&json!([])).unwrap();
        node.api.done("PUT", "/v1/vms/first", Some(&tiny)).unwrap();
        node.api
            .done("DELETE", "/v1/vms/first?force=true", None)
            .unwrap();
        let mut last = node.traces().unwrap();
        lab::node::until("the node is quiet", || {
            std::thread::sleep(Duration::from_millis(200));
            let now = node.traces().unwrap();
            std::mem::replace(&mut last, now.clone()) == now
        })
        .unwrap();
        Self {
            host: host::Traces::find(),
            node: last,
        }
    }

    /// Fails with the differences of the node's own part.
    #[allow(dead_code, reason = "most tests compare the host, too")]
    #[track_caller]
    pub(crate) fn assert_same_node(&self, node: &Node, when: &str) {
        node.same_but_descriptors(&self.node, when).unwrap();
    }

    /// Fails with the differences.
    #[allow(dead_code, reason = "not all tests compare the host")]
    #[track_caller]
    pub(crate) fn assert_same(&self, node: &Node, when: &str) {
        node.same(&self.node, when).unwrap();
        self.host.assert_same(when);
    }

    /// Like [`Self::assert_same`], after a restart of the daemon.
    #[allow(dead_code, reason = "not all tests kill the daemon")]
    #[track_caller]
    pub(crate) fn assert_same_but_descriptors(&self, node: &Node, when: &str) {
        node.same_but_descriptors(&self.node, when).unwrap();
        self.host.assert_same(when);
    }
}

/// A VM with the lab's small guest and these NICs.
pub(crate) fn spec(nics: &Value) -> Value {
    small(nics).unwrap()
}

/// Creates a machine with one request, and waits until its guest is ready.
#[allow(dead_code, reason = "not all tests have vDPA NICs")]
#[track_caller]
pub(crate) fn made(node: &Node, name: &str, nics: &Value) -> (Value, Guest) {
    created(node, name, &spec(nics))
}

/// The same with this body of the request.
#[track_caller]
pub(crate) fn created(node: &Node, name: &str, body: &Value) -> (Value, Guest) {
    let path = format!("/v1/vms/{name}");
    let answer = node.api.ask("PUT", &path, Some(body)).unwrap();
    assert_eq!(answer.status, 201, "{}\n{}", answer.body, node.said());
    attached(node, name)
}

/// The machine and its guest, once it is ready.
#[track_caller]
pub(crate) fn attached(node: &Node, name: &str) -> (Value, Guest) {
    let vm = node.await_phase(name, "Running").unwrap();
    let console = vm["status"]["console"]["socket"].as_str().unwrap();
    let pid = u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    let guest = Guest::attach(Path::new(console), pid, SILENCE).unwrap();
    (vm, guest)
}

/// Deletes the machine.
#[track_caller]
pub(crate) fn deleted(node: &Node, name: &str) {
    let path = format!("/v1/vms/{name}?force=true");
    let answer = node.api.ask("DELETE", &path, None).unwrap();
    assert_eq!(answer.status, 204, "{}\n{}", answer.body, node.said());
    assert_eq!(node.vm(name).unwrap(), None);
}

/// Brings the guest's first NIC up; returns its address.
#[allow(dead_code, reason = "the simulator's NIC talks to itself")]
pub(crate) fn up(guest: &mut Guest) -> String {
    guest.command("up eth0").unwrap();
    let info = guest.command("info").unwrap();
    info["nics"][0]["mac"].as_str().unwrap().to_owned()
}
