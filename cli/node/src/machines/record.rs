//! The node's persistent record of a VM.
//!
//! ```text
//!   (none) ──> Creating ──> Present ──> Deleting ──> (none)
//!                 └── a step failed, or a daemon finds it so ──^
//! ```
//! A step enters the record before it is done, and leaves it after it is undone. So the record
//! never lists less than exists. Steps are in the order of their dependencies, and are undone from
//! the end.
//!
//! Owns the form of the record.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use bellhop_api::config::VmConfig;
use bellhop_api::machine::{End, EndReason};
use bellhop_api::merge_patch;
use serde::{Deserialize, Serialize, Serializer};
use vdpa_mgmt::pci::{Address, FormerDriver};

use super::incoming::IncomingMigration;
use super::outgoing::{GuestLocation, OutgoingMigration, Process, locate_guest};
use super::process::Identity;
use super::spec::{Desired, DeviceId, NicId, NicSpec, VmName, VmSpec};
use crate::peers::Peer;

/// The phase of a VM's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// Its steps are in progress, or were when their daemon ended.
    Creating,
    /// It exists.
    Present,
    /// Its steps are being undone, or were when their daemon ended or failed to undo them.
    Deleting,
}

/// A step that was begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step")]
pub(crate) enum Step {
    /// The VM's directories.
    Directories,
    /// The vDPA device of one of its NICs.
    Nic {
        /// The NIC.
        id: NicId,
        /// The device's name.
        device: String,
        /// Whether it is the NIC's backup device.
        #[serde(
            default,
            rename = "stand_by",
            skip_serializing_if = "std::ops::Not::not"
        )]
        backup: bool,
    },
    /// A function that was bound to vfio-pci for it.
    Function {
        /// Its former driver.
        former: FormerDriver,
        /// The boot ID of the host at that time: a binding ends with the boot.
        boot: String,
    },
    /// The process that runs the VM.
    Process {
        /// Its identity; none until it is known. Until then its mark identifies it.
        identity: Option<Identity>,
        /// The boot ID of the host at its start.
        boot: String,
    },
}

impl Step {
    /// The object that the step created, as a part of a sentence.
    pub(crate) fn part(&self) -> String {
        match self {
            Self::Directories => "its directories".to_owned(),
            Self::Nic {
                id, backup: true, ..
            } => format!("the backup device of NIC {id}"),
            Self::Nic { id, .. } => format!("the device of NIC {id}"),
            Self::Function { former, .. } => format!("the driver of {}", former.function),
            Self::Process { .. } => "its process".to_owned(),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directories => f.write_str("directories"),
            Self::Nic {
                id, backup: true, ..
            } => write!(f, "backup {id}"),
            Self::Nic { id, .. } => write!(f, "nic {id}"),
            Self::Function { former, .. } => write!(f, "function {}", former.function),
            Self::Process { .. } => f.write_str("process"),
        }
    }
}

