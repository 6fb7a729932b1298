//! The device's MSI-X vectors, connected to the eventfds of the guest's vectors.
//!
//! Owns how many vectors the host has allocated. It must not know the guest's routes: a masked
//! vector stays connected, and a trigger stays pending in its eventfd.
//!
//! ```text
//!            guest enables MSI-X          guest unmasks a later vector
//!   none --------------------> first n --------------------------------> more
//!     ^                           |                                        |
//!     +---------------------------+----------------------------------------+
//!              guest disables MSI-X, reset
//! ```

use std::os::fd::{AsRawFd as _, RawFd};

use tracing::error;

use super::host::Host;
use crate::pci::Msix;

/// See the module.
#[derive(Debug)]
pub(super) struct Interrupts {
    allocated: usize,
    /// The number that the host refused last, while fewer are connected. Otherwise a driver that
    /// unmasks in its handler would make this process reconnect them without end.
    refused: usize,
    resizable: bool,
}

impl Interrupts {
    pub(super) fn new(resizable: bool) -> Self {
        Self {
            allocated: 0,
            refused: 0,
            resizable,
        }
    }

    /// Returns how many vectors are connected.
    pub(super) fn connected(&self) -> usize {
        self.allocated
    }

    /// Follows the guest's settings. On failure a change to another number tries again.
    pub(super) fn update(&mut self, host: &dyn Host, msix: &Msix) {
        let Some(unmasked) = msix.unmasked() else {
            self.disable(host);
            return;
        };
        // A device with MSI-X disabled would use its pin, so one vector is always there.
        let wanted = unmasked.max(1);
        if wanted <= self.allocated || wanted == self.refused {
            return;
        }
        let eventfds = msix.eventfds().take(wanted);
        let eventfds: Vec<RawFd> = eventfds.map(|eventfd| eventfd.as_raw_fd()).collect();
        if self.allocated > 0 && self.resizable {
            let first = u32::try_from(self.allocated).unwrap_or(u32::MAX);
            let more = eventfds.get(self.allocated..).unwrap_or_default();
            if host.set_vectors(first, more).is_ok() {
                self.allocated = wanted;
                return;
            }
        }
        let before = self.allocated;
        self.disable(host);
        match host.set_vectors(0, &eventfds) {
            Ok(()) => self.allocated = wanted,
            Err(error) => {
                error!(vectors = wanted, %error, "cannot connect the device's MSI-X vectors");
                // Those that worked.
                let former = eventfds.get(..before).unwrap_or_default();
                if !former.is_empty() && host.set_vectors(0, former).is_ok() {
                    (self.allocated, self.refused) = (before, wanted);
                }
            }
        }
        // A trigger may have been lost while they were disconnected.
        for vector in (0..u16::MAX).take(before) {
            msix.signal(vector);
        }
    }

    /// Disconnects all vectors.
    pub(super) fn disable(&mut self, host: &dyn Host) {
        if self.allocated == 0 {
            return;
        }
        if let Err(error) = host.disable_vectors() {
            error!(%error, "cannot disconnect the device's MSI-X vectors");
        }
        (self.allocated, self.refused) = (0, 0);
    }
}
