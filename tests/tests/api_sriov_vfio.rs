//! VMs of the node daemon with virtual functions of the SR-IOV rig by VFIO: bound and given back,
//! whatever happens to the daemon in between.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod end_to_end;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use end_to_end::{attached, created, deleted, spec, up};
use lab::node::{Node, until};
use lab::process::output;
use lab::sriov::{ManagedFunction, SriovNic, VirtualFunction};
use lab::traffic::{Frames, exchange_between};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use support::bellhop;
use vdpa_mgmt::topology;

const DEVICES: &str = "/sys/bus/pci/devices";
const NIC_DRIVER: &str = "virtio-pci";
const VFIO: &str = "vfio-pci";
const PATH: &str = "/v1/vms/web";
/// More lines than a request has.
const LINES_MAX: usize = 200;

/// What the daemon has, and what each PCI function is bound to. A function that was bound to
/// another driver meanwhile gets a new index for its interface.
struct Before {
    node: end_to_end::Before,
    functions: BTreeMap<String, [String; 2]>,
}

impl Before {
    fn now(node: &Node) -> Self {
        Self {
            node: end_to_end::Before::now(node),
            functions: functions(),
        }
    }

    #[track_caller]
    fn assert_same(&self, node: &Node, when: &str) {
        assert_eq!(functions(), self.functions, "{when}\n{}", node.said());
        self.node.assert_same_node(node, when);
    }
}

/// Driver and driver override of all PCI functions.
fn functions() -> BTreeMap<String, [String; 2]> {
    let all = names(Path::new(DEVICES)).into_iter().map(|address| {
        let directory = Path::new(DEVICES).join(&address);
        let driver = fs::read_link(directory.join("driver")).unwrap_or_default();
        let only = fs::read_to_string(directory.join("driver_override")).unwrap();
        (address, [driver.display().to_string(), only])
    });
    all.collect()
}

/// The virtual functions, and the driver of VFIO.
fn enable(count: u32) -> SriovNic {
    output(Command::new("modprobe").arg(VFIO)).unwrap();
    SriovNic::enable(count).unwrap()
}

/// This VM with a function.
fn with(mut body: Value, function: &VirtualFunction<'_>) -> Value {
    body["spec"]["vfio"] = json!([{ "host": function.address() }]);
    body
}

/// A VM whose guest does nothing.
fn tiny(node: &Node, function: &VirtualFunction<'_>) -> Value {
    with(node.tiny(&json!([])).unwrap(), function)
}

#[track_caller]
fn put(node: &Node, body: &Value) {
    let answer = node.api.ask("PUT", PATH, Some(body)).unwrap();
    assert_eq!(answer.status, 201, "{}\n{}", answer.body, node.said());
    node.await_phase("web", "Running").unwrap();
}

/// Changes the state of the VM.
#[track_caller]
fn state(node: &Node, name: &str, state: &str) {
    let path = format!("/v1/vms/{name}/state");
    let body = match state {
        "Stopped" => json!({ "state": state, "mode": "hard" }),
        _ => json!({ "state": state }),
    };
    let answer = node.api.ask("PUT", &path, Some(&body)).unwrap();
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, node.said());
    node.await_phase(name, state).unwrap();
}

/// The refusal of a VM: its status and text.
#[track_caller]
fn refused(node: &Node, body: &Value, status: u16, words: &[&str]) {
    let answer = node.api.ask("PUT", PATH, Some(body)).unwrap();
    let text = answer.body.to_string();
    assert_eq!(answer.status, status, "{text}");
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_eq!(node.vm("web").unwrap(), None);
}

/// The files of VFIO that a VM's process sees.
fn files_of(vm: &Value) -> Vec<String> {
    let directory = format!("/proc/{}/root/dev/vfio", vm["status"]["pid"]);
    let directory = Path::new(&directory);
    let mut files = names(directory);
    files.retain(|name| name != "devices");
    // A directory stays when its files go.
    if directory.join("devices").exists() {
        files.extend(names(&directory.join("devices")));
    }
    files
}

/// The IOMMU group of a function.
fn group(function: &VirtualFunction<'_>) -> String {
    let group = fs::read_link(directory(function).join("iommu_group")).unwrap();
    group.file_name().unwrap().to_string_lossy().into_owned()
}