/// The node's persistent record of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Its desired spec; the spec's state follows the last request.
    pub(crate) spec: VmSpec,
    /// Grows with each stored change of the spec; 1 in records from before it existed.
    #[serde(default = "first_generation")]
    pub(crate) generation: u64,
    /// The phase of its life.
    pub(crate) phase: Phase,
    /// Devices of NICs have records of their own (`vdpa_mgmt::nic`). Like the devices, those end
    /// with the host's boot: see [`Self::finds_device`].
    #[serde(serialize_with = "without_devices")]
    steps: Vec<Step>,
    /// The VM without devices as its process runs it, if `spec` has changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) running: Option<Box<VmConfig>>,
    /// The snapshot with which its process begins. Not stored: a daemon that finds the VM half
    /// created deletes it.
    #[serde(skip)]
    pub(crate) restore_from: Option<PathBuf>,
    /// The user and group of its process; none if it has those of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<u32>,
    /// How often the node has restarted it.
    pub(crate) restarts: u64,
    /// How it ended last.
    pub(crate) last_end: Option<End>,
    /// The mark of a VM that was requested to leave and has not reported since that its guest is
    /// here. Without a process the daemon does not start it.
    #[serde(default, rename = "departure")]
    pub(crate) outgoing: Option<OutgoingMigration>,
    /// The mark of a VM whose guest is to arrive from another node and, as far as is known, has not
    /// yet.
    #[serde(default, rename = "arrival")]
    pub(crate) incoming: Option<IncomingMigration>,
    /// Whether its guest was requested to power off and still runs. A starting daemon leaves it
    /// running.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) asked_to_power_off: bool,
    /// The boot of the host in which it no longer starts, although its desired state is running:
    /// the host was shutting down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) off_in_boot: Option<String>,
    /// NICs on devices that were not created for them, which the guest was requested to release and
    /// may still have.
    #[serde(default)]
    giving_up: BTreeSet<NicId>,
    /// NICs that were removed from the spec, as they were. The guest may still have those that it
    /// was requested to release.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    former_nics: BTreeMap<NicId, NicSpec>,
    /// Disks that its process was requested to remove and the guest may still have.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    removed_disks: BTreeSet<DeviceId>,
    /// The images of these disks, which the process still sees. Records of earlier versions have
    /// none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    removed_images: BTreeMap<DeviceId, PathBuf>,
    /// Functions by VFIO that the guest was requested to release and may still have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    removed_functions: BTreeMap<DeviceId, Address>,
    /// NICs that are on their backup device because their own has failed.
    #[serde(
        default,
        rename = "on_stand_by",
        skip_serializing_if = "BTreeSet::is_empty"
    )]
    on_backup: BTreeSet<NicId>,
    /// The VM of this name that left this node before, or that this one replaces. Its record is
    /// restored if the guest of this one does not arrive, or its creation fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    former: Option<Box<Record>>,
}

impl Record {
    /// The end of the VM that follows from the end of its process: the VM may have moved although
    /// the process did not report that.
    pub(crate) fn resulting_end(&mut self, end: End) -> End {
        let moved = end.reason == EndReason::Moved;
        match locate_guest(self.outgoing.as_ref(), Process::Gone(end.reason)) {
            GuestLocation::Here => end,
            GuestLocation::Unknown => {
                self.outgoing.get_or_insert_with(OutgoingMigration::unknown);
                end
            }
            GuestLocation::There => {
                self.outgoing = None;
                self.spec.state = Desired::Stopped;
                if moved {
                    end
                } else {
                    End {
                        reason: EndReason::Moved,
                        detail: format!("it was sent to another process; then {}", end.detail),
                    }
                }
            }
        }
    }

    /// The record of a VM for which no step was done yet.
    pub(crate) fn new(spec: VmSpec) -> Self {
        Self {
            spec,
            generation: first_generation(),
            phase: Phase::Creating,
            steps: Vec::new(),
            running: None,
            restore_from: None,
            user: None,
            restarts: 0,
            last_end: None,
            outgoing: None,
            incoming: None,
            asked_to_power_off: false,
            off_in_boot: None,
            giving_up: BTreeSet::new(),
            former_nics: BTreeMap::new(),
            removed_disks: BTreeSet::new(),
            removed_images: BTreeMap::new(),
            removed_functions: BTreeMap::new(),
            on_backup: BTreeSet::new(),
            former: None,
        }
    }

    /// The record of a VM whose guest is to arrive from another node.
    pub(crate) fn expecting(spec: VmSpec, incoming: IncomingMigration) -> Self {
        Self {
            incoming: Some(incoming),
            ..Self::new(spec)
        }
    }

    /// The record of a VM that begins with the snapshot at `path`, in which it has this
    /// configuration.
    pub(crate) fn restored(spec: VmSpec, path: PathBuf, saved: &VmConfig) -> Self {
        let running = VmConfig {
            vdpa: Vec::new(),
            disks: Vec::new(),
            vfio: Vec::new(),
            ..saved.clone()
        };
        Self {
            running: Some(Box::new(running)).filter(|running| **running != spec.fixed()),
            restore_from: Some(path),
            ..Self::new(spec)
        }
    }

