//! Honest traffic in any order, over many laps, through every transition.

use proptest::prelude::*;

use super::model::{SIZE, Shapes, World};
use crate::ErrorKind;
use crate::relay::Strategy as How;

#[derive(Debug, Clone, Copy)]
enum Step {
    Add,
    Fetch(usize),
    Complete(usize),
    Pass,
    Take,
    Interrupts(bool),
    Change(How),
    Restart(How),
}

fn step() -> impl Strategy<Value = Step> {
    let how = || prop_oneof![Just(How::Direct), Just(How::Shadowed)];
    prop_oneof![
        5 => Just(Step::Add),
        4 => (1..=usize::from(SIZE)).prop_map(Step::Fetch),
        5 => any::<usize>().prop_map(Step::Complete),
        5 => Just(Step::Pass),
        4 => Just(Step::Take),
        2 => any::<bool>().prop_map(Step::Interrupts),
        1 => how().prop_map(Step::Change),
        1 => how().prop_map(Step::Restart),
    ]
}

fn run(world: &mut World, steps: &[Step], reorders: bool, single: bool) {
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
            Step::Change(target) => match world.change(target) {
                Ok(()) => {}
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::InFlightUnknown, "{error}");
                    assert!(!world.device.held.is_empty());
                }
            },
            Step::Restart(target) => {
                // A direct ring shows its position only then.
                if world.strategy() == How::Shadowed || single && !reorders {
                    world.restart(target).unwrap();
                }
            }
        }
    }
    world.settle();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Each chain comes back once, reported before the guest sees it; no kick and
    /// no interrupt is lost.
    #[test]
    fn nothing_is_lost(
        steps in prop::collection::vec(step(), 1..150),
        event_idx in any::<bool>(),
        single in any::<bool>(),
        reorders in any::<bool>(),
        entries in prop_oneof![Just(SIZE), Just(2 * SIZE)],
    ) {
        let shapes = if single { Shapes::Single } else { Shapes::Mixed };
        let mut world = World::new(event_idx, shapes, entries);
        run(&mut world, &steps, reorders, single);
    }
}

#[test]
fn a_long_run_over_many_laps() {
    for event_idx in [false, true] {
        for shapes in [Shapes::Single, Shapes::Mixed] {
            let mut world = World::new(event_idx, shapes, SIZE);
            world.change(How::Shadowed).unwrap();
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

/// Chains of several descriptors that were completed out of order move to the guest's ring and
/// back, each once.
#[test]
fn what_is_in_flight_is_written_again() {
    for size in [SIZE, 2 * SIZE] {
        let mut world = World::new(true, Shapes::Mixed, size);
        world.change(How::Shadowed).unwrap();
        for round in 0..200 {
            for _ in 0..6 {
                world.add();
            }
            world.pass();
            world.fetch(8);
            world.complete(1);
            assert!(!world.device.held.is_empty());
            world.change(How::Direct).unwrap();
            // Forgotten: the chains are in the guest's ring again.
            assert!(world.device.held.is_empty());
            if round % 3 == 0 {
                world.fetch(8);
                while !world.device.held.is_empty() {
                    world.complete(round);
                }
            }
            world.take();
            world.change(How::Shadowed).unwrap();
        }
        assert!(world.cut > 200);
        world.settle();
    }
}

/// A suspended device that holds chains is not taken over.
#[test]
fn a_device_that_holds_chains_is_refused() {
    let mut world = World::new(false, Shapes::Mixed, SIZE);
    for _ in 0..3 {
        world.add();
    }
    world.fetch(8);
    let error = world.change(How::Shadowed).unwrap_err();
    assert_eq!(error.to_string(), "6 descriptors are in flight");
    while !world.device.held.is_empty() {
        world.complete(1);
    }
    world.change(How::Shadowed).unwrap();
    world.settle();
}
