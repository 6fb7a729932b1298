//! Undoes the changes of a record, the last one first, each only while it is still unchanged.

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

/// Stores the record.
pub(super) type Note<'a> = &'a mut dyn FnMut(&Attached) -> io::Result<()>;

/// A connection whose changes are being done or undone.
pub(super) struct Attaching<'a, K> {
    pub(super) kernel: &'a K,
    pub(super) attached: Attached,
    name: String,
    note: Note<'a>,
    /// Changes that were not undone, because others have changed the setting since.
    left_alone: Vec<LeftAlone>,
    /// The interface or function no longer exists, so there is nothing to undo.
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

    fn undo_attachment(&mut self) -> Result<Vec<LeftAlone>, ConnectivityError> {
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

    /// Undoes the changes before this error.
    pub(super) fn roll_back_after(&mut self, error: ConnectivityError) -> ConnectivityError {
        // Changes by others meanwhile stay.
        match self.undo_attachment() {
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
                // The state after the step before.
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
    /// [`ConnectivityError::NotUndone`] if a step failed; the others are undone nevertheless.
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
    detaching.undo_attachment()
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
        // VLANs of another bridge are not the changed ones; a port that left its bridge has none.
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

/// Removes a port from the VLAN that it was added to, or restores its former state there.
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
    // The VLAN may no longer be the one of untagged frames: the former one was restored before.
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

/// Makes this VLAN that of untagged frames again, if the port is still in it and they have no other
/// one.
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

/// Restores a VLAN that the port was removed from.
fn put_back(kernel: &impl Kernel, link: &Link, before: PortVlan, all: &[Change]) -> Undone {
    let now = kernel.vlans(link)?;
    let left_alone = Some(LeftAlone::Vlan {
        link: link.name.clone(),
        vlan: before.vlan,
    });
    if let Some(now) = now.iter().find(|one| one.vlan == before.vlan) {
        return Ok(left_alone.filter(|_| *now != before));
    }
    // Restoring it would take untagged frames from a VLAN that was chosen since.
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
            tracing::debug!(?vlan, "the VLAN is unchanged");
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
    // A driver that reports no VLAN had none.
    let before = match before {
        Some(before) => Vlan::try_from(*before)?,
        None => Vlan::NONE,
    };
    match kernel.set_function_vlan(physical, number, before) {
        // A driver that reports no VLAN and lacks the setting did not change it either.
        Err(error) if error.kind() == ErrorKind::NotSupported && now.is_none() => Ok(None),
        set => Ok(set.map(|()| None)?),
    }
}
