//! `vdpa_mgmt::topology` and `bellhop topology` on the simulator: the users of each device,
//! including a virtual machine.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_dev/holder.rs"]
mod holder;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use holder::Holder;
use lab::guest::{BellhopArguments, Guest};
use lab::process::output;
use lab::sim::{SimDevice, require_lab};
use lab::threads::StopOnDrop;
use serde_json::Value;
use support::{MAC, bellhop, complaint, complaint_with, iproute2, listed, printed, program};
use vdpa_mgmt::bus::Bus;
use vdpa_mgmt::topology::{
    self, Class, Device, Doorbell, ManagementState, PostingObstacle, Topology,
};
use vdpa_mgmt::{Connection, NewDevice};

fn device<'a>(tree: &'a Topology, name: &str) -> &'a Device {
    tree.devices().find(|one| one.name == name).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&printed(&bellhop(arguments))).unwrap()
}

/// The tree as text, with lines that every terminal supports.
fn ascii(arguments: &[&str]) -> String {
    let mut command = Command::new(program());
    let command = command.arg("topology").args(arguments).env("LC_ALL", "C");
    printed(&command.stdin(Stdio::null()).output().unwrap())
}

#[test]
fn devices_are_below_the_simulator_with_their_holders() {
    require_lab().unwrap();
    output(Command::new("modprobe").args(["-a", "virtio_net", "virtio_vdpa"])).unwrap();
    let net = SimDevice::net("net", MAC, 1400).unwrap();
    let block = SimDevice::block("blk").unwrap();
    let machine = SimDevice::net("own", "02:5e:10:53:11:02", 1500).unwrap();
    Bus::default().bind(machine.name(), "virtio_vdpa").unwrap();
    let holder = Holder::start(net.path());

    let tree = topology::read().unwrap();
    assert_eq!(tree.management, ManagementState::Known);
    assert!(tree.all_processes_seen);
    assert!(tree.vdpa_devices.is_empty(), "{tree:?}");
    let names: Vec<String> = tree
        .mgmtdevs
        .iter()
        .map(|one| one.name.to_string())
        .collect();
    for mgmtdev in ["vdpasim_net", "vdpasim_blk", "vduse"] {
        assert!(names.iter().any(|name| name == mgmtdev), "{names:?}");
    }
    let held = device(&tree, net.name());
    assert_eq!(
        (held.class, held.mtu, held.max_vqs),
        (Some(Class::Network), Some(1400), Some(3))
    );
    assert_eq!(held.path.as_deref(), Some(net.path()));
    let [one] = &held.holders[..] else {
        panic!("{held:?}")
    };
    assert_eq!(
        (one.pid, one.command.as_str()),
        (holder.pid(), "lab-holder")
    );
    let executable = one.executable.as_ref().unwrap();
    assert!(executable.ends_with("lab-holder"), "{executable:?}");
    assert_eq!(one.bellhop, None);
    // The simulator is known to have no doorbell and no interrupt.
    assert_eq!(held.queues.len(), 3);
    assert!(
        held.queues
            .iter()
            .all(|queue| queue.doorbell == Doorbell::NotMapped)
    );
    assert_eq!(held.posting_obstacle, Some(PostingObstacle::Software));
    let free = device(&tree, block.name());
    assert_eq!((free.class, free.holders.len()), (Some(Class::Block), 0));
    assert_eq!(free.queues[0].doorbell, Doorbell::Unknown);
    let own = device(&tree, machine.name());
    assert_eq!(
        (own.driver.as_deref(), &own.path),
        (Some("virtio_vdpa"), &None)
    );
    assert_eq!(own.netdevs.len(), 1, "{own:?}");

    // The command prints the same.
    let text = ascii(&[]);
    let lines = [
        format!("-- lab-net: network mac {MAC} mtu 1400 max_vqs 3 driver vhost_vdpa"),
        format!("-- held by lab-holder (PID {}) ", holder.pid()),
        "-- doorbells: not mapped of 0-2".to_owned(),
        "-- lab-blk: block".to_owned(),
        format!("-- {}: free", block.path().display()),
        format!("driver virtio_vdpa netdev {}", own.netdevs[0]),
    ];
    for line in lines {
        assert!(text.contains(&line), "no {line:?} in\n{text}");
    }
    assert!(text.is_ascii(), "{text}");
    let boxes = Command::new(program())
        .arg("topology")
        .env("LC_ALL", "C.UTF-8")
        .output()
        .unwrap();
    assert!(
        printed(&boxes).contains("└── held by lab-holder")
            || printed(&boxes).contains("├── held by lab-holder")
    );
    for format in [&["-j"][..], &["-jp"]] {
        let shown = json(&[&["topology"], format].concat());
        assert_eq!(shown["topology"], serde_json::to_value(&tree).unwrap());
    }
    // The query did not disturb the holder. Opening its device would have failed; opening the free
    // one would reset it.
    assert_eq!(topology::read().unwrap(), tree);
    drop(holder);
}

