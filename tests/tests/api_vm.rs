//! One machine through its API: `bellhop run --api-socket`, started, controlled and stopped by
//! requests.
//!
//! The guest reports what it notices, and the kernel reports the process's resources.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod guest_nics;

use guest_nics::wait_nics;
use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::sim::{SimDevice, require_lab};
use lab::traffic::{Frames, exchange_counted};
use lab::vmm_process::{cost, resident};
use serde_json::{Value, json};
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:56:01";
const SECOND_MAC: &str = "52:54:5e:11:56:02";

const SILENCE: Duration = Duration::from_secs(120);

/// How long a guest may take to notice a change; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

fn client(name: &str) -> Client {
    let file = format!("lab-{name}-{}.socket", std::process::id());
    Client::new(&std::env::temp_dir().join(file))
}

/// The configuration of the lab's small guest.
fn small(vdpa: &Value) -> Value {
    let arguments = BellhopArguments::small().unwrap();
    json!({
        "kernel": arguments.kernel_image(),
        "initramfs": arguments.ramdisk(),
        "cmdline": arguments.kernel_words(),
        "memory": "128M",
        "vdpa": vdpa,
    })
}

fn state(client: &Client) -> Value {
    client.get("/v1/vm").unwrap()["state"].clone()
}

fn want(client: &Client, state: &str) {
    client
        .done("PATCH", "/v1/vm", Some(&json!({ "state": state })))
        .unwrap();
}

/// Runs Bellhop without a configuration and sends it one through the API, again for each attempt to
/// boot.
fn start(client: &Client, config: &Value) -> Guest {
    let bellhop = PathBuf::from(std::env::var_os("BELLHOP").unwrap());
    let booted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !booted.load(Ordering::Relaxed) {
                let waits = client
                    .get("/v1/vm")
                    .is_ok_and(|vm| vm["state"] == "NotStarted");
                if waits {
                    client.done("PUT", "/v1/vm", Some(config)).unwrap();
                    want(client, "Running");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let guest = Guest::start_command(
            || {
                let mut command = Command::new(&bellhop);
                command
                    .args(["--log-level", "info", "run", "--api-socket"])
                    .arg(client.socket());
                command
            },
            SILENCE,
        );
        booted.store(true, Ordering::Relaxed);
        guest.unwrap()
    })
}

fn check_traffic(guest: &mut Guest, nic: &str, device: &SimDevice) {
    let frames = Frames {
        count: 100,
        size: 590,
        window: 16,
    };
    exchange_counted(guest, nic, device, &[frames]).unwrap();
}

/// The process's open descriptors, once it has closed our last connection.
fn descriptors(pid: u32) -> u64 {
    std::thread::sleep(Duration::from_millis(500));
    cost(pid).unwrap().descriptors
}

/// Checks that no process has the device open.
#[track_caller]
fn is_free(device: &SimDevice) {
    File::options()
        .read(true)
        .write(true)
        .open(device.path())
        .unwrap();
}

