//! Creates or removes a NIC: phases in order, each step in the journal before it is done, and the
//! roll-back.

use super::error::{MakeError, NicError, NotUndone};
use super::nics::Nics;
use super::observer::{Activity, Observer, Progress};
use super::phase::Phase;
use super::record::{MadeNic, State};
use super::step::Step;
use super::wait;
use crate::connectivity::{Connectivity, Place};
use crate::journal::{Journal, Outcome, StepEvent};
use crate::link::Links;

/// A NIC that is being created or removed.
pub(super) struct Making<'a> {
    pub(super) nics: &'a Nics,
    pub(super) others: &'a [MadeNic],
    /// The current phase, to which errors belong.
    pub(super) phase: Phase,
    nic: MadeNic,
    observer: &'a mut dyn Observer,
}

impl<'a> Making<'a> {
    pub(super) fn new(
        nics: &'a Nics,
        nic: MadeNic,
        others: &'a [MadeNic],
        observer: &'a mut dyn Observer,
    ) -> Self {
        Self {
            nics,
            others,
            phase: Phase::Check,
            nic,
            observer,
        }
    }

    /// A phase without a step.
    pub(super) fn phase<T>(
        &mut self,
        phase: Phase,
        what: &str,
        act: impl FnOnce(&mut Self) -> Result<T, NicError>,
    ) -> Result<T, NicError> {
        self.tell(Activity::Begin(phase, what))?;
        let done = act(self)?;
        self.tell(Activity::End(phase))?;
        Ok(done)
    }

    /// A phase that is a step.
    pub(super) fn step<T>(
        &mut self,
        step: Step,
        act: impl FnOnce(&Nics) -> Outcome<T, NicError>,
    ) -> Result<T, NicError> {
        let nics = self.nics;
        self.phase = step.phase().0;
        Journal::step(self, step, || act(nics))
    }

    /// Replaces the last step by one with more data.
    pub(super) fn replace_last(&mut self, step: Step) -> Result<(), NicError> {
        self.steps().pop();
        self.steps().push(step);
        self.persist()
    }

    /// Connects at a place: a step whose record grows while it is done.
    pub(super) fn connect_at(
        &mut self,
        wanted: &Connectivity,
        links: &Links,
        place: &Place,
    ) -> Result<(), NicError> {
        let what = match place {
            Place::Link(link) => link.name.clone(),
            Place::VirtualFunction { physical, number } => {
                format!("virtual function {number} of {physical}")
            }
        };
        self.phase(Phase::Connect, &what, |making| {
            let Self { nic, observer, .. } = making;
            wanted.attach_noting(links, place, &mut |attached| {
                nic.set_connection(attached);
                observer.keep(nic)
            })?;
            Ok(())
        })
    }

    /// Notes the index of the connected tap. [`Self::finish`] stores it.
    pub(super) fn set_tap_index(&mut self, index: u32) {
        self.nic.set_tap_index(Some(index));
    }

    /// Waits for the kernel's own work.
    pub(super) fn wait<T>(
        &mut self,
        what: &str,
        look: impl FnMut() -> Result<Option<T>, NicError>,
    ) -> Result<T, NicError> {
        let (name, observer) = (
            self.nic.name(),
            std::cell::RefCell::new(&mut *self.observer),
        );
        wait::until(
            what,
            self.nics.patience,
            || observer.borrow_mut().interrupted(),
            || {
                let activity = Activity::Wait(what);
                observer.borrow_mut().progress(&Progress { name, activity });
            },
            look,
        )
    }

    fn say(&mut self, activity: Activity<'_>) {
        if let Activity::Begin(phase, _) = activity {
            self.phase = phase;
        }
        let name = self.nic.name();
        self.observer.progress(&Progress { name, activity });
    }

    /// Reports the phase, and fails if the observer interrupts.
    fn tell(&mut self, activity: Activity<'_>) -> Result<(), NicError> {
        self.say(activity);
        if self.observer.interrupted() {
            Err(NicError::Interrupted)
        } else {
            Ok(())
        }
    }

    pub(super) fn last_step(&self) -> Option<&Step> {
        self.nic.steps().last()
    }

    /// Records that all steps are done.
    pub(super) fn finish(&mut self) -> Result<MadeNic, NicError> {
        self.nic.set_state(State::Made);
        self.phase = Phase::Connect;
        self.persist()?;
        Ok(self.nic.clone())
    }

    /// Undoes the steps before this error.
    pub(super) fn roll_back_after(mut self, error: NicError) -> MakeError {
        MakeError {
            not_undone: self.remove(),
            name: self.nic.name().to_owned(),
            phase: self.phase,
            source: Box::new(error),
        }
    }

    /// Undoes all steps. Those that could not be undone stay in the record.
    pub(super) fn remove(&mut self) -> Vec<NotUndone> {
        self.nic.set_state(State::Removing);
        let not_undone = self.roll_back().into_iter();
        let not_undone = not_undone.map(|(step, error)| NotUndone {
            by_hand: step.by_hand(self.nic.name()),
            step,
            error,
        });
        not_undone.collect()
    }
}

impl Journal for Making<'_> {
    type Step = Step;
    type Error = NicError;

    fn name(&self) -> &str {
        self.nic.name()
    }

    fn steps(&mut self) -> &mut Vec<Step> {
        self.nic.steps_mut()
    }

    fn persist(&mut self) -> Result<(), NicError> {
        self.observer.keep(&self.nic).map_err(NicError::Record)
    }

    fn watch(&mut self, event: StepEvent, step: &Step) -> Result<(), NicError> {
        let (phase, what) = step.phase();
        match event {
            StepEvent::Begin => self.tell(Activity::Begin(phase, &what)),
            StepEvent::Done => self.tell(Activity::End(phase)),
            StepEvent::Undo => {
                self.say(Activity::Undo(&step.to_string()));
                Ok(())
            }
            StepEvent::Undone => Ok(()),
        }
    }

    fn undo(&mut self, step: &Step) -> Result<(), NicError> {
        if let Some(why) = self.nics.undo(self.nic.name(), step)? {
            self.say(Activity::Leave(&why));
        }
        Ok(())
    }

    fn keeps_those_before(step: &Step) -> bool {
        // A device that cannot be deleted keeps the steps before it, and so does a subfunction that
        // is still active.
        matches!(step, Step::AddDevice { .. } | Step::ActivatePort { .. })
    }
}
