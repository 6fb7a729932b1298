//! Each query: Bellhop reads in the kernel's answer what rtnetlink reads there. Bellhop decodes
//! attribute by attribute, rtnetlink whole messages.

use lab::netdevsim::Netdevsim;
use rtnetlink::LinkGetRequest;
use rtnetlink::packet_core::DefaultNla;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{
    AfSpecBridge, BridgeVlanInfoFlags, InfoBridge, InfoData, LinkAttribute, LinkExtentMask,
    LinkFlags, LinkInfo, LinkMessage, LinkVfInfo, Prop, VfInfo, VfLinkState, VfVlan,
};
use vdpa_mgmt::link::{Link, Links, Namespace, PortVlan};
use vdpa_mgmt::sriov::{self, LinkState, Rates, Setting, VirtualFunction, Vlan, VlanProtocol};

use super::namespace::Netns;
use super::oracle;

/// IFLA_ALT_IFNAME (include/uapi/linux/if_link.h).
const IFLA_ALT_IFNAME: u16 = 53;

/// What rtnetlink reads, in Bellhop's type.
fn read(message: &LinkMessage) -> Link {
    let flags = message.header.flags;
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        alternative_names: Vec::new(),
        kind: None,
        up: flags.contains(LinkFlags::Up),
        carrier: flags.contains(LinkFlags::LowerUp),
        mtu: 0,
        mac: None,
        master: None,
        phys_port_name: None,
        phys_switch_id: None,
        parent: None,
        vlan_filtering: None,
    };
    let (mut bus, mut device) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Address(mac) => link.mac = mac.as_slice().try_into().ok(),
            LinkAttribute::Controller(index) => link.master = Some(*index),
            LinkAttribute::PhysPortName(name) => link.phys_port_name = Some(name.clone()),
            LinkAttribute::PhysSwitchId(id) => {
                link.phys_switch_id = Some(id.id[..id.len].to_vec());
            }
            LinkAttribute::ParentDevBusName(name) => bus = Some(name.clone()),
            LinkAttribute::ParentDevName(name) => device = Some(name.clone()),
            LinkAttribute::PropList(list) => {
                for one in list {
                    if let Prop::AltIfName(name) = one {
                        link.alternative_names.push(name.clone());
                    }
                }
            }
            LinkAttribute::LinkInfo(list) => information(&mut link, list),
            _ => {}
        }
    }
    link.parent = bus.zip(device);
    link
}

fn information(link: &mut Link, list: &[LinkInfo]) {
    for one in list {
        match one {
            LinkInfo::Kind(kind) => link.kind = Some(kind.to_string()),
            LinkInfo::Data(InfoData::Bridge(data)) => {
                for one in data {
                    if let InfoBridge::VlanFiltering(on) = one {
                        link.vlan_filtering = Some(*on);
                    }
                }
            }
            _ => {}
        }
    }
}

/// All links, each also by its index and its names.
#[track_caller]
fn same(links: &Links, namespace: &Namespace) -> Vec<Link> {
    let get = |request: fn(LinkGetRequest) -> LinkGetRequest| {
        oracle::links(namespace, request).iter().map(read).collect()
    };
    let theirs: Vec<Link> =
        get(|it| it.set_filter_mask(AddressFamily::Unspec, vec![LinkExtentMask::SkipStats]));
    assert_eq!(links.links().unwrap(), theirs);
    for link in &theirs {
        let by_index = oracle::links(namespace, |it| it.match_index(link.index));
        assert_eq!(
            by_index.iter().map(read).collect::<Vec<_>>(),
            std::slice::from_ref(link)
        );
        assert_eq!(links.link_at(link.index).unwrap(), *link);
        let by_name = oracle::links(namespace, |it| it.match_name(&link.name));
        assert_eq!(
            by_name.iter().map(read).collect::<Vec<_>>(),
            std::slice::from_ref(link)
        );
        assert_eq!(links.link(&link.name).unwrap(), *link);
        for name in &link.alternative_names {
            let by_name = oracle::links(namespace, |it| {
                let mut it = it.match_index(0);
                let value = [name.as_bytes(), b"\0"].concat();
                let name = LinkAttribute::Other(DefaultNla::new(IFLA_ALT_IFNAME, value));
                it.message_mut().attributes.push(name);
                it
            });
            assert_eq!(
                by_name.iter().map(read).collect::<Vec<_>>(),
                std::slice::from_ref(link)
            );
            assert_eq!(links.link(name).unwrap(), *link);
        }
    }
    theirs
}

/// The VLANs of a port, one by one: only Bellhop reads ranges.
#[track_caller]
fn same_vlans(links: &Links, namespace: &Namespace, port: &Link) -> Vec<PortVlan> {
    let ports = oracle::links(namespace, |it| {
        it.set_filter_mask(AddressFamily::Bridge, vec![LinkExtentMask::Brvlan])
    });
    let mut theirs = Vec::new();
    for attribute in ports
        .iter()
        .filter(|message| message.header.index == port.index)
        .flat_map(|message| &message.attributes)
    {
        let LinkAttribute::AfSpecBridge(list) = attribute else {
            continue;
        };
        for one in list {
            if let AfSpecBridge::VlanInfo(info) = one {
                theirs.push(PortVlan {
                    vlan: info.vid.try_into().unwrap(),
                    pvid: info.flags.contains(BridgeVlanInfoFlags::Pvid),
                    untagged: info.flags.contains(BridgeVlanInfoFlags::Untagged),
                });
            }
        }
    }
    assert_eq!(links.vlans(port).unwrap(), theirs);
    theirs
}

