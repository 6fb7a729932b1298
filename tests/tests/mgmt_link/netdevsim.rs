//! Representors and virtual functions of a simulated NIC.

use std::process::Command;

use lab::netdevsim::Netdevsim;
use lab::process::output;
use serde_json::Value;
use vdpa_mgmt::connectivity::{Connectivity, ConnectivityError, Place, representor};
use vdpa_mgmt::link::Links;
use vdpa_mgmt::sriov;

/// A simulated NIC with two virtual functions, and its interface.
fn simulated(number: u32) -> (Netdevsim, String) {
    let nic = Netdevsim::add(number, 1).unwrap();
    nic.set_virtual_functions(2).unwrap();
    let interface = nic.interface().unwrap();
    (nic, interface)
}

/// One interface, as `ip -d` shows it.
fn by_ip(name: &str) -> Value {
    let mut ip = Command::new("ip");
    let text = output(ip.args(["-j", "-d", "link", "show", "dev", name])).unwrap();
    let mut links: Value = serde_json::from_slice(&text).unwrap();
    links[0].take()
}

#[test]
fn a_representor_is_found_attached_and_left() {
    let (nic, interface) = simulated(81);
    let links = Links::open().unwrap();
    let port = "pf0vf1".parse().unwrap();
    let error = representor(&links, &interface, port).unwrap_err();
    assert!(
        matches!(
            error,
            ConnectivityError::NoRepresentor { .. } | ConnectivityError::NotSwitchdev { .. }
        ),
        "{error}"
    );
    nic.set_eswitch_mode("switchdev").unwrap();
    let link = representor(&links, &interface, port).unwrap();
    let shown = by_ip(&link.name);
    assert_eq!(shown["phys_port_name"], "pf0vf1");
    let switch: String = link
        .phys_switch_id
        .iter()
        .flatten()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    // `ip` leaves out the last byte of identifiers of the maximum length.
    let theirs = shown["phys_switch_id"].as_str().unwrap();
    assert!(switch.starts_with(theirs) && theirs.len() >= 60, "{shown}");
    let error = representor(&links, &interface, "pf0vf2".parse().unwrap()).unwrap_err();
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
    // Renamed, by udev for example: still the same port.
    links.set_down(&link).unwrap();
    links.rename(&link, "lab-rep81").unwrap();
    assert_eq!(attached.detach(&links).unwrap(), []);
    let now = links.link("lab-rep81").unwrap();
    assert_eq!((now.master, now.up), (None, false));
    // The representors disappear with the mode.
    let attached = wanted.attach(&links, &Place::Link(now)).unwrap();
    nic.set_eswitch_mode("legacy").unwrap();
    assert_eq!(attached.detach(&links).unwrap().len(), 1);
    output(Command::new("ip").args(["link", "del", bridge])).unwrap();
}

#[test]
fn in_legacy_mode_the_vlan_is_a_setting() {
    let (_nic, interface) = simulated(82);
    let links = Links::open().unwrap();
    let place = Place::VirtualFunction {
        physical: interface.clone(),
        number: 1,
    };
    let vlan = || {
        let functions = sriov::Links::from(links.clone()).link(&interface).unwrap();
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
        physical: interface.clone(),
        number: 2,
    };
    let error = wanted("vlan=5").attach(&links, &place).unwrap_err();
    assert!(
        error.to_string().contains("has no virtual function 2"),
        "{error}"
    );
}
