//! What there is of a saved machine beside guest memory, and which sections it becomes.
//!
//! Owns names, versions, sizes and numbers of the sections. It must not know files, nor in which order a
//! machine takes its parts.
//!
//! | section | instances | what |
//! |---|---|---|
//! | `config` | 1 | the configuration as JSON, as the API shows it; whether the vCPUs ran |
//! | `vm` | 1 | interrupt controllers and kvmclock |
//! | `vcpu` | one per vCPU, by their numbers | registers, local APIC, MSRs, CPUID |
//! | `platform` | 1 | serial port, clock, power button, hot-plug, host bridge, PCI's configuration ports, generation ID |
//! | `device` | one per device, in the order of their attachment | name, slot, registers, the backend's state |

use std::collections::BTreeMap;

use devices::legacy::clock::ClockState;
use devices::legacy::event::AcpiEventState;
use devices::legacy::power::PowerState;
use devices::legacy::serial::SerialState;
use devices::pci::{ConfigPortsState, PciBusState, PciHotplugState, SLOTS, Slot};
use devices::virtio::pci::VirtioPciState;
use serde::{Deserialize, Serialize};

use super::generation::GenerationState;
use super::snapshot::SnapshotError;
use crate::config::{CpuCount, VmConfig};
use crate::kvm::saved::VmState;
use crate::snapshot::format::{Payload, PayloadError, Saved, SectionKind, Sections, Writer};
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

/// The platform before there was a generation ID: all fields but the last.
#[derive(Debug, Deserialize)]
struct SavedPlatformV1 {
    serial: SerialState,
    clock: ClockState,
    button: AcpiEventState,
    hotplug: PciHotplugState,
    pci: PciBusState,
    config_ports: ConfigPortsState,
    power: PowerState,
}

impl Saved for SavedPlatform {
    const NAME: &'static str = "platform";
    const VERSION: u32 = 2;
    const MAX_LEN: u64 = 1 << 16;

    fn upgrade(previous: Payload<'_>) -> Result<Self, PayloadError> {
        let SavedPlatformV1 {
            serial,
            clock,
            button,
            hotplug,
            pci,
            config_ports,
            power,
        } = previous.decode()?;
        Ok(Self {
            serial,
            clock,
            button,
            hotplug,
            pci,
            config_ports,
            power,
            generation: None,
        })
    }
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

/// Implements [`Saved`]: name, version, the most bytes.
macro_rules! saved {
    ($($type:ty: $name:literal, $version:literal, $max:expr;)*) => {$(
        impl Saved for $type {
            const NAME: &'static str = $name;
            const VERSION: u32 = $version;
            const MAX_LEN: u64 = $max;
        }
    )*};
}

saved! {
    SavedConfig: "config", 1, 1 << 20;
    VmState: "vm", 1, 4096;
    VcpuState: "vcpu", 1, 1 << 20;
    SavedDevice: "device", 1, 4 << 20;
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
    /// The sections that [`SavedMachine::take`] takes.
    pub(super) const SECTIONS: [SectionKind; 5] = [
        SectionKind::of::<SavedConfig>(1),
        SectionKind::of::<VmState>(1),
        SectionKind::of::<VcpuState>(CpuCount::MAX as u32),
        SectionKind::of::<SavedPlatform>(1),
        SectionKind::of::<SavedDevice>(SLOTS as u32),
    ];

    /// The versions of the sections that [`SavedMachine::put`] writes, by their names.
    pub(super) fn versions() -> [(&'static str, u32); 5] {
        fn of<T: Saved>() -> (&'static str, u32) {
            (T::NAME, T::VERSION)
        }
        [
            of::<SavedConfig>(),
            of::<VmState>(),
            of::<VcpuState>(),
            of::<SavedPlatform>(),
            of::<SavedDevice>(),
        ]
    }

    /// Writes all sections.
    ///
    /// # Errors
    /// [`SnapshotError::Write`]: the destination fails, or a part has more bytes than can be read again.
    pub(super) fn put<W: std::io::Write>(&self, to: Writer<W>) -> Result<Writer<W>, SnapshotError> {
        let config = SavedConfig {
            json: serde_json::to_string(&self.config).map_err(SnapshotError::Config)?,
            ran: self.ran,
            upgrades: self.upgrades,
        };
        let mut to = to
            .put(0, &config)?
            .put(0, &self.vm)?
            .put(0, &self.platform)?;
        for (number, vcpu) in (0..).zip(&self.vcpus) {
            to = to.put(number, vcpu)?;
        }
        for (number, device) in (0..).zip(&self.devices) {
            to = to.put(number, device)?;
        }
        Ok(to)
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
        } = from.take(0)?;
        let this = Self {
            config: serde_json::from_str(&json).map_err(SnapshotError::Config)?,
            vm: from.take(0)?,
            vcpus: from.take_all()?,
            platform: from.take(0)?,
            devices: from.take_all()?,
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

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use devices::bus::Bus;
    use devices::legacy::clock::Clock;
    use devices::legacy::power::PowerSignal;
    use devices::legacy::serial::Serial;
    use devices::pci::{ConfigPorts, MmioWindow, PciBus};
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::snapshot::format::Section;

    fn platform() -> SavedPlatform {
        let window = MmioWindow::new(1 << 38, 1 << 30).unwrap();
        let pci = Arc::new(PciBus::new(&Arc::new(Bus::new()), window));
        let interrupt = Arc::new(EventFd::new(0).unwrap());
        SavedPlatform {
            serial: Serial::new(interrupt, Box::new(io::sink())).unwrap().save(),
            clock: Clock::new().save(),
            button: AcpiEventState { raised: true },
            hotplug: PciHotplugState {
                inserted: 1,
                removal: 2,
                ejectable: 3,
                ejected: 0,
            },
            pci: pci.save(),
            config_ports: ConfigPorts::new(pci.clone()).save(),
            power: PowerSignal::new().unwrap().save(),
            generation: None,
        }
    }

    #[test]
    fn a_platform_without_a_generation_id_is_read() {
        let platform = platform();
        let mut section = Section::encode(0, &platform).unwrap();
        assert_eq!(section.decode::<SavedPlatform>().unwrap(), platform);
        // The version before ended with the field before.
        assert_eq!((section.version, section.payload.pop()), (2, Some(0)));
        section.version = 1;
        assert_eq!(section.decode::<SavedPlatform>().unwrap(), platform);
        section.version = 2;
        assert!(section.decode::<SavedPlatform>().is_err());
    }
}
