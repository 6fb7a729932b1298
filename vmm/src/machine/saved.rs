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
//! | `vfio` | for each function: name, slot, registers, its driver's data |
//! | `vfio-view` | for each function of a snapshot: name, slot, properties that the guest sees |
//! | `device` | for each device, in order of attachment: name, slot, registers, backend state |

use std::collections::BTreeMap;

use devices::legacy::clock::ClockState;
use devices::legacy::event::AcpiEventState;
use devices::legacy::power::PowerState;
use devices::legacy::serial::SerialState;
use devices::pci::{ConfigPortsState, PciBusState, PciHotplugState, SLOTS, Slot};
use devices::vfio::{FunctionView, VfioState};
use devices::virtio::iommu::{DOMAINS_STATE_VERSION, DomainsState};
use devices::virtio::pci::VirtioPciState;
use serde::{Deserialize, Serialize};

use super::error::SnapshotError;
use super::generation::GenerationState;
use crate::config::{CpuCount, VfioConfig, VmConfig};
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

/// The state of a function of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedFunction {
    /// Its name.
    pub(super) id: String,
    /// The number of its PCI slot.
    pub(super) slot: u8,
    pub(super) state: VfioState,
}

/// A function of the host as the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GuestFunction {
    /// Its name.
    pub(super) id: String,
    /// The number of its PCI slot.
    pub(super) slot: u8,
    /// The properties on which its driver in the guest can rely.
    pub(super) view: FunctionView,
}

/// Limit of the data of all functions, in bytes.
pub(super) const FUNCTIONS_MAX: usize = 128 << 20;

/// Limit of the early data of all functions, in bytes. The rest comes with their states.
pub(super) const EARLY_MAX: usize = 64 << 20;

/// Early data of a function, as one message of a migration.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EarlyState<'a> {
    pub(super) id: &'a str,
    pub(super) data: &'a [u8],
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
    // Each one's registers and MSI-X table take less than 64 KiB.
    Vec<SavedFunction>: "vfio", 2, FUNCTIONS_MAX as u64 + ((SLOTS as u64) << 16), SLOTS as u32;
    Vec<GuestFunction>: "vfio-view", 1, (SLOTS as u64) << 12, SLOTS as u32;
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
    /// In the order of attachment.
    pub(super) functions: Vec<SavedFunction>,
    /// Those of a snapshot. A migration compares them before.
    pub(super) views: Vec<GuestFunction>,
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
        if !self.functions.is_empty() {
            sections.put(&self.functions)?;
        }
        if !self.views.is_empty() {
            sections.put(&self.views)?;
        }
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
            functions: from.take_optional()?.unwrap_or_default(),
            views: from.take_optional()?.unwrap_or_default(),
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
        let states = this.functions.iter().map(|one| one.id.as_str());
        check_functions(&this.config.vfio, states)?;
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
        let devices = self.devices.iter().map(|device| (&device.id, device.slot));
        let functions = self.functions.iter().map(|one| (&one.id, one.slot));
        for (id, number) in devices.chain(functions) {
            let slot = Slot::new(number).filter(|slot| {
                *slot != Slot::HOST_BRIDGE && slots.values().all(|other| other != slot)
            });
            let known = slot.map(|slot| slots.insert(id.clone(), slot));
            if known != Some(None) {
                return Err(SnapshotError::Slot {
                    id: id.clone(),
                    slot: number,
                });
            }
        }
        Ok(slots)
    }
}

/// Checks that each function has one saved part, and each part a function.
pub(super) fn check_functions<'a>(
    configured: &[VfioConfig],
    saved: impl Iterator<Item = &'a str>,
) -> Result<(), SnapshotError> {
    let mut states: Vec<&str> = saved.collect();
    for id in configured.iter().map(VfioConfig::name) {
        let Some(index) = states.iter().position(|state| *state == id) else {
            return Err(SnapshotError::DeviceNotSaved(id));
        };
        states.swap_remove(index);
    }
    match states.first() {
        Some(id) => Err(SnapshotError::NoDevice((*id).to_owned())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use devices::pci::{ConfigSpaceState, MsixState};
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    fn state(id: &str) -> SavedFunction {
        SavedFunction {
            id: id.to_owned(),
            slot: 3,
            state: VfioState {
                config_space: ConfigSpaceState { bytes: vec![1] },
                msix: MsixState {
                    entries: Vec::new(),
                },
                early: 0,
                data: vec![7; 3],
            },
        }
    }

    fn view(id: &str) -> GuestFunction {
        GuestFunction {
            id: id.to_owned(),
            slot: 3,
            view: FunctionView {
                config: vec![0xff; 256],
                sizes: vec![u64::MAX; 6],
            },
        }
    }

    /// Changes a byte of a section, or cuts it there.
    fn is_read_or_refused<S>(section: &S, at: Index, byte: u8, cut: bool)
    where
        S: Saved + PartialEq + std::fmt::Debug,
    {
        let mut payload = postcard::to_allocvec(section).unwrap();
        assert_eq!(&decode::<S>(&payload).unwrap(), section);
        let at = at.index(payload.len());
        payload[at] = byte;
        if cut {
            payload.truncate(at);
        }
        assert!(decode::<S>(&payload).is_err() || !cut);
    }

    proptest! {
        #[test]
        fn functions_are_read_or_refused(at in any::<Index>(), byte: u8, cut: bool) {
            is_read_or_refused(&vec![state("a"), state("b")], at, byte, cut);
            is_read_or_refused(&vec![view("a"), view("b")], at, byte, cut);
        }
    }

    #[test]
    fn the_largest_views_fit_into_their_section() {
        let most = usize::from(SLOTS);
        let views = |count| vec![view(&"n".repeat(255)); count];
        let mut sections = Sections::default();
        sections.put(&views(most)).unwrap();
        assert_eq!(sections.take::<Vec<GuestFunction>>().unwrap(), views(most));
        sections.put(&views(most + 1)).unwrap();
        sections.take::<Vec<GuestFunction>>().unwrap_err();
    }

    #[test]
    fn too_much_data_of_functions_is_not_sent() {
        let mut large = state("a");
        large.state.data = vec![0; FUNCTIONS_MAX + (usize::from(SLOTS) << 16)];
        Sections::default().put(&vec![large]).unwrap_err();
    }

    #[test]
    fn states_of_functions_belong_to_functions() {
        let configured = |ids: &[&str]| -> Vec<VfioConfig> {
            let parse = |id: &&str| format!("host=0000:03:10.1,id={id}").parse().unwrap();
            ids.iter().map(parse).collect()
        };
        let check = |ids: &[&str], states: &[&str]| {
            check_functions(&configured(ids), states.iter().copied())
        };
        check(&[], &[]).unwrap();
        check(&["a", "b"], &["b", "a"]).unwrap();
        for (ids, states) in [
            (&["a"][..], &[][..]),
            (&[], &["a"]),
            (&["a"], &["b"]),
            (&["a"], &["a", "a"]),
            (&["a", "a"], &["a"]),
        ] {
            check(ids, states).unwrap_err();
        }
    }

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
