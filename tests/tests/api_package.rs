//! The deb in the lab host, under a real systemd: installation, reload, upgrade, removal and purge.
//!
//! The package holds the lab's build of `bellhop`; releases use the same recipe. dpkg needs no
//! network for it.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod bridge;
#[path = "swnic/cable.rs"]
mod cable;
#[path = "package/packages.rs"]
mod packages;
#[path = "package/systemd.rs"]
mod systemd;

use cable::{Cable, ENDS};
use lab::api::Client;
use lab::files;
use lab::node::until;
use lab::process::output;
use lab::sim::require_lab;
use lab::tiny;
use packages::{DPKG, Packages};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use systemd::Systemd;
use vdpa_mgmt::nic::server;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:59:01";
const UNIT: &str = "bellhop.service";
const OPTIONS: &str = "/etc/bellhop/bellhop.toml";
const SOCKET: &str = "/run/bellhop/node.socket";
/// The exposure of the daemon's unit is at most 5.6 (systemd-analyze of systemd 250 and later).
const EXPOSURE: &str = "--threshold=56";
/// A user and a group without rights.
const UNPRIVILEGED: &str = "65534";

/// The number of the package's group, if there is one.
fn group() -> Option<u32> {
    let groups = files::read_text(Path::new("/etc/group")).unwrap();
    let line = groups.lines().find(|line| line.starts_with("bellhop:"))?;
    line.split(':').nth(2)?.parse().ok()
}

/// Group and mode of a file.
fn access(path: impl AsRef<Path>) -> (u32, u32) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.gid(), metadata.mode() & 0o777)
}

