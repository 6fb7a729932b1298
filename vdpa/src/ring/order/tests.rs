//! Tests with a model whose driver and device act between any two reads. The chains really in
//! flight decide whether an answer is right.

use std::cell::RefCell;

use proptest::prelude::*;

use super::*;

const SIZE: u16 = 8;
const MASK: u16 = SIZE - 1;

/// One step of the driver or the device.
#[derive(Debug, Clone, Copy)]
enum Act {
    /// The driver writes an entry with the chosen free head, unpublished.
    Write(usize),
    Publish,
    /// The driver reclaims used chains.
    Reap,
    /// The device completes one of the published chains.
    Complete(usize),
    /// Time passes.
    Idle,
}

/// A ring with its driver and its device.
#[derive(Debug, Clone)]
struct Model {
    avail: [u16; SIZE as usize],
    used: [u16; SIZE as usize],
    available: u16,
    /// After the last written entry.
    written: u16,
    completed: u16,
    reaped: u16,
    free: Vec<u16>,
    /// Heads that are written and not completed, with their positions.
    given: Vec<(u16, u16)>,
    in_order: bool,
}

impl Model {
    fn new(begin: u16, in_order: bool) -> Self {
        Self {
            avail: [0; SIZE as usize],
            used: [0; SIZE as usize],
            available: begin,
            written: begin,
            completed: begin,
            reaped: begin,
            free: (0..SIZE).collect(),
            given: Vec::new(),
            in_order,
        }
        .after_a_lap()
    }

    /// Overwrites every entry once, so that all entries are the model's own.
    fn after_a_lap(mut self) -> Self {
        for _ in 0..SIZE {
            self.act(Act::Write(0));
            self.act(Act::Publish);
            self.act(Act::Complete(0));
            self.act(Act::Reap);
        }
        self
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Write(pick) if !self.free.is_empty() => {
                let head = self.free.remove(pick % self.free.len());
                self.avail[usize::from(self.written & MASK)] = head;
                self.given.push((self.written, head));
                self.written = self.written.wrapping_add(1);
            }
            Act::Publish => self.available = self.written,
            Act::Reap => {
                while self.reaped != self.completed {
                    self.free.push(self.used[usize::from(self.reaped & MASK)]);
                    self.reaped = self.reaped.wrapping_add(1);
                }
            }
            Act::Complete(pick) => {
                let visible = usize::from(self.available.wrapping_sub(self.completed));
                // The last written entries may be unpublished.
                let hidden = usize::from(self.written.wrapping_sub(self.available));
                let taken = self.given.len() - hidden;
                assert_eq!(visible, taken);
                if taken > 0 {
                    let pick = if self.in_order { 0 } else { pick % taken };
                    let (_, head) = self.given.remove(pick);
                    self.used[usize::from(self.completed & MASK)] = head;
                    self.completed = self.completed.wrapping_add(1);
                }
            }
            Act::Write(_) | Act::Idle => {}
        }
    }

    /// Whether entries that were not overwritten differ from the used ring, with chains in flight.
    fn shows_disorder(&self) -> bool {
        let oldest = self.written.wrapping_sub(SIZE);
        let left = self.completed.wrapping_sub(oldest);
        self.available != self.completed
            && (1..=left).any(|back| {
                let slot = usize::from(self.completed.wrapping_sub(back) & MASK);
                self.avail[slot] != self.used[slot]
            })
    }

    /// Whether a head is named twice from the used index on: a device that begins there takes it
    /// twice.
    fn repeats(&self) -> bool {
        let mut taken = self.taken_at_used();
        taken.sort_unstable();
        taken.windows(2).any(|two| two[0] == two[1])
    }

    /// Whether a chain before the used index is still in flight, and its entry was not overwritten.
    fn shows_hole(&self) -> bool {
        let oldest = self.written.wrapping_sub(SIZE);
        let left = self.completed.wrapping_sub(oldest);
        let mut given = self.given.iter();
        given.any(|&(position, _)| {
            let back = self.completed.wrapping_sub(position);
            (1..=left).contains(&back)
        })
    }

    /// The heads for a device that begins at the used index.
    fn taken_at_used(&self) -> Vec<u16> {
        let waiting = self.available.wrapping_sub(self.completed);
        (0..waiting)
            .map(|ahead| self.avail[usize::from(self.completed.wrapping_add(ahead) & MASK)])
            .collect()
    }

    fn in_flight(&self) -> Vec<u16> {
        let hidden = usize::from(self.written.wrapping_sub(self.available));
        let taken = self.given.len() - hidden;
        self.given[..taken].iter().map(|&(_, head)| head).collect()
    }
}

/// The model with the actions before each read.
#[derive(Debug)]
struct Live {
    model: RefCell<Model>,
    acts: RefCell<Vec<Act>>,
}

impl Live {
    fn new(model: Model, acts: Vec<Act>) -> Self {
        Self {
            model: RefCell::new(model),
            acts: RefCell::new(acts),
        }
    }

    fn step(&self) {
        if let Some(act) = self.acts.borrow_mut().pop() {
            self.model.borrow_mut().act(act);
        }
    }

    /// The driver delays between an entry and its index, but not forever.
    fn check(&self) -> Result<(), Error> {
        let mut waits = 0;
        check(self, Window::whole(SIZE), || {
            self.step();
            waits += 1;
            if waits % 8 == 0 {
                self.model.borrow_mut().act(Act::Publish);
            }
        })
    }
}

