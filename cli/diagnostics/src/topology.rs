//! The tree of [`vdpa_mgmt::topology`] as text for people.

use std::fmt::{Display, Write as _};
use std::path::Path;

use bellhop_api::config::show_list;
use bellhop_common::text::address;
use bellhop_common::tree::{Lines, Node};
use vdpa_mgmt::topology::{
    Device, DeviceHolder, Doorbell, ManagementDevice, ManagementState, PciFunction,
    PhysicalFunction, PostingObstacle, Representor, Subfunction, Tap, Topology, VirtualFunction,
};

/// The whole tree, with warnings at the end.
#[must_use]
pub fn text(topology: &Topology, lines: Lines) -> String {
    let functions = topology.physical_functions.iter();
    let functions = functions.map(|one| physical_function(one, topology));
    let roots = functions
        .chain(below(&topology.mgmtdevs, &topology.vdpa_devices, topology))
        .collect::<Vec<_>>();
    let mut text: String = roots.iter().map(|node| node.draw(lines)).collect();
    if topology.is_empty() {
        text.push_str(
            "This host has no NIC with SR-IOV and no vDPA device: `bellhop doctor` lists the \
             missing parts, and `bellhop mgmtdev --help` explains management devices.\n",
        );
    }
    let note = match topology.management {
        ManagementState::Known => "",
        ManagementState::Absent => {
            "Cannot list management devices: the kernel's vDPA management is not loaded (`modprobe \
             vdpa`, then the NIC's vDPA driver).\n"
        }
        ManagementState::OtherNamespace => {
            "Cannot list management devices: vDPA management exists only in the initial network \
             namespace (`nsenter --net=/proc/1/ns/net`).\n"
        }
        ManagementState::Blocked => {
            "Cannot list management devices: the kernel's vDPA management does not answer. A \
             process holds its lock, mostly a `dev del` of a device that is still open. End the \
             process that has the device open. Until then the tree shows only data of sysfs.\n"
        }
    };
    text.push_str(note);
    if !topology.all_processes_seen {
        text.push_str("Some processes are hidden; to see all holders, run as root.\n");
    }
    text
}

fn physical_function(physical: &PhysicalFunction, topology: &Topology) -> Node {
    let function = &physical.function;
    let mut text = described(format!("pci/{}:", function.address), function);
    if let Some(total) = physical.total_vfs {
        put(&mut text, "vfs", Some(physical.virtual_functions.len()));
        put(&mut text, "total_vfs", Some(total));
    }
    put(&mut text, "switch", physical.switch_id.as_deref());
    let virtual_ones = physical.virtual_functions.iter();
    let subfunctions = physical.subfunctions.iter();
    Node::new(text)
        .with(vfio_group(function, topology))
        .with(below(&function.mgmtdevs, &function.vdpa_devices, topology))
        .with(virtual_ones.map(|one| virtual_function(one, topology)))
        .with(subfunctions.map(|one| subfunction(one, topology)))
        .with(physical.representors.iter().map(representor))
}

fn virtual_function(one: &VirtualFunction, topology: &Topology) -> Node {
    let function = &one.function;
    let name = format!("vf {} pci/{}:", one.index, function.address);
    Node::new(described(name, function))
        .with(one.representor.iter().map(representor))
        .with(vfio_group(function, topology))
        .with(below(&function.mgmtdevs, &function.vdpa_devices, topology))
}

fn subfunction(one: &Subfunction, topology: &Topology) -> Node {
    let mut text = match one.number {
        Some(number) => format!("sf {number} auxiliary/{}:", one.name),
        None => format!("auxiliary/{}:", one.name),
    };
    put(&mut text, "netdev", some(&one.netdevs));
    put(&mut text, "driver", one.driver.as_deref());
    Node::new(text)
        .with(one.representor.iter().map(representor))
        .with(below(&one.mgmtdevs, &one.vdpa_devices, topology))
}

fn described(mut text: String, function: &PciFunction) -> String {
    put(&mut text, "netdev", some(&function.netdevs));
    put(&mut text, "driver", function.driver.as_deref());
    put(&mut text, "numa_node", function.numa_node);
    put(&mut text, "iommu_group", function.iommu_group);
    text
}

fn representor(one: &Representor) -> Node {
    let mut text = format!("representor {}:", one.netdev);
    put(&mut text, "port", Some(&one.port_name));
    put(&mut text, "state", one.state.as_deref());
    put(&mut text, "master", one.master.as_deref());
    Node::new(text)
}

fn tap(one: &Tap) -> Node {
    let mut text = format!("tap {}:", one.netdev);
    put(&mut text, "state", one.state.as_deref());
    put(&mut text, "master", one.master.as_deref());
    Node::new(text)
}

