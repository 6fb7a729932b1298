//! Doorbells of the device in the notify part of the BAR. Their targets after any order of BAR
//! moves, decoding, resets, activations, guest reads and unplugging are compared with a naive
//! model. No kick is lost in a transition.

use proptest::prelude::*;

use super::rig::{FAIL_CHANGE, Rig, Stage, VERSION_1, WINDOW, reg};
use crate::pci::PciFunction;
use crate::testing::{Operation, Reached};
use crate::virtio::backend::Outcome;

/// Two addresses for the BAR inside the window, and one outside.
const PLACES: [u64; 3] = [WINDOW, WINDOW + 0x40_0000, 0x1000_0000];

/// The device has doorbells for these queues. Drivers enable queues 0 and 1; queue 3 is never
/// enabled, and queue 2 does not exist.
const HAS: [u16; 2] = [1, 3];

#[derive(Debug, Clone, Copy)]
enum Step {
    Move(usize),
    Decode(bool),
    /// A complete start by a driver.
    Start,
    /// Status 0.
    Reset,
    /// The device breaks.
    Break,
    /// The guest reads the notify page of this queue at the BAR's current address.
    Read(u64),
    /// A memory fault without an address.
    Fault,
    /// The machine resets.
    PowerCycle,
}

const STEPS: [Step; 10] = [
    Step::Move(0),
    Step::Move(1),
    Step::Move(2),
    Step::Decode(true),
    Step::Decode(false),
    Step::Start,
    Step::Reset,
    Step::Read(1),
    Step::Fault,
    Step::PowerCycle,
];

/// The expected state, in the simplest terms.
#[derive(Debug)]
struct Expected {
    place: u64,
    decoded: bool,
    running: bool,
    was_read: bool,
}

impl Expected {
    /// Drivers can reach the device.
    fn answers(&self) -> bool {
        self.decoded && self.place >= WINDOW
    }

    fn shows_page(&self) -> bool {
        self.answers() && self.running && !self.was_read
    }

    fn all(&self) -> Vec<Reached> {
        let queues = if self.answers() { 0..4 } else { 0..0 };
        let reached = |queue: u64| {
            let address = self.place + 0x1_0000 + queue * 4096;
            if queue == 1 && self.shows_page() {
                Reached::Page(address, 1)
            } else {
                Reached::Eventfd(address)
            }
        };
        queues.map(reached).collect()
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Move(place) => self.place = PLACES[place],
            Step::Decode(on) => self.decoded = on,
            Step::Start if self.answers() => self.running = true,
            Step::Reset if self.answers() => self.running = false,
            Step::Break => self.running = false,
            Step::Read(1) | Step::Fault if self.shows_page() => self.was_read = true,
            Step::PowerCycle => {
                *self = Self {
                    place: WINDOW,
                    decoded: false,
                    running: false,
                    was_read: false,
                };
            }
            _ => {}
        }
    }
}

fn rig() -> (Rig, Expected) {
    let rig = Rig::cold();
    rig.seen.lock().doorbells = HAS.to_vec();
    let expected = Expected {
        place: WINDOW,
        decoded: false,
        running: false,
        was_read: false,
    };
    (rig, expected)
}

fn run(rig: &Rig, expected: &mut Expected, step: Step) {
    match step {
        Step::Move(place) => {
            rig.config_write(0x14, 4, PLACES[place] >> 32);
            rig.config_write(0x10, 4, PLACES[place] & 0xffff_ffff);
        }
        Step::Decode(on) => rig.config_write(4, 2, if on { 2 } else { 0 }),
        Step::Start => rig.start(VERSION_1),
        Step::Reset => rig.set_status(0),
        Step::Break => rig.report(Outcome {
            config_changed: false,
            needs_reset: true,
        }),
        Step::Read(queue) => {
            let address = rig.bar() + 0x1_0000 + queue * 4096;
            let took = rig.pci.memory_fault(Some(address + 0x123));
            assert_eq!(took, queue == 1 && expected.shows_page());
            // The value that the retried instruction reads.
            if expected.answers() {
                assert_eq!(rig.read(0x1_0000 + queue * 4096, 2), 0);
            }
        }
        Step::Fault => {
            assert_eq!(rig.pci.memory_fault(None), expected.shows_page());
        }
        Step::PowerCycle => rig.pci.reset(),
    }
    expected.step(step);
    assert_eq!(rig.doorbells.all(), expected.all(), "after {step:?}");
    no_gap(rig, expected);
}

/// If a notify page is still decoded, the new target of its kicks was added before the old one was
/// removed.
fn no_gap(rig: &Rig, expected: &Expected) {
    let done = std::mem::take(&mut *rig.doorbells.done.lock());
    for reached in expected.all() {
        let (Reached::Eventfd(address) | Reached::Page(address, _)) = reached;
        let there: Vec<Operation> = done
            .iter()
            .copied()
            .filter(|operation| match operation {
                Operation::Attach(at)
                | Operation::Detach(at)
                | Operation::Map(at)
                | Operation::Unmap(at) => *at == address,
            })
            .collect();
        let went =
            |operation: &Operation| matches!(operation, Operation::Detach(_) | Operation::Unmap(_));
        // A restart is a reset and a start, with two transitions.
        for pair in there.chunks(2) {
            assert!(!went(&pair[0]), "a gap: {there:x?}");
            assert!(pair.len() == 1 || went(&pair[1]), "{there:x?}");
        }
    }
}