    /// Changes the spec. The process keeps the VM that it runs.
    pub(crate) fn change_spec(&mut self, spec: VmSpec) {
        let former = std::mem::replace(&mut self.spec, spec);
        if self.process().is_some() {
            let running = self.running.take();
            let running = running.unwrap_or_else(|| Box::new(former.fixed()));
            self.running = Some(running).filter(|running| **running != self.spec.fixed());
        }
    }

    /// The VM as its process runs it; the disks are those of the spec.
    pub(crate) fn running(&self) -> &VmConfig {
        self.running.as_deref().unwrap_or(self.spec.machine())
    }

    /// Members of the VM, as JSON pointers, that take effect at the next start of its process.
    pub(crate) fn pending(&self) -> Vec<String> {
        let pending = self.running.as_ref().and_then(|running| {
            let running = serde_json::to_value(running).ok()?;
            let next = serde_json::to_value(self.spec.fixed()).ok()?;
            Some(merge_patch::pointers(&merge_patch::between(
                &running, &next,
            )))
        });
        let pending = pending.unwrap_or_default().into_iter();
        pending.map(|member| format!("/spec{member}")).collect()
    }

    /// Increments the generation if the spec differs from the last stored record of this name.
    pub(crate) fn count_change(&mut self, kept: Option<&Self>) {
        if let Some(kept) = kept {
            let change = u64::from(kept.spec != self.spec);
            self.generation = kept.generation.saturating_add(change);
        }
    }

    /// The specs whose devices are reserved for this VM: its own, and that of the former VM that
    /// may be restored.
    pub(crate) fn specs(&self) -> impl Iterator<Item = &VmSpec> {
        let former = self.former.as_deref().map(|former| &former.spec);
        std::iter::once(&self.spec).chain(former)
    }

    /// Replaces a VM that left this node or is to be replaced. This record takes over its steps, to
    /// undo them, and keeps the rest as `former`.
    pub(crate) fn replaces(&mut self, mut former: Self) {
        // By then its directories contain logs of its successor.
        self.steps = std::mem::replace(&mut former.steps, vec![Step::Directories]);
        self.former = Some(Box::new(former));
    }

    /// Restores the VM that this one was to replace, with the steps that could not be undone.
    /// Returns none if those include a process, or the device of a NIC that the former VM has in
    /// another form.
    pub(crate) fn restore_merged(&mut self) -> Option<Self> {
        let former = &self.former.as_ref()?.spec;
        let fits = |step: &Step| match step {
            Step::Directories => true,
            Step::Nic { id, .. } => {
                let nic = former.nic(id);
                nic.is_none() || nic == self.spec.nic(id)
            }
            // Its former driver is known.
            Step::Function { .. } => true,
            Step::Process { .. } => false,
        };
        if !self.steps.iter().all(fits) {
            return None;
        }
        let mut former = self.restore_previous()?;
        let left = std::mem::take(&mut self.steps);
        let others = left.into_iter().filter(|step| *step != Step::Directories);
        former.steps.extend(others);
        Some(former)
    }

    /// Restores the former VM, which is again the only one of its name.
    pub(crate) fn restore_previous(&mut self) -> Option<Self> {
        self.former.take().map(|former| *former)
    }

    /// Drops the former VM, so that nothing of the name is left once the steps are undone.
    pub(crate) fn forget_former(&mut self) {
        self.former = None;
    }

    /// Records that its guest is here. Returns whether that is new.
    pub(crate) fn arrives(&mut self) -> bool {
        self.former = None;
        self.incoming.take().is_some()
    }

    /// Whether it must be started: it should run, does not, and its guest does not run elsewhere.
    pub(crate) fn is_to_start(&self) -> bool {
        self.phase == Phase::Present
            && self.is_on()
            && self.process().is_none()
            && self.outgoing.is_none()
            && self.incoming.is_none()
    }

    /// Whether it should run in this boot of the host.
    pub(crate) fn is_on(&self) -> bool {
        self.spec.state == Desired::Running && self.off_in_boot.is_none()
    }

