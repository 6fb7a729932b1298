//! A journal of steps. Each is stored in the record before it is done. So it can be undone after a
//! failure or a signal, and by another process after a crash.
//!
//! ```text
//!   step: into the record ──> record stored ──> done ──> next step
//!             │ certainly not done: out of the record    │ fails
//!             └──────────────────────────────────────────┴──> roll back: the last step first,
//!                                                             each out of the record once undone
//! ```
//! A record never holds less than was done. It may hold more: so undoing checks first, and undoing
//! a step that was not done, or is undone already, changes nothing. This module owns the order of
//! record, step and undoing. The implementations define steps and the place of a record.

use std::error::Error;
use std::fmt;

/// The outcome of a step.
#[derive(Debug)]
pub enum Outcome<T, E> {
    /// It is done.
    Done(T),
    /// It was certainly not done, so there is nothing to undo.
    NotDone(E),
    /// It may have been done.
    Unknown(E),
}

impl<T, E> From<Result<T, E>> for Outcome<T, E> {
    /// A failed step may have been done.
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(done) => Self::Done(done),
            Err(error) => Self::Unknown(error),
        }
    }
}

/// The progress of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepEvent {
    /// It is in the record and not done yet.
    Begin,
    /// It is done.
    Done,
    /// It is about to be undone.
    Undo,
    /// It is undone and still in the record.
    Undone,
}

impl fmt::Display for StepEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "do",
            Self::Done => "done",
            Self::Undo => "undo",
            Self::Undone => "undone",
        })
    }
}

/// Steps that could not be undone, the last one first. A step without an error was not tried,
/// because a later one must be undone first.
pub type NotUndone<J> = Vec<(<J as Journal>::Step, Option<<J as Journal>::Error>)>;

/// Steps that are done and undone, with their record.
pub trait Journal {
    /// A step, with the data needed to undo it.
    type Step: Clone + PartialEq;
    /// Why a step is not done, or not undone.
    type Error: Error + 'static;

    /// The owner of these steps, for the log.
    fn name(&self) -> &str;

    /// The steps that were begun, in the order of their dependencies.
    fn steps(&mut self) -> &mut Vec<Self::Step>;

    /// The position of a new step among them.
    fn place(&mut self, _step: &Self::Step) -> usize {
        self.steps().len()
    }

    /// Stores the record. It is in a safe place when this returns.
    ///
    /// # Errors
    /// The record could not be stored; no further step is done then.
    fn persist(&mut self) -> Result<(), Self::Error>;

    /// Undoes a step, unless its effect has been changed since.
    ///
    /// # Errors
    /// The step stays in the record.
    fn undo(&mut self, step: &Self::Step) -> Result<(), Self::Error>;

    /// Whether the steps before this one must stay while it cannot be undone.
    fn keeps_those_before(_step: &Self::Step) -> bool {
        false
    }

    /// Reports the progress of a step.
    ///
    /// # Errors
    /// The step must not continue.
    fn watch(&mut self, _moment: StepEvent, _step: &Self::Step) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Does a step, also one that is in the record already.
    ///
    /// # Errors
    /// Those of the work and of the record. A step that may have been done is in the record.
    fn step<T>(
        &mut self,
        step: Self::Step,
        work: impl FnOnce() -> Outcome<T, Self::Error>,
    ) -> Result<T, Self::Error> {
        if !self.steps().contains(&step) {
            let place = self.place(&step);
            self.steps().insert(place, step.clone());
            self.persist()?;
        }
        self.watch(StepEvent::Begin, &step)?;
        match work() {
            Outcome::Done(done) => self.watch(StepEvent::Done, &step).map(|()| done),
            Outcome::Unknown(error) => Err(error),
            Outcome::NotDone(error) => {
                self.steps().retain(|one| *one != step);
                self.note();
                Err(error)
            }
        }
    }

    /// Undoes the step at this position, and removes it from the record.
    ///
    /// # Errors
    /// Undoing failed; the step stays in the record.
    fn undo_at(&mut self, place: usize) -> Result<(), Self::Error> {
        let Some(step) = self.steps().get(place).cloned() else {
            return Ok(());
        };
        self.watch(StepEvent::Undo, &step)?;
        self.undo(&step)?;
        self.watch(StepEvent::Undone, &step)?;
        self.steps().remove(place);
        self.note();
        Ok(())
    }