#[test]
fn every_order_of_three_steps_from_three_starts() {
    fn walk(path: &mut Vec<Step>, left: usize) {
        if left == 0 {
            let (rig, mut expected) = rig();
            for step in path.iter() {
                run(&rig, &mut expected, *step);
            }
            let doorbells = rig.doorbells.clone();
            rig.pci.remove(rig.slot).unwrap();
            assert_eq!(doorbells.all(), [], "after unplugging");
            return;
        }
        for step in STEPS {
            path.push(step);
            walk(path, left - 1);
            path.pop();
        }
    }
    walk(&mut vec![Step::Decode(true), Step::Start], 3);
    walk(&mut vec![Step::Decode(true)], 3);
    walk(&mut Vec::new(), 3);
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (0usize..3).prop_map(Step::Move),
        1 => any::<bool>().prop_map(Step::Decode),
        3 => Just(Step::Start),
        1 => Just(Step::Reset),
        1 => Just(Step::Break),
        1 => (0u64..5).prop_map(Step::Read),
        1 => Just(Step::Fault),
        1 => Just(Step::PowerCycle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn any_order(steps in prop::collection::vec(any_step(), 1..60)) {
        let (rig, mut expected) = rig();
        for step in steps {
            run(&rig, &mut expected, step);
        }
        let doorbells = rig.doorbells.clone();
        drop(rig);
        assert_eq!(doorbells.all(), []);
    }
}

fn started() -> Rig {
    let (rig, _) = rig();
    rig.config_write(4, 2, 2);
    rig.start(VERSION_1);
    rig
}

const PAGE_1: u64 = WINDOW + 0x1_1000;

#[test]
fn a_stored_device_keeps_no_doorbell() {
    let rig = started();
    assert!(rig.doorbells.all().contains(&Reached::Page(PAGE_1, 1)));
    let state = rig.device.save().unwrap();
    assert_eq!(rig.stage(), Stage::Saved);
    assert!(rig.doorbells.all().contains(&Reached::Eventfd(PAGE_1)));
    rig.device.restore(&state).unwrap();
    assert!(rig.doorbells.all().contains(&Reached::Page(PAGE_1, 1)));
}

#[test]
fn a_device_that_breaks_at_a_change_keeps_no_doorbell() {
    let (rig, _) = rig();
    rig.config_write(4, 2, 2);
    rig.start(VERSION_1 | FAIL_CHANGE);
    assert!(rig.doorbells.all().contains(&Reached::Page(PAGE_1, 1)));
    rig.write(reg::QUEUE_SELECT, 2, 1);
    rig.write(reg::QUEUE_VECTOR, 2, 3);
    assert!(rig.doorbells.all().contains(&Reached::Eventfd(PAGE_1)));
}

#[test]
fn a_doorbell_that_cannot_be_mapped_leaves_the_eventfd() {
    let (rig, _) = rig();
    rig.config_write(4, 2, 2);
    *rig.doorbells.refused.lock() = Some(PAGE_1);
    rig.start(VERSION_1);
    assert!(rig.doorbells.all().contains(&Reached::Eventfd(PAGE_1)));
    // Not retried while the device runs, but for the next driver.
    *rig.doorbells.refused.lock() = None;
    rig.config_write(4, 2, 0);
    rig.config_write(4, 2, 2);
    assert!(rig.doorbells.all().contains(&Reached::Eventfd(PAGE_1)));
    rig.set_status(0);
    rig.start(VERSION_1);
    assert!(rig.doorbells.all().contains(&Reached::Page(PAGE_1, 1)));
}

#[test]
fn a_doorbell_that_cannot_be_unmapped_is_retried_and_not_doubled() {
    let rig = started();
    *rig.doorbells.refused.lock() = Some(PAGE_1);
    rig.set_status(0);
    assert!(rig.doorbells.all().contains(&Reached::Page(PAGE_1, 1)));
    let there = WINDOW + 0x40_0000;
    rig.config_write(0x10, 4, there & 0xffff_ffff);
    rig.start(VERSION_1);
    let pages = |rig: &Rig| {
        let all = rig.doorbells.all();
        all.into_iter()
            .filter(|reached| matches!(reached, Reached::Page(..)))
            .collect::<Vec<_>>()
    };
    assert_eq!(pages(&rig), [Reached::Page(PAGE_1, 1)]);
    *rig.doorbells.refused.lock() = None;
    rig.set_status(0);
    assert_eq!(pages(&rig), []);
    rig.start(VERSION_1);
    assert_eq!(pages(&rig), [Reached::Page(there + 0x1_1000, 1)]);
}

#[test]
fn faults_at_other_addresses_are_passed_on() {
    let rig = started();
    for address in [0, PAGE_1 - 1, PAGE_1 + 4096, u64::MAX] {
        assert!(!rig.pci.memory_fault(Some(address)), "{address:#x}");
    }
    assert!(!rig.device.memory_fault(Some(WINDOW)));
    assert!(rig.doorbells.all().contains(&Reached::Page(PAGE_1, 1)));
    assert!(rig.pci.memory_fault(Some(PAGE_1 + 4095)));
    // A second vCPU that read it finds it removed.
    assert!(!rig.pci.memory_fault(Some(PAGE_1)));
    // A later driver does not restore it; a machine reset does.
    rig.set_status(0);
    rig.start(VERSION_1);
    assert!(rig.doorbells.all().contains(&Reached::Eventfd(PAGE_1)));
    rig.pci.reset();
    rig.config_write(4, 2, 2);
    rig.start(VERSION_1);
    assert!(rig.doorbells.all().contains(&Reached::Page(PAGE_1, 1)));
}
