//! The control queue, and changes of the configuration.

use lab::labnic::{self, Labnic};
use vdpa::control_queue::{Command, MacTable, RxMode};

use super::client::{Client, frame, tagged, wait_for};
use super::{A, B, BROADCAST, C, MULTICAST, add, count, exchange, kernel_is_well, text, two};

#[test]
fn the_control_queue_filters() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    let rx = |mode, on| Command::Rx { mode, on };
    b.obey(&rx(RxMode::Promiscuous, false));
    let passes = |a: &mut Client, b: &mut Client, frame: &[u8], wanted: bool| {
        a.send(0, frame);
        if wanted {
            assert_eq!(b.receive(0), frame);
        } else {
            b.receives_nothing();
        }
    };
    let before = labnic::counter(&other, "filtered").unwrap();
    for (to, wanted) in [(B, true), (BROADCAST, true), (C, false), (MULTICAST, false)] {
        passes(&mut a, &mut b, &frame(to, A, 1, 80), wanted);
    }
    assert_eq!(labnic::counter(&other, "filtered").unwrap(), before + 2);
    b.obey(&Command::MacTableSet(MacTable {
        unicast: vec![C],
        multicast: vec![MULTICAST],
    }));
    for (to, wanted) in [(C, true), (MULTICAST, true), ([3; 6], false)] {
        passes(&mut a, &mut b, &frame(to, A, 2, 80), wanted);
    }
    b.obey(&Command::MacTableSet(MacTable::default()));
    b.obey(&rx(RxMode::AllMulticast, true));
    b.obey(&rx(RxMode::NoBroadcast, true));
    for (to, wanted) in [(MULTICAST, true), (BROADCAST, false), (C, false)] {
        passes(&mut a, &mut b, &frame(to, A, 3, 80), wanted);
    }
    passes(&mut a, &mut b, &tagged(B, A, 7, 4), false);
    b.obey(&Command::VlanAdd(7));
    passes(&mut a, &mut b, &tagged(B, A, 7, 5), true);
    passes(&mut a, &mut b, &tagged(B, A, 8, 6), false);
    b.obey(&Command::VlanDel(7));
    passes(&mut a, &mut b, &tagged(B, A, 7, 7), false);
    b.obey(&Command::MacAddrSet(C));
    assert_eq!(b.mac(), C);
    passes(&mut a, &mut b, &frame(C, A, 8, 80), true);
    b.refuse(&Command::MacAddrSet(MULTICAST));
    assert_eq!(b.mac(), C);
    b.refuse(&Command::AnnounceAck);
    b.refuse(&Command::GuestOffloadsSet(0));
    // A reset restores the provisioned address.
    drop(b);
    assert_eq!(Client::start(&other).mac(), B);
    kernel_is_well();
}

#[test]
fn a_poor_control_queue_sets_the_address_only() {
    let labnic = Labnic::load(&[("cvq", "poor")]).unwrap();
    let one = labnic.add("a", &["mac", &text(A), "max_vqp", "2"]).unwrap();
    let mut a = Client::start(&one);
    a.obey(&Command::MacAddrSet(B));
    assert_eq!(a.mac(), B);
    let mode = RxMode::Promiscuous;
    for command in [
        Command::Rx { mode, on: false },
        Command::MacTableSet(MacTable::default()),
        Command::VlanAdd(1),
        Command::VqPairsSet(2),
    ] {
        a.refuse(&command);
    }
    assert_eq!(count(&one, 4, "cvq requests"), 5);
    assert_eq!(count(&one, 4, "cvq errors"), 4);
    labnic.set("cvq", "none").unwrap();
    assert!(labnic.add("b", &["max_vqp", "2"]).is_err());
    let other = add(&labnic, "b", B);
    assert!(Client::start(&other).control.is_none());
}

#[test]
fn configuration_changes_interrupt() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    exchange(&mut a, &mut b, 3);
    let call = vdpa::eventfd::new().unwrap();
    b.device().set_config_call(Some(&call)).unwrap();
    assert!(b.link_is_up());
    labnic::set_link(&other, false).unwrap();
    assert_eq!(call.read().unwrap(), 1);
    assert!(!b.link_is_up());
    a.send(0, &frame(B, A, 1, 100));
    wait_for("completion", || a.queues[1].completed());
    b.send(0, &frame(A, B, 1, 100));
    wait_for("completion", || b.queues[1].completed());
    b.receives_nothing();
    a.receives_nothing();
    assert_eq!(labnic::counter(&other, "link_down").unwrap(), 2);
    labnic::set_link(&other, true).unwrap();
    assert_eq!(call.read().unwrap(), 1);
    exchange(&mut a, &mut b, 3);

    labnic::break_down(&other).unwrap();
    assert_eq!(call.read().unwrap(), 1);
    assert_eq!(b.device().status().unwrap(), 0x4f);
    a.send(0, &frame(B, A, 2, 100));
    wait_for("completion", || a.queues[1].completed());
    b.receives_nothing();
    drop(b);
    let mut b = Client::start(&other);
    exchange(&mut a, &mut b, 3);

    labnic.set("config_interrupt", "0").unwrap();
    let third = add(&labnic, "c", C);
    let c = Client::start(&third);
    c.device().set_config_call(Some(&call)).unwrap();
    labnic::set_link(&third, false).unwrap();
    assert!(!c.link_is_up());
    assert!(call.read().is_err());
    kernel_is_well();
}
