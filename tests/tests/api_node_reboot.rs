//! The node daemon after a reboot of its host: the VMs that should run return with their NICs.
//!
//! ```text
//!   daemon, VMs ── killed ──> no process, no /run, no vDPA device, no control group
//!                               another boot ID ──> daemon again ──> VMs again
//! ```
//! The lab host itself keeps running. The test removes all that a reboot removes.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod node;

use lab::process::output;
use lab::sim::{require_lab, vdpa};
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange};
use node::{Daemon, Traces, nic, until};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// No zero bytes: the simulator compares addresses as if they were strings.
const MACS: [&str; 2] = ["52:54:5e:11:5a:01", "52:54:5e:11:5a:02"];
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const DEVICES: &str = "/sys/bus/vdpa/devices";
const FRAMES: Frames = Frames {
    count: 100,
    size: 590,
    window: 16,
};

/// A mount that hides the kernel's boot ID behind another one. Dropping it unmounts it.
struct OtherBoot(#[expect(dead_code, reason = "removes the file")] TempPath);

impl OtherBoot {
    fn begin() -> Self {
        let file = TempPath::new("boot-id");
        let now = fs::read_to_string(BOOT_ID).unwrap();
        // Reversed: another value of the same length.
        let other: String = now.trim().chars().rev().collect();
        fs::write(file.path(), format!("{other}\n")).unwrap();
        output(Command::new("mount").args(["--bind", file.text(), BOOT_ID])).unwrap();
        assert_ne!(fs::read_to_string(BOOT_ID).unwrap(), now);
        Self(file)
    }
}

impl Drop for OtherBoot {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["--lazy", BOOT_ID]).status();
    }
}

fn devices() -> Vec<String> {
    let entries = fs::read_dir(DEVICES).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).collect()
}

/// Removes all that a reboot removes. The kernel keeps running.
fn reboot(daemon: &mut Daemon, before: &[String]) -> OtherBoot {
    daemon.kill();
    daemon.kill_marked();
    until("no VM runs", || daemon.processes().is_empty());
    for device in devices() {
        if !before.contains(&device) {
            vdpa(&["dev", "del", &device]).unwrap();
        }
    }
    fs::remove_dir_all(daemon.api.socket().parent().unwrap()).unwrap();
    let groups = daemon.groups();
    let entries = fs::read_dir(&groups)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let of_vms = entries.filter(|path| path.is_dir());
    for group in of_vms.chain([groups.clone()]) {
        // The kernel needs a moment after the end of the last process.
        until("its control group is gone", || {
            fs::remove_dir(&group).is_ok()
        });
    }
    OtherBoot::begin()
}

fn status(daemon: &Daemon, vm: &str) -> Value {
    let vm = daemon.api.get(&format!("/v1/vms/{vm}")).unwrap();
    vm["status"].clone()
}

fn device_of(status: &Value) -> PathBuf {
    let name = status["nic_devices"][0]["vdpa_device"].as_str().unwrap();
    Path::new(DEVICES).join(name)
}

#[test]
fn vms_that_should_run_return_with_their_nics() {
    require_lab().unwrap();
    let mut daemon = Daemon::start("reboot");
    let before = Traces::now(&daemon);
    let devices_before = devices();
    let create = |daemon: &Daemon, name: &str, mut spec: Value, restart: &str| {
        spec["spec"]["restart"] = json!(restart);
        let path = format!("/v1/vms/{name}");
        daemon.api.done("PUT", &path, Some(&spec)).unwrap();
        daemon.await_phase(name, "Running")["status"].clone()
    };
    let small = daemon.small(&json!([nic("net0", MACS[0])]));
    let web = create(&daemon, "web", small, "Always");
    let tiny = daemon.tiny(&json!([nic("net0", MACS[1])]));
    let db = create(&daemon, "db", tiny, "OnFailure");
    for (name, until_reboot) in [("off", false), ("paused-by-host", true)] {
        create(&daemon, name, daemon.tiny(&json!([])), "Always");
        let stop = json!({ "state": "Stopped", "mode": "hard", "until_reboot": until_reboot });
        let path = format!("/v1/vms/{name}/state");
        daemon.api.done("PUT", &path, Some(&stop)).unwrap();
        daemon.await_phase(name, "Stopped");
    }
    exchange(&mut daemon.guest("web"), "eth0", FRAMES).unwrap();

    let boot = reboot(&mut daemon, &devices_before);
    assert!(!device_of(&web).exists() && !device_of(&db).exists());
    daemon.start_again();
    for (name, former) in [("web", &web), ("db", &db)] {
        daemon.await_phase(name, "Running");
        let now = status(&daemon, name);
        assert_ne!(now["pid"], former["pid"], "{now:#}");
        assert_eq!(now["adopted"], false, "{now:#}");
        assert_eq!(now["last_end"]["reason"], "HostRebooted", "{now:#}");
        // A device of the same name; its number may differ.
        assert_eq!(device_of(&now), device_of(former), "{now:#}");
        assert!(device_of(&now).exists());
    }
    let mut guest = daemon.guest("web");
    assert_eq!(guest.ready()["nics"][0]["mac"], MACS[0]);
    exchange(&mut guest, "eth0", FRAMES).unwrap();
    daemon.await_phase("paused-by-host", "Running");
    assert_eq!(status(&daemon, "off")["phase"], "Stopped");

    // The next daemon of this boot adopts them.
    let pid = status(&daemon, "web")["pid"].clone();
    daemon.restart(true);
    daemon.await_phase("web", "Running");
    let now = status(&daemon, "web");
    assert_eq!((&now["pid"], &now["adopted"]), (&pid, &json!(true)));
    drop(guest);
    for name in ["web", "db", "off", "paused-by-host"] {
        daemon.delete(name);
    }
    before.same(&daemon);
    drop(boot);
}
