//! What there is of a saved machine beside guest memory, and which sections it becomes.
//!
//! Owns names, versions and sizes of the sections. It must not know files, nor in which order a
//! machine takes its parts.
//!
//! | section | content |
//! |---|---|
//! | `config` | the configuration as JSON, as the API shows it; whether the vCPUs ran |
//! | `vm` | interrupt controllers and kvmclock |
//! | `vcpu` | of each vCPU, by their numbers: registers, local APIC, MSRs, CPUID |
//! | `platform` | serial port, clock, power button, hot-plug, host bridge, PCI's configuration ports, generation ID |
//! | `device` | of each device, in the order of their attachment: name, slot, registers, the backend's state |

use std::collections::BTreeMap;

use devices::legacy::clock::ClockState;
use devices::legacy::event::AcpiEventState;
use devices::legacy::power::PowerState;
use devices::legacy::serial::SerialState;
use devices::pci::{ConfigPortsState, PciBusState, PciHotplugState, SLOTS, Slot};
use devices::virtio::pci::VirtioPciState;
use serde::{Deserialize, Serialize};

use super::error::SnapshotError;
use super::generation::GenerationState;
use crate::config::{CpuCount, VmConfig};
use crate::kvm::saved::VmState;
use crate::snapshot::format::{Saved, Sections};
use crate::vcpu::VcpuState;

/// A configuration as JSON: it is made to be read by later versions, and postcard cannot hold it.
#[derive(Debug, Serialize, Deserialize)]
struct SavedConfig {
    json: String,
    /// Whether the vCPUs ran.
    ran: bool,
    /// How often another program has gone on with it.
    upgrades: u64,
}

/// The state of what is on every machine's board.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedPlatform {
    pub(super) serial: SerialState,
    pub(super) clock: ClockState,
    pub(super) button: AcpiEventState,
    pub(super) hotplug: PciHotplugState,
    pub(super) pci: PciBusState,
    pub(super) config_ports: ConfigPortsState,
    pub(super) power: PowerState,
    /// `None`: the guest knows of none.
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

/// Implements [`Saved`]: name, version, the most bytes, the most items.
macro_rules! saved {
    ($($type:ty: $name:literal, $version:literal, $max:expr $(, $items:expr)?;)*) => {$(
        impl Saved for $type {
            const NAME: &'static str = $name;
            const VERSION: u32 = $version;
            const MAX_LEN: u64 = $max;
            $(const ITEMS_MAX: Option<u32> = Some($items);)?
        }
    )*};
}

saved! {
    SavedConfig: "config", 1, 1 << 20;
    VmState: "vm", 1, 4096;
    Vec<VcpuState>: "vcpu", 1, (CpuCount::MAX as u64) << 20, CpuCount::MAX as u32;
    SavedPlatform: "platform", 1, 1 << 16;
    Vec<SavedDevice>: "device", 1, (SLOTS as u64) << 22, SLOTS as u32;
}

/// A saved machine without its memory.
#[derive(Debug, Clone)]
pub(super) struct SavedMachine {
    /// With the NICs and disks that it had then, by their paths.
    pub(super) config: VmConfig,
    pub(super) vm: VmState,
    /// By their numbers.
    pub(super) vcpus: Vec<VcpuState>,
    pub(super) platform: SavedPlatform,
    /// In the order of their attachment.
    pub(super) devices: Vec<SavedDevice>,
    /// Whether its vCPUs ran when it was saved.
    pub(super) ran: bool,
    /// How often another program has gone on with it.
    pub(super) upgrades: u64,
}

impl SavedMachine {
    /// The versions of the sections that [`SavedMachine::sections`] gives, by their names.
    pub(super) fn versions() -> [(&'static str, u32); 5] {
        fn of<T: Saved>() -> (&'static str, u32) {
            (T::NAME, T::VERSION)
        }
        [
            of::<SavedConfig>(),
            of::<VmState>(),
            of::<Vec<VcpuState>>(),
            of::<SavedPlatform>(),
            of::<Vec<SavedDevice>>(),
        ]
    }

    /// All of it as sections.
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
        sections.put(&self.devices)?;
        Ok(sections)
    }

    /// Takes a machine out of what was read. What a guest could not have brought about is found when the
    /// machine is restored.
    ///
    /// # Errors
    /// [`SnapshotError`]: a section is missing or malformed, the parts do not go together.
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
        // Each slot and each name once.
        this.slots()?;
        Ok(this)
    }

    /// The slot of each device.
    ///
    /// # Errors
    /// [`SnapshotError::Slot`]: there is no such slot, or two devices have one or the same name.
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
