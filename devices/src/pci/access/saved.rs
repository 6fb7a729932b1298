//! The saved state of the configuration ports.

use serde::{Deserialize, Serialize};

use super::{ADDRESS_MASK, ConfigPorts};
use crate::Error;
use crate::saved::ensure;

/// Saved configuration ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigPortsState {
    /// CONFIG_ADDRESS.
    pub address: u32,
}

impl ConfigPorts {
    /// Returns the address register.
    #[must_use]
    pub fn save(&self) -> ConfigPortsState {
        ConfigPortsState {
            address: self.address(),
        }
    }

    /// Restores a saved address register.
    ///
    /// # Errors
    /// Bits that cannot be set.
    pub fn restore(&self, state: &ConfigPortsState) -> Result<(), Error> {
        ensure(
            state.address & !ADDRESS_MASK == 0,
            "PCI configuration port",
            "address bits that cannot be set",
        )?;
        *self.address.lock() = state.address;
        Ok(())
    }
}
