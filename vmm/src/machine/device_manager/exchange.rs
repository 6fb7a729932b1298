//! Moves NICs to another device, on request or because their own device has failed.
//!
//! Owns the order of the steps in the list and the event loop, and the record of a failover in
//! progress. It must not know who opens the new device, nor who closes the old one.

use std::path::PathBuf;
use std::time::Duration;

use devices::virtio::backend::Backend;
use devices::virtio::pci::{SwapFailed, Swapped};

use super::super::devices::Device;
use super::super::error::RequestError;
use super::super::pluggable::{DeviceConfig, DeviceKind, Failover, FailoverState, Pluggable};
use super::attached::Attached;
use super::{DeviceManager, poll, unpoll};
use crate::Error;
use crate::config::{DeviceSource, VdpaConfig};
use crate::event_loop::EventLoop;
use crate::host::numa_warning;

/// The result of [`DeviceManager::swap`].
pub(in super::super) struct Exchanged {
    /// How long neither device worked; `None` if no driver was using the old one.
    pub(in super::super) gap: Result<Option<Duration>, RequestError>,
    /// The old backend, or the new one after a failure.
    pub(in super::super) unused: Box<dyn Backend>,
}

impl Exchanged {
    fn not(error: RequestError, unused: Box<dyn Backend>) -> Self {
        Self {
            gap: Err(error),
            unused,
        }
    }
}

impl DeviceManager {
    /// Puts another device behind the NIC of the same name, whose driver keeps running. Returns the
    /// unused backend, the old one or, after a failure, the new one: closing it may take long.
    pub(in super::super) fn swap(&mut self, device: Device, events: &EventLoop) -> Exchanged {
        let Device {
            id,
            backend,
            config,
            numa_node,
            ..
        } = device;
        let mut entries = self.entries.iter_mut();
        let Some((&number, entry)) = entries.find(|(_, entry)| entry.id == id) else {
            return Exchanged::not(RequestError::NoSuchDevice(id), backend);
        };
        let kind = |config: &DeviceConfig| config.kind() == DeviceKind::Nic;
        let (Attached::Virtio(function), Some(removable), Some(config)) = (
            &entry.device,
            entry
                .removable
                .as_mut()
                .filter(|removable| kind(&removable.config)),
            config.filter(kind),
        ) else {
            let wanted = DeviceKind::Nic;
            return Exchanged::not(RequestError::OtherKind { id, wanted }, backend);
        };
        let replacement = function.replacement(backend);
        let added = replacement.events().to_vec();
        if let Err(error) = poll(events, number, &added) {
            let error = Error::failed("epoll_ctl")(error);
            return Exchanged::not(error.into(), replacement.into_backend());
        }
        // No MAP or UNMAP comes between the old device's mappings and the new one's.
        let domains = self.iommu.as_ref().filter(|_| entry.endpoint.is_some());
        match function.swap(replacement, domains) {
            Ok(Swapped {
                events: old,
                retired,
                gap,
            }) => {
                unpoll(events, &id, &old);
                removable.numa_warning = numa_warning(numa_node, self.memory_node);
                if let Some(warning) = &removable.numa_warning {
                    tracing::warn!(%id, "{warning}");
                }
                // The backup may have changed while the new device was opened.
                let backup = removable.backup().map(|(_, path)| path.to_owned());
                removable.config = config;
                if let DeviceConfig::Nic(nic) = &mut removable.config {
                    nic.backup = backup.filter(|backup| !nic.is_at(backup));
                }
                removable.numa_node = numa_node;
                removable.failover = None;
                function.set_has_backup(removable.backup().is_some());
                Exchanged {
                    gap: Ok(gap),
                    unused: retired,
                }
            }
            Err(SwapFailed { error, replacement }) => {
                unpoll(events, &id, &added);
                Exchanged::not(RequestError::Swap { id, source: error }, replacement)
            }
        }
    }

    /// Records the start of a failover of the NIC with this number, which has failed and has a
    /// backup device. Returns the NIC's serial number and the configuration with which to open the
    /// backup.
    pub(in super::super) fn begin_failover(&mut self, number: u16) -> Option<(u64, VdpaConfig)> {
        let removable = self.entries.get_mut(&number)?.removable.as_mut()?;
        let (nic, to) = removable.backup()?;
        let config = VdpaConfig {
            source: DeviceSource::Path(to.to_owned()),
            backup: None,
            ..nic.clone()
        };
        removable.failover = Some(Failover {
            from: nic.shown_path().into_owned(),
            to: to.to_owned(),
            state: FailoverState::UnderWay,
        });
        Some((removable.serial, config))
    }

    /// Whether the failover of the NIC with this number is in progress.
    pub(in super::super) fn is_failing_over(&self, number: u16) -> bool {
        let entry = self.entries.get(&number);
        let failover = entry.and_then(|entry| entry.removable.as_ref()?.under_way());
        failover.is_some()
    }

    /// Returns the failover of the NIC with this name and serial number, if it is still in
    /// progress.
    pub(in super::super) fn fails_over(&self, id: &str, serial: u64) -> Option<&Failover> {
        let removable = self.entry(id)?.removable.as_ref()?;
        let failover = removable.under_way();
        failover.filter(|_| removable.serial == serial)
    }

    /// Records the result of a failover. If the device is not replaced, the driver is notified that
    /// it needs a reset.
    pub(in super::super) fn end_failover(&mut self, id: &str, failover: Failover) {
        let Ok(entry) = self.entry_mut(id) else {
            return;
        };
        if let Some(device) = entry.virtio() {
            device.give_up();
        }
        if let Some(removable) = &mut entry.removable {
            removable.failover = Some(failover);
        }
    }

    /// Sets or clears the backup device of the NIC `id`.
    ///
    /// # Errors
    /// There is no device of this name, it is no NIC, or it is already on that device.
    pub(in super::super) fn set_backup(
        &mut self,
        id: &str,
        backup: Option<PathBuf>,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        let entry = self.entry_mut(id)?;
        let config = entry
            .removable
            .as_mut()
            .map(|removable| &mut removable.config);
        let (Attached::Virtio(device), Some(DeviceConfig::Nic(nic))) = (&entry.device, config)
        else {
            return Err(RequestError::OtherKind {
                id: id.to_owned(),
                wanted: DeviceKind::Nic,
            });
        };
        if backup.as_deref().is_some_and(|backup| nic.is_at(backup)) {
            return Err(RequestError::OwnBackup(id.to_owned()));
        }
        device.set_has_backup(backup.is_some());
        nic.backup = backup;
        entry
            .status()
            .ok_or_else(|| RequestError::NoSuchDevice(id.to_owned()))
    }
}
