#![allow(clippy::unwrap_used, reason = "tests")]
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;

use super::*;
use crate::config::{ClassConfig, DeviceConfig, NetConfig};
use crate::device::{MgmtDevice, VdpaDevice};
use crate::name::MgmtDeviceName;

const PF: &str = "0000:01:00.0";
const VF: &str = "0000:01:00.1";
/// The path of subfunctions.
const SF: &str = "devices/pci0000:00/0000:01:00.0/mlx5_core.sf.2";

/// A machine made of files. Its vhost-vdpa devices are `/dev/null`, because every user may stat
/// that character device.
struct Machine(PathBuf);

impl Machine {
    fn new(test: &str) -> Self {
        let root =
            std::env::temp_dir().join(format!("bellhop-topology-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let machine = Self(root);
        machine.put("sys/bus/vdpa/devices/.keep", "");
        fs::remove_file(machine.0.join("sys/bus/vdpa/devices/.keep")).unwrap();
        machine.put("proc/1/fd/.keep", "");
        machine.link("pid:[4026531836]", "proc/self/ns/pid");
        machine
    }

    /// A NIC with one virtual function of four, and a subfunction; each has a representor.
    fn with_nic(test: &str) -> Self {
        let machine = Self::new(test);
        for address in [PF, VF] {
            let directory = format!("sys/devices/pci0000:00/{address}");
            machine.put(&format!("{directory}/class"), "0x020000\n");
            machine.put(&format!("{directory}/numa_node"), "1\n");
            machine.to(&directory, &format!("sys/bus/pci/devices/{address}"));
            machine.link(
                "../../../bus/pci/drivers/mlx5_core",
                &format!("{directory}/driver"),
            );
        }
        let physical = format!("sys/devices/pci0000:00/{PF}");
        machine.put(&format!("{physical}/sriov_totalvfs"), "4\n");
        machine.link(&format!("../{VF}"), &format!("{physical}/virtfn0"));
        machine.link(
            &format!("../{PF}"),
            &format!("sys/devices/pci0000:00/{VF}/physfn"),
        );
        machine.put(&format!("sys/{SF}/sfnum"), "88\n");
        machine.put(&format!("sys/{SF}/net/enp1s0f0s88/mtu"), "1500\n");
        machine.to(
            &format!("sys/{SF}"),
            "sys/bus/auxiliary/devices/mlx5_core.sf.2",
        );
        machine.to(
            &format!("sys/{SF}"),
            "sys/bus/auxiliary/devices/mlx5_core.eth.0",
        );
        for (netdev, port) in [
            ("enp1s0", "p0"),
            ("eth_vf0", "pf0vf0"),
            ("eth_vf9", "pf0vf9"),
            ("eth_host", "c1pf0vf0"),
            ("eth_sf", "pf0sf88"),
        ] {
            let directory = format!("{physical}/net/{netdev}");
            machine.put(&format!("{directory}/phys_switch_id"), "abcd\n");
            machine.put(&format!("{directory}/phys_port_name"), &format!("{port}\n"));
            machine.put(&format!("{directory}/operstate"), "down\n");
            machine.to(&directory, &format!("sys/class/net/{netdev}"));
            machine.to(&physical, &format!("{directory}/device"));
        }
        machine.link("../br0", &format!("{physical}/net/eth_vf0/master"));
        machine
    }

    fn put(&self, file: &str, text: &str) {
        let path = self.0.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, target: &str, link: &str) {
        let link = self.0.join(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(target, link).unwrap();
    }

    /// Adds a link to another file of the machine.
    fn to(&self, target: &str, link: &str) {
        self.link(self.0.join(target).to_str().unwrap(), link);
    }

    /// Adds a vDPA device in this directory, behind `/dev/vhost-vdpa-7` if it has one.
    fn device(&self, name: &str, parent: &str, driver: &str, entry: &str) {
        let directory = format!("sys/{parent}/{name}");
        self.put(&format!("{directory}/{entry}/dev"), "1:3\n");
        self.link(&format!("x/{driver}"), &format!("{directory}/driver"));
        self.to(&directory, &format!("sys/bus/vdpa/devices/{name}"));
    }

    /// Adds a process that has `/dev/null` open, and page `queue` of it mapped.
    fn process(&self, pid: u32, command_line: &str, exe: &str, queue: u64) {
        let process = format!("proc/{pid}");
        self.link("/dev/null", &format!("{process}/fd/7"));
        self.link(exe, &format!("{process}/exe"));
        self.put(&format!("{process}/comm"), "bell\x1bhop\n");
        self.put(&format!("{process}/cmdline"), command_line);
        let file = fs::metadata("/dev/null").unwrap();
        let maps = format!(
            "00400000-00452000 r-xp 00000000 08:02 173521 {exe}\n\
             7f0000000000-7f0000001000 -w-s {:08x} {:02x}:{:02x} {}  /dev/vhost-vdpa-7\nrubbish\n",
            queue * 4096,
            rustix::fs::major(file.dev()),
            rustix::fs::minor(file.dev()),
            file.ino()
        );
        self.put(&format!("{process}/maps"), &maps);
    }

    /// The answer of netlink: the devices with their management devices.
    fn managed(&self, devices: &[(&str, &str)], on_bus: &[&str]) -> Management {
        let mut mgmtdevs: Vec<&str> = devices.iter().map(|one| one.1).collect();
        mgmtdevs.dedup();
        let configs = devices.iter().map(|one| DeviceConfig {
            name: one.0.to_owned(),
            device_id: 1,
            negotiated_features: None,
            device_features: None,
            class: ClassConfig::Net(NetConfig {
                mac: Some([2, 0, 0, 0, 0, 0xab]),
                mtu: Some(1500),
                ..NetConfig::default()
            }),
        });
        Management::new(
            mgmtdevs.into_iter().map(mgmt_device).collect(),
            devices
                .iter()
                .map(|one| vdpa_device(one.0, one.1))
                .collect(),
            configs.collect(),
            on_bus
                .iter()
                .map(|&one| {
                    (
                        one.to_owned(),
                        self.0.join("sys/bus/vdpa/devices").join(one),
                    )
                })
                .filter_map(|(name, path)| Some((name, directory::identity(&path)?)))
                .collect(),
        )
    }

    fn of(&self, management: &Management) -> Topology {
        of(management, &self.0).unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn name(text: &str) -> MgmtDeviceName {
    text.parse().unwrap()
}

fn mgmt_device(text: &str) -> MgmtDevice {
    MgmtDevice {
        name: name(text),
        supported_classes: 0b10,
        max_supported_vqs: Some(3),
        supported_features: None,
    }
}

fn vdpa_device(device: &str, mgmtdev: &str) -> VdpaDevice {
    VdpaDevice {
        name: device.to_owned(),
        mgmtdev: name(mgmtdev),
        device_id: 1,
        vendor_id: None,
        max_vqs: Some(3),
        max_vq_size: Some(256),
        min_vq_size: None,
    }
}

#[test]
fn a_nic_has_functions_representors_devices_and_a_holder() {
    let machine = Machine::with_nic("nic");
    machine.device(
        "nic0",
        &format!("devices/pci0000:00/{VF}"),
        "vhost_vdpa",
        "vhost-vdpa-7",
    );
    machine.device("nic1", SF, "virtio_vdpa", "virtio3/net/eth7");
    let line = "bellhop\0run\0--config\0web.toml\0";
    machine.process(42, line, "/usr/bin/bellhop (deleted)", 1);
    let (on_vf, on_sf) = (format!("pci/{VF}"), "auxiliary/mlx5_core.sf.2");
    let management = machine.managed(&[("nic0", &on_vf), ("nic1", on_sf)], &["nic0", "nic1"]);
    let tree = machine.of(&management);

    assert_eq!(tree.management, ManagementState::Known);
    assert!(tree.all_processes_seen);
    assert!(tree.mgmtdevs.is_empty() && tree.vdpa_devices.is_empty());
    let [physical] = &tree.physical_functions[..] else {
        panic!("{tree:?}")
    };
    assert_eq!(physical.function.driver.as_deref(), Some("mlx5_core"));
    assert_eq!(physical.function.netdevs, ["enp1s0"]);
    assert_eq!(physical.function.numa_node, Some(1));
    assert_eq!(
        (physical.total_vfs, physical.switch_id.as_deref()),
        (Some(4), Some("abcd"))
    );
    let others: Vec<&str> = physical
        .representors
        .iter()
        .map(|one| one.netdev.as_str())
        .collect();
    assert_eq!(others, ["eth_host", "eth_vf9"]);

    let [virtual_one] = &physical.virtual_functions[..] else {
        panic!("{physical:?}")
    };
    let representor = virtual_one.representor.as_ref().unwrap();
    assert_eq!(
        (representor.netdev.as_str(), representor.master.as_deref()),
        ("eth_vf0", Some("br0"))
    );
    assert_eq!(representor.state.as_deref(), Some("down"));
    let device = &virtual_one.function.mgmtdevs[0].vdpa_devices[0];
    assert_eq!(
        (device.name.as_str(), device.class),
        ("nic0", Some(Class::Network))
    );
    assert_eq!(device.path, Some("/dev/vhost-vdpa-7".into()));
    assert_eq!(device.mac, Some([2, 0, 0, 0, 0, 0xab]));
    let [holder] = &device.holders[..] else {
        panic!("{device:?}")
    };
    assert_eq!((holder.pid, holder.command.as_str()), (42, "bell?hop"));
    let run = holder.bellhop.as_ref().unwrap();
    assert_eq!(run.config.as_deref(), Some("web.toml"));
    let doorbells: Vec<Doorbell> = device.queues.iter().map(|queue| queue.doorbell).collect();
    assert_eq!(
        doorbells,
        [Doorbell::NotMapped, Doorbell::Mapped, Doorbell::NotMapped]
    );
    assert!(
        device
            .queues
            .iter()
            .all(|queue| queue.posted_interrupt == PostedInterrupt::Unknown)
    );

    let [subfunction] = &physical.subfunctions[..] else {
        panic!("{physical:?}")
    };
    assert_eq!(
        (subfunction.name.as_str(), subfunction.number),
        ("mlx5_core.sf.2", Some(88))
    );
    assert_eq!(subfunction.representor.as_ref().unwrap().netdev, "eth_sf");
    let device = &subfunction.mgmtdevs[0].vdpa_devices[0];
    assert_eq!(
        (device.netdevs.as_slice(), &device.path),
        (&["eth7".to_owned()][..], &None)
    );
    assert_eq!(device.queues[0].doorbell, Doorbell::Unknown);
    assert_eq!(tree.devices().count(), 2);

    // The part of it that a virtual function leads to.
    let part = function_of(&management, &machine.0, VF.parse().unwrap()).unwrap();
    assert_eq!(part, tree);
    let none = function_of(&management, &machine.0, "0000:09:00.0".parse().unwrap());
    assert!(none.unwrap_err().is_missing());
}

#[test]
fn devices_without_a_function_are_at_the_root() {
    let machine = Machine::new("root");
    machine.device("sim0", "devices/vdpasim_net", "vhost_vdpa", "vhost-vdpa-7");
    machine.device("own", "devices/virtual", "none", "x");
    let tree = machine.of(&machine.managed(&[("sim0", "vdpasim_net")], &["sim0", "own"]));
    assert!(tree.physical_functions.is_empty());
    let device = &tree.mgmtdevs[0].vdpa_devices[0];
    assert_eq!(device.posting_obstacle, Some(PostingObstacle::Software));
    assert_eq!(device.queues[0].posted_interrupt, PostedInterrupt::No);
    assert_eq!(
        (
            tree.vdpa_devices[0].name.as_str(),
            tree.vdpa_devices[0].class
        ),
        ("own", None)
    );
    // Another device of the same name, which appeared later.
    let directory = machine.0.join("sys/devices/virtual/own");
    let management = machine.managed(&[("sim0", "vdpasim_net")], &["sim0", "own"]);
    fs::rename(&directory, machine.0.join("earlier")).unwrap();
    fs::create_dir(&directory).unwrap();
    assert!(machine.of(&management).vdpa_devices.is_empty());
    assert!(!tree.is_empty());
}

#[test]
fn a_software_nic_has_its_tap() {
    let machine = Machine::new("tap");
    machine.device(
        "sw0",
        "devices/virtual/vduse/sw0",
        "vhost_vdpa",
        "vhost-vdpa-7",
    );
    let management = machine.managed(&[("sw0", "vduse")], &["sw0"]);
    assert_eq!(
        machine.of(&management).mgmtdevs[0].vdpa_devices[0].tap,
        None
    );
    // `/dev/zero` is the file of its server, which has a queue without an interface, too.
    machine.put("sys/class/vduse/sw0/dev", "1:5\n");
    machine.link("/dev/zero", "proc/50/fd/4");
    machine.put("proc/50/fdinfo/4", "pos:\t0\n");
    machine.put("proc/50/fdinfo/5", "pos:\t0\niff:\t\n");
    let of = |machine: &Machine| {
        machine.of(&management).mgmtdevs[0].vdpa_devices[0]
            .tap
            .clone()
    };
    assert_eq!(of(&machine), None);
    for wrong in ["../x", "a name that is too long"] {
        machine.put("proc/50/fdinfo/6", &format!("iff:\t{wrong}\n"));
        assert_eq!(of(&machine), None);
    }
    machine.put("proc/50/fdinfo/6", "pos:\t0\niff:\tsw0\n");
    let bare = Tap {
        netdev: "sw0".to_owned(),
        state: None,
        master: None,
    };
    assert_eq!(of(&machine), Some(bare.clone()));
    machine.put("sys/class/net/sw0/operstate", "up\n");
    machine.link("../br0", "sys/class/net/sw0/master");
    let whole = Tap {
        state: Some("up".to_owned()),
        master: Some("br0".to_owned()),
        ..bare
    };
    assert_eq!(of(&machine), Some(whole));
    // A process that serves it is no holder of the device.
    assert!(
        machine
            .of(&management)
            .devices()
            .all(|one| one.holders.is_empty())
    );
}

#[test]
fn without_management_sysfs_locates_devices() {
    let machine = Machine::with_nic("silent");
    machine.device(
        "nic0",
        &format!("devices/pci0000:00/{VF}"),
        "vhost_vdpa",
        "vhost-vdpa-7",
    );
    machine.device("nic1", SF, "vhost_vdpa", "vhost-vdpa-8");
    machine.device("sim0", "devices/vdpasim_net", "vhost_vdpa", "vhost-vdpa-9");
    let tree = machine.of(&Management::silent(ManagementState::Blocked));
    let physical = &tree.physical_functions[0];
    let function = &physical.virtual_functions[0].function;
    assert_eq!(function.vdpa_devices[0].name, "nic0");
    assert_eq!(physical.subfunctions[0].vdpa_devices[0].name, "nic1");
    assert!(physical.function.vdpa_devices.is_empty());
    assert_eq!(tree.vdpa_devices[0].name, "sim0");
    assert_eq!(tree.devices().count(), 3);
}

#[test]
fn devices_changed_meanwhile_are_missing() {
    let machine = Machine::with_nic("meanwhile");
    machine.device("new", "devices/vdpasim_net", "vhost_vdpa", "vhost-vdpa-7");
    let gone = "pci/0000:05:00.0";
    let management = machine.managed(
        &[("old", "vdpasim_net"), ("older", gone)],
        &["old", "older"],
    );
    // A virtual function that vanishes.
    fs::remove_dir_all(machine.0.join(format!("sys/devices/pci0000:00/{VF}"))).unwrap();
    let tree = machine.of(&management);
    assert_eq!(tree.devices().count(), 0);
    assert!(tree.mgmtdevs[0].vdpa_devices.is_empty());
    let [physical] = &tree.physical_functions[..] else {
        panic!("{tree:?}")
    };
    assert!(physical.virtual_functions.is_empty());
    assert_eq!(physical.representors.len(), 3);
}

#[test]
fn a_machine_with_nothing_has_an_empty_tree() {
    let machine = Machine::new("nothing");
    fs::remove_dir_all(&machine.0).unwrap();
    let tree = machine.of(&Management::silent(ManagementState::Absent));
    assert!(tree.is_empty());
}

#[test]
fn processes_out_of_sight_are_reported() {
    let machine = Machine::new("sight");
    machine.device("sim0", "devices/vdpasim_net", "vhost_vdpa", "vhost-vdpa-7");
    let management = machine.managed(&[("sim0", "vdpasim_net")], &["sim0"]);
    assert!(machine.of(&management).all_processes_seen);
    // Another PID namespace.
    let namespace = machine.0.join("proc/self/ns/pid");
    fs::remove_file(&namespace).unwrap();
    symlink("pid:[4026532000]", &namespace).unwrap();
    assert!(!machine.of(&management).all_processes_seen);
    fs::remove_file(&namespace).unwrap();
    symlink("pid:[4026531836]", &namespace).unwrap();
    // Other users' processes are hidden.
    fs::remove_dir_all(machine.0.join("proc/1")).unwrap();
    machine.process(42, "", "/bin/x", 0);
    let tree = machine.of(&management);
    assert!(!tree.all_processes_seen);
    let device = tree.devices().next().unwrap();
    assert_eq!(device.holders[0].bellhop, None);
    let doorbells: Vec<Doorbell> = device.queues.iter().map(|queue| queue.doorbell).collect();
    assert_eq!(
        doorbells,
        [Doorbell::Mapped, Doorbell::Unknown, Doorbell::Unknown]
    );
}

#[test]
fn obstacles_to_posting_are_found() {
    let of = |file: &str, text: &str| {
        let machine = Machine::new("posting");
        machine.put(file, text);
        interrupts::obstacle(&machine.0)
    };
    let avic = "sys/module/kvm_amd/parameters/avic";
    assert_eq!(of(avic, "N\n"), Some(PostingObstacle::Kvm));
    assert_eq!(of(avic, "Y\n"), None);
    let apicv = "sys/module/kvm_intel/parameters/enable_apicv";
    assert_eq!(of(apicv, "N\n"), Some(PostingObstacle::Kvm));
    assert_eq!(
        of("proc/cmdline", "quiet intremap=nosid,nopost\n"),
        Some(PostingObstacle::CommandLine)
    );
    assert_eq!(of("proc/cmdline", "quiet intremap=on nopost\n"), None);
    let vtd = "sys/class/iommu/dmar0/intel-iommu/cap";
    assert_eq!(of(vtd, "d2008c222f0606\n"), Some(PostingObstacle::Iommu));
    assert_eq!(of(vtd, "8d2008c222f0606\n"), None);
    assert_eq!(of(vtd, "rubbish\n"), None);
    let amd = "sys/class/iommu/ivhd0/amd-iommu/features";
    assert_eq!(of(amd, "200000:0\n"), None);
    assert_eq!(of(amd, "0:200000\n"), None);
    assert_eq!(of(amd, "25bf732fa2295a\n"), None);
    assert_eq!(of(amd, "1:1\n"), Some(PostingObstacle::Iommu));
}

#[test]
fn a_machine_of_rubbish_does_no_harm() {
    let machine = Machine::with_nic("rubbish");
    machine.device(
        "nic0",
        &format!("devices/pci0000:00/{VF}"),
        "vhost_vdpa",
        "vhost-vdpa-7",
    );
    machine.put(
        &format!("sys/devices/pci0000:00/{VF}/nic0/vhost-vdpa-7/dev"),
        "999999999999:x\n",
    );
    machine.put(&format!("sys/{SF}/sfnum"), "-1\n");
    machine.put("sys/class/net/eth9/phys_switch_id", "\u{fffd}\n");
    machine.put("sys/class/net/eth9/phys_port_name", "pf0vf0\n");
    machine.link("nowhere", "sys/bus/auxiliary/devices/x.sf.1");
    machine.link("nowhere", "sys/bus/vdpa/devices/dangling");
    machine.put("proc/77/fd/0", "");
    machine.put("proc/99999999999999/fd/0", "");
    let device = format!("pci/{VF}");
    let mut management = machine.managed(&[("nic0", &device)], &["nic0", "dangling"]);
    management.devices.get_mut("nic0").unwrap().max_vqs = Some(u32::MAX);
    let tree = machine.of(&management);
    let device = tree.devices().next().unwrap();
    assert_eq!(device.queues.len(), 1 << 16);
    assert!(device.holders.is_empty());
    assert_eq!(tree.physical_functions[0].subfunctions[0].number, None);
}

#[test]
fn a_function_by_vfio_has_its_file_and_its_holder() {
    let machine = Machine::with_nic("vfio");
    let function = format!("sys/devices/pci0000:00/{VF}");
    fs::remove_file(machine.0.join(&function).join("driver")).unwrap();
    machine.link("../drivers/vfio-pci", &format!("{function}/driver"));
    machine.link("../groups/7", &format!("{function}/iommu_group"));
    machine.put("sys/class/vfio/7/dev", "1:3\n");
    machine.put("sys/class/vfio/noiommu-1/dev", "1:3\n");
    let socket = "/run/bellhop/vms/web/api.socket";
    let line = format!("bellhop\0run\0--api-socket\0{socket}\0");
    machine.process(42, &line, "/usr/bin/bellhop", 1);
    let management = Management::silent(ManagementState::Absent);
    let tree = machine.of(&management);
    let function = &tree.physical_functions[0].virtual_functions[0].function;
    let group = function.vfio.as_ref().unwrap();
    assert_eq!(group.path, PathBuf::from("/dev/vfio/7"));
    let [holder] = &group.holders[..] else {
        panic!("{group:?}")
    };
    let run = holder.bellhop.as_ref().unwrap();
    assert_eq!((holder.pid, run.api_socket.as_deref()), (42, Some(socket)));
    assert_eq!(tree.physical_functions[0].function.vfio, None);
    // By iommufd the process has the function's own file open.
    fs::remove_dir_all(machine.0.join("sys/class/vfio/7")).unwrap();
    machine.put("sys/class/vfio-dev/vfio3/dev", "1:3\n");
    machine.link("../groups/7", "sys/class/vfio-dev/vfio3/device/iommu_group");
    let tree = machine.of(&management);
    let function = &tree.physical_functions[0].virtual_functions[0].function;
    assert_eq!(function.vfio.as_ref().unwrap().holders.len(), 1);

    // A function that is no NIC with SR-IOV is in the tree, too.
    let machine = Machine::new("vfio-alone");
    machine.put("sys/bus/pci/devices/0000:09:00.0/class", "0x010802\n");
    machine.link(
        "../drivers/vfio-pci",
        "sys/bus/pci/devices/0000:09:00.0/driver",
    );
    let tree = machine.of(&management);
    let alone = &tree.physical_functions[0].function;
    assert_eq!(alone.address.to_string(), "0000:09:00.0");
    assert_eq!(alone.vfio, None, "it has no IOMMU group");
}
