//! The sandbox of the daemon's VMs: what a process sees whose guest has captured it, and its cost.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod node;
mod tls_files;

use lab::api::Client;
use lab::node::Node;
use lab::sim::{SimDevice, require_lab};
use node::{Daemon, NOTICE, Traces, nic, until};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tls_files::{ADDRESS, Files, free_port};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:57:71";
const OTHER_MAC: &str = "52:54:5e:11:57:72";
/// The start of the default range of users.
const FIRST: u32 = 1_900_000_000;
/// The environment of a VM's process.
const VARIABLES: [&str; 4] = [
    "BELLHOP_VM",
    "BELLHOP_LOG_FILE",
    "BELLHOP_SECCOMP",
    "RUST_BACKTRACE",
];

/// The namespaces of a VM. Its user and time namespaces are those of the host.
const NAMESPACES: [&str; 6] = ["cgroup", "ipc", "mnt", "net", "pid", "uts"];

/// The attempts of `lab-captive`, beside one for each of its targets, and how many of them a filter
/// ends.
const ATTEMPTS: usize = 56;
const ENDED: usize = 29;
/// Kinds of descriptors of a VMM with a NIC and disks.
const DESCRIPTORS: [&str; 9] = [
    "/dev/vhost-vdpa-",
    "/memfd:",
    "anon_inode:kvm-vm",
    "anon_inode:kvm-vcpu",
    "anon_inode:[io_uring]",
    "anon_inode:[eventfd]",
    "anon_inode:[eventpoll]",
    "anon_inode:[timerfd]",
    "socket:[]",
];

fn pid(vm: &Value) -> u64 {
    vm["status"]["pid"].as_u64().unwrap()
}

/// A file of `/proc/PID/status` as its fields.
fn status(pid: u64) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

fn namespaces(pid: u64) -> [PathBuf; 6] {
    NAMESPACES.map(|kind| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap())
}

/// Two VMs that run; the first has a NIC.
fn two(daemon: &Daemon) -> [Value; 2] {
    let vms = [("one", json!([nic("net0", MAC)]), 1), ("two", json!([]), 2)];
    vms.map(|(name, nics, cpus)| {
        let path = format!("/v1/vms/{name}");
        let mut spec = daemon.tiny(&nics);
        spec["spec"]["cpus"] = json!(cpus);
        daemon.api.done("PUT", &path, Some(&spec)).unwrap();
        daemon.await_phase(name, "Running")
    })
}

fn delete(daemon: &Daemon) {
    daemon.delete("one");
    daemon.delete("two");
}

