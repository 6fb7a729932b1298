//! `bellhop topology` on the SR-IOV rig: virtual functions under vp_vdpa, a guest with doorbells.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use std::process::{Command, Stdio};

use lab::guest::{BellhopArguments, Guest};
use lab::node::Node;
use lab::sriov::{SriovNic, VfDevice};
use lab::threads::StopOnDrop;
use serde_json::Value;
use support::{bellhop, complaint, printed, program};
use vdpa_mgmt::pci::Pci;
use vdpa_mgmt::topology::{self, Doorbell, PostedInterrupt};

/// The tree as text, with lines that every terminal supports.
fn ascii(arguments: &[&str]) -> String {
    let mut command = Command::new(program());
    let command = command.arg("topology").args(arguments).env("LC_ALL", "C");
    printed(&command.stdin(Stdio::null()).output().unwrap())
}

/// Pages of vhost-vdpa devices in a process's memory.
fn pages(guest: &Guest) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid())).unwrap();
    maps.lines()
        .filter(|line| line.contains("vhost-vdpa"))
        .count()
}

/// The node daemon's endpoints return the same as the commands, for this physical function among
/// others.
fn the_daemon_reports_the_same(physical: &str) {
    let node = Node::start("topology").unwrap();
    for (path, arguments) in [
        ("/v1/functions", &["vf", "show", "-j"][..]),
        ("/v1/mgmtdevs", &["mgmtdev", "show", "-j"]),
        ("/v1/vdpa-devices", &["dev", "show", "-j"]),
        ("/v1/topology", &["topology", "-j"]),
    ] {
        let found = node.api.get(path).unwrap();
        let shown = printed(&bellhop(arguments));
        assert_eq!(found, serde_json::from_str::<Value>(&shown).unwrap());
        if path == "/v1/functions" {
            assert!(found["vf"][physical].is_object(), "{found:#}");
        }
    }
}

#[test]
fn functions_devices_and_a_guests_doorbells() {
    let nic = SriovNic::enable(2).unwrap();
    let used = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let other = nic.vf(1).unwrap();
    let options = format!("path={},id=nic,doorbell=on", used.path().display());
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .argument("--vdpa", &options);
    let guest = Guest::start(&arguments).unwrap();

    let tree = topology::read().unwrap();
    let [physical] = &tree.physical_functions[..] else {
        panic!("{tree:?}")
    };
    assert_eq!(physical.function.driver.as_deref(), Some("virtio-pci"));
    assert_eq!(physical.function.netdevs.len(), 1, "{physical:?}");
    assert_eq!(physical.total_vfs, Some(4));
    let [first, second] = &physical.virtual_functions[..] else {
        panic!("{physical:?}")
    };
    assert_eq!(second.function.address.to_string(), other.address());
    assert_eq!(second.function.driver.as_deref(), Some("virtio-pci"));
    assert!(second.function.mgmtdevs.is_empty());
    assert_eq!(first.function.driver.as_deref(), Some("vp-vdpa"));
    // Each is alone in its IOMMU group.
    assert!(first.function.iommu_group.is_some());
    assert_ne!(first.function.iommu_group, second.function.iommu_group);
    let mgmtdev = &first.function.mgmtdevs[0];
    assert_eq!(
        mgmtdev.name.to_string(),
        format!("pci/{}", used.function().address())
    );
    let device = &mgmtdev.vdpa_devices[0];
    assert_eq!(device.name, used.name());
    assert_eq!(device.holders[0].pid, guest.pid());
    assert_eq!(
        device.holders[0].bellhop.as_ref().unwrap().id.as_deref(),
        Some("nic")
    );

    // Exactly the pages that the VMM has mapped: the data queues that the guest uses, never the
    // control queue.
    let mapped: Vec<u32> = device
        .queues
        .iter()
        .filter(|queue| queue.doorbell == Doorbell::Mapped)
        .map(|queue| queue.index)
        .collect();
    assert!(
        mapped.len() >= 2 && mapped.len() == pages(&guest),
        "{device:?}"
    );
    assert_eq!(
        mapped,
        (0..u32::try_from(mapped.len()).unwrap()).collect::<Vec<_>>()
    );
    assert_eq!(
        Some(device.queues.len()),
        device.max_vqs.map(|count| usize::try_from(count).unwrap())
    );
    assert_eq!(device.queues.last().unwrap().doorbell, Doorbell::NotMapped);
    // QEMU's IOMMU posts no interrupts, nor does its AMD processor.
    assert!(device.posting_obstacle.is_some(), "{device:?}");
    assert!(
        device
            .queues
            .iter()
            .all(|queue| queue.posted_interrupt == PostedInterrupt::No)
    );

    let text = ascii(&[]);
    for line in [
        format!("pci/{}: netdev ", physical.function.address),
        format!("-- vf 0 pci/{}: driver vp-vdpa", first.function.address),
        format!("-- vf 1 pci/{}: netdev ", second.function.address),
        format!(
            "-- doorbells: mapped of 0-{}, not mapped of ",
            mapped.len() - 1
        ),
        "-- posted interrupts: impossible, ".to_owned(),
    ] {
        assert!(text.contains(&line), "no {line:?} in\n{text}");
    }
    println!("{text}");
    the_daemon_reports_the_same(&format!("pci/{}", physical.function.address));

    // The NIC can be named by any of its names; the simulator is not part of it.
    let netdev = &physical.function.netdevs[0];
    let address = first.function.address;
    let part = ascii(&[netdev]);
    assert_eq!(part, ascii(&[&format!("pci/{address}")]));
    assert!(text.starts_with(&part) && !part.contains("vduse"), "{part}");
    let refused = bellhop(&["vf", "count", netdev, "0"]);
    complaint(&refused, &["is open", &format!("PID {}", guest.pid())]);
    assert!(guest.power_off().unwrap().success());

    let tree = topology::read().unwrap();
    let device = tree.devices().find(|one| one.name == used.name()).unwrap();
    assert!(device.holders.is_empty());
    assert!(
        device
            .queues
            .iter()
            .all(|queue| queue.doorbell == Doorbell::Unknown)
    );
}

#[test]
fn functions_changed_meanwhile_are_missing_or_complete() {
    let pci = Pci::default();
    let nic = SriovNic::enable(1).unwrap();
    let physical = topology::read().unwrap().physical_functions.remove(0);
    let address = physical.function.address;
    drop(nic);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changer = scope.spawn(|| {
            let _done = StopOnDrop(&done);
            for round in 0..12 {
                pci.set_virtual_functions(address, if round % 2 == 0 { 4 } else { 0 })
                    .unwrap();
            }
        });
        let mut counts = std::collections::BTreeSet::new();
        while !done.load(std::sync::atomic::Ordering::Relaxed) {
            let tree = topology::read().unwrap();
            let physical = &tree.physical_functions[0];
            assert_eq!(physical.total_vfs, Some(4));
            counts.insert(physical.virtual_functions.len());
            for one in &physical.virtual_functions {
                assert!(one.index < 4 && one.function.address != address, "{one:?}");
            }
        }
        changer.join().unwrap();
        assert!(counts.len() > 1, "{counts:?}");
    });
}
