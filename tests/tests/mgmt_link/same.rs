//! Bellhop reads and changes the same as iproute2 shows.

use std::path::Path;

use serde_json::Value;
use vdpa_mgmt::ErrorKind;
use vdpa_mgmt::link::{Link, Links, Namespace, PortVlan, VlanId};

use super::namespace::Netns;

fn vlan(number: u16) -> VlanId {
    number.try_into().unwrap()
}

/// Compares all links with the output of `ip`.
#[track_caller]
fn same_links(netns: &Netns, links: &Links) -> Vec<Link> {
    let shown = netns.shown();
    let shown = shown.as_array().unwrap();
    let ours = links.links().unwrap();
    assert_eq!(ours.len(), shown.len());
    for (link, theirs) in ours.iter().zip(shown) {
        assert_eq!(links.link_at(link.index).unwrap(), *link);
        assert_eq!(links.link(&link.name).unwrap(), *link);
        assert_eq!(theirs["ifindex"], link.index);
        assert_eq!(theirs["ifname"], link.name);
        assert_eq!(theirs["mtu"], link.mtu);
        let flag = |name: &str| {
            theirs["flags"]
                .as_array()
                .unwrap()
                .iter()
                .any(|flag| flag == name)
        };
        assert_eq!(
            (flag("UP"), flag("LOWER_UP")),
            (link.up, link.carrier),
            "{theirs}"
        );
        let mac = link
            .mac
            .map(|mac| mac.map(|byte| format!("{byte:02x}")).join(":"));
        assert_eq!(theirs["address"].as_str(), mac.as_deref());
        assert_eq!(
            theirs["linkinfo"]["info_kind"].as_str(),
            link.kind.as_deref()
        );
        let master = link.master.map(|index| links.link_at(index).unwrap().name);
        assert_eq!(theirs["master"].as_str(), master.as_deref());
        let names: Vec<&str> = theirs["altnames"]
            .as_array()
            .map(|names| names.iter().map(|name| name.as_str().unwrap()).collect())
            .unwrap_or_default();
        assert_eq!(names, link.alternative_names);
        let filtering = theirs["linkinfo"]["info_data"]["vlan_filtering"].as_u64();
        assert_eq!(filtering, link.vlan_filtering.map(u64::from), "{theirs}");
    }
    ours
}

/// Compares a port's VLANs with the output of `bridge`.
#[track_caller]
fn same_vlans(netns: &Netns, links: &Links, name: &str) -> Vec<PortVlan> {
    let ours = links.vlans(&links.link(name).unwrap()).unwrap();
    let shown = netns.vlans();
    let port = shown
        .as_array()
        .unwrap()
        .iter()
        .find(|port| port["ifname"] == name);
    let mut theirs = Vec::new();
    for entry in port
        .map(|port| port["vlans"].as_array().unwrap().clone())
        .unwrap_or_default()
    {
        let number = |key: &str| u16::try_from(entry[key].as_u64()?).ok();
        let first = number("vlan").unwrap();
        let flag = |name: &str| {
            let flags = entry["flags"].as_array();
            flags.is_some_and(|flags| flags.iter().any(|flag| flag == name))
        };
        for one in first..=number("vlanEnd").unwrap_or(first) {
            theirs.push(PortVlan {
                vlan: vlan(one),
                pvid: flag("PVID"),
                untagged: flag("Egress Untagged"),
            });
        }
    }
    assert_eq!(ours, theirs, "{shown}");
    ours
}

#[test]
fn interfaces_and_changes_match_iproute2() {
    let netns = Netns::new("same");
    netns.ip("link add br0 type bridge vlan_filtering 1");
    netns.ip("link add plain type bridge");
    netns.ip("link add a0 type veth peer name a1");
    netns.ip("link add d0 type dummy");
    netns.ip("link property add dev d0 altname a-name-that-is-longer-than-fifteen altname short");
    let links = netns.links();
    let found = same_links(&netns, &links);
    assert_eq!(found.len(), 6);
    let long = links.link("a-name-that-is-longer-than-fifteen").unwrap();
    assert_eq!(
        (long.name.as_str(), links.link("short").unwrap()),
        ("d0", long.clone())
    );

    let port = links.link("a1").unwrap();
    let bridge = links.link("br0").unwrap();
    for step in [
        |links: &Links, port: &Link, _: &Link| links.set_up(port),
        |links: &Links, _: &Link, bridge: &Link| links.set_up(bridge),
        |links: &Links, port: &Link, _: &Link| links.set_mtu(port, 9000),
        |links: &Links, port: &Link, bridge: &Link| links.set_master(port, bridge),
        |links: &Links, port: &Link, _: &Link| links.rename(port, "a2"),
        |links: &Links, port: &Link, _: &Link| links.set_down(port),
    ] {
        step(&links, &port, &bridge).unwrap();
        same_links(&netns, &links);
    }
    let port = links.link("a2").unwrap();
    assert_eq!(
        (port.mtu, port.master, port.up),
        (9000, Some(bridge.index), false)
    );

    assert_eq!(
        same_vlans(&netns, &links, "a2"),
        [PortVlan::access(vlan(1))]
    );
    links.add_vlan(&port, PortVlan::access(vlan(100))).unwrap();
    let moved = same_vlans(&netns, &links, "a2");
    assert!(!moved[0].pvid && moved[1].pvid, "{moved:?}");
    links.remove_vlan(&port, vlan(1)).unwrap();
    assert_eq!(same_vlans(&netns, &links, "a2").len(), 1);
    let tagged = |number| PortVlan {
        vlan: vlan(number),
        pvid: false,
        untagged: false,
    };
    links.add_vlan(&port, tagged(4094)).unwrap();
    same_vlans(&netns, &links, "a2");
    // All of them, and every second one: the longest answers.
    let mut command = std::process::Command::new("bridge");
    let words = [
        "-n",
        netns.name(),
        "vlan",
        "add",
        "dev",
        "a2",
        "vid",
        "2-4094",
    ];
    lab::process::output(command.args(words)).unwrap();
    assert_eq!(same_vlans(&netns, &links, "a2").len(), 4093);
    for number in (2..4094).step_by(2) {
        links.remove_vlan(&port, vlan(number)).unwrap();
    }
    assert_eq!(same_vlans(&netns, &links, "a2").len(), 2047);
    assert!(same_vlans(&netns, &links, "d0").is_empty());
    links.clear_master(&port).unwrap();
    assert!(same_vlans(&netns, &links, "a2").is_empty());
    same_links(&netns, &links);
}

