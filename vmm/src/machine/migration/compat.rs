//! What both hosts must have alike, said before a byte of memory goes over.
//!
//! Owns the document that the source sends and all reasons for which a destination refuses it. It comes from another
//! host, so nothing in it is trusted. It must not know how it is carried.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use devices::pci::Slot;
use devices::virtio::pci::{Relied, SwapError};
use serde::{Deserialize, Serialize};

use super::super::{End, Machine, MachineError, state_versions};
use crate::config::{VdpaConfig, VmConfig};
use crate::migration::protocol::Refusal;
use crate::vcpu::CpuidLeaf;

/// Most devices in a document: the slots of the PCI bus.
const DEVICES_MAX: usize = devices::pci::SLOTS as usize;

/// What a machine is made of.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document {
    /// The versions of what makes up its state, by name.
    pub(super) state_versions: BTreeMap<String, u32>,
    /// With the NICs that it has now.
    pub(super) config: VmConfig,
    /// What the guest was told of its first processor.
    pub(super) cpuid: Vec<CpuidLeaf>,
    pub(super) devices: Vec<DocumentDevice>,
}

/// A device, as far as its driver can rely on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DocumentDevice {
    pub(super) id: String,
    /// The number of its PCI slot.
    pub(super) slot: u8,
    pub(super) relied: Relied,
}

/// Why not, in the words of [`Refusal`].
fn refusal(what: &str, source: String, destination: String, remedy: &str) -> Refusal {
    Refusal {
        what: what.to_owned(),
        source,
        destination,
        remedy: remedy.to_owned(),
    }
}

impl Document {
    /// Checks what needs no machine, and gives the NICs their places here.
    ///
    /// # Errors
    /// All reasons that are known by now.
    pub(super) fn prepare(&mut self, nics: &[VdpaConfig]) -> Result<(), Vec<Refusal>> {
        let mut refusals = Vec::new();
        for (section, ours) in state_versions() {
            let version = self.state_versions.get(&section).copied();
            // The current version and the one before are read.
            let read = |version: u32| {
                version == ours || (version > 0 && version.checked_add(1) == Some(ours))
            };
            if !version.is_some_and(read) {
                refusals.push(refusal(
                    &format!("the state's part `{section}`"),
                    version.map_or_else(
                        || "absent".to_owned(),
                        |version| format!("of version {version}"),
                    ),
                    format!("of version {ours}"),
                    "run versions of Bellhop that are next to each other on both hosts",
                ));
            }
        }
        for nic in nics {
            if let Err(error) = replace_nic(&mut self.config, nic.clone()) {
                refusals.push(refusal(
                    &format!("the NIC {}", nic.name()),
                    "absent".to_owned(),
                    "given a device".to_owned(),
                    &error,
                ));
            }
        }
        if let Err(error) = check_movable(&self.config) {
            refusals.push(refusal(
                "the disks",
                "there".to_owned(),
                error.to_string(),
                "unplug them at the source first",
            ));
        }
        // Which of this host's devices a guest gets is for this host to say.
        for nic in &self.config.vdpa {
            let id = nic.name();
            if nics.iter().all(|ours| ours.name() != id) {
                refusals.push(refusal(
                    &format!("the NIC {id}"),
                    "there".to_owned(),
                    "given no device".to_owned(),
                    "say which, where the destination waits: --vdpa id=NAME,path=/dev/vhost-vdpa-N",
                ));
            }
        }
        let files = [Some(&self.config.kernel), self.config.initramfs.as_ref()];
        for path in files.into_iter().flatten() {
            if let Err(error) = look_at(path) {
                refusals.push(refusal(
                    "a file that the guest boots from",
                    path.display().to_string(),
                    format!("not to be opened ({error})"),
                    "put it there too: the guest's next reboot needs it",
                ));
            }
        }
        if self.devices.len() > DEVICES_MAX {
            refusals.push(refusal(
                "the list of devices",
                "longer than a machine can have".to_owned(),
                format!("limited to {DEVICES_MAX}"),
                "",
            ));
        }
        if refusals.is_empty() {
            Ok(())
        } else {
            Err(refusals)
        }
    }

