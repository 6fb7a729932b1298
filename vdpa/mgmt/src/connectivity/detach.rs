//! The way back: each change of a record undone while it is still as it was made, the last one first.

use std::io;

use super::error::ConnectivityError;
use super::kernel::Kernel;
use super::record::{Attached, Change, FunctionVlan, LeftAlone, Subject, boot};
use crate::error::ErrorKind;
use crate::journal::Journal;
use crate::link::{Link, Links, PortVlan};
use crate::sriov::Vlan;
use vdpa::causes::in_one_line;

type Undone = Result<Option<LeftAlone>, ConnectivityError>;

/// Who keeps the record.
pub(super) type Note<'a> = &'a mut dyn FnMut(&Attached) -> io::Result<()>;

/// A connection whose changes are being made or undone.
pub(super) struct Attaching<'a, K> {
    pub(super) kernel: &'a K,
    pub(super) attached: Attached,
    name: String,
    note: Note<'a>,
    /// What was not undone, because it is no longer as it was made.
    left_alone: Vec<LeftAlone>,
    /// What was changed is gone, and with it all that there was to undo.
    gone: bool,
}

impl<'a, K: Kernel> Attaching<'a, K> {
    pub(super) fn new(kernel: &'a K, attached: Attached, note: Note<'a>) -> Self {
        Self {
            kernel,
            name: attached.subject.to_string(),
            attached,
            note,
            left_alone: Vec::new(),
            gone: false,
        }
    }

    fn take_back(&mut self) -> Result<Vec<LeftAlone>, ConnectivityError> {
        let not_undone = self.roll_back();
        if self.gone {
            return Ok(vec![LeftAlone::Gone(self.name.clone())]);
        }
        if not_undone.is_empty() {
            return Ok(std::mem::take(&mut self.left_alone));
        }
        let errors = not_undone.iter().filter_map(|(_, error)| error.as_ref());
        let problems: Vec<String> = errors.map(|error| in_one_line(error)).collect();
        Err(ConnectivityError::NotUndone {
            link: self.name.clone(),
            problems: problems.join("; "),
        })
    }

    /// Undoes what was done before this error.
    pub(super) fn roll_back_after(&mut self, error: ConnectivityError) -> ConnectivityError {
        // What others changed meanwhile is theirs.
        match self.take_back() {
            Err(ConnectivityError::NotUndone { link, problems }) => {
                ConnectivityError::NotTakenBack {
                    link,
                    problems,
                    source: Box::new(error),
                }
            }
            Ok(_) | Err(_) => error,
        }
    }

    fn undo_one(&self, change: &Change) -> Undone {
        match &self.attached.subject {
            Subject::Link { index, .. } => {
                // As it is after the step before.
                let link = self.kernel.link_at(*index)?;
                if self.attached.subject.is(&link) {
                    undo(self.kernel, &link, change, &self.attached.changes)
                } else {
                    Ok(Some(LeftAlone::Gone(self.name.clone())))
                }
            }
            Subject::VirtualFunction { physical, number } => {
                undo_function(self.kernel, physical, *number, change)
            }
        }
    }
}

impl<K: Kernel> Journal for Attaching<'_, K> {
    type Step = Change;
    type Error = ConnectivityError;

    fn name(&self) -> &str {
        &self.name
    }

    fn steps(&mut self) -> &mut Vec<Change> {
        &mut self.attached.changes
    }

    fn persist(&mut self) -> Result<(), ConnectivityError> {
        (self.note)(&self.attached).map_err(ConnectivityError::NotNoted)
    }

    fn undo(&mut self, change: &Change) -> Result<(), ConnectivityError> {
        if self.gone {
            return Ok(());
        }
        match self.undo_one(change) {
            Ok(Some(LeftAlone::Gone(_))) => self.gone = true,
            Err(ConnectivityError::Mgmt(error)) if error.is_missing() => self.gone = true,
            undone => self.left_alone.extend(undone?),
        }
        Ok(())
    }
}

impl Attached {
    /// Undoes the changes, the last one first, and returns those that others have overridden since.
    /// A second call does nothing.
    ///
    /// # Errors
    /// [`ConnectivityError::NotUndone`] if something failed; the rest is undone all the same.
    pub fn detach(&self, links: &Links) -> Result<Vec<LeftAlone>, ConnectivityError> {
        detach(links, self, boot().as_deref())
    }
}

pub(super) fn detach(
    kernel: &impl Kernel,
    attached: &Attached,
    boot: Option<&str>,
) -> Result<Vec<LeftAlone>, ConnectivityError> {
    let mut note = |_: &Attached| Ok(());
    let mut detaching = Attaching::new(kernel, attached.clone(), &mut note);
    detaching.gone = attached.boot.as_deref() != boot && !attached.changes.is_empty();
    detaching.take_back()
}

