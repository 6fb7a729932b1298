//! Tests with a kernel in memory that fails at any request, so that each roll-back is tried.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::cell::{Cell, RefCell};

use proptest::prelude::*;

use super::detach::detach;
use super::kernel::Kernel;
use super::locate::among;
use super::record::boot;
use super::*;
use crate::error::{Error, ErrorKind};
use crate::link::{Link, PhysPortName, PortVlan};
use crate::netlink::error::Refusal;
use crate::sriov::{Vlan, VlanProtocol};

const BRIDGE: u32 = 2;
const OTHER_BRIDGE: u32 = 3;
const PORT: u32 = 8;

/// Attaches without storing the record.
fn attach(
    kernel: &impl Kernel,
    wanted: &Connectivity,
    place: &Place,
) -> Result<Attached, ConnectivityError> {
    super::attach::attach(kernel, wanted, place, &mut |_| Ok(()))
}

fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.into(),
        alternative_names: Vec::new(),
        kind: None,
        up: false,
        carrier: false,
        mtu: 1500,
        mac: None,
        master: None,
        phys_port_name: None,
        phys_switch_id: None,
        parent: None,
        vlan_filtering: None,
    }
}

fn vlan(number: u16) -> VlanId {
    number.try_into().unwrap()
}

#[derive(Debug, Clone, PartialEq)]
struct State {
    links: Vec<Link>,
    /// The VLANs of the port.
    vlans: Vec<PortVlan>,
    function: Option<Vlan>,
}

/// Counts requests that change something. One of them may fail, or all later ones too.
struct Fake {
    state: RefCell<State>,
    requests: Cell<usize>,
    fail_at: Option<usize>,
    and_all_after: bool,
    /// The failing request is carried out nevertheless: its answer was lost.
    but_done: bool,
}

impl Fake {
    fn new() -> Self {
        let mut bridge = link(BRIDGE, "br0");
        bridge.kind = Some("bridge".into());
        bridge.vlan_filtering = Some(true);
        bridge.up = true;
        let other = Link {
            name: "br1".into(),
            index: OTHER_BRIDGE,
            ..bridge.clone()
        };
        let mut port = link(PORT, "rep0");
        port.phys_port_name = Some("pf0vf0".into());
        port.phys_switch_id = Some(vec![1]);
        Self {
            state: RefCell::new(State {
                links: vec![bridge, other, port],
                vlans: Vec::new(),
                function: Some(Vlan::NONE),
            }),
            requests: Cell::new(0),
            fail_at: None,
            and_all_after: false,
            but_done: false,
        }
    }

    fn place(&self) -> Place {
        Place::Link(self.link_at(PORT).unwrap())
    }

    fn change<E>(&self, error: impl Fn() -> E, change: impl FnOnce(&mut State)) -> Result<(), E> {
        let number = self.requests.get();
        self.requests.set(number + 1);
        let fails = self
            .fail_at
            .is_some_and(|at| number == at || (self.and_all_after && number > at));
        if !fails || self.but_done {
            change(&mut self.state.borrow_mut());
        }
        if fails { Err(error()) } else { Ok(()) }
    }

    fn port(&self, change: impl FnOnce(&mut Link)) -> Result<(), Error> {
        self.change(refused, |state| change(&mut state.links[2]))
    }
}

fn refused() -> Error {
    let message = "cannot show the network interface injected";
    Error::new(ErrorKind::Refused, message).because(Refusal::of(libc::EIO, Some("injected")))
}

fn missing() -> Error {
    let message = "there is no network interface it in the test";
    Error::new(ErrorKind::NotFound, message).because(Refusal::of(libc::ENODEV, None))
}

impl Kernel for Fake {
    fn link(&self, name: &str) -> Result<Link, Error> {
        let state = self.state.borrow();
        let found = state.links.iter().find(|link| link.name == name);
        found.cloned().ok_or_else(missing)
    }

    fn link_at(&self, index: u32) -> Result<Link, Error> {
        let state = self.state.borrow();
        let found = state.links.iter().find(|link| link.index == index);
        found.cloned().ok_or_else(missing)
    }

