//! The node daemon's metrics, events and logs, and the commands that read them.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::node::{Node, small, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:5c:01";

/// A daemon whose machines log requests.
fn start(test: &str) -> Node {
    Node::start_with(test, &["--machine-log-level", "info"]).unwrap()
}

fn stopped(daemon: &Node) -> Value {
    let mut spec = daemon.tiny(&json!([])).unwrap();
    spec["spec"]["state"] = json!("Stopped");
    spec
}

/// Waits until the guest has written this.
fn await_console(daemon: &Node, vm: &str, words: &str) {
    let vm = daemon.vm(vm).unwrap().unwrap();
    let log = PathBuf::from(vm["status"]["console"]["log"].as_str().unwrap());
    until(words, || {
        let text = fs::read(&log).unwrap_or_default();
        String::from_utf8_lossy(&text).contains(words)
    })
    .unwrap();
}

/// A file for the output of a command.
fn beside(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("lab-observe-{name}-{}", std::process::id()))
}

/// A command that asks this daemon.
fn bellhop(daemon: &Node, words: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command
        .args(words)
        .arg("--node")
        .arg(daemon.api.socket())
        .stdin(Stdio::null());
    command
}

fn run(daemon: &Node, words: &[&str]) -> Output {
    let output = bellhop(daemon, words).output().unwrap();
    println!("{words:?}: {output:?}");
    output
}