fn undo(kernel: &impl Kernel, link: &Link, change: &Change, all: &[Change]) -> Undone {
    match change {
        Change::Up => {
            if link.up {
                kernel.set_down(link)?;
            }
            Ok(None)
        }
        Change::Mtu { before, after } => {
            if link.mtu == *after {
                kernel.set_mtu(link, *before)?;
            } else if link.mtu != *before {
                return Ok(Some(LeftAlone::Mtu {
                    link: link.name.clone(),
                    now: link.mtu,
                }));
            }
            Ok(None)
        }
        Change::Bridge { index } => match link.master {
            None => Ok(None),
            Some(now) if now == *index => {
                kernel.clear_master(link)?;
                Ok(None)
            }
            Some(now) => Ok(Some(LeftAlone::Master {
                link: link.name.clone(),
                now,
            })),
        },
        // VLANs of another bridge are not those that were changed; a port that left has none.
        Change::VlanAdded { bridge, .. } | Change::VlanRemoved { bridge, .. }
            if link.master != Some(*bridge) =>
        {
            Ok(None)
        }
        Change::VlanAdded {
            before,
            after,
            former_pvid,
            ..
        } => {
            let undone = leave_vlan(kernel, link, *before, *after)?;
            if let Some(former) = former_pvid {
                make_pvid_again(kernel, link, *former)?;
            }
            Ok(undone)
        }
        Change::VlanRemoved { before, .. } => put_back(kernel, link, *before, all),
        Change::FunctionVlan { .. } => Ok(None),
    }
}

/// Takes a port out of the VLAN that it was put into, or makes it there what it was.
fn leave_vlan(
    kernel: &impl Kernel,
    link: &Link,
    before: Option<PortVlan>,
    after: PortVlan,
) -> Undone {
    let now = kernel.vlans(link)?;
    let now = now.into_iter().find(|one| one.vlan == after.vlan);
    if now == before {
        return Ok(None);
    }
    // It may be the VLAN of untagged frames no longer: the former one was put back before.
    match (now, before) {
        (Some(now), None) if now.untagged == after.untagged => {
            kernel.remove_vlan(link, after.vlan)?;
        }
        (Some(now), Some(before)) if now.untagged == after.untagged => {
            kernel.add_vlan(link, before)?;
        }
        _ => {
            return Ok(Some(LeftAlone::Vlan {
                link: link.name.clone(),
                vlan: after.vlan,
            }));
        }
    }
    Ok(None)
}

/// Frames without a tag are in this VLAN again, if the port is still in it and they are in no other.
fn make_pvid_again(
    kernel: &impl Kernel,
    link: &Link,
    former: PortVlan,
) -> Result<(), ConnectivityError> {
    let now = kernel.vlans(link)?;
    let is_there = now
        .iter()
        .any(|one| one.vlan == former.vlan && one.untagged == former.untagged);
    if is_there && !now.iter().any(|one| one.pvid) {
        kernel.add_vlan(link, former)?;
    }
    Ok(())
}

/// Puts a port back into a VLAN that it was taken out of.
fn put_back(kernel: &impl Kernel, link: &Link, before: PortVlan, all: &[Change]) -> Undone {
    let now = kernel.vlans(link)?;
    let left_alone = Some(LeftAlone::Vlan {
        link: link.name.clone(),
        vlan: before.vlan,
    });
    if let Some(now) = now.iter().find(|one| one.vlan == before.vlan) {
        return Ok(left_alone.filter(|_| *now != before));
    }
    // It would take untagged frames from a VLAN that somebody chose since.
    let ours = all.iter().any(|change| match change {
        Change::VlanAdded { after, .. } => now.iter().any(|one| one.pvid && one.vlan == after.vlan),
        _ => false,
    });
    if before.pvid && !ours && now.iter().any(|one| one.pvid) {
        return Ok(left_alone);
    }
    kernel.add_vlan(link, before)?;
    Ok(None)
}

fn undo_function(kernel: &impl Kernel, physical: &str, number: u32, change: &Change) -> Undone {
    let Change::FunctionVlan { before, after } = change else {
        return Ok(None);
    };
    let now = kernel.function_vlan(physical, number)?;
    let kept = now.map(FunctionVlan::from);
    match now {
        Some(vlan) if kept == *before && kept != Some(*after) => {
            tracing::debug!(?vlan, "the VLAN is as it was");
            return Ok(None);
        }
        Some(vlan) if kept != Some(*after) => {
            return Ok(Some(LeftAlone::FunctionVlan {
                physical: physical.to_owned(),
                number,
                now: vlan.id(),
            }));
        }
        _ => {}
    }
    // A driver that did not tell had none.
    let before = match before {
        Some(before) => Vlan::try_from(*before)?,
        None => Vlan::NONE,
    };
    match kernel.set_function_vlan(physical, number, before) {
        // A driver that tells no VLAN and has no such setting did not make it either.
        Err(error) if error.kind() == ErrorKind::NotSupported && now.is_none() => Ok(None),
        set => Ok(set.map(|()| None)?),
    }
}
