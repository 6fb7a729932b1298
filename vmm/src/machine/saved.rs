//! The state of a saved machine beside guest memory, and its sections.
//!
//! Owns names, versions and sizes of the sections. It must not know files, nor the order in which a
//! machine restores its parts.
//!
//! | section | content |
//! |---|---|
//! | `config` | the configuration as JSON, as the API shows it; whether the vCPUs ran |
//! | `vm` | interrupt controllers and kvmclock |
//! | `vcpu` | for each vCPU, by number: registers, local APIC, MSRs, CPUID |
//! | `platform` | serial, clock, power button, hot-plug, host bridge, PCI ports, generation ID |
//! | `iommu` | the domains of the guest's IOMMU, if it has one |
//! | `device` | for each device, in order of attachment: name, slot, registers, backend state |

use std::collections::BTreeMap;

use devices::legacy::clock::ClockState;
use devices::legacy::event::AcpiEventState;
use devices::legacy::power::PowerState;
use devices::legacy::serial::SerialState;
use devices::pci::{ConfigPortsState, PciBusState, PciHotplugState, SLOTS, Slot};
use devices::virtio::iommu::{DOMAINS_STATE_VERSION, DomainsState};
use devices::virtio::pci::VirtioPciState;
use serde::{Deserialize, Serialize};

use super::error::SnapshotError;
use super::generation::GenerationState;
use crate::config::{CpuCount, VmConfig};
use crate::kvm::saved::VmState;
use crate::snapshot::format::{Saved, Sections, decode};
use crate::vcpu::VcpuState;

/// A configuration as JSON: later versions must be able to read it, and postcard cannot represent
/// it.
#[derive(Debug, Serialize, Deserialize)]
struct SavedConfig {
    json: String,
    /// Whether the vCPUs ran.
    ran: bool,
    /// How often another program has taken over the machine.
    upgrades: u64,
}

/// The state of the devices that every machine has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedPlatform {
    pub(super) serial: SerialState,
    pub(super) clock: ClockState,
    pub(super) button: AcpiEventState,
    pub(super) hotplug: PciHotplugState,
    pub(super) pci: PciBusState,
    pub(super) config_ports: ConfigPortsState,
    pub(super) power: PowerState,
    /// `None`: the guest knows of no generation ID.
    pub(super) generation: Option<GenerationState>,
}

/// A device of a saved machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedDevice {
    /// Its name.
    pub(super) id: String,
    /// The number of its PCI slot.
    pub(super) slot: u8,
    /// Whether the guest was asked to eject it and has not done so.
    pub(super) unplug_requested: bool,
    pub(super) state: VirtioPciState,
}

/// Implements [`Saved`]: name, version, maximum bytes, maximum items.
macro_rules! saved {
    ($($type:ty: $name:literal, $version:expr, $max:expr $(, $items:expr)?;)*) => {$(
        impl Saved for $type {
            const NAME: &'static str = $name;
            const VERSION: u32 = $version;
            const MAX_LEN: u64 = $max;
            $(const ITEMS_MAX: Option<u32> = Some($items);)?
        }
    )*};
}

impl Saved for SavedConfig {
    const NAME: &'static str = "config";
    const VERSION: u32 = 2;
    const MAX_LEN: u64 = 1 << 20;

    /// Version 1 names members of NICs `failover` and `rescue`, which [`VmConfig`] reads.
    fn upgrade(previous: &[u8]) -> Option<Result<Self, postcard::Error>> {
        Some(decode(previous))
    }
}

saved! {
    VmState: "vm", 1, 4096;
    Vec<VcpuState>: "vcpu", 1, (CpuCount::MAX as u64) << 20, CpuCount::MAX as u32;
    SavedPlatform: "platform", 1, 1 << 16;
    DomainsState: "iommu", DOMAINS_STATE_VERSION, 1 << 26;
    Vec<SavedDevice>: "device", 1, (SLOTS as u64) << 22, SLOTS as u32;
}

/// A saved machine without its memory.
#[derive(Debug, Clone)]
pub(super) struct SavedMachine {
    /// With the NICs and disks at that time, by their paths.
    pub(super) config: VmConfig,
    pub(super) vm: VmState,
    /// By number.
    pub(super) vcpus: Vec<VcpuState>,
    pub(super) platform: SavedPlatform,
    pub(super) iommu: Option<DomainsState>,
    /// In the order of attachment.
    pub(super) devices: Vec<SavedDevice>,
    /// Whether its vCPUs ran when it was saved.
    pub(super) ran: bool,
    /// How often another program has taken over the machine.
    pub(super) upgrades: u64,
}

