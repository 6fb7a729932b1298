//! The NICs of this machine, and the kernel connections for them.

use std::path::PathBuf;
use std::time::Duration;

use super::error::NicError;
use super::record::MadeNic;
use crate::Connection;
use crate::bus::Bus;
use crate::pci::Pci;

/// Default maximum time for each of the kernel's own operations. Functions of real NICs take
/// seconds to start.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(30);

/// The bus driver for devices of guests.
pub(super) const VHOST_DRIVER: &str = "vhost_vdpa";

/// The machine's NICs, on which vDPA devices are created.
#[derive(Debug)]
pub struct Nics {
    pub(super) connection: Connection,
    pub(super) pci: Pci,
    pub(super) bus: Bus,
    pub(super) patience: Duration,
}

impl Nics {
    /// Connects to the kernel; waits for each of its own operations up to [`DEFAULT_PATIENCE`].
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn open() -> Result<Self, NicError> {
        Self::with_patience(DEFAULT_PATIENCE)
    }

    /// Connects to the kernel; waits for each of its own operations up to `patience`.
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn with_patience(patience: Duration) -> Result<Self, NicError> {
        Ok(Self {
            connection: Connection::open()?,
            pci: Pci::default(),
            bus: Bus::default(),
            patience,
        })
    }

    /// The NIC's current `/dev/vhost-vdpa-N`; it changes when the device is rebound.
    ///
    /// # Errors
    /// [`NicError::Mgmt`]; [`NicError::NoCharacterDevice`] while another bus driver has it.
    pub fn character_device(&self, nic: &MadeNic) -> Result<PathBuf, NicError> {
        let device = self.bus.device(nic.name())?;
        device
            .path()
            .ok_or_else(|| NicError::NoCharacterDevice(nic.name().to_owned()))
    }
}