    /// Sets it to stopped: from now on or, if a boot of the host is given, for the rest of that
    /// boot.
    pub(crate) fn turn_off(&mut self, in_boot: Option<String>) {
        if in_boot.is_none() {
            self.spec.state = Desired::Stopped;
        }
        self.asked_to_power_off = false;
        self.off_in_boot = in_boot;
    }

    /// Sets it to running.
    pub(crate) fn turn_on(&mut self) {
        self.spec.state = Desired::Running;
        self.asked_to_power_off = false;
        self.off_in_boot = None;
    }

    /// The node to which it was sent, if to a node.
    pub(crate) fn peer(&self) -> Option<Peer> {
        let mark = self.outgoing.as_ref();
        mark.and_then(|mark| mark.peer.clone())
    }

    /// Its outgoing migration, if it may run elsewhere: no process of it can report that the guest
    /// is here.
    pub(crate) fn migration_unknown(&self) -> Option<&OutgoingMigration> {
        self.outgoing.as_ref().filter(|_| self.process().is_none())
    }

    /// Adds the step of a device whose own record says that it was created for this NIC.
    pub(crate) fn finds_device(&mut self, vm: &VmName, id: NicId, device: &str) {
        let step = Step::Nic {
            backup: device == vm.backup(&id),
            id,
            device: device.to_owned(),
        };
        if !self.steps.contains(&step) {
            self.steps.insert(self.place(&step), step);
        }
    }

    /// The begun steps, in the order of their dependencies.
    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The begun steps, mutable.
    pub(crate) fn steps_mut(&mut self) -> &mut Vec<Step> {
        &mut self.steps
    }

    /// The index at which a step belongs: NICs precede the process, which has them open.
    pub(crate) fn place(&self, step: &Step) -> usize {
        match step {
            Step::Process { .. } => self.steps.len(),
            Step::Directories => 0,
            Step::Nic { .. } | Step::Function { .. } => {
                self.process_at().unwrap_or(self.steps.len())
            }
        }
    }

    /// The device that was created for a NIC, as its own or as its backup.
    pub(crate) fn made(&self, nic: &NicId, is_backup: bool) -> Option<&str> {
        let mut all = self.all_created();
        let found = all.find(|(id, _, backup)| *id == nic && *backup == is_backup);
        found.map(|(_, device, _)| device)
    }

    /// All devices that were created for a NIC.
    pub(crate) fn created_for(&self, nic: &NicId) -> Vec<String> {
        let both = [true, false].map(|backup| self.made(nic, backup));
        both.into_iter().flatten().map(str::to_owned).collect()
    }

    /// The index of the step of this device.
    pub(crate) fn device_at(&self, name: &str) -> Option<usize> {
        let is_its = |step: &Step| matches!(step, Step::Nic { device, .. } if device == name);
        self.steps.iter().position(is_its)
    }

    /// The functions that are reserved for this VM: those of its specs and those that were bound
    /// for it. Its guest may still have removed ones, which count too.
    pub(crate) fn functions(&self) -> impl Iterator<Item = Address> {
        let specs = self.specs().flat_map(VmSpec::functions);
        let bound = self.bound_functions().map(|(_, former)| former.function);
        specs
            .chain(self.removed_functions.values().copied())
            .chain(bound)
    }

    /// Records that the guest must release a function. Without a process no guest has it.
    pub(crate) fn removes_function(&mut self, id: &DeviceId, function: Address) {
        if self.process().is_some() {
            self.removed_functions.insert(id.clone(), function);
        }
    }

    /// Records that the guest has released a function. Returns whether that was pending.
    pub(crate) fn mark_function_released(&mut self, id: &DeviceId) -> bool {
        self.removed_functions.remove(id).is_some()
    }

    /// Functions that the guest must release and may still have.
    pub(crate) fn removed_functions(&self) -> impl Iterator<Item = &DeviceId> {
        self.removed_functions.keys()
    }

    /// The functions that the guest has or may still have.
    pub(crate) fn functions_in_guest(&self) -> impl Iterator<Item = Address> {
        let removed = self.removed_functions.values().copied();
        self.spec.functions().chain(removed)
    }