    fn vlans(&self, _: &Link) -> Result<Vec<PortVlan>, Error> {
        Ok(self.state.borrow().vlans.clone())
    }

    fn set_up(&self, _: &Link) -> Result<(), Error> {
        self.port(|port| port.up = true)
    }

    fn set_down(&self, _: &Link) -> Result<(), Error> {
        self.port(|port| port.up = false)
    }

    fn set_mtu(&self, _: &Link, mtu: u32) -> Result<(), Error> {
        self.port(|port| port.mtu = mtu)
    }

    fn set_master(&self, _: &Link, master: &Link) -> Result<(), Error> {
        self.change(refused, |state| {
            state.links[2].master = Some(master.index);
            state.vlans = vec![PortVlan::access(vlan(1))];
        })
    }

    fn clear_master(&self, _: &Link) -> Result<(), Error> {
        self.change(refused, |state| {
            state.links[2].master = None;
            state.vlans.clear();
        })
    }

    fn add_vlan(&self, _: &Link, added: PortVlan) -> Result<(), Error> {
        self.change(refused, |state| {
            state.vlans.retain(|one| one.vlan != added.vlan);
            for one in &mut state.vlans {
                one.pvid &= !added.pvid;
            }
            state.vlans.push(added);
            state.vlans.sort_by_key(|one| one.vlan);
        })
    }

    fn remove_vlan(&self, _: &Link, removed: VlanId) -> Result<(), Error> {
        self.change(refused, |state| {
            state.vlans.retain(|one| one.vlan != removed);
        })
    }

    fn function_vlan(&self, _: &str, _: u32) -> Result<Option<Vlan>, Error> {
        Ok(self.state.borrow().function)
    }

    fn set_function_vlan(&self, _: &str, _: u32, to: Vlan) -> Result<(), Error> {
        let error = || Error::netlink(std::io::Error::other("injected"));
        self.change(error, |state| state.function = Some(to))
    }
}

fn wanted() -> Connectivity {
    "bridge=br0,vlan=100,mtu=9000".parse().unwrap()
}

/// Every possible former state of the port.
fn beginnings() -> Vec<Fake> {
    let changes: [fn(&mut State); 6] = [
        |_| {},
        |state| state.links[2].up = true,
        |state| state.links[2].mtu = 9000,
        |state| {
            state.links[2].master = Some(BRIDGE);
            state.vlans = vec![PortVlan::access(vlan(1))];
        },
        |state| {
            state.links[2].master = Some(BRIDGE);
            let tagged = |number| PortVlan {
                vlan: vlan(number),
                pvid: false,
                untagged: false,
            };
            state.vlans = vec![PortVlan::access(vlan(7)), tagged(100), tagged(200)];
        },
        |state| {
            state.links[2].master = Some(BRIDGE);
            state.vlans = vec![PortVlan::access(vlan(100))];
        },
    ];
    let fakes = changes.map(|change| {
        let fake = Fake::new();
        change(&mut fake.state.borrow_mut());
        fake
    });
    fakes.into()
}

#[test]
fn attached_it_is_as_wanted_and_detached_as_before() {
    for fake in beginnings() {
        let before = fake.state.borrow().clone();
        let attached = attach(&fake, &wanted(), &fake.place()).unwrap();
        {
            let state = fake.state.borrow();
            let port = &state.links[2];
            assert!(port.up);
            assert_eq!((port.mtu, port.master), (9000, Some(BRIDGE)));
            assert_eq!(state.vlans, [PortVlan::access(vlan(100))]);
        }
        // Later, in another process, which reads the record from a file.
        let kept = postcard::to_stdvec(&attached).unwrap();
        let read: Attached = postcard::from_bytes(&kept).unwrap();
        assert_eq!(read, attached);
        assert_eq!(detach(&fake, &read, boot().as_deref()).unwrap(), []);
        assert_eq!(*fake.state.borrow(), before);
        let requests = fake.requests.get();
        assert_eq!(detach(&fake, &read, boot().as_deref()).unwrap(), []);
        assert_eq!(
            fake.requests.get(),
            requests,
            "the second time nothing is asked for"
        );
    }
}

