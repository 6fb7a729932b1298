//! A device that the guest sees: an emulated virtio device, or a function of the host.
//!
//! Owns the difference. The machine does not know the rings of a function of the host. Only the
//! function's driver knows its state and what it writes (`functions.rs`). The host may want it
//! back:
//!
//! ```text
//!   attached ── the kernel asks ──> the guest is asked to eject it ──> detached
//!                                        │ not within 10 s                ^
//!                                        +────────────────────────────────+
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bellhop_api::machine::{AlarmInfo, AlarmKind};
use devices::hypervisor::DeviceMappings;
use devices::pci::{PciFunction, Slot};
use devices::vfio::{FunctionDescription, VfioPciDevice};
use devices::virtio::backend::Event;
use devices::virtio::pci::VirtioPciDevice;

use super::super::passthrough::Function;
use super::super::pluggable::{DeviceConfig, PlugPhase};
use super::{DeviceManager, Entry, poll};
use crate::Error;
use crate::config::VfioConfig;
use crate::event_loop::EventLoop;

/// How long the guest may take to eject a function that the host wants back.
const EJECT: Duration = Duration::from_secs(10);

/// See the module.
pub(super) enum Attached {
    Virtio(Arc<VirtioPciDevice>),
    Vfio(Arc<VfioPciDevice>),
}

impl Attached {
    pub(super) fn virtio(&self) -> Option<&VirtioPciDevice> {
        match self {
            Self::Virtio(device) => Some(device),
            Self::Vfio(_) => None,
        }
    }

    pub(super) fn function(&self) -> Arc<dyn PciFunction> {
        match self {
            Self::Virtio(device) => device.clone(),
            Self::Vfio(device) => device.clone(),
        }
    }

    /// The descriptors that the event loop polls.
    pub(super) fn events(&self) -> Vec<Event> {
        match self {
            Self::Virtio(device) => device.events().to_vec(),
            Self::Vfio(device) => device.events().to_vec(),
        }
    }

    pub(super) fn is_shared(&self) -> bool {
        match self {
            Self::Virtio(device) => Arc::strong_count(device) > 1,
            Self::Vfio(device) => Arc::strong_count(device) > 1,
        }
    }
}

impl Entry {
    pub(super) fn virtio(&self) -> Option<&VirtioPciDevice> {
        self.device.virtio()
    }
}

impl DeviceManager {
    /// Puts a function of the host into this slot, or the first free one, and polls its
    /// descriptors.
    ///
    /// # Errors
    /// On failure nothing has changed, and the function is closed.
    pub(in super::super) fn attach_vfio(
        &mut self,
        function: Function,
        slot: Option<Slot>,
        events: &EventLoop,
    ) -> Result<Slot, Error> {
        let Function {
            config,
            host,
            numa_node,
        } = function;
        let id = config.name();
        self.ensure_unused(&id)?;
        self.ensure_standby(&config)?;
        let number = self.free_number()?;
        let translation = host.translation();
        let slot = self.choose_slot(&id, translation.is_some(), slot)?;
        let mappings: Arc<dyn DeviceMappings> = self.mappings.clone();
        let device = VfioPciDevice::new(host, &self.msi, mappings)
            .map(Arc::new)
            .map_err(|source| {
                Error::unusable(format!("cannot use VFIO device {id}")).because(source)
            })?;
        let slot = self.add_function(&id, slot, device.clone())?;
        let endpoint = translation
            .map(|translation| self.enter_iommu(&id, slot, translation))
            .transpose()?;
        if let Err(error) = poll(events, number, &device.events()) {
            self.pci.remove(slot);
            self.leave_iommu(endpoint);
            return Err(Error::failed("epoll_ctl")(error));
        }
        tracing::debug!(%id, %slot, "device attached");
        self.next_number = number.wrapping_add(1);
        let entry = Entry {
            removable: Some(self.removable(&id, DeviceConfig::Vfio(config), numa_node)),
            id,
            slot,
            device: Attached::Vfio(device),
            endpoint,
            watch: None,
            wanted_back: None,
            failed: false,
        };
        self.entries.insert(number, entry);
        Ok(slot)
    }

    /// Fails if a function names a NIC that cannot stand by for it.
    fn ensure_standby(&self, config: &VfioConfig) -> Result<(), Error> {
        let Some(standby) = &config.standby else {
            return Ok(());
        };
        let mut named = self.entries.values().filter(|entry| entry.id == *standby);
        let stands_by = named.any(|entry| {
            let nic = entry.removable.as_ref().map(|removable| &removable.config);
            matches!(nic, Some(DeviceConfig::Nic(nic)) if nic.standby)
        });
        if stands_by {
            return Ok(());
        }
        Err(Error::unusable(format!(
            "VFIO device {}: its standby {standby:?} is no NIC of the VM with standby=on",
            config.name()
        )))
    }

    /// Looks for functions that the host wants back. Returns those that the guest must be asked to
    /// eject, and the slots of those that it has not ejected in time.
    pub(in super::super) fn wanted_back(&mut self) -> (Vec<(String, Slot)>, Vec<Slot>) {
        let (mut asked, mut overdue) = (Vec::new(), Vec::new());
        for entry in self.entries.values_mut() {
            let Attached::Vfio(device) = &entry.device else {
                continue;
            };
            let wanted = device.is_wanted_back();
            match entry.wanted_back {
                None if wanted => {
                    entry.wanted_back = Some(Instant::now());
                    if let Some(removable) = &mut entry.removable {
                        removable.state = PlugPhase::UnplugRequested;
                    }
                    asked.push((entry.id.clone(), entry.slot));
                }
                Some(since) if since.elapsed() > EJECT => overdue.push(entry.slot),
                _ => {}
            }
        }
        (asked, overdue)
    }

    /// Looks for errors of functions. Returns whether an alarm began or ended.
    pub(in super::super) fn check_errors(&mut self) -> bool {
        let mut changed = false;
        for entry in self.entries.values_mut() {
            let Attached::Vfio(device) = &entry.device else {
                continue;
            };
            if device.take_error() {
                tracing::error!(
                    id = %entry.id,
                    "the VFIO device has reported an uncorrectable error (AER), or cannot be \
                     reset or resumed; a reset by its driver, or of the machine, may help"
                );
            }
            changed |= entry.failed != device.has_failed();
            entry.failed = device.has_failed();
        }
        changed
    }

    /// Returns the alarms about functions with errors.
    pub(super) fn errors(&self) -> impl Iterator<Item = AlarmInfo> {
        let failed = self.entries.values().filter(|entry| entry.failed);
        failed.map(|entry| AlarmInfo {
            device: entry.id.clone(),
            queue: 0,
            alarm: AlarmKind::DeviceError,
            detail: Some(
                "the function has reported an uncorrectable error (AER), or cannot be reset or \
                 resumed; reset it by its driver, or reset the machine"
                    .to_owned(),
            ),
        })
    }

    /// Returns the state of all functions of the host, by name.
    pub(in super::super) fn functions(&self) -> BTreeMap<String, FunctionDescription> {
        let describe = |entry: &Entry| match &entry.device {
            Attached::Virtio(_) => None,
            Attached::Vfio(device) => Some((entry.id.clone(), device.describe())),
        };
        self.entries.values().filter_map(describe).collect()
    }
}
