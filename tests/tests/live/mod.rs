//! Changes of a running VM that its guest does not notice: a hot swap and a live upgrade.

use std::path::Path;
use std::time::{Duration, Instant};

use lab::api::Client;
use lab::guest::Guest;
use serde_json::{Value, json};

/// How long an upgrade may take to show; the guest is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

/// Swaps the NIC `nic` to the device at this path.
#[track_caller]
#[allow(dead_code, reason = "not every test swaps")]
pub(crate) fn swap_nic(client: &Client, path: &Path) {
    let body = json!({ "path": path });
    let answer = client.ask("PATCH", "/v1/vm/nics/nic", Some(&body)).unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.body["path"], json!(path), "{}", answer.body);
    let nic = client.get("/v1/vm/nics/nic").unwrap();
    assert_eq!(nic["path"], json!(path), "{nic}");
    assert_eq!(nic["device"]["driver_ok"], true, "{nic}");
}

/// Requests that this program continues the VM.
#[track_caller]
#[allow(dead_code, reason = "not every test upgrades")]
pub(crate) fn ask_upgrade(client: &Client, program: &Path) {
    let body = json!({ "program": program });
    let answer = client.ask("POST", "/v1/vm/upgrade", Some(&body)).unwrap();
    assert_eq!(answer.status, 202, "{}", answer.body);
}

/// Waits until the VM reports the end of an upgrade.
#[track_caller]
#[allow(dead_code, reason = "not every test upgrades")]
pub(crate) fn wait_upgrade(guest: &Guest, client: &Client, done: impl Fn(&Value) -> bool) -> Value {
    let started = Instant::now();
    loop {
        // The API is away for a moment.
        if let Ok(vm) = client.get("/v1/vm")
            && done(&vm)
        {
            return vm;
        }
        assert!(
            started.elapsed() < NOTICE,
            "{:?}\n{}",
            client.get("/v1/vm"),
            guest.console()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
