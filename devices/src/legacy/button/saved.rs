//! The power button's saved state.

use serde::{Deserialize, Serialize};

use super::PowerButton;
use crate::saved::DeviceStateError;

/// A saved power button.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PowerButtonState {
    /// It was pressed and the guest has not taken note.
    pub pressed: bool,
}

impl PowerButton {
    /// Whether it is pressed.
    #[must_use]
    pub fn save(&self) -> PowerButtonState {
        PowerButtonState {
            pressed: self.state().pressed,
        }
    }

    /// Takes a saved button. Its interrupt follows, so interrupt controllers come first.
    ///
    /// # Errors
    /// [`DeviceStateError::Interrupt`].
    pub fn restore(&self, saved: &PowerButtonState) -> Result<(), DeviceStateError> {
        self.try_set(&mut self.state(), saved.pressed)
            .map_err(|source| DeviceStateError::Interrupt {
                device: "power button",
                source,
            })
    }
}
