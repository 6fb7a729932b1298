//! The saved state of an event.

use serde::{Deserialize, Serialize};

use super::AcpiEvent;
use crate::Error;
use crate::saved::interrupt_failed;

/// A saved event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcpiEventState {
    /// The event happened and the guest has not acknowledged it.
    pub raised: bool,
}

impl AcpiEvent {
    /// Returns whether the event has happened.
    #[must_use]
    pub fn save(&self) -> AcpiEventState {
        AcpiEventState {
            raised: self.state.lock().raised,
        }
    }

    /// Restores a saved event. Sets its interrupt, so interrupt controllers must be restored first.
    ///
    /// # Errors
    /// The interrupt cannot be set.
    pub fn restore(&self, saved: &AcpiEventState) -> Result<(), Error> {
        self.try_set(&mut self.state.lock(), saved.raised)
            .map_err(|source| interrupt_failed(self.name, source))
    }
}