#[test]
fn each_vm_has_its_own_user_and_namespaces_and_no_privilege() {
    require_lab().unwrap();
    let daemon = Daemon::start("jail");
    let before = Traces::now(&daemon);
    let vms = two(&daemon);
    let of_daemon = u64::try_from(daemon.pid().as_raw_pid()).unwrap();
    // The identity of a namespace names its kind.
    let all = [of_daemon, pid(&vms[0]), pid(&vms[1])].map(namespaces);
    let different: BTreeSet<&PathBuf> = all.iter().flatten().collect();
    assert_eq!(different.len(), all.len() * NAMESPACES.len(), "{all:#?}");
    let mut others = Vec::new();
    for ((vm, user), weight) in vms.iter().zip(FIRST..).zip(["100", "200"]) {
        let pid = pid(vm);
        let status = status(pid);
        let ids = [user; 4].map(|id| id.to_string()).join("\t");
        for (field, wanted) in [
            ("Uid", ids.as_str()),
            ("Gid", ids.as_str()),
            ("Groups", ""),
            ("CapPrm", "0000000000000000"),
            ("CapEff", "0000000000000000"),
            ("CapInh", "0000000000000000"),
            ("CapBnd", "0000000000000000"),
            ("CapAmb", "0000000000000000"),
            ("NoNewPrivs", "1"),
        ] {
            assert_eq!(status[field], wanted, "{field}");
        }
        assert!(status["NSpid"].ends_with("\t1"), "{}", status["NSpid"]);
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        let names = environment.split_terminator('\0');
        let names = names.map(|variable| variable.split('=').next().unwrap());
        for name in names {
            assert!(VARIABLES.contains(&name), "{name}");
        }
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let core = limits
            .lines()
            .find(|line| line.starts_with("Max core file size"));
        assert!(core.unwrap().contains(" 0 "), "{limits}");
        // Its root directory, which /proc shows to root only.
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        let mut names: Vec<_> = fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names.retain(|name| name != "lab");
        assert_eq!(names, ["dev", "proc", "sys", "tmp"]);
        for other in &vms {
            let socket = Path::new(other["status"]["console"]["socket"].as_str().unwrap());
            let inside = root.join(socket.strip_prefix("/").unwrap());
            assert!(socket.exists(), "{}", socket.display());
            assert_eq!(inside.exists(), other == vm, "{}", inside.display());
        }
        let log = Path::new(vm["status"]["log"].as_str().unwrap());
        assert_eq!(log.metadata().unwrap().uid(), user);
        let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        assert_eq!(score.trim(), "100");
        // 32 MiB for the guest, and the overhead.
        let group = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let group = group
            .trim()
            .strip_prefix("0::")
            .unwrap()
            .trim_start_matches('/');
        let group = Path::new("/sys/fs/cgroup").join(group);
        let limit = fs::read_to_string(group.join("memory.max")).unwrap();
        let limit: u64 = limit.trim().parse().unwrap();
        assert!((512 << 20..600 << 20).contains(&limit), "{limit}");
        for (file, wanted) in [("pids.max", "512"), ("cpu.weight", weight)] {
            let value = fs::read_to_string(group.join(file)).unwrap();
            assert_eq!(value.trim(), wanted, "{file}");
        }
        let other = Command::new("sleep").arg("1000").spawn().unwrap();
        fs::write(group.join("cgroup.procs"), other.id().to_string()).unwrap();
        others.push(other);
    }
    delete(&daemon);
    for mut other in others {
        let killed = other.wait().unwrap().signal();
        assert_eq!(killed, Some(9), "the group ends with all its processes");
    }
    before.same(&daemon);
}

/// A VM with a NIC and two disks that belong to root; the second disk is read-only.
fn with_disks(node: &Node, name: &str, mac: &str, disks: &[PathBuf; 2]) -> Value {
    let mut body = node.tiny(&json!([nic("net0", mac)])).unwrap();
    body["spec"]["disks"] = json!([
        { "path": disks[0] },
        { "path": disks[1], "readonly": true },
    ]);
    let path = format!("/v1/vms/{name}");
    node.api.done("PUT", &path, Some(&body)).unwrap();
    node.await_phase(name, "Running").unwrap()
}

