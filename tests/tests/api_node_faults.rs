//! The node daemon on a host that fails: a full disk, no free descriptors, a wrong clock, and a VM
//! that exceeds its memory. No other VM ends, and nothing is lost or left.
//!
//! `api_node_kill` and `api_node_random_kills` have the processes that are killed.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod node;

use lab::process::output;
use lab::sim::require_lab;
use lab::traffic::{Frames, all_returned, exchange};
use node::{Daemon, NOTICE, Traces, nic, until};
use rustix::process::{Resource, Rlimit, prlimit};
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

const FRAMES: Frames = Frames {
    count: 100,
    size: 590,
    window: 16,
};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:59:01";

/// A small file system. Dropping it unmounts it.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path) -> Self {
        fs::create_dir_all(at).unwrap();
        let words = ["-t", "tmpfs", "-o", "size=6m,mode=0700", "lab"];
        output(Command::new("mount").args(words).arg(at)).unwrap();
        Self(at.to_path_buf())
    }

    /// Takes all free space.
    fn fill(&self) {
        let mut file = File::create(self.0.join("filler")).unwrap();
        while file.write(&[0x5a; 4096]).is_ok() {}
    }

    fn release(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a failed test may still have files open there.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn phase(daemon: &Daemon, vm: &str) -> Value {
    let vm = daemon.api.get(&format!("/v1/vms/{vm}")).unwrap();
    vm["status"]["phase"].clone()
}

/// The database, the logs and the records of VMs are on the full disk.
#[test]
fn a_full_disk_refuses_new_vms_and_ends_none() {
    require_lab().unwrap();
    let mut daemon = Daemon::prepare("full");
    let disk = SmallDisk::mount(&daemon.state());
    daemon.start_again();
    let before = Traces::now(&daemon);
    let spec = daemon.tiny(&json!([nic("net0", MAC)]));
    daemon.api.done("PUT", "/v1/vms/old", Some(&spec)).unwrap();
    daemon.await_phase("old", "Running");

    disk.fill();
    let other = daemon.tiny(&json!([]));
    let refused = daemon.api.ask("PUT", "/v1/vms/new", Some(&other)).unwrap();
    assert!(refused.status >= 500, "{} {}", refused.status, refused.body);
    let text = refused.body.to_string();
    assert!(text.contains("No space left on device"), "{text}");
    assert_eq!(phase(&daemon, "old"), "Running");
    // The daemon restarts on the full disk and adopts the VM.
    daemon.restart(true);
    assert_eq!(
        daemon.await_phase("old", "Running")["status"]["adopted"],
        true
    );

    disk.release();
    daemon.api.done("PUT", "/v1/vms/new", Some(&other)).unwrap();
    daemon.await_phase("new", "Running");
    for vm in ["new", "old"] {
        daemon.delete(vm);
    }
    before.same(&daemon);
}

/// Clients hold as many connections as the daemon has descriptors.
#[test]
fn a_daemon_without_free_descriptors_recovers() {
    require_lab().unwrap();
    let daemon = Daemon::start("emfile");
    let spec = daemon.tiny(&json!([]));
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    daemon.await_phase("web", "Running");
    let open = fs::read_dir(format!("/proc/{}/fd", daemon.pid().as_raw_nonzero()))
        .unwrap()
        .count();
    let limit = u64::try_from(open).unwrap() + 4;
    let few = Rlimit {
        current: Some(limit),
        maximum: Some(4096),
    };
    let before = prlimit(Some(daemon.pid()), Resource::Nofile, few).unwrap();
    let held: Vec<UnixStream> = (0..16)
        .filter_map(|_| UnixStream::connect(daemon.api.socket()).ok())
        .collect();
    assert!(held.len() > 4, "{}", held.len());
    // Meanwhile the daemon cannot accept the others.
    std::thread::sleep(std::time::Duration::from_millis(300));
    drop(held);
    until("the daemon accepts again", || {
        daemon.api.get("/v1/version").is_ok()
    });
    assert_eq!(phase(&daemon, "web"), "Running");
    let refused = daemon.api.ask("PUT", "/v1/vms/two", Some(&spec)).unwrap();
    // The VM starts, or the error names the cause.
    let text = refused.body.to_string();
    assert!(
        refused.status == 201 || text.contains("Too many open files"),
        "{} {text}",
        refused.status
    );
    prlimit(Some(daemon.pid()), Resource::Nofile, before).unwrap();
    daemon.api.done("PUT", "/v1/vms/two", Some(&spec)).unwrap();
    daemon.await_phase("two", "Running");
}

/// The host's clock. Dropping it sets the right time again.
struct Clock {
    monotonic: Timespec,
    right: Timespec,
}

impl Clock {
    fn now() -> Self {
        Self {
            monotonic: clock_gettime(ClockId::Monotonic),
            right: clock_gettime(ClockId::Realtime),
        }
    }

    /// Sets the clock `seconds` beside the right time.
    fn set(&self, seconds: i64) {
        let passed = clock_gettime(ClockId::Monotonic).tv_sec - self.monotonic.tv_sec;
        let time = Timespec {
            tv_sec: self.right.tv_sec + passed + seconds,
            tv_nsec: 0,
        };
        clock_settime(ClockId::Realtime, time).unwrap();
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[test]
fn a_clock_that_is_set_ends_no_vm_and_no_wait() {
    require_lab().unwrap();
    const DAY: i64 = 24 * 3600;
    let mut daemon = Daemon::start("clock");
    let spec = daemon.small(&json!([nic("net0", MAC)]));
    daemon.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    daemon.await_console("web", "@lab ready");
    let pid = daemon.await_phase("web", "Running")["status"]["pid"].clone();
    let clock = Clock::now();
    for offset in [DAY, -DAY, 400 * DAY, 0] {
        clock.set(offset);
        let vm = daemon.await_phase("web", "Running");
        assert_eq!(vm["status"]["pid"], pid, "{offset}: {vm}");
        // Timers are monotonic: a pause and its end are served at once.
        for state in ["Paused", "Running"] {
            let wanted = json!({ "state": state });
            let path = "/v1/vms/web/state";
            daemon.api.done("PUT", path, Some(&wanted)).unwrap();
        }
        daemon.restart(true);
        let vm = daemon.await_phase("web", "Running");
        assert_eq!(vm["status"]["pid"], pid, "{offset}: {vm}");
    }
    daemon.delete("web");
}

/// The group of a VM at its limit: the kernel ends that VM, and no other.
#[test]
fn a_vm_that_exceeds_its_memory_is_restarted_and_another_does_not_notice() {
    require_lab().unwrap();
    let daemon = Daemon::start("memory");
    let before = Traces::now(&daemon);
    for (name, mac) in [("greedy", MAC), ("other", "52:54:5e:11:59:02")] {
        let mut spec = daemon.small(&json!([nic("net0", mac)]));
        spec["spec"]["restart"] = json!("Always");
        let path = format!("/v1/vms/{name}");
        daemon.api.done("PUT", &path, Some(&spec)).unwrap();
    }
    let (mut greedy, mut other) = (daemon.guest("greedy"), daemon.guest("other"));
    let former = daemon.await_phase("greedy", "Running")["status"]["pid"].clone();
    let neighbour = daemon.await_phase("other", "Running")["status"]["pid"].clone();
    let line = "frames 5000 256 16 eth0";
    other.send(line).unwrap();

    let group = daemon.groups().join("greedy");
    let number = |file: &str| -> u64 {
        let text = fs::read_to_string(group.join(file)).unwrap();
        text.trim().parse().unwrap()
    };
    let (used, usual) = (number("memory.current"), number("memory.max"));
    println!("{used} of {usual} bytes used");
    assert!(used < 256 << 20, "{used}");
    fs::write(group.join("memory.max"), (used + (8 << 20)).to_string()).unwrap();
    // Pages of guest memory that it has not touched yet.
    greedy.command("memory-check 64").unwrap_err();

    let mut vm = Value::Null;
    until("it is started again", || {
        vm = daemon.api.get("/v1/vms/greedy").unwrap();
        vm["status"]["phase"] == "Running" && vm["status"]["pid"] != former
    });
    let end = &vm["status"]["last_end"];
    assert_eq!(end["reason"], "Killed", "{vm:#}");
    let detail = end["detail"].as_str().unwrap();
    assert!(detail.contains("memory ran out"), "{detail}");
    // In a new group.
    assert_eq!(number("memory.max"), usual);
    exchange(&mut daemon.guest("greedy"), "eth0", FRAMES).unwrap();

    let said = other.answer(line, NOTICE).unwrap();
    all_returned(&said, 5000).unwrap();
    let vm = daemon.await_phase("other", "Running");
    assert_eq!(vm["status"]["pid"], neighbour, "{vm:#}");
    for name in ["greedy", "other"] {
        daemon.delete(name);
    }
    before.same(&daemon);
}
