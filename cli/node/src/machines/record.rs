//! What the node remembers of a virtual machine.
//!
//! ```text
//!   (none) ──> Creating ──> Present ──> Deleting ──> (none)
//!                 └── a step failed, or a daemon finds it so ──^
//! ```
//! A step is in the record before it is done, and leaves it after it was undone; so what a record tells is never less than
//! what there is. Steps are in the order in which they depend on each other, and are undone from the end.
//!
//! Owns the form of the record. It must not know how a step is done.

use std::collections::BTreeSet;
use std::fmt;

use bellhop_api::config::VmConfig;
use bellhop_api::machine::{End, EndReason};
use bellhop_api::merge_patch;
use serde::{Deserialize, Serialize, Serializer};

use super::arrival::Arrival;
use super::departure::{Departure, Process, Verdict, judge};
use super::process::Identity;
use super::spec::{Desired, DeviceId, NicId, NicSpec, VmName, VmSpec};
use crate::peers::Peer;

/// How far a virtual machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// Its steps are being done, or were when the daemon that did them ended.
    Creating,
    /// It is there.
    Present,
    /// Its steps are being undone, or were when the daemon that did that ended, or failed at it.
    Deleting,
}

/// A step that was begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step")]
pub(crate) enum Step {
    /// The machine's directories.
    Directories,
    /// A vDPA device was made for one of its NICs.
    Nic {
        /// The NIC.
        id: NicId,
        /// The device's name.
        device: String,
        /// It stands by for the NIC's own.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        stand_by: bool,
    },
    /// A process was started to run it.
    Process {
        /// Which; none until that is known, when it can be found by its mark.
        identity: Option<Identity>,
        /// The boot of the host in which it was started.
        boot: String,
    },
}

impl Step {
    /// What it made, as a part of a sentence.
    pub(crate) fn part(&self) -> String {
        match self {
            Self::Directories => "its directories".to_owned(),
            Self::Nic {
                id, stand_by: true, ..
            } => format!("the device that stands by for NIC {id}"),
            Self::Nic { id, .. } => format!("the device of NIC {id}"),
            Self::Process { .. } => "its process".to_owned(),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directories => f.write_str("directories"),
            Self::Nic {
                id, stand_by: true, ..
            } => write!(f, "stand-by {id}"),
            Self::Nic { id, .. } => write!(f, "nic {id}"),
            Self::Process { .. } => f.write_str("process"),
        }
    }
}

/// What the node remembers of a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// As it is to be; its state follows what it was told last.
    pub(crate) spec: VmSpec,
    /// Grows with each change of the spec that is kept; 1 in records of before it was counted.
    #[serde(default = "first_generation")]
    pub(crate) generation: u64,
    /// How far it is.
    pub(crate) phase: Phase,
    /// Devices of NICs have records of their own (`vdpa_mgmt::nic`), which end with the host's boot as they do:
    /// see [`Self::finds_device`].
    #[serde(serialize_with = "without_devices")]
    steps: Vec<Step>,
    /// The machine without devices as its process runs it, where `spec` has changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) running: Option<Box<VmConfig>>,
    /// How often it was started again by the node.
    pub(crate) restarts: u64,
    /// How it ended the last time.
    pub(crate) last_end: Option<End>,
    /// It was asked to leave, and has not said since that its guest is here. Without a process nobody starts it.
    #[serde(default)]
    pub(crate) departure: Option<Departure>,
    /// Its guest is to come from another node, and is not here yet as far as is known.
    #[serde(default)]
    pub(crate) arrival: Option<Arrival>,
    /// Its guest was asked to power off and still runs. A daemon that starts leaves it running.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) asked_to_power_off: bool,
    /// The boot of the host in which it does not start any more, though it is to run: the host was
    /// shutting down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) off_in_boot: Option<String>,
    /// NICs on devices that were not made for them, which the guest was to give up and may have still.
    #[serde(default)]
    giving_up: BTreeSet<NicId>,
    /// Disks that its process was asked to remove, and that the guest may have still.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    removed_disks: BTreeSet<DeviceId>,
    /// NICs that are on the device that stands by for them, their own having failed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    on_stand_by: BTreeSet<NicId>,
    /// The machine of this name that left this node before, or that this one replaces. It has the
    /// place again if this one, whose guest is still to come or which is not created yet, does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    former: Option<Box<Record>>,
}