#[test]
fn links_and_vlans_are_read_alike() {
    let netns = Netns::new("answers");
    for words in [
        "link add br0 type bridge vlan_filtering 1",
        "link add plain type bridge",
        "link add a0 type veth peer name a1",
        "link add d0 type dummy",
        "link add v0 link d0 type vlan id 7",
        "link property add dev d0 altname a-name-that-is-longer-than-fifteen altname short",
        "link set a0 master br0 mtu 1400 up",
        "link set a1 up",
    ] {
        netns.ip(words);
    }
    let (links, namespace) = (netns.links(), netns.open());
    // The carrier follows.
    let begun = std::time::Instant::now();
    while !links.link("a0").unwrap().carrier {
        assert!(begun.elapsed().as_secs() < 10);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let found = same(&links, &namespace);
    assert_eq!(found.len(), 7);
    let port = links.link("a0").unwrap();
    assert_eq!(same_vlans(&links, &namespace, &port).len(), 1);
    for vid in ["10-20", "30", "32-4000"] {
        let mut bridge = std::process::Command::new("bridge");
        let words = ["-n", netns.name(), "vlan", "add", "dev", "a0", "vid", vid];
        lab::process::output(bridge.args(words)).unwrap();
    }
    let vlans = same_vlans(&links, &namespace, &port);
    assert_eq!(vlans.len(), 1 + 11 + 1 + 3969);
    let other = links.link("d0").unwrap();
    assert!(same_vlans(&links, &namespace, &other).is_empty());
}

/// What rtnetlink reads about a virtual function. The driver must know all settings: rtnetlink
/// takes an unknown one for off.
fn function(list: &LinkVfInfo) -> VirtualFunction {
    let mut found = VirtualFunction::default();
    for one in &list.0 {
        match one {
            VfInfo::Mac(info) => {
                found.index = info.vf_id;
                found.mac = info.mac[..6].try_into().ok();
            }
            VfInfo::VlanList(list) => {
                let Some(VfVlan::Info(info)) = list.first() else {
                    continue;
                };
                let protocol = match u16::from(info.protocol) {
                    0x88a8 => VlanProtocol::Dot1Ad,
                    _ => VlanProtocol::Dot1Q,
                };
                let (id, qos) = (info.vlan_id.try_into(), info.qos.try_into());
                found.vlan = Vlan::new(id.unwrap(), qos.unwrap(), protocol).ok();
            }
            VfInfo::Rate(info) => {
                let (min, max) = (info.min_tx_rate, info.max_tx_rate);
                found.rates = Some(Rates { min, max });
            }
            VfInfo::SpoofCheck(info) => found.spoof_check = Some(info.enabled),
            VfInfo::Trust(info) => found.trust = Some(info.enabled),
            VfInfo::RssQueryEn(info) => found.query_rss = Some(info.enabled),
            VfInfo::LinkState(info) => {
                found.link_state = match info.state {
                    VfLinkState::Auto => Some(LinkState::Auto),
                    VfLinkState::Enable => Some(LinkState::Enable),
                    VfLinkState::Disable => Some(LinkState::Disable),
                    _ => None,
                }
            }
            _ => {}
        }
    }
    found
}

#[test]
fn virtual_functions_and_representors_are_read_alike() {
    let nic = Netdevsim::add(84, 1).unwrap();
    nic.set_virtual_functions(2).unwrap();
    let interface = nic.interface().unwrap();
    let here = Namespace::current().unwrap();
    let links = sriov::Links::open().unwrap();
    let settings = [
        Setting::Mac([0x02, 0x5e, 0x10, 0x53, 0x88, 0x02]),
        Setting::Vlan(Vlan::new(300, 5, VlanProtocol::Dot1Ad).unwrap()),
        Setting::Rates(Rates { min: 10, max: 90 }),
        Setting::SpoofCheck(true),
        Setting::LinkState(LinkState::Disable),
        Setting::Trust(true),
    ];
    for change in [&[][..], &settings] {
        links.set(&interface, 1, change).unwrap();
        let mask = vec![LinkExtentMask::Vf, LinkExtentMask::SkipStats];
        let theirs = oracle::links(&here, |it| {
            it.match_name(&interface)
                .set_filter_mask(AddressFamily::Unspec, mask)
        });
        let attributes = &theirs[0].attributes;
        let theirs = attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::VfInfoList(list) => Some(list.iter().map(function).collect()),
            _ => None,
        });
        let theirs: Vec<VirtualFunction> = theirs.unwrap();
        let mut ours = links.link(&interface).unwrap().virtual_functions;
        for one in &mut ours {
            // The driver's protocol of no VLAN, until one was set. rtnetlink reads it as 802.1Q.
            if let Some(VlanProtocol::Other(0)) = one.vlan.map(|vlan| vlan.protocol()) {
                assert_eq!(one.vlan.map(|vlan| vlan.id()), Some(0));
                one.vlan = Some(Vlan::NONE);
            }
        }
        assert_eq!(ours, theirs);
        assert_eq!(theirs.len(), 2);
    }
    nic.set_eswitch_mode("switchdev").unwrap();
    let found = same(&Links::open().unwrap(), &here);
    let representor = |link: &Link| {
        link.phys_port_name.as_deref() == Some("pf0vf1") && link.phys_switch_id.is_some()
    };
    assert!(found.iter().any(representor), "{found:?}");
}
