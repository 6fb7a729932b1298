//! VMs of the node daemon (`bellhop serve`), with NICs that it creates on the kernel's simulator.
//!
//! Afterwards the tests ask the kernel for leftovers: devices, processes, sockets, mounts.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod node;

use lab::guest::Guest;
use lab::sim::{SimDevice, require_lab};
use node::steps::Steps;
use node::{Daemon, NOTICE, Traces, nic, until};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

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
    assert_eq!(
        vm["status"]["nic_devices"][0]["vdpa_device"], "web.net0",
        "{vm}"
    );
    assert_eq!(vm["status"]["adopted"], false, "{vm}");
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm["status"]["pid"])).unwrap();
    assert!(status.contains("Seccomp:\t2"), "{status}");
    daemon.await_console("web", "@lab ready");
    // The same again changes nothing.
    let again = daemon.api.ask("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    assert_eq!(again.status, 200, "{}", again.body);
    assert_eq!(again.body["status"]["pid"], vm["status"]["pid"]);
    // Another one is refused while it runs.
    let mut other = spec.clone();
    other["spec"]["cpus"] = json!(2);
    let refused = daemon.api.ask("PUT", "/v1/vms/web", Some(&other)).unwrap();
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert_eq!(refused.body["code"], "other_vm_runs");

    let deleted = daemon
        .api
        .ask("DELETE", "/v1/vms/web?force=true", None)
        .unwrap();
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
        assert_eq!(found["status"]["pid"], vm["status"]["pid"], "{found}");
        assert_eq!(found["status"]["adopted"], true, "{found}");
    }
    // The machine is killed while no daemon runs: its policy restarts it.
    daemon.kill();
    node::kill_vm(&vm);
    daemon.start_again();
    until("it is started again", || {
        let found: Value = daemon.api.get("/v1/vms/web").unwrap();
        found["status"]["phase"] == "Running" && found["status"]["pid"] != vm["status"]["pid"]
    });
    let found = daemon.api.get("/v1/vms/web").unwrap();
    assert_eq!(found["status"]["last_end"]["reason"], "Killed", "{found}");
    daemon.delete("web");
    before.same(&daemon);
}

#[test]
fn an_empty_state_directory_ends_no_machine() {
    require_lab().unwrap();
    let mut daemon = Daemon::start("empty");
    let before = Traces::now(&daemon);
    let spec = daemon.tiny(&json!([nic("net0", MAC)]));
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = daemon.await_phase("web", "Running");
    let during = Traces::now(&daemon);
    daemon.kill();
    let said = daemon.refused_with_empty_state();
    let named = format!("web (process {})", vm["status"]["pid"]);
    for part in [named.as_str(), "/state: mount it", "--end-orphans"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    daemon.start_again();
    let found = daemon.await_phase("web", "Running");
    assert_eq!(found["status"]["pid"], vm["status"]["pid"], "{found}");
    during.same(&daemon);
    daemon.delete("web");
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
        found["status"]["phase"] == "Running" && found["status"]["pid"] != vm["status"]["pid"]
    });
    let found = daemon.api.get("/v1/vms/web").unwrap();
    assert_eq!(found["status"]["restarts"], 1, "{found}");

    let pause = json!({ "state": "Paused" });
    daemon
        .api
        .done("PUT", "/v1/vms/web/state", Some(&pause))
        .unwrap();
    daemon.await_phase("web", "Paused");
    // A paused guest cannot power off.
    let stop = json!({ "state": "Stopped", "mode": "hard" });
    let stopped = daemon
        .api
        .done("PUT", "/v1/vms/web/state", Some(&stop))
        .unwrap();
    assert_eq!(stopped["status"]["phase"], "Stopped", "{stopped}");
    assert_eq!(stopped["status"]["pid"], Value::Null, "{stopped}");
    // Its NIC is still its own.
    assert_eq!(
        stopped["status"]["nic_devices"][0]["vdpa_device"], "web.net0",
        "{stopped}"
    );
    let run = json!({ "state": "Running" });
    daemon
        .api
        .done("PUT", "/v1/vms/web/state", Some(&run))
        .unwrap();
    daemon.await_phase("web", "Running");
    daemon.delete("web");
    before.same(&daemon);
}

/// Guests that ignore the button, and the host's shutdown: `cli/tests/api_serve_stop`.
#[test]
fn a_linux_guest_is_asked_to_power_off_and_stays_off() {
    require_lab().unwrap();
    let daemon = Daemon::start("stop");
    let before = Traces::now(&daemon);
    let mut spec = daemon.small(&json!([nic("net0", MAC)]));
    spec["spec"]["restart"] = json!("Always");
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = daemon.await_phase("web", "Running");
    let refused = daemon.api.ask("DELETE", "/v1/vms/web", None).unwrap();
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert_eq!(refused.body["code"], "vm_runs");

    let console = std::path::Path::new(vm["status"]["console"]["socket"].as_str().unwrap());
    let pid = u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    let mut guest = Guest::attach(console, pid, NOTICE).unwrap();
    guest.listen("button 30").unwrap();
    let stop = json!({ "state": "Stopped" });
    let stopped = std::thread::scope(|scope| {
        let client = scope.spawn(|| daemon.api.done("PUT", "/v1/vms/web/state", Some(&stop)));
        let pressed = guest.answer("button", NOTICE).unwrap();
        assert_eq!(pressed["pressed"], true, "{pressed}");
        daemon.await_phase("web", "Stopping");
        guest.command("poweroff").unwrap();
        client.join().unwrap().unwrap()
    });
    assert_eq!(stopped["status"]["phase"], "Stopped", "{stopped}");
    assert_eq!(
        stopped["status"]["last_end"]["reason"], "PoweredOff",
        "{stopped}"
    );
    drop(guest);
    // Longer than its policy takes.
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(
        daemon.await_phase("web", "Stopped")["status"]["restarts"],
        0
    );
    daemon.api.done("DELETE", "/v1/vms/web", None).unwrap();
    before.same(&daemon);
}