    /// The former driver of a function that was bound to vfio-pci for it, with the position of the
    /// step.
    pub(crate) fn bound_function(&self, function: Address) -> Option<(usize, &FormerDriver)> {
        let mut bound = self.bound_functions();
        bound.find(|(_, former)| former.function == function)
    }

    fn bound_functions(&self) -> impl Iterator<Item = (usize, &FormerDriver)> {
        let steps = self.steps.iter().enumerate();
        steps.filter_map(|(place, step)| match step {
            Step::Function { former, .. } => Some((place, former)),
            _ => None,
        })
    }

    /// The functions that were bound for it and that neither its spec nor its guest has.
    pub(crate) fn unwanted_functions(&self) -> Vec<Address> {
        let wanted: Vec<Address> = self.functions_in_guest().collect();
        let bound = self.bound_functions().map(|(_, former)| former.function);
        bound
            .filter(|function| !wanted.contains(function))
            .collect()
    }

    /// Forgets functions that were bound in another boot of the host than this one. Returns whether
    /// there were any.
    pub(crate) fn forget_functions(&mut self, this_boot: &str) -> bool {
        let before = self.steps.len();
        let is_now =
            |step: &Step| !matches!(step, Step::Function { boot, .. } if boot != this_boot);
        self.steps.retain(is_now);
        self.steps.len() != before
    }

    /// Whether any device was created for a NIC.
    pub(crate) fn has_created(&self, nic: &NicId) -> bool {
        self.all_created().any(|(id, ..)| id == nic)
    }

    /// Whether a NIC is on its backup device.
    pub(crate) fn is_on_backup(&self, nic: &NicId) -> bool {
        self.on_backup.contains(nic)
    }

    /// Sets whether a NIC is on its backup device or on its own.
    pub(crate) fn set_on_backup(&mut self, nic: &NicId, on_backup: bool) {
        if on_backup {
            self.on_backup.insert(nic.clone())
        } else {
            self.on_backup.remove(nic)
        };
    }

    /// Sets all NICs to their own devices.
    pub(crate) fn clear_on_backup(&mut self) {
        self.on_backup.clear();
    }

    /// A NIC on its current device.
    pub(crate) fn nic_now(&self, vm: &VmName, nic: &NicSpec) -> NicSpec {
        let failed_over = self.is_on_backup(nic.id());
        let backup = nic.on_backup(vm).filter(|_| failed_over);
        backup.unwrap_or_else(|| nic.clone())
    }

    /// All NICs on their current devices.
    pub(crate) fn nics_now(&self, vm: &VmName) -> impl Iterator<Item = NicSpec> {
        self.spec.nics().iter().map(|nic| self.nic_now(vm, nic))
    }

    /// Whether this device was created for the VM.
    pub(crate) fn has_device(&self, name: &str) -> bool {
        self.device_at(name).is_some()
    }

    /// All created devices, with their NICs.
    fn all_created(&self) -> impl Iterator<Item = (&NicId, &str, bool)> {
        self.steps.iter().filter_map(|step| match step {
            Step::Nic { id, device, backup } => Some((id, device.as_str(), *backup)),
            _ => None,
        })
    }

    /// NICs for which a device was created.
    pub(crate) fn created_nics(&self) -> BTreeSet<NicId> {
        self.all_created().map(|(id, ..)| id.clone()).collect()
    }

    /// NICs that are no longer in the spec but for which a device was created.
    pub(crate) fn unwanted(&self) -> BTreeSet<NicId> {
        let mut unwanted = self.created_nics();
        unwanted.retain(|id| self.spec.nic(id).is_none());
        unwanted
    }

    /// Removes a NIC from the spec, and records that the guest must release it. A NIC with a
    /// created device has a step for that already.
    pub(crate) fn removes_nic(&mut self, nic: &NicId) {
        if let Some(former) = self.spec.nic(nic) {
            self.former_nics.insert(nic.clone(), former.clone());
        }
        self.spec = self.spec.without_nic(nic);
        if !self.has_created(nic) {
            self.giving_up.insert(nic.clone());
        }
    }

