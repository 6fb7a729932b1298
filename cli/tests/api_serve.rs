//! The node daemon as a process, with VMs of a few instructions on a real `/dev/kvm`: tests kill
//! either of them. Without KVM they fail and report that.
//!
//! NICs need vDPA devices: `api_node` tests those.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "api_serve/daemon.rs"]
mod daemon;

use std::time::Duration;

use daemon::{Daemon, Traces, asm, program, signal, until};
use rustix::process::Signal;
use serde_json::{Value, json};

const NOTHING: &Value = &Value::Null;

fn pid(vm: &Value) -> u32 {
    u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap()
}

#[test]
fn a_machine_is_created_and_deleted_by_one_request_each() {
    let daemon = Daemon::start("life");
    let api = &daemon.api;
    let body = daemon.machine(asm::IDLE);
    let made = api.expect(201, "PUT", "/v1/vms/web", &body);
    let vm = daemon.await_phase("web", "Running");
    assert_eq!(made["status"]["pid"], vm["status"]["pid"]);
    let log = vm["status"]["console"]["log"].as_str().unwrap().to_owned();
    until("it speaks", || {
        std::fs::read(&log).is_ok_and(|text| text.contains(&b'!'))
    });
    // The same spec changes nothing; another one is rejected while the VM runs.
    let same = api.expect(200, "PUT", "/v1/vms/web", &body);
    assert_eq!(same["status"]["pid"], vm["status"]["pid"]);
    let mut other = body.clone();
    other["spec"]["cpus"] = json!(2);
    let refused = api.expect(409, "PUT", "/v1/vms/web", &other);
    assert_eq!(refused["code"], "other_vm_runs");
    let read = api.get("/v1/vms/web");
    assert_eq!(read["spec"]["kernel"], body["spec"]["kernel"]);

    let change = |state: &str, phase: &str| {
        let mut body = json!({ "state": state });
        if state == "Stopped" {
            // Its guest ignores the power button.
            body["mode"] = json!("hard");
        }
        api.expect(200, "PUT", "/v1/vms/web/state", &body);
        daemon.await_phase("web", phase)
    };
    assert_eq!(
        change("Paused", "Paused")["status"]["pid"],
        vm["status"]["pid"]
    );
    assert_eq!(
        change("Running", "Running")["status"]["pid"],
        vm["status"]["pid"]
    );
    // The VM's own API, below its path.
    let config = api.get("/v1/vms/web/config");
    assert_eq!(config["kernel"], body["spec"]["kernel"]);
    assert!(
        api.get("/v1/vms/web/metrics")
            .to_string()
            .contains("bellhop_vm_state")
    );
    api.expect(204, "POST", "/v1/vms/web/nmi", NOTHING);
    api.expect(404, "GET", "/v1/vms/web/nothing", NOTHING);
    let stopped = change("Stopped", "Stopped");
    assert_eq!(stopped["status"]["pid"], Value::Null);
    assert_eq!(stopped["status"]["last_end"]["reason"], "Stopped");
    let paused = json!({ "state": "Paused" });
    api.expect(409, "PUT", "/v1/vms/web/state", &paused);
    api.expect(409, "GET", "/v1/vms/web/metrics", NOTHING);
    // After the stop it can be replaced.
    api.expect(200, "PUT", "/v1/vms/web", &other);
    daemon.await_phase("web", "Running");
    api.expect(204, "DELETE", "/v1/vms/web?force=true", NOTHING);
    api.expect(404, "DELETE", "/v1/vms/web?force=true", NOTHING);
    assert_eq!(api.get("/v1/vms")["items"], json!([]));
    Traces::none(&daemon);
}