#[test]
fn a_virtual_machine_is_named_and_keeps_its_device() {
    require_lab().unwrap();
    output(Command::new("modprobe").args(["-a", "virtio_net", "virtio_vdpa"])).unwrap();
    let net = SimDevice::net("vm", MAC, 1500).unwrap();
    let options = format!("path={},id=web", net.path().display());
    let arguments = BellhopArguments::small()
        .unwrap()
        .argument("--vdpa", &options);
    let guest = Guest::start(&arguments).unwrap();
    let tree = topology::read().unwrap();
    let held = device(&tree, net.name());
    let [holder] = &held.holders[..] else {
        panic!("{held:?}")
    };
    assert_eq!(
        (holder.pid, holder.command.as_str()),
        (guest.pid(), "bellhop")
    );
    let run = holder.bellhop.as_ref().unwrap();
    assert_eq!(run.id.as_deref(), Some("web"));
    assert!(run.kernel.is_some() && run.config.is_none(), "{run:?}");
    assert!(
        held.queues
            .iter()
            .all(|queue| queue.doorbell == Doorbell::NotMapped)
    );
    let text = ascii(&[]);
    assert!(
        text.contains(", a virtual machine: kernel ") && text.contains(" id web"),
        "{text}"
    );

    // Commands that would take the device away are refused, and name the holder.
    let pid = format!("bellhop (PID {})", guest.pid());
    let words = ["lab-vm is in use by", &pid, "end that use first"];
    complaint(&bellhop(&["dev", "del", net.name()]), &words);
    complaint(&bellhop(&["bind", net.name(), "virtio_vdpa"]), &words);
    let mut guest = guest;
    let frames = guest.command("frames 20 128 1").unwrap();
    assert_eq!(frames["rx"], 20, "{frames}");
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

#[test]
fn without_rights_or_management_the_rest_is_shown() {
    require_lab().unwrap();
    let net = SimDevice::net("rest", MAC, 1500).unwrap();
    let holder = Holder::start(net.path());
    let unprivileged = Command::new(program())
        .arg("topology")
        .env("LC_ALL", "C")
        .uid(65534)
        .gid(65534)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = printed(&unprivileged);
    assert!(text.contains("lab-rest: network"), "{text}");
    assert!(
        !text.contains("held by") && !text.contains("free") && text.contains("as root"),
        "{text}"
    );
    let elsewhere = Command::new("unshare")
        .arg("-n")
        .arg(program())
        .arg("topology")
        .env("LC_ALL", "C")
        .output()
        .unwrap();
    let text = printed(&elsewhere);
    assert!(
        text.contains("\n`-- ") || text.starts_with("lab-rest:"),
        "{text}"
    );
    assert!(text.contains(&format!("PID {}", holder.pid())), "{text}");
    assert!(
        text.contains("initial network namespace") && !text.contains("mgmtdev vdpasim"),
        "{text}"
    );
}

#[test]
fn a_blocked_management_is_shown_around() {
    require_lab().unwrap();
    let net = SimDevice::net("stuck", MAC, 1500).unwrap();
    let holder = Holder::start(net.path());
    let held_by =
        |one: &Device| -> Vec<u32> { one.holders.iter().map(|holder| holder.pid).collect() };
    let before = held_by(device(&topology::read().unwrap(), net.name()));
    assert_eq!(before, [holder.pid()]);
    // What Bellhop never does: delete the device while it is open.
    let mut blocked = Command::new("vdpa")
        .args(["dev", "del", net.name()])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    let tree = topology::read().unwrap();
    // The device is being removed from the bus. Its name may be gone from sysfs by now, and never
    // comes back.
    let is_gone = !Path::new("/sys/bus/vdpa/devices").join(net.name()).exists();
    // The command reports it at once. It exits when the kernel finishes its request, like every
    // program that has sent a request by then.
    let mut command = Command::new(program())
        .arg("topology")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(command.stdout.take().unwrap()).lines();
    let told = lines
        .map(Result::unwrap)
        .any(|line| line.contains("does not answer"));
    drop(holder);
    assert!(blocked.wait().unwrap().success());
    assert!(command.wait().unwrap().success());
    std::mem::forget(net);
    assert!(told);
    assert_eq!(tree.management, ManagementState::Blocked);
    // Seen as before, or without its character device, or gone.
    match tree.devices().find(|one| one.name == "lab-stuck") {
        Some(one) if one.path.is_some() => assert_eq!(held_by(one), before, "{one:?}"),
        Some(one) => assert!(
            held_by(one).iter().all(|pid| before.contains(pid)),
            "{one:?}"
        ),
        None => assert!(is_gone, "{tree:?}"),
    }
}

#[test]
fn wrong_names_are_explained() {
    require_lab().unwrap();
    complaint_with(
        2,
        &bellhop(&["topology", "pci/01:00"]),
        &["01:00", "DOMAIN:BUS"],
    );
    complaint(
        &bellhop(&["topology", "pci/0000:99:00.0"]),
        &["no PCI function 0000:99:00.0"],
    );
    complaint(
        &bellhop(&["topology", "lab-none"]),
        &["no network interface lab-none"],
    );
    complaint(
        &bellhop(&["topology", "lo"]),
        &["lo belongs to no PCI function"],
    );
    assert!(printed(&bellhop(&["topology", "--help"])).contains("posted interrupts"));
}

/// Devices that are deleted at the end in any case.
struct Leftovers(&'static str);

impl Drop for Leftovers {
    fn drop(&mut self) {
        for name in listed().iter().filter(|name| name.starts_with(self.0)) {
            let _ = iproute2(&["dev", "del", name]);
        }
    }
}

#[test]
fn unchanged_devices_are_complete_while_others_change() {
    const STAYING: usize = 20;
    require_lab().unwrap();
    let connection = Connection::open().unwrap();
    let _leftovers = Leftovers("lab-t");
    let new = |name: &str| {
        let new = NewDevice::new(name, "vdpasim_net".parse().unwrap()).unwrap();
        new.mtu(Some(1400)).unwrap()
    };
    let going: Vec<String> = (0..4).map(|number| format!("lab-tgo-{number}")).collect();
    let staying: BTreeSet<String> = (0..STAYING)
        .map(|number| format!("lab-tstay-{number}"))
        .collect();
    for name in going.iter().chain(&staying) {
        connection.add(&new(name)).unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changer = scope.spawn(|| {
            let connection = Connection::open().unwrap();
            while !stop.load(Ordering::Relaxed) {
                for name in &going {
                    connection.delete(name).unwrap();
                    connection.add(&new(name)).unwrap();
                }
            }
        });
        // Also when an assertion below fails: the scope waits for its threads.
        let stopped = StopOnDrop(&stop);
        for _ in 0..10 {
            let tree = topology::read().unwrap();
            assert!(tree.vdpa_devices.is_empty(), "{:?}", tree.vdpa_devices);
            let found: Vec<&Device> = tree.devices().collect();
            let names: BTreeSet<String> = found.iter().map(|one| one.name.clone()).collect();
            assert_eq!(names.len(), found.len());
            assert!(names.is_superset(&staying), "{names:?}");
            for one in found.iter().filter(|one| staying.contains(&one.name)) {
                assert_eq!((one.mtu, one.queues.len()), (Some(1400), 3), "{one:?}");
                assert!(one.path.is_some(), "{one:?}");
            }
        }
        drop(stopped);
        changer.join().unwrap();
    });
}