/// A device node in the root of a VM's process, with a descriptor that names the node and does not
/// open the device. A captured process may have one.
#[derive(Debug)]
struct HeldNode {
    path: PathBuf,
    node: File,
}

impl HeldNode {
    fn open(path: &Path) -> std::io::Result<Self> {
        let mut options = OpenOptions::new();
        let node = options.read(true).custom_flags(libc::O_PATH).open(path)?;
        let path = path.to_owned();
        Ok(Self { path, node })
    }

    /// A node of the same device beside this one. The daemon does not know it.
    fn stray(&self) -> Self {
        let path = self.path.with_file_name("stray");
        let like = self.node.metadata().unwrap();
        let mode = Mode::from_raw_mode(0o600);
        mknodat(CWD, &path, FileType::CharacterDevice, mode, like.rdev()).unwrap();
        chown(&path, Some(like.uid()), Some(like.gid())).unwrap();
        Self::open(&path).unwrap()
    }

    #[track_caller]
    fn assert_usable_by_vm(&self, vm: &Value) {
        let user = vm_user(vm);
        assert_eq!(self.node.metadata().unwrap().uid(), user, "{self:?}");
    }

    #[track_caller]
    fn assert_gone_and_of_root(&self) {
        let shown = fs::symlink_metadata(&self.path);
        assert!(shown.is_err(), "{self:?} stays: {shown:?}");
        let node = self.node.metadata().unwrap();
        let rights = (node.uid(), node.gid(), node.mode() & 0o077);
        assert_eq!(rights, (0, 0, 0), "{self:?}");
    }
}

/// The user of a VM's process, which is not root.
fn vm_user(vm: &Value) -> u32 {
    let status = fs::read_to_string(format!("/proc/{}/status", vm["status"]["pid"])).unwrap();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:\t"));
    let user = users.unwrap().split('\t').next().unwrap().parse().unwrap();
    assert_ne!(user, 0, "{status}");
    user
}

/// Limits the memory that a VM's process locks, in bytes. `None` means no limit.
fn limit_locked_memory(vm: &Value, bytes: Option<u64>) {
    let pid = i32::try_from(vm["status"]["pid"].as_i64().unwrap()).unwrap();
    let limit = Rlimit {
        current: bytes,
        maximum: None,
    };
    prlimit(Pid::from_raw(pid), Resource::Memlock, limit).unwrap();
}

/// Plugs a function into a VM whose process may lock no memory. Returns the node of its group. The
/// process saw it until it refused the function.
#[track_caller]
fn plug_is_refused(node: &Node, path: &str, body: &Value, shown: &Path) -> HeldNode {
    std::thread::scope(|scope| {
        let plug = scope.spawn(|| node.api.ask("PUT", path, Some(body)).unwrap());
        let mut held = None;
        while held.is_none() && !plug.is_finished() {
            held = HeldNode::open(shown).ok();
            std::thread::sleep(Duration::from_millis(1));
        }
        let answer = plug.join().unwrap();
        let text = format!("{} {}\n{}", answer.status, answer.body, node.said());
        assert_eq!(answer.status, 422, "{text}");
        assert!(text.contains("LimitMEMLOCK="), "{text}");
        held.unwrap_or_else(|| panic!("{} never appeared: {text}", shown.display()))
    })
}

