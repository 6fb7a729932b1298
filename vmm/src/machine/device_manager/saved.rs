//! Saves the devices of a machine, and restores them from saved states.
//!
//! Owns which state belongs to which device, and the rule that a machine has exactly the devices
//! that were saved. It must not know the content of a state.

use devices::virtio::iommu::{Domains, DomainsState};

use super::super::error::{RequestError, SnapshotError};
use super::super::iommu::IOMMU;
use super::super::pluggable::PlugPhase;
use super::super::saved::SavedDevice;
use super::DeviceManager;

impl DeviceManager {
    /// Stops all virtio devices and returns their states. The vCPUs are parked.
    ///
    /// # Errors
    /// A device cannot be saved; all devices resume.
    pub(in super::super) fn save(&self) -> Result<Vec<SavedDevice>, RequestError> {
        let mut saved = Vec::with_capacity(self.entries.len());
        for entry in self.entries.values() {
            let Some(device) = entry.virtio() else {
                continue;
            };
            match device.save() {
                Ok(state) => saved.push(SavedDevice {
                    id: entry.id.clone(),
                    slot: entry.slot.number(),
                    unplug_requested: entry.is_unplugging(),
                    state,
                }),
                Err(source) => {
                    self.restore_in_place(&saved);
                    return Err(RequestError::Save {
                        id: entry.id.clone(),
                        source,
                    });
                }
            }
        }
        Ok(saved)
    }

    /// Returns the domains of the guest's IOMMU.
    pub(in super::super) fn save_domains(&self) -> Option<DomainsState> {
        self.iommu.as_ref().map(|iommu| iommu.lock().save())
    }

    /// Restores the domains of the guest's IOMMU, before the devices behind it start.
    ///
    /// # Errors
    /// [`SnapshotError`]: only one of the two machines has an IOMMU, no guest can have reached the
    /// state, or a device refuses it.
    pub(in super::super) fn restore_domains(
        &self,
        saved: Option<&DomainsState>,
    ) -> Result<(), SnapshotError> {
        self.with_domains(saved, Domains::restore)
    }

    /// Checks the domains as [`DeviceManager::restore_domains`] does, without the devices.
    ///
    /// # Errors
    /// As [`DeviceManager::restore_domains`]; nothing has changed.
    pub(in super::super) fn check_domains(
        &self,
        saved: Option<&DomainsState>,
    ) -> Result<(), SnapshotError> {
        self.with_domains(saved, |domains, saved| domains.check(saved))
    }

    fn with_domains(
        &self,
        saved: Option<&DomainsState>,
        work: impl FnOnce(&mut Domains, &DomainsState) -> Result<(), devices::Error>,
    ) -> Result<(), SnapshotError> {
        match (&self.iommu, saved) {
            (Some(iommu), Some(saved)) => work(&mut iommu.lock(), saved).map_err(|source| {
                let id = IOMMU.to_owned();
                SnapshotError::Device { id, source }
            }),
            (None, None) => Ok(()),
            (Some(_), None) => Err(SnapshotError::DeviceNotSaved(IOMMU.to_owned())),
            (None, Some(_)) => Err(SnapshotError::NoDevice(IOMMU.to_owned())),
        }
    }

    /// Resumes saved devices in place. A device that cannot resume reports DEVICE_NEEDS_RESET to
    /// its driver; the others resume.
    pub(in super::super) fn restore_in_place(&self, saved: &[SavedDevice]) {
        for SavedDevice { id, state, .. } in saved {
            // Its guest may have ejected it before, or it may not have been running.
            let Some(device) = self.named(id) else {
                continue;
            };
            if state.backend.is_none() {
                continue;
            }
            if let Err(error) = device.restore(state) {
                tracing::error!(
                    %id,
                    error = &error as &dyn std::error::Error,
                    "a saved device does not resume: its driver must reset it"
                );
            }
        }
    }

    /// Checks the states as [`DeviceManager::restore`] does, as far as possible before devices
    /// start.
    ///
    /// # Errors
    /// As [`DeviceManager::restore`]; nothing has changed.
    pub(in super::super) fn check(&self, saved: &[SavedDevice]) -> Result<(), SnapshotError> {
        self.all_saved(saved)?;
        for SavedDevice { id, state, .. } in saved {
            let device = self
                .named(id)
                .ok_or_else(|| SnapshotError::NoDevice(id.clone()))?;
            device
                .check(state)
                .map_err(|source| SnapshotError::Device {
                    id: id.clone(),
                    source,
                })?;
        }
        Ok(())
    }

    /// Checks that each virtio device has a state among these.
    fn all_saved(&self, saved: &[SavedDevice]) -> Result<(), SnapshotError> {
        let virtio = |entry: &&super::Entry| entry.virtio().is_some();
        let mut entries = self.entries.values().filter(virtio);
        match entries.find(|entry| saved.iter().all(|device| device.id != entry.id)) {
            Some(entry) => Err(SnapshotError::DeviceNotSaved(entry.id.clone())),
            None => Ok(()),
        }
    }

    /// Loads saved states into the devices of a machine that was just built for them. `again` if an
    /// earlier attempt, here or by another process, failed.
    ///
    /// # Errors
    /// [`SnapshotError`]: the devices are not exactly those that were saved, or one rejects its
    /// state.
    pub(in super::super) fn restore(
        &mut self,
        saved: &[SavedDevice],
        again: bool,
    ) -> Result<(), SnapshotError> {
        self.all_saved(saved)?;
        for saved in saved {
            let id = &saved.id;
            let entry = self
                .entry_mut(id)
                .map_err(|_| SnapshotError::NoDevice(id.clone()))?;
            if let (true, Some(removable)) = (saved.unplug_requested, &mut entry.removable) {
                removable.state = PlugPhase::UnplugRequested;
            }
            let device = entry.virtio();
            let device = device.ok_or_else(|| SnapshotError::NoDevice(id.clone()))?;
            let restored = if again {
                device.restore_again(&saved.state)
            } else {
                device.restore(&saved.state)
            };
            restored.map_err(|source| SnapshotError::Device {
                id: id.clone(),
                source,
            })?;
        }
        Ok(())
    }
}