impl SavedMachine {
    /// Returns the versions of the sections of [`SavedMachine::sections`], by name.
    pub(super) fn versions() -> [(&'static str, u32); 6] {
        fn of<T: Saved>() -> (&'static str, u32) {
            (T::NAME, T::VERSION)
        }
        [
            of::<SavedConfig>(),
            of::<VmState>(),
            of::<Vec<VcpuState>>(),
            of::<SavedPlatform>(),
            of::<DomainsState>(),
            of::<Vec<SavedDevice>>(),
        ]
    }

    /// Converts the state to sections.
    ///
    /// # Errors
    /// [`SnapshotError::Write`]: a part has more bytes than can be read again.
    pub(super) fn sections(&self) -> Result<Sections, SnapshotError> {
        let config = SavedConfig {
            json: serde_json::to_string(&self.config).map_err(SnapshotError::Config)?,
            ran: self.ran,
            upgrades: self.upgrades,
        };
        let mut sections = Sections::default();
        sections.put(&config)?;
        sections.put(&self.vm)?;
        sections.put(&self.platform)?;
        sections.put(&self.vcpus)?;
        if let Some(iommu) = &self.iommu {
            sections.put(iommu)?;
        }
        sections.put(&self.devices)?;
        Ok(sections)
    }

    /// Reads a machine from sections. Restoring the machine detects states that no guest could have
    /// reached.
    ///
    /// # Errors
    /// [`SnapshotError`]: a section is missing or malformed, or the parts are inconsistent.
    pub(super) fn take(from: &mut Sections) -> Result<Self, SnapshotError> {
        let SavedConfig {
            json,
            ran,
            upgrades,
        } = from.take()?;
        let this = Self {
            config: serde_json::from_str(&json).map_err(SnapshotError::Config)?,
            vm: from.take()?,
            vcpus: from.take()?,
            platform: from.take()?,
            iommu: from.take_optional()?,
            devices: from.take()?,
            ran,
            upgrades,
        };
        let cpus = usize::from(this.config.cpus.get());
        if this.vcpus.len() != cpus {
            return Err(SnapshotError::Vcpus {
                saved: this.vcpus.len(),
                configured: cpus,
            });
        }
        // No machine with a function of the host can be saved, so another program wrote this.
        if let Some(function) = this.config.vfio.first() {
            return Err(SnapshotError::DeviceNotSaved(function.name()));
        }
        // Checks that each slot and each name occurs once.
        this.slots()?;
        Ok(this)
    }

    /// Returns the slot of each device.
    ///
    /// # Errors
    /// [`SnapshotError::Slot`]: a slot does not exist, or two devices have the same slot or name.
    pub(super) fn slots(&self) -> Result<BTreeMap<String, Slot>, SnapshotError> {
        let mut slots: BTreeMap<String, Slot> = BTreeMap::new();
        for device in &self.devices {
            let slot = Slot::new(device.slot).filter(|slot| {
                *slot != Slot::HOST_BRIDGE && slots.values().all(|other| other != slot)
            });
            let known = slot.map(|slot| slots.insert(device.id.clone(), slot));
            if known != Some(None) {
                return Err(SnapshotError::Slot {
                    id: device.id.clone(),
                    slot: device.slot,
                });
            }
        }
        Ok(slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_of_version_1_is_read() {
        let vdpa = r#"{"path": "/a", "failover": "/b", "rescue": true}"#;
        let saved = SavedConfig {
            json: format!(r#"{{"kernel": "/k", "vdpa": [{vdpa}]}}"#),
            ran: true,
            upgrades: 2,
        };
        let payload = postcard::to_allocvec(&saved).unwrap();
        let read = SavedConfig::upgrade(&payload).unwrap().unwrap();
        let config: VmConfig = serde_json::from_str(&read.json).unwrap();
        let nic = &config.vdpa[0];
        assert_eq!(nic.backup.as_deref().unwrap().to_str(), Some("/b"));
        assert!(nic.stall_kick && read.ran);
        SavedConfig::upgrade(&payload[1..]).unwrap().unwrap_err();
    }
}
