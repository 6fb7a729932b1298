//! `vdpa_mgmt::container` and `bellhop bind … --netns` on virtual functions of the SR-IOV rig's
//! NIC, which are on one switch. They become interfaces of two containers, and devices for programs
//! again.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_link/namespace.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod namespace;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;
#[path = "rings_netdev/traffic.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod traffic;
#[path = "mgmt_link/udp.rs"]
mod udp;

use std::process::Command;
use std::time::{Duration, Instant};

use lab::process::output;
use lab::sriov::{SriovNic, VfDevice};
use namespace::Netns;
use support::{bellhop, complaint, complaint_with, printed};
use traffic::{Flow, both_ways, start};
use udp::echoed;
use vdpa::device::Device;
use vdpa::netdev::Options;
use vdpa_mgmt::bus::{Bus, Netdev};
use vdpa_mgmt::container::{Settings, give};
use vdpa_mgmt::link::{Link, Links};

const CYCLES: u32 = 20;

/// How long the kernel may take to end a namespace.
const END_LIMIT: Duration = Duration::from_secs(20);

fn load_driver() {
    output(Command::new("modprobe").arg("virtio_vdpa")).unwrap();
}

fn mac(device: &VfDevice<'_>) -> [u8; 6] {
    let text = device.function().mac();
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    [(); 6].map(|()| bytes.next().unwrap().unwrap())
}

/// The interfaces of the initial namespace, by name.
fn here() -> Vec<String> {
    let mut names: Vec<String> = Links::open()
        .unwrap()
        .links()
        .unwrap()
        .into_iter()
        .map(|link| link.name)
        .collect();
    names.sort();
    names
}

fn driver(name: &str) -> Option<String> {
    Bus::default().device(name).unwrap().driver
}

