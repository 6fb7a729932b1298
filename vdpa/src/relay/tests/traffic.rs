//! Honest traffic in any order, over the index wrap, through every transition.

use proptest::prelude::*;

use super::model::{ADDRESSES, SIZE, World};
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
        1 => prop_oneof![Just(How::Direct), Just(How::Mediated), Just(How::Shadowed)]
            .prop_map(Step::Change),
    ]
}

fn run(world: &mut World, steps: &[Step], reorders: bool) {
    for &step in steps {
        match step {
            Step::Add => world.add(),
            Step::Fetch(most) => world.fetch(most),
            Step::Complete(which) => world.complete(if reorders { which } else { 0 }),
            Step::Pass => {
                world.pass();
            }
            Step::Take => world.take(),
            Step::Interrupts(enabled) => world.napi(enabled),
            Step::Change(target) => {
                let unknown = world.strategy() == How::Direct
                    && target == How::Shadowed
                    && !world.device.held.is_empty();
                if unknown {
                    // The documented way.
                    world.change(How::Mediated).unwrap();
                }
                match world.change(target) {
                    Ok(()) => {}
                    Err(error) => assert_eq!(error.kind(), ErrorKind::InFlightUnknown, "{error}"),
                }
            }
        }
    }
    world.settle();
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
        let mut world = World::new(event_idx, indirect, start);
        if sends {
            world.guest.sends();
        }
        run(&mut world, &steps, reorders);
    }
}

#[test]
fn a_long_run_over_the_wrap_in_each_strategy() {
    for how in [How::Mediated, How::Shadowed] {
        for event_idx in [false, true] {
            let mut world = World::new(event_idx, true, 65000);
            world.change(how).unwrap();
            for round in 0..2000usize {
                world.add();
                world.add();
                world.pass();
                world.fetch(4);
                world.complete(round);
                world.complete(round / 3);
                world.pass();
                world.take();
            }
            world.settle();
        }
    }
}

/// Chains in flight out of order move to another ring, each once.
#[test]
fn what_is_in_flight_is_named_by_the_avail_ring_after_a_change() {
    let mut world = World::new(true, false, 65534);
    world.change(How::Mediated).unwrap();
    for _ in 0..6 {
        world.add();
    }
    world.fetch(6);
    for which in [3, 1, 3] {
        world.complete(which);
    }
    let left = world.device.held.clone();
    assert_eq!(left.len(), 3);
    world.change(How::Shadowed).unwrap();
    assert!(world.device.held.is_empty());
    for _ in 0..3 {
        world.add();
    }
    world.pass();
    world.fetch(8);
    world.complete(2);
    world.change(How::Direct).unwrap();
    assert!(world.device.held.is_empty());
    world.settle();
}

/// The two newest chains have the places of older ones in the private ring.
#[test]
fn a_shadow_hands_chains_over_in_the_order_in_which_they_came() {
    let mut world = World::new(false, false, 65534);
    world.change(How::Shadowed).unwrap();
    for _ in 0..SIZE {
        world.add();
    }
    world.pass();
    world.fetch(usize::from(SIZE));
    world.complete(2);
    world.complete(0);
    world.pass();
    world.take();
    world.add();
    world.add();
    world.pass();
    world.change(How::Direct).unwrap();
    world.settle();
    assert_eq!(world.guest.returned, [2, 0, 1, 3, 4, 5, 6, 7, 8, 9]);
}

/// The remaining heads are the chains that the device took before the mediation and that were not
/// seen since.
#[test]
fn what_a_device_holds_of_a_full_ring_is_known() {
    for available in [SIZE, SIZE - 1] {
        let mut world = World::new(true, true, 65534);
        for _ in 0..SIZE {
            world.add();
        }
        world.fetch(usize::from(SIZE));
        // Out of order, and made available to it again.
        for which in [5, 0, 2] {
            world.complete(which);
        }
        world.take();
        for _ in SIZE - 3..available {
            world.add();
        }
        world.change(How::Mediated).unwrap();
        world.fetch(1);
        world.complete(1);
        let held = world.device.held.len();
        let changed = world.change(How::Shadowed);
        if available == SIZE {
            changed.unwrap();
            assert!(world.device.held.is_empty());
        } else {
            // One head has been free since before: the device could hold it as well.
            let error = changed.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InFlightUnknown, "{error}");
            let text = error.to_string();
            let unknown: usize = text.split(' ').find_map(|word| word.parse().ok()).unwrap();
            assert!((1..=held).contains(&unknown), "{text}");
        }
        world.settle();
    }
}

/// A buffer that the guest returns to a device with plenty costs no kick, and is forwarded when the
/// device signals.
#[test]
fn a_shadow_asks_for_kicks_only_while_the_device_may_run_out() {
    for event_idx in [false, true] {
        let mut world = World::new(event_idx, false, 0);
        world.change(How::Shadowed).unwrap();
        while world.pass() {}
        for _ in 0..SIZE - SIZE / 8 {
            assert!(world.add_kicks());
            while world.pass() {}
        }
        assert!(!world.add_kicks());
        world.fetch(1);
        world.complete(0);
        assert!(world.pass());
        while world.pass() {}
        world.take();
        // The completed chain was replaced: plenty again.
        assert!(!world.add_kicks());
        world.settle();
    }
}

/// Sent frames are returned with the next event, without a wake-up.
#[test]
fn a_shadow_requests_notifications_only_where_a_side_waits_for_used_chains() {
    for event_idx in [false, true] {
        let mut world = World::new(event_idx, false, 0);
        world.guest.sends();
        world.napi(false);
        world.change(How::Shadowed).unwrap();
        assert_eq!(world.come_to_rest(), Signals::All);
        world.add();
        assert_eq!(world.come_to_rest(), Signals::Urgent);
        world.fetch(1);
        assert!(!world.device.complete(0));
        // The guest sends more: the used chains come back with it.
        world.add();
        assert!(world.pass());
        assert_eq!(world.device.used, world.space.u16(ADDRESSES.device + 2));
        assert_eq!(world.come_to_rest(), Signals::Urgent);
        // The guest waits for an interrupt from now on: the next pass notices and enables signals.
        world.napi(true);
        world.take();
        assert_eq!(world.come_to_rest(), Signals::All);
        world.fetch(1);
        assert!(world.device.complete(0));
        world.settle();
    }
}

/// A guest that polls its ring for room does not wait.
#[test]
fn a_shadow_asks_for_used_chains_when_it_has_many_or_must_run_empty() {
    for event_idx in [false, true] {
        let mut world = World::new(event_idx, false, 0);
        world.guest.sends();
        world.napi(false);
        world.change(How::Shadowed).unwrap();
        let enough = (1..=SIZE).find(|_| {
            world.add();
            world.come_to_rest() == Signals::All
        });
        assert_eq!(enough, Some(3));
        world.fetch(1);
        assert!(world.device.complete(0));
        assert!(world.pass());
        assert_eq!(world.come_to_rest(), Signals::Urgent);
        world.settle();
    }
}

/// A driver that polls for received frames sees them at once.
#[test]
fn a_shadow_always_asks_for_chains_that_the_device_writes() {
    for event_idx in [false, true] {
        let mut world = World::new(event_idx, false, 0);
        world.napi(false);
        world.change(How::Shadowed).unwrap();
        world.add();
        assert_eq!(world.come_to_rest(), Signals::All);
        world.fetch(1);
        assert!(world.device.complete(0));
        world.settle();
    }
}
