#![allow(clippy::unwrap_used, reason = "tests")]
use std::os::unix::fs::symlink;

use super::*;

struct Sysfs(PathBuf);

impl Sysfs {
    fn new(test: &str) -> Self {
        let root = std::env::temp_dir().join(format!("bellhop-bus-{test}-{}", std::process::id()));
        fs::create_dir_all(root.join("bus/vdpa/devices")).unwrap();
        Self(root)
    }

    fn add(&self, name: &str, driver: &str, entry: &str) {
        let device = self.0.join("bus/vdpa/devices").join(name);
        fs::create_dir_all(device.join(entry)).unwrap();
        symlink(format!("../../drivers/{driver}"), device.join("driver")).unwrap();
    }

    /// A driver whose files record writes and change nothing.
    fn driver(&self, driver: &str) {
        let driver = self.0.join("bus/vdpa/drivers").join(driver);
        fs::create_dir_all(&driver).unwrap();
        for file in ["bind", "unbind"] {
            fs::write(driver.join(file), "").unwrap();
        }
    }

    fn written(&self, file: &str) -> String {
        fs::read_to_string(self.0.join("bus/vdpa/drivers").join(file)).unwrap()
    }
}

impl Drop for Sysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn kind<T: std::fmt::Debug>(outcome: Result<T, Error>) -> ErrorKind {
    outcome.unwrap_err().kind()
}

#[test]
fn names_and_character_devices_are_found_both_ways() {
    let sysfs = Sysfs::new("both");
    sysfs.add("b", "virtio_vdpa", "virtio0");
    sysfs.add("a", "vhost_vdpa", "vhost-vdpa-7");
    let bus = Bus::at(&sysfs.0);
    let devices = bus.devices().unwrap();
    assert_eq!(devices.len(), 2);
    assert_eq!(devices[0].path(), Some("/dev/vhost-vdpa-7".into()));
    assert_eq!(devices[0].driver.as_deref(), Some("vhost_vdpa"));
    assert_eq!(devices[1].path(), None);
    assert_eq!(bus.behind(7).unwrap().unwrap().name, "a");
    assert_eq!(bus.behind(8).unwrap(), None);
}

#[test]
fn bad_names_missing_devices_and_a_missing_bus_are_distinct_errors() {
    let sysfs = Sysfs::new("bad");
    let bus = Bus::at(&sysfs.0);
    for name in ["", ".", "..", "../x", "a/b", "a\0"] {
        assert_eq!(kind(bus.device(name)), ErrorKind::BadName, "{name:?}");
    }
    assert_eq!(kind(bus.device("x")), ErrorKind::NotFound);
    let nowhere = Bus::at(&sysfs.0.join("nowhere"));
    assert_eq!(kind(nowhere.devices()), ErrorKind::NoVdpa);
    assert_eq!(kind(nowhere.device("x")), ErrorKind::NoVdpa);
}

#[test]
fn only_the_kernels_spelling_of_a_number_counts() {
    assert_eq!(number_of("vhost-vdpa-0"), Some(0));
    for bad in ["", "-1", "+1", "01", "4294967296", "1x"] {
        let entry = format!("vhost-vdpa-{bad}");
        assert_eq!(number_of(&entry), None, "{entry}");
    }
}

#[test]
fn a_device_goes_from_driver_to_driver() {
    let sysfs = Sysfs::new("bind");
    // It has no character device, so no process can hold it.
    sysfs.add("a", "virtio_vdpa", "virtio0");
    sysfs.driver("virtio_vdpa");
    let bus = Bus::at(&sysfs.0);
    for driver in ["vhost_vdpa", "", "..", "a/b"] {
        let error = bus.bind("a", driver).unwrap_err();
        assert!(
            error.to_string().contains("no vdpa bus driver"),
            "{driver:?} {error}"
        );
    }
    sysfs.driver("vhost_vdpa");
    bus.bind("a", "virtio_vdpa").unwrap();
    bus.check_bind("a", "vhost_vdpa").unwrap();
    assert!(bus.check_bind("a", "other").is_err());
    assert_eq!(sysfs.written("virtio_vdpa/unbind"), "");
    bus.bind("a", "vhost_vdpa").unwrap();
    assert_eq!(sysfs.written("virtio_vdpa/unbind"), "a");
    assert_eq!(sysfs.written("vhost_vdpa/bind"), "a");
}

