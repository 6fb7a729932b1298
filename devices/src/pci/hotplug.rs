//! The registers for hot-plug and unplug of functions of bus 0.
//!
//! Owns the slots that the guest has to scan, the slots that it is asked to eject, and the
//! interrupt for both. It must not know the function in a slot, nor the ACPI methods (`vmm`'s DSDT)
//! that are the only intended user of the registers.
//!
//! Three registers of 32 bits, little-endian, in which bit *n* is slot *n*. Only aligned accesses
//! of 4 bytes are valid; others read all ones or are dropped:
//!
//! | offset | name | read | write |
//! |---|---|---|---|
//! | 0 | INSERTED | slots with a new function | ones clear: seen |
//! | 4 | REMOVAL | slots that the guest is asked to eject | ones clear: noticed |
//! | 8 | EJECT | 0 | ones eject |
//!
//! ```text
//!               announce             guest clears INSERTED
//!   (function) ----------> inserted ----------------------> settled
//!                             |                                |
//!                             | request_removal                | request_removal
//!                             v                                v
//!                          asked  -- guest clears REMOVAL --> noticed
//!                             |                                |
//!                             +------ guest writes EJECT ------+
//!                                             |
//!                                             v
//!                      off the bus; the machine takes it (take_ejected)
//! ```
//! The interrupt is level-triggered and asserted while INSERTED or REMOVAL has a bit set. So a
//! guest that does not listen yet, or masked the interrupt, misses no event.
//!
//! **A guest can eject only a slot that it was asked to eject.** Its writes to EJECT for any other
//! slot (the boot disk's, an empty one's) have no effect. As the function stays on the bus, a
//! rescan finds it again.

mod saved;

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::{debug, error};
use vmm_sys_util::eventfd::EventFd;

use super::{PciBus, SLOTS, Slot};
use crate::bus::BusDevice;
use crate::hypervisor::LevelInterrupt;

pub use saved::PciHotplugState;

/// Length of the registers in bytes.
pub const HOTPLUG_LEN: u64 = 12;
/// Offset of INSERTED.
pub const HOTPLUG_INSERTED: u64 = 0;
/// Offset of REMOVAL.
pub const HOTPLUG_REMOVAL: u64 = 4;
/// Offset of EJECT.
pub const HOTPLUG_EJECT: u64 = 8;

#[derive(Debug, Default)]
struct State {
    inserted: u32,
    removal: u32,
    /// The slots that the guest may eject: asked for, whether noticed or not.
    ejectable: u32,
    ejected: u32,
    /// The last level of the interrupt.
    asserted: bool,
}

/// The hot-plug registers; see the module.
pub struct PciHotplug {
    bus: Arc<PciBus>,
    interrupt: Box<dyn LevelInterrupt>,
    event: EventFd,
    state: Mutex<State>,
}

vdpa::opaque_debug!(PciHotplug, this => state: this.state);

fn bit(slot: Slot) -> u32 {
    1 << slot.number()
}

