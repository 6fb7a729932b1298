//! VMs that leave for another process while the daemon, or the VMs themselves, are killed: the
//! guest runs once. VMs of a few instructions on a real `/dev/kvm`; without KVM the tests fail and
//! report that.
//!
//! With NICs and real guests: `migration_node` of the lab.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "api_serve/daemon.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod daemon;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use daemon::{Client, Daemon, asm, program, signal, until};
use rustix::process::Signal;
use serde_json::{Value, json};

const WEB: &str = "/v1/vms/web";
const MIGRATION: &str = "/v1/vms/web/migration";
/// A VM whose restart shows that restart policies have acted.
const WITNESS: &str = "/v1/vms/witness";
/// Longer than the daemon's interval between two queries. Such a query causes no event.
const OWN_LOOK: Duration = Duration::from_millis(2500);

/// A path of this test's own.
fn place(name: &str) -> PathBuf {
    let name = format!("bellhop-leave-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let _ = std::fs::remove_file(&path);
    path
}

fn send(to: &std::path::Path) -> Value {
    json!({ "send": { "destination": format!("unix:{}", to.display()) } })
}

/// A process that waits for a VM.
struct Destination {
    child: Child,
    at: PathBuf,
    api: Client,
}

impl Destination {
    fn wait(name: &str) -> Self {
        let (at, api) = (
            place(&format!("{name}.move")),
            place(&format!("{name}.api")),
        );
        let child = Command::new(program())
            .args(["run", "--receive", &format!("unix:{}", at.display())])
            .arg("--api-socket")
            .arg(&api)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let waiting = Self {
            child,
            at,
            api: Client::new(&api),
        };
        until("it waits for the machine", || waiting.phase().is_some());
        waiting
    }

    fn phase(&self) -> Option<String> {
        let (status, answer) = self.api.try_ask("GET", "/v1/vm/migration", &Value::Null)?;
        (status == 200).then(|| answer["phase"].as_str().unwrap().to_owned())
    }

    /// Whether the guest runs here.
    fn has_guest(&self) -> bool {
        let answer = self.api.try_ask("GET", "/v1/vm", &Value::Null);
        let runs = answer.is_some_and(|(_, vm)| vm["state"] == "Running");
        runs && self.phase().as_deref() == Some("Moved")
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn made(test: &str, restart: &str) -> (Daemon, Value) {
    let daemon = Daemon::start(test);
    let mut body = daemon.machine(asm::IDLE);
    body["spec"]["restart"] = json!(restart);
    daemon.api.expect(201, "PUT", WEB, &body);
    daemon.await_phase("web", "Running");
    (daemon, body)
}

/// Returns when the policy has restarted a VM that ended just now. A VM that ended before and has
/// not restarted by then stays away.
#[track_caller]
fn policies_act(daemon: &Daemon) {
    let api = &daemon.api;
    let mut body = daemon.machine(asm::IDLE);
    body["spec"]["restart"] = json!("Always");
    api.expect(201, "PUT", WITNESS, &body);
    let vm = daemon.await_phase("witness", "Running");
    let pid = u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    signal(pid, Signal::KILL);
    until("the witness is started again", || {
        api.get(WITNESS)["status"]["restarts"] == 1
    });
    api.expect(204, "DELETE", "/v1/vms/witness?force=true", &Value::Null);
}

/// Asserts that the VM is away, and that only a client's report starts it.
#[track_caller]
fn stays_away(daemon: &mut Daemon, body: &Value) {
    for restarted in [false, true] {
        if restarted {
            daemon.kill();
            daemon.start_again();
        }
        let vm = daemon.await_phase("web", "MigrationUnknown");
        assert_eq!(vm["status"]["pid"], Value::Null, "{vm:#}");
        let why = &vm["status"]["migration_unknown"];
        assert!(
            why["remedy"].to_string().contains("migration resolve"),
            "{vm:#}"
        );
        policies_act(daemon);
        assert_eq!(daemon.machines(), 0);
        for (path, body) in [
            ("/v1/vms/web/state", json!({ "state": "Running" })),
            (WEB, body.clone()),
        ] {
            let refused = daemon.api.expect(409, "PUT", path, &body);
            assert_eq!(refused["code"], "migration_unknown", "{refused:#}");
        }
        let mut other = body.clone();
        other["spec"]["cpus"] = json!(2);
        daemon.api.expect(409, "PUT", WEB, &other);
    }
}

#[test]
fn a_daemon_that_is_killed_while_its_machine_moves_does_not_start_it_again() {
    let (mut daemon, body) = made("leave-killed", "Always");
    let destination = Destination::wait("killed");
    daemon
        .api
        .expect(202, "POST", MIGRATION, &send(&destination.at));
    // The daemon opens them.
    until("the machine has its connections", || {
        let (_, now) = daemon.api.ask("GET", MIGRATION, &Value::Null);
        now["phase"] != "Offer" && now["phase"] != "Join"
    });
    daemon.kill();
    until("the guest runs there", || destination.has_guest());
    until("its process here is gone", || daemon.machines() == 0);
    daemon.start_again();
    stays_away(&mut daemon, &body);
    assert!(destination.has_guest());
    let there = json!({ "resolve": "There" });
    daemon.api.expect(204, "PATCH", MIGRATION, &there);
    let vm = daemon.await_phase("web", "Stopped");
    assert_eq!(vm["status"]["last_end"]["reason"], "Moved", "{vm:#}");
    assert_eq!(vm["spec"]["state"], "Stopped", "{vm:#}");
    daemon.api.expect(409, "PATCH", MIGRATION, &there);
    daemon.api.expect(204, "DELETE", WEB, &Value::Null);
}

#[test]
fn a_vm_killed_during_its_migration_returns_at_a_clients_request() {
    let (mut daemon, body) = made("leave-crash", "OnFailure");
    // A destination that never answers: the migration is in progress until the source times out.
    let at = place("silent.move");
    let _silent = UnixListener::bind(&at).unwrap();
    daemon.api.expect(202, "POST", MIGRATION, &send(&at));
    daemon.kill_machines();
    stays_away(&mut daemon, &body);
    daemon
        .api
        .expect(422, "PATCH", MIGRATION, &json!({ "resolve": "Nowhere" }));
    daemon
        .api
        .expect(204, "PATCH", MIGRATION, &json!({ "resolve": "Here" }));
    // Its desired state was running.
    let vm = daemon.await_phase("web", "Running");
    assert_eq!(vm["status"]["migration_unknown"], Value::Null, "{vm:#}");
    // A deleted VM is gone, even if it may run elsewhere.
    daemon.api.expect(202, "POST", MIGRATION, &send(&at));
    daemon.kill_machines();
    daemon.await_phase("web", "MigrationUnknown");
    daemon.api.expect(204, "DELETE", WEB, &Value::Null);
    assert_eq!(daemon.api.get("/v1/vms")["items"], json!([]));
    std::fs::remove_file(&at).unwrap();
}

#[test]
fn a_machine_that_stayed_is_started_again_by_its_policy() {
    let (mut daemon, _) = made("leave-stays", "OnFailure");
    let absent = place("absent.move");
    let mut restarts = 0;
    for kill in [false, true] {
        daemon.api.expect(202, "POST", MIGRATION, &send(&absent));
        if kill {
            daemon.kill();
            daemon.start_again();
        }
        until("it stayed", || {
            let vm = daemon.api.get(MIGRATION);
            vm["phase"] == "Stayed"
        });
        // Found by the daemon's own query.
        std::thread::sleep(OWN_LOOK);
        daemon.kill_machines();
        restarts += 1;
        until("it is back", || {
            let vm = daemon.api.get(WEB);
            vm["status"]["phase"] == "Running" && vm["status"]["restarts"] == restarts
        });
    }
    // A request that the VM rejects leaves no mark.
    daemon
        .api
        .expect(422, "POST", MIGRATION, &json!({ "send": {} }));
    daemon.kill_machines();
    until("it is back", || {
        daemon.api.get(WEB)["status"]["restarts"] == restarts + 1
    });
}

#[test]
fn a_daemon_that_is_killed_before_the_machine_is_asked_finds_its_guest_here() {
    let (mut daemon, _) = made("leave-asked", "OnFailure");
    for step in ["web do send", "web done send"] {
        daemon.kill();
        let mut shown = daemon.start_observed();
        let at = place("asked.move");
        let api = daemon.api.clone();
        let client = std::thread::spawn(move || api.try_ask("POST", MIGRATION, &send(&at)));
        loop {
            let now = shown.next();
            if now == step {
                break;
            }
            shown.resume();
        }
        daemon.kill();
        client.join().unwrap();
        drop(shown);
        daemon.start_again();
        daemon.await_phase("web", "Running");
        // No process listens at the destination: the guest stays once the source has found that.
        std::thread::sleep(OWN_LOOK);
        let before = daemon.api.get(WEB)["status"]["restarts"].as_u64().unwrap();
        daemon.kill_machines();
        until("it is back", || {
            let vm = daemon.api.get(WEB);
            vm["status"]["phase"] == "Running" && vm["status"]["restarts"] == before + 1
        });
    }
}

#[test]
fn a_move_that_the_daemon_sees_is_known_and_needs_no_word() {
    for adopted in [false, true] {
        let (mut daemon, _) = made("leave-moves", "Always");
        if adopted {
            daemon.kill();
            daemon.start_again();
        }
        let destination = Destination::wait("moves");
        daemon
            .api
            .expect(202, "POST", MIGRATION, &send(&destination.at));
        // Its phase is Stopped a moment before its process is gone.
        until("its process is gone", || {
            daemon.api.get(WEB)["status"]["pid"] == Value::Null
        });
        let vm = daemon.await_phase("web", "Stopped");
        assert_eq!(
            vm["status"]["last_end"]["reason"], "Moved",
            "{adopted} {vm:#}"
        );
        assert_eq!(vm["status"]["migration_unknown"], Value::Null, "{vm:#}");
        policies_act(&daemon);
        assert_eq!(daemon.machines(), 0);
        assert!(destination.has_guest());
    }
}
