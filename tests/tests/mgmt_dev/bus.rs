//! Drivers of vDPA devices, and the kernel's reports about them.

use std::process::Command;
use std::time::Duration;

use lab::process::output;
use lab::sim::{SimDevice, require_lab};
use vdpa_mgmt::bus::Bus;
use vdpa_mgmt::uevent::{Action, Notice, Uevents};

use super::holder::Holder;
use super::support::{MAC, bellhop, complaint, printed};

fn load_drivers() {
    require_lab().unwrap();
    output(Command::new("modprobe").args(["-a", "virtio_net", "virtio_vdpa"])).unwrap();
}

#[test]
fn a_device_goes_to_this_machine_and_back() {
    load_drivers();
    let net = SimDevice::net("bind", MAC, 1500).unwrap();
    let path = net.path().display().to_string();
    let shown = format!("lab-bind: driver vhost_vdpa path {path}\n");
    assert_eq!(printed(&bellhop(&["bind", net.name()])), shown);
    assert_eq!(printed(&bellhop(&["bind", &path])), shown);
    let shown = printed(&bellhop(&["bind", net.name(), "virtio_vdpa"]));
    assert_eq!(shown, "lab-bind: driver virtio_vdpa\n");
    let links = String::from_utf8(output(Command::new("ip").arg("link")).unwrap()).unwrap();
    assert!(links.contains(MAC), "{links}");
    // The same bind again changes nothing, and neither does a dry run.
    printed(&bellhop(&["bind", net.name(), "virtio_vdpa"]));
    let plan = printed(&bellhop(&["bind", net.name(), "vhost_vdpa", "--dry-run"]));
    assert!(plan.starts_with("1. delete network interface "), "{plan}");
    assert!(plan.ends_with("bind lab-bind to vhost_vdpa\n"), "{plan}");
    let driver = Bus::default().device(net.name()).unwrap().driver;
    assert_eq!(driver.as_deref(), Some("virtio_vdpa"));
    complaint(
        &bellhop(&["bind", &path]),
        &["no vDPA device is behind", &path],
    );
    let shown = printed(&bellhop(&["bind", net.name(), "vhost_vdpa", "-j"]));
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let device = Bus::default().device(net.name()).unwrap();
    let path = device.path().unwrap();
    assert_eq!(shown["bind"]["lab-bind"]["path"], path.to_str().unwrap());
    assert!(path.exists());
    assert_eq!(
        Bus::default()
            .behind(device.character_device.unwrap())
            .unwrap(),
        Some(device)
    );
}

#[test]
fn a_device_in_use_keeps_its_driver() {
    load_drivers();
    let net = SimDevice::net("bind", MAC, 1500).unwrap();
    let holder = Holder::start(net.path());
    let words = [
        "lab-bind is in use by lab-holder",
        &format!("PID {}", holder.pid()),
    ];
    complaint(&bellhop(&["bind", net.name(), "virtio_vdpa"]), &words);
    let device = Bus::default().device(net.name()).unwrap();
    assert_eq!(device.driver.as_deref(), Some("vhost_vdpa"));
}

#[test]
fn a_wrong_device_or_driver_is_an_error() {
    load_drivers();
    let net = SimDevice::net("bind", MAC, 1500).unwrap();
    complaint(
        &bellhop(&["bind", "lab-none"]),
        &["no vDPA device lab-none", "bellhop dev show"],
    );
    complaint(
        &bellhop(&["bind", net.name(), "vfio_vdpa"]),
        &["no vdpa bus driver vfio_vdpa", "modprobe"],
    );
    // An override for another driver: the new driver fails, the old one is restored.
    let override_file = format!("/sys/bus/vdpa/devices/{}/driver_override", net.name());
    std::fs::write(override_file, "vhost_vdpa\n").unwrap();
    let error = Bus::default().bind(net.name(), "virtio_vdpa").unwrap_err();
    assert!(error.to_string().contains("now has vhost_vdpa"), "{error}");
    assert!(
        Bus::default()
            .device(net.name())
            .unwrap()
            .path()
            .unwrap()
            .exists()
    );
}

#[test]
fn the_kernel_notifies_of_added_and_removed_devices() {
    load_drivers();
    let mut uevents = Uevents::open().unwrap();
    let net = SimDevice::net("event", MAC, 1500).unwrap();
    Bus::default().bind(net.name(), "virtio_vdpa").unwrap();
    drop(net);
    let mut seen = Vec::new();
    while let Some(notice) = uevents.next(Some(Duration::from_secs(2))).unwrap() {
        let Notice::Event(event) = notice else {
            panic!("lost")
        };
        assert_eq!(event.name, "lab-event");
        assert!(event.sequence.is_some());
        seen.push((event.action, event.driver));
    }
    let actions: Vec<Action> = seen.iter().map(|one| one.0).collect();
    let expected = [
        Action::Add,
        Action::Bind,
        Action::Unbind,
        Action::Bind,
        Action::Unbind,
        Action::Remove,
    ];
    assert_eq!(actions, expected, "{seen:?}");
    assert_eq!(seen[1].1.as_deref(), Some("vhost_vdpa"));
    assert_eq!(seen[3].1.as_deref(), Some("virtio_vdpa"));
}
