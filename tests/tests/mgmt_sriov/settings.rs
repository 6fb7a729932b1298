//! Settings of virtual functions on netdevsim, whose driver accepts all of them, beside iproute2's
//! `ip`.

use std::process::Command;

use lab::netdevsim::Netdevsim;
use lab::process::output;
use serde_json::{Value, json};
use vdpa_mgmt::ErrorKind;
use vdpa_mgmt::nic::{MadeNic, Observer as _, Store};
use vdpa_mgmt::sriov::{Links, Setting, Vlan, VlanProtocol};

use super::support::{bellhop, complaint, printed, program};

/// A simulated NIC with two virtual functions.
struct Simulated {
    nic: Netdevsim,
    interface: String,
}

impl Simulated {
    fn add(number: u32) -> Self {
        let nic = Netdevsim::add(number, 1).unwrap();
        nic.set_virtual_functions(2).unwrap();
        let interface = nic.interface().unwrap();
        Self { nic, interface }
    }

    /// A virtual function as `ip` shows it.
    fn by_ip(&self, index: usize) -> Value {
        let mut ip = Command::new("ip");
        let text = output(ip.args(["-j", "link", "show", "dev", &self.interface])).unwrap();
        let mut links: Value = serde_json::from_slice(&text).unwrap();
        links[0]["vfinfo_list"][index].take()
    }

    /// The same function as Bellhop shows it.
    fn by_bellhop(&self, index: usize) -> Value {
        let text = printed(&bellhop(&["vf", "show", &self.interface, "-j"]));
        let mut shown: Value = serde_json::from_str(&text).unwrap();
        shown["vf"][format!("{}/vf{index}", self.interface)].take()
    }

    #[track_caller]
    fn same(&self, index: usize) -> Value {
        let (ip, ours) = (self.by_ip(index), self.by_bellhop(index));
        assert_eq!(ours["vf"], ip["vf"], "{ours} {ip}");
        assert_eq!(ours["mac"], ip["address"], "{ours} {ip}");
        for key in ["spoofchk", "link_state", "trust", "query_rss_en"] {
            assert_eq!(ours[key], ip[key], "{key}: {ours} {ip}");
        }
        assert_eq!(ours["max_tx_rate"], ip["rate"]["max_tx"], "{ours} {ip}");
        assert_eq!(ours["min_tx_rate"], ip["rate"]["min_tx"], "{ours} {ip}");
        let vlan = &ip["vlan_list"][0];
        for (ours, theirs) in [(&ours["vlan"], &vlan["vlan"]), (&ours["qos"], &vlan["qos"])] {
            // `ip` leaves out 0.
            assert_eq!(
                ours.as_u64().unwrap_or_default(),
                theirs.as_u64().unwrap_or_default(),
                "{ip}"
            );
        }
        ours
    }
}

#[test]
fn settings_match_the_output_of_ip() {
    let nic = Simulated::add(71);
    let name = nic.interface.clone();
    let set = |words: &str| {
        let mut arguments = vec!["vf", "set", &name];
        arguments.extend(words.split_whitespace());
        assert_eq!(printed(&bellhop(&arguments)), "");
    };
    let untouched = nic.same(0);
    set("1 mac 02:5e:10:53:77:01 vlan 100 qos 3 rate 200 spoofchk on state disable trust on");
    let shown = nic.same(1);
    assert_eq!(shown["mac"], "02:5e:10:53:77:01");
    assert_eq!(shown["vlan"], 100);
    assert_eq!(shown["qos"], 3);
    assert_eq!(shown["proto"], "802.1Q");
    assert_eq!(shown["max_tx_rate"], 200);
    assert_eq!(shown["spoofchk"], true);
    assert_eq!(shown["link_state"], "disable");
    assert_eq!(shown["trust"], true);
    // The minimum rate, while the maximum stays; and another tag.
    set("1 min_tx_rate 50 vlan 200 proto 802.1ad");
    let shown = nic.same(1);
    assert_eq!(
        (&shown["max_tx_rate"], &shown["min_tx_rate"]),
        (&200.into(), &50.into())
    );
    assert_eq!(shown["proto"], "802.1ad");
    set("1 vlan 0 rate 0 min_tx_rate 0 spoofchk off state auto trust off");
    let shown = nic.same(1);
    assert_eq!(shown["vlan"], Value::Null);
    assert_eq!(shown["trust"], false);
    // `ip` sets, Bellhop shows.
    let words = [
        "link", "set", &name, "vf", "0", "vlan", "7", "qos", "1", "trust", "on",
    ];
    output(Command::new("ip").args(words)).unwrap();
    let shown = nic.same(0);
    assert_eq!((&shown["vlan"], &shown["trust"]), (&7.into(), &true.into()));
    assert_ne!(shown, untouched);
    let text = printed(&bellhop(&["vf", "show", &name]));
    assert!(text.contains("vlan 7 qos 1 proto 802.1Q"), "{text}");
    assert!(text.contains("trust on"), "{text}");
}