/// The names in a directory, sorted.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<String> = entries
        .map(|entry| name(entry).to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn directory(function: &VirtualFunction<'_>) -> PathBuf {
    Path::new(DEVICES).join(function.address())
}

#[test]
fn a_function_is_bound_kept_across_daemons_and_given_back() {
    let mut node = Node::start("vfio").unwrap();
    let nic = enable(1);
    let function = nic.vf(0).unwrap();
    let group = group(&function);
    let before = Before::now(&node);
    put(&node, &tiny(&node, &function));
    assert_eq!(function.driver().as_deref(), Some(VFIO));
    let vm = node.vm("web").unwrap().unwrap();
    let own = names(&directory(&function).join("vfio-dev")).remove(0);
    assert_eq!(files_of(&vm), [group.as_str(), "vfio", own.as_str()]);
    let status = fs::read_to_string(format!("/proc/{}/status", vm["status"]["pid"])).unwrap();
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    assert!(status.contains("VmPin:\t   32768 kB"), "{status}");

    // Others see whose it is, and leave it alone.
    let pid = vm["status"]["pid"].to_string();
    let tree = topology::read().unwrap();
    let mut functions = tree
        .physical_functions
        .iter()
        .flat_map(|one| &one.virtual_functions);
    let shown = functions
        .find(|one| one.function.address.to_string() == function.address())
        .unwrap();
    let holders = &shown.function.vfio.as_ref().unwrap().holders;
    assert_eq!(holders[0].pid.to_string(), pid, "{holders:?}");
    let socket = holders[0].bellhop.as_ref().unwrap().api_socket.as_ref();
    assert!(socket.unwrap().contains("/vms/web/"), "{holders:?}");
    let tree = bellhop(&["topology"]);
    let tree = String::from_utf8_lossy(&tree.stdout);
    let mut lines = tree.lines();
    assert!(
        lines.any(|line| line.ends_with(&format!("/dev/vfio/{group}"))),
        "{tree}"
    );
    assert!(lines.next().unwrap().contains(&pid), "{tree}");
    let doctor = bellhop(&["doctor", "-o", "json"]);
    let doctor: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let mut findings = doctor["findings"].as_array().unwrap().iter();
    let finding = findings.find(|one| one["name"] == function.address() && one["group"] == "vfio");
    assert_eq!(finding.unwrap()["state"], "ok", "{doctor}");
    let bind = bellhop(&["bind", &format!("pci/{}", function.address()), NIC_DRIVER]);
    let error = String::from_utf8_lossy(&bind.stderr);
    assert!(!bind.status.success() && error.contains(&pid), "{error}");

    node.kill();
    node.start_again().unwrap();
    let adopted = node.await_phase("web", "Running").unwrap();
    assert_eq!(adopted["status"]["pid"], vm["status"]["pid"]);
    // It is this VM's, whether that runs or not.
    for wanted in ["Stopped", "Running"] {
        state(&node, "web", wanted);
        assert_eq!(function.driver().as_deref(), Some(VFIO), "{wanted}");
    }
    let answer = node
        .api
        .ask("PUT", "/v1/vms/other", Some(&tiny(&node, &function)))
        .unwrap();
    assert_eq!(answer.body["code"], "device_taken", "{}", answer.body);
    deleted(&node, "web");
    assert_eq!(function.driver().as_deref(), Some(NIC_DRIVER));
    before.assert_same(&node, "after the deletion");
}

#[test]
fn guests_talk_through_their_functions_and_a_binding_by_hand_stays() {
    let node = Node::start("vfio-talk").unwrap();
    let nic = enable(2);
    let [own, by_hand] = [0, 1].map(|index| nic.vf(index).unwrap());
    by_hand.bind(VFIO).unwrap();
    let before = Before::now(&node);
    let guest = |function: &VirtualFunction<'_>| with(spec(&json!([])), function);
    let (_, mut one) = created(&node, "one", &guest(&own));
    let (_, mut other) = created(&node, "other", &guest(&by_hand));
    let talk = |one: &mut _, other: &mut _| {
        up(one);
        let mac = up(other);
        assert_eq!(mac, by_hand.mac());
        for size in [60, 1514] {
            let frames = Frames {
                count: 200,
                size,
                window: 16,
            };
            exchange_between(one, other, &mac, frames).unwrap();
        }
    };
    talk(&mut one, &mut other);

    // What a VM with a function cannot do, with the name of the function.
    for (path, body) in [
        ("snapshot", json!({ "name": "now" })),
        (
            "migration",
            json!({ "send": { "destination": "unix:/tmp/vfio-nowhere" } }),
        ),
    ] {
        let path = format!("/v1/vms/one/{path}");
        let answer = node.api.ask("POST", &path, Some(&body)).unwrap();
        let text = format!("{path}: {} {}", answer.status, answer.body);
        assert_eq!(answer.status, 409, "{text}");
        assert!(text.contains(own.address()), "{text}");
    }

    drop(one);
    state(&node, "one", "Stopped");
    state(&node, "one", "Running");
    let (_, mut one) = attached(&node, "one");
    talk(&mut one, &mut other);
    drop((one, other));
    deleted(&node, "one");
    deleted(&node, "other");
    assert_eq!(own.driver().as_deref(), Some(NIC_DRIVER));
    assert_eq!(by_hand.driver().as_deref(), Some(VFIO));
    before.assert_same(&node, "after the deletion");
    by_hand.bind(NIC_DRIVER).unwrap();
}

/// A running guest gets a function and gives it back, across a kill of the daemon. Its process
/// keeps no node that opens a function which was removed or refused.
#[test]
fn a_running_vm_gets_a_function_and_gives_it_back() {
    let mut node = Node::start("vfio-plug").unwrap();
    let nic = enable(1);
    let function = nic.vf(0).unwrap();
    let before = Before::now(&node);
    let (vm, mut guest) = created(&node, "one", &spec(&json!([])));
    let path = "/v1/vms/one/vfio/vf";
    let body = json!({ "host": function.address() });
    let pid = &vm["status"]["pid"];
    let shown = PathBuf::from(format!("/proc/{pid}/root/dev/vfio/{}", group(&function)));
    limit_locked_memory(&vm, Some(0));
    let refused = plug_is_refused(&node, path, &body, &shown);
    limit_locked_memory(&vm, None);
    refused.assert_gone_and_of_root();
    assert_eq!(files_of(&vm), Vec::<String>::new());
    assert_eq!(function.driver().as_deref(), Some(NIC_DRIVER));

    for status in [201, 200] {
        let answer = node.api.ask("PUT", path, Some(&body)).unwrap();
        assert_eq!(answer.status, status, "{}\n{}", answer.body, node.said());
    }
    assert_eq!(function.driver().as_deref(), Some(VFIO));
    assert_eq!(files_of(&vm).len(), 3);
    let own = HeldNode::open(&shown).unwrap();
    own.assert_usable_by_vm(&vm);
    until("the guest has the function", || {
        let shown = guest.command("link").unwrap();
        shown["nics"][0]["mac"] == function.mac().as_str()
    })
    .unwrap();
    node.kill();
    node.start_again().unwrap();
    node.await_phase("one", "Running").unwrap();
    let shown = node.vm("one").unwrap().unwrap();
    assert_eq!(shown["spec"]["vfio"][0]["host"], function.address());
    let stray = own.stray();
    stray.assert_usable_by_vm(&vm);

    let answer = node.api.ask("DELETE", path, None).unwrap();
    assert!([202, 204].contains(&answer.status), "{}", answer.body);
    until("the function has its driver", || {
        function.driver().as_deref() == Some(NIC_DRIVER)
    })
    .unwrap();
    let shown = guest.command("link").unwrap();
    assert_eq!(shown["nics"], json!([]), "{shown}");
    own.assert_gone_and_of_root();
    stray.assert_gone_and_of_root();
    assert_eq!(files_of(&vm), Vec::<String>::new());
    let answer = node.api.ask("GET", path, None).unwrap();
    assert_eq!(answer.status, 404, "{}", answer.body);
    drop(guest);
    deleted(&node, "one");
    before.assert_same(&node, "after the deletion");
}

#[test]
fn functions_that_no_vm_can_have_are_refused_and_stay_as_they_are() {
    let node = Node::start("vfio-refused").unwrap();
    let nic = enable(2);
    let function = nic.vf(0).unwrap();
    output(Command::new("modprobe").arg("ahci")).unwrap();
    let before = Before::now(&node);
    let physical = fs::read_link(directory(&function).join("physfn")).unwrap();
    let physical = physical.file_name().unwrap().to_str().unwrap().to_owned();
    let mut body = tiny(&node, &function);
    body["spec"]["vfio"][0]["host"] = json!(physical);
    refused(&node, &body, 422, &[&physical, "allow_pf"]);
    body["spec"]["vfio"][0]["allow_pf"] = json!(true);
    refused(&node, &body, 422, &["has virtual functions", "vf count"]);
    body["spec"]["vfio"] = json!([{ "host": "0000:ff:1f.7" }]);
    refused(&node, &body, 422, &["0000:ff:1f.7"]);
    body["spec"]["vfio"] = json!([{ "path": "/sys/devices/x" }]);
    refused(&node, &body, 422, &["vfio[0]", "`host`"]);
    let host = json!({ "host": function.address() });
    let again = json!({ "host": function.address(), "id": "again" });
    body["spec"]["vfio"] = json!([host, again]);
    refused(&node, &body, 409, &["already belongs"]);

    // The chipset's functions share a group, and the host drives one of them.
    let driven = names(Path::new("/sys/bus/pci/drivers/ahci"));
    let driven = driven
        .iter()
        .find(|name| name.starts_with("0000:"))
        .unwrap();
    let group = Path::new(DEVICES).join(driven).join("iommu_group/devices");
    let others = names(&group);
    let beside = others.iter().find(|name| *name != driven).unwrap();
    body["spec"]["vfio"] = json!([{ "host": beside, "allow_pf": true }]);
    refused(&node, &body, 422, &["IOMMU group", driven, "bind them"]);

    // The host's own network.
    let interface = interface(&function);
    let interface = interface.as_str();
    output(Command::new("ip").args(["link", "set", interface, "up"])).unwrap();
    let body = tiny(&node, &function);
    refused(&node, &body, 409, &[interface, "which is up"]);
    output(Command::new("ip").args(["link", "set", interface, "down"])).unwrap();
    let device = ManagedFunction::bind(nic.vf(1).unwrap()).unwrap();
    output(
        Command::new("vdpa")
            .args(["dev", "add", "name", "lab-vfio", "mgmtdev"])
            .arg(device.mgmtdev()),
    )
    .unwrap();
    let other = nic.vf(1).unwrap();
    refused(&node, &tiny(&node, &other), 422, &["lab-vfio", "delete it"]);
    output(Command::new("vdpa").args(["dev", "del", "lab-vfio"])).unwrap();
    drop(device);
    before.assert_same(&node, "after the refusals");
}

/// The network interface of a virtual function of virtio.
fn interface(function: &VirtualFunction<'_>) -> String {
    let directory = directory(function);
    let all = names(&directory);
    let virtio = all.iter().find(|name| name.starts_with("virtio")).unwrap();
    names(&directory.join(virtio).join("net")).remove(0)
}

/// Kills the daemon at each log line of the creation and of the deletion.
#[test]
fn a_killed_daemon_loses_no_function() {
    let mut node = Node::start("vfio-kill").unwrap();
    let nic = enable(1);
    let function = nic.vf(0).unwrap();
    let before = Before::now(&node);
    let body = tiny(&node, &function);
    for delete in [false, true] {
        let mut line = 0;
        loop {
            assert!(line < LINES_MAX, "the request does not end");
            if delete {
                put(&node, &body);
            }
            let came = killed_at(&mut node, line, delete, &body);
            if !node.lives() {
                node.start_again().unwrap();
            }
            let when = format!("delete {delete}, killed at line {line}");
            if let Some(vm) = node.vm("web").unwrap() {
                let vm = node.await_phase(vm["name"].as_str().unwrap(), "Running");
                assert_eq!(files_of(&vm.unwrap()).len(), 3, "{when}");
                assert_eq!(function.driver().as_deref(), Some(VFIO), "{when}");
                deleted(&node, "web");
            }
            before.assert_same(&node, &when);
            if !came {
                break;
            }
            line += 1;
        }
    }
}

/// Kills the daemon before this line of a request, if it has that many.
fn killed_at(node: &mut Node, line: usize, delete: bool, body: &Value) -> bool {
    node.hold_after(line);
    let api = node.api.clone();
    std::thread::scope(|scope| {
        // It gets no answer if the daemon is killed.
        let client = scope.spawn(|| {
            if delete {
                drop(api.ask("DELETE", &format!("{PATH}?force=true"), None));
            } else {
                drop(api.ask("PUT", PATH, Some(body)));
            }
        });
        let mut held = false;
        until("the daemon is held or answers", || {
            held = node.is_held();
            held || client.is_finished()
        })
        .unwrap();
        if held {
            node.kill();
        }
        node.resume();
        held
    })
}