#[test]
fn a_captured_process_reaches_nothing() {
    require_lab().unwrap();
    log_all_records();
    let files = Files::new();
    let port = free_port();
    let node = files.node("captive", port);
    let disks = ["disk", "disk-ro", "other", "other-ro"].map(|name| files.path(name));
    for disk in &disks {
        fs::write(disk, vec![0; 1 << 20]).unwrap();
        fs::set_permissions(disk, PermissionsExt::from_mode(0o600)).unwrap();
    }
    let [disk, read_only, of_other @ ..] = disks.clone();
    let vms = [
        with_disks(&node, "one", MAC, &[disk.clone(), read_only]),
        with_disks(&node, "two", OTHER_MAC, &of_other),
    ];
    let path = |vm: &Value, pointer: &str| {
        let path = vm["status"].pointer(pointer).and_then(Value::as_str);
        PathBuf::from(path.unwrap_or_else(|| panic!("no {pointer} in {vm:#}")))
    };
    let console = path(&vms[0], "/console/socket");
    let other = path(&vms[1], "/console/socket");
    let memory = format!("/proc/{}/mem", pid(&vms[1]));
    // All of them exist for root on the host: `lab-captive` checks it.
    let targets = [
        files.path("node.key"),
        files.path("tokens"),
        files.path("token"),
        node.directory().join("state/node.redb"),
        node.api.socket().to_owned(),
        other.with_file_name("api.socket"),
        path(&vms[1], "/console/log"),
        path(&vms[1], "/log"),
        path(&vms[1], "/nic_devices/0/character_device"),
        other,
        memory.into(),
        format!("/proc/{}/environ", node.pid()).into(),
        "/dev/mem".into(),
        "/dev/kmsg".into(),
        "/sys/fs/cgroup/cgroup.procs".into(),
        "/etc/passwd".into(),
        "/etc/shadow".into(),
        format!("{ADDRESS}:{port}").into(),
    ];
    let targets = targets.iter().chain(&of_other);
    let before = records("comm=\"lab-captive\"").len();
    let captive = Command::new(env!("CARGO_BIN_EXE_lab-captive"))
        .args([pid(&vms[0]).to_string(), FIRST.to_string()])
        .arg(console.parent().unwrap())
        .arg(format!("{},{}", node.pid(), pid(&vms[1])))
        .args(targets.clone())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&captive.stdout).into_owned();
    let said = String::from_utf8_lossy(&captive.stderr);
    assert!(captive.status.success(), "{text}{said}");
    let lines = |start: &str, end: &str| {
        let lines = text.lines().filter(|line| line.starts_with(start));
        lines.filter(|line| line.ends_with(end)).count()
    };
    assert!(!text.contains("WRONG"), "{text}{said}");
    let attempts = ATTEMPTS + targets.count();
    assert_eq!(
        [lines("jail ", ""), lines("vmm ", "")],
        [attempts; 2],
        "{text}"
    );
    // It has the descriptors of a VMM.
    for kind in DESCRIPTORS {
        assert!(
            lines(&format!("descriptor {kind}"), "") > 0,
            "{kind}: {text}"
        );
    }
    // The filters end calls that no VMM makes, and the kernel logs each.
    let ended = lines("vmm ", ": ended by a filter");
    assert_eq!(ended, ENDED, "{text}");
    until("the kernel has logged each", || {
        records("comm=\"lab-captive\"").len() == before + ended
    });
    for call in [
        libc::SYS_ptrace,
        libc::SYS_unshare,
        libc::SYS_setuid,
        libc::SYS_pidfd_getfd,
        libc::SYS_fchmod,
        libc::SYS_openat,
        libc::SYS_sendto,
        libc::SYS_io_uring_setup,
    ] {
        await_record("comm=\"lab-captive\"", call);
    }
    // Nothing has changed outside.
    assert_eq!(disk.metadata().unwrap().mode() & 0o7777, 0o600);
    for (vm, name) in vms.iter().zip(["one", "two"]) {
        let now = node.await_phase(name, "Running").unwrap();
        assert_eq!(pid(vm), pid(&now));
    }
}

/// Lets the kernel log each denied call. It drops lines if there are many.
fn log_all_records() {
    fs::write("/proc/sys/kernel/printk_ratelimit", "0\n").unwrap();
}

/// Waits until the kernel has logged that a filter ended a process for this call. The line contains
/// the words in `process`.
#[track_caller]
fn await_record(process: &str, call: libc::c_long) {
    let call = format!(" syscall={call} ");
    until(
        &format!("a line with type=1326, {process} and{call}"),
        || records(process).iter().any(|line| line.contains(&call)),
    );
}

/// The lines of the kernel's log about calls that a filter denied. They contain the words in
/// `process`.
fn records(process: &str) -> Vec<String> {
    let log = Command::new("dmesg").output().unwrap();
    let log = String::from_utf8_lossy(&log.stdout);
    let lines = log.lines().filter(|line| line.contains("type=1326"));
    let lines = lines.filter(|line| line.contains(process));
    lines.map(str::to_owned).collect()
}