#[test]
fn a_failure_at_each_step_leaves_everything_as_before() {
    let mut failures = 0;
    for beginning in 0..beginnings().len() {
        for (step, but_done) in (0..).flat_map(|step| [(step, false), (step, true)]) {
            let mut fake = beginnings().remove(beginning);
            fake.fail_at = Some(step);
            fake.but_done = but_done;
            let before = fake.state.borrow().clone();
            if attach(&fake, &wanted(), &fake.place()).is_ok() {
                break;
            }
            failures += 1;
            assert_eq!(
                *fake.state.borrow(),
                before,
                "{beginning} {step} {but_done}"
            );
        }
    }
    assert!(failures > 30, "{failures}");
}

#[test]
fn a_failed_rollback_is_reported_and_can_be_repeated() {
    let mut fake = Fake::new();
    fake.fail_at = Some(2);
    fake.and_all_after = true;
    let error = attach(&fake, &wanted(), &fake.place()).unwrap_err();
    assert!(matches!(&error, ConnectivityError::NotTakenBack { link, .. } if link == "rep0"));
    let text = error.to_string();
    assert!(
        text.contains("cannot roll back all changes to rep0: cannot show"),
        "{text}"
    );
    assert!(std::error::Error::source(&error).is_some());

    for step in 0..5 {
        let mut fake = Fake::new();
        let before = fake.state.borrow().clone();
        let attached = attach(&fake, &wanted(), &fake.place()).unwrap();
        fake.fail_at = Some(fake.requests.get() + step);
        let error = detach(&fake, &attached, boot().as_deref()).unwrap_err();
        assert!(
            matches!(error, ConnectivityError::NotUndone { .. }),
            "{error}"
        );
        detach(&fake, &attached, boot().as_deref()).unwrap();
        assert_eq!(*fake.state.borrow(), before, "{step}");
    }
}

#[test]
fn later_changes_of_others_are_left_alone() {
    let fake = Fake::new();
    let attached = attach(&fake, &wanted(), &fake.place()).unwrap();
    fake.state.borrow_mut().links[2].mtu = 4000;
    fake.state.borrow_mut().links[2].master = Some(OTHER_BRIDGE);
    let left = detach(&fake, &attached, boot().as_deref()).unwrap();
    let link = "rep0".to_owned();
    let expected = [
        LeftAlone::Master {
            link: link.clone(),
            now: OTHER_BRIDGE,
        },
        LeftAlone::Mtu { link, now: 4000 },
    ];
    assert_eq!(left, expected);
    let state = fake.state.borrow();
    assert_eq!(state.links[2].master, Some(OTHER_BRIDGE));
    assert_eq!(state.vlans, [PortVlan::access(vlan(100))]);
    drop(state);

    // Another VLAN for untagged frames, and another state in the recorded VLAN.
    let fake = beginnings().remove(3);
    let attached = attach(&fake, &wanted(), &fake.place()).unwrap();
    let chosen = vec![
        PortVlan {
            vlan: vlan(100),
            pvid: false,
            untagged: false,
        },
        PortVlan::access(vlan(300)),
    ];
    fake.state.borrow_mut().vlans = chosen.clone();
    let left = detach(&fake, &attached, boot().as_deref()).unwrap();
    assert_eq!(left.len(), 2, "{left:?}");
    assert_eq!(fake.state.borrow().vlans, chosen);
}

