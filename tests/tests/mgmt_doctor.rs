//! `bellhop doctor` on a real kernel, as root and as a user without rights.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lab::sim::{SimDevice, require_lab};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use serde_json::Value;

/// The user and the group that own nothing.
const UNPRIVILEGED: u32 = 65534;

fn doctor() -> Command {
    require_lab().unwrap();
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command.args(["doctor", "--json"]).stdin(Stdio::null());
    command
}

/// The report, after checking that the exit code matches it.
#[track_caller]
fn report(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.is_empty(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let missing = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .any(|finding| finding["state"] == "missing");
    assert_eq!(report["fit"], !missing);
    assert_eq!(output.status.code(), Some(i32::from(missing)), "{report:#}");
    report
}

#[track_caller]
fn finding<'a>(report: &'a Value, group: &str, name: &str) -> &'a Value {
    report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|finding| finding["group"] == group && finding["name"] == name)
        .unwrap_or_else(|| panic!("no {group} {name} in {report:#}"))
}

#[track_caller]
fn has(finding: &Value, key: &str, text: &str) {
    assert!(finding[key].to_string().contains(text), "{finding:#}");
}

#[test]
fn the_lab_host_is_fit() {
    let net = SimDevice::net("doctor", "02:5e:10:53:11:41", 1500).unwrap();
    let report = report(&mut doctor());
    assert_eq!(report["fit"], true, "{report:#}");
    for (group, name) in [
        ("kvm", "/dev/kvm"),
        ("kernel", "release"),
        ("kernel", "configuration"),
        ("modules", "vdpa"),
        ("modules", "vhost_vdpa"),
        ("modules", "vdpa_sim_net"),
        ("modules", "vduse"),
        ("modules", "tun"),
        ("swnic", "VDUSE API"),
        ("swnic", "UDP segmentation"),
        ("swnic", "AF_XDP"),
        ("swnic", "suspend"),
        ("rights", "CAP_NET_ADMIN"),
        ("rights", "network namespace"),
    ] {
        assert_eq!(finding(&report, group, name)["state"], "ok", "{report:#}");
    }
    has(
        finding(&report, "modules", "vhost_vdpa"),
        "found",
        "loaded (",
    );
    has(
        finding(&report, "iotlb", "vhost_vdpa"),
        "found",
        "IOTLB entries",
    );
    has(finding(&report, "swnic", "VDUSE API"), "found", "version 0");
    let device = finding(&report, "devices", net.name());
    assert_eq!(device["state"], "ok");
    has(device, "found", net.path().to_str().unwrap());
    has(device, "found", "no visible process holds it");

    let next = report["next"].as_array().unwrap();
    let last = next.last().unwrap().as_str().unwrap();
    assert!(last.contains("/dev/vhost-vdpa-"), "{last}");

    // It names the holder of the device and has not reset the device.
    let held = File::options()
        .read(true)
        .write(true)
        .open(net.path())
        .unwrap();
    let report = self::report(&mut doctor());
    let holder = format!("(PID {})", std::process::id());
    has(finding(&report, "devices", net.name()), "found", &holder);
    drop(held);
}

#[test]
fn the_limit_of_locked_memory_is_the_callers() {
    let limit = getrlimit(Resource::Memlock);
    let set = |current| {
        move || {
            let limit = Rlimit {
                current,
                maximum: limit.maximum,
            };
            Ok(setrlimit(Resource::Memlock, limit)?)
        }
    };
    let mut command = doctor();
    // SAFETY: needed to lower the limit of the child alone; setrlimit is a system call that may be
    // used between fork and exec.
    unsafe { command.pre_exec(set(Some(8 << 20))) };
    let low = report(&mut command);
    let found = finding(&low, "memlock", "RLIMIT_MEMLOCK");
    assert_ne!(found["state"], "ok");
    has(found, "found", "8192 KiB");
    has(found, "remedy", "LimitMEMLOCK=infinity");
}

/// A copy of the program in a place where any user may run it; removed when dropped.
struct Copy(PathBuf);