    /// Undoes all steps. Those returned are still in the record.
    fn roll_back(&mut self) -> NotUndone<Self>
    where
        Self: Sized,
    {
        let mut left = Vec::new();
        let mut kept = false;
        for place in (0..self.steps().len()).rev() {
            let step = self.steps().get(place).cloned();
            let error = if kept {
                None
            } else if let Err(error) = self.undo_at(place) {
                Some(error)
            } else {
                continue;
            };
            let Some(step) = step else { continue };
            kept |= Self::keeps_those_before(&step);
            left.push((step, error));
        }
        if !left.is_empty() {
            self.note();
        }
        left
    }

    /// Stores the record after the removal of a step. An old record does no harm: undoing a step
    /// again changes nothing.
    fn note(&mut self) {
        if let Err(error) = self.persist() {
            let error = &error as &dyn Error;
            tracing::warn!(name = self.name(), error, "cannot update the record");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// The steps in effect, and their record.
    #[derive(Debug, Default)]
    struct Fake {
        steps: Vec<u32>,
        kept: Vec<u32>,
        there: Vec<u32>,
        /// Counts down to the call that fails.
        fails_in: Option<usize>,
    }

    impl Fake {
        fn call(&mut self) -> Result<(), std::fmt::Error> {
            let now = self.fails_in == Some(0);
            self.fails_in = self.fails_in.and_then(|calls| calls.checked_sub(1));
            if now { Err(std::fmt::Error) } else { Ok(()) }
        }

        fn make(&mut self, done: bool) -> Result<(), std::fmt::Error> {
            for step in 1..=3 {
                let made = self.call();
                let mut there = Vec::new();
                let outcome = self.step(step, || match made {
                    Ok(()) => {
                        there.push(step);
                        Outcome::Done(())
                    }
                    Err(error) if done => {
                        there.push(step);
                        Outcome::Unknown(error)
                    }
                    Err(error) => Outcome::NotDone(error),
                });
                self.there.extend(there);
                outcome?;
            }
            Ok(())
        }
    }

    impl Journal for Fake {
        type Step = u32;
        type Error = std::fmt::Error;

        fn name(&self) -> &str {
            "fake"
        }

        fn steps(&mut self) -> &mut Vec<u32> {
            &mut self.steps
        }

        fn persist(&mut self) -> Result<(), std::fmt::Error> {
            self.call()?;
            self.kept = self.steps.clone();
            Ok(())
        }

        fn undo(&mut self, step: &u32) -> Result<(), std::fmt::Error> {
            self.call()?;
            self.there.retain(|one| one != step);
            Ok(())
        }

        fn keeps_those_before(step: &u32) -> bool {
            *step == 2
        }

        fn watch(&mut self, event: StepEvent, step: &u32) -> Result<(), std::fmt::Error> {
            if matches!(event, StepEvent::Undo | StepEvent::Undone) {
                return Ok(());
            }
            assert!(self.kept.contains(step), "{event:?} before it is kept");
            self.call()
        }
    }

    #[test]
    fn a_failure_at_each_call_leaves_nothing() {
        for done in [false, true] {
            for at in 0.. {
                let mut fake = Fake {
                    fails_in: Some(at),
                    ..Fake::default()
                };
                let made = fake.make(done);
                if made.is_ok() {
                    assert!(at >= 12, "{at}");
                    break;
                }
                assert!(fake.roll_back().is_empty());
                assert_eq!((fake.there.len(), fake.steps.len()), (0, 0), "{at}");
                assert!(fake.kept.is_empty(), "{at}");
            }
        }
    }

    #[test]
    fn a_step_that_cannot_be_undone_stays_in_the_record_with_those_below_it() {
        for (at, left, there) in [
            // The undoing of each step, then its record.
            (0, vec![(3, true)], vec![3]),
            (2, vec![(2, true), (1, false)], vec![1, 2]),
            (4, vec![(1, true)], vec![1]),
        ] {
            let mut fake = Fake::default();
            fake.make(false).unwrap();
            fake.fails_in = Some(at);
            let not_undone = fake.roll_back();
            let shown = not_undone.iter().map(|(step, why)| (*step, why.is_some()));
            assert_eq!(shown.collect::<Vec<_>>(), left);
            assert_eq!((&fake.there, &fake.kept), (&there, &there));
            // At the next attempt.
            assert!(fake.roll_back().is_empty());
            assert!(fake.there.is_empty() && fake.kept.is_empty());
        }
    }

    #[test]
    fn a_step_that_is_in_the_record_is_done_again() {
        let mut fake = Fake::default();
        fake.make(false).unwrap();
        fake.make(false).unwrap();
        assert_eq!(fake.steps, [1, 2, 3]);
    }
}