#[test]
fn the_next_daemon_adopts_running_vms() {
    let mut daemon = Daemon::start("adopt");
    let body = daemon.machine(asm::IDLE);
    daemon.api.expect(201, "PUT", "/v1/vms/web", &body);
    let vm = daemon.await_phase("web", "Running");
    for kill in [true, false, true] {
        if kill {
            daemon.kill();
        } else {
            daemon.end();
        }
        daemon.start_again();
        let found = daemon.await_phase("web", "Running");
        assert_eq!(found["status"]["pid"], vm["status"]["pid"], "{found}");
        assert_eq!(found["status"]["adopted"], true, "{found}");
        assert_eq!(
            found["status"]["version"], vm["status"]["version"],
            "{found}"
        );
    }
    // The state of a paused VM is known, too, and a process that does not answer is left alone.
    signal(pid(&vm), Signal::STOP);
    daemon.kill();
    daemon.start_again();
    let silent = daemon.api.get("/v1/vms/web");
    assert_eq!(silent["status"]["pid"], vm["status"]["pid"], "{silent}");
    signal(pid(&vm), Signal::CONT);
    daemon.await_phase("web", "Running");
    // The VM ends without a daemon.
    daemon.kill();
    daemon.kill_machines();
    daemon.start_again();
    let back = daemon.await_phase("web", "Running");
    assert_ne!(back["status"]["pid"], vm["status"]["pid"]);
    assert_eq!(back["status"]["last_end"]["reason"], "Killed", "{back}");
    daemon
        .api
        .expect(204, "DELETE", "/v1/vms/web?force=true", NOTHING);
    Traces::none(&daemon);
}

#[test]
fn the_policy_decides_which_vms_restart() {
    let daemon = Daemon::start("policy");
    let api = &daemon.api;
    for (restart, code, reason, back) in [
        ("OnFailure", asm::POWER_OFF, "PoweredOff", false),
        ("Never", asm::CRASH, "Crashed", false),
        ("OnFailure", asm::CRASH, "Crashed", true),
        ("Always", asm::POWER_OFF, "PoweredOff", true),
    ] {
        let mut body = daemon.machine(code);
        body["spec"]["restart"] = json!(restart);
        api.expect(201, "PUT", "/v1/vms/web", &body);
        until(reason, || {
            let vm = api.get("/v1/vms/web");
            let came_back = vm["status"]["restarts"].as_u64().unwrap() >= 2;
            vm["status"]["last_end"]["reason"] == reason
                && (if back {
                    came_back
                } else {
                    vm["status"]["phase"] == "Stopped"
                })
        });
        api.expect(204, "DELETE", "/v1/vms/web?force=true", NOTHING);
    }
    Traces::none(&daemon);
}

#[test]
fn a_process_that_does_not_want_to_end_is_killed() {
    let daemon = Daemon::start("hangs");
    daemon
        .api
        .expect(201, "PUT", "/v1/vms/web", &daemon.machine(asm::IDLE));
    let vm = daemon.await_phase("web", "Running");
    signal(pid(&vm), Signal::STOP);
    daemon
        .api
        .expect(204, "DELETE", "/v1/vms/web?force=true", NOTHING);
    Traces::none(&daemon);
}

#[test]
fn impossible_vms_leave_nothing() {
    let daemon = Daemon::start("fails");
    let api = &daemon.api;
    let good = daemon.machine(asm::IDLE);
    let with = |key: &str, value: Value| {
        let mut body = good.clone();
        body["spec"][key] = value;
        body
    };
    for (status, body) in [
        (422, with("kernel", json!("/nonexistent"))),
        (422, with("kernel", json!("relative"))),
        (422, with("kernels", json!(1))),
        (422, with("cpus", json!(0))),
        (
            422,
            with("nics", json!([{ "id": "a", "path": "/dev/nothing" }])),
        ),
        (
            422,
            with("nics", json!([{ "id": "a", "device": "nothing" }])),
        ),
        (
            422,
            with("nics", json!([{ "id": "a", "from": "nowhere0" }])),
        ),
        (422, with("disks", json!([{ "path": "/nonexistent" }]))),
        (422, good["spec"].clone()),
        (400, Value::Null),
    ] {
        api.expect(status, "PUT", "/v1/vms/web", &body);
        assert_eq!(api.get("/v1/vms")["items"], json!([]), "{body}");
        Traces::none(&daemon);
    }
    for name in ["Web", "-a", "a.b", "%2e%2e", "a%2fb", "a%00"] {
        api.expect(400, "PUT", &format!("/v1/vms/{name}"), &good);
    }
    Traces::none(&daemon);
}