#[test]
fn a_failed_creation_leaves_nothing() {
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
    no_kernel["spec"]["kernel"] = json!("/nonexistent");
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

/// Kills the daemon at the step with this number while it handles `request`. Returns the step, or
/// `None` if there are fewer.
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
        let force = if method == "DELETE" {
            "?force=true"
        } else {
            ""
        };
        let _ = api.ask(&method, &format!("/v1/vms/web{force}"), body.as_ref());
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
        shown.resume();
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
fn nics_are_plugged_and_unplugged_while_it_runs_and_a_device_is_for_one_machine() {
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
    let device = &added.body["status"]["nic_devices"][1];
    assert_eq!(device["vdpa_device"], "web.net1");
    let again = daemon.api.ask("PUT", path, Some(&second)).unwrap();
    assert_eq!(again.status, 200, "{}", again.body);
    // The machine's own account, passed on.
    let own = daemon.api.get(path).unwrap();
    assert_eq!(own["state"], "Plugged", "{own}");
    let metrics = daemon.api.get("/v1/vms/web/metrics").unwrap();
    assert!(metrics.as_str().unwrap().contains("bellhop_vm_state"));
    // Another machine cannot have it, by whatever name.
    for other in [
        json!([{ "id": "a", "path": device["character_device"] }]),
        json!([{ "id": "a", "device": device["vdpa_device"] }]),
    ] {
        let mut other = daemon.small(&other);
        other["spec"]["state"] = json!("Stopped");
        let refused = daemon
            .api
            .ask("PUT", "/v1/vms/other", Some(&other))
            .unwrap();
        assert_eq!(refused.status, 409, "{}", refused.body);
        let message = refused.body["message"].as_str().unwrap();
        assert!(message.contains("to the virtual machine web"), "{message}");
    }
    // It is still its own after the daemon's and the machine's end.
    daemon.restart(true);
    assert_eq!(
        daemon.await_phase("web", "Running")["status"]["pid"],
        vm["status"]["pid"]
    );
    let gone = daemon.api.ask("DELETE", path, None).unwrap();
    assert!([202, 204].contains(&gone.status), "{}", gone.body);
    until("the device is deleted", || {
        !std::path::Path::new("/sys/bus/vdpa/devices/web.net1").exists()
    });
    let gone = daemon.api.ask("DELETE", path, None).unwrap();
    assert_eq!(gone.status, 404, "{}", gone.body);
    daemon.delete("web");
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
    let device = &moved.body["status"]["nic_devices"][0];
    assert_eq!(device["vdpa_device"], Value::Null);
    assert_eq!(device["character_device"], json!(spare.path()));
    is_there(&daemon);
    // It is this machine's now.
    let mut other = daemon.small(&json!([{ "id": "a", "path": spare.path() }]));
    other["spec"]["state"] = json!("Stopped");
    let refused = daemon
        .api
        .ask("PUT", "/v1/vms/other", Some(&other))
        .unwrap();
    assert_eq!(refused.body["code"], "device_taken", "{}", refused.body);
    daemon.restart(true);
    assert_eq!(
        daemon.await_phase("web", "Running")["status"]["pid"],
        vm["status"]["pid"]
    );
    is_there(&daemon);
    for (state, wanted) in [
        ("Stopped", json!({ "state": "Stopped", "mode": "hard" })),
        ("Running", json!({ "state": "Running" })),
    ] {
        daemon
            .api
            .done("PUT", "/v1/vms/web/state", Some(&wanted))
            .unwrap();
        daemon.await_phase("web", state);
    }
    is_there(&daemon);
    daemon.delete("web");
    before.same(&daemon);
}

/// The daemon's events from now on.
fn follow(daemon: &Daemon) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.api.socket()).unwrap();
    stream.set_read_timeout(Some(node::NOTICE)).unwrap();
    stream
        .write_all(b"GET /v1/events HTTP/1.1\r\nhost: lab\r\n\r\n")
        .unwrap();
    await_words(&mut stream, &["\nid: "]);
    stream
}