#[test]
fn another_interface_of_the_same_index_is_not_touched() {
    for change in [
        |state: &mut State| drop(state.links.pop()),
        |state: &mut State| {
            state.links[2].phys_port_name = None;
            state.links[2].name = "new".into();
        },
        |state: &mut State| state.links[2].phys_switch_id = Some(vec![2]),
    ] {
        let fake = Fake::new();
        let attached = attach(&fake, &wanted(), &fake.place()).unwrap();
        change(&mut fake.state.borrow_mut());
        let state = fake.state.borrow().clone();
        let gone = [LeftAlone::Gone("rep0".into())];
        assert_eq!(detach(&fake, &attached, boot().as_deref()).unwrap(), gone);
        assert_eq!(*fake.state.borrow(), state);
    }
    // After another boot the same index and name have no meaning.
    let fake = Fake::new();
    let attached = attach(&fake, &wanted(), &fake.place()).unwrap();
    let gone = [LeftAlone::Gone("rep0".into())];
    assert_eq!(detach(&fake, &attached, Some("another")).unwrap(), gone);
    // A port of a NIC that udev renamed is still the same.
    fake.state.borrow_mut().links[2].name = "enp1s0r0".into();
    assert_eq!(detach(&fake, &attached, boot().as_deref()).unwrap(), []);
    assert_eq!(fake.state.borrow().links[2].master, None);
}

#[test]
fn invalid_connections_are_refused_before_any_change() {
    type Case = (&'static str, fn(&mut State), &'static str);
    let cases: [Case; 7] = [
        ("bridge=br9", |_| {}, "`ip link add br9 type bridge`"),
        ("bridge=rep0", |_| {}, "rep0 is not a Linux bridge"),
        (
            "bridge=br0",
            |state| state.links[0].up = false,
            "`ip link set br0 up`",
        ),
        (
            "bridge=br0,vlan=5",
            |state| state.links[0].vlan_filtering = Some(false),
            "`ip link set br0 type bridge vlan_filtering 1`",
        ),
        (
            "bridge=br0",
            |state| state.links[2].master = Some(OTHER_BRIDGE),
            "rep0 is already a port of br1",
        ),
        ("vlan=5", |_| {}, "give `bridge=NAME` too"),
        (
            "bridge=br0",
            |state| drop(state.links.pop()),
            "there is no network interface",
        ),
    ];
    for (words, change, complaint) in cases {
        let fake = Fake::new();
        let place = fake.place();
        change(&mut fake.state.borrow_mut());
        let error = attach(&fake, &words.parse().unwrap(), &place).unwrap_err();
        assert!(error.to_string().contains(complaint), "{error}");
        assert_eq!(fake.requests.get(), 0);
    }
}

#[test]
fn in_legacy_mode_the_vlan_is_the_virtual_functions() {
    let place = Place::VirtualFunction {
        physical: "pf".into(),
        number: 3,
    };
    let fake = Fake::new();
    for words in ["bridge=br0", "bridge=br0,vlan=9", "mtu=9000"] {
        let error = attach(&fake, &words.parse().unwrap(), &place).unwrap_err();
        assert!(
            matches!(error, ConnectivityError::LegacyMode { .. }),
            "{error}"
        );
    }
    let former = Vlan::new(9, 3, VlanProtocol::Dot1Ad).unwrap();
    for former in [Some(former), Some(Vlan::NONE), None] {
        fake.state.borrow_mut().function = former;
        let attached = attach(&fake, &"vlan=100".parse().unwrap(), &place).unwrap();
        assert_eq!(fake.state.borrow().function.unwrap().id(), 100);
        let kept = postcard::to_stdvec(&attached).unwrap();
        let attached: Attached = postcard::from_bytes(&kept).unwrap();
        assert_eq!(detach(&fake, &attached, boot().as_deref()).unwrap(), []);
        assert_eq!(fake.state.borrow().function, former.or(Some(Vlan::NONE)));
    }
    // As netdevsim reports it.
    fake.state.borrow_mut().function = Vlan::from_kernel(0, 0, 0);
    let attached = attach(&fake, &"vlan=100".parse().unwrap(), &place).unwrap();
    for _ in 0..2 {
        assert_eq!(detach(&fake, &attached, boot().as_deref()).unwrap(), []);
        assert_eq!(fake.state.borrow().function, Some(Vlan::NONE));
    }
    let attached = attach(&fake, &"vlan=100".parse().unwrap(), &place).unwrap();
    let other = Vlan::new(8, 0, VlanProtocol::Dot1Q).unwrap();
    fake.state.borrow_mut().function = Some(other);
    let left = detach(&fake, &attached, boot().as_deref()).unwrap();
    assert!(matches!(left[..], [LeftAlone::FunctionVlan { now: 8, .. }]));
    assert_eq!(fake.state.borrow().function, Some(other));
}

