//! From a NIC to a vDPA device on one of its virtual functions, and back.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lab::endurance::cycles;
use lab::process::output;
use lab::rig::VIRTUAL_FUNCTIONS;
use serde_json::Value;
use vdpa_mgmt::bus::Bus;
use vdpa_mgmt::pci::{Function, Pci};

use super::support::{bellhop, complaint, complaint_with, printed, program};

/// The initial driver of the lab's virtio functions.
const NET_DRIVER: &str = "virtio-pci";

/// A user without privileges.
const NOBODY: u32 = 65534;

const DEVICE: &str = "lab-sriov";

/// The NIC, for one test at a time, without virtual functions before and after.
struct Nic {
    name: String,
    netdev: String,
    before: Function,
    _alone: MutexGuard<'static, ()>,
}

impl Nic {
    fn find() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        lab::sim::require_lab().unwrap();
        let started = Instant::now();
        loop {
            let mut found = Pci::default().physical_functions().unwrap();
            found.retain(|function| function.driver.as_deref() == Some(NET_DRIVER));
            // Its driver may not be ready yet.
            if let Some(before) = found.pop()
                && let Some(netdev) = before.netdevs.first()
            {
                return Self {
                    name: format!("pci/{}", before.address),
                    netdev: netdev.clone(),
                    before,
                    _alone: alone,
                };
            }
            assert!(started.elapsed() < Duration::from_secs(20), "no NIC");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn virtual_function(&self, index: usize) -> String {
        let now = Pci::default().function(self.before.address).unwrap();
        format!("pci/{}", now.virtual_functions[index].1)
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        // A failed test must not leave them to the next one.
        bellhop(&["dev", "del", DEVICE]);
        bellhop(&["vf", "count", &self.name, "0"]);
    }
}

/// A process that has a file open, killed at the end.
struct Open(Child);

impl Open {
    fn start(file: &Path) -> Self {
        // It waits for a line that never comes.
        let script = format!("exec 3<>{} && echo open && read line", file.display());
        let mut child = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "open\n");
        Self(child)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

fn shown(arguments: &[&str]) -> Value {
    let mut arguments = arguments.to_vec();
    arguments.push("-j");
    let text = printed(&bellhop(&arguments));
    let mut value: Value = serde_json::from_str(&text).unwrap();
    value["vf"].take()
}

#[test]
fn from_a_nic_to_a_device_and_back() {
    let nic = Nic::find();
    let before = shown(&["vf", "show", &nic.netdev]);
    assert_eq!(before[&nic.name]["vfs"], 0);
    assert_eq!(before[&nic.name]["total_vfs"], VIRTUAL_FUNCTIONS);
    assert_eq!(before[&nic.name]["netdev"], nic.netdev);

    let plan = bellhop(&["vf", "count", &nic.netdev, "4", "--dry-run"]);
    let address = &nic.name[4..];
    assert_eq!(
        printed(&plan),
        format!("1. create 4 virtual functions of {address}\n")
    );
    assert_eq!(shown(&["vf", "show", &nic.netdev]), before);

    // Four virtual functions, each in an IOMMU group of its own.
    let with = shown(&["vf", "count", &nic.netdev, "4"]);
    assert_eq!(with, shown(&["vf", "show", &nic.name]));
    let all = with.as_object().unwrap();
    assert_eq!(all.len(), 1 + VIRTUAL_FUNCTIONS, "{with}");
    let mut groups = Vec::new();
    for index in 0..VIRTUAL_FUNCTIONS {
        let one = &with[nic.virtual_function(index)];
        let alone = shown(&["vf", "show", &nic.virtual_function(index)]);
        assert_eq!(alone.as_object().unwrap().len(), 1);
        assert_eq!(&alone[nic.virtual_function(index)], one);
        assert_eq!(one["pf"], nic.name);
        assert_eq!(one["vf"], index);
        assert_eq!(one["driver"], NET_DRIVER);
        groups.push(one["iommu_group"].as_u64().unwrap());
    }
    groups.sort_unstable();
    groups.dedup();
    assert_eq!(groups.len(), VIRTUAL_FUNCTIONS, "{with}");

    // A vDPA device on the first.
    let function = nic.virtual_function(0);
    let plan = printed(&bellhop(&["bind", &function, "vp-vdpa", "--dry-run"]));
    assert!(
        plan.contains(&format!("bind {} to vp-vdpa", &function[4..])),
        "{plan}"
    );
    assert_eq!(shown(&["vf", "show", &nic.name]), with);
    let text = printed(&bellhop(&["bind", &function, "vp-vdpa"]));
    assert!(
        text.contains(&format!("{function}: driver vp-vdpa ")),
        "{text}"
    );
    printed(&bellhop(&["mgmtdev", "show", &function]));
    printed(&bellhop(&[
        "dev", "add", "name", DEVICE, "mgmtdev", &function,
    ]));
    assert_eq!(shown(&["vf", "show"])[&function]["vdpa"], DEVICE);
    printed(&bellhop(&["bind", DEVICE, "vhost_vdpa"]));

    // While a process has it open, nothing is removed, and the command does not hang.
    let path = Bus::default().device(DEVICE).unwrap().path().unwrap();
    let holder = Open::start(&path);
    let pid = format!("PID {}", holder.0.id());
    let words = [DEVICE, "is in use by sh", &pid, &function[4..]];
    complaint(&bellhop(&["vf", "count", &nic.netdev, "0"]), &words);
    complaint(&bellhop(&["vf", "count", &nic.name, "2"]), &words);
    complaint(&bellhop(&["bind", &function, NET_DRIVER]), &words);
    complaint(&bellhop(&["bind", &nic.name, "vp-vdpa"]), &words);
    assert_eq!(shown(&["vf", "show"])[&function]["driver"], "vp-vdpa");
    drop(holder);

    // The function returns to its driver: the device disappears, and no override stays.
    let text = printed(&bellhop(&["bind", &function, NET_DRIVER]));
    assert!(text.contains("driver virtio-pci "), "{text}");
    assert!(Bus::default().device(DEVICE).is_err());
    let mut again = shown(&["vf", "show", &nic.name]);
    let mut with = with;
    // Their network interfaces may have other names now.
    for one in [&mut again, &mut with] {
        for (_, fields) in one.as_object_mut().unwrap() {
            fields.as_object_mut().unwrap().remove("netdev");
        }
    }
    assert_eq!(again, with);

    // From one number to another, and to zero.
    let two = shown(&["vf", "count", &nic.name, "2"]);
    assert_eq!(two[&nic.name]["vfs"], 2);
    assert_eq!(shown(&["vf", "count", &nic.name, "0"]), before);
    let after = Pci::default().function(nic.before.address).unwrap();
    assert_eq!(after, nic.before);
}

/// Everything on this host in which the life of a virtual function may leave traces.
#[derive(Debug, PartialEq)]
struct Traces {
    functions: Value,
    /// By address: names and indexes change.
    interfaces: BTreeSet<String>,
    management_devices: String,
    devices: String,
    groups: usize,
}

impl Traces {
    fn find() -> Self {
        let links = output(Command::new("ip").args(["-j", "link"])).unwrap();
        let links: Vec<Value> = serde_json::from_slice(&links).unwrap();
        Self {
            functions: shown(&["vf", "show"]),
            interfaces: links
                .iter()
                .map(|link| link["address"].to_string())
                .collect(),
            management_devices: printed(&bellhop(&["mgmtdev", "show"])),
            devices: printed(&bellhop(&["dev", "show"])),
            groups: fs::read_dir("/sys/kernel/iommu_groups").unwrap().count(),
        }
    }
}

#[test]
fn any_failure_leaves_the_host_as_before() {
    let nic = Nic::find();
    let before = Traces::find();
    for cycle in 0..cycles().unwrap() {
        // How far it gets before a step fails.
        let steps = cycle % 4;
        complaint(
            &bellhop(&["vf", "count", &nic.name, "5"]),
            &["4 virtual functions at most"],
        );
        if steps > 0 {
            printed(&bellhop(&["vf", "count", &nic.name, "2"]));
            let function = nic.virtual_function(1);
            let refused = || bellhop(&["bind", &function, "pcieport"]);
            complaint(&refused(), &["now has virtio-pci"]);
            if steps > 1 {
                printed(&bellhop(&["bind", &function, "vp-vdpa"]));
                complaint(&refused(), &["now has vp-vdpa"]);
            }
            if steps > 2 {
                let add = ["dev", "add", "name", DEVICE, "mgmtdev", &function];
                let with_mtu = [add.as_slice(), &["mtu", "1500"]].concat();
                complaint(&bellhop(&with_mtu), &["does not accept mtu"]);
                printed(&bellhop(&add));
            }
        }
        // The device is removed with its function, and that with the others.
        printed(&bellhop(&["vf", "count", &nic.name, "0"]));
        assert_eq!(Traces::find(), before, "cycle {cycle}");
    }
}

#[test]
fn the_old_driver_comes_back() {
    let nic = Nic::find();
    printed(&bellhop(&["vf", "count", &nic.name, "1"]));
    let function = nic.virtual_function(0);
    let address = function[4..].parse().unwrap();
    let before = Pci::default().function(address).unwrap();
    // A driver for bridges, which takes no NIC even with an override.
    complaint(
        &bellhop(&["bind", &function, "pcieport"]),
        &["pcieport rejects", "now has virtio-pci"],
    );
    let after = Pci::default().function(address).unwrap();
    let without_names = |mut function: Function| {
        function.netdevs.clear();
        function
    };
    assert_eq!(without_names(after), without_names(before));
}

#[test]
fn a_function_goes_to_vfio_and_back() {
    let nic = Nic::find();
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    printed(&bellhop(&["vf", "count", &nic.name, "1"]));
    let function = nic.virtual_function(0);
    // Its ID table is empty: it takes any device with an override.
    printed(&bellhop(&["bind", &function, "vfio-pci"]));
    let shown = shown(&["vf", "show", &nic.netdev]);
    assert_eq!(shown[&function]["driver"], "vfio-pci");
    assert_eq!(shown[&function]["driver_override"], "vfio-pci");
    let group = shown[&function]["iommu_group"].as_u64().unwrap();
    let holder = Open::start(Path::new(&format!("/dev/vfio/{group}")));
    let words = [&function[4..], "in use by sh", "/dev/vfio/"];
    complaint(&bellhop(&["vf", "count", &nic.netdev, "0"]), &words);
    complaint(&bellhop(&["bind", &function, NET_DRIVER]), &words);
    drop(holder);
    let text = printed(&bellhop(&["bind", &function, NET_DRIVER]));
    assert!(!text.contains("driver_override"), "{text}");
}

#[test]
fn an_unprivileged_user_gets_an_error_and_changes_nothing() {
    let nic = Nic::find();
    printed(&bellhop(&["vf", "count", &nic.name, "1"]));
    let function = nic.virtual_function(0);
    let before = Pci::default().function(nic.before.address).unwrap();
    for words in [
        ["vf", "count", &nic.name, "0"].as_slice(),
        &["vf", "count", &nic.name, "2"],
        &["bind", &function, "vp-vdpa"],
        &["vf", "set", &nic.netdev, "0", "trust", "on"],
    ] {
        let output = Command::new(program())
            .args(words)
            .stdin(Stdio::null())
            .uid(NOBODY)
            .gid(NOBODY)
            .output()
            .unwrap();
        complaint(&output, &["root"]);
    }
    assert_eq!(Pci::default().function(nic.before.address).unwrap(), before);
    let text = printed(&bellhop(&["bind", &function]));
    assert!(text.contains("driver virtio-pci "), "{text}");
}

#[test]
fn wrong_numbers_names_and_settings_are_reported() {
    let nic = Nic::find();
    complaint(
        &bellhop(&["vf", "count", &nic.name, "5"]),
        &["4 virtual functions at most, not 5"],
    );
    complaint(
        &bellhop(&["vf", "show", "lab-none"]),
        &["no network interface lab-none"],
    );
    complaint(
        &bellhop(&["vf", "show", "pci/0000:ff:1f.7"]),
        &["no PCI function 0000:ff:1f.7", "bellhop vf show"],
    );
    complaint(
        &bellhop(&["bind", &nic.name, "lab-none"]),
        &["no PCI driver lab-none", "modprobe"],
    );
    for words in [
        ["vf", "show", "pci/01:00.0"].as_slice(),
        &["bind", "pci/nonsense"],
        &["vf", "set", "lo", "0", "vlan", "4095"],
        &["vf", "set", "lo", "0", "trust"],
    ] {
        complaint_with(2, &bellhop(words), &["error: "]);
    }
    printed(&bellhop(&["vf", "count", &nic.name, "1"]));
    complaint(
        &bellhop(&["vf", "count", &nic.virtual_function(0), "1"]),
        &["is a virtual function", &nic.name],
    );
    complaint(
        &bellhop(&["vf", "set", &nic.virtual_function(0), "0", "trust", "on"]),
        &["is a virtual function", &nic.name],
    );
    // virtio_net takes none of the settings.
    for setting in [["mac", "02:00:00:00:00:01"], ["vlan", "5"], ["trust", "on"]] {
        let words = ["vf", "set", &nic.netdev, "0", setting[0], setting[1]];
        complaint(
            &bellhop(&words),
            &["has no such setting", &nic.netdev, "virtual function 0"],
        );
    }
}
