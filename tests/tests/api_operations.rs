//! Long work of the node daemon as operations: snapshots, migrations and VMs that are created.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::node::{Node, until};
use serde_json::{Value, json};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A VM of a few instructions that runs.
#[track_caller]
fn made(test: &str) -> Node {
    let node = Node::start(test).unwrap();
    let spec = node.tiny(&json!([])).unwrap();
    node.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    node.await_phase("web", "Running").unwrap();
    node
}

/// Has the daemon begin an operation; returns its path.
#[track_caller]
fn begun(node: &Node, method: &str, path: &str, body: &Value) -> String {
    let answer = node.api.ask(method, path, Some(body)).unwrap();
    assert_eq!(answer.status, 202, "{}", answer.body);
    let operation = &answer.body;
    assert_eq!(operation["target"], "web", "{operation:#}");
    assert!(operation["requested_by"].to_string().contains("uid 0"));
    format!("/v1/operations/{}", operation["id"].as_str().unwrap())
}

/// The operation at its end.
#[track_caller]
fn ended(node: &Node, operation: &str) -> Value {
    let ended = node.api.get(&format!("{operation}?wait=60")).unwrap();
    assert_ne!(ended["phase"], "running", "{ended:#}");
    assert!(ended["ended_ms"].as_u64() >= ended["created_ms"].as_u64());
    ended
}

#[track_caller]
fn refused(node: &Node, method: &str, path: &str, status: u16, code: &str) {
    let answer = node.api.ask(method, path, None).unwrap();
    assert_eq!(answer.status, status, "{}", answer.body);
    assert_eq!(answer.body["code"], code, "{}", answer.body);
}