/// Files with the package's name in the directories of packages and services.
fn leftovers() -> String {
    let mut find = Command::new("find");
    find.args(["/etc", "/run", "/var/lib/bellhop", "/var/lib/systemd"]);
    find.args(["-xdev", "-name", "*bellhop*"]);
    let output = find.output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The processes of a NIC at a port work with the unit's address families and system calls.
fn a_nic_at_a_port_is_created_and_repaired() {
    let _cable = Cable::add();
    let daemon = Client::new(Path::new(SOCKET));
    let nic = json!({ "name": "lab-sw0", "from": "software", "port": ENDS[0], "queue": 0 });
    daemon.done("POST", "/v1/nics", Some(&nic)).unwrap();
    let killed = server::holder("lab-sw0").unwrap().unwrap();
    kill_process(killed, Signal::KILL).unwrap();
    until("the NIC has another process", || {
        let holder = server::holder("lab-sw0").unwrap();
        holder.is_some_and(|pid| pid != killed)
    })
    .unwrap();
    daemon.done("DELETE", "/v1/nics/lab-sw0", None).unwrap();
}

#[test]
fn an_upgrade_keeps_vms_and_a_purge_leaves_nothing() {
    require_lab().unwrap();
    // Directories of other tests in this lab host.
    let before = leftovers();
    let packages = Packages::build();
    let host = Systemd::start();
    let install = |version: &str| {
        let file = packages.file(version);
        host.done(&[&DPKG[..], &["--install", &file]].concat())
    };
    install("1");
    assert_eq!(host.property(UNIT, "ActiveState"), "active");
    assert_eq!(host.property(UNIT, "UnitFileState"), "enabled");
    let daemon = host.property(UNIT, "MainPID");
    let files = host.done(&["dpkg", "--listfiles", "bellhop"]);
    let units = files.lines().filter(|file| file.ends_with(".service"));
    // With the drop-in of the manual.
    let drop_in = Path::new("/etc/systemd/system/bellhop.service.d");
    let example = "../docs/examples/bellhop.service.d/limits.conf";
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join(example);
    files::create_directory(drop_in).unwrap();
    files::copy(&example, &drop_in.join("limits.conf")).unwrap();
    host.done(&["systemctl", "daemon-reload"]);
    assert_eq!(
        host.property(UNIT, "LimitMEMLOCK"),
        (64_u64 << 30).to_string()
    );
    for unit in units {
        // The lab host has no manual.
        let verified = host.run(&["systemd-analyze", "verify", "--man=no", unit]);
        let said = String::from_utf8(verified.stderr).unwrap();
        assert!(verified.status.success() && said.is_empty(), "{said}");
    }
    fs::remove_dir_all(drop_in).unwrap();
    host.done(&["systemctl", "daemon-reload"]);
    let installed = format!("/usr/lib/systemd/system/{UNIT}");
    let exposure = ["systemd-analyze", "security", "--offline=yes", EXPOSURE];
    host.done(&[&exposure[..], &[&installed]].concat());
    // The daemon binds functions and has control groups, and cannot change the kernel's settings.
    // This systemd, whose mounts are not those of a host, leaves the rest of /sys writable.
    for (path, expected) in [
        ("/sys/bus/pci/drivers_probe", true),
        (
            "/sys/fs/cgroup/system.slice/bellhop.service/cgroup.procs",
            true,
        ),
        ("/sys/fs/cgroup/cgroup.procs", false),
        ("/proc/sys/kernel/panic", false),
    ] {
        let enter = ["nsenter", "--mount", "--target", &daemon];
        let writable = host.run(&[&enter[..], &["test", "-w", path]].concat());
        assert_eq!(writable.status.success(), expected, "{path}");
    }

    // A software NIC as a service: it exists until the service is stopped.
    let options = Path::new("/etc/bellhop/swnic");
    files::create_directory(options).unwrap();
    let words = "BELLHOP_SWNIC=--tap lab-sw0 --mtu 1400\n";
    fs::write(options.join("lab-sw0"), words).unwrap();
    let of_nic = "bellhop-swnic@lab-sw0.service";
    let nic = Path::new("/sys/bus/vdpa/devices/lab-sw0");
    output(Command::new("modprobe").arg("tun")).unwrap();
    // A killed command has left a record without a device.
    let record = Path::new("/run/bellhop/nics/lab-sw0.json");
    let service = json!({
        "tap": "lab-sw0", "is_own_tap": true, "mac": [2, 0, 0, 0, 0, 7], "mtu": 1500, "features": 0,
    });
    let left = json!({
        "version": 1, "name": "lab-sw0", "from": "software", "state": "making",
        "steps": [{ "step": "serve", "service": service }],
    });
    fs::write(record, left.to_string()).unwrap();
    for _ in 0..2 {
        host.done(&["systemctl", "start", of_nic]);
        until("the service creates its NIC", || nic.exists()).unwrap();
        host.done(&["systemctl", "stop", of_nic]);
        assert!(!nic.exists());
        assert_eq!(host.property(of_nic, "Result"), "success");
    }
    fs::remove_dir_all(options).unwrap();

    a_nic_at_a_port_is_created_and_repaired();

    // The group may use the socket; others may not.
    let gid = group().unwrap();
    assert_eq!(access(SOCKET), (gid, 0o660));
    let user = [
        "setpriv",
        "--clear-groups",
        "--reuid",
        UNPRIVILEGED,
        "--regid",
    ];
    let in_group =
        |gid: &str, words: &[&str]| host.run(&[&user[..], &[gid, "bellhop"], words].concat());
    let member = |words: &[&str]| {
        let done = in_group(&gid.to_string(), words);
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{words:?}: {errors}");
        String::from_utf8(done.stdout).unwrap()
    };
    member(&["vm", "list"]);
    assert!(!in_group(UNPRIVILEGED, &["vm", "list"]).status.success());

    let kernel = tiny::write_kernel(&packages.directory).unwrap();
    let nic = format!("from=vdpasim_net,mac={MAC}");
    let create = ["vm", "create", "web", "--memory", "32M", "--nic", &nic];
    let kernel = ["--kernel", kernel.to_str().unwrap()];
    member(&[&create[..], &kernel[..]].concat());
    let show = || -> Value {
        let shown = member(&["vm", "show", "web", "-o", "json"]);
        let mut shown: Value = serde_json::from_str(&shown).unwrap();
        shown["vm"].take()
    };
    until("the VM runs", || show()["status"]["phase"] == "Running").unwrap();
    let vm = show();
    let device = vm["status"]["nic_devices"][0]["character_device"]
        .as_str()
        .unwrap();
    until("udev applies the rule", || access(device) == (gid, 0o660)).unwrap();

    host.done(&["systemctl", "reload", UNIT]);
    assert_eq!(host.property(UNIT, "ActiveState"), "active");
    assert_eq!(host.property(UNIT, "MainPID"), daemon);

    // An upgrade restarts the daemon alone, and keeps the administrator's options.
    let options = "# changed\ngroup = \"bellhop\"\nmachine_log_level = \"info\"\n";
    files::write(Path::new(OPTIONS), options).unwrap();
    install("2");
    assert_eq!(host.property(UNIT, "ActiveState"), "active");
    assert_ne!(host.property(UNIT, "MainPID"), daemon);
    assert_eq!(fs::read_to_string(OPTIONS).unwrap(), options);
    until("the VM is adopted", || {
        show()["status"]["phase"] == "Running"
    })
    .unwrap();
    let adopted = show();
    assert_eq!(adopted["status"]["pid"], vm["status"]["pid"], "{adopted:#}");
    assert_eq!(adopted["status"]["adopted"], true, "{adopted:#}");

    // A removal would leave a running VM without its daemon.
    let remove = host.run(&["dpkg", "--remove", "bellhop"]);
    let said = String::from_utf8(remove.stderr).unwrap();
    assert!(said.contains("virtual machines are running"), "{said}");
    assert!(!remove.status.success());
    assert_eq!(show()["status"]["pid"], vm["status"]["pid"]);
    member(&["vm", "delete", "web", "--force"]);

    host.done(&["dpkg", "--remove", "bellhop"]);
    assert!(Path::new(OPTIONS).exists());
    // Installed again, the daemon runs again.
    install("2");
    assert_eq!(host.property(UNIT, "ActiveState"), "active");
    host.done(&["dpkg", "--purge", "bellhop"]);
    assert_eq!(host.property(UNIT, "LoadState"), "not-found");
    // The purge also removes an empty directory that another test has left.
    let left = leftovers();
    let new = left
        .lines()
        .filter(|line| before.lines().all(|old| old != *line));
    assert_eq!(new.collect::<Vec<_>>(), [""; 0]);
    assert_eq!(group(), None);
    for file in files.lines().map(Path::new) {
        assert!(file.is_dir() || !file.exists(), "{}", file.display());
    }
    assert!(!Path::new("/sys/bus/vdpa/devices/web.net0").exists());
}

#[test]
fn a_package_is_stripped_and_has_manual_completions_and_debug_information() {
    require_lab().unwrap();
    let packages = Packages::build();
    let contents = |file: &str| {
        let bytes = output(Command::new("dpkg-deb").args(["--contents", file])).unwrap();
        String::from_utf8(bytes).unwrap()
    };
    let files = contents(&packages.file("1"));
    for file in [
        "-rwxr-xr-x root/root",
        "./etc/bellhop/bellhop.toml\n",
        "./usr/lib/systemd/system/bellhop.service\n",
        "./usr/lib/udev/rules.d/60-bellhop.rules\n",
        "./usr/share/bash-completion/completions/bellhop\n",
        "./usr/share/doc/bellhop/copyright\n",
        "./usr/share/fish/vendor_completions.d/bellhop.fish\n",
        "./usr/share/man/man1/bellhop-vm-create.1.gz\n",
        "./usr/share/zsh/vendor-completions/_bellhop\n",
    ] {
        assert!(files.contains(file), "no {file} in\n{files}");
    }
    let debug = packages.path("bellhop-dbgsym_1_amd64.deb");
    let files = contents(debug.to_str().unwrap());
    assert!(files.contains("./usr/lib/debug/usr/bin/bellhop.debug\n"));

    let program = packages.path("tree/usr/bin/bellhop");
    let mut read = Command::new("readelf");
    read.args(["--wide", "--sections", "--string-dump=.gnu_debuglink"]);
    let sections = output(read.arg(&program)).unwrap();
    // The link ends with a checksum, which is no text.
    let sections = String::from_utf8_lossy(&sections);
    assert!(sections.contains("bellhop.debug"), "{sections}");
    assert!(!sections.contains(".symtab"), "{sections}");
    let version = output(Command::new(&program).arg("--version")).unwrap();
    assert!(String::from_utf8(version).unwrap().starts_with("bellhop "));
}