impl PciHotplug {
    /// Creates registers for `bus` with no bit set, which drive `interrupt`.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn new(bus: Arc<PciBus>, interrupt: Box<dyn LevelInterrupt>) -> io::Result<Self> {
        Ok(Self {
            bus,
            interrupt,
            event: vdpa::eventfd::new()?,
            state: Mutex::default(),
        })
    }

    /// Notifies the guest of a function in `slot`, which is already on the bus.
    pub fn announce(&self, slot: Slot) {
        let mut state = self.state.lock();
        state.inserted |= bit(slot);
        self.settle(&mut state);
    }

    /// Asks the guest to eject `slot`; a repeated call notifies it again. Has no effect if the
    /// guest refuses, or has just ejected the slot: that ejection stays to be taken.
    pub fn request_removal(&self, slot: Slot) {
        let mut state = self.state.lock();
        // A request older than the ejection would hit the slot's next function.
        if state.ejected & bit(slot) != 0 {
            return;
        }
        state.removal |= bit(slot);
        state.ejectable |= bit(slot);
        self.settle(&mut state);
    }

    /// Whether the guest was asked to eject `slot` and has not done so yet.
    #[must_use]
    pub fn is_asked(&self, slot: Slot) -> bool {
        self.state.lock().ejectable & bit(slot) != 0
    }

    /// Returns the eventfd that is readable when [`PciHotplug::take_ejected`] has a slot to return.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        &self.event
    }

    /// Returns the slots that the guest has ejected since the last call. Their functions are off
    /// the bus, and their owner must release them.
    #[must_use]
    pub fn take_ejected(&self) -> Vec<Slot> {
        // In this order, an eject that arrives in between is taken now or signalled again.
        let _ = self.event.read();
        let ejected = std::mem::take(&mut self.state.lock().ejected);
        (0..SLOTS)
            .filter_map(Slot::new)
            .filter(|slot| ejected & bit(*slot) != 0)
            .collect()
    }

    /// Clears pending notifications and requests, for a guest that boots and scans all slots
    /// itself. Earlier ejections stay to be taken.
    pub fn reset(&self) {
        self.forget_all(u32::MAX);
    }

    /// Clears pending notifications and requests of a slot whose function the machine has removed
    /// by itself. So a late ejection does not hit the slot's next function.
    pub fn forget(&self, slot: Slot) {
        self.forget_all(bit(slot));
    }

    fn forget_all(&self, slots: u32) {
        let mut state = self.state.lock();
        state.inserted &= !slots;
        state.removal &= !slots;
        state.ejectable &= !slots;
        self.settle(&mut state);
    }

    fn eject(&self, state: &mut State, slots: u32) {
        let granted = slots & state.ejectable;
        let refused = slots & !granted;
        if refused != 0 {
            debug!(
                slots = format_args!("{refused:#x}"),
                "the guest ejects PCI slots without a request: they stay"
            );
        }
        for slot in (0..SLOTS).filter_map(Slot::new) {
            if granted & bit(slot) != 0 {
                // Off the bus before the guest's write is complete: a subsequent rescan must not
                // find it.
                self.bus.remove(slot);
            }
        }
        state.inserted &= !granted;
        state.removal &= !granted;
        state.ejectable &= !granted;
        state.ejected |= granted;
        if granted != 0 {
            // The only failure is a counter at its maximum, which is readable too.
            let _ = self.event.write(1);
        }
    }

    /// Sets the interrupt according to the registers.
    fn settle(&self, state: &mut State) {
        if let Err(error) = self.try_settle(state) {
            error!(%error, "cannot set the PCI hot-plug interrupt");
        }
    }

    fn try_settle(&self, state: &mut State) -> io::Result<()> {
        let wanted = state.inserted | state.removal != 0;
        if wanted != state.asserted {
            self.interrupt.set(wanted)?;
            state.asserted = wanted;
        }
        Ok(())
    }
}

impl BusDevice for PciHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let Ok(data) = <&mut [u8; 4]>::try_from(&mut *data) else {
            data.fill(0xff);
            return;
        };
        let state = self.state.lock();
        let value = match offset {
            HOTPLUG_INSERTED => state.inserted,
            HOTPLUG_REMOVAL => state.removal,
            HOTPLUG_EJECT => 0,
            _ => u32::MAX,
        };
        *data = value.to_le_bytes();
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(data) = <[u8; 4]>::try_from(data) else {
            return;
        };
        let slots = u32::from_le_bytes(data);
        let mut state = self.state.lock();
        match offset {
            HOTPLUG_INSERTED => state.inserted &= !slots,
            HOTPLUG_REMOVAL => state.removal &= !slots,
            HOTPLUG_EJECT => self.eject(&mut state, slots),
            _ => return,
        }
        self.settle(&mut state);
    }
}

#[cfg(test)]
mod tests;