    /// The slot of each device, as far as there are such slots. Two in one slot are found when the machine is built.
    pub(super) fn slots(&self) -> BTreeMap<String, Slot> {
        let slots = self.devices.iter().filter_map(|device| {
            let slot = Slot::new(device.slot).filter(|slot| *slot != Slot::HOST_BRIDGE)?;
            Some((device.id.clone(), slot))
        });
        slots.collect()
    }

    /// Why the guest cannot go on with `machine`, which was built for it.
    pub(super) fn compare(&self, machine: &Machine) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        if let Err(error) = machine.vcpus.check_cpuid(&self.cpuid) {
            refusals.push(refusal(
                "the processor",
                "what the guest was told of it".to_owned(),
                End::failed(&error).detail,
                "move to a host whose processor can do as much",
            ));
        }
        let here = machine.inventory.devices();
        for device in &here {
            if self.devices.iter().all(|there| there.id != device.id) {
                refusals.push(refusal(
                    &format!("device {}", device.id),
                    "absent".to_owned(),
                    "there".to_owned(),
                    "",
                ));
            }
        }
        for DocumentDevice { id, relied, .. } in &self.devices {
            let taken = machine
                .inventory
                .named(id)
                .map(|here| here.take_place(relied));
            match taken {
                Some(Ok(())) => {}
                Some(Err(error)) => refusals.push(refusal(
                    &format!("device {id}"),
                    "what the guest relies on".to_owned(),
                    format!("another one: {}", End::failed(&error).detail),
                    remedy(&error),
                )),
                None => refusals.push(refusal(
                    &format!("device {id}"),
                    "there".to_owned(),
                    "absent".to_owned(),
                    "",
                )),
            }
        }
        refusals
    }
}

/// What helps, in the words of the command line at the destination.
fn remedy(error: &SwapError) -> &'static str {
    match error {
        SwapError::Features { .. } => {
            "make the device with them there: bellhop dev add … device_features …"
        }
        SwapError::QueueCount { .. } => {
            "make the device with as many queue pairs there: bellhop dev add … max_vqp …"
        }
        _ => "",
    }
}

/// Whether a file can be read later. Another host names it, so what is no regular file is not opened: that could block,
/// or do something.
fn look_at(path: &Path) -> io::Result<()> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    // Whatever it has become meanwhile, nothing is waited for.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path);
    file.map(drop)
}

/// Says where a NIC is here. Its `id` is that of the NIC.
///
/// # Errors
/// There is no NIC of this name; which there are.
fn replace_nic(config: &mut VmConfig, nic: VdpaConfig) -> Result<(), String> {
    let id = nic.name();
    match config.vdpa.iter_mut().find(|saved| saved.name() == id) {
        Some(saved) => {
            *saved = nic;
            Ok(())
        }
        None => {
            let has: Vec<String> = config.vdpa.iter().map(VdpaConfig::name).collect();
            Err(format!("the machine's NICs: {}", has.join(", ")))
        }
    }
}

/// The machine cannot be built here.
pub(super) fn unbuildable(error: &MachineError) -> Refusal {
    refusal(
        "the machine",
        "built".to_owned(),
        format!("not to be built: {}", End::failed(error).detail),
        "",
    )
}

/// Why a machine cannot leave at all.
#[derive(Debug, thiserror::Error)]
pub enum NotMovable {
    /// Two hosts would have to hand over the lock of its image.
    #[error(
        "disk {0} cannot move: its image would have to be handed over; unplug it first (DELETE /v1/vm/disks/{0})"
    )]
    Disk(String),
    /// The destination would be built with it, and the guest is about to let it go.
    #[error("the guest was asked to eject {0}; try again when it has")]
    Unplugging(String),
}

/// Whether the machine with this configuration can leave.
///
/// # Errors
/// [`NotMovable`].
pub(super) fn check_movable(config: &VmConfig) -> Result<(), NotMovable> {
    match config.disks.iter().enumerate().next() {
        Some((number, disk)) => Err(NotMovable::Disk(disk.name(number))),
        None => Ok(()),
    }
}

/// Whether two configurations describe the same machine, however they are written.
pub(super) fn same_machine(one: &VmConfig, other: &VmConfig) -> bool {
    match (serde_json::to_value(one), serde_json::to_value(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}