impl Record {
    /// The end of the machine that the end of its process stands for: the machine may have moved,
    /// although the process did not report that.
    pub(crate) fn account_of(&mut self, end: End) -> End {
        let moved = end.reason == EndReason::Moved;
        match judge(self.departure.as_ref(), Process::Gone(end.reason)) {
            Verdict::Here => end,
            Verdict::Open => {
                self.departure.get_or_insert_with(Departure::unknown);
                end
            }
            Verdict::There => {
                self.departure = None;
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

    /// Of a machine of which nothing was done yet.
    pub(crate) fn new(spec: VmSpec) -> Self {
        Self {
            spec,
            generation: first_generation(),
            phase: Phase::Creating,
            steps: Vec::new(),
            running: None,
            restarts: 0,
            last_end: None,
            departure: None,
            arrival: None,
            asked_to_power_off: false,
            off_in_boot: None,
            giving_up: BTreeSet::new(),
            removed_disks: BTreeSet::new(),
            on_stand_by: BTreeSet::new(),
            former: None,
        }
    }

    /// Of one whose guest is to come from another node.
    pub(crate) fn coming(spec: VmSpec, arrival: Arrival) -> Self {
        Self {
            arrival: Some(arrival),
            ..Self::new(spec)
        }
    }

    /// Changes its spec. Its process keeps the machine that it runs.
    pub(crate) fn change_spec(&mut self, spec: VmSpec) {
        let former = std::mem::replace(&mut self.spec, spec);
        if self.process().is_some() {
            let running = self.running.take();
            let running = running.unwrap_or_else(|| Box::new(former.fixed()));
            self.running = Some(running).filter(|running| **running != self.spec.fixed());
        }
    }

    /// The machine as its process runs it; its disks are those of the spec.
    pub(crate) fn running(&self) -> &VmConfig {
        self.running.as_deref().unwrap_or(self.spec.machine())
    }

    /// Members of the spec, as JSON pointers, that its process gets at its next start.
    pub(crate) fn pending(&self) -> Vec<String> {
        let pending = self.running.as_ref().and_then(|running| {
            let running = serde_json::to_value(running).ok()?;
            let next = serde_json::to_value(self.spec.fixed()).ok()?;
            Some(merge_patch::pointers(&merge_patch::between(
                &running, &next,
            )))
        });
        pending.unwrap_or_default()
    }

    /// Counts a change of the spec since the record of this name that was kept last.
    pub(crate) fn count_change(&mut self, kept: Option<&Self>) {
        if let Some(kept) = kept {
            let change = u64::from(kept.spec != self.spec);
            self.generation = kept.generation.saturating_add(change);
        }
    }

    /// The specs whose devices are this machine's: its own, and that of the one which may have the
    /// place again.
    pub(crate) fn specs(&self) -> impl Iterator<Item = &VmSpec> {
        let former = self.former.as_deref().map(|former| &former.spec);
        std::iter::once(&self.spec).chain(former)
    }

    /// Takes the place of one that left this node, or is replaced. Its steps are this one's to
    /// undo; the rest is remembered.
    pub(crate) fn takes_place_of(&mut self, mut former: Self) {
        // Logs of its successor are in its directories by then.
        self.steps = std::mem::replace(&mut former.steps, vec![Step::Directories]);
        self.former = Some(Box::new(former));
    }

    /// The machine that this one was to replace, with the steps that could not be undone. None if
    /// those are a process, or the device of a NIC that the former machine has in another way.
    pub(crate) fn gives_up_place(&mut self) -> Option<Self> {
        let former = &self.former.as_ref()?.spec;
        let fits = |step: &Step| match step {
            Step::Directories => true,
            Step::Nic { id, .. } => {
                let nic = former.nic(id);
                nic.is_none() || nic == self.spec.nic(id)
            }
            Step::Process { .. } => false,
        };
        if !self.steps.iter().all(fits) {
            return None;
        }
        let mut former = self.gives_place_back()?;
        let left = std::mem::take(&mut self.steps);
        let others = left.into_iter().filter(|step| *step != Step::Directories);
        former.steps.extend(others);
        Some(former)
    }

    /// The machine that had the place before, which is the only one of its name again.
    pub(crate) fn gives_place_back(&mut self) -> Option<Self> {
        self.former.take().map(|former| *former)
    }

    /// Nothing is to be left of the name once its steps are undone.
    pub(crate) fn forget_former(&mut self) {
        self.former = None;
    }

    /// Its guest is here. Whether that is news.
    pub(crate) fn arrives(&mut self) -> bool {
        self.former = None;
        self.arrival.take().is_some()
    }

    /// Whether it is to be started: it should run, does not, and its guest does not run elsewhere.
    pub(crate) fn is_to_start(&self) -> bool {
        self.phase == Phase::Present
            && self.is_on()
            && self.process().is_none()
            && self.departure.is_none()
            && self.arrival.is_none()
    }

    /// Whether it is to run in this boot of the host.
    pub(crate) fn is_on(&self) -> bool {
        self.spec.state == Desired::Running && self.off_in_boot.is_none()
    }

    /// It is not to run: from now on or, if a boot of the host is given, for the rest of that.
    pub(crate) fn turn_off(&mut self, in_boot: Option<String>) {
        if in_boot.is_none() {
            self.spec.state = Desired::Stopped;
        }
        self.asked_to_power_off = false;
        self.off_in_boot = in_boot;
    }

    /// It is to run.
    pub(crate) fn turn_on(&mut self) {
        self.spec.state = Desired::Running;
        self.asked_to_power_off = false;
        self.off_in_boot = None;
    }

    /// The node that it was sent to, if to one.
    pub(crate) fn peer(&self) -> Option<Peer> {
        let mark = self.departure.as_ref();
        mark.and_then(|mark| mark.peer.clone())
    }

    /// How it left, if it may be elsewhere: it has no process that could say that its guest is here.
    pub(crate) fn may_be_elsewhere(&self) -> Option<&Departure> {
        self.departure.as_ref().filter(|_| self.process().is_none())
    }

    /// A device was made for this NIC: so its own record says.
    pub(crate) fn finds_device(&mut self, vm: &VmName, id: NicId, device: &str) {
        let step = Step::Nic {
            stand_by: device == vm.stand_by(&id),
            id,
            device: device.to_owned(),
        };
        if !self.steps.contains(&step) {
            self.steps.insert(self.place(&step), step);
        }
    }

    /// What was begun, in the order in which it depends on each other.
    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The same, to be changed.
    pub(crate) fn steps_mut(&mut self) -> &mut Vec<Step> {
        &mut self.steps
    }

    /// Where a step belongs: NICs lie before the process, which has them open.
    pub(crate) fn place(&self, step: &Step) -> usize {
        match step {
            Step::Process { .. } => self.steps.len(),
            Step::Directories => 0,
            Step::Nic { .. } => self.process_at().unwrap_or(self.steps.len()),
        }
    }

    /// The device that was made for a NIC, as its own or to stand by for that.
    pub(crate) fn made(&self, nic: &NicId, to_stand_by: bool) -> Option<&str> {
        let mut all = self.all_made();
        let found = all.find(|(id, _, stand_by)| *id == nic && *stand_by == to_stand_by);
        found.map(|(_, device, _)| device)
    }

    /// All devices that were made for a NIC.
    pub(crate) fn all_made_for(&self, nic: &NicId) -> Vec<String> {
        let both = [true, false].map(|stand_by| self.made(nic, stand_by));
        both.into_iter().flatten().map(str::to_owned).collect()
    }

    /// The place of the step that tells of this device.
    pub(crate) fn device_at(&self, name: &str) -> Option<usize> {
        let is_its = |step: &Step| matches!(step, Step::Nic { device, .. } if device == name);
        self.steps.iter().position(is_its)
    }

    /// Whether any device was made for a NIC.
    pub(crate) fn has_made(&self, nic: &NicId) -> bool {
        self.all_made().any(|(id, ..)| id == nic)
    }

    /// Whether a NIC is on the device that stands by for it.
    pub(crate) fn is_on_stand_by(&self, nic: &NicId) -> bool {
        self.on_stand_by.contains(nic)
    }

    /// A NIC is to be on the device that stands by for it, or on its own.
    pub(crate) fn set_on_stand_by(&mut self, nic: &NicId, on_stand_by: bool) {
        if on_stand_by {
            self.on_stand_by.insert(nic.clone())
        } else {
            self.on_stand_by.remove(nic)
        };
    }

    /// All NICs are to be on their own devices.
    pub(crate) fn leave_stand_by(&mut self) {
        self.on_stand_by.clear();
    }

    /// A NIC on the device that it is on now.
    pub(crate) fn nic_now(&self, vm: &VmName, nic: &NicSpec) -> NicSpec {
        let failed_over = self.is_on_stand_by(nic.id());
        let stand_by = nic.on_stand_by(vm).filter(|_| failed_over);
        stand_by.unwrap_or_else(|| nic.clone())
    }

    /// All NICs on the devices that they are on now.
    pub(crate) fn nics_now(&self, vm: &VmName) -> impl Iterator<Item = NicSpec> {
        self.spec.nics().iter().map(|nic| self.nic_now(vm, nic))
    }

    /// Whether this device was made for it.
    pub(crate) fn has_device(&self, name: &str) -> bool {
        self.device_at(name).is_some()
    }

    /// All devices that were made, and the NICs for which they were.
    fn all_made(&self) -> impl Iterator<Item = (&NicId, &str, bool)> {
        self.steps.iter().filter_map(|step| match step {
            Step::Nic {
                id,
                device,
                stand_by,
            } => Some((id, device.as_str(), *stand_by)),
            _ => None,
        })
    }

    /// NICs for which a device was made.
    pub(crate) fn nics_made(&self) -> BTreeSet<NicId> {
        self.all_made().map(|(id, ..)| id.clone()).collect()
    }

    /// NICs that it is not to have any more, and for which a device was made.
    pub(crate) fn unwanted(&self) -> BTreeSet<NicId> {
        let mut unwanted = self.nics_made();
        unwanted.retain(|id| self.spec.nic(id).is_none());
        unwanted
    }

    /// The guest is to give a NIC up. One with a device of its own has a step that tells.
    pub(crate) fn gives_up(&mut self, nic: &NicId) {
        if !self.has_made(nic) {
            self.giving_up.insert(nic.clone());
        }
    }

    /// The guest has given a NIC up. Whether that was still to be done.
    pub(crate) fn gave_up(&mut self, nic: &NicId) -> bool {
        self.giving_up.remove(nic)
    }

    /// NICs that it is not to have any more, and that its guest may have.
    pub(crate) fn unwanted_nics(&self) -> Vec<NicId> {
        let made = self.unwanted().into_iter();
        let others = self.giving_up.iter().cloned();
        made.chain(others.filter(|id| self.spec.nic(id).is_none()))
            .collect()
    }

    /// The guest is to give a disk up. Without a process no guest has it.
    pub(crate) fn removes_disk(&mut self, disk: &DeviceId) {
        if self.process().is_some() {
            self.removed_disks.insert(disk.clone());
        }
    }

    /// The guest has given a disk up. Whether that was still to be done.
    pub(crate) fn gave_disk_up(&mut self, disk: &DeviceId) -> bool {
        self.removed_disks.remove(disk)
    }

    /// Disks that the guest is to give up, and may have still.
    pub(crate) fn removed_disks(&self) -> &BTreeSet<DeviceId> {
        &self.removed_disks
    }

    /// Devices that were made for NICs that it is to have, and to have on others by now.
    pub(crate) fn left(&self) -> Vec<String> {
        let left = self.all_made().filter(|(id, _, stand_by)| {
            let nic = self.spec.nic(id);
            nic.is_some_and(|nic| !nic.is_made(*stand_by))
        });
        left.map(|(_, device, _)| device.to_owned()).collect()
    }

    /// Where among the steps the process is.
    pub(crate) fn process_at(&self) -> Option<usize> {
        let process = |step: &Step| matches!(step, Step::Process { .. });
        self.steps.iter().position(process)
    }

    /// The process that was started to run it: which, if that is known, and in which boot of the host.
    pub(crate) fn process(&self) -> Option<(Option<Identity>, &str)> {
        self.steps.iter().find_map(|step| match step {
            Step::Process { identity, boot } => Some((*identity, boot.as_str())),
            _ => None,
        })
    }

    /// Which process it is has become known.
    pub(crate) fn identify(&mut self, which: Identity) {
        for step in &mut self.steps {
            if let Step::Process { identity, .. } = step {
                *identity = Some(which);
            }
        }
    }

    /// The process is gone.
    pub(crate) fn forget_process(&mut self) {
        self.steps
            .retain(|step| !matches!(step, Step::Process { .. }));
        self.asked_to_power_off = false;
        self.guest_ended();
    }

    /// Its guest has nothing any more.
    pub(crate) fn guest_ended(&mut self) {
        self.running = None;
        self.giving_up.clear();
        self.removed_disks.clear();
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