#[test]
fn representors_are_found_by_switch_and_port() {
    let port = |index, switch: &[u8], name: &str| {
        let mut port = link(index, &format!("eth{index}"));
        port.phys_switch_id = (!switch.is_empty()).then(|| switch.to_vec());
        port.phys_port_name = Some(name.into());
        port
    };
    let physical = port(1, &[1], "p0");
    let links = vec![
        physical.clone(),
        port(2, &[2], "pf0vf1"),
        port(3, &[1], "pf0vf0"),
        port(4, &[1], "pf0vf1"),
        port(5, &[1], "pf0sf1"),
        port(6, &[1], "rubbish"),
        port(7, &[], "pf0vf1"),
    ];
    let vf: PhysPortName = "pf0vf1".parse().unwrap();
    assert_eq!(among(links.clone(), &physical, vf).unwrap().index, 4);
    let sf: PhysPortName = "pf0sf1".parse().unwrap();
    assert_eq!(among(links.clone(), &physical, sf).unwrap().index, 5);
    let none = among(links.clone(), &physical, "pf1vf1".parse().unwrap());
    assert!(matches!(none, Err(ConnectivityError::NoRepresentor { .. })));
    let legacy = among(links.clone(), &link(1, "eth1"), vf);
    assert!(matches!(
        legacy,
        Err(ConnectivityError::NotSwitchdev { .. })
    ));
    let mut twice = links;
    twice.push(port(8, &[1], "pf0vf1"));
    let ambiguous = among(twice, &physical, vf);
    assert!(matches!(
        ambiguous,
        Err(ConnectivityError::Ambiguous { .. })
    ));
}

#[test]
fn words_are_read_and_written() {
    for text in [
        "bridge=br0,vlan=100",
        "vlan=4094",
        "bridge=a,vlan=1,mtu=68",
        "mtu=65535",
    ] {
        let read: Connectivity = text.parse().unwrap();
        assert_eq!(read.to_string(), text);
    }
    let turned: Connectivity = "vlan=3,bridge=br0".parse().unwrap();
    assert_eq!(turned.to_string(), "bridge=br0,vlan=3");
    for (text, words) in [
        ("", "write `bridge=NAME"),
        ("bridge", "cannot parse \"bridge\""),
        ("bridge=br0,", "cannot parse \"\""),
        ("Bridge=br0", "cannot parse"),
        ("bridge=", "does not name a bridge"),
        ("bridge=a/b", "does not name a bridge"),
        ("bridge=a-name-that-is-too-long", "does not name a bridge"),
        ("bridge=a,bridge=a", "bridge is given twice"),
        ("vlan=0", "use 1 to 4094"),
        ("vlan=4095", "use 1 to 4094"),
        ("vlan=x", "\"x\" is not a VLAN"),
        ("vlan=1,vlan=1", "vlan is given twice"),
        ("mtu=67", "68 to 65535"),
        ("mtu=65536", "68 to 65535"),
        ("mtu=-1", "68 to 65535"),
    ] {
        let error = text.parse::<Connectivity>().unwrap_err().to_string();
        assert!(error.contains(words), "{text:?}: {error}");
    }
}

