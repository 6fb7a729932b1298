//! Bringing a device up again, under a driver that notices nothing: what a reset
//! took from it and is not in its rings.
//!
//! ```text
//!   reset -> memory mapped -> FEATURES_OK -> control queue -> (rings, DRIVER_OK) -> commands again
//! ```
//! It must not know why the device was reset, nor how its data queues are relayed.

use std::error::Error;

use vdpa::control_queue::Command;
use vdpa::device::{Device, Negotiated, Owned, Running};
use vdpa::iotlb::Iotlb;
use vdpa::relay::{Restart, RestartFailed};
use vmm_sys_util::eventfd::EventFd;

use super::control::{Control, Setup};
use super::{Negotiation, VdpaError};

/// What [`RelaySet::restart`](vdpa::relay::RelaySet::restart) needs of a backend.
pub(super) struct BringUp<'a> {
    pub(super) iotlb: &'a mut Iotlb,
    pub(super) control: Option<&'a mut Control>,
    pub(super) negotiation: Negotiation,
    /// The negotiated features without those that are the VMM's own.
    pub(super) device_features: u64,
    pub(super) config_changed: &'a EventFd,
    /// What the device is told when it runs again.
    pub(super) replay: Vec<Command>,
}

impl BringUp<'_> {
    fn prepare(&mut self, device: &mut Device<Negotiated>) -> Result<(), VdpaError> {
        device.set_config_call(Some(self.config_changed))?;
        if let (Some(control), Some(index)) =
            (self.control.as_deref_mut(), self.negotiation.control_queue)
        {
            control.start(Setup {
                device,
                iotlb: self.iotlb,
                index,
                ring: self.negotiation.ring(),
                limits: self.negotiation.limits,
            })?;
            device.enable_vring(index)?;
        }
        Ok(())
    }
}

impl Restart for BringUp<'_> {
    fn negotiate(&mut self, device: Device<Owned>) -> Result<Device<Negotiated>, RestartFailed> {
        if let Err(error) = self.iotlb.remap_after_reset() {
            return Err(RestartFailed {
                device: Some(device),
                source: Box::new(error),
            });
        }
        let mut device = device.negotiate(self.device_features)?;
        match self.prepare(&mut device) {
            Ok(()) => Ok(device),
            Err(error) => Err(RestartFailed {
                device: match device.reset() {
                    Ok(device) => Some(device),
                    Err(failed) => failed.device,
                },
                source: Box::new(error),
            }),
        }
    }

    fn replay(&mut self, _: &mut Device<Running>) -> Result<(), Box<dyn Error + Send + Sync>> {
        match self.control.as_deref_mut() {
            Some(control) => Ok(control.replay(&self.replay)?),
            None => Ok(()),
        }
    }
}