/// Replaces the next system call of another process's thread. A filter must end the process.
fn inject(thread: libc::pid_t, call: libc::c_long) {
    /// The offset of `orig_rax` in `struct user`.
    const ORIG_RAX: usize = 15 * 8;
    let trace = |request: u32, address: usize, data: libc::c_long| {
        // SAFETY: these requests touch no memory of this process.
        let done = unsafe { libc::ptrace(request, thread, address, data) };
        assert_eq!(done, 0, "{request}: {}", std::io::Error::last_os_error());
    };
    let stopped = || {
        let mut status = 0;
        // SAFETY: waits for a thread that this one traces, and writes to a local variable.
        let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
        assert_eq!(waited, thread, "{}", std::io::Error::last_os_error());
        status
    };
    trace(libc::PTRACE_ATTACH, 0, 0);
    assert!(libc::WIFSTOPPED(stopped()));
    // To the entry of its next call.
    trace(libc::PTRACE_SYSCALL, 0, 0);
    let status = stopped();
    assert!(
        libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == libc::SIGTRAP,
        "{status:#x}"
    );
    trace(libc::PTRACE_POKEUSER, ORIG_RAX, call);
    trace(libc::PTRACE_CONT, 0, 0);
    let status = stopped();
    assert!(
        libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSYS,
        "{status:#x}"
    );
}

/// The thread of a process with this name.
fn thread_of(pid: u64, name: &str) -> libc::pid_t {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut tasks = tasks.map(|task| task.unwrap().path());
    let named = |task: &PathBuf| fs::read_to_string(task.join("comm")).unwrap().trim() == name;
    let found = tasks.find(named).unwrap();
    found
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .parse()
        .unwrap()
}

/// The code of a captured vCPU thread makes a call that no VMM makes.
#[test]
fn a_forbidden_call_ends_the_vm_and_the_cause_is_reported() {
    require_lab().unwrap();
    log_all_records();
    let daemon = Daemon::start("forbidden");
    let before = Traces::now(&daemon);
    let vms = two(&daemon);
    inject(thread_of(pid(&vms[0]), "vcpu0"), libc::SYS_unshare);
    await_record(&format!(" pid={} ", pid(&vms[0])), libc::SYS_unshare);
    let mut vm = Value::Null;
    until("its end is reported", || {
        vm = daemon.api.get("/v1/vms/one").unwrap();
        vm["status"]["last_end"] != Value::Null
    });
    let end = &vm["status"]["last_end"];
    assert_eq!(end["reason"], "Killed", "{vm:#}");
    let detail = end["detail"].as_str().unwrap();
    assert!(detail.contains("seccomp filter"), "{detail}");
    assert_eq!(pid(&daemon.await_phase("two", "Running")), pid(&vms[1]));
    delete(&daemon);
    before.same(&daemon);
}