/// Standard output of a command that succeeds.
#[track_caller]
fn printed(daemon: &Node, words: &[&str]) -> String {
    let output = run(daemon, words);
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn metrics(daemon: &Node) -> String {
    let text = daemon.api.get("/v1/metrics").unwrap();
    text.as_str().unwrap().to_owned()
}

#[track_caller]
fn has(metrics: &str, line: &str) {
    assert!(
        metrics.lines().any(|one| one == line),
        "{line} in\n{metrics}"
    );
}

fn signal(vm: &Value, signal: Signal) {
    let pid = i32::try_from(vm["status"]["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[test]
fn metrics_have_nics_and_queues_of_all_machines_and_no_machine_holds_them_up() {
    let daemon = start("metrics");
    let before = daemon.traces().unwrap();
    let nic = json!({ "id": "net0", "from": "vdpasim_net", "mac": MAC, "mtu": 1500 });
    let spec = small(&json!([nic])).unwrap();
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let path = "/v1/vms/old";
    daemon
        .api
        .done("PUT", path, Some(&stopped(&daemon)))
        .unwrap();
    let vm = daemon.await_phase("web", "Running").unwrap();
    // The guest's driver is ready before the guest says so.
    printed(&daemon, &["vm", "wait", "web", "--for", "nic-ready"]);
    await_console(&daemon, "web", "@lab ready");
    let text = metrics(&daemon);
    for line in [
        "bellhop_node_vms{phase=\"Running\"} 1",
        "bellhop_node_vms{phase=\"Stopped\"} 1",
        "bellhop_vm_phase{vm=\"web\",phase=\"Running\"} 1",
        "bellhop_vm_phase{vm=\"old\",phase=\"Stopped\"} 1",
        "bellhop_vm_wanted{vm=\"old\"} 0",
        "bellhop_vm_answers{vm=\"web\"} 1",
        "bellhop_vm_boots_total{vm=\"web\"} 1",
        "bellhop_nic_plugged{vm=\"web\",nic=\"net0\"} 1",
        "bellhop_nic_driver_ok{vm=\"web\",nic=\"net0\"} 1",
        "bellhop_nic_failed_over{vm=\"web\",nic=\"net0\"} 0",
    ] {
        has(&text, line);
    }
    // Buffers for receiving are the device's.
    until("the watch of rings has looked", || {
        let text = metrics(&daemon);
        let in_flight = "bellhop_queue_in_flight{vm=\"web\",nic=\"net0\",queue=\"0\"} ";
        let value = text.lines().find_map(|line| line.strip_prefix(in_flight));
        value.is_some_and(|value| value.parse::<u64>().unwrap() > 0)
    })
    .unwrap();
    let list = printed(&daemon, &["vm", "list"]);
    let web = list.lines().find(|line| line.starts_with("web")).unwrap();
    assert!(list.contains("HEALTH") && web.contains(" ok "), "{list}");

    signal(&vm, Signal::STOP);
    let start = Instant::now();
    let text = metrics(&daemon);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
    has(&text, "bellhop_vm_answers{vm=\"web\"} 0");
    has(&text, "bellhop_vm_phase{vm=\"old\",phase=\"Stopped\"} 1");
    assert!(!text.contains("bellhop_queue_posted_total{"), "{text}");
    signal(&vm, Signal::CONT);
    until("it answers again", || {
        metrics(&daemon).contains("bellhop_vm_answers{vm=\"web\"} 1")
    })
    .unwrap();
    for path in ["/v1/vms/web?force=true", "/v1/vms/old"] {
        daemon.api.done("DELETE", path, None).unwrap();
    }
    daemon.same(&before, "the VMs are deleted").unwrap();
}

#[test]
fn events_are_printed_followed_and_waited_for() {
    let mut daemon = start("events");
    let stopped = stopped(&daemon);
    for name in ["web", "other"] {
        let path = format!("/v1/vms/{name}");
        daemon.api.done("PUT", &path, Some(&stopped)).unwrap();
    }
    let all = printed(&daemon, &["events"]);
    assert!(all.contains("/v1/vms/web  created"), "{all}");
    assert!(all.contains("/v1/vms/other  created"), "{all}");
    let words = ["events", "--vm", "web", "--type", "created", "-j"];
    let one = printed(&daemon, &words);
    let event: Value = serde_json::from_str(one.trim_end()).unwrap();
    assert_eq!(event["subject"], "/v1/vms/web", "{one}");
    for wrong in ["/v1/events?vm=A", "/v1/events?no=1", "/v1/events?since=x"] {
        let refused = daemon.api.ask("GET", wrong, None).unwrap();
        assert_eq!(refused.status, 400, "{wrong}: {}", refused.body);
    }

    // Both continue when the daemon is replaced.
    let log = beside("followed");
    let mut followed = bellhop(&daemon, &["events", "-f", "--vm", "web"])
        .stdout(fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let words = ["vm", "wait", "web", "--for", "running", "--timeout", "120"];
    let waiting = bellhop(&daemon, &words)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    until("the history is printed", || {
        fs::read_to_string(&log).unwrap().contains("created")
    })
    .unwrap();
    let descriptors = format!("/proc/{}/fd", waiting.id());
    until("the waiting command has reached the daemon", || {
        let all = fs::read_dir(&descriptors).unwrap().flatten();
        let mut targets = all.filter_map(|one| fs::read_link(one.path()).ok());
        targets.any(|target| target.to_string_lossy().starts_with("socket:"))
    })
    .unwrap();
    daemon.kill();
    daemon.start_again().unwrap();
    let run_it = json!({ "state": "Running" });
    daemon
        .api
        .done("PUT", "/v1/vms/web/state", Some(&run_it))
        .unwrap();
    let waited = waiting.wait_with_output().unwrap();
    assert!(waited.status.success(), "{waited:?}");
    let text = String::from_utf8(waited.stdout).unwrap();
    assert!(text.starts_with("web: Running"), "{text}");
    until("the event is printed", || {
        fs::read_to_string(&log)
            .unwrap()
            .contains("/v1/vms/web  started")
    })
    .unwrap();
    followed.kill().unwrap();
    followed.wait().unwrap();
    let text = fs::read_to_string(&log).unwrap();
    assert!(!text.contains("other"), "{text}");
    fs::remove_file(&log).unwrap();

    let limit = run(
        &daemon,
        &["vm", "wait", "web", "--for", "stopped", "--timeout", "1"],
    );
    assert_eq!(limit.status.code(), Some(6));
    let none = run(&daemon, &["vm", "wait", "nosuch", "--for", "running"]);
    assert_eq!(none.status.code(), Some(5));
    printed(&daemon, &["vm", "wait", "nosuch", "--for", "deleted"]);
}

#[test]
fn logs_have_times_and_are_read_and_followed_by_the_api() {
    let daemon = start("logs");
    let spec = small(&json!([])).unwrap();
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    daemon.await_phase("web", "Running").unwrap();
    await_console(&daemon, "web", "@lab ready");
    let log = daemon
        .api
        .ask("GET", "/v1/vms/web/logs/vmm?tail=2", None)
        .unwrap();
    assert_eq!(log.status, 200, "{}", log.body);
    assert!(
        log.headers.to_lowercase().contains("x-log-position"),
        "{}",
        log.headers
    );
    let text = log.body.as_str().unwrap();
    assert_eq!(text.lines().count(), 2, "{text}");
    for line in text.lines() {
        // 2026-11-21T21:45:00.123456Z
        assert!(line.starts_with("20") && line.contains("Z "), "{line}");
    }
    let console = printed(&daemon, &["vm", "logs", "web", "--console", "-n", "2"]);
    assert_eq!(console.lines().count(), 2, "{console:?}");
    for (path, status) in [
        ("/v1/vms/web/logs/guest", 404),
        ("/v1/vms/nosuch/logs/vmm", 404),
        ("/v1/vms/web/logs/vmm?tail=-1", 400),
        ("/v1/vms/web/logs/vmm?after=x", 400),
    ] {
        let refused = daemon.api.ask("GET", path, None).unwrap();
        assert_eq!(refused.status, status, "{path}: {}", refused.body);
    }

    let file = beside("log");
    let mut followed = bellhop(&daemon, &["vm", "logs", "web", "-f", "-n", "0"])
        .stdout(fs::File::create(&file).unwrap())
        .spawn()
        .unwrap();
    // The VM's process logs each change of its state at info.
    until("new lines are printed", || {
        for state in ["Paused", "Running"] {
            let change = json!({ "state": state });
            daemon
                .api
                .done("PUT", "/v1/vms/web/state", Some(&change))
                .unwrap();
        }
        fs::read_to_string(&file).unwrap().contains("Z ")
    })
    .unwrap();
    followed.kill().unwrap();
    followed.wait().unwrap();
    fs::remove_file(&file).unwrap();
}