/// Exchanges frames between both devices, from a program that uses both.
fn programs_talk(devices: [&VfDevice<'_>; 2]) {
    let [mut a, mut b] = devices.map(|device| {
        let path = Bus::default().device(device.name()).unwrap().path();
        start(&path.unwrap(), &Options::default())
    });
    let mut flow = Flow::new(mac(devices[0]), mac(devices[1]));
    flow.count = 100;
    both_ways(&flow, &mut a, &mut b);
}

#[test]
fn containers_talk_and_programs_after_them() {
    let nic = SriovNic::enable(2).unwrap();
    load_driver();
    let [one, other] = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let (a, b) = (Netns::new("ca"), Netns::new("cb"));
    let before = here();
    programs_talk([&one, &other]);
    for cycle in 0..CYCLES {
        for (device, netns, address) in [(&one, &a, "10.8.0.1"), (&other, &b, "10.8.0.2")] {
            let words = [
                "bind",
                device.name(),
                "virtio_vdpa",
                "--netns",
                netns.name(),
            ];
            let words = [&words[..], &["--link-name", "eth0"]].concat();
            let shown = printed(&bellhop(&words));
            let expected = format!(
                "{}: driver virtio_vdpa netns {} netdev eth0 mac {} mtu 1500\n",
                device.name(),
                netns.name(),
                device.function().mac()
            );
            assert_eq!(shown, expected);
            assert!(netns.links().link("eth0").unwrap().up);
            netns.ip(&format!("addr add {address}/24 dev eth0"));
        }
        assert_eq!(here(), before, "the interfaces are not here");
        let count = if cycle == 0 { 500 } else { 20 };
        let came = echoed((a.name(), "10.8.0.1"), (b.name(), "10.8.0.2"), count);
        assert_eq!(came, count, "cycle {cycle}");
        for device in [&one, &other] {
            assert_eq!(
                Bus::default().netdev(device.name()).unwrap(),
                Netdev::Elsewhere
            );
            printed(&bellhop(&["bind", device.name(), "vhost_vdpa"]));
        }
        for netns in [&a, &b] {
            assert!(netns.links().link("eth0").unwrap_err().is_missing());
        }
        programs_talk([&one, &other]);
    }
    assert_eq!(here(), before);
}

/// Waits until the interface of a device is here.
fn come_back(name: &str) -> Link {
    let begin = Instant::now();
    loop {
        if let Netdev::Here { index, .. } = Bus::default().netdev(name).unwrap() {
            return Links::open().unwrap().link_at(index).unwrap();
        }
        assert!(begin.elapsed() < END_LIMIT, "the interface does not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_namespace_that_ends_returns_the_interface() {
    let nic = SriovNic::enable(1).unwrap();
    load_driver();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let name = device.name();
    let before = here();
    for (link_name, is_taken) in [("lab-eth", false), ("lab-eth", true)] {
        let netns = Netns::new("ends");
        let words = ["bind", name, "virtio_vdpa", "--netns", netns.name()];
        printed(&bellhop(
            &[&words[..], &["--link-name", link_name]].concat(),
        ));
        // The same command again: the interface is already there.
        complaint(
            &bellhop(&words),
            &[
                "already an interface in another network namespace",
                "vhost_vdpa` reclaims it",
            ],
        );
        if is_taken {
            let words = ["link", "add", link_name, "type", "dummy"];
            output(Command::new("ip").args(words)).unwrap();
        }
        drop(netns);
        let link = come_back(name);
        assert!(!link.up);
        if is_taken {
            assert!(link.name.starts_with("dev"), "{}", link.name)
        } else {
            assert_eq!(link.name, link_name)
        }
        let shown = printed(&bellhop(&["bind", name, "vhost_vdpa"]));
        assert!(
            shown.contains("driver vhost_vdpa path /dev/vhost-vdpa-"),
            "{shown}"
        );
        if is_taken {
            output(Command::new("ip").args(["link", "del", link_name])).unwrap();
        }
        assert_eq!(here(), before);
    }
}

#[test]
fn a_failed_change_leaves_the_device_as_before() {
    let nic = SriovNic::enable(1).unwrap();
    load_driver();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let name = device.name();
    let netns = Netns::new("fails");
    let bus = Bus::default();
    let before = (here(), netns.state());
    let wrong = Settings {
        mac: Some([2, 0, 0, 0, 0, 1]),
        ..Settings::default()
    };
    let too_long = Settings {
        mac: Some(mac(&device)),
        mtu: Some(1 << 20),
        ..Settings::default()
    };
    for (settings, words) in [
        (&wrong, "has the address"),
        (&too_long, "cannot set the MTU"),
    ] {
        let error = give(&bus, name, &netns.open(), settings).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(driver(name).as_deref(), Some("vhost_vdpa"));
        assert_eq!((here(), netns.state()), before);
    }
    // A device that had no driver has none again after the failure.
    bus.unbind(name).unwrap();
    give(&bus, name, &netns.open(), &wrong).unwrap_err();
    assert_eq!(driver(name), None);
    assert_eq!((here(), netns.state()), before);
    // A device with an interface here keeps it: the interface's name is taken there.
    bus.bind(name, "virtio_vdpa").unwrap();
    let links = Links::open().unwrap();
    let link = come_back(name);
    links.rename(&link, "lab-mine").unwrap();
    let link = links.link("lab-mine").unwrap();
    netns.ip("link add lab-mine type dummy");
    let settings = Settings {
        mtu: Some(1400),
        ..Settings::default()
    };
    let text = give(&bus, name, &netns.open(), &settings)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("lab-fails has another interface of that name"),
        "{text}"
    );
    assert_eq!(links.link("lab-mine").unwrap(), link);
    bus.bind(name, "vhost_vdpa").unwrap();
    assert_eq!(here(), before.0);
}

#[test]
fn bad_input_is_refused_with_a_remedy() {
    let nic = SriovNic::enable(1).unwrap();
    load_driver();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let name = device.name();
    let netns = Netns::new("bad");
    netns.ip("link add eth0 type dummy");
    let before = (here(), netns.state());
    let bind = |words: &[&str]| bellhop(&[&["bind", name][..], words].concat());
    let give_to = |netns: &str, link_name: &str| {
        bind(&["virtio_vdpa", "--netns", netns, "--link-name", link_name])
    };
    complaint(
        &give_to("lab-none", "eth1"),
        &[
            "there is no network namespace lab-none",
            "`ip netns add lab-none`",
        ],
    );
    complaint(
        &give_to("4294967295", "eth1"),
        &["there is no process 4294967295"],
    );
    complaint(
        &give_to("/dev/null", "eth1"),
        &["/dev/null is not a network namespace"],
    );
    complaint(
        &give_to("a/b", "eth1"),
        &["does not name a network namespace"],
    );
    complaint(&give_to("/proc/self/ns/net", "eth1"), &["is this one"]);
    complaint(
        &give_to(netns.name(), "eth0"),
        &[
            "lab-bad has an interface eth0 already",
            "choose another name",
        ],
    );
    for link_name in ["", "a b", "a/b", "sixteen-letters-"] {
        complaint(
            &give_to(netns.name(), link_name),
            &["does not name a network interface"],
        );
    }
    for words in [
        &["--netns", "lab-bad"][..],
        &["vhost_vdpa", "--netns", "lab-bad"],
    ] {
        complaint_with(
            2,
            &bind(words),
            &["--netns needs a vDPA device and the driver virtio_vdpa"],
        );
    }
    complaint_with(
        2,
        &bind(&["virtio_vdpa", "--link-name", "eth1"]),
        &["--netns"],
    );
    complaint(
        &bellhop(&["bind", "lab-none", "virtio_vdpa", "--netns", netns.name()]),
        &["there is no vDPA device lab-none"],
    );
    let held = Device::open(device.path()).unwrap();
    let process = format!("PID {}", std::process::id());
    complaint(
        &give_to(netns.name(), "eth1"),
        &[name, "is in use by", &process],
    );
    drop(held);
    assert_eq!(driver(name).as_deref(), Some("vhost_vdpa"));
    assert_eq!((here(), netns.state()), before);
}