/// Reads until all of these words have come.
#[track_caller]
fn await_words(stream: &mut UnixStream, words: &[&str]) {
    let (mut heard, mut buffer) = (String::new(), [0; 4096]);
    while !words.iter().all(|word| heard.contains(word)) {
        let length = stream.read(&mut buffer).unwrap();
        assert!(length > 0, "{heard}");
        heard.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
}

#[test]
fn disks_are_plugged_and_unplugged_and_each_start_has_those_of_the_record() {
    require_lab().unwrap();
    let mut daemon = Daemon::start("disks");
    let before = Traces::now(&daemon);
    let images = ["data.img", "more.img"].map(|name| {
        let path = daemon.beside(name);
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        path
    });
    let all = "/v1/vms/web/disks";
    let (data, more) = ("/v1/vms/web/disks/data", "/v1/vms/web/disks/more");
    let is = |daemon: &Daemon, method: &str, path: &str, body: Option<&Value>, status: u16| {
        let answer = daemon.api.ask(method, path, body).unwrap();
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
        answer.body
    };
    let states = |daemon: &Daemon| {
        let disks = daemon.api.get(all).unwrap();
        let disks = disks["items"].as_array().unwrap().iter();
        let states = disks.map(|disk| json!([disk["id"], disk["state"]]));
        Value::from(states.collect::<Vec<_>>())
    };
    let state = |daemon: &Daemon, state: &str| {
        let mut wanted = json!({ "state": state });
        if state == "Stopped" {
            wanted["mode"] = json!("hard");
        }
        is(daemon, "PUT", "/v1/vms/web/state", Some(&wanted), 200);
        daemon.await_phase("web", state);
    };
    let spec = daemon.small(&json!([]));
    is(&daemon, "PUT", "/v1/vms/web", Some(&spec), 201);
    let vm = daemon.await_phase("web", "Running");
    daemon.await_console("web", "@lab ready");
    assert_eq!(states(&daemon), json!([]));

    // A machine that runs has it at once, and for ever.
    let first = json!({ "path": images[0] });
    let disk = is(&daemon, "PUT", data, Some(&first), 201);
    assert_eq!(disk["state"], "Plugged", "{disk}");
    is(&daemon, "PUT", data, Some(&first), 200);
    let other = json!({ "path": images[1] });
    let refused = is(&daemon, "PUT", data, Some(&other), 409);
    assert_eq!(refused["code"], "id_in_use", "{refused}");
    let nic = nic("data", MAC);
    let refused = is(&daemon, "PUT", "/v1/vms/web/nics/data", Some(&nic), 409);
    assert_eq!(refused["code"], "id_in_use", "{refused}");
    let nowhere = json!({ "path": "/nonexistent/x.img" });
    is(&daemon, "PUT", more, Some(&nowhere), 422);
    is(&daemon, "PATCH", data, Some(&other), 405);
    let recorded = daemon.api.get("/v1/vms/web").unwrap();
    let disks = recorded["spec"]["disks"].as_array().unwrap();
    assert_eq!(disks[0]["path"], first["path"], "{recorded}");
    assert_eq!(disks.len(), 1, "{recorded}");
    daemon.restart(true);
    assert_eq!(
        daemon.await_phase("web", "Running")["status"]["pid"],
        vm["status"]["pid"]
    );
    assert_eq!(states(&daemon), json!([["data", "Plugged"]]));
    let mut events = follow(&daemon);

    // One that is stopped has it when it starts.
    state(&daemon, "Stopped");
    assert_eq!(states(&daemon), json!([["data", "Configured"]]));
    for (body, status) in [
        (json!({ "path": "/nonexistent/x.img" }), 422),
        (json!({ "path": "more.img" }), 422),
        (json!({ "path": images[1], "id": "data" }), 422),
        (json!({ "path": images[1], "vlan": 1 }), 422),
        (other.clone(), 201),
        (other.clone(), 200),
        (first.clone(), 409),
    ] {
        is(&daemon, "PUT", more, Some(&body), status);
    }
    let disk = is(&daemon, "GET", more, None, 200);
    assert_eq!(disk["path"], other["path"], "{disk}");
    is(&daemon, "GET", "/v1/vms/web/disks/none", None, 404);
    is(&daemon, "DELETE", "/v1/vms/web/disks/none", None, 404);
    state(&daemon, "Running");
    let plugged = json!([["data", "Plugged"], ["more", "Plugged"]]);
    assert_eq!(states(&daemon), plugged);
    for serial in ["data", "more"] {
        daemon.await_console("web", &format!("\"serial\":\"{serial}\""));
    }

    // One that the guest has given up is in no record any more.
    let gone = daemon.api.ask("DELETE", data, None).unwrap();
    assert!([202, 204].contains(&gone.status), "{}", gone.body);
    until("the guest has given it up", || {
        daemon.api.ask("GET", data, None).unwrap().status == 404
    });
    await_words(&mut events, &["disk_added", "disk_removed"]);
    drop(events);
    state(&daemon, "Stopped");
    assert_eq!(states(&daemon), json!([["more", "Configured"]]));
    is(&daemon, "DELETE", more, None, 204);
    assert_eq!(states(&daemon), json!([]));
    is(&daemon, "DELETE", "/v1/vms/web", None, 204);
    before.same(&daemon);
    for image in images {
        std::fs::remove_file(image).unwrap();
    }
}