#[test]
fn disks_snapshots_and_upgrades_work_inside() {
    require_lab().unwrap();
    let daemon = Daemon::start("inside");
    let vms = two(&daemon);
    // Only root may use it.
    let disk = daemon.beside("img");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    fs::set_permissions(&disk, PermissionsExt::from_mode(0o600)).unwrap();
    let body = json!({ "path": disk });
    daemon
        .api
        .done("PUT", "/v1/vms/one/disks/data", Some(&body))
        .unwrap();
    let inside = PathBuf::from(format!("/proc/{}/root{}", pid(&vms[0]), disk.display()));
    assert_eq!(inside.metadata().unwrap().uid(), FIRST);
    assert_eq!(disk.metadata().unwrap().uid(), 0);
    let snapshot = daemon.beside("snapshot");
    let body = json!({ "path": snapshot });
    daemon
        .api
        .done("POST", "/v1/vms/two/snapshot", Some(&body))
        .unwrap();
    assert_eq!(snapshot.join("state").metadata().unwrap().uid(), 0);
    let body = json!({ "program": std::env::var_os("BELLHOP").unwrap().to_str().unwrap() });
    let path = "/v1/vms/one/upgrade";
    let mut operation = daemon.api.done("POST", path, Some(&body)).unwrap();
    let path = format!("/v1/operations/{}", operation["id"].as_str().unwrap());
    let start = Instant::now();
    while operation["phase"] == "running" {
        assert!(start.elapsed() < NOTICE, "{operation:#}");
        std::thread::sleep(Duration::from_millis(50));
        operation = daemon.api.get(&path).unwrap();
    }
    assert_eq!(operation["phase"], "done", "{operation:#}");
    let now = daemon.await_phase("one", "Running");
    assert_eq!(pid(&now), pid(&vms[0]));
    assert_eq!(status(pid(&vms[0]))["CapEff"], "0000000000000000");
    // Its program has inherited the rings of that disk and of three more.
    let more = ["b", "c", "d", "e"].map(|name| daemon.beside(name));
    let plug = |disk: &PathBuf, status| {
        fs::write(disk, vec![0; 1 << 20]).unwrap();
        let name = disk.extension().unwrap().to_str().unwrap();
        let path = format!("/v1/vms/one/disks/{name}");
        let body = json!({ "path": disk });
        let answer = daemon.api.ask("PUT", &path, Some(&body)).unwrap();
        assert_eq!(answer.status, status, "{}", answer.body);
        answer.body.to_string()
    };
    for disk in &more[..3] {
        plug(disk, 201);
    }
    let refused = plug(&more[3], 422);
    for words in ["no io_uring is left", "unplug a disk"] {
        assert!(refused.contains(words), "{refused}");
    }
    delete(&daemon);
    for disk in more {
        fs::remove_file(disk).unwrap();
    }
    fs::remove_file(disk).unwrap();
    fs::remove_dir_all(snapshot).unwrap();
}

/// The guest drives nothing, so it releases a disk at the reset only, late and while another daemon
/// runs than the one that was asked.
#[test]
fn removed_disks_and_former_devices_leave_the_sandbox() {
    require_lab().unwrap();
    // Before the daemon: a device in use cannot be deleted.
    let device = SimDevice::net("former", MAC, 1500).unwrap();
    let other = SimDevice::net("later", MAC, 1500).unwrap();
    let mut daemon = Daemon::start("leave");
    let [link, disk] = ["nic", "img"].map(|name| daemon.beside(name));
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(device.path(), &link).unwrap();
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let mut spec = daemon.tiny(&json!([{ "id": "net0", "path": link }]));
    spec["spec"]["disks"] = json!([{ "id": "data", "path": disk }]);
    daemon.api.done("PUT", "/v1/vms/one", Some(&spec)).unwrap();
    let vm = daemon.await_phase("one", "Running");
    let inside = |path: &Path| {
        let path = format!("/proc/{}/root{}", pid(&vm), path.display());
        fs::symlink_metadata(path)
    };
    let is_device = |path: &Path| inside(path).is_ok_and(|found| found.rdev() != 0);
    assert!(is_device(&link));
    assert_eq!(inside(&disk).unwrap().len(), 1 << 20);

    let path = "/v1/vms/one/disks/data";
    let asked = daemon.api.ask("DELETE", path, None).unwrap();
    assert_eq!(asked.status, 202, "{}", asked.body);
    daemon.restart(true);
    daemon.await_phase("one", "Running");
    assert_eq!(inside(&disk).unwrap().len(), 1 << 20, "the guest has it");
    daemon.api.done("POST", "/v1/vms/one/reset", None).unwrap();
    // The mount point stays, an empty file.
    until("the image is hidden", || inside(&disk).unwrap().len() == 0);

    assert!(is_device(&link) && !is_device(other.path()));
    let body = json!({ "path": other.path() });
    let path = "/v1/vms/one/nics/net0";
    daemon.api.done("PATCH", path, Some(&body)).unwrap();
    assert!(!is_device(&link) && is_device(other.path()));

    // As a captured process could leave its directory.
    let state = Path::new(vm["status"]["log"].as_str().unwrap());
    let state = state.parent().unwrap();
    let hard = json!({ "state": "Stopped", "mode": "hard" });
    let path = "/v1/vms/one/state";
    daemon.api.done("PUT", path, Some(&hard)).unwrap();
    daemon.await_phase("one", "Stopped");
    for name in ["vmm.log", "vmm.log.1", "console.log", "console.log.1"] {
        let _ = fs::remove_file(state.join(name));
        fs::create_dir_all(state.join(name).join("nested")).unwrap();
    }
    fs::set_permissions(state, PermissionsExt::from_mode(0o600)).unwrap();
    let start = json!({ "state": "Running" });
    daemon.api.done("PUT", path, Some(&start)).unwrap();
    daemon.await_phase("one", "Running");
    assert!(state.join("console.log").metadata().unwrap().is_file());
    daemon.delete("one");
    fs::remove_file(link).unwrap();
    fs::remove_file(disk).unwrap();
}