impl Fields for Live {
    fn used_index(&self) -> Result<u16, Error> {
        self.step();
        Ok(self.model.borrow().completed)
    }
    fn avail_index(&self) -> Result<u16, Error> {
        self.step();
        Ok(self.model.borrow().available)
    }
    fn given(&self, position: u16) -> Result<u16, Error> {
        self.step();
        Ok(self.model.borrow().avail[usize::from(position & MASK)])
    }
    fn done(&self, position: u16) -> Result<u32, Error> {
        self.step();
        Ok(self.model.borrow().used[usize::from(position & MASK)].into())
    }
}

fn act(device: bool) -> BoxedStrategy<Act> {
    let pick = || 0..usize::from(SIZE);
    let driver = prop_oneof![
        4 => pick().prop_map(Act::Write),
        2 => Just(Act::Publish),
        2 => Just(Act::Reap),
    ];
    if device {
        prop_oneof![3 => driver, 2 => pick().prop_map(Act::Complete)].boxed()
    } else {
        driver.boxed()
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2048,
        max_global_rejects: 1 << 16,
        ..ProptestConfig::default()
    })]

    /// In a ring that stands still, a device that works in order always passes, and the next one
    /// takes exactly the chains in flight. Visible disorder is refused. A full ring that passes is
    /// exact, whatever the device did.
    #[test]
    fn a_ring_that_stands_still(
        begin in any::<u16>(),
        in_order in any::<bool>(),
        acts in prop::collection::vec(act(true), 0..120),
    ) {
        let mut model = Model::new(begin, in_order);
        acts.into_iter().for_each(|act| model.act(act));
        model.act(Act::Publish);
        let live = Live::new(model.clone(), Vec::new());
        let passed = live.check().is_ok();
        prop_assert_eq!(passed, !model.shows_disorder() && !model.repeats());
        if passed && model.in_flight().len() == usize::from(SIZE) {
            let (mut taken, mut held) = (model.taken_at_used(), model.in_flight());
            taken.sort_unstable();
            held.sort_unstable();
            prop_assert_eq!(taken, held);
        }
        if in_order {
            prop_assert!(passed);
            prop_assert_eq!(model.taken_at_used(), model.in_flight());
        }
    }

    /// A device that works in order passes, whatever driver and device do meanwhile. That includes
    /// a driver that had written entries and not published them.
    #[test]
    fn order_is_never_taken_for_disorder(
        begin in any::<u16>(),
        before in prop::collection::vec(act(true), 0..80),
        meanwhile in prop::collection::vec(act(true), 0..200),
    ) {
        let mut model = Model::new(begin, true);
        before.into_iter().for_each(|act| model.act(act));
        prop_assert!(Live::new(model, meanwhile).check().is_ok());
    }

    /// The disorder of a stopped device is found, whatever its driver overwrites meanwhile: the
    /// first look finds it, unless it was overwritten before.
    #[test]
    fn disorder_is_found_though_the_driver_continues(
        begin in any::<u16>(),
        before in prop::collection::vec(act(true), 0..80),
        meanwhile in prop::collection::vec(act(false), 0..200),
        reads in 0usize..4,
    ) {
        let mut model = Model::new(begin, false);
        before.into_iter().for_each(|act| model.act(act));
        prop_assume!(model.shows_hole());
        // Nothing happens until the entries were read once.
        let mut acts = meanwhile;
        acts.extend(std::iter::repeat_n(Act::Idle, 2 + 3 * usize::from(SIZE) + reads));
        let live = Live::new(model, acts);
        prop_assert!(live.check().is_err());
    }
}

/// One chain is used ahead of its turn and made available again at once: only its duplicate shows
/// it.
#[test]
fn a_full_ring_with_a_head_twice_is_disorder() {
    let mut model = Model::new(7, false);
    for _ in 0..SIZE {
        model.act(Act::Write(0));
    }
    model.act(Act::Publish);
    assert!(Live::new(model.clone(), Vec::new()).check().is_ok());
    model.act(Act::Complete(1));
    model.act(Act::Reap);
    model.act(Act::Write(0));
    model.act(Act::Publish);
    assert!(!model.shows_disorder() && model.repeats());
    assert!(Live::new(model, Vec::new()).check().is_err());
}

/// An earlier device's order does not matter: its gaps were filled when it handed over.
#[test]
fn only_later_completions_count() {
    let mut model = Model::new(7, false);
    for _ in 0..4 {
        model.act(Act::Write(0));
    }
    model.act(Act::Publish);
    model.act(Act::Complete(1));
    let begin = model.completed;
    let since = |model: &Model, begin| {
        let live = Live::new(model.clone(), Vec::new());
        let (size, begin) = (SIZE, Some(begin));
        check(&live, Window { size, begin }, || {}).is_ok()
    };
    assert!(since(&model, begin) && !since(&model, begin.wrapping_sub(1)));
    // The first device's chains are written where the second one takes them.
    let held = model.in_flight();
    for (ahead, head) in (0..).zip(held) {
        let position = begin.wrapping_add(ahead);
        model.avail[usize::from(position & MASK)] = head;
    }
    let mut orderly = Model {
        in_order: true,
        ..model.clone()
    };
    orderly.act(Act::Complete(0));
    assert!(since(&orderly, begin));
    model.act(Act::Complete(1));
    assert!(!since(&model, begin));
}

#[test]
fn an_index_that_is_too_far_ahead_is_named() {
    let mut model = Model::new(0, true);
    model.available = model.completed.wrapping_add(SIZE + 3);
    model.written = model.available;
    let live = Live::new(model, Vec::new());
    let refused = check(&live, Window::whole(SIZE), || {}).unwrap_err();
    let jump = Violation::AvailJump { ahead: 11, size: 8 };
    assert_eq!(refused.violation(), Some(jump));
}
