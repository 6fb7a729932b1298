//! A port is attached and detached. If the attachment fails, everything is as before.

use vdpa_mgmt::connectivity::{
    Attached, Change, Connectivity, ConnectivityError, LeftAlone, Place,
};
use vdpa_mgmt::link::{Links, PortVlan};

use super::namespace::Netns;
use super::udp::echoed;

/// A bridge with its own address, and ports that were up and attached once. Without its own
/// address, the bridge takes that of a port, and none when the last port goes. Attached ports leave
/// traces in the kernel (qdisc, the bridge's carrier).
fn used(netns: &Netns, ports: &[&str]) {
    netns.ip("link add br0 address 02:5e:10:53:00:01 type bridge vlan_filtering 1");
    netns.ip("link set br0 up");
    for port in ports {
        netns.ip(&format!("link set {port} master br0"));
        netns.ip(&format!("link set {port} up"));
        netns.ip(&format!("link set {port} nomaster"));
        netns.ip(&format!("link set {port} down"));
    }
}

fn place(links: &Links, name: &str) -> Place {
    Place::Link(links.link(name).unwrap())
}

fn wanted(words: &str) -> Connectivity {
    words.parse().unwrap()
}

#[test]
fn attached_and_detached_twenty_times() {
    let netns = Netns::new("attach");
    netns.ip("link add d0 type dummy");
    used(&netns, &["d0"]);
    let links = netns.links();
    let before = netns.state();
    for round in 0..20 {
        let words = ["bridge=br0,vlan=100,mtu=9000", "bridge=br0", "mtu=2000"][round % 3];
        let attached = wanted(words).attach(&links, &place(&links, "d0")).unwrap();
        let link = links.link("d0").unwrap();
        assert!(link.up);
        if words.contains("vlan") {
            let vlan = PortVlan::access("100".parse().unwrap());
            assert_eq!(links.vlans(&link).unwrap(), [vlan]);
            assert_eq!(attached.changes().len(), 5);
            assert!(attached.changes().contains(&Change::Up));
        }
        assert_eq!(attached.interface(), Some("d0"));
        // The same request again changes nothing.
        let again = wanted(words).attach(&links, &place(&links, "d0")).unwrap();
        assert_eq!(again.changes(), []);
        let kept = serde_json::to_string(&attached).unwrap();
        let read: Attached = serde_json::from_str(&kept).unwrap();
        // Another connection, as in another process.
        assert_eq!(read.detach(&netns.links()).unwrap(), []);
        assert_eq!(netns.state(), before, "{words}");
        assert_eq!(read.detach(&links).unwrap(), []);
    }
}

#[test]
fn a_kernel_refusal_leaves_no_trace() {
    let netns = Netns::new("trace");
    netns.ip("link add d0 type dummy");
    netns.ip("link set d0 up");
    netns.ip("link add link d0 name v0 type vlan id 7");
    used(&netns, &["v0"]);
    netns.ip("link set d0 down");
    let links = netns.links();
    let before = netns.state();
    for (name, words, complaint) in [
        // A larger MTU than the interface below has.
        (
            "v0",
            "bridge=br0,vlan=100,mtu=9000",
            "cannot set the MTU of v0 to 9000",
        ),
        // A loopback interface cannot be a port; its MTU was changed before.
        (
            "lo",
            "bridge=br0,vlan=100,mtu=9000",
            "cannot make lo a port of br0",
        ),
        // The interface below is down; all other changes were made before.
        ("v0", "bridge=br0,vlan=100,mtu=1400", "cannot set v0 up"),
    ] {
        let error = wanted(words)
            .attach(&links, &place(&links, name))
            .unwrap_err();
        assert_eq!(error.to_string(), complaint);
        assert_eq!(netns.state(), before, "{words}");
    }
}