#[test]
fn a_machine_is_started_paused_and_stopped_by_requests() {
    require_lab().unwrap();
    let device = SimDevice::net("api", MAC, 1500).unwrap();
    let client = client("start");
    let vdpa = json!([{ "path": device.path(), "id": "nic" }]);
    let config = small(&vdpa);
    let mut guest = start(&client, &config);
    let vm = client.get("/v1/vm").unwrap();
    assert_eq!(vm["state"], "Running", "{vm}");
    assert_eq!((&vm["boots"], &vm["pid"]), (&json!(1), &json!(guest.pid())));
    let shown = client.get("/v1/vm/config").unwrap();
    for key in ["kernel", "initramfs", "cmdline"] {
        assert_eq!(shown[key], config[key]);
    }
    assert_eq!(shown["vdpa"][0]["id"], "nic");
    wait_nics(&mut guest, &[MAC]);
    check_traffic(&mut guest, "eth0", &device);
    let metrics = client.get("/v1/metrics").unwrap();
    let metrics = metrics.as_str().unwrap();
    for line in [
        "bellhop_vm_state{state=\"Running\"} 1",
        "bellhop_device_driver_ok{device=\"nic\"} 1",
        "bellhop_kvm_total{counter=\"exits\"} ",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    let description = client.get("/v1/openapi.json").unwrap();
    assert!(description["paths"]["/v1/vm"].is_object());
    // Idle workers end: vmm, api and vcpu0 stay.
    let begin = Instant::now();
    while cost(guest.pid()).unwrap().threads != 3 {
        let now = cost(guest.pid()).unwrap();
        assert!(begin.elapsed() < NOTICE, "{now:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    // Pages of the program's file vary with its build, and so, through relocations, does the
    // private memory. This limit detects memory that is held for each request or frame.
    let own = resident(guest.pid()).unwrap();
    assert!(own.own_kib < 4 * 1024, "{own:?}");

    // Rejected now: the machine runs.
    let refused = client.ask("PUT", "/v1/vm", Some(&config)).unwrap();
    assert_eq!(
        (refused.status, &refused.body["code"]),
        (409, &json!("wrong_state"))
    );
    assert!(
        refused.body["message"]
            .as_str()
            .unwrap()
            .contains("the machine is running"),
        "{}",
        refused.body
    );

    pauses(&client, &mut guest, &device);
    // A paused machine stops here; a running one stops in the NICs' test.
    want(&client, "Paused");
    want(&client, "Stopped");
    assert!(guest.wait_exit(NOTICE).unwrap().success());
    assert!(!client.socket().exists());
    is_free(&device);
}

/// A paused guest does nothing, and resumes at the same point.
fn pauses(client: &Client, guest: &mut Guest, device: &SimDevice) {
    for _ in 0..3 {
        want(client, "Paused");
        want(client, "Paused");
        assert_eq!(state(client), "Paused");
        guest.send("info").unwrap();
        let early = guest.answer("info", Duration::from_secs(1));
        assert!(early.is_err(), "a paused guest answers: {early:?}");
        want(client, "Running");
        want(client, "Running");
        assert_eq!(state(client), "Running");
        guest.answer("info", NOTICE).unwrap();
        check_traffic(guest, "eth0", device);
    }
}

#[test]
fn a_configuration_that_cannot_work_can_be_followed_by_another() {
    require_lab().unwrap();
    let device = SimDevice::net("api", MAC, 1500).unwrap();
    let client = client("again");
    let held = File::options().read(true).write(true).open(device.path());
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command.arg("run").arg("--api-socket").arg(client.socket());
    let mut child = command.stdin(std::process::Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while client.get("/v1/vm").is_err() {
        assert!(start.elapsed() < NOTICE);
        std::thread::sleep(Duration::from_millis(20));
    }
    let before = descriptors(child.id());
    let vdpa = json!([{ "path": device.path() }]);
    let mut missing = small(&vdpa);
    missing["kernel"] = json!("/nonexistent");
    let refused = |config: &Value, words: &str| {
        client.done("PUT", "/v1/vm", Some(config)).unwrap();
        let running = json!({ "state": "Running" });
        let refused = client.ask("PATCH", "/v1/vm", Some(&running)).unwrap();
        assert_eq!(refused.status, 422, "{}", refused.body);
        assert!(refused.body.to_string().contains(words), "{}", refused.body);
        assert_eq!(state(&client), "NotStarted");
    };
    refused(&small(&vdpa), "in use");
    drop(held);
    refused(&missing, "No such file");
    is_free(&device);
    assert_eq!(descriptors(child.id()), before);
    // A signal also ends it before there is a machine.
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(!client.socket().exists());
}
#[test]
fn the_power_button_reset_and_nmi_reach_the_guest() {
    require_lab().unwrap();
    let client = client("button");
    let mut guest = start(&client, &small(&json!([])));
    let press = |what: &str| {
        client
            .done("POST", &format!("/v1/vm/{what}"), None)
            .unwrap()
    };
    for _ in 0..2 {
        guest.listen("button 30").unwrap();
        press("power-button");
        let pressed = guest.answer("button", NOTICE * 2).unwrap();
        assert_eq!(pressed["pressed"], true, "{pressed}");
    }
    // The button was not pressed again.
    guest.listen("button 1").unwrap();
    assert_eq!(guest.answer("button", NOTICE).unwrap()["pressed"], false);

    press("nmi");
    let start = Instant::now();
    while !guest
        .command("dmesg")
        .unwrap()
        .to_string()
        .contains("NMI received")
    {
        assert!(
            start.elapsed() < NOTICE,
            "{}",
            guest.command("dmesg").unwrap()
        );
        std::thread::sleep(Duration::from_millis(100));
    }

    let before = descriptors(guest.pid());
    press("reset");
    guest.wait_ready(SILENCE).unwrap();
    let vm = client.get("/v1/vm").unwrap();
    assert_eq!((&vm["state"], &vm["boots"]), (&json!("Running"), &json!(2)));
    assert_eq!(descriptors(guest.pid()), before);
    assert_eq!(vm["end"], Value::Null);
    let seen = &vm["generation"];
    let last = std::thread::scope(|scope| {
        let path = format!("/v1/vm/watch?since={seen}&timeout_s=60");
        let client = &client;
        let watcher = scope.spawn(move || client.get(&path).unwrap());
        std::thread::sleep(Duration::from_millis(200));
        assert!(guest.power_off().unwrap().success());
        watcher.join().unwrap()
    });
    assert_eq!(last["end"]["reason"], "PoweredOff", "{last}");
    assert!(!client.socket().exists());
}

#[test]
fn nics_are_plugged_and_unplugged_and_a_watcher_is_notified() {
    require_lab().unwrap();
    let first = SimDevice::net("api", MAC, 1500).unwrap();
    let second = SimDevice::net("api2", SECOND_MAC, 1500).unwrap();
    let client = client("nics");
    let vdpa = json!([{ "path": first.path(), "id": "first" }]);
    let mut guest = start(&client, &small(&vdpa));
    wait_nics(&mut guest, &[MAC]);
    let nic = client.get("/v1/vm/nics/first").unwrap();
    println!("{nic:#}");
    assert_eq!(
        (&nic["state"], &nic["mac"]),
        (&json!("Plugged"), &Value::Null)
    );
    assert_eq!(nic["device"]["driver_ok"], true, "{nic}");
    let negotiated = nic["device"]["features_negotiated"].to_string();
    assert!(negotiated.contains("VERSION_1"), "{negotiated}");
    assert!(
        nic["device"]["queues"].as_array().unwrap().len() >= 2,
        "{nic}"
    );
    assert_eq!(nic["device"]["queues"][0]["kick"], "Eventfd", "{nic}");

    let seen = client.get("/v1/vm").unwrap()["generation"].clone();
    let watch = |since: &Value, seconds: u32| {
        let path = format!("/v1/vm/watch?since={since}&timeout_s={seconds}");
        client.get(&path).unwrap()
    };
    let nothing = watch(&seen, 1);
    assert_eq!(nothing["generation"], seen, "{nothing}");
    let body = json!({ "path": second.path() });
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&seen, 60));
        std::thread::sleep(Duration::from_millis(200));
        let answer = client
            .ask("PUT", "/v1/vm/nics/second", Some(&body))
            .unwrap();
        assert_eq!(answer.status, 201, "{}", answer.body);
        let changed = watcher.join().unwrap();
        assert!(changed.to_string().contains("second"), "{changed}");
    });
    wait_nics(&mut guest, &[MAC, SECOND_MAC]);
    guest.command("up eth1").unwrap();
    check_traffic(&mut guest, "eth1", &second);
    // The same request again changes nothing, another one of this name is refused.
    let answer = client
        .ask("PUT", "/v1/vm/nics/second", Some(&body))
        .unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let other = json!({ "path": first.path() });
    let answer = client
        .ask("PUT", "/v1/vm/nics/second", Some(&other))
        .unwrap();
    assert_eq!(answer.status, 409, "{}", answer.body);
    let busy = client
        .ask("PUT", "/v1/vm/nics/third", Some(&other))
        .unwrap();
    assert_eq!(busy.status, 422, "{}", busy.body);
    assert!(busy.body.to_string().contains("in use"), "{}", busy.body);
    let config = client.get("/v1/vm/config").unwrap();
    assert_eq!(config["vdpa"].as_array().unwrap().len(), 2, "{config}");

    for (id, left) in [("second", vec![MAC]), ("first", vec![])] {
        let answer = client
            .ask("DELETE", &format!("/v1/vm/nics/{id}"), None)
            .unwrap();
        assert_eq!(answer.status, 202, "{}", answer.body);
        // Until the guest has released it.
        let start = Instant::now();
        let mut seen = json!(0);
        loop {
            let vm = watch(&seen, 5);
            let gone = vm["nics"]
                .as_array()
                .unwrap()
                .iter()
                .all(|nic| nic["id"] != id);
            if gone {
                break;
            }
            assert!(start.elapsed() < NOTICE, "{vm}");
            seen = vm["generation"].clone();
        }
        wait_nics(&mut guest, &left);
    }
    is_free(&first);
    is_free(&second);
    // A running machine must also stop with a NIC.
    let body = json!({ "path": first.path() });
    client.done("PUT", "/v1/vm/nics/last", Some(&body)).unwrap();
    wait_nics(&mut guest, &[MAC]);
    let gone = client.ask("GET", "/v1/vm/nics/first", None).unwrap();
    assert_eq!(gone.status, 404, "{}", gone.body);

    // A watching client is notified of the end.
    let seen = client.get("/v1/vm").unwrap()["generation"].clone();
    let last = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&seen, 60));
        std::thread::sleep(Duration::from_millis(200));
        want(&client, "Stopped");
        watcher.join().unwrap()
    });
    assert_eq!(last["state"], "Stopped", "{last}");
    assert_eq!(last["end"]["reason"], "Stopped", "{last}");
    let detail = last["end"]["detail"].as_str().unwrap();
    assert!(detail.contains("a client of the API"), "{last}");
    assert!(guest.wait_exit(NOTICE).unwrap().success());
    assert!(!client.socket().exists());
    is_free(&first);
}
