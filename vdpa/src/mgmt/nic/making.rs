//! A NIC that is being made: phases in order, steps in the record before they are done, and the way back.
//!
//! ```text
//!   phase: interrupted? ──> step into the record ──> record kept ──> done ──> next phase
//!                │                                      │            │ refused: out of the record
//!                └──────────────────────────────────────┴────────────┴──> roll back
//! ```

use std::io;

use super::connect::Subject;
use super::error::{MakeError, NicError};
use super::observer::{Activity, Moment, Observer, Phase, Progress};
use super::origin::Plan;
use super::record::{MadeNic, State, check_owner};
use super::request::NicRequest;
use super::step::Step;
use super::{Nics, VHOST_DRIVER, undo, wait};
use crate::mgmt::MgmtError;
use crate::mgmt::bus::BusError;
use crate::mgmt::connectivity::{Connectivity, ConnectivityError, Place};
use crate::mgmt::link::Links;

/// A phase that failed, and why.
#[derive(Debug)]
pub(super) struct Failure {
    phase: Phase,
    source: Box<NicError>,
}

impl Failure {
    /// For what fails in a phase.
    pub(super) fn of<E: Into<NicError>>(phase: Phase) -> impl Fn(E) -> Self {
        move |error| Self {
            phase,
            source: Box::new(error.into()),
        }
    }

    /// Why.
    pub(super) fn source(&self) -> &NicError {
        &self.source
    }
}

/// How a step came out.
pub(super) enum Outcome<T> {
    Done(T),
    /// It was certainly not done, so there is nothing to undo.
    NotDone(NicError),
    /// It may have been done.
    Unknown(NicError),
}

/// A NIC that is being made.
pub(super) struct Making<'a> {
    pub(super) nics: &'a Nics,
    pub(super) others: &'a [MadeNic],
    nic: MadeNic,
    observer: &'a mut dyn Observer,
}

impl<'a> Making<'a> {
    pub(super) fn new(
        nics: &'a Nics,
        request: &NicRequest,
        others: &'a [MadeNic],
        observer: &'a mut dyn Observer,
    ) -> Self {
        Self {
            nics,
            others,
            nic: MadeNic::new(&request.name, &request.from, request.owner.as_deref()),
            observer,
        }
    }

    /// All phases.
    pub(super) fn run(&mut self, request: &NicRequest) -> Result<(), Failure> {
        let plan = self.phase(Phase::Check, &request.from, |making| making.check(request))?;
        match plan {
            Plan::MgmtDevice(mgmtdev) => {
                self.add_device_with_address(request, &mgmtdev, false)?;
            }
            Plan::VirtualFunction(physical) => {
                let function = self.virtual_function(request, *physical)?;
                let subject = Subject::VirtualFunction(function);
                self.connect(request.connectivity.as_ref(), &subject)?;
            }
            Plan::Subfunction { handle, pfnum } => {
                let port = self.subfunction(request, &handle, pfnum)?;
                self.connect(request.connectivity.as_ref(), &Subject::Port(port))?;
            }
        }
        self.nic.set_state(State::Made);
        self.keep().map_err(Failure::of(Phase::Connect))
    }

    /// Whether it can be done, as far as that can be known before anything is touched.
    fn check(&self, request: &NicRequest) -> Result<Plan, NicError> {
        let nics = self.nics;
        // Values that no device can have, whatever it is made on.
        if let Ok(any) = "any".parse() {
            request.device(any)?;
        }
        if let Some(owner) = &request.owner {
            check_owner(owner)?;
        }
        if self.others.iter().any(|nic| nic.name() == request.name) {
            return Err(NicError::RecordTaken(request.name.clone()));
        }
        match nics.connection.device(&request.name) {
            Err(MgmtError::NoDevice { .. }) => {}
            Ok(_) => return Err(NicError::NameTaken(request.name.clone())),
            Err(error) => return Err(error.into()),
        }
        if !nics.bus.has_driver(VHOST_DRIVER) {
            return Err(BusError::NoDriver(VHOST_DRIVER.to_owned()).into());
        }
        let plan = nics.plan(nics.find(&request.from)?, &request.from, request.kind)?;
        match &plan {
            Plan::MgmtDevice(name) => {
                let settings = [
                    (request.connectivity.is_some(), "connection"),
                    (request.rates.is_some(), "rates"),
                    (request.virtual_functions.is_some(), "virtual functions"),
                ];
                if let Some(&(_, what)) = settings.iter().find(|one| one.0) {
                    let from = request.from.clone();
                    return Err(NicError::NoSettings { from, what });
                }
                nics.check_network(name)?;
            }
            Plan::VirtualFunction(physical) => nics.check_virtual_function(request, physical)?,
            Plan::Subfunction { handle, .. } => nics.check_subfunction(request, handle)?,
        }
        if let Some(wanted) = &request.connectivity {
            nics.check_connectivity(wanted)?;
        }
        Ok(plan)
    }