/// The events of the VM of one kind of change.
fn events(node: &Node, change: &str) -> Vec<Value> {
    let words = ["events", "--vm", "web", "--type", change, "-o", "json"];
    let Output { status, stdout, .. } = bellhop(node, &words);
    assert!(status.success());
    let text = String::from_utf8(stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    lines.collect()
}

fn bellhop(node: &Node, words: &[&str]) -> Output {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command.args(words).arg("--node").arg(node.api.socket());
    let output = command.output().unwrap();
    println!("{words:?}: {output:?}");
    output
}

#[track_caller]
fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// A destination that never answers: a migration there is in progress until it is cancelled.
fn silent(test: &str) -> (UnixListener, PathBuf) {
    let name = format!("lab-operations-{test}-{}.move", std::process::id());
    let path = std::env::temp_dir().join(name);
    let _ = std::fs::remove_file(&path);
    (UnixListener::bind(&path).unwrap(), path)
}

#[test]
fn a_snapshots_result_survives_the_daemon() {
    let mut node = made("op-snapshot");
    let at = |name: &str| node.directory().join(name);
    let first = json!({ "path": at("first") });
    let snapshot = "/v1/vms/web/snapshot?wait=false";
    let operation = begun(&node, "POST", snapshot, &first);
    let done = ended(&node, &operation);
    assert_eq!(
        (&done["kind"], &done["phase"]),
        (&json!("snapshot"), &json!("done"))
    );
    assert_eq!(
        done["result"]["snapshot"]["path"], first["path"],
        "{done:#}"
    );
    assert!(at("first").is_dir());
    // A used directory is refused before an operation begins.
    let refused = node.api.ask("POST", snapshot, Some(&first)).unwrap();
    assert_eq!(refused.status, 422, "{}", refused.body);
    // A full file system fails the operation.
    let small = at("small");
    std::fs::create_dir(&small).unwrap();
    let options = ["-t", "tmpfs", "-o", "size=4k", "none"];
    run(Command::new("mount").args(options).arg(&small));
    let full = json!({ "path": small.join("snapshot") });
    let failed = ended(&node, &begun(&node, "POST", snapshot, &full));
    run(Command::new("umount").arg("--lazy").arg(&small));
    assert_eq!(failed["phase"], "failed", "{failed:#}");
    assert!(failed["error"]["message"].is_string(), "{failed:#}");
    assert_eq!(failed["error"]["request_id"], failed["request_id"]);
    // A request that waits gets the result itself.
    let second = json!({ "path": at("second") });
    let waits = node.api.ask("POST", "/v1/vms/web/snapshot", Some(&second));
    let waits = waits.unwrap();
    assert_eq!(waits.status, 201, "{}", waits.body);
    assert_eq!(waits.body["path"], second["path"]);

    let listed = |node: &Node, query: &str| {
        let all = node.api.get(&format!("/v1/operations{query}")).unwrap();
        let all = all["items"].as_array().unwrap().clone();
        all.into_iter()
            .map(|one| one["id"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(listed(&node, "?phase=failed"), [failed["id"].clone()]);
    assert_eq!(listed(&node, "?target=web&kind=snapshot").len(), 3);
    assert_eq!(listed(&node, "?target=db"), Vec::<Value>::new());
    assert_eq!(events(&node, "operation_started").len(), 3);
    let ends = events(&node, "operation_ended");
    assert_eq!(ends[0]["operation"], done["id"], "{ends:?}");
    assert_eq!(
        (&ends[0]["kind"], &ends[0]["phase"]),
        (&json!("snapshot"), &json!("done"))
    );
    assert_eq!(ends[1]["phase"], "failed", "{ends:?}");

    let before = listed(&node, "");
    for graceful in [false, true] {
        if graceful {
            assert!(node.terminate());
        } else {
            node.kill();
        }
        node.start_again().unwrap();
        assert_eq!(listed(&node, ""), before);
        assert_eq!(node.api.get(&operation).unwrap(), done);
    }
    let id = done["id"].as_str().unwrap();
    let shown = bellhop(&node, &["operation", "show", id]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("snapshot of web: done"));
    let wait = bellhop(
        &node,
        &["operation", "wait", failed["id"].as_str().unwrap()],
    );
    assert!(!wait.status.success());
}

#[test]
fn a_migration_is_cancelled_also_by_the_daemon_that_comes_after() {
    let mut node = made("op-cancel");
    let (_listener, at) = silent("cancel");
    let send = json!({ "send": { "destination": format!("unix:{}", at.display()) } });
    for restart in [false, true] {
        let operation = begun(&node, "POST", "/v1/vms/web/migration", &send);
        until("its progress is known", || {
            let now = node.api.get(&operation).unwrap();
            now["progress"]["unit"] == "bytes"
        })
        .unwrap();
        if restart {
            node.kill();
            node.start_again().unwrap();
            assert_eq!(node.api.get(&operation).unwrap()["phase"], "running");
        }
        node.api.done("DELETE", &operation, None).unwrap();
        let over = ended(&node, &operation);
        assert_eq!(over["phase"], "cancelled", "{over:#}");
        assert_eq!(over["error"], Value::Null, "{over:#}");
        assert_eq!(over["result"]["migration"]["phase"], "Stayed", "{over:#}");
        refused(&node, "DELETE", &operation, 409, "operation_ended");
        node.await_phase("web", "Running").unwrap();
    }
    // One whose process ends is not known to have stayed.
    let operation = begun(&node, "POST", "/v1/vms/web/migration", &send);
    for (_, pid) in node.processes() {
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
    let lost = ended(&node, &operation);
    assert_eq!(lost["phase"], "failed", "{lost:#}");
    assert_eq!(lost["error"]["code"], "migration_unknown", "{lost:#}");
    std::fs::remove_file(&at).unwrap();
}

#[test]
fn the_result_of_a_migration_outlives_the_vm() {
    let here = made("op-move-a");
    let there = Node::start("op-move-b").unwrap();
    let to = format!("node:{}", there.api.socket().display());
    let send = json!({ "send": { "destination": to, "name": "web2" } });
    let operation = begun(&here, "POST", "/v1/vms/web/migration", &send);
    let done = ended(&here, &operation);
    assert_eq!(done["phase"], "done", "{done:#}");
    let status = &done["result"]["migration"];
    assert_eq!(status["phase"], "Moved", "{done:#}");
    assert!(status["downtime_ms"].is_number(), "{done:#}");
    there.await_phase("web2", "Running").unwrap();
    until("nothing is left of it here", || {
        here.vm("web").unwrap().is_none() && here.processes().is_empty()
    })
    .unwrap();
    assert_eq!(here.api.get("/v1/vms/web/migration").unwrap(), *status);
    assert_eq!(here.api.get(&operation).unwrap(), done);
    there
        .api
        .done("DELETE", "/v1/vms/web2?force=true", None)
        .unwrap();
}

#[test]
fn a_vm_is_created_as_an_operation_and_bad_input_begins_none() {
    let node = Node::start("op-create").unwrap();
    let spec = node.tiny(&json!([])).unwrap();
    let operation = begun(&node, "PUT", "/v1/vms/web?wait=false", &spec);
    let done = ended(&node, &operation);
    assert_eq!(
        (&done["kind"], &done["phase"]),
        (&json!("create"), &json!("done"))
    );
    node.await_phase("web", "Running").unwrap();
    let mut other = spec.clone();
    other["spec"]["memory"] = json!("64M");
    let operation = begun(&node, "PUT", "/v1/vms/web?wait=false", &other);
    let failed = ended(&node, &operation);
    assert_eq!(failed["error"]["code"], "other_vm_runs", "{failed:#}");

    // A second upgrade would take the result of the first for its own.
    let upgrade = "/v1/vms/web/upgrade";
    let same = json!({ "program": std::env::var("BELLHOP").unwrap() });
    let operation = begun(&node, "POST", upgrade, &same);
    let second = node.api.ask("POST", upgrade, Some(&same)).unwrap();
    assert_eq!(second.status, 409, "{}", second.body);
    assert_eq!(second.body["code"], "wrong_state", "{}", second.body);
    assert_eq!(ended(&node, &operation)["phase"], "done");

    let before = node.api.get("/v1/operations").unwrap();
    let text = json!({ "path": 7 });
    for (method, path, body, status) in [
        ("PUT", "/v1/vms/db?wait=false", &text, 422),
        ("PUT", "/v1/vms/db?wait=x", &spec, 400),
        ("POST", "/v1/vms/web/snapshot?wait=false", &text, 422),
        (
            "POST",
            "/v1/vms/no/snapshot?wait=false",
            &json!({ "path": "/x" }),
            404,
        ),
        (
            "POST",
            "/v1/vms/web/upgrade",
            &json!({ "program": "/nonexistent" }),
            422,
        ),
        ("POST", "/v1/vms/web/migration", &json!({ "send": {} }), 422),
    ] {
        let answer = node.api.ask(method, path, Some(body)).unwrap();
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
    }
    assert_eq!(node.api.get("/v1/operations").unwrap(), before);
    refused(&node, "GET", "/v1/operations/17", 404, "no_such_operation");
    refused(
        &node,
        "GET",
        "/v1/operations/%2e%2e?wait=1",
        404,
        "no_such_operation",
    );
    refused(
        &node,
        "DELETE",
        "/v1/operations/17",
        404,
        "no_such_operation",
    );
    for query in [
        "kind=x",
        "phase=x",
        "phase=unknown",
        "phase=running&phase=done",
    ] {
        let path = format!("/v1/operations?{query}");
        refused(&node, "GET", &path, 400, "bad_parameter");
    }
    refused(
        &node,
        "GET",
        "/v1/operations?no=1",
        400,
        "unknown_parameter",
    );
    for wait in ["61", "-1", "x"] {
        let path = format!("{operation}?wait={wait}");
        refused(&node, "GET", &path, 400, "bad_parameter");
    }
    assert_eq!(
        bellhop(&node, &["operation", "show", "17"]).status.code(),
        Some(5)
    );
    node.api
        .done("DELETE", "/v1/vms/web?force=true", None)
        .unwrap();
}

#[test]
fn a_node_is_drained_and_takes_no_vm_until_it_is_uncordoned() {
    let (here, there) = (
        Node::start("drain").unwrap(),
        Node::start("drain-to").unwrap(),
    );
    let spec = here.tiny(&json!([])).unwrap();
    let mut stopped = spec.clone();
    stopped["spec"]["state"] = json!("Stopped");
    for (name, spec) in [("a", &spec), ("b", &spec), ("off", &stopped)] {
        let path = format!("/v1/vms/{name}");
        here.api.done("PUT", &path, Some(spec)).unwrap();
    }
    // Another machine has the name there.
    there.api.done("PUT", "/v1/vms/b", Some(&spec)).unwrap();
    let to = format!("node:{}", there.api.socket().display());
    let drain = [
        "node",
        "drain",
        "--to",
        &to,
        "--parallel",
        "2",
        "-o",
        "json",
    ];
    let results = |words: &[&str], code: i32| {
        let output = bellhop(&here, words);
        assert_eq!(output.status.code(), Some(code));
        let all: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let all = all
            .iter()
            .map(|one| one["result"].as_str().unwrap().to_owned());
        all.collect::<Vec<_>>()
    };
    let dry = [&drain[..], &["--dry-run"]].concat();
    assert_eq!(results(dry.as_slice(), 1), ["movable", "failed", "stopped"]);
    assert_eq!(here.api.get("/v1/version").unwrap()["cordoned"], false);
    assert_eq!(results(&drain[..], 10), ["moved", "failed", "stopped"]);
    there.await_phase("a", "Running").unwrap();
    here.await_phase("b", "Running").unwrap();
    until("the source has ended", || here.vm("a").unwrap().is_none()).unwrap();

    assert_eq!(here.api.get("/v1/version").unwrap()["cordoned"], true);
    let answer = here.api.ask("PUT", "/v1/vms/new", Some(&spec)).unwrap();
    assert_eq!(
        (answer.status, &answer.body["code"]),
        (409, &json!("cordoned"))
    );
    let back = format!("node:{}", here.api.socket().display());
    let back = ["vm", "migrate", "a", "--to", &back];
    assert_eq!(bellhop(&there, &back).status.code(), Some(10));
    there.await_phase("a", "Running").unwrap();
    assert!(bellhop(&here, &["node", "uncordon"]).status.success());
    assert!(bellhop(&there, &back).status.success());
    here.await_phase("a", "Running").unwrap();
}
