//! Requests of any kind, derived from the API's own description, against the real server. They are
//! sent before the machine starts, while its guest runs and while it is paused. See `lab::openapi`.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod any_request;
mod guest_nics;

use any_request::Trial;
use guest_nics::wait_nics;
use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::openapi::exchange::Request;
use lab::openapi::known::Known;
use lab::sim::{SimDevice, require_lab};
use lab::traffic::{Frames, exchange_counted};
use serde_json::{Value, json};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:57:01";
const SPARE_MAC: &str = "52:54:5e:11:57:02";

const SILENCE: Duration = Duration::from_secs(120);
const PATIENCE: Duration = Duration::from_secs(30);

fn client(name: &str) -> Client {
    let file = format!("lab-any-{name}-{}.socket", std::process::id());
    Client::new(&std::env::temp_dir().join(file))
}

/// Existing names. The machine's own NIC is not among them.
fn known(spare: &SimDevice) -> Known {
    let arguments = BellhopArguments::small().unwrap();
    let path = |path: &std::path::Path| json!(path);
    Known::default()
        .with("VmConfig.kernel", path(arguments.kernel_image()))
        .with("VmConfig.kernel", "/nonexistent")
        .with("VmConfig.initramfs", path(arguments.ramdisk()))
        .with("VmConfig.cmdline", arguments.kernel_words())
        .with("VmConfig.cpu_affinity", json!([[0]]))
        .with("VmConfig.memory", "64M")
        // Exactly one of `path` and `fd`, which the schema cannot express.
        .with("VdpaConfig.*", json!({ "path": path(spare.path()) }))
        .with("VdpaConfig.*", json!({ "path": "/dev/null", "id": "any" }))
        .with(
            "VdpaConfig.*",
            json!({
                "path": "/nonexistent",
                "id": "any",
                "mac": "52:54:00:12:34:56",
                "num_queues": 3,
                "doorbell": "off",
                "stall_kick": true,
            }),
        )
        // Exactly one of `host`, `path` and `fd`.
        .with("VfioConfig.*", json!({ "host": "0000:ff:1f.7" }))
        .with(
            "VfioConfig.*",
            json!({ "path": "/nonexistent", "id": "any", "allow_pf": true }),
        )
        .with("NicChange.*", json!({ "path": path(spare.path()) }))
        .with(
            "NicChange.*",
            json!({ "doorbell": "off", "stall_kick": true }),
        )
        .with("NicChange.*", json!({ "backup": path(spare.path()) }))
        .with("NicChange.*", json!({ "backup": null }))
        .with("SendConfig.destination", "unix:/nonexistent/socket")
        .with("ReceiveConfig.listen", "unix:/nonexistent/socket")
        .with("ReceiveConfig.kernel", "/nonexistent")
        .with("ReceiveConfig.initramfs", "/nonexistent")
        .with("ReceiveConfig.max_memory", "1G")
        .with("ReceiveConfig.cpu_affinity", json!([[0]]))
        .with("DiskConfig.path", "/nonexistent")
        .with("DiskConfig.bps", "1M")
        .with("id", "any")
        .with("id", "none")
        .with("since", 0)
        .with("timeout_s", 0)
}

/// Changes of the machine's state would end the phase under test.
fn changes_state(request: &Request) -> bool {
    let state = &request.json()["state"];
    request.method == "PATCH"
        && ["Running", "Paused", "Stopped"]
            .iter()
            .any(|one| state == one)
}

/// Buttons that affect the guest.
fn presses(request: &Request) -> bool {
    let path = request.path();
    let pressed = ["/v1/vm/power-button", "/v1/vm/reset", "/v1/vm/nmi"];
    request.method == "POST" && pressed.iter().any(|button| path.starts_with(button))
}

#[test]
fn before_a_machine_starts() {
    require_lab().unwrap();
    let spare = SimDevice::net("spare", SPARE_MAC, 1500).unwrap();
    let client = client("waiting");
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command.arg("run").arg("--api-socket").arg(client.socket());
    let mut child = command.stdin(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while client.get("/v1/vm").is_err() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    let trial = Trial::new(&client, child.id(), &known(&spare), 0x5eed_0001);
    trial.run(|request| !changes_state(request), |_| {});
    assert_eq!(client.get("/v1/vm").unwrap()["state"], "NotStarted");
    client
        .done("PATCH", "/v1/vm", Some(&json!({ "state": "Stopped" })))
        .unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn while_a_guest_runs_and_while_it_is_paused() {
    require_lab().unwrap();
    let device = SimDevice::net("kept", MAC, 1500).unwrap();
    let spare = SimDevice::net("spare", SPARE_MAC, 1500).unwrap();
    let client = client("running");
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .argument(
            "--vdpa",
            &format!("path={},id=kept", device.path().display()),
        )
        .argument("--api-socket", client.socket().to_str().unwrap())
        .silence(SILENCE);
    let mut guest = Guest::start(&arguments).unwrap();
    wait_nics(&mut guest, &[MAC]);
    let before = nics_but_any(&client);
    for (phase, seed) in [("Running", 0x5eed_0002), ("Paused", 0x5eed_0003)] {
        state(&client, phase);
        let trial = Trial::new(&client, guest.pid(), &known(&spare), seed);
        trial.run(
            |request| !changes_state(request) && !presses(request),
            // A plugged device would still be there when the next request names it.
            |request| {
                if request.method == "PUT" {
                    state(&client, "Running");
                    unplug(&client);
                    state(&client, phase);
                }
            },
        );
        let vm = client.get("/v1/vm").unwrap();
        assert_eq!(
            (&vm["state"], &vm["boots"]),
            (&json!(phase), &json!(1)),
            "{vm}"
        );
        assert_eq!(nics_but_any(&client), before);
        state(&client, "Running");
        wait_nics(&mut guest, &[MAC]);
        let frames = Frames {
            count: 100,
            size: 590,
            window: 16,
        };
        exchange_counted(&mut guest, "eth0", &device, &[frames]).unwrap();
    }
    assert!(guest.power_off().unwrap().success());
}

fn state(client: &Client, state: &str) {
    client
        .done("PATCH", "/v1/vm", Some(&json!({ "state": state })))
        .unwrap();
}

/// NICs that no request has named.
fn nics_but_any(client: &Client) -> Vec<Value> {
    let nics = client.get("/v1/vm/nics").unwrap();
    let all = nics["items"].as_array().unwrap().clone();
    all.into_iter().filter(|nic| nic["id"] == "kept").collect()
}

/// Unplugs every NIC and disk that requests have plugged, and waits until the guest has released
/// them.
fn unplug(client: &Client) {
    let start = Instant::now();
    loop {
        let mut left = 0;
        for kind in ["nics", "disks"] {
            let all = client.get(&format!("/v1/vm/{kind}")).unwrap();
            for one in all["items"].as_array().unwrap() {
                let id = one["id"].as_str().unwrap();
                if id != "kept" {
                    left += 1;
                    let path = format!("/v1/vm/{kind}/{id}");
                    client.ask("DELETE", &path, None).unwrap();
                }
            }
        }
        if left == 0 {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{left} stay");
        std::thread::sleep(Duration::from_millis(50));
    }
}