/// A VM of the tiny kernel in a control group of its own.
struct Measured {
    child: Child,
    group: PathBuf,
    directory: PathBuf,
}

impl Measured {
    /// Starts the VM, in a sandbox or not.
    fn start(number: u32, confined: bool) -> Self {
        let name = format!("lab-cost-{number}-{confined}");
        let directory = std::env::temp_dir().join(&name);
        fs::create_dir_all(&directory).unwrap();
        std::os::unix::fs::chown(&directory, Some(FIRST), Some(FIRST)).unwrap();
        let group = Path::new("/sys/fs/cgroup").join(name);
        fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory").unwrap();
        fs::create_dir(&group).unwrap();
        let client = Client::new(&directory.join("api.socket"));
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo 0 >\"$0\" && exec \"$@\""])
            .arg(group.join("cgroup.procs"))
            .arg(std::env::var_os("BELLHOP").unwrap())
            .args(["run", "--memory", "32M", "--kernel"])
            .arg(lab::tiny::write_kernel(&directory).unwrap())
            .arg("--api-socket")
            .arg(client.socket());
        if confined {
            command
                .args(["--sandbox", "on", "--sandbox-user"])
                .arg(FIRST.to_string());
        } else {
            command
                .args(["--sandbox", "off"])
                .env("BELLHOP_SECCOMP", "off");
        }
        let child = command.spawn().unwrap();
        until("the VM runs", || {
            client
                .get("/v1/vm")
                .is_ok_and(|vm| vm["state"] == "Running")
        });
        Self {
            child,
            group,
            directory,
        }
    }

    /// Ends the VM. Returns the bytes of its process and of the kernel for it, such as for
    /// namespaces, filters and io_urings. The guest's memory and the program's file do not count.
    fn end(mut self) -> u64 {
        let stat = fs::read_to_string(self.group.join("memory.stat")).unwrap();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        fs::remove_dir(&self.group).unwrap();
        fs::remove_dir_all(&self.directory).unwrap();
        let bytes = |name: &str| -> u64 {
            let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
            let field = fields.find(|field| field.0 == name).unwrap();
            field.1.parse().unwrap()
        };
        bytes("anon") + bytes("kernel")
    }
}

#[test]
fn a_sandbox_takes_little_memory() {
    require_lab().unwrap();
    let start = |number| [false, true].map(|confined| Measured::start(number, confined));
    let vms: Vec<[Measured; 2]> = (0..3).map(start).collect();
    // The kernel updates the statistics of a group every 2 s, and closes io_urings late.
    std::thread::sleep(Duration::from_secs(5));
    let bytes = vms.into_iter().map(|vms| vms.map(Measured::end));
    let least = bytes.reduce(|a, b| [a[0].min(b[0]), a[1].min(b[1])]);
    let [plain, confined] = least.unwrap();
    println!("{plain} bytes without a sandbox, {confined} with one");
    assert!(confined < plain + 300_000, "{plain} {confined}");
}
