//! Making and removing: the phases in their order.

use super::connect::Subject;
use super::error::{MakeError, NicError, RemoveError};
use super::making::Making;
use super::nics::{Nics, VHOST_DRIVER};
use super::observer::Observer;
use super::origin::Plan;
use super::phase::Phase;
use super::record::{MadeNic, State, check_owner};
use super::request::NicRequest;
use crate::bus::Bus;
use crate::error::existing;

impl Nics {
    /// Makes a NIC: everything from what `request` names to a vDPA device behind
    /// `/dev/vhost-vdpa-N`. `others` are the NICs that were made before and still are there, so that
    /// virtual functions that were counted for one of them go with the last one.
    ///
    /// # Errors
    /// [`MakeError`], with what failed and what could not be undone, after everything else was.
    pub fn make(
        &self,
        request: &NicRequest,
        others: &[MadeNic],
        observer: &mut dyn Observer,
    ) -> Result<MadeNic, MakeError> {
        let nic = MadeNic::new(&request.name, &request.from, request.owner.as_deref());
        let mut making = Making::new(self, nic, others, observer);
        making
            .run(request)
            .map_err(|error| making.roll_back_after(error))
    }

    /// Checks that the host has the NIC, of this kind, and the bridge that `request` names. Does
    /// not look for a free function.
    ///
    /// # Errors
    /// [`NicError`] with the one that is missing.
    pub fn check_source(&self, request: &NicRequest) -> Result<(), NicError> {
        self.plan(self.find(&request.from)?, &request.from, request.kind)?;
        let wanted = request.connectivity.as_ref();
        wanted.map_or(Ok(()), |wanted| self.check_connectivity(wanted))
    }

    /// Takes a NIC back: undoes its steps, the last one first. What others have changed since is
    /// left as it is, and said to the observer.
    ///
    /// # Errors
    /// [`RemoveError::InUse`] or [`RemoveError::NotForGuests`] before anything is touched;
    /// [`RemoveError::Incomplete`] with what could not be undone: it is still in the record.
    pub fn remove(&self, nic: &MadeNic, observer: &mut dyn Observer) -> Result<(), RemoveError> {
        self.check_removable(nic)?;
        let not_undone = Making::new(self, nic.clone(), &[], observer).remove();
        if not_undone.is_empty() {
            Ok(())
        } else {
            Err(RemoveError::Incomplete {
                name: nic.name().to_owned(),
                not_undone,
            })
        }
    }

    fn check_removable(&self, nic: &MadeNic) -> Result<(), RemoveError> {
        // Without a vDPA device of this NIC nothing can be in use.
        let Some(mgmtdev) = nic.mgmtdev() else {
            return Ok(());
        };
        let Ok(shown) = self.connection.device(nic.name()) else {
            return Ok(());
        };
        let Ok(device) = self.bus.device(nic.name()) else {
            return Ok(());
        };
        if shown.mgmtdev != *mgmtdev {
            return Ok(());
        }
        device.check_unused().map_err(RemoveError::InUse)?;
        match device.driver {
            // A NIC in the making is not in use yet.
            Some(driver) if driver != VHOST_DRIVER && nic.state() != State::Making => {
                Err(RemoveError::NotForGuests {
                    name: device.name,
                    driver,
                })
            }
            _ => Ok(()),
        }
    }
}

impl Making<'_> {
    /// All phases.
    fn run(&mut self, request: &NicRequest) -> Result<MadeNic, NicError> {
        let plan = self.phase(Phase::Check, &request.from, |making| {
            making.nics.check(request, making.others)
        })?;
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
        self.finish()
    }
}

impl Nics {
    /// Whether it can be done, as far as that can be known before anything is touched.
    pub(super) fn check(&self, request: &NicRequest, others: &[MadeNic]) -> Result<Plan, NicError> {
        // Values that no device can have, whatever it is made on.
        if let Ok(any) = "any".parse() {
            request.device(any)?;
        }
        if let Some(owner) = &request.owner {
            check_owner(owner)?;
        }
        if others.iter().any(|nic| nic.name() == request.name) {
            return Err(NicError::RecordTaken(request.name.clone()));
        }
        if existing(self.connection.device(&request.name))?.is_some() {
            return Err(NicError::NameTaken(request.name.clone()));
        }
        if !self.bus.has_driver(VHOST_DRIVER) {
            return Err(Bus::no_driver(VHOST_DRIVER).into());
        }
        let plan = self.plan(self.find(&request.from)?, &request.from, request.kind)?;
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
                self.check_network(name)?;
            }
            Plan::VirtualFunction(physical) => self.check_virtual_function(request, physical)?,
            Plan::Subfunction { handle, .. } => self.check_subfunction(request, handle)?,
        }
        if let Some(wanted) = &request.connectivity {
            self.check_connectivity(wanted)?;
        }
        Ok(plan)
    }
}
