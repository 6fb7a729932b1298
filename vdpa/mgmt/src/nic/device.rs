//! Adds a vDPA device to a management device, up to `/dev/vhost-vdpa-N`.

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use super::error::NicError;
use super::making::Making;
use super::nics::{Nics, VHOST_DRIVER};
use super::phase::Phase;
use super::request::NicRequest;
use super::step::Step;
use crate::journal::Outcome;
use crate::{ErrorKind, MgmtDeviceName, NewDevice, connection};

impl Nics {
    /// Fails for a management device that does not support network devices.
    pub(super) fn check_network(&self, name: &MgmtDeviceName) -> Result<(), NicError> {
        let mgmtdev = self.connection.mgmt_device(name)?;
        if mgmtdev.supports(VIRTIO_ID_NET) {
            Ok(())
        } else {
            Err(NicError::NotNetwork(name.to_string()))
        }
    }

    /// Whether there is such a management device.
    pub(super) fn has_mgmt_device(&self, name: &MgmtDeviceName) -> Result<bool, NicError> {
        match self.connection.mgmt_device(name) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NoMgmtDevice => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl Making<'_> {
    /// Waits for a management device, which its driver creates by itself.
    pub(super) fn await_mgmt_device(&mut self, name: &MgmtDeviceName) -> Result<(), NicError> {
        let what = name.to_string();
        self.phase(Phase::AwaitMgmtDevice, &what, |making| {
            let nics = making.nics;
            making.wait(&format!("the management device {what}"), || {
                Ok(nics.has_mgmt_device(name)?.then_some(()))
            })?;
            nics.check_network(name)
        })
    }

    /// Adds the requested device, and waits for its character device. If the function `has_address`
    /// already and the management device refuses one, the device is added without it.
    pub(super) fn add_device_with_address(
        &mut self,
        request: &NicRequest,
        mgmtdev: &MgmtDeviceName,
        has_address: bool,
    ) -> Result<(), NicError> {
        self.phase = Phase::AddDevice;
        let added = self.add(&request.device(mgmtdev.clone())?);
        match added {
            Err(error) if has_address && takes_no_mac(&error) => {
                let without = NicRequest {
                    mac: None,
                    ..request.clone()
                };
                self.add(&without.device(mgmtdev.clone())?)?;
            }
            added => added?,
        }
        self.await_character_device(&request.name)
    }

    fn add(&mut self, device: &NewDevice) -> Result<(), NicError> {
        let step = Step::AddDevice {
            mgmtdev: device.mgmtdev().clone(),
        };
        self.step(step, |nics| match nics.connection.add(device) {
            Ok(()) => Outcome::Done(()),
            Err(error) if error.kind() == (ErrorKind::NoAnswer { sent: true }) => {
                Outcome::Unknown(error.into())
            }
            Err(error) => Outcome::NotDone(error.into()),
        })
    }

    /// Waits for the character device. Another bus driver may have been first; the device is for
    /// guests, so it is rebound.
    fn await_character_device(&mut self, name: &str) -> Result<(), NicError> {
        self.phase(Phase::AwaitCharacterDevice, name, |making| {
            let nics = making.nics;
            if nics.bus.device(name)?.driver.as_deref() != Some(VHOST_DRIVER) {
                nics.bus.bind(name, VHOST_DRIVER)?;
            }
            making.wait(&format!("the character device of {name}"), || {
                let path = nics.bus.device(name)?.path();
                Ok(path.filter(|path| path.exists()))
            })?;
            Ok(())
        })
    }
}

/// Whether the only problem is that the management device refuses an address.
fn takes_no_mac(error: &NicError) -> bool {
    matches!(error, NicError::Mgmt(error) if connection::takes_no_mac(error))
}
