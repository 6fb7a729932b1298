//! The devices that the host removes.
//!
//! It must not know what replaces one, nor when the guest is asked to eject it.

use devices::pci::Slot;
use devices::virtio::pci::VirtioPciDevice;

use super::super::pluggable::{FailoverState, PlugPhase};
use super::{DeviceManager, Entry, Removable};

impl DeviceManager {
    /// Returns the numbers of the devices that the host removes and that are still open.
    pub(in super::super) fn removed(&self) -> Vec<u16> {
        let entries = self.entries.iter();
        let removed = entries.filter(|(_, entry)| entry.is_removed());
        removed.map(|(number, _)| *number).collect()
    }

    /// Whether the NIC with this number has a backup device to which no failover has failed.
    pub(in super::super) fn has_untried_backup(&self, number: u16) -> bool {
        let entry = self.entries.get(&number);
        let removable = entry.and_then(|entry| entry.removable.as_ref());
        let Some((_, backup)) = removable.and_then(Removable::backup) else {
            return false;
        };
        let last = removable.and_then(|removable| removable.failover.as_ref());
        !last.is_some_and(|last| {
            last.to == *backup && matches!(last.state, FailoverState::Failed(_))
        })
    }

    /// Closes the device with this number. Returns its name, and the value whose drop completes
    /// that, which may take long.
    pub(in super::super) fn close_removed(
        &mut self,
        number: u16,
    ) -> Option<(String, Box<dyn Send>)> {
        let entry = self.entries.get_mut(&number)?;
        let closed = entry.virtio()?.close()?;
        if let Some(removable) = &mut entry.removable {
            removable.state = PlugPhase::DeviceRemoved;
        }
        Some((entry.id.clone(), closed))
    }

    /// Returns the names and slots of closed devices that the guest has not ejected.
    pub(in super::super) fn closed(&self) -> impl Iterator<Item = (&str, Slot)> {
        let closed = self.entries.values().filter(|entry| entry.is_closed());
        closed.map(|entry| (entry.id.as_str(), entry.slot))
    }

    /// Returns the name of a device that is closed, or that the host removes.
    pub(in super::super) fn leaving(&self) -> Option<&str> {
        let mut entries = self.entries.values();
        let leaving = entries.find(|entry| entry.is_closed() || entry.is_removed());
        leaving.map(|entry| entry.id.as_str())
    }
}

impl Entry {
    fn is_removed(&self) -> bool {
        self.virtio().is_some_and(VirtioPciDevice::is_removed)
    }

    fn is_closed(&self) -> bool {
        let removable = self.removable.as_ref();
        removable.is_some_and(|removable| removable.state == PlugPhase::DeviceRemoved)
    }
}