impl Copy {
    fn new() -> Self {
        let path = PathBuf::from(format!("/tmp/bellhop-doctor-{}", std::process::id()));
        fs::copy(std::env::var_os("BELLHOP").unwrap(), &path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        Self(path)
    }

    fn unprivileged_report(&self, gid: u32) -> Value {
        let mut command = Command::new(&self.0);
        command
            .args(["doctor", "--json"])
            .uid(UNPRIVILEGED)
            .gid(gid)
            .current_dir("/")
            .stdin(Stdio::null());
        report(&mut command)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A udev daemon with the test's rule; both go when dropped.
struct Udev(Child);

impl Udev {
    const RULES: &str = "/run/udev/rules.d/60-vhost-vdpa.rules";

    fn start(rule: &str) -> Self {
        fs::create_dir_all(Path::new(Self::RULES).parent().unwrap()).unwrap();
        fs::write(Self::RULES, format!("{rule}\n")).unwrap();
        let daemon = Command::new("/usr/lib/systemd/systemd-udevd")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let daemon = Self(daemon.unwrap());
        // Its socket exists before it listens to the kernel; a daemon that answers does listen.
        wait("udev's daemon", || {
            let ping = Command::new("udevadm")
                .args(["control", "--ping", "--timeout=1"])
                .stderr(Stdio::null())
                .status();
            ping.unwrap().success()
        });
        daemon
    }
}

impl Drop for Udev {
    fn drop(&mut self) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.0.wait();
        let _ = fs::remove_file(Self::RULES);
    }
}

#[track_caller]
fn wait(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(30), "no {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Doctor prints the rule for a user without rights. The rule gives devices to the group. A member
/// of the group may open one.
#[test]
fn the_suggested_rule_grants_an_unprivileged_user_access() {
    let copy = Copy::new();
    let net = SimDevice::net("norule", "02:5e:10:53:11:42", 1500).unwrap();
    let report = copy.unprivileged_report(UNPRIVILEGED);
    assert_eq!(report["fit"], false);
    let device = finding(&report, "devices", net.name());
    assert_eq!(device["state"], "missing");
    let remedy = device["remedy"].as_array().unwrap();
    let mut rules = remedy.iter().filter_map(Value::as_str);
    let rule = rules.find(|line| line.starts_with("ACTION==")).unwrap();
    let netadmin = finding(&report, "rights", "CAP_NET_ADMIN");
    assert_eq!(netadmin["state"], "warning");
    drop(net);

    let _udev = Udev::start(rule);
    let net = SimDevice::net("withrule", "02:5e:10:53:11:43", 1500).unwrap();
    let metadata = || fs::metadata(net.path()).unwrap();
    wait("group of the device", || metadata().mode() & 0o777 == 0o660);
    let report = copy.unprivileged_report(UNPRIVILEGED);
    let device = finding(&report, "devices", net.name());
    has(device, "remedy", "usermod -aG kvm ");
    let report = copy.unprivileged_report(metadata().gid());
    assert_eq!(finding(&report, "devices", net.name())["state"], "ok");
}

/// The basis of the udev rule: a vhost-vdpa device has no subsystem, so no rule can name it. The
/// rule matches its vDPA device.
#[test]
fn the_device_file_has_no_subsystem_and_its_vdpa_device_has() {
    let net = SimDevice::net("uevent", "02:5e:10:53:11:45", 1500).unwrap();
    let device = Path::new("/sys/bus/vdpa/devices").join(net.name());
    let file = device.join(net.path().file_name().unwrap());
    assert!(file.join("dev").exists());
    assert!(!file.join("subsystem").exists());
    let subsystem = fs::read_link(device.join("subsystem")).unwrap();
    assert_eq!(subsystem.file_name().unwrap(), "vdpa");
    let event = fs::read_to_string(device.join("uevent")).unwrap();
    assert!(event.contains("DRIVER=vhost_vdpa"), "{event}");
}

#[test]
fn the_table_has_the_same_findings() {
    let _net = SimDevice::net("table", "02:5e:10:53:11:44", 1500).unwrap();
    require_lab().unwrap();
    let output = Command::new(std::env::var_os("BELLHOP").unwrap())
        .arg("doctor")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    println!("{text}");
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("No required part is missing"), "{text}");
    assert!(!text.contains('\x1b'), "colours in a pipe: {text}");
}
