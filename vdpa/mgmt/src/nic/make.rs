//! Creating and removing a NIC: the phases in order.

use super::connect::Subject;
use super::error::{MakeError, NicError, RemoveError};
use super::making::Making;
use super::nics::{Nics, VHOST_DRIVER};
use super::observer::Observer;
use super::origin::Plan;
use super::phase::Phase;
use super::record::{MadeNic, State, check_owner};
use super::request::NicRequest;
use super::server;
use crate::bus::Bus;
use crate::error::existing;

impl Nics {
    /// Creates a NIC: everything from the source in `request` to a vDPA device behind
    /// `/dev/vhost-vdpa-N`. `others` are the existing NICs. If virtual functions were created for
    /// one of them, the last NIC removes them.
    ///
    /// # Errors
    /// [`MakeError`], with the failed phase. All other steps were undone, except those it lists.
    pub fn make(
        &self,
        request: &NicRequest,
        others: &[MadeNic],
        observer: &mut dyn Observer,
    ) -> Result<MadeNic, MakeError> {
        let mut nic = MadeNic::new(&request.name, &request.from, request.owner.as_deref());
        nic.identify();
        let mut making = Making::new(self, nic, others, observer);
        making
            .run(request)
            .map_err(|error| making.roll_back_after(error))
    }

    /// Checks that the host has the NIC, of this kind, and the bridge that `request` names. Does
    /// not search for a free function.
    ///
    /// # Errors
    /// [`NicError`] for the missing object.
    pub fn check_source(&self, request: &NicRequest) -> Result<(), NicError> {
        self.plan(self.find(&request.from)?, &request.from, request.kind)?;
        let wanted = request.connectivity.as_ref();
        wanted.map_or(Ok(()), |wanted| self.check_connectivity(wanted))
    }

    /// Removes a NIC: undoes its steps, the last one first. Settings that others have changed since
    /// stay, and the observer is notified.
    ///
    /// # Errors
    /// [`RemoveError::InUse`] or [`RemoveError::NotForGuests`] before anything is changed;
    /// [`RemoveError::Incomplete`] with the steps that could not be undone: they are still in the
    /// record.
    pub fn remove(&self, nic: &MadeNic, observer: &mut dyn Observer) -> Result<(), RemoveError> {
        if nic.is_software() {
            // The kernel would wait for a stopped process as soon as the device is opened. An error
            // is reported when the process is ended.
            let _ = server::resume(nic.name());
        }
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
            // An unfinished NIC is not in use yet.
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
            Plan::Software => self.software(request)?,
            Plan::Subfunction { handle, pfnum } => {
                let port = self.subfunction(request, &handle, pfnum)?;
                self.connect(request.connectivity.as_ref(), &Subject::Port(port))?;
            }
        }
        self.finish()
    }
}

impl Nics {
    /// Checks whether the NIC can be created, as far as that is known before any change.
    pub(super) fn check(&self, request: &NicRequest, others: &[MadeNic]) -> Result<Plan, NicError> {
        // Reject values that are impossible on any management device.
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
        if request.port.is_some() && !matches!(plan, Plan::Software) {
            let (from, what) = (request.from.clone(), "queue of a port");
            return Err(NicError::NoSettings { from, what });
        }
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
            Plan::Software => self.check_software(request)?,
            Plan::VirtualFunction(physical) => self.check_virtual_function(request, physical)?,
            Plan::Subfunction { handle, .. } => self.check_subfunction(request, handle)?,
        }
        if let Some(wanted) = &request.connectivity {
            self.check_connectivity(wanted)?;
        }
        Ok(plan)
    }
}
