//! Honest traffic in any order, over the index wrap, through every transition.

use proptest::prelude::*;

use super::model::{ADDRESSES, RingSim, SIZE};
use crate::ErrorKind;
use crate::relay::{Signals, Strategy as How};

#[derive(Debug, Clone, Copy)]
enum Step {
    Add,
    Fetch(usize),
    Complete(usize),
    Pass,
    Take,
    Interrupts(bool),
    Change(How),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => Just(Step::Add),
        4 => (1..=usize::from(SIZE)).prop_map(Step::Fetch),
        5 => any::<usize>().prop_map(Step::Complete),
        5 => Just(Step::Pass),
        4 => Just(Step::Take),
        2 => any::<bool>().prop_map(Step::Interrupts),
        1 => prop_oneof![Just(How::Direct), Just(How::UsedShadow), Just(How::FullShadow)]
            .prop_map(Step::Change),
    ]
}

fn run(sim: &mut RingSim, steps: &[Step], reorders: bool) {
    for &step in steps {
        match step {
            Step::Add => sim.add(),
            Step::Fetch(most) => sim.fetch(most),
            Step::Complete(which) => sim.complete(if reorders { which } else { 0 }),
            Step::Pass => {
                sim.pass();
            }
            Step::Take => sim.take(),
            Step::Interrupts(enabled) => sim.napi(enabled),
            Step::Change(target) => {
                let unknown = sim.strategy() == How::Direct
                    && target == How::FullShadow
                    && !sim.device.held.is_empty();
                if unknown {
                    // The documented way.
                    sim.change(How::UsedShadow).unwrap();
                }
                match sim.change(target) {
                    Ok(()) => {}
                    Err(error) => assert_eq!(error.kind(), ErrorKind::InFlightUnknown, "{error}"),
                }
            }
        }
    }
    sim.settle();
}

fn start() -> impl Strategy<Value = u16> {
    prop_oneof![Just(0), Just(65533), any::<u16>()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Each chain comes back once, reported before the guest sees it; no kick and
    /// no interrupt is lost.
    #[test]
    fn nothing_is_lost(
        steps in prop::collection::vec(step(), 1..150),
        event_idx in any::<bool>(),
        indirect in any::<bool>(),
        reorders in any::<bool>(),
        sends in any::<bool>(),
        start in start(),
    ) {
        let mut sim = RingSim::new(event_idx, indirect, start);
        if sends {
            sim.guest.sends();
        }
        run(&mut sim, &steps, reorders);
    }
}

#[test]
fn a_long_run_over_the_wrap_in_each_strategy() {
    for how in [How::UsedShadow, How::FullShadow] {
        for event_idx in [false, true] {
            let mut sim = RingSim::new(event_idx, true, 65000);
            sim.change(how).unwrap();
            for round in 0..2000usize {
                sim.add();
                sim.add();
                sim.pass();
                sim.fetch(4);
                sim.complete(round);
                sim.complete(round / 3);
                sim.pass();
                sim.take();
            }
            sim.settle();
        }
    }
}

/// Chains in flight out of order move to another ring, each once.
#[test]
fn the_avail_ring_names_chains_in_flight_after_a_change() {
    let mut sim = RingSim::new(true, false, 65534);
    sim.change(How::UsedShadow).unwrap();
    for _ in 0..6 {
        sim.add();
    }
    sim.fetch(6);
    for which in [3, 1, 3] {
        sim.complete(which);
    }
    let left = sim.device.held.clone();
    assert_eq!(left.len(), 3);
    sim.change(How::FullShadow).unwrap();
    assert!(sim.device.held.is_empty());
    for _ in 0..3 {
        sim.add();
    }
    sim.pass();
    sim.fetch(8);
    sim.complete(2);
    sim.change(How::Direct).unwrap();
    assert!(sim.device.held.is_empty());
    sim.settle();
}

/// The two newest chains have the places of older ones in the private ring.
#[test]
fn a_shadow_hands_chains_over_in_the_order_in_which_they_came() {
    let mut sim = RingSim::new(false, false, 65534);
    sim.change(How::FullShadow).unwrap();
    for _ in 0..SIZE {
        sim.add();
    }
    sim.pass();
    sim.fetch(usize::from(SIZE));
    sim.complete(2);
    sim.complete(0);
    sim.pass();
    sim.take();
    sim.add();
    sim.add();
    sim.pass();
    sim.change(How::Direct).unwrap();
    sim.settle();
    assert_eq!(sim.guest.returned, [2, 0, 1, 3, 4, 5, 6, 7, 8, 9]);
}

/// The remaining heads are the chains that the device took before the used shadow and that were not
/// seen since.
#[test]
fn chains_held_from_a_full_ring_are_known() {
    for available in [SIZE, SIZE - 1] {
        let mut sim = RingSim::new(true, true, 65534);
        for _ in 0..SIZE {
            sim.add();
        }
        sim.fetch(usize::from(SIZE));
        // Out of order, and made available to it again.
        for which in [5, 0, 2] {
            sim.complete(which);
        }
        sim.take();
        for _ in SIZE - 3..available {
            sim.add();
        }
        sim.change(How::UsedShadow).unwrap();
        sim.fetch(1);
        sim.complete(1);
        let held = sim.device.held.len();
        let changed = sim.change(How::FullShadow);
        if available == SIZE {
            changed.unwrap();
            assert!(sim.device.held.is_empty());
        } else {
            // One head has been free since before: the device could hold it as well.
            let error = changed.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InFlightUnknown, "{error}");
            let text = error.to_string();
            let unknown: usize = text.split(' ').find_map(|word| word.parse().ok()).unwrap();
            assert!((1..=held).contains(&unknown), "{text}");
        }
        sim.settle();
    }
}

