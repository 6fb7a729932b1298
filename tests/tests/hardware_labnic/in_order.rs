//! IN_ORDER negotiated: the library's rings against a device that writes one used element for
//! several chains.

use vdpa::control_queue::{Command, RxMode};

use super::client::{Client, IN_ORDER, NOTIFICATION_DATA, RING_SIZE, Setup, frame, open, wait_for};
use super::{A, B, C, add, exchange, kernel_is_well, two};
use lab::labnic::Labnic;

fn in_order() -> Setup {
    Setup {
        without: NOTIFICATION_DATA,
        ..Setup::default()
    }
}

#[test]
fn one_element_completes_a_batch_in_order() {
    let labnic = Labnic::load(&[("completion", "delayed")]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::with(&one, &in_order());
    let mut b = Client::start(&other);
    // Past the ring's end, in batches of 5.
    for round in 0..30_u16 {
        let heads: Vec<u16> = (0..5)
            .map(|number| a.queues[1].offer(&frame(B, A, number, 50)))
            .collect();
        a.queues[1].kick();
        for number in 0..5 {
            assert_eq!(b.receive(0), frame(B, A, number, 50));
        }
        wait_for("used index", || {
            (a.queues[1].used_index() == 5 * (round + 1)).then_some(())
        });
        // The only element has the ID of the last chain and the place of the first one.
        let entry = u64::from(5 * round % RING_SIZE);
        let (id, _) = a.queues[1].used_element(entry);
        assert_eq!(id, u32::from(heads[4]));
        for head in heads {
            assert_eq!(a.queues[1].completed(), Some(head));
        }
        assert_eq!(a.queues[1].completed(), None);
    }
    labnic.set("completion", "out_of_order").unwrap();
    let third = add(&labnic, "c", C);
    let (_file, device, _iotlb) = open(third.path());
    assert_eq!(device.info().features & IN_ORDER, 0);
    kernel_is_well();
}

#[test]
fn frames_cross_the_switch_in_order() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::with(&one, &in_order());
    let mut b = Client::with(&other, &in_order());
    exchange(&mut a, &mut b, 300);
    kernel_is_well();
}

/// The control queue also has the rings' features. The test sends far more commands than its ring
/// has entries, accepted and refused ones.
#[test]
fn commands_are_answered_in_order() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::with(&one, &in_order());
    let mut b = Client::with(&other, &in_order());
    assert_ne!(a.device().features() & IN_ORDER, 0);
    for last in 0..100 {
        let mac = [2, 0, 0x5e, 0, 0x53, last];
        a.obey(&Command::MacAddrSet(mac));
        assert_eq!(a.mac(), mac);
        a.refuse(&Command::VqPairsSet(0));
        a.obey(&Command::Rx {
            mode: RxMode::Promiscuous,
            on: last % 2 == 0,
        });
    }
    a.obey(&Command::MacAddrSet(A));
    exchange(&mut a, &mut b, 20);
    kernel_is_well();
}
