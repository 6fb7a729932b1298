//! Virtual machines by the node daemon: `bellhop serve`, with NICs that are made on the kernel's simulator.
//!
//! What is left afterwards is asked of the kernel: devices, processes, sockets, mounts of nothing.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod node;

use lab::sim::{SimDevice, require_lab};
use node::steps::Steps;
use node::{Daemon, Traces, nic, until};
use serde_json::{Value, json};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:57:01";

#[test]
fn a_machine_with_a_nic_from_one_request_and_nothing_left_after_another() {
    require_lab().unwrap();
    let daemon = Daemon::start("life");
    let before = Traces::now(&daemon);
    let spec = daemon.small(&json!([nic("net0", MAC)]));
    let made = daemon.api.ask("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    assert_eq!(made.status, 201, "{}", made.body);
    let vm = daemon.await_phase("web", "Running");
    assert_eq!(vm["nics"][0]["device"], "web.net0", "{vm}");
    assert_eq!(vm["adopted"], false, "{vm}");
    daemon.await_console("web", "@lab ready");
    // The same again changes nothing.
    let again = daemon.api.ask("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    assert_eq!(again.status, 200, "{}", again.body);
    assert_eq!(again.body["pid"], vm["pid"]);
    // Another one is refused while it runs.
    let mut other = spec.clone();
    other["cpus"] = json!(2);
    let refused = daemon.api.ask("PUT", "/v1/vms/web", Some(&other)).unwrap();
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert_eq!(refused.body["code"], "other_vm_runs");

    let deleted = daemon.api.ask("DELETE", "/v1/vms/web", None).unwrap();
    assert_eq!(deleted.status, 204, "{}", deleted.body);
    let gone = daemon.api.ask("GET", "/v1/vms/web", None).unwrap();
    assert_eq!(gone.status, 404, "{}", gone.body);
    assert_eq!(daemon.api.get("/v1/vms").unwrap()["items"], json!([]));
    before.same(&daemon);
}

#[test]
fn a_killed_daemons_machine_is_adopted() {
    require_lab().unwrap();
    let mut daemon = Daemon::start("adopt");
    let before = Traces::now(&daemon);
    let spec = daemon.tiny(&json!([nic("net0", MAC)]));
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = daemon.await_phase("web", "Running");
    for kill in [true, false, true] {
        daemon.restart(kill);
        let found = daemon.await_phase("web", "Running");
        assert_eq!(found["pid"], vm["pid"], "{found}");
        assert_eq!(found["adopted"], true, "{found}");
    }
    // The machine is killed while nobody looks: its policy says that it is started again.
    daemon.kill();
    node::kill_vm(&vm);
    daemon.start_again();
    until("it is started again", || {
        let found: Value = daemon.api.get("/v1/vms/web").unwrap();
        found["phase"] == "Running" && found["pid"] != vm["pid"]
    });
    let found = daemon.api.get("/v1/vms/web").unwrap();
    assert_eq!(found["last_end"]["reason"], "Killed", "{found}");
    daemon.api.done("DELETE", "/v1/vms/web", None).unwrap();
    before.same(&daemon);
}

#[test]
fn a_machine_that_is_killed_is_started_again_and_one_that_is_stopped_is_not() {
    require_lab().unwrap();
    let daemon = Daemon::start("policy");
    let before = Traces::now(&daemon);
    let spec = daemon.tiny(&json!([nic("net0", MAC)]));
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = daemon.await_phase("web", "Running");
    node::kill_vm(&vm);
    until("it is started again", || {
        let found = daemon.api.get("/v1/vms/web").unwrap();
        found["phase"] == "Running" && found["pid"] != vm["pid"]
    });
    let found = daemon.api.get("/v1/vms/web").unwrap();
    assert_eq!(found["restarts"], 1, "{found}");

    let pause = json!({ "state": "Paused" });
    daemon
        .api
        .done("PATCH", "/v1/vms/web", Some(&pause))
        .unwrap();
    daemon.await_phase("web", "Paused");
    let stop = json!({ "state": "Stopped" });
    let stopped = daemon
        .api
        .done("PATCH", "/v1/vms/web", Some(&stop))
        .unwrap();
    assert_eq!(stopped["phase"], "Stopped", "{stopped}");
    assert_eq!(stopped["pid"], Value::Null, "{stopped}");
    // Its NIC is still its own.
    assert_eq!(stopped["nics"][0]["device"], "web.net0", "{stopped}");
    let run = json!({ "state": "Running" });
    daemon.api.done("PATCH", "/v1/vms/web", Some(&run)).unwrap();
    daemon.await_phase("web", "Running");
    daemon.api.done("DELETE", "/v1/vms/web", None).unwrap();
    before.same(&daemon);
}

#[test]
fn what_cannot_be_made_leaves_nothing() {
    require_lab().unwrap();
    let daemon = Daemon::start("fails");
    let before = Traces::now(&daemon);
    let refused = |name: &str, spec: &Value, status: u16| {
        let path = format!("/v1/vms/{name}");
        let answer = daemon.api.ask("PUT", &path, Some(spec)).unwrap();
        assert_eq!(answer.status, status, "{}", answer.body);
        before.same(&daemon);
        answer.body
    };
    let mut no_kernel = daemon.small(&json!([nic("net0", MAC)]));
    no_kernel["kernel"] = json!("/nonexistent");
    let body = refused("web", &no_kernel, 422);
    assert!(body.to_string().contains("No such file"), "{body}");
    let nowhere = json!([nic("net0", MAC), { "id": "net1", "from": "nowhere0" }]);
    let body = refused("web", &daemon.small(&nowhere), 422);
    assert!(body.to_string().contains("nowhere0"), "{body}");
    let no_path = json!([{ "id": "net0", "path": "/dev/vhost-vdpa-99" }]);
    refused("web", &daemon.small(&no_path), 422);
    let no_device = json!([{ "id": "net0", "device": "nothing" }]);
    refused("web", &daemon.small(&no_device), 422);
    for name in ["Web", "-a", "a.b", "%2e%2e", "a%2fb"] {
        refused(name, &daemon.small(&json!([])), 400);
    }
    assert_eq!(daemon.api.get("/v1/vms").unwrap()["items"], json!([]));
}

/// Kills the daemon at the step with this number, while `request` is carried out. Returns which it was; none if there
/// are not so many.
fn kill_at(
    daemon: &mut Daemon,
    steps: &Steps,
    number: usize,
    also_vm: bool,
    (method, body): (&str, Option<&Value>),
) -> Option<String> {
    let mut shown = daemon.start_observed(steps);
    let api = daemon.api.clone();
    let (method, body) = (method.to_owned(), body.cloned());
    let client = std::thread::spawn(move || {
        // The daemon may be killed before it answers.
        let _ = api.ask(&method, "/v1/vms/web", body.as_ref());
    });
    for _ in 0..number {
        // The client is answered, or waits for the next step.
        while !client.is_finished() && !shown.is_there() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        if !shown.is_there() {
            client.join().unwrap();
            daemon.kill();
            return None;
        }
        shown.next();
        shown.go_on();
    }
    while !client.is_finished() && !shown.is_there() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let at = shown.is_there().then(|| shown.next()).flatten();
    daemon.kill();
    client.join().unwrap();
    if also_vm {
        daemon.kill_marked();
    }
    at
}

#[test]
fn a_daemon_killed_at_any_step_leaves_a_machine_or_nothing() {
    require_lab().unwrap();
    let mut daemon = Daemon::start("steps");
    let before = Traces::now(&daemon);
    let spec = daemon.tiny(&json!([nic("net0", MAC)]));
    let steps = Steps::listen(&daemon.beside("steps"));
    let mut seen = Vec::new();
    // Every second time the machine is killed, too; `api_node_kill` has more kinds of deaths.
    let also_vm = |number: usize| !number.is_multiple_of(2);
    for number in 0.. {
        daemon.kill();
        let put = ("PUT", Some(&spec));
        let at = kill_at(&mut daemon, &steps, number, also_vm(number), put);
        daemon.start_again();
        let left = daemon.api.get("/v1/vms").unwrap()["items"].take();
        println!("PUT, killed at {at:?}: {left}");
        let Some(at) = at else {
            assert_eq!(left.as_array().unwrap().len(), 1, "{left}");
            // One that was killed is started again: those steps are over before the next ones.
            daemon.await_phase("web", "Running");
            break;
        };
        // It was not answered yet, so it must not be there.
        assert_eq!(left, json!([]));
        before.same(&daemon);
        seen.push(at);
    }
    for number in 0.. {
        daemon.kill();
        let at = kill_at(
            &mut daemon,
            &steps,
            number,
            also_vm(number),
            ("DELETE", None),
        );
        daemon.start_again();
        let left = daemon.api.get("/v1/vms").unwrap()["items"].take();
        println!("DELETE, killed at {at:?}: {left}");
        // Once it is begun it is brought to its end.
        assert_eq!(left, json!([]));
        before.same(&daemon);
        let Some(at) = at else {
            break;
        };
        seen.push(at);
        daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    }
    for step in [
        "web do directories",
        "web do nic net0",
        "web web.net0 begin AddDevice",
        "web do process",
        "web done process",
        "web done boot",
        "web undo process",
        "web undone nic net0",
    ] {
        assert!(seen.iter().any(|one| one == step), "{step}: {seen:?}");
    }
}

#[test]
fn nics_come_and_go_while_it_runs_and_a_device_is_for_one_machine() {
    require_lab().unwrap();
    let mut daemon = Daemon::start("nics");
    let before = Traces::now(&daemon);
    let spec = daemon.small(&json!([nic("net0", MAC)]));
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = daemon.await_phase("web", "Running");
    daemon.await_console("web", "@lab ready");
    let second = nic("net1", "52:54:5e:11:57:02");
    let path = "/v1/vms/web/nics/net1";
    let added = daemon.api.ask("PUT", path, Some(&second)).unwrap();
    assert_eq!(added.status, 201, "{}", added.body);
    assert_eq!(added.body["nics"][1]["device"], "web.net1");
    let again = daemon.api.ask("PUT", path, Some(&second)).unwrap();
    assert_eq!(again.status, 200, "{}", again.body);
    // The machine's own account, passed on.
    let own = daemon.api.get(path).unwrap();
    assert_eq!(own["state"], "Plugged", "{own}");
    let metrics = daemon.api.get("/v1/vms/web/metrics").unwrap();
    assert!(metrics.as_str().unwrap().contains("bellhop_vm_state"));
    // Another machine cannot have it, by whatever name.
    let device = &added.body["nics"][1];
    for other in [
        json!([{ "id": "a", "path": device["path"] }]),
        json!([{ "id": "a", "device": device["device"] }]),
    ] {
        let mut other = daemon.small(&other);
        other["state"] = json!("Stopped");
        let refused = daemon
            .api
            .ask("PUT", "/v1/vms/other", Some(&other))
            .unwrap();
        assert_eq!(refused.status, 409, "{}", refused.body);
        let message = refused.body["message"].as_str().unwrap();
        assert!(message.contains("of the virtual machine web"), "{message}");
    }
    // It is still its own after the daemon's and the machine's end.
    daemon.restart(true);
    assert_eq!(daemon.await_phase("web", "Running")["pid"], vm["pid"]);
    let gone = daemon.api.ask("DELETE", path, None).unwrap();
    assert!([202, 204].contains(&gone.status), "{}", gone.body);
    until("the device is taken back", || {
        !std::path::Path::new("/sys/bus/vdpa/devices/web.net1").exists()
    });
    let gone = daemon.api.ask("DELETE", path, None).unwrap();
    assert_eq!(gone.status, 404, "{}", gone.body);
    daemon.api.done("DELETE", "/v1/vms/web", None).unwrap();
    before.same(&daemon);
}

#[test]
fn a_nic_that_was_moved_is_on_its_new_device_for_every_daemon_and_after_a_restart() {
    require_lab().unwrap();
    // Before the daemon: a device in use cannot be deleted, also if a test fails.
    let spare = SimDevice::net("moved", "52:54:5e:11:57:03", 1500).unwrap();
    let mut daemon = Daemon::start("moved");
    let before = Traces::now(&daemon);
    let spec = daemon.small(&json!([nic("net0", MAC)]));
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = daemon.await_phase("web", "Running");
    daemon.await_console("web", "@lab ready");
    let own = "/v1/vms/web/nics/net0";
    let is_there = |daemon: &Daemon| {
        let nic = daemon.api.get(own).unwrap();
        assert_eq!(nic["path"], json!(spare.path()), "{nic}");
        assert!(!std::path::Path::new("/sys/bus/vdpa/devices/web.net0").exists());
    };
    for (body, status) in [
        (json!({}), 422),
        (json!({ "path": spare.path(), "device": spare.name() }), 422),
        (json!({ "path": "spare" }), 422),
        (json!({ "from": "vdpasim_net" }), 422),
    ] {
        let refused = daemon.api.ask("PATCH", own, Some(&body)).unwrap();
        assert_eq!(refused.status, status, "{body}: {}", refused.body);
    }
    let body = json!({ "device": spare.name() });
    let moved = daemon.api.ask("PATCH", own, Some(&body)).unwrap();
    assert_eq!(moved.status, 200, "{}", moved.body);
    // It is none that was made for it.
    assert_eq!(moved.body["nics"][0]["device"], Value::Null);
    assert_eq!(moved.body["nics"][0]["path"], json!(spare.path()));
    is_there(&daemon);
    // It is this machine's now.
    let mut other = daemon.small(&json!([{ "id": "a", "path": spare.path() }]));
    other["state"] = json!("Stopped");
    let refused = daemon
        .api
        .ask("PUT", "/v1/vms/other", Some(&other))
        .unwrap();
    assert_eq!(refused.body["code"], "device_taken", "{}", refused.body);
    daemon.restart(true);
    assert_eq!(daemon.await_phase("web", "Running")["pid"], vm["pid"]);
    is_there(&daemon);
    for state in ["Stopped", "Running"] {
        let wanted = json!({ "state": state });
        daemon
            .api
            .done("PATCH", "/v1/vms/web", Some(&wanted))
            .unwrap();
        daemon.await_phase("web", state);
    }
    is_there(&daemon);
    daemon.api.done("DELETE", "/v1/vms/web", None).unwrap();
    before.same(&daemon);
}