#[test]
fn many_at_once_are_none_lost_and_none_doubled() {
    let daemon = Daemon::start("many");
    let body = daemon.machine(asm::IDLE);
    std::thread::scope(|scope| {
        for client in 0..4 {
            let (api, body) = (&daemon.api, &body);
            scope.spawn(move || {
                // Two clients share each name.
                let path = format!("/v1/vms/vm-{}", client % 2);
                for _ in 0..3 {
                    let (status, body) = api.ask("PUT", &path, body);
                    assert!([200, 201].contains(&status), "{status} {body}");
                    let (status, body) = api.ask("DELETE", &format!("{path}?force=true"), NOTHING);
                    assert!([204, 404].contains(&status), "{status} {body}");
                }
            });
        }
    });
    assert_eq!(daemon.api.get("/v1/vms")["items"], json!([]));
    Traces::none(&daemon);
}

#[test]
fn a_second_daemon_is_refused() {
    let daemon = Daemon::start("second");
    let (_, version) = daemon.api.ask("GET", "/v1/version", NOTHING);
    let socket = version["socket"].as_str().unwrap();
    let runtime = std::path::Path::new(socket).parent().unwrap();
    let other = std::process::Command::new(program())
        .args(["serve", "--state-dir"])
        .arg(runtime.with_file_name("state"))
        .arg("--runtime-dir")
        .arg(runtime.with_file_name("other-run"))
        .output()
        .unwrap();
    assert_eq!(other.status.code(), Some(1));
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(said.contains("another `bellhop serve` uses"), "{said}");
    daemon.api.get("/v1/vms");
}

/// Kills the daemon at the step with this number, during a request. Returns the step; none if there
/// are fewer steps.
fn kill_at(
    daemon: &mut Daemon,
    number: usize,
    method: &'static str,
    body: &Value,
) -> Option<String> {
    let mut shown = daemon.start_observed();
    let (api, body) = (daemon.api.clone(), body.clone());
    let client = std::thread::spawn(move || {
        // The daemon may be killed before it answers.
        let force = if method == "DELETE" {
            "?force=true"
        } else {
            ""
        };
        api.try_ask(method, &format!("/v1/vms/web{force}"), &body)
    });
    let mut at = None;
    for step in 0..=number {
        while !client.is_finished() && !shown.waits() {
            std::thread::sleep(Duration::from_millis(1));
        }
        at = shown.waits().then(|| shown.next());
        if at.is_none() || step == number {
            break;
        }
        shown.resume();
    }
    daemon.kill();
    client.join().unwrap();
    at
}

#[test]
fn a_daemon_killed_at_any_step_leaves_a_machine_or_nothing() {
    let mut daemon = Daemon::start("steps");
    let body = daemon.machine(asm::IDLE);
    let mut seen = Vec::new();
    // Every second time the VM is killed, too; `api_node` also kills at each line of the daemon's
    // log.
    let also_machine = |number: usize| !number.is_multiple_of(2);
    for number in 0.. {
        daemon.kill();
        let at = kill_at(&mut daemon, number, "PUT", &body);
        if also_machine(number) && at.is_some() {
            daemon.kill_machines();
        }
        daemon.start_again();
        let left = daemon.api.get("/v1/vms")["items"].take();
        let Some(at) = at else {
            assert_eq!(left.as_array().unwrap().len(), 1, "{left}");
            break;
        };
        // The request was not answered yet, so the VM must not exist.
        assert_eq!(left, json!([]), "{at}");
        Traces::none(&daemon);
        seen.push(at);
    }
    for number in 0.. {
        daemon.kill();
        let at = kill_at(&mut daemon, number, "DELETE", NOTHING);
        if also_machine(number) {
            daemon.kill_machines();
        }
        daemon.start_again();
        // A deletion that has begun is completed.
        assert_eq!(daemon.api.get("/v1/vms")["items"], json!([]), "{at:?}");
        Traces::none(&daemon);
        let Some(at) = at else {
            break;
        };
        seen.push(at);
        daemon.api.expect(201, "PUT", "/v1/vms/web", &body);
    }
    for step in [
        "web do directories",
        "web do process",
        "web done process",
        "web do boot",
        "web done boot",
        "web undo process",
        "web undone process",
        "web undone directories",
    ] {
        assert!(seen.iter().any(|one| one == step), "{step}: {seen:?}");
    }
}
