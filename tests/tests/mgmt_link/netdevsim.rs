//! Representors and virtual functions of a simulated NIC.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lab::process::output;
use lab::sim::{load, require_lab};
use serde_json::Value;
use vdpa::mgmt::connectivity::{Connectivity, ConnectivityError, Place, representor};
use vdpa::mgmt::link::Links;
use vdpa::mgmt::sriov;

/// A simulated NIC with two virtual functions, gone when it is dropped.
struct Netdevsim {
    number: u32,
    interface: String,
}

impl Netdevsim {
    fn add(number: u32) -> Self {
        require_lab().unwrap();
        if !Path::new("/sys/bus/netdevsim").exists() {
            output(Command::new("modprobe").args(["-a", "psample", "macsec"])).unwrap();
            // Another test may have been faster.
            let loaded = load("netdevsim.ko", "");
            assert!(Path::new("/sys/bus/netdevsim").exists(), "{loaded:?}");
        }
        fs::write("/sys/bus/netdevsim/new_device", format!("{number} 1")).unwrap();
        let mut nic = Self {
            number,
            interface: String::new(),
        };
        let mut interfaces = fs::read_dir(nic.directory().join("net")).unwrap();
        let interface = interfaces.next().unwrap().unwrap().file_name();
        nic.interface = interface.into_string().unwrap();
        fs::write(nic.directory().join("sriov_numvfs"), "2").unwrap();
        nic
    }

    fn directory(&self) -> PathBuf {
        format!("/sys/bus/netdevsim/devices/netdevsim{}", self.number).into()
    }

    fn mode(&self, mode: &str) {
        let device = format!("netdevsim/netdevsim{}", self.number);
        let words = ["dev", "eswitch", "set", &device, "mode", mode];
        output(Command::new("devlink").args(words)).unwrap();
    }
}

impl Drop for Netdevsim {
    fn drop(&mut self) {
        let _ = fs::write("/sys/bus/netdevsim/del_device", self.number.to_string());
    }
}

/// What `ip -d` shows of one interface.
fn by_ip(name: &str) -> Value {
    let mut ip = Command::new("ip");
    let text = output(ip.args(["-j", "-d", "link", "show", "dev", name])).unwrap();
    let mut links: Value = serde_json::from_slice(&text).unwrap();
    links[0].take()
}

#[test]
fn a_representor_is_found_attached_and_left() {
    let nic = Netdevsim::add(81);
    let links = Links::open().unwrap();
    let port = "pf0vf1".parse().unwrap();
    let error = representor(&links, &nic.interface, port).unwrap_err();
    assert!(
        matches!(
            error,
            ConnectivityError::NoRepresentor { .. } | ConnectivityError::NotSwitchdev { .. }
        ),
        "{error}"
    );
    nic.mode("switchdev");
    let link = representor(&links, &nic.interface, port).unwrap();
    let shown = by_ip(&link.name);
    assert_eq!(shown["phys_port_name"], "pf0vf1");
    let switch: String = link
        .phys_switch_id
        .iter()
        .flatten()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    // `ip` leaves out the last byte of those that are as long as can be.
    let theirs = shown["phys_switch_id"].as_str().unwrap();
    assert!(switch.starts_with(theirs) && theirs.len() >= 60, "{shown}");
    let error = representor(&links, &nic.interface, "pf0vf2".parse().unwrap()).unwrap_err();
    assert!(
        error.to_string().contains("represents the port pf0vf2 of"),
        "{error}"
    );
    let error = representor(&links, "lo", port).unwrap_err();
    assert!(
        matches!(error, ConnectivityError::NotSwitchdev { .. }),
        "{error}"
    );

    let bridge = "lab-br81";
    let words = [
        "link",
        "add",
        bridge,
        "type",
        "bridge",
        "vlan_filtering",
        "1",
    ];
    output(Command::new("ip").args(words)).unwrap();
    output(Command::new("ip").args(["link", "set", bridge, "up"])).unwrap();
    let wanted: Connectivity = format!("bridge={bridge},vlan=30").parse().unwrap();
    let attached = wanted.attach(&links, &Place::Link(link.clone())).unwrap();
    assert_eq!(by_ip(&link.name)["master"], bridge);
    // Renamed by udev or by somebody: still the same port.
    links.set_down(&link).unwrap();
    links.rename(&link, "lab-rep81").unwrap();
    assert_eq!(attached.detach(&links).unwrap(), []);
    let now = links.link("lab-rep81").unwrap();
    assert_eq!((now.master, now.up), (None, false));
    // The representors go with the mode.
    let attached = wanted.attach(&links, &Place::Link(now)).unwrap();
    nic.mode("legacy");
    assert_eq!(attached.detach(&links).unwrap().len(), 1);
    output(Command::new("ip").args(["link", "del", bridge])).unwrap();
}

#[test]
fn in_legacy_mode_the_vlan_is_a_setting() {
    let nic = Netdevsim::add(82);
    let links = Links::open().unwrap();
    let place = Place::VirtualFunction {
        physical: nic.interface.clone(),
        number: 1,
    };
    let vlan = || {
        let functions = sriov::Links::from(links.clone())
            .link(&nic.interface)
            .unwrap();
        functions.virtual_functions[1].vlan.unwrap().id()
    };
    let wanted = |words: &str| words.parse::<Connectivity>().unwrap();
    let attached = wanted("vlan=77").attach(&links, &place).unwrap();
    assert_eq!(vlan(), 77);
    let inner = wanted("vlan=78").attach(&links, &place).unwrap();
    assert_eq!(inner.detach(&links).unwrap(), []);
    assert_eq!(vlan(), 77);
    assert_eq!(attached.detach(&links).unwrap(), []);
    assert_eq!(vlan(), 0);
    for words in ["bridge=br0", "mtu=1400"] {
        let text = wanted(words)
            .attach(&links, &place)
            .unwrap_err()
            .to_string();
        assert!(text.contains("has no representor"), "{text}");
    }
    let place = Place::VirtualFunction {
        physical: nic.interface.clone(),
        number: 2,
    };
    let error = wanted("vlan=5").attach(&links, &place).unwrap_err();
    assert!(
        error.to_string().contains("has no virtual function 2"),
        "{error}"
    );
}
