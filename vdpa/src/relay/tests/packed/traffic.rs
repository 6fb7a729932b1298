//! Honest traffic in any order, over many laps, through every transition.

use proptest::prelude::*;

use super::model::{RingSim, SIZE, Shapes};
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
    let how = || prop_oneof![Just(How::Direct), Just(How::FullShadow)];
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

fn run(sim: &mut RingSim, steps: &[Step], reorders: bool, single: bool) {
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
            Step::Change(target) => match sim.change(target) {
                Ok(()) => {}
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::InFlightUnknown, "{error}");
                    assert!(!sim.device.held.is_empty());
                }
            },
            Step::Restart(target) => {
                // A direct ring shows its position only then.
                if sim.strategy() == How::FullShadow || single && !reorders {
                    sim.restart(target).unwrap();
                }
            }
        }
    }
    sim.settle();
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
        let mut sim = RingSim::new(event_idx, shapes, entries);
        run(&mut sim, &steps, reorders, single);
    }
}

#[test]
fn a_long_run_over_many_laps() {
    for event_idx in [false, true] {
        for shapes in [Shapes::Single, Shapes::Mixed] {
            let mut sim = RingSim::new(event_idx, shapes, SIZE);
            sim.change(How::FullShadow).unwrap();
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

/// Chains of several descriptors that were completed out of order move to the guest's ring and
/// back, each once.
#[test]
fn chains_in_flight_are_written_again() {
    for size in [SIZE, 2 * SIZE] {
        let mut sim = RingSim::new(true, Shapes::Mixed, size);
        sim.change(How::FullShadow).unwrap();
        for round in 0..200 {
            for _ in 0..6 {
                sim.add();
            }
            sim.pass();
            sim.fetch(8);
            sim.complete(1);
            assert!(!sim.device.held.is_empty());
            sim.change(How::Direct).unwrap();
            // Forgotten: the chains are in the guest's ring again.
            assert!(sim.device.held.is_empty());
            if round % 3 == 0 {
                sim.fetch(8);
                while !sim.device.held.is_empty() {
                    sim.complete(round);
                }
            }
            sim.take();
            sim.change(How::FullShadow).unwrap();
        }
        assert!(sim.cut > 200);
        sim.settle();
    }
}

/// A suspended device that holds chains is not taken over.
#[test]
fn a_device_that_holds_chains_is_refused() {
    let mut sim = RingSim::new(false, Shapes::Mixed, SIZE);
    for _ in 0..3 {
        sim.add();
    }
    sim.fetch(8);
    let error = sim.change(How::FullShadow).unwrap_err();
    assert_eq!(error.to_string(), "6 descriptors are in flight");
    while !sim.device.held.is_empty() {
        sim.complete(1);
    }
    sim.change(How::FullShadow).unwrap();
    sim.settle();
}