#[test]
fn settings_change_together_or_not_at_all() {
    let nic = Simulated::add(72);
    let before = nic.same(0);
    // In that mode it takes no rates.
    nic.nic.set_eswitch_mode("switchdev").unwrap();
    let words = "mac 02:5e:10:53:77:02 vlan 9 rate 100";
    let mut arguments = vec!["vf", "set", &nic.interface, "0"];
    arguments.extend(words.split_whitespace());
    complaint(
        &bellhop(&arguments),
        &["set the rates of virtual function 0", "has no such setting"],
    );
    assert_eq!(nic.same(0), before);
}

#[test]
fn missing_functions_are_reported() {
    let nic = Simulated::add(73);
    let interface = nic.interface.as_str();
    let trust = |index| ["vf", "set", interface, index, "trust", "on"];
    complaint(
        &bellhop(&trust("2")),
        &["has no virtual function 2", "they are 0 to 1"],
    );
    nic.nic.set_virtual_functions(0).unwrap();
    complaint(
        &bellhop(&trust("0")),
        &["has no virtual function 0", "it has none"],
    );
    complaint(
        &bellhop(&["vf", "count", interface, "1"]),
        &["is not a function of the PCI bus"],
    );
    let links = Links::open().unwrap();
    for name in ["", "sixteen-letters-", "a/b", "..", "a b"] {
        let error = links.link(name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadName, "{name:?}: {error}");
    }
    let error = links.link("lab-none").unwrap_err();
    assert!(error.is_missing(), "{error}");
    let vlan = Setting::Vlan(Vlan::new(5, 0, VlanProtocol::Dot1Q).unwrap());
    let error = links.set("lo", 0, &[vlan]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
}

/// Removes, with the program $1, the NIC $3 on a PCI bus with one physical function. The function
/// has one virtual function and the network interface $2. Only the shell's mount namespace has the
/// bus.
const REMOVE_ON_A_BUS: &str = "mount -t tmpfs pci /sys/bus/pci/devices
    mkdir -p /sys/bus/pci/devices/0000:ff:00.0/net/$2
    ln -s ../0000:ff:00.1 /sys/bus/pci/devices/0000:ff:00.0/virtfn0
    exec $1 nic remove $3";

/// No NIC of the lab is on the PCI bus and accepts settings of its virtual functions. So the test
/// shows netdevsim's interface on such a bus, and writes the record that `nic make` keeps.
#[test]
fn a_removed_nic_restores_the_settings() {
    const NAME: &str = "lab-set0";
    let nic = Simulated::add(74);
    let set = |words: &str| {
        let mut arguments = vec!["vf", "set", &nic.interface, "0"];
        arguments.extend(words.split_whitespace());
        assert_eq!(printed(&bellhop(&arguments)), "");
    };
    set("mac 02:5e:10:53:77:03 rate 100");
    let before = nic.same(0);
    set("mac 02:5e:10:53:77:04 rate 200");
    assert_ne!(nic.same(0), before);
    let step = json!({
        "step": "set-virtual-function",
        "physical": "0000:ff:00.0",
        "virtual_function": 0,
        "settings": { "mac": [2, 0x5e, 0x10, 0x53, 0x77, 4], "rates": [0, 200] },
        "former": { "mac": [2, 0x5e, 0x10, 0x53, 0x77, 3], "rates": [0, 100] },
    });
    let made: MadeNic = serde_json::from_value(json!({
        "version": 1,
        "name": NAME,
        "from": "pci/0000:ff:00.0",
        "state": "made",
        "steps": [step],
    }))
    .unwrap();
    let mut store = Store::open_default().unwrap().lock().unwrap();
    store.keep(&made).unwrap();
    drop(store);
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-ec", REMOVE_ON_A_BUS, "sh"])
        .arg(program())
        .args([&nic.interface, NAME]);
    assert_eq!(printed(&command.output().unwrap()), "");
    assert_eq!(nic.same(0), before);
    let left = Store::open_default().unwrap().nics().unwrap();
    assert!(left.iter().all(|nic| nic.name() != NAME), "{left:?}");
}
