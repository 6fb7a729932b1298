//! Each request that changes something: Bellhop sends it in one namespace, rtnetlink in another
//! that looks the same. Both look the same afterwards.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::process::Command;
use std::time::{Duration, Instant};

use lab::netdevsim::Netdevsim;
use lab::process::output;
use rtnetlink::packet_route::link::{
    BridgeVlanInfoFlags, LinkAttribute, LinkVfInfo, VfInfo, VfInfoLinkState, VfInfoMac, VfInfoRate,
    VfInfoSpoofCheck, VfInfoTrust, VfLinkState, VfVlan, VfVlanInfo, VlanProtocol as KnownProtocol,
};
use rtnetlink::packet_route::neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourState};
use rtnetlink::{Error, Handle, LinkBridgeVlan, LinkMessageBuilder, LinkUnspec};
use serde_json::Value;
use vdpa_mgmt::link::{Link, Links, Namespace, PortVlan, VlanId};
use vdpa_mgmt::sriov::{self, LinkState, Rates, Setting, Vlan, VlanProtocol};

use super::namespace::Netns;
use super::oracle::rtnetlink;

/// The bridge follows the carrier of its port up to a second later.
const PATIENCE: Duration = Duration::from_secs(10);

const MAC: [u8; 6] = [0x02, 0x5e, 0x10, 0x53, 0x88, 0x01];

type Builder = LinkMessageBuilder<LinkUnspec>;

fn vlan(number: u16) -> VlanId {
    number.try_into().unwrap()
}

/// A namespace for each, with equal names, addresses and indexes.
struct Pair {
    ours: Netns,
    theirs: Netns,
    links: Links,
}

/// The interfaces, the VLANs of ports, the addresses behind ports, and their states.
type State = (Value, Value, Vec<String>, Value);

fn state(netns: &Netns) -> State {
    let bridge = |words: [&str; 2]| -> Value {
        let mut command = Command::new("bridge");
        let text = output(command.args(["-n", netns.name(), "-j"]).args(words)).unwrap();
        match text.as_slice() {
            [] => Value::Null,
            text => serde_json::from_slice(text).unwrap(),
        }
    };
    let (links, vlans) = netns.state();
    let addresses = bridge(["fdb", "show"]);
    let addresses = addresses.as_array().into_iter().flatten();
    let mut addresses: Vec<String> = addresses.map(Value::to_string).collect();
    addresses.sort_unstable();
    (links, vlans, addresses, bridge(["link", "show"]))
}

impl Pair {
    fn empty(name: &str) -> Self {
        let new = |whose| Netns::new(&format!("{name}-{whose}"));
        let ours = new("ours");
        Self {
            links: ours.links(),
            ours,
            theirs: new("theirs"),
        }
    }

    /// The kernel's IPv6 has no address and sends nothing. Otherwise bridges would learn from its
    /// frames, which come at different moments in both namespaces.
    fn new(name: &str) -> Self {
        let pair = Self::empty(name);
        for words in [
            "link add br0 address 02:5e:10:53:88:10 type bridge vlan_filtering 1",
            "link add a0 address 02:5e:10:53:88:20 type veth peer name a1 address \
             02:5e:10:53:88:21",
            "link add d0 address 02:5e:10:53:88:30 type dummy",
            "link set br0 addrgenmode none",
            "link set a0 addrgenmode none",
            "link set a1 addrgenmode none",
            "link set d0 addrgenmode none",
            "link set a0 up",
        ] {
            pair.ours.ip(words);
            pair.theirs.ip(words);
        }
        pair.same("nothing");
        pair
    }

    fn link(&self, name: &str) -> Link {
        self.links.link(name).unwrap()
    }

