//! How the node daemon stops VMs: it requests their guests to power off first, and no restart
//! policy starts them afterwards. With guests of a few instructions on a real `/dev/kvm`.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "api_serve/daemon.rs"]
#[allow(dead_code, reason = "it is for other tests, too")]
mod daemon;

use std::process::Command;
use std::time::{Duration, Instant};

use daemon::{Daemon, Traces, asm, program, until};
use serde_json::{Value, json};

const NOTHING: &Value = &Value::Null;
const WEB: &str = "/v1/vms/web";
const STATE: &str = "/v1/vms/web/state";

/// Creates a VM with this code, and with the policy that always restarts it.
fn made(daemon: &Daemon, name: &str, code: &[u8]) -> Value {
    let mut body = daemon.machine(code);
    body["spec"]["restart"] = json!("Always");
    daemon
        .api
        .expect(201, "PUT", &format!("/v1/vms/{name}"), &body);
    daemon.await_phase(name, "Running")
}

/// Waits longer than a restart policy takes to restart a VM.
fn restart_time() {
    std::thread::sleep(Duration::from_millis(1500));
}

fn stop(more: &Value) -> Value {
    let mut body = json!({ "state": "Stopped" });
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn a_guest_is_asked_to_power_off_and_stays_off() {
    let mut daemon = Daemon::start("stop");
    made(&daemon, "web", asm::BUTTON);
    let stopped = daemon.api.expect(200, "PUT", STATE, &stop(&json!({})));
    assert_eq!(stopped["status"]["phase"], "Stopped", "{stopped}");
    assert_eq!(stopped["spec"]["state"], "Stopped");
    assert_eq!(stopped["status"]["last_end"]["reason"], "PoweredOff");
    restart_time();
    assert_eq!(daemon.api.get(WEB)["status"]["pid"], NOTHING.clone());
    // A second stop changes nothing, and a start starts the VM again.
    daemon.api.expect(200, "PUT", STATE, &stop(&json!({})));
    let run = json!({ "state": "Running" });
    daemon.api.expect(200, "PUT", STATE, &run);
    daemon.await_phase("web", "Running");
    // Without a wait, and visible to the next daemon.
    let asked = daemon.api.expect(
        202,
        "PUT",
        &format!("{STATE}?wait=false"),
        &stop(&json!({})),
    );
    assert_eq!(asked["spec"]["state"], "Stopped", "{asked}");
    daemon.kill();
    daemon.start_again();
    daemon.await_phase("web", "Stopped");
    daemon.api.expect(204, "DELETE", WEB, NOTHING);
    Traces::none(&daemon);
}

#[test]
fn a_guest_that_does_not_power_off_continues_to_run() {
    let mut daemon = Daemon::start("stays");
    let vm = made(&daemon, "web", asm::IDLE);
    let soon = stop(&json!({ "grace_period_s": 1 }));
    let refused = daemon.api.expect(409, "PUT", STATE, &soon);
    assert_eq!(refused["code"], "still_runs", "{refused}");
    assert!(refused["hint"].as_str().unwrap().contains("mode: hard"));
    let runs = |daemon: &Daemon, state: &str| {
        let now = daemon.await_phase("web", "Running");
        assert_eq!(now["status"]["pid"], vm["status"]["pid"]);
        assert_eq!(now["spec"]["state"], state);
    };
    runs(&daemon, "Stopped");
    // Another daemon leaves it running; `Running` cancels the stop.
    daemon.kill();
    daemon.start_again();
    runs(&daemon, "Stopped");
    let run = json!({ "state": "Running" });
    daemon.api.expect(200, "PUT", STATE, &run);
    runs(&daemon, "Running");
    // With the stop on record, the guest's end is final.
    daemon.api.expect(409, "PUT", STATE, &soon);
    daemon::signal(
        u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap(),
        rustix::process::Signal::KILL,
    );
    daemon.await_phase("web", "Stopped");
    restart_time();
    daemon.await_phase("web", "Stopped");
    daemon.api.expect(204, "DELETE", WEB, NOTHING);
    Traces::none(&daemon);
}

#[test]
fn other_requests_come_in_while_a_guest_is_waited_for() {
    let daemon = Daemon::start("waits");
    for (request, status) in [("hard", 200), ("start", 409), ("delete", 404)] {
        made(&daemon, "web", asm::IDLE);
        let start = Instant::now();
        let waits = std::thread::scope(|scope| {
            let waits = scope.spawn(|| daemon.api.ask("PUT", STATE, &stop(&json!({}))));
            daemon.await_phase("web", "Stopping");
            match request {
                "hard" => {
                    let hard = stop(&json!({ "mode": "hard" }));
                    daemon.api.expect(200, "PUT", STATE, &hard);
                }
                "start" => {
                    let run = json!({ "state": "Running" });
                    daemon.api.expect(200, "PUT", STATE, &run);
                    daemon.await_phase("web", "Running");
                }
                _ => {
                    let force = format!("{WEB}?force=true");
                    daemon.api.expect(204, "DELETE", &force, NOTHING);
                }
            }
            waits.join().unwrap()
        });
        assert_eq!(waits.0, status, "{request}: {}", waits.1);
        assert!(start.elapsed() < Duration::from_secs(50), "{request}");
        let _ = daemon
            .api
            .ask("DELETE", &format!("{WEB}?force=true"), NOTHING);
    }
    Traces::none(&daemon);
}

#[test]
fn a_running_vm_is_ended_only_with_force() {
    let daemon = Daemon::start("hard");
    let api = &daemon.api;
    made(&daemon, "web", asm::IDLE);
    let refused = api.expect(409, "DELETE", WEB, NOTHING);
    assert_eq!(refused["code"], "vm_runs", "{refused}");
    api.expect(400, "DELETE", &format!("{WEB}?force=maybe"), NOTHING);
    // As read, with another desired state.
    let mut off = api.get(WEB);
    off["spec"]["state"] = json!("Stopped");
    let refused = api.expect(409, "PUT", WEB, &off);
    assert_eq!(refused["code"], "vm_runs", "{refused}");
    // A paused guest cannot power off.
    api.expect(200, "PUT", STATE, &json!({ "state": "Paused" }));
    let refused = api.expect(409, "PUT", STATE, &stop(&json!({})));
    assert_eq!(refused["code"], "paused", "{refused}");
    assert_eq!(api.get(WEB)["spec"]["state"], "Running");
    let ended = api.expect(200, "PUT", STATE, &stop(&json!({ "then": "hard" })));
    assert_eq!(ended["status"]["last_end"]["reason"], "Stopped", "{ended}");

    api.expect(200, "PUT", STATE, &json!({ "state": "Running" }));
    daemon.await_phase("web", "Running");
    let then_hard = stop(&json!({ "grace_period_s": 1, "then": "hard" }));
    let ended = api.expect(200, "PUT", STATE, &then_hard);
    assert_eq!(ended["status"]["phase"], "Stopped", "{ended}");
    for wrong in [
        json!({ "mode": "soft" }),
        json!({ "mode": "hard", "then": "hard" }),
        json!({ "grace_period_s": 0 }),
        json!({ "grace": 1 }),
    ] {
        api.expect(422, "PUT", STATE, &stop(&wrong));
    }
    api.expect(204, "DELETE", WEB, NOTHING);
    Traces::none(&daemon);
}

/// The host does not reboot here: a test of `steps` uses a fake record of an earlier boot.
#[test]
fn the_hosts_shutdown_asks_all_guests_and_forgets_none() {
    let mut daemon = Daemon::start("host");
    made(&daemon, "answers", asm::BUTTON);
    made(&daemon, "ignores", asm::IDLE);
    let mut off = daemon.machine(asm::IDLE);
    off["spec"]["state"] = json!("Stopped");
    daemon.api.expect(201, "PUT", "/v1/vms/off", &off);
    let version = daemon.api.get("/v1/version");
    let done = Command::new(program())
        .args(["node", "shutdown-guests", "--time-limit", "2", "--node"])
        .arg(version["socket"].as_str().unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    for line in [
        "answers: asked to power off\n",
        "answers: off (",
        "ignores: has not powered off in time",
        "ignores: off (",
    ] {
        assert!(said.contains(line), "{said}");
    }
    assert!(!said.contains("off:"), "{said}");
    // Neither a policy nor another daemon starts them in this boot.
    for _ in 0..2 {
        restart_time();
        for (name, state) in [
            ("answers", "Running"),
            ("ignores", "Running"),
            ("off", "Stopped"),
        ] {
            let vm = daemon.api.get(&format!("/v1/vms/{name}"));
            assert_eq!(vm["status"]["phase"], "Stopped", "{vm}");
            assert_eq!(vm["spec"]["state"], state, "{vm}");
        }
        daemon.kill();
        daemon.start_again();
    }
    let run = json!({ "state": "Running" });
    daemon.api.expect(200, "PUT", "/v1/vms/answers/state", &run);
    daemon.await_phase("answers", "Running");
    for name in ["answers", "ignores", "off"] {
        let path = format!("/v1/vms/{name}?force=true");
        daemon.api.expect(204, "DELETE", &path, NOTHING);
    }
    until("nothing is left", || daemon.machines() == 0);
    Traces::none(&daemon);
}