    /// A phase without a step.
    pub(super) fn phase<T>(
        &mut self,
        phase: Phase,
        what: &str,
        act: impl FnOnce(&mut Self) -> Result<T, NicError>,
    ) -> Result<T, Failure> {
        self.begin(phase, what)
            .and_then(|()| act(self))
            .and_then(|done| {
                self.fault(Moment::After(phase))?;
                Ok(done)
            })
            .map_err(Failure::of(phase))
    }

    /// A phase that is a step.
    pub(super) fn step<T>(
        &mut self,
        phase: Phase,
        what: &str,
        step: Step,
        act: impl FnOnce(&Nics) -> Outcome<T>,
    ) -> Result<T, Failure> {
        let failure = Failure::of(phase);
        self.nic.push(step);
        self.keep()
            .and_then(|()| self.begin(phase, what))
            .map_err(&failure)?;
        let done = match act(self.nics) {
            Outcome::Done(done) => done,
            Outcome::NotDone(source) => {
                self.nic.pop();
                return Err(failure(source));
            }
            Outcome::Unknown(source) => return Err(failure(source)),
        };
        self.fault(Moment::After(phase)).map_err(failure)?;
        Ok(done)
    }

    /// A step that another NIC's making did, and that is this one's to undo as well.
    pub(super) fn share(&mut self, step: Step) -> Result<(), NicError> {
        self.nic.push(step);
        self.keep()
    }

    /// Says more about the step that was done last.
    pub(super) fn replace_last(&mut self, step: Step) -> Result<(), NicError> {
        self.nic.pop();
        self.share(step)
    }

    /// Connects at a place: a step whose record grows while it is done.
    pub(super) fn connect_at(
        &mut self,
        wanted: &Connectivity,
        links: &Links,
        place: &Place,
    ) -> Result<(), Failure> {
        let phase = Phase::Connect;
        let what = match place {
            Place::Link(link) => link.name.clone(),
            Place::VirtualFunction { physical, number } => {
                format!("virtual function {number} of {physical}")
            }
        };
        self.begin(phase, &what).map_err(Failure::of(phase))?;
        let Self { nic, observer, .. } = self;
        let is_begun = |nic: &MadeNic| matches!(nic.last(), Some(Step::Connect { .. }));
        let attached = wanted.attach_noting(links, place, &mut |attached| {
            if is_begun(nic) {
                nic.pop();
            }
            nic.push(Step::Connect {
                attached: attached.clone(),
            });
            observer.keep(nic)
        });
        if let Err(error) = attached {
            // All others have undone it themselves.
            if !matches!(error, ConnectivityError::NotTakenBack { .. }) && is_begun(&self.nic) {
                self.nic.pop();
            }
            return Err(Failure::of(phase)(error));
        }
        self.fault(Moment::After(phase)).map_err(Failure::of(phase))
    }

    /// Waits for something that the kernel does.
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

    fn begin(&mut self, phase: Phase, what: &str) -> Result<(), NicError> {
        let activity = Activity::Begin(phase, what);
        let name = self.nic.name();
        self.observer.progress(&Progress { name, activity });
        if self.observer.interrupted() {
            return Err(NicError::Interrupted);
        }
        self.fault(Moment::Before(phase))
    }

    fn fault(&mut self, moment: Moment) -> Result<(), NicError> {
        self.observer.fault(moment).map_err(NicError::Fault)
    }

    fn keep(&mut self) -> Result<(), NicError> {
        let kept: io::Result<()> = self.observer.keep(&self.nic);
        kept.map_err(NicError::Record)
    }

    pub(super) fn last_step(&self) -> Option<&Step> {
        self.nic.last()
    }

    pub(super) fn into_nic(self) -> MadeNic {
        self.nic
    }

    /// Undoes what was done.
    pub(super) fn roll_back(mut self, failure: Failure) -> MakeError {
        self.nic.set_state(State::Removing);
        let not_undone = undo::all(self.nics, &mut self.nic, self.observer);
        MakeError {
            name: self.nic.name().to_owned(),
            phase: failure.phase,
            source: failure.source,
            not_undone,
        }
    }
}