    /// Both look the same within the time that a bridge needs.
    #[track_caller]
    fn same(&self, step: &str) -> State {
        let begun = Instant::now();
        loop {
            let (ours, theirs) = (state(&self.ours), state(&self.theirs));
            if ours == theirs {
                return ours;
            }
            if begun.elapsed() > PATIENCE {
                assert_eq!(ours, theirs, "{step}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The same request twice. It changes something.
    #[track_caller]
    fn both(
        &self,
        step: &str,
        ours: impl FnOnce(&Links) -> Result<(), vdpa_mgmt::Error>,
        theirs: impl AsyncFnOnce(Handle) -> Result<(), Error> + Send,
    ) -> State {
        let before = state(&self.ours);
        ours(&self.links).unwrap();
        rtnetlink(&self.theirs.open(), theirs).unwrap();
        let after = self.same(step);
        assert_ne!(after, before, "{step} changes nothing");
        after
    }

    /// The same change of a link, by its index.
    #[track_caller]
    fn set(
        &self,
        step: &str,
        link: &Link,
        ours: impl FnOnce(&Links) -> Result<(), vdpa_mgmt::Error>,
        theirs: impl FnOnce(Builder) -> Builder,
    ) {
        let message = theirs(LinkUnspec::new_with_index(link.index)).build();
        self.both(step, ours, async |handle: Handle| {
            handle.link().set(message).execute().await
        });
    }

    /// The same port joins a VLAN.
    #[track_caller]
    fn add_vlan(&self, port: &Link, vlan: PortVlan, flags: BridgeVlanInfoFlags) {
        let message = LinkBridgeVlan::new(port.index)
            .vlan(vlan.vlan.get(), flags)
            .build();
        self.both(
            &format!("VLAN {}", vlan.vlan),
            |links| links.add_vlan(port, vlan),
            async |handle: Handle| handle.link().set(message).execute().await,
        );
    }
}

#[test]
fn changes_of_links_vlans_and_neighbours_have_the_same_effect() {
    let pair = Pair::new("change");
    let (port, bridge) = (pair.link("a1"), pair.link("br0"));
    pair.set("up", &bridge, |links| links.set_up(&bridge), |it| it.up());
    pair.set("up", &port, |links| links.set_up(&port), |it| it.up());
    let mtu = |links: &Links| links.set_mtu(&port, 1400);
    pair.set("MTU", &port, mtu, |it| it.mtu(1400));
    let master = |links: &Links| links.set_master(&port, &bridge);
    let index = bridge.index;
    pair.set("master", &port, master, |it| it.controller(index));
    let name = |links: &Links| links.rename(&port, "a2");
    pair.set("name", &port, name, |it| it.name("a2"));

    let untagged = BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged;
    pair.add_vlan(&port, PortVlan::access(vlan(100)), untagged);
    let tagged = PortVlan {
        vlan: vlan(4094),
        pvid: false,
        untagged: false,
    };
    pair.add_vlan(&port, tagged, BridgeVlanInfoFlags::empty());
    let message = LinkBridgeVlan::new(port.index)
        .vlan(1, BridgeVlanInfoFlags::empty())
        .build();
    pair.both(
        "no VLAN 1",
        |links| links.remove_vlan(&port, vlan(1)),
        async |handle: Handle| handle.link().del_with_message(message).execute().await,
    );

    // A port that does not forward yet learns nothing.
    let begun = Instant::now();
    while pair.same("the carrier").3[0]["state"] != "forwarding" {
        assert!(begun.elapsed() < PATIENCE, "{:?}", state(&pair.ours).3);
        std::thread::sleep(Duration::from_millis(50));
    }
    let index = port.index;
    for number in [Some(100), None] {
        let after = pair.both(
            "an address",
            |links| links.learn(&port, MAC, number.map(vlan)),
            async |handle: Handle| {
                let mut request = handle
                    .neighbours()
                    .add_bridge(index, &MAC)
                    .state(NeighbourState::Reachable)
                    .flags(NeighbourFlags::Controller | NeighbourFlags::Use);
                let vlan = number.map(NeighbourAttribute::Vlan);
                request.message_mut().attributes.extend(vlan);
                request.execute().await
            },
        );
        let mac = "02:5e:10:53:88:01";
        assert!(after.2.iter().any(|one| one.contains(mac)), "{after:?}");
    }

    let master = |links: &Links| links.clear_master(&port);
    pair.set("no master", &port, master, |it| it.nocontroller());
    pair.set("down", &port, |links| links.set_down(&port), |it| it.down());
}

#[test]
fn a_link_goes_to_a_namespace_with_the_same_effect() {
    let pair = Pair::new("from");
    let there = Pair::empty("to");
    for (name, new_name) in [("d0", None), ("a1", Some("a9"))] {
        let link = pair.link(name);
        let (ours, theirs) = (there.ours.open(), there.theirs.open());
        pair.set(
            "a namespace",
            &link,
            |links| links.move_to(&link, &ours, new_name).map(drop),
            |it| {
                let it = it.setns_by_fd(theirs.as_fd().as_raw_fd());
                match new_name {
                    None => it,
                    Some(name) => it.name(name),
                }
            },
        );
        there.same("a namespace");
        let moved = there.link(new_name.unwrap_or(name));
        assert_eq!(moved.mac, link.mac);
    }
}

#[test]
fn settings_of_virtual_functions_have_the_same_effect() {
    let nic = Netdevsim::add(83, 1).unwrap();
    nic.set_virtual_functions(2).unwrap();
    let interface = nic.interface().unwrap();
    let links = sriov::Links::open().unwrap();
    let index = links.link(&interface).unwrap().index;
    let shown = || {
        let mut ip = Command::new("ip");
        let text = output(ip.args(["-j", "link", "show", "dev", &interface])).unwrap();
        let mut shown: Value = serde_json::from_slice(&text).unwrap();
        [0, 1].map(|number| {
            let mut one = shown[0]["vfinfo_list"][number].take();
            assert_eq!(one["vf"].take(), number);
            one
        })
    };
    let vlan = |id, qos, protocol, known| {
        let info = VfVlanInfo::new(1, u32::from(id), u32::from(qos), known);
        let setting = Setting::Vlan(Vlan::new(id, qos, protocol).unwrap());
        (setting, VfInfo::VlanList(vec![VfVlan::Info(info)]))
    };
    let switch = |on| {
        let spoof_check = VfInfo::SpoofCheck(VfInfoSpoofCheck::new(1, on));
        let trust = VfInfo::Trust(VfInfoTrust::new(1, on));
        [
            (Setting::SpoofCheck(on), spoof_check),
            (Setting::Trust(on), trust),
        ]
    };
    let state = |ours, theirs| {
        let theirs = VfInfo::LinkState(VfInfoLinkState::new(1, theirs));
        (Setting::LinkState(ours), theirs)
    };
    let (q, ad) = (KnownProtocol::Ieee8021Q, KnownProtocol::Ieee8021Ad);
    let [spoof_check_on, trust_on] = switch(true);
    let [spoof_check_off, trust_off] = switch(false);
    let mut before = shown();
    assert_eq!(before[0], before[1]);
    // VF 0 is Bellhop's, VF 1 is rtnetlink's.
    for (ours, theirs) in [
        (Setting::Mac(MAC), VfInfo::Mac(VfInfoMac::new(1, &MAC))),
        vlan(100, 3, VlanProtocol::Dot1Q, q),
        vlan(200, 0, VlanProtocol::Dot1Ad, ad),
        vlan(0, 0, VlanProtocol::Dot1Q, q),
        (
            Setting::Rates(Rates::new(50, 200).unwrap()),
            VfInfo::Rate(VfInfoRate::new(1, 50, 200)),
        ),
        spoof_check_on,
        trust_on,
        state(LinkState::Enable, VfLinkState::Enable),
        state(LinkState::Disable, VfLinkState::Disable),
        spoof_check_off,
        trust_off,
        state(LinkState::Auto, VfLinkState::Auto),
    ] {
        links.set(&interface, 0, &[ours]).unwrap();
        let list = LinkAttribute::VfInfoList(vec![LinkVfInfo(vec![theirs])]);
        let message = LinkUnspec::new_with_index(index).append_extra_attribute(list);
        let here = Namespace::current().unwrap();
        rtnetlink(&here, async |handle: Handle| {
            handle.link().set(message.build()).execute().await
        })
        .unwrap();
        let after = shown();
        assert_eq!(after[0], after[1], "{ours:?}");
        assert_ne!(after, before, "{ours:?} changes nothing");
        before = after;
    }
}