#[test]
fn the_old_driver_comes_back_when_the_new_one_fails() {
    let sysfs = Sysfs::new("back");
    sysfs.add("a", "virtio_vdpa", "virtio0");
    sysfs.driver("virtio_vdpa");
    fs::create_dir_all(sysfs.0.join("bus/vdpa/drivers/vhost_vdpa")).unwrap();
    let error = Bus::at(&sysfs.0).bind("a", "vhost_vdpa").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotUndone);
    assert!(error.to_string().contains("now has virtio_vdpa"), "{error}");
    assert_eq!(sysfs.written("virtio_vdpa/bind"), "a");
}

#[test]
fn network_interfaces_are_found_where_they_are() {
    let sysfs = Sysfs::new("netdev");
    sysfs.add("a", "virtio_vdpa", "virtio3");
    sysfs.add("b", "vhost_vdpa", "vhost-vdpa-7");
    let bus = Bus::at(&sysfs.0);
    assert_eq!(bus.netdev("a").unwrap(), Netdev::None);
    assert_eq!(bus.netdev("b").unwrap(), Netdev::None);
    assert_eq!(kind(bus.netdev("c")), ErrorKind::NotFound);
    assert_eq!(kind(bus.netdev("../a")), ErrorKind::BadName);
    let net = sysfs.0.join("bus/vdpa/devices/a/virtio3/net");
    fs::create_dir_all(net.join("eth7")).unwrap();
    // Without a number the interface is being added or removed.
    assert_eq!(bus.netdev("a").unwrap(), Netdev::Elsewhere);
    for (text, index) in [("9\n", Some(9)), ("", None), ("x", None), ("-1", None)] {
        fs::write(net.join("eth7/ifindex"), text).unwrap();
        let found = match index {
            Some(index) => Netdev::Here {
                name: "eth7".into(),
                index,
            },
            None => Netdev::Elsewhere,
        };
        assert_eq!(bus.netdev("a").unwrap(), found);
    }
}

#[test]
fn network_interfaces_of_a_nics_devices_are_the_functions_children() {
    let sysfs = Sysfs::new("function");
    let function = sysfs.0.join("devices/pci0000:00/0000:01:00.1");
    fs::create_dir_all(function.join("a")).unwrap();
    symlink("../../../drivers/virtio_vdpa", function.join("a/driver")).unwrap();
    symlink(function.join("a"), sysfs.0.join("bus/vdpa/devices/a")).unwrap();
    let bus = Bus::at(&sysfs.0);
    assert_eq!(bus.netdev("a").unwrap(), Netdev::None);
    let interface = function.join("virtio8/net/eth3");
    fs::create_dir_all(&interface).unwrap();
    fs::write(interface.join("ifindex"), "3\n").unwrap();
    let here = Netdev::Here {
        name: "eth3".into(),
        index: 3,
    };
    assert_eq!(bus.netdev("a").unwrap(), here);
    // A second virtio device makes the owner unknown.
    fs::create_dir_all(function.join("virtio9/net")).unwrap();
    assert_eq!(bus.netdev("a").unwrap(), Netdev::None);
}

#[test]
fn a_device_is_taken_from_its_driver() {
    let sysfs = Sysfs::new("unbind");
    sysfs.add("a", "virtio_vdpa", "virtio0");
    sysfs.driver("virtio_vdpa");
    Bus::at(&sysfs.0).unbind("a").unwrap();
    assert_eq!(sysfs.written("virtio_vdpa/unbind"), "a");
}
