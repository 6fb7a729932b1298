//! The device's typestate, held in one place that can change.
//!
//! [`Device`] moves from type to type; a backend lives in one variable. `Link`
//! is the sum of the states, and each method says from which state it works.
//! It must not know why a transition is wanted.
//!
//! ```text
//!             negotiate            start            suspend
//!   Owned ------------> Negotiated -----> Running <---------> Suspended
//!     ^                     |                |     resume         |
//!     +-------- reset ------+----------------+--------------------+
//!     |
//!     +--> Lost: a reset failed, nothing is known of the device any more
//! ```

use vdpa::device::{Device, DeviceError, Failed, Negotiated, Owned, Running, Suspended};
use vdpa::relay::Halted;
use vdpa::uapi::BackendFeatures;
use vmm_sys_util::eventfd::EventFd;

/// A vhost-vdpa device in whatever state it is.
#[derive(Debug)]
pub(super) enum Link {
    Owned(Device<Owned>),
    Negotiated(Device<Negotiated>),
    Running(Device<Running>),
    Suspended(Device<Suspended>),
    Lost,
}

/// Calls a method that every state has.
macro_rules! in_any_state {
    ($link:expr, $device:ident => $call:expr) => {
        match $link {
            Link::Owned($device) => $call,
            Link::Negotiated($device) => $call,
            Link::Running($device) => $call,
            Link::Suspended($device) => $call,
            Link::Lost => Err(lost()),
        }
    };
}

fn lost() -> DeviceError {
    wrong_state("be used: an earlier reset of it failed")
}

fn wrong_state(ability: &'static str) -> DeviceError {
    DeviceError::Unable { ability }
}

impl From<Halted> for Link {
    /// The device after a transition of its relays.
    fn from(halted: Halted) -> Self {
        match halted {
            Halted::Running(device) => Self::Running(device),
            Halted::Suspended(device) => Self::Suspended(device),
            Halted::Reset(device) => Self::Owned(device),
            Halted::Gone => Self::Lost,
        }
    }
}

impl Link {
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Lost)
    }

    /// Keeps what a failed transition gave back.
    fn keep<S>(&mut self, failed: Failed<S>, wrap: impl FnOnce(Device<S>) -> Self) -> DeviceError {
        let Failed { device, error } = failed;
        *self = device.map_or(Self::Lost, wrap);
        error
    }

    pub(super) fn read_config(&self, offset: u32, data: &mut [u8]) -> Result<(), DeviceError> {
        in_any_state!(self, device => device.read_config(offset, data))
    }

    pub(super) fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        in_any_state!(self, device => device.write_config(offset, data))
    }

    pub(super) fn set_config_call(&self, call: &EventFd) -> Result<(), DeviceError> {
        in_any_state!(self, device => device.set_config_call(Some(call)))
    }

    pub(super) fn status(&self) -> Result<u8, DeviceError> {
        in_any_state!(self, device => device.status())
    }

    pub(super) fn owned(&self) -> Result<&Device<Owned>, DeviceError> {
        match self {
            Self::Owned(device) => Ok(device),
            _ => Err(wrong_state("be prepared for a guest: it was not reset")),
        }
    }

    pub(super) fn is_negotiated(&self) -> bool {
        matches!(self, Self::Negotiated(_))
    }

    /// Whether the running device has all of these abilities.
    pub(super) fn can(&self, abilities: BackendFeatures) -> bool {
        matches!(self, Self::Running(device) if device.backend_features().contains(abilities))
    }

    pub(super) fn negotiated(&mut self) -> Result<&mut Device<Negotiated>, DeviceError> {
        match self {
            Self::Negotiated(device) => Ok(device),
            _ => Err(wrong_state("be set up: its features are not negotiated")),
        }
    }

    pub(super) fn running(&mut self) -> Result<&mut Device<Running>, DeviceError> {
        match self {
            Self::Running(device) => Ok(device),
            _ => Err(wrong_state("be changed: it does not run")),
        }
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self, Self::Running(_))
    }

    /// Gives the running device away; until it is put back, `Lost` is in its place.
    pub(super) fn take_running(&mut self) -> Result<Device<Running>, DeviceError> {
        match self.take() {
            Self::Running(device) => Ok(device),
            other => {
                *self = other;
                Err(wrong_state("be changed: it does not run"))
            }
        }
    }

    /// As [`Link::take_running`] for a device that is reset.
    pub(super) fn take_owned(&mut self) -> Result<Device<Owned>, DeviceError> {
        match self.take() {
            Self::Owned(device) => Ok(device),
            other => {
                *self = other;
                Err(wrong_state("be brought up: it was not reset"))
            }
        }
    }

    /// As [`Link::take_running`] for a device whose features are negotiated.
    pub(super) fn take_negotiated(&mut self) -> Result<Device<Negotiated>, DeviceError> {
        match self.take() {
            Self::Negotiated(device) => Ok(device),
            other => {
                *self = other;
                Err(wrong_state("start: its features are not negotiated"))
            }
        }
    }

    pub(super) fn suspended(&mut self) -> Result<&mut Device<Suspended>, DeviceError> {
        match self {
            Self::Suspended(device) => Ok(device),
            _ => Err(wrong_state("show or change its rings: it is not suspended")),
        }
    }

    pub(super) fn negotiate(&mut self, features: u64) -> Result<(), DeviceError> {
        match self.take() {
            Self::Owned(device) => match device.negotiate(features) {
                Ok(device) => {
                    *self = Self::Negotiated(device);
                    Ok(())
                }
                Err(failed) => Err(self.keep(failed, Self::Owned)),
            },
            other => {
                *self = other;
                Err(wrong_state("negotiate features: it was not reset"))
            }
        }
    }

    pub(super) fn start(&mut self) -> Result<(), DeviceError> {
        match self.take() {
            Self::Negotiated(device) => match device.start() {
                Ok(device) => {
                    *self = Self::Running(device);
                    Ok(())
                }
                Err(failed) => Err(self.keep(failed, Self::Owned)),
            },
            other => {
                *self = other;
                Err(wrong_state("start: its features are not negotiated"))
            }
        }
    }

    pub(super) fn suspend(&mut self) -> Result<(), DeviceError> {
        match self.take() {
            Self::Running(device) => match device.suspend() {
                Ok(device) => {
                    *self = Self::Suspended(device);
                    Ok(())
                }
                Err(failed) => Err(self.keep(failed, Self::Running)),
            },
            other => {
                *self = other;
                Err(wrong_state("be suspended: it does not run"))
            }
        }
    }

    pub(super) fn resume(&mut self) -> Result<(), DeviceError> {
        match self.take() {
            Self::Suspended(device) => match device.resume() {
                Ok(device) => {
                    *self = Self::Running(device);
                    Ok(())
                }
                Err(failed) => Err(self.keep(failed, Self::Suspended)),
            },
            other => {
                *self = other;
                Err(wrong_state("be resumed: it is not suspended"))
            }
        }
    }

    pub(super) fn reset(&mut self) -> Result<(), DeviceError> {
        let reset = match self.take() {
            Self::Owned(device) => device.reset(),
            Self::Negotiated(device) => device.reset(),
            Self::Running(device) => device.reset(),
            Self::Suspended(device) => device.reset(),
            Self::Lost => return Err(lost()),
        };
        match reset {
            Ok(device) => {
                *self = Self::Owned(device);
                Ok(())
            }
            Err(failed) => Err(self.keep(failed, Self::Owned)),
        }
    }
}
