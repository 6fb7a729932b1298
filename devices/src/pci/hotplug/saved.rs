//! The saved state of the hot-plug registers.

use serde::{Deserialize, Serialize};

use super::{PciHotplug, State, bit};
use crate::Error;
use crate::pci::Slot;
use crate::saved::{ensure, interrupt_failed};

const DEVICE: &str = "PCI hot-plug";

/// Saved hot-plug registers; bit *n* is slot *n*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciHotplugState {
    /// INSERTED.
    pub inserted: u32,
    /// REMOVAL.
    pub removal: u32,
    /// Slots that the guest may eject.
    pub ejectable: u32,
    /// Slots that it has ejected and that the machine has not taken yet
    /// ([`PciHotplug::take_ejected`]).
    pub ejected: u32,
}

impl PciHotplug {
    /// Returns the registers.
    #[must_use]
    pub fn save(&self) -> PciHotplugState {
        let state = self.state.lock();
        PciHotplugState {
            inserted: state.inserted,
            removal: state.removal,
            ejectable: state.ejectable,
            ejected: state.ejected,
        }
    }

    /// Restores saved registers. Sets the interrupt, so interrupt controllers must be restored
    /// first. So must the functions on the bus: a guest can eject only an existing function.
    ///
    /// # Errors
    /// A register names the host bridge, a removal that the guest may not follow, or a slot to
    /// eject that is empty or already ejected. Or the interrupt cannot be set.
    pub fn restore(&self, saved: &PciHotplugState) -> Result<(), Error> {
        let &PciHotplugState {
            inserted,
            removal,
            ejectable,
            ejected,
        } = saved;
        let bridge = bit(Slot::HOST_BRIDGE);
        ensure(
            (inserted | removal | ejectable | ejected) & bridge == 0,
            DEVICE,
            "the host bridge is inserted or removed",
        )?;
        ensure(
            removal & !ejectable == 0,
            DEVICE,
            "a removal request for a slot that the guest may not eject",
        )?;
        let there = self
            .bus
            .functions()
            .iter()
            .fold(0, |slots, (slot, _)| slots | bit(*slot));
        ensure(
            ejectable & !there == 0 && ejectable & ejected == 0,
            DEVICE,
            "the guest may eject an empty slot",
        )?;
        let mut state = self.state.lock();
        *state = State {
            inserted,
            removal,
            ejectable,
            ejected,
            asserted: state.asserted,
        };
        if ejected != 0 {
            // The only failure is a counter at its maximum, which is readable too.
            let _ = self.event.write(1);
        }
        self.try_settle(&mut state)
            .map_err(|source| interrupt_failed(DEVICE, source))
    }
}