proptest! {
    #[test]
    fn any_words_are_read_without_a_panic(
        text in "(bridge|vlan|mtu|x)?[=,]?.{0,12}(,(bridge|vlan|mtu)=[0-9a-z]{0,6})?",
    ) {
        if let Ok(read) = text.parse::<Connectivity>() {
            prop_assert_eq!(read.to_string().parse::<Connectivity>().unwrap(), read);
        }
    }

    /// For any content of a damaged record nothing panics.
    #[test]
    fn any_record_does_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let fake = Fake::new();
        let attached = attach(&fake, &wanted(), &fake.place()).unwrap();
        let mut kept = postcard::to_stdvec(&attached).unwrap();
        for (index, byte) in changes {
            let length = kept.len();
            kept[index.index(length)] = byte;
        }
        if let Ok(read) = postcard::from_bytes::<Attached>(&kept) {
            let _ = detach(&fake, &read, boot().as_deref());
        }
    }
}

#[test]
fn each_change_is_recorded_before_it_happens() {
    for fake in beginnings() {
        let mut noted = Vec::new();
        let attached = super::attach::attach(&fake, &wanted(), &fake.place(), &mut |attached| {
            noted.push(attached.changes().to_vec());
            Ok(())
        });
        let changes = attached.unwrap().changes;
        assert_eq!(noted.len(), changes.len());
        for (count, noted) in noted.iter().enumerate() {
            assert_eq!(noted[..], changes[..=count]);
        }
    }
    // A change that cannot be recorded is not made, and earlier ones are undone.
    for fake in beginnings() {
        let before = fake.state.borrow().clone();
        let mut count = 0;
        let refused = super::attach::attach(&fake, &wanted(), &fake.place(), &mut |_| {
            count += 1;
            match count {
                2 => Err(std::io::Error::other("full")),
                _ => Ok(()),
            }
        });
        // Those before it were undone, which is recorded too.
        if count >= 2 {
            let error = refused.unwrap_err();
            assert!(matches!(error, ConnectivityError::NotNoted(_)), "{error}");
            assert_eq!(*fake.state.borrow(), before);
        }
    }
}

#[test]
fn a_connection_that_a_kill_interrupts_is_completed_and_undone() {
    for fake in beginnings() {
        let before = fake.state.borrow().clone();
        let (mut records, mut states) = (Vec::new(), Vec::new());
        let place = fake.place();
        super::attach::attach(&fake, &wanted(), &place, &mut |attached| {
            records.push(attached.clone());
            states.push(fake.state.borrow().clone());
            Ok(())
        })
        .unwrap();
        let complete = fake.state.borrow().clone();
        states.push(complete.clone());
        // The kill came before or after the last change of the record.
        for (record, state) in records
            .iter()
            .zip(&states)
            .chain(records.iter().zip(&states[1..]))
        {
            *fake.state.borrow_mut() = state.clone();
            let mut note = |_: &Attached| Ok(());
            let attach = super::attach::attach_again;
            let attached = attach(&fake, &wanted(), Some(record), &place, &mut note).unwrap();
            assert_eq!(*fake.state.borrow(), complete);
            assert_eq!(detach(&fake, &attached, boot().as_deref()).unwrap(), []);
            assert_eq!(*fake.state.borrow(), before);
        }
    }
}

#[test]
fn another_interface_gets_the_whole_connection() {
    for mut fake in beginnings() {
        let former = attach(&fake, &wanted(), &fake.place()).unwrap();
        // Deleted, and created again with another index.
        let new = Fake::new();
        new.state.borrow_mut().links[2].index = PORT + 1;
        fake.state = new.state;
        let place = Place::Link(fake.link_at(PORT + 1).unwrap());
        let mut note = |_: &Attached| Ok(());
        super::attach::attach_again(&fake, &wanted(), Some(&former), &place, &mut note).unwrap();
        let state = fake.state.borrow();
        let port = &state.links[2];
        assert_eq!((port.up, port.mtu, port.master), (true, 9000, Some(BRIDGE)));
        assert_eq!(state.vlans, [PortVlan::access(vlan(100))]);
    }
}

#[test]
fn a_record_of_an_older_program_shows_the_connection() {
    let fake = Fake::new();
    let attached = attach(&fake, &wanted(), &fake.place()).unwrap();
    assert_eq!(
        super::attach::connectivity(&fake, &attached).unwrap(),
        wanted()
    );
}