#[test]
fn refusals_have_the_kernels_words_and_a_remedy() {
    let netns = Netns::new("refused");
    netns.ip("link add a0 type veth peer name a1");
    netns.ip("link add br0 type bridge");
    let links = netns.links();
    let before = netns.state();
    let port = links.link("a0").unwrap();
    let error = links.set_mtu(&port, 70_000).unwrap_err();
    assert_eq!(error.to_string(), "cannot set the MTU of a0 to 70000");
    let words = error.refusal().unwrap().explanation().unwrap();
    assert!(words.contains("greater than device maximum"), "{words}");
    let error = links.rename(&port, "a1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NameTaken, "{error}");
    for name in ["", "sixteen-letters-", "a/b", "a b", "a:b", "eth%d"] {
        let error = links.rename(&port, name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadName, "{error}");
    }
    let error = links
        .set_master(&port, &links.link("a1").unwrap())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let error = links
        .add_vlan(&port, PortVlan::access(vlan(5)))
        .unwrap_err();
    assert!(
        error.to_string().starts_with("cannot put a0 into VLAN 5"),
        "{error}"
    );
    let error = links.link("none").unwrap_err();
    assert!(error.is_missing());
    let text = error.to_string();
    assert!(
        text.contains("in the network namespace lab-refused; `ip link` lists"),
        "{text}"
    );
    assert!(links.link_at(4000).unwrap_err().is_missing());
    assert_eq!(netns.state(), before);
    // Deleted after the lookup.
    netns.ip("link del a0");
    assert!(links.set_up(&port).unwrap_err().is_missing());
}

#[test]
fn interfaces_go_to_a_namespace_and_back() {
    let (one, other) = (Netns::new("one"), Netns::new("other"));
    for netns in [&one, &other] {
        netns.ip("link add d0 type dummy");
    }
    one.ip("link add d1 type dummy");
    let here = one.links();
    let before = (one.state(), other.state());
    let link = here.link("d1").unwrap();
    // Under a name that is free there, under a name that is taken, and with its own name taken.
    let moved = here.move_to(&link, &other.open(), Some("eth0")).unwrap();
    assert_eq!(moved.mac, link.mac);
    assert_eq!(other.links().link("eth0").unwrap(), moved);
    assert!(here.link("d1").unwrap_err().is_missing());
    other
        .links()
        .move_to(&moved, &one.open(), Some("d1"))
        .unwrap();
    assert_eq!((one.state(), other.state()), before);
    for (name, to) in [("d1", Some("d0")), ("d0", None)] {
        let link = here.link(name).unwrap();
        let error = here.move_to(&link, &other.open(), to).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("the network namespace lab-other has another interface"),
            "{text}"
        );
        assert_eq!((one.state(), other.state()), before);
    }
    // By the process in it, and by path.
    let child = std::process::Command::new("ip")
        .args(["netns", "exec", other.name(), "sleep", "60"])
        .spawn();
    let mut child = child.unwrap();
    let process = loop {
        let process = Namespace::find(&child.id().to_string()).unwrap();
        if process.is_same(&other.open()).unwrap() {
            break process;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    let path = Namespace::at(&Path::new("/run/netns").join(other.name())).unwrap();
    assert!(path.is_same(&process).unwrap());
    let moved = here
        .move_to(&here.link("d1").unwrap(), &process, None)
        .unwrap();
    Links::in_namespace(&path)
        .unwrap()
        .move_to(&moved, &one.open(), None)
        .unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((one.state(), other.state()), before);
    let lo = here.link("lo").unwrap();
    let error = here.move_to(&lo, &other.open(), Some("lo2")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let _: Value = one.vlans();
}