    /// Records that the guest has released a NIC. Returns whether only this record says that it had
    /// to.
    pub(crate) fn mark_released(&mut self, nic: &NicId) -> bool {
        self.former_nics.remove(nic);
        self.giving_up.remove(nic)
    }

    /// NICs that were removed from the spec and that the guest may still have, as they were.
    pub(crate) fn former_nics(&self) -> impl Iterator<Item = &NicSpec> {
        self.former_nics.values()
    }

    /// NICs that are no longer in the spec but that the guest may still have.
    pub(crate) fn unwanted_nics(&self) -> Vec<NicId> {
        let made = self.unwanted().into_iter();
        let others = self.giving_up.iter().cloned();
        made.chain(others.filter(|id| self.spec.nic(id).is_none()))
            .collect()
    }

    /// Removes a disk from the spec, and records that the guest must release it. Without a process
    /// no guest has it.
    pub(crate) fn removes_disk(&mut self, disk: &DeviceId) {
        if self.process().is_some() {
            self.removed_disks.insert(disk.clone());
            if let Some(former) = self.spec.disk(disk) {
                self.removed_images
                    .insert(disk.clone(), former.path.clone());
            }
        }
        self.spec = self.spec.without_disk(disk);
    }

    /// Records that the guest has released a disk. Returns whether that was pending.
    pub(crate) fn mark_disk_released(&mut self, disk: &DeviceId) -> bool {
        self.removed_images.remove(disk);
        self.removed_disks.remove(disk)
    }

    /// The image of a removed disk that the VM does not need once the guest has released the disk.
    /// Several disks may have the same read-only image.
    pub(crate) fn unneeded_image(&self, disk: &DeviceId) -> Option<&Path> {
        let image = self.removed_images.get(disk)?;
        let others = self.removed_images.iter().filter(|(id, _)| *id != disk);
        let others = others.map(|(_, path)| path.as_path());
        let files = self.spec.machine().files().chain(self.running().files());
        let is_needed = files.chain(others).any(|path| path == image);
        (!is_needed).then_some(image)
    }

    /// Disks that the guest must release and may still have.
    pub(crate) fn removed_disks(&self) -> &BTreeSet<DeviceId> {
        &self.removed_disks
    }

    /// Devices that were created for NICs of the spec that are on other devices now.
    pub(crate) fn left(&self) -> Vec<String> {
        let left = self.all_created().filter(|(id, _, backup)| {
            let nic = self.spec.nic(id);
            nic.is_some_and(|nic| !nic.is_created(*backup))
        });
        left.map(|(_, device, _)| device.to_owned()).collect()
    }

    /// The index of the process among the steps.
    pub(crate) fn process_at(&self) -> Option<usize> {
        let process = |step: &Step| matches!(step, Step::Process { .. });
        self.steps.iter().position(process)
    }

    /// The process that was started to run it: its identity, if known, and the boot of the host.
    pub(crate) fn process(&self) -> Option<(Option<Identity>, &str)> {
        self.steps.iter().find_map(|step| match step {
            Step::Process { identity, boot } => Some((*identity, boot.as_str())),
            _ => None,
        })
    }

    /// Records the identity of its process.
    pub(crate) fn identify(&mut self, which: Identity) {
        for step in &mut self.steps {
            if let Step::Process { identity, .. } = step {
                *identity = Some(which);
            }
        }
    }

    /// Removes the process from the steps.
    pub(crate) fn forget_process(&mut self) {
        self.steps
            .retain(|step| !matches!(step, Step::Process { .. }));
        self.asked_to_power_off = false;
        self.guest_ended();
    }

    /// Clears all that the guest had to release, because the guest has ended.
    pub(crate) fn guest_ended(&mut self) {
        self.running = None;
        self.giving_up.clear();
        self.former_nics.clear();
        self.removed_disks.clear();
        self.removed_images.clear();
        self.removed_functions.clear();
    }
}

fn first_generation() -> u64 {
    1
}

fn without_devices<S: Serializer>(steps: &[Step], serializer: S) -> Result<S::Ok, S::Error> {
    let others = steps
        .iter()
        .filter(|step| !matches!(step, Step::Nic { .. }));
    serializer.collect_seq(others)
}
