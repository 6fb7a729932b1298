//! Changes of a VM of the node daemon, now or at its next start, by the API and the command line.
//! Selection of VMs by their labels.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::node::{Node, until};
use lab::openapi::exchange::{self, Answer, Request};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:5f:01";
const OTHER_MAC: &str = "52:54:5e:11:5f:02";
const WEB: &str = "/v1/vms/web";

/// A merge patch to `path`, with these headers.
fn patch(node: &Node, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
    let mut request = Request::new("PATCH", path).with_body(body.to_string());
    let typed = headers.iter().any(|(name, _)| *name == "content-type");
    if !typed {
        request = request.with_header("content-type", "application/merge-patch+json");
    }
    for (name, value) in headers {
        request = request.with_header(name, *value);
    }
    let answer = exchange::ask(node.api.socket(), &request);
    answer.unwrap().unwrap()
}

/// The patch is taken. Each changed member, and when the change takes effect.
#[track_caller]
fn changed(node: &Node, path: &str, body: &Value) -> Vec<(String, String)> {
    let answer = patch(node, path, &[], body);
    let answered = answer.json();
    assert_eq!(answer.status, 200, "{body}: {answered}");
    let changes = answered["changes"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    changes
        .map(|one| (text(&one["field"]), text(&one["applied"])))
        .collect()
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    let all = all.iter();
    all.map(|&(field, applied)| (field.to_owned(), applied.to_owned()))
        .collect()
}

#[track_caller]
fn refused(answer: &Answer, status: u16, code: &str) {
    let body = answer.json();
    assert_eq!(
        (answer.status, body["code"].as_str().unwrap_or_default()),
        (status, code),
        "{body}"
    );
}

/// The entity tag of the VM `web`.
fn tag(node: &Node) -> String {
    let answer = exchange::ask(node.api.socket(), &Request::new("GET", WEB));
    let answer = answer.unwrap().unwrap();
    answer.header("etag").unwrap().to_owned()
}

/// The memory that the process of the VM runs with.
fn memory_now(node: &Node, name: &str) -> Value {
    let path = format!("/v1/vms/{name}/config");
    node.api.get(&path).unwrap()["memory"]["size"].clone()
}

fn start_again(node: &Node) {
    let stop = json!({ "state": "Stopped", "mode": "hard" });
    node.api
        .done("PUT", "/v1/vms/web/state", Some(&stop))
        .unwrap();
    let run = json!({ "state": "Running" });
    node.api
        .done("PUT", "/v1/vms/web/state", Some(&run))
        .unwrap();
    node.await_phase("web", "Running").unwrap();
}

/// `bellhop vm` with these words and this standard input: its exit code and what it says.
fn vm_command(node: &Node, words: &[&str], input: Stdio) -> (Option<i32>, String) {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command.arg("vm").args(words).stdin(input);
    command.env("BELLHOP_NODE", node.api.socket());
    command.env("EDITOR", "sed -i s/32M/64M/");
    command.env_remove("VISUAL");
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let said = [stdout, stderr].map(|text| String::from_utf8(text).unwrap());
    (status.code(), said.concat())
}

#[track_caller]
fn done(node: &Node, words: &[&str]) -> String {
    let (code, said) = vm_command(node, words, Stdio::null());
    assert_eq!(code, Some(0), "{words:?}: {said}\n{}", node.said());
    said
}

#[test]
fn a_vm_that_runs_is_changed_now_or_at_its_next_start() {
    let mut node = Node::start("edit").unwrap();
    let before = node.traces().unwrap();
    let mut spec = node.tiny(&json!([])).unwrap();
    spec["spec"]["restart"] = json!("Never");
    node.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = node.await_phase("web", "Running").unwrap();
    let created = tag(&node);

    // Now: its process crashes, and the new policy holds.
    let found = changed(&node, WEB, &json!({ "spec": { "restart": "Always" } }));
    assert_eq!(found, pairs(&[("/spec/restart", "now")]));
    assert_ne!(tag(&node), created);
    let now = node.vm("web").unwrap().unwrap();
    assert_eq!(now["spec"]["restart"], "Always");
    assert_eq!(now["status"]["pid"], vm["status"]["pid"]);
    assert_eq!(now["status"]["pending"], json!([]), "{now:#}");
    let pid = i32::try_from(vm["status"]["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    until("it is started again", || {
        let vm = node.vm("web").unwrap().unwrap();
        vm["status"]["restarts"] == 1 && vm["status"]["phase"] == "Running"
    })
    .unwrap();

    // A writer that has not seen that, and a trial.
    let larger = json!({ "spec": { "memory": { "size": "64M" }, "cpus": null } });
    let seen = tag(&node);
    let stale = patch(&node, WEB, &[("if-match", &created)], &larger);
    refused(&stale, 412, "generation_conflict");
    let trial = patch(&node, &format!("{WEB}?dry_run=true"), &[], &larger).json();
    let wanted = json!([
        { "field": "/spec/memory/size", "from": "32M", "to": "64M", "applied": "next_start" },
    ]);
    assert_eq!(trial["changes"], wanted);
    assert_eq!(tag(&node), seen);

    // At the next start, also of the daemon.
    let taken = patch(&node, WEB, &[("if-match", &seen)], &larger);
    assert_eq!(taken.status, 200, "{}", taken.json());
    assert_eq!(taken.header("etag"), Some(tag(&node).as_str()));
    assert_eq!(taken.json()["changes"], wanted);
    assert_eq!(taken.json()["vm"]["spec"]["memory"]["size"], "64M");
    node.kill();
    node.start_again().unwrap();
    let vm = node.await_phase("web", "Running").unwrap();
    assert_eq!(
        vm["status"]["pending"],
        json!(["/spec/memory/size"]),
        "{vm:#}"
    );
    assert_eq!(memory_now(&node, "web"), "32M");
    let shown = done(&node, &["show", "web"]);
    assert!(shown.contains("at the next start: memory.size"), "{shown}");
    start_again(&node);
    let vm = node.vm("web").unwrap().unwrap();
    assert_eq!(vm["status"]["pending"], json!([]), "{vm:#}");
    assert_eq!(memory_now(&node, "web"), "64M");

    // What cannot be is refused, and changes nothing.
    let seen = (tag(&node), node.api.get(WEB).unwrap()["spec"].take());
    let of_spec = |member: &str, value: Value| json!({ "spec": { member: value } });
    let disk = of_spec("disks", json!([{ "path": "/dev/null" }]));
    for (body, status, code) in [
        (json!([]), 422, "invalid_body"),
        (json!({ "cpus": 2 }), 422, "invalid_body"),
        (json!({ "name": "db" }), 422, "invalid_body"),
        (of_spec("vcpus", json!(2)), 422, "invalid_body"),
        (of_spec("vcpus", Value::Null), 422, "invalid_body"),
        (
            of_spec("memory", json!({ "pages": null })),
            422,
            "invalid_body",
        ),
        (of_spec("cpus", json!(0)), 422, "invalid_body"),
        (of_spec("kernel", Value::Null), 422, "invalid_body"),
        (of_spec("kernel", json!("relative")), 422, "invalid_body"),
        (of_spec("kernel", json!("/nonexistent")), 422, "unusable"),
        (of_spec("state", json!("Stopped")), 422, "invalid_body"),
        (json!({ "generation": 1 }), 412, "generation_conflict"),
        (json!({ "labels": { "a b": "c" } }), 422, "invalid_body"),
        (json!({ "labels": { "a": 1 } }), 422, "invalid_body"),
        (
            json!({ "annotations": { "a": "x".repeat(2000) } }),
            422,
            "invalid_body",
        ),
        (
            of_spec("nics", json!([{ "id": "a", "from": "vdpasim_net" }])),
            409,
            "vm_runs",
        ),
        (disk, 409, "vm_runs"),
    ] {
        refused(&patch(&node, WEB, &[], &body), status, code);
    }
    let (any, none) = (of_spec("cpus", json!(2)), "/v1/vms/none");
    refused(&patch(&node, none, &[], &any), 404, "no_such_vm");
    let typed = patch(&node, WEB, &[("content-type", "text/plain")], &any);
    refused(&typed, 415, "unsupported_content_type");
    let misspelled = patch(&node, &format!("{WEB}?dryrun=true"), &[], &any);
    refused(&misspelled, 400, "unknown_parameter");
    let absent = patch(&node, WEB, &[("if-none-match", "*")], &any);
    refused(&absent, 412, "vm_exists");
    let now = (tag(&node), node.api.get(WEB).unwrap()["spec"].take());
    assert_eq!(now, seen);
    // All that was read may come back.
    let whole = node.api.get(WEB).unwrap();
    assert_eq!(changed(&node, WEB, &whole), pairs(&[]));

    let delete = "/v1/vms/web?force=true";
    node.api.done("DELETE", delete, None).unwrap();
    node.same_but_descriptors(&before, "it is deleted").unwrap();
}

#[test]
fn a_stopped_vm_gets_other_nics_or_keeps_the_present_ones() {
    let node = Node::start("edit-nics").unwrap();
    let before = node.traces().unwrap();
    let nic = |id: &str, mac: &str| json!({ "id": id, "from": "vdpasim_net", "mac": mac });
    let mut spec = node.tiny(&json!([nic("net0", MAC)])).unwrap();
    spec["spec"]["state"] = json!("Stopped");
    node.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let is_device = |name: &str| Path::new("/sys/bus/vdpa/devices").join(name).exists();

    let bad = json!({ "spec": { "nics": [{ "id": "net1", "from": "nowhere0" }] } });
    refused(&patch(&node, WEB, &[], &bad), 422, "unusable");
    assert!(is_device("web.net0"));
    let other = json!({ "spec": { "nics": [nic("net1", OTHER_MAC)] } });
    let found = changed(&node, WEB, &other);
    assert_eq!(found, pairs(&[("/spec/nics", "next_start")]));
    assert!(is_device("web.net1") && !is_device("web.net0"));
    let image = node.directory().join("data.img");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let disks = json!({ "spec": { "disks": [{ "path": image, "id": "data" }] } });
    let found = changed(&node, WEB, &disks);
    assert_eq!(found, pairs(&[("/spec/disks", "next_start")]));
    let run = json!({ "state": "Running" });
    node.api
        .done("PUT", "/v1/vms/web/state", Some(&run))
        .unwrap();
    node.await_phase("web", "Running").unwrap();
    let shown = node.api.get("/v1/vms/web/disks/data").unwrap();
    assert_eq!(shown["id"], "data", "{shown:#}");
    let delete = "/v1/vms/web?force=true";
    node.api.done("DELETE", delete, None).unwrap();
    node.same_but_descriptors(&before, "it is deleted").unwrap();
}

#[test]
fn vms_are_found_and_changed_in_the_words_of_the_command_line() {
    let node = Node::start("edit-cli").unwrap();
    let before = node.traces().unwrap();
    for (name, tier) in [("web1", "web"), ("web2", "web"), ("db", "db")] {
        let mut spec = node.tiny(&json!([])).unwrap();
        spec["spec"]["state"] = json!("Stopped");
        spec["labels"] = json!({ "tier": tier, "example.org/env": "test" });
        let path = format!("/v1/vms/{name}");
        node.api.done("PUT", &path, Some(&spec)).unwrap();
    }
    let names = |query: &str| {
        let list = node.api.get(&format!("/v1/vms{query}")).unwrap();
        let names = list["items"].as_array().unwrap().iter();
        names
            .map(|vm| vm["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names("?label=tier=web"), ["web1", "web2"]);
    assert_eq!(names("?label=tier%3Dweb,example.org/env"), ["web1", "web2"]);
    assert_eq!(names("?label=tier&phase=Stopped"), ["db", "web1", "web2"]);
    assert!(names("?label=tier=web&phase=running").is_empty());
    for bad in [
        "?label=",
        "?label=a%20b",
        "?label=a&label=b",
        "?phase=Runing",
        "?phas=Running",
    ] {
        let answer = node.api.ask("GET", &format!("/v1/vms{bad}"), None).unwrap();
        assert_eq!(answer.status, 400, "{bad}: {}", answer.body);
    }

    done(&node, &["start", "-l", "tier=web"]);
    for name in ["web1", "web2"] {
        node.await_phase(name, "Running").unwrap();
    }
    let listed = done(&node, &["list", "-l", "tier", "--phase", "running"]);
    assert!(
        listed.contains("web1") && listed.contains("web2"),
        "{listed}"
    );
    assert!(!listed.contains("db"), "{listed}");
    let (code, said) = vm_command(&node, &["stop", "-l", "tire=web"], Stdio::null());
    assert_eq!(code, Some(5), "{said}");

    let said = done(
        &node,
        &["set", "web1", "restart=always", "labels.tier-", "cpus=2"],
    );
    for line in [
        "web1: restart: OnFailure -> Always (now)\n",
        "web1: labels.tier: web -> none (now)\n",
        "web1: cpus: 1 -> 2 (at the next start)\n",
    ] {
        assert!(said.contains(line), "{said}");
    }
    assert_eq!(names("?label=tier=web"), ["web2"]);
    let said = done(&node, &["edit", "web2"]);
    assert!(said.contains("memory.size: 32M -> 64M"), "{said}");
    let (code, said) = vm_command(&node, &["set", "web1", "cpus=0"], Stdio::null());
    assert_eq!(code, Some(11), "{said}");
    let (code, said) = vm_command(&node, &["set", "web1", "nics=[{}]"], Stdio::null());
    assert_eq!(code, Some(11), "{said}");

    let mut file = node.tiny(&json!([])).unwrap();
    file["name"] = json!("new");
    file["annotations"] = json!({ "note": "any text" });
    let path = node.directory().join("new.json");
    fs::write(&path, file.to_string()).unwrap();
    let path = path.to_str().unwrap();
    let (code, said) = vm_command(&node, &["diff", "-f", path], Stdio::null());
    assert_eq!(code, Some(5), "{said}");
    done(&node, &["apply", "-f", path]);
    node.await_phase("new", "Running").unwrap();
    assert_eq!(done(&node, &["apply", "-f", path]), "new: no changes\n");
    file["spec"]["restart"] = json!("never");
    fs::write(path, file.to_string()).unwrap();
    let expected = "new: restart: OnFailure -> Never (now)\n";
    assert_eq!(done(&node, &["diff", "-f", path]), expected);
    let input = fs::File::open(path).unwrap().into();
    let (code, said) = vm_command(&node, &["apply", "-f", "-"], input);
    assert_eq!((code, said.as_str()), (Some(0), expected));

    done(&node, &["delete", "--all", "--force", "--yes"]);
    assert!(names("").is_empty());
    node.same_but_descriptors(&before, "all are deleted")
        .unwrap();
}

#[test]
fn pending_changes_move_with_the_vm() {
    let here = Node::start("edit-a").unwrap();
    let there = Node::start("edit-b").unwrap();
    let spec = here.tiny(&json!([])).unwrap();
    here.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    here.await_phase("web", "Running").unwrap();
    // Less than the guest brings.
    let smaller = json!({
        "spec": { "memory": { "size": "16M" } }, "labels": { "tier": "web" },
    });
    changed(&here, WEB, &smaller);
    let socket = there.api.socket().display();
    let send = json!({ "send": { "destination": format!("node:{socket}"), "name": "web2" } });
    let migration = "/v1/vms/web/migration";
    let sent = here.api.ask("POST", migration, Some(&send)).unwrap();
    assert_eq!(sent.status, 202, "{}", sent.body);
    let vm = there.await_phase("web2", "Running").unwrap();
    assert_eq!(
        vm["status"]["pending"],
        json!(["/spec/memory/size"]),
        "{vm:#}"
    );
    assert_eq!(vm["labels"]["tier"], "web", "{vm:#}");
    assert_eq!(memory_now(&there, "web2"), "32M");
    until("nothing is left of it here", || {
        here.vm("web").unwrap().is_none() && here.processes().is_empty()
    })
    .unwrap();
    let delete = "/v1/vms/web2?force=true";
    there.api.done("DELETE", delete, None).unwrap();
}
