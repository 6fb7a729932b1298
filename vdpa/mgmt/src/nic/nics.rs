//! The NICs of this machine, and the connections to the kernel that they need.

use std::path::PathBuf;
use std::time::Duration;

use super::error::NicError;
use super::record::MadeNic;
use crate::Connection;
use crate::bus::Bus;
use crate::pci::Pci;

/// How long each thing is waited for that the kernel does by itself, unless something else is asked
/// for. Functions of real NICs take seconds to start.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(30);

/// The bus driver through which guests have devices.
pub(super) const VHOST_DRIVER: &str = "vhost_vdpa";

/// The machine's NICs, to make vDPA devices on.
#[derive(Debug)]
pub struct Nics {
    pub(super) connection: Connection,
    pub(super) pci: Pci,
    pub(super) bus: Bus,
    pub(super) patience: Duration,
}

impl Nics {
    /// Connects to the kernel; what it does by itself is waited for [`DEFAULT_PATIENCE`].
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn open() -> Result<Self, NicError> {
        Self::with_patience(DEFAULT_PATIENCE)
    }

    /// Connects to the kernel; what it does by itself is waited for this long.
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

    /// The NIC's `/dev/vhost-vdpa-N` as it is now; it changes when the device is bound anew.
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