#[test]
fn impossible_connections_are_refused_first() {
    let netns = Netns::new("before");
    for name in ["d0", "d1"] {
        netns.ip(&format!("link add {name} type dummy"));
    }
    used(&netns, &["d0"]);
    netns.ip("link add plain type bridge");
    netns.ip("link add idle type bridge vlan_filtering 1");
    netns.ip("link set plain up");
    netns.ip("link set d1 master plain");
    let links = netns.links();
    let before = netns.state();
    for (name, words, complaint) in [
        (
            "d0",
            "bridge=none",
            "`ip link add none type bridge` creates it",
        ),
        ("d0", "bridge=d1", "d1 is not a Linux bridge (it is dummy)"),
        ("d0", "bridge=lo", "lo is not a Linux bridge"),
        ("d0", "bridge=idle", "`ip link set idle up`"),
        (
            "d0",
            "bridge=plain,vlan=9",
            "`ip link set plain type bridge vlan_filtering 1`",
        ),
        ("d0", "vlan=9", "give `bridge=NAME` too"),
        ("d1", "bridge=br0", "d1 is already a port of plain"),
    ] {
        let error = wanted(words)
            .attach(&links, &place(&links, name))
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains(complaint), "{text}");
        assert_eq!(netns.state(), before, "{words}");
    }
    let gone = place(&links, "d0");
    netns.ip("link del d0");
    let error = wanted("bridge=br0").attach(&links, &gone).unwrap_err();
    assert!(
        matches!(&error, ConnectivityError::Mgmt(error) if error.is_missing()),
        "{error}"
    );
}

#[test]
fn changes_of_others_stay() {
    let netns = Netns::new("others");
    netns.ip("link add d0 type dummy");
    used(&netns, &["d0"]);
    netns.ip("link add br1 type bridge");
    netns.ip("link set br1 up");
    let links = netns.links();
    let attached = wanted("bridge=br0,vlan=100,mtu=9000").attach(&links, &place(&links, "d0"));
    let attached = attached.unwrap();
    netns.ip("link set d0 master br1");
    netns.ip("link set d0 mtu 3000");
    let left = attached.detach(&links).unwrap();
    assert!(
        matches!(
            &left[..],
            [LeftAlone::Master { .. }, LeftAlone::Mtu { now: 3000, .. }]
        ),
        "{left:?}"
    );
    let link = links.link("d0").unwrap();
    assert_eq!(
        (link.mtu, link.master),
        (3000, Some(links.link("br1").unwrap().index))
    );
    assert!(!link.up);
    // The interface is deleted: there is nothing left to undo.
    netns.ip("link set d0 nomaster");
    let attached = wanted("bridge=br0")
        .attach(&links, &place(&links, "d0"))
        .unwrap();
    netns.ip("link del d0");
    assert!(
        matches!(&attached.detach(&links).unwrap()[..], [LeftAlone::Gone(name)] if name == "d0")
    );
}

#[test]
fn frames_pass_within_a_vlan_and_not_between_two() {
    let (bridge, a, b) = (Netns::new("switch"), Netns::new("a"), Netns::new("b"));
    for (netns, name, address) in [(&a, "pa", "10.9.0.1"), (&b, "pb", "10.9.0.2")] {
        bridge.ip(&format!(
            "link add {name} type veth peer name eth0 netns {}",
            netns.name()
        ));
        netns.ip(&format!("addr add {address}/24 dev eth0"));
        netns.ip("link set eth0 up");
    }
    bridge.ip("link add br0 type bridge vlan_filtering 1");
    bridge.ip("link set br0 up");
    let links = bridge.links();
    let (from, to) = ((a.name(), "10.9.0.1"), (b.name(), "10.9.0.2"));
    assert_eq!(echoed(from, to, 1), 0, "nothing is attached");
    let [one, other] = ["pa", "pb"].map(|name| {
        let wanted = wanted("bridge=br0,vlan=100");
        wanted.attach(&links, &place(&links, name)).unwrap()
    });
    assert_eq!(echoed(from, to, 200), 200);
    other.detach(&links).unwrap();
    assert_eq!(echoed(from, to, 1), 0, "one end is detached");
    let other = wanted("bridge=br0,vlan=200")
        .attach(&links, &place(&links, "pb"))
        .unwrap();
    assert_eq!(echoed(from, to, 1), 0, "another VLAN");
    other.detach(&links).unwrap();
    let other = wanted("bridge=br0,vlan=100")
        .attach(&links, &place(&links, "pb"))
        .unwrap();
    assert_eq!(echoed(to, from, 200), 200);
    for attached in [one, other] {
        attached.detach(&links).unwrap();
    }
}