/// The children of a node.
fn below<'a>(
    mgmtdevs: &'a [ManagementDevice],
    devices: &'a [Device],
    topology: &'a Topology,
) -> impl Iterator<Item = Node> {
    let all_seen = topology.all_processes_seen;
    let mgmtdevs = mgmtdevs.iter().map(move |one| {
        let mut text = format!("mgmtdev {}:", one.name);
        for class in &one.supported_classes {
            let _ = write!(text, " {class}");
        }
        put(&mut text, "max_supported_vqs", one.max_supported_vqs);
        let devices = one.vdpa_devices.iter();
        Node::new(text).with(devices.map(|one| device(one, all_seen)))
    });
    mgmtdevs.chain(devices.iter().map(move |one| device(one, all_seen)))
}

fn device(one: &Device, all_seen: bool) -> Node {
    let mut text = format!("{}:", one.name);
    if let Some(class) = one.class {
        let _ = write!(text, " {class}");
    }
    put(&mut text, "mac", one.mac.map(|mac| address(&mac)));
    put(&mut text, "mtu", one.mtu);
    put(&mut text, "max_vqs", one.max_vqs);
    put(&mut text, "driver", one.driver.as_deref());
    put(&mut text, "netdev", some(&one.netdevs));
    let node = Node::new(text).with(one.tap.iter().map(tap));
    let Some(path) = &one.path else {
        return node;
    };
    let mut file = held(path, &one.holders, all_seen);
    if !one.holders.is_empty() {
        file = file.with([Node::new(doorbells(one)), Node::new(posted_interrupts(one))]);
    }
    node.with([file])
}

/// The file by which a program uses a function through VFIO.
fn vfio_group(function: &PciFunction, topology: &Topology) -> Option<Node> {
    let group = function.vfio.as_ref()?;
    Some(held(
        &group.path,
        &group.holders,
        topology.all_processes_seen,
    ))
}

/// A device's file and the processes that have it open.
fn held(path: &Path, holders: &[DeviceHolder], all_seen: bool) -> Node {
    let mut text = path.display().to_string();
    if holders.is_empty() && all_seen {
        text.push_str(": free");
    }
    Node::new(text).with(holders.iter().map(|one| Node::new(holder(one))))
}

fn holder(one: &DeviceHolder) -> String {
    let mut text = format!("held by {} (PID {})", one.command, one.pid);
    if let Some(path) = &one.executable {
        let _ = write!(text, " {}", path.display());
    }
    if let Some(run) = &one.bellhop {
        text.push_str(", a virtual machine:");
        put(&mut text, "config", run.config.as_deref());
        put(&mut text, "api-socket", run.api_socket.as_deref());
        put(&mut text, "kernel", run.kernel.as_deref());
        put(&mut text, "id", run.id.as_deref());
    }
    text
}

fn doorbells(one: &Device) -> String {
    let of = |doorbell| {
        let queues = one.queues.iter();
        let with = queues.filter(move |queue| queue.doorbell == doorbell);
        with.map(|queue| queue.index).collect::<Vec<u32>>()
    };
    let parts: Vec<String> = [
        ("mapped", of(Doorbell::Mapped)),
        ("not mapped", of(Doorbell::NotMapped)),
        ("unknown", of(Doorbell::Unknown)),
    ]
    .into_iter()
    .filter(|(_, queues)| !queues.is_empty())
    .map(|(word, queues)| format!("{word} of {}", show_list(queues)))
    .collect();
    if parts.is_empty() {
        "doorbells: unknown".to_owned()
    } else {
        format!("doorbells: {}", parts.join(", "))
    }
}

fn posted_interrupts(one: &Device) -> String {
    let reason = match one.posting_obstacle {
        None => return "posted interrupts: unknown".to_owned(),
        Some(PostingObstacle::Software) => "the device has no interrupts of its own",
        Some(PostingObstacle::Kvm) => {
            "KVM does not use the processor's virtual interrupt controller \
             (kvm_intel.enable_apicv, kvm_amd.avic)"
        }
        Some(PostingObstacle::Iommu) => "an IOMMU of this host cannot post interrupts",
        Some(PostingObstacle::CommandLine) => "intremap= on the kernel's command line disables it",
    };
    format!("posted interrupts: impossible, {reason}")
}

/// Adds a word and its value, if there is one.
fn put(text: &mut String, word: &str, value: Option<impl Display>) {
    if let Some(value) = value {
        // Writing to a String does not fail.
        let _ = write!(text, " {word} {value}");
    }
}

fn some(list: &[String]) -> Option<String> {
    (!list.is_empty()).then(|| list.join(","))
}

#[cfg(test)]
mod tests;