/// A buffer that the guest returns to a device with plenty costs no kick, and is forwarded when the
/// device signals.
#[test]
fn a_shadow_asks_for_kicks_only_while_the_device_may_run_out() {
    for event_idx in [false, true] {
        let mut sim = RingSim::new(event_idx, false, 0);
        sim.change(How::FullShadow).unwrap();
        while sim.pass() {}
        for _ in 0..SIZE - SIZE / 8 {
            assert!(sim.add_kicks());
            while sim.pass() {}
        }
        assert!(!sim.add_kicks());
        sim.fetch(1);
        sim.complete(0);
        assert!(sim.pass());
        while sim.pass() {}
        sim.take();
        // The completed chain was replaced: plenty again.
        assert!(!sim.add_kicks());
        sim.settle();
    }
}

/// A device that takes chains only when it is kicked, and uses all that it has while the guest
/// returns one buffer at a time.
#[test]
fn a_shadow_kicks_a_device_that_used_all_announced_chains() {
    for event_idx in [false, true] {
        let mut sim = RingSim::new(event_idx, false, 0);
        for _ in 0..SIZE - SIZE / 8 {
            sim.add();
        }
        sim.change(How::FullShadow).unwrap();
        sim.fetch(usize::from(SIZE));
        for _ in 0..SIZE {
            sim.add();
            sim.complete(0);
            while sim.pass() {}
            sim.take();
        }
        sim.settle();
    }
}

/// Sent frames are returned with the next event, without a wake-up.
#[test]
fn a_shadow_requests_notifications_only_where_a_side_waits_for_used_chains() {
    for event_idx in [false, true] {
        let mut sim = RingSim::new(event_idx, false, 0);
        sim.guest.sends();
        sim.napi(false);
        sim.change(How::FullShadow).unwrap();
        assert_eq!(sim.come_to_rest(), Signals::All);
        sim.add();
        assert_eq!(sim.come_to_rest(), Signals::Urgent);
        sim.fetch(1);
        assert!(!sim.device.complete(0));
        // The guest sends more: the used chains come back with it.
        sim.add();
        assert!(sim.pass());
        assert_eq!(sim.device.used, sim.space.u16(ADDRESSES.device.0 + 2));
        assert_eq!(sim.come_to_rest(), Signals::Urgent);
        // The guest waits for an interrupt from now on: the next pass notices and enables signals.
        sim.napi(true);
        sim.take();
        assert_eq!(sim.come_to_rest(), Signals::All);
        sim.fetch(1);
        assert!(sim.device.complete(0));
        sim.settle();
    }
}

/// A guest that polls its ring for room does not wait.
#[test]
fn a_shadow_asks_for_used_chains_when_it_has_many_or_must_run_empty() {
    for event_idx in [false, true] {
        let mut sim = RingSim::new(event_idx, false, 0);
        sim.guest.sends();
        sim.napi(false);
        sim.change(How::FullShadow).unwrap();
        let enough = (1..=SIZE).find(|_| {
            sim.add();
            sim.come_to_rest() == Signals::All
        });
        assert_eq!(enough, Some(3));
        sim.fetch(1);
        assert!(sim.device.complete(0));
        assert!(sim.pass());
        assert_eq!(sim.come_to_rest(), Signals::Urgent);
        sim.settle();
    }
}

/// A driver that polls for received frames sees them at once.
#[test]
fn a_shadow_always_asks_for_chains_that_the_device_writes() {
    for event_idx in [false, true] {
        let mut sim = RingSim::new(event_idx, false, 0);
        sim.napi(false);
        sim.change(How::FullShadow).unwrap();
        sim.add();
        assert_eq!(sim.come_to_rest(), Signals::All);
        sim.fetch(1);
        assert!(sim.device.complete(0));
        sim.settle();
    }
}
