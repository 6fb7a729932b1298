//! A journal of steps: what is begun is in a safe place before it is done, so that a failure, a signal or another
//! process after a crash can undo it.
//!
//! ```text
//!   step: into the record ──> record kept ──> done ──> next step
//!             │ certainly not done: out of the record    │ fails
//!             └──────────────────────────────────────────┴──> roll back: the last step first,
//!                                                             each out of the record once it is undone
//! ```
//! A record never holds less than there is. It may hold more: so undoing looks first, and undoing a step that was not
//! done, or is undone already, changes nothing. Owns the order of record, step and undoing. Must not know what a step
//! does, nor where a record is.

use std::error::Error;
use std::fmt;

/// How a step came out.
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
    /// What failed may have been done.
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(done) => Self::Done(done),
            Err(error) => Self::Unknown(error),
        }
    }
}

/// How far a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// It is in the record and not done.
    Begin,
    /// It is done.
    Done,
    /// It is about to be undone.
    Undo,
    /// It is undone and still in the record.
    Undone,
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "do",
            Self::Done => "done",
            Self::Undo => "undo",
            Self::Undone => "undone",
        })
    }
}

/// Steps that could not be undone, the last one first. Without an error it was not tried, because a later one must be
/// undone first.
pub type NotUndone<J> = Vec<(<J as Journal>::Step, Option<<J as Journal>::Error>)>;

/// Steps that are done and undone, and the record of them.
pub trait Journal {
    /// A step, with what is needed to undo it.
    type Step: Clone + PartialEq;
    /// Why a step is not done, or not undone.
    type Error: Error + 'static;

    /// Whose steps these are, for the log.
    fn name(&self) -> &str;

    /// The steps that were begun, in the order in which they depend on each other.
    fn steps(&mut self) -> &mut Vec<Self::Step>;

    /// Where a new step belongs among them.
    fn place(&mut self, _step: &Self::Step) -> usize {
        self.steps().len()
    }

    /// Keeps the record. It is in a safe place when this returns.
    ///
    /// # Errors
    /// Nothing more is done then.
    fn persist(&mut self) -> Result<(), Self::Error>;

    /// Undoes a step, as far as it is still as it was made.
    ///
    /// # Errors
    /// It stays in the record.
    fn undo(&mut self, step: &Self::Step) -> Result<(), Self::Error>;

    /// Whether a step that cannot be undone keeps those before it.
    fn keeps_those_before(_step: &Self::Step) -> bool {
        false
    }

    /// A step has come so far.
    ///
    /// # Errors
    /// It is to come no further.
    fn watch(&mut self, _moment: Moment, _step: &Self::Step) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Does a step. One that is in the record already is done again.
    ///
    /// # Errors
    /// Those of the work and of the record. What may have been done is in the record.
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
        self.watch(Moment::Begin, &step)?;
        match work() {
            Outcome::Done(done) => self.watch(Moment::Done, &step).map(|()| done),
            Outcome::Unknown(error) => Err(error),
            Outcome::NotDone(error) => {
                self.steps().retain(|one| *one != step);
                self.note();
                Err(error)
            }
        }
    }

    /// Undoes the step at this place, and takes it out of the record.
    ///
    /// # Errors
    /// Those of undoing; it stays in the record.
    fn undo_at(&mut self, place: usize) -> Result<(), Self::Error> {
        let Some(step) = self.steps().get(place).cloned() else {
            return Ok(());
        };
        self.watch(Moment::Undo, &step)?;
        self.undo(&step)?;
        self.watch(Moment::Undone, &step)?;
        self.steps().remove(place);
        self.note();
        Ok(())
    }

    /// Undoes all steps. What it returns is still in the record.
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

    /// Keeps the record after a step went out of it. An old record does no harm: undoing what is undone changes
    /// nothing.
    fn note(&mut self) {
        if let Err(error) = self.persist() {
            let error = &error as &dyn Error;
            tracing::warn!(name = self.name(), error, "the record is not up to date");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// What there is, and the record of it.
    #[derive(Debug, Default)]
    struct Fake {
        steps: Vec<u32>,
        kept: Vec<u32>,
        there: Vec<u32>,
        /// The call that fails, counted down.
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

        fn watch(&mut self, moment: Moment, step: &u32) -> Result<(), std::fmt::Error> {
            if matches!(moment, Moment::Undo | Moment::Undone) {
                return Ok(());
            }
            assert!(self.kept.contains(step), "{moment:?} before it is kept");
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
    fn what_cannot_be_undone_stays_in_the_record_and_keeps_what_is_below_it() {
        for (at, left, there) in [
            // The undoing of each step, and its record, one after the other.
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
            // The next time.
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
